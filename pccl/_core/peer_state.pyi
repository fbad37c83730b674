from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

from pccl.options import Options
from pccl.records import record

from .wiring import Wiring

NEW: Final[str]
DIALLING: Final[str]
JOINING: Final[str]
MEMBER: Final[str]
GONE: Final[str]

@record
class Call:
    slot: int
    sequence: int
    number: int

@final
class PeerState:
    def __init__(self, options: Options, now_ns: int = 0) -> None: ...
    @property
    def options(self) -> Options: ...
    @property
    def phase(self) -> str: ...
    @property
    def id(self) -> int: ...
    @property
    def wiring(self) -> Wiring: ...
    @property
    def calls(self) -> dict[str, Call]: ...
    @property
    def connecting(self) -> Call | None: ...
    @property
    def attempts_left(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def ending(self) -> tuple[int, int, str]: ...
    @property
    def next_deadline_ns(self) -> int: ...
    @property
    def story(self) -> deque[tuple[int, Any, list[Any]]]: ...
    def new_link(self) -> int: ...
    def handle(self, event: Any, now_ns: int) -> list[Any]: ...
    def check(self) -> None: ...

TRANSITIONS: dict[tuple[str, type[Any]], Callable[[PeerState, Any], None]]
IGNORED: frozenset[type[Any]]

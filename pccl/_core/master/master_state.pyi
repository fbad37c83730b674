from collections import deque
from collections.abc import Callable
from typing import Any, Final, Self, final

from pccl.options import Options

from .group_affairs import Affairs
from .roster import Peer

TOPOLOGY: Final[str]
PENDING: Final[str]

@final
class MasterState(Affairs):
    def __init__(self, run: bytes, options: Options, now_ns: int = 0) -> None: ...
    @property
    def held(self) -> bool: ...
    @property
    def next_deadline_ns(self) -> int: ...
    @property
    def story(self) -> deque[tuple[int, Any, list[Any]]]: ...
    def handle(self, event: Any, now_ns: int) -> list[Any]: ...
    def snapshot(self) -> dict[str, Any]: ...
    @classmethod
    def restore(cls, snapshot: dict[str, Any], options: Options, now_ns: int = 0) -> Self: ...
    def check(self) -> None: ...

TRANSITIONS: dict[tuple[str, type[Any]], Callable[[MasterState, Peer, Any], None]]

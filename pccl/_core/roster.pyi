from typing import Final, final

from .messages import Register

REGISTERED: Final[str]
ACCEPTED: Final[str]

@final
class Peer:
    phase: str
    heard_ns: int
    phase_ns: int
    warned: bool
    tx_bytes: int
    rx_bytes: int
    def __init__(self, peer_id: int, conn: int, register: Register, host: str, now_ns: int) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def conn(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...

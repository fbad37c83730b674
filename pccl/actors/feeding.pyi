import socket
from typing import Any

from pccl._core.door import Door
from pccl._core.peer_state import PeerState
from pccl.memory.slots import SlotTable
from pccl.memory.window import Window

from .connection import Connection
from .faults import Fault
from .loop import Loop, Watcher
from .reducing import Reducing

PERFORMED_HERE: tuple[type[Any], ...]

class Feeding(Watcher):
    state: PeerState | None
    master: Connection | None
    reducing: Reducing
    windows: dict[tuple[int, int], Window]
    door: Door | None
    rhythm_ns: int
    def __init__(self, mailbox: socket.socket, slots: SlotTable, fault: Fault | None) -> None: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def slots(self) -> SlotTable: ...
    @property
    def mailbox(self) -> socket.socket: ...
    def feed(self, event: Any) -> None: ...
    def hear(self, number: int, message: Any) -> None: ...
    def deadline(self) -> int: ...

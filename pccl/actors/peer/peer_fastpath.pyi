import socket
from collections.abc import Callable
from typing import Any

from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol.handshake import PendingConnections
from pccl.actors.io.connection import Connection
from pccl.actors.io.fault_points import Fault
from pccl.actors.io.loop import Loop, Watcher
from pccl.memory.completion_slots import SlotTable
from pccl.memory.window import Window

from .op_runner import OpRunner

PERFORMED_HERE: tuple[type[Any], ...]

class PeerFastpath(Watcher):
    state: PeerState | None
    master: Connection | None
    op_runner: OpRunner
    windows: dict[tuple[int, int], Window]
    trace: object
    pending: PendingConnections | None
    rhythm_ns: int
    def __init__(
        self,
        loop: Loop,
        mailbox: socket.socket,
        slots: SlotTable,
        fault: Fault | None,
        *,
        perform: Callable[[Any], None],
        receive: Callable[[Any, int], None],
        app_gone: Callable[[str], None],
    ) -> None: ...
    def feed(self, event: Any) -> None: ...
    def heard(self, number: int, message: Any) -> None: ...
    def deadline(self) -> int: ...

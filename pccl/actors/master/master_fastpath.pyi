from collections.abc import Callable
from typing import Any

from pccl._core.master.master_state import MasterState
from pccl._core.protocol.handshake import PendingConnections
from pccl.actors.io.connection import Connection
from pccl.actors.io.loop import Loop

class MasterFastpath:
    trace: object
    pending: PendingConnections | None
    def __init__(self, state: MasterState, loop: Loop, perform: Callable[[Any], None]) -> None: ...
    @property
    def connections(self) -> dict[int, Connection]: ...
    def heard(self, number: int, message: Any) -> None: ...
    def feed(self, event: Any) -> int: ...
    def deadline(self) -> int: ...

from collections.abc import Callable, Iterable
from typing import Any, Final, final

from pccl._core.records import record
from pccl.actors.io.fault_points import Fault
from pccl.errors import PCCLError
from pccl.memory.completion_slots import Slot, SlotTable

WAIT_SLICE_NS: Final[int]

@final
@record
class Callbacks:
    gone: Callable[[str], PCCLError]
    full: Callable[[str], None]
    check: Callable[[str, Slot | None], None]
    catch_up: Callable[[], bool]
    send_descriptors: Callable[[str, bytes, tuple[int, ...]], None]
    share: Callable[[str, Iterable[int], Callable[[int], tuple[int, int]]], None]

@final
class CallSlots:
    fd: int
    shared: set[int]
    looked_ns: int
    noticed_ns: int
    over: bool
    @property
    def table(self) -> SlotTable: ...
    @property
    def fault(self) -> Fault | None: ...
    def __init__(
        self, table: SlotTable, fault: Fault | None, callbacks: Callbacks, *, look_ns: int, notice_ns: int
    ) -> None: ...
    def acquire(self, name: str) -> Slot: ...
    def post(self, name: str, message: Any, fds: tuple[int, ...] = ()) -> None: ...
    def wait(self, name: str, slot: Slot, slice_ns: int = ...) -> bool: ...
    def take(self, slot: Slot) -> tuple[int, bytes]: ...

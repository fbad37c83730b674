"""The blocking calls of a training process that are votes: one at a time of each name, each with a number of its own.

An answer with a number that no call has any more is dropped, so a late answer to a call that was given up is never
taken for the answer to the next one. All calls of a peer share these numbers, which start again at 1 after four
billion.

Part of the peer's machine, which says what a vote means; pure.
"""

from __future__ import annotations

from pccl._core.protocol.messages import Withdraw
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_CANCELLED, KIND_PLAIN
from pccl._core.records import record

from .events import Complete, SendMaster

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .outbox import Outbox


@record
class Call:
    """A call of the training process that is under way."""

    slot: int
    generation: int
    number: int


class Calls:
    """All votes that have no answer yet."""

    __slots__ = ("_next_number", "_outbox", "open")

    def __init__(self, outbox: Outbox) -> None:
        self.open: dict[str, Call] = {}  # name of the call -> the one under way
        self._next_number = 1
        self._outbox = outbox

    def number(self) -> int:
        """Return a number for the next vote."""
        number = self._next_number
        self._next_number = number % 0xFFFFFFFF + 1
        return number

    def enter(self, name: str, call: Any) -> int:
        """Open a call. Return the number of its vote, or 0 if another thread of this process is in the same call."""
        if name in self.open:
            self.complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is already in {name}")
            return 0
        number = self.number()
        self.open[name] = Call(call.slot, call.generation, number)
        return number

    def take(self, number: int) -> Call | None:
        """Remove and return the call with this number; None if it was given up."""
        for name, call in self.open.items():
            if call.number == number:
                del self.open[name]
                return call
        return None

    def cancel(self, cancel: Any) -> None:
        """The caller of that slot gave up: withdraw its vote."""
        for name, call in list(self.open.items()):
            if call.slot == cancel.slot and call.generation == cancel.generation:
                del self.open[name]
                self._outbox.actions.append(SendMaster(Withdraw(call.number)))
                self.complete(call, INVALID_USAGE, KIND_CANCELLED, "given up by its caller")

    def end(self, result: int, kind: int, text: str) -> None:
        """The membership is over: complete every call with this outcome."""
        calls = list(self.open.values())
        self.open.clear()
        for call in calls:
            self.complete(call, result, kind, text)

    def complete(self, call: Any, result: int, kind: int, text: str) -> None:
        """Complete the slot of a call with a text."""
        self._outbox.actions.append(Complete(call.slot, call.generation, result, kind, text.encode()))

    def check(self) -> None:
        """Invariants between two events."""
        numbers = [call.number for call in self.open.values()]
        assert len(set(numbers)) == len(numbers), f"two calls with one number: {self.open}"

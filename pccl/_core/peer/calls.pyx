# cython: language_level=3
"""The blocking calls of a training process that are votes: one at a time of each name, each with a number of its own.

An answer to a number that nobody waits for any more is dropped: so a call that was given up can never be mistaken for
the one that came after it. Numbers are shared by all calls of a peer, and go round after four billion of them.

Part of the peer's machine, which says what a vote means; pure.
"""

from pccl._core.protocol.messages import Withdraw
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_CANCELLED, KIND_PLAIN
from pccl._core.records import record

from .events import Complete, SendMaster


@record
class Call:
    """A call of the training process that is under way."""

    slot: int
    sequence: int
    number: int


cdef class Calls:
    """All votes that have no answer yet."""

    def __init__(self):
        self.open = {}
        self.next_number = 1
        self.actions = []

    cdef begin(self, list actions):
        """An event is being handled: where its actions go."""
        self.actions = actions

    def number(self):
        """The next vote's."""
        number = self.next_number
        self.next_number = number % 0xFFFFFFFF + 1
        return number

    def enter(self, str name, call):
        """The number of the vote, or 0 if another thread of this process is already in the same call."""
        if name in self.open:
            self.complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is already in {name}")
            return 0
        number = self.number()
        self.open[name] = Call(call.slot, call.sequence, number)
        return number

    def take(self, number):
        """The call with this number, no longer under way; None if it was given up."""
        for name, call in self.open.items():
            if call.number == number:
                del self.open[name]
                return call
        return None

    def cancel(self, slot, sequence):
        """The caller gave up."""
        for name, call in list(self.open.items()):
            if call.slot == slot and call.sequence == sequence:
                del self.open[name]
                self.actions.append(SendMaster(Withdraw(call.number)))
                self.complete(call, INVALID_USAGE, KIND_CANCELLED, "given up by its caller")

    def end(self, int result, int kind, str text):
        """The membership is over, and that is the answer to every call."""
        calls = list(self.open.values())
        self.open.clear()
        for call in calls:
            self.complete(call, result, kind, text)

    def complete(self, call, int result, int kind, str text):
        """A call ends with a text; nobody waits for it afterwards."""
        self.actions.append(Complete(call.slot, call.sequence, result, kind, text.encode()))

    def check(self):
        """Invariants between two events."""
        numbers = [call.number for call in self.open.values()]
        assert len(set(numbers)) == len(numbers), f"two calls with one number: {self.open}"

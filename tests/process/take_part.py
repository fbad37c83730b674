"""The loop of a member in tests of faults: sync, reduce, ask for newcomers, hold a topology round.

Newcomers begin with the sync, because that is what members do after the round that admitted them. Imported by many
scripts, so it imports little.
"""

from __future__ import annotations

import os

import pccl
from pccl import Communicator, Options, ReduceOp, SharedState, TensorInfo
from pccl.errors import PeerLostError

# The long run has the machine for itself; in the suite a process may have to wait for a core.
TIGHT = "PCCL_TEST_MATRIX" in os.environ
OPTIONS = Options(
    heartbeat_interval=0.1, heartbeat_timeout=1.0 if TIGHT else 3.0, stall_timeout=0.5 if TIGHT else 1.5, check=True
)
COUNT = 1 << 18  # elements: several blocks for each of two lanes


class Member:
    """One member and its state. An *odd* one changes its state before each sync, so that there is something to move."""

    def __init__(self, communicator: Communicator, *, odd: bool = False) -> None:
        self._communicator = communicator
        self._odd = odd
        self._content = pccl.zeros(COUNT)
        self._state = SharedState([TensorInfo.from_numpy(self._content, "content")])

    def take_part(self, attempts: int = 1 << 30) -> None:
        """Make one step after a round: the sync, a reduce, and the next round."""
        self.sync()
        self.reduce(attempts)
        self._communicator.are_peers_pending()
        self._communicator.update_topology()

    def sync(self) -> None:
        """Sync the state, then increment its revision."""
        if self._odd:
            self._content[0] += 1.0
        self._communicator.sync_shared_state(self._state)
        self._state.push_revision()

    def reduce(self, attempts: int = 1 << 30) -> None:
        """Reduce in place over all members; repeat with the survivors if one is lost."""
        array = pccl.empty(COUNT)
        array[:] = 1.0
        while True:
            try:
                world = self._communicator.all_reduce(array, array, op=ReduceOp.SUM).local_world_size
            except PeerLostError:
                assert array.min() == array.max() == 1.0, "not restored"
                attempts -= 1
                if attempts == 0:
                    raise
            else:
                assert array.min() == array.max() == world, "not the sum"
                return

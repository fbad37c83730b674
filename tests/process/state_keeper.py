"""Training processes that sync a shared state all the time and print their events; forked like trainees.

    python -m tests.process.state_keeper ADDRESS OPTIONS

The state at each revision is a known pattern, so a member that holds another one is wrong. In each step one of the
members is *lazy*: it has not made the step and holds garbage, so that there is something to move. Lines are those of
`trainee`; after `ok` comes the revision.
"""

from __future__ import annotations

import sys

import numpy as np

import pccl
from pccl import Communicator, Options, PCCLError, Result, SharedState, TensorInfo
from pccl.errors import PeerLostError

from .trainee import Trainee, run

COUNT = 1 << 19  # elements of each of two tensors: eight blocks
LAZY = 4  # one in so many steps of a member


class Keeper(Trainee):
    """One training process, over several memberships."""

    def __init__(self, number: int, address: str, options: Options) -> None:
        self._number = number
        self._peer = Communicator(address, 0, 2, options=options)
        self._tensors = [pccl.zeros(COUNT), np.zeros(COUNT, np.float32)]  # shared, and through the window
        infos = [TensorInfo.from_numpy(tensor, f"tensor {i}") for i, tensor in enumerate(self._tensors)]
        self._state = SharedState(infos)
        self._agreed = 0  # the revision of the last successful sync; every step starts from it, also a repeated one

    def _work(self) -> None:
        self._step()
        self._peer.update_topology()

    def _step(self) -> None:
        revision = self._agreed
        if revision == 0 or (revision + self._number) % LAZY:
            self._state.revision = revision + 1
            self._fill(revision + 1)
        else:
            self._state.revision = revision
            for tensor in self._tensors:
                tensor[:] = -1
        while True:
            try:
                self._peer.sync_shared_state(self._state)
            except PeerLostError:
                self.tell("lost")
            except PCCLError as error:
                if error.result is not Result.NO_SHARED_STATE_AVAILABLE:
                    raise
                self.tell("none")  # all members that held it are lost or lazy: resume from the agreed state
                self._fill(self._state.revision)
            else:
                break
        for tensor in self._tensors:
            if not np.array_equal(tensor, self._pattern_of(self._state.revision)):
                self.tell("wrong", f"revision {self._state.revision} does not hold its pattern")
        if self._state.revision < revision:
            self.tell("wrong", f"revision {revision} became {self._state.revision}")
        self._agreed = self._state.revision
        self.tell("ok", self._state.revision)

    def _fill(self, revision: int) -> None:
        for tensor in self._tensors:
            tensor[:] = self._pattern_of(revision)

    @staticmethod
    def _pattern_of(revision: int) -> np.ndarray:
        return (np.arange(COUNT) % 1021 + revision * 7).astype(np.float32)


def main(address: str, options: str) -> None:
    """Fork keepers of the run at this address."""
    run(lambda number: Keeper(number, address, Options.decode(options)))


if __name__ == "__main__":
    main(*sys.argv[1:])

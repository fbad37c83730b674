"""More mistakes of beginners: names, ends and agreed states of runs; see `test_beginners`."""

from __future__ import annotations

import numpy as np
import pytest

from pccl import Communicator, SharedState, TensorInfo
from pccl.errors import KickedError, PCCLError, RunFinishedError

from .helpers import everybody, peers_of, quick, running_master
from .test_beginners import check, explains


@explains("A peer of another run")
@explains("The run is finished")
def test_the_wrong_run_and_the_end() -> None:
    """Goal: who is on the wrong master, or comes too late, is told at once; members do not notice it."""
    with running_master() as master, peers_of(master.address, 0, 0) as peers:
        with Communicator(master.address, options=quick(run="pccl bench")) as other:
            with pytest.raises(KickedError) as refused:
                other.connect()
        everybody(peers, lambda peer, _: peer.finish())
        with Communicator(master.address, options=quick()) as late:
            with pytest.raises(RunFinishedError) as finished:
                late.connect()

    check("A peer of another run", refused.value)
    check("The run is finished", finished.value)


@explains("The state of an earlier run")
@explains("Nobody pushed a revision")
def test_states_that_cannot_go_on() -> None:
    """Goal: a loop without push_revision(), and a second run on the same master, hear what is missing."""
    state = SharedState([TensorInfo.from_numpy(weights := np.zeros(10), "weights")])
    state.revision = 5
    with running_master() as master:
        for title in ("Nobody pushed a revision", "The state of an earlier run"):
            with peers_of(master.address, 0) as (peer,):
                if state.revision:
                    peer.sync_shared_state(state)
                weights += 1
                with pytest.raises(PCCLError) as caught:
                    peer.sync_shared_state(state)
            check(title, caught.value)
            state.revision = 0

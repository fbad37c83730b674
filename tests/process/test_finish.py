"""finish() and names of runs with real processes: who ends, who is told, and what a restarted master still knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import Attribute, Communicator, MasterNode, ReduceOp, Result, SharedState, TensorInfo
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.errors import KickedError, MasterLostError, RunFinishedError, UsageError

from .helpers import (
    QUICK,
    Script,
    actor_pid,
    background,
    eventually,
    everybody,
    free_port,
    master_pid,
    peers_of,
    quick,
    running_master,
    together,
    voters,
)

# Fails in its vote.
VICTIM = """
peer = join()
peer.finish()
"""


def late(address: str, run: str = "") -> Result:
    """Return how a peer that comes now is told that the run is finished."""
    with Communicator(address, options=quick(run=run)) as peer, pytest.raises(RunFinishedError) as caught:
        peer.connect()
    return caught.value.result


def status(master: MasterNode) -> dict[str, Any]:
    """What an operator sees."""
    return query_status(*parse_address(master.address), QUICK)


def test_all_groups_finish_together_and_late_peers_are_told() -> None:
    """Goal: finish() returns on all members of all groups; then nothing waits, whoever calls or comes."""
    with running_master() as master, peers_of(master.address, 0, 0, 1) as peers:
        first = background(peers[0].finish)
        eventually(lambda: voters(master, "finish") == 1, "the first vote")
        newcomer = peers.newcomer()
        waiting = background(newcomer.connect)
        eventually(lambda: status(master)["newcomers"]["count"] == 1, "a newcomer that waits")
        together(peers[1].finish, peers[2].finish)
        first.result()

        assert isinstance(waiting.error(), RunFinishedError)
        assert late(master.address) is Result.INVALID_USAGE
        seen = status(master)
        assert (seen["finished"], seen["world"], seen["counters"]["finished"]) == (True, 0, 4)


def test_every_later_call_says_so() -> None:
    """Goal: after finish() a communicator raises one error from every call; its numbers can still be read."""
    ones = np.ones(10, np.float32)
    state = SharedState([TensorInfo.from_numpy(ones, "ones")])
    with running_master() as master, peers_of(master.address, 0) as (peer,):
        number = peer.peer_id
        peer.finish()
        calls = (
            peer.update_topology,
            peer.optimize_topology,
            peer.are_peers_pending,
            peer.finish,
            peer.connect,
            partial(peer.wait_for_world_size, 1),
            partial(peer.sync_shared_state, state),
            partial(peer.all_reduce, ones, ones, op=ReduceOp.SUM),
            partial(peer.all_reduce_async, ones, ones, op=ReduceOp.SUM),
        )
        for call in calls:
            with pytest.raises(RunFinishedError, match="the run (without a name )?is finished"):
                call()
        assert peer.peer_id == number
        peer.close()


def test_finish_with_an_unawaited_reduce_is_refused() -> None:
    """Goal: the same rule as for update_topology, and the vote is not cast."""
    tensors = [np.ones(10, np.float32) for _ in range(2)]
    with running_master() as master, peers_of(master.address, 0, 0) as peers:
        handles = everybody(
            peers, lambda peer, rank: peer.all_reduce_async(tensors[rank], tensors[rank], op=ReduceOp.SUM)
        )
        with pytest.raises(UsageError) as caught:
            peers[0].finish()
        assert caught.value.result is Result.PENDING_ASYNC_OPS
        assert all(handle.wait()[0] for handle in handles)
        together(*(peer.finish for peer in peers))


def test_a_peer_that_dies_near_the_end_is_not_waited_for() -> None:
    """Goal: the others finish without it."""
    with running_master() as master, peers_of(master.address, 0, 0, 0) as peers:
        calls = [background(peer.finish) for peer in peers[:2]]
        eventually(lambda: voters(master, "finish") == 2, "two votes")
        os.kill(actor_pid(peers[2]), signal.SIGKILL)
        for call in calls:
            call.result()

        assert late(master.address) is Result.INVALID_USAGE


@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("training.CallFinish", "kill"),
        *(("peer.send.VoteFinish", action) for action in ("kill", "stop", "reset", "garble")),
    ],
)
def test_a_peer_that_fails_in_finish_holds_nobody_up(point: str, action: str) -> None:
    """Goal: whatever happens to a peer at its vote, the others finish within the bounds of a lost peer."""
    with running_master() as master, peers_of(master.address, 0, 0) as peers:
        with Script(VICTIM, master.address, PCCL_FAULT=f"{point}:1:{action}") as victim:
            while peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 3:
                peers.update()
            victim.expect("in")
            together(*(peer.finish for peer in peers))
            victim.process.kill()


def test_two_runs_share_a_master_one_after_the_other() -> None:
    """Goal: a peer of another name does not disturb the members; a run goes on when its peers come back."""
    content = np.zeros(100, np.float32)
    state = SharedState([TensorInfo.from_numpy(content, "content")])
    with running_master() as master:
        with peers_of(master.address, 0, 0, options=quick(run="first")) as peers:
            with Communicator(master.address, options=quick(run="second")) as other:
                with pytest.raises(KickedError, match="run 'second'.*run 'first'"):
                    other.connect()
            everybody(peers, lambda peer, _: peer.sync_shared_state(state))
            assert [peer.wait_for_world_size(2) for peer in peers] == [2, 2]
        eventually(lambda: status(master)["world"] == 0, "an empty run")
        with peers_of(master.address, 0, options=quick(run="second")) as (peer,):
            peer.sync_shared_state(SharedState([TensorInfo.from_numpy(np.ones(7), "another")]))
            seen = status(master)
            assert seen["name"] == "second"
            assert seen["remembered"] == [{"name": "first", "finished": False, "revisions": {"0": 0}}]
            peer.finish()
        with peers_of(master.address, 0, options=quick(run="first")) as (peer,):
            state.push_revision()
            peer.sync_shared_state(state)
            assert late(master.address, "second") is Result.INVALID_USAGE


def test_bench_on_the_master_of_a_training_run_is_refused() -> None:
    """Goal: the command ends with the reason, also if PCCL_RUN names the training run, and no member notices it."""
    with running_master() as master, peers_of(master.address, 0, 0, options=quick(run="llama")) as peers:
        command = [sys.executable, "-m", "pccl.cli", "bench", master.address]
        environment = {**os.environ, "PCCL_RUN": "llama"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

        assert done.returncode == 1
        assert "this peer belongs to run 'pccl bench', but this master serves run 'llama'" in done.stderr
        assert not status(master)["newcomers"]["count"]
        peers.update()


@pytest.mark.parametrize("fate", ["kept", "--new-run"])
def test_a_restarted_master_knows_the_end(tmp_path: Path, fate: str) -> None:
    """Goal: a state file keeps the end of a run; new_run forgets it, and the same name begins anew."""
    address, file = f"127.0.0.1:{free_port()}", tmp_path / "state"
    with MasterNode(address, options=QUICK, state_file=file):
        with peers_of(address, 0, 0, options=quick(run="llama")) as peers:
            together(*(peer.finish for peer in peers))
    with MasterNode(address, options=QUICK, state_file=file, new_run=fate == "--new-run"):
        if fate == "kept":
            assert late(address, "llama") is Result.INVALID_USAGE
        else:
            with peers_of(address, 0, options=quick(run="llama")) as peers:
                assert peers[0].wait_for_world_size(1) == 1


def test_a_master_that_dies_during_the_vote_loses_nothing(tmp_path: Path) -> None:
    """Goal: callers of finish get MasterLostError, join the restarted master, and finish there."""
    address, file = f"127.0.0.1:{free_port()}", tmp_path / "state"
    first = MasterNode(address, options=QUICK, state_file=file)
    first.run()
    with peers_of(address, 0, 0) as peers:
        call = background(peers[0].finish)
        eventually(lambda: voters(first, "finish") == 1, "the first vote")
        os.kill(master_pid(first), signal.SIGKILL)
        assert isinstance(call.error(), MasterLostError)
        with pytest.raises(MasterLostError):
            peers[1].finish()
        first.interrupt()
        with MasterNode(address, options=QUICK, state_file=file):
            peers.admit(*peers)
            together(*(peer.finish for peer in peers))
            assert late(address) is Result.INVALID_USAGE


def test_a_master_of_a_script_ends_with_its_run() -> None:
    """Goal: with exit_when_finished a script whose last line starts a master ends too, and late peers were told."""
    master = MasterNode("127.0.0.1:0", options=QUICK, exit_when_finished=True)
    master.run()
    try:
        with peers_of(master.address, 0) as (peer,):
            peer.finish()
        assert late(master.address) is Result.INVALID_USAGE
        assert master._actor is not None
        assert master._actor.wait(30), "the master has not ended"
    finally:
        master.interrupt()

"""Every wait ends: when processes are stopped, die or are slow, and when calls can never complete together.

A stopped process is the hardest failure to detect: its sockets stay open and it sends nothing. Bounds are those of the
options, plus the timeouts of the helpers. Where a test says *at once*, its heartbeat timeout is a minute: the timeout
alone could not have caused it within the bound of the test.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from pccl import Attribute, Communicator, MasterNode, Result
from pccl.errors import KickedError, MasterLostError, UsageError

from .helpers import (
    QUICK,
    Script,
    actor_pid,
    background,
    children,
    eventually,
    gone,
    master_pid,
    peers_of,
    quick,
    running_master,
    stopped,
    together,
    voters,
)

PATIENT = quick(heartbeat_timeout=60.0)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture
def patient_master() -> Iterator[MasterNode]:
    with running_master(PATIENT) as node:
        yield node


# ---------------------------------------------------------------------------------------------- stopped processes


def test_a_stopped_actor_is_dropped_and_told_why(master: MasterNode) -> None:
    """Goal: survivors continue within the timeout; the stopped peer gets the reason when it runs again."""
    with peers_of(master.address, 0, 0, 0) as peers:
        victim = peers.pop()
        with stopped(actor_pid(victim)):
            peers.update()
        error = background(victim.update_topology).error()
        victim.close()

        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        assert isinstance(error, KickedError)
        assert error.result is Result.RANK_CONNECTION_LOST
        assert "nothing heard for 2 s" in error.reason


def update_until_alone(peer: Communicator) -> None:
    """Hold topology rounds until no other member is left."""
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) > 1:
        peer.update_topology()


def test_a_stopped_peer_is_dropped_and_told_why(master: MasterNode) -> None:
    """Goal: the same for a training process that is stopped together with its actor and its workers."""
    code = """
        peer = join()
        try:
            while True:
                peer.update_topology()
        except (KickedError, MasterLostError) as error:
            say("error", type(error).__name__, error)
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        assert peers[0].wait_for_world_size(2, timeout=15) == 2
        script.expect("in")
        actor = eventually(lambda: children(script.pid).get("pccl-peer"), "the script's actor")
        with stopped(script.pid, actor, *children(actor).values()):
            background(partial(update_until_alone, peers[0])).result()

        assert script.expect("error").startswith("KickedError update_topology: nothing heard for 2 s")
        assert script.end() == 0


def test_a_training_process_that_was_stopped_alone_is_told_so(master: MasterNode) -> None:
    """Goal: the others go on, its call and every later one say what happened, and connect() after it works."""
    code = """
        import threading, time
        peer = join()
        try:
            while True:
                peer.update_topology()
        except KickedError as error:
            say("error", error.result.name, error)
        try:
            peer.update_topology()
        except KickedError as error:
            say("later", error)
        peer.connect()
        say("back", peer.wait_for_world_size(2))
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        assert peers[0].wait_for_world_size(2, timeout=15) == 2
        script.expect("in")
        actor = eventually(lambda: children(script.pid).get("pccl-peer"), "the script's actor")
        with stopped(script.pid):
            background(partial(update_until_alone, peers[0])).result()
            assert not gone(actor)

        told = script.expect("error")
        text = (
            rf"RANK_CONNECTION_LOST update_topology: the training process {script.pid} was stopped for more than 2 s "
        )
        assert re.match(text + re.escape("(heartbeat_timeout), so its peer left the run; call connect() again"), told)
        assert "was stopped for more than 2 s" in script.expect("later")
        assert peers[0].wait_for_world_size(2, timeout=15) == 2
        assert script.expect("back") == "2"
        assert script.end() == 0


def test_the_timing_of_the_master_holds_in_the_peers(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a peer whose bound is shorter than the master's follows the master, also inside its own processes."""
    caplog.set_level(logging.WARNING, "pccl.peer")
    patient = quick(heartbeat_timeout=60.0)
    with running_master(patient) as master, peers_of(master.address, 0, 0) as peers:
        with stopped(actor_pid(peers[0])):
            waiting = background(peers[0].are_peers_pending)
            assert not waiting.ended.wait(1.5 * QUICK.heartbeat_timeout)
        peers[1].are_peers_pending()
        waiting.result()
    line = "heartbeat_timeout=2 has no effect here: the master decides it, and uses 60; set it where the master runs"
    assert caplog.messages.count(line) == 2


def test_a_caller_notices_that_its_own_actor_is_stopped(master: MasterNode) -> None:
    """Goal: the wait ends within the bound with an error that names the process and why, and connect() works again.

    The actor must not come back as a member without a training process: the others continue without it."""
    with peers_of(master.address, 0, 0) as peers:
        actor = actor_pid(peers[0])
        with stopped(actor):
            error = background(peers[0].update_topology).error()
        assert isinstance(error, MasterLostError)
        assert f"pid {actor}" in str(error)
        assert "a signal or a debugger stopped it" in str(error)
        assert gone(actor)
        peers[1].update_topology()
        together(peers[0].connect, lambda: peers[1].wait_for_world_size(2))


def test_a_killed_actor_is_an_error_at_once(patient_master: MasterNode) -> None:
    """Goal: the caller learns from which signal its actor died, others lose it at once, and connect() works again."""
    with peers_of(patient_master.address, 0, 0, options=PATIENT) as peers:
        waiting = background(peers[0].update_topology)
        os.kill(actor_pid(peers[0]), signal.SIGKILL)

        error = waiting.error()
        assert isinstance(error, MasterLostError)
        assert "killed by signal 9 (SIGKILL: if nobody sent it, the machine ran out of memory" in str(error)
        background(peers[1].update_topology).result()
        together(peers[0].connect, lambda: peers[1].wait_for_world_size(2))


def test_a_master_may_pause(master: MasterNode) -> None:
    """Goal: a master that is stopped for less than the timeout loses no peer, and no peer loses the master."""
    with peers_of(master.address, 0, 0) as peers:
        with stopped(master_pid(master)):
            waiting = [background(peer.update_topology) for peer in peers]
            # The pause itself is tested; no event happens in it that the test could wait for.
            time.sleep(QUICK.heartbeat_timeout / 2)
        for call in waiting:
            call.result()

        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_a_stopped_master_is_lost_within_the_timeout(master: MasterNode) -> None:
    """Goal: every blocking call of every peer ends with MasterLostError, though the connection stays open."""
    with peers_of(master.address, 0, 0) as peers:
        with stopped(master_pid(master)):
            calls = [background(peers[0].update_topology), background(peers[1].are_peers_pending)]
            errors = [call.error() for call in calls]  # type: ignore[attr-defined]

        assert [type(error) for error in errors] == [MasterLostError] * 2
        assert "heartbeat_timeout" in str(errors[0])


def test_a_killed_master_is_lost_at_once(patient_master: MasterNode) -> None:
    """Goal: all blocking calls raise MasterLostError at once; a newcomer that waits and a later call fail as well."""
    with peers_of(patient_master.address, 0, 0, options=PATIENT) as peers:
        newcomer = peers.newcomer(options=PATIENT)
        joining = background(lambda: newcomer.connect(n_attempts=1))
        eventually(lambda: all(together(*(peer.are_peers_pending for peer in peers[:2]))), "the newcomer is registered")
        calls = [background(peers[0].update_topology), background(lambda: peers[1].wait_for_world_size(3))]
        os.kill(master_pid(patient_master), signal.SIGKILL)

        assert [type(call.error()) for call in calls] == [MasterLostError] * 2  # type: ignore[attr-defined]
        assert joining.error() is not None
        asking = background(peers[0].are_peers_pending)
        assert asking.error().result is Result.MASTER_CONNECTION_FAILED  # type: ignore[union-attr]


def test_each_side_has_its_own_rhythm() -> None:
    """Goal: a peer whose heartbeat timeout is shorter than the master's heartbeat interval still sees no stop."""
    slow = quick(heartbeat_interval=15.0, heartbeat_timeout=60.0)
    with running_master(slow) as master, peers_of(master.address, 0, 0) as peers:
        waiting = background(lambda: peers[0].wait_for_world_size(3, timeout=2 * QUICK.heartbeat_timeout))

        error = waiting.error()
        assert error is not None
        assert error.result is Result.TOO_FEW_PEERS  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- slow peers


def test_a_long_vote_names_the_missing_peers(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a warning in the user's own log, with the missing peers and the calls that they are in instead."""
    caplog.set_level(logging.WARNING, "pccl.peer")
    with running_master(quick(vote_warning=0.3)) as master, peers_of(master.address, 0, 0, 0) as peers:
        missing = sorted(peer.peer_id for peer in peers[1:])
        # In the rounds before, one slow member may have been missing; both of them together were not.
        names = re.escape(f"peers {missing[0]}, {missing[1]} (in no call)")
        warning = re.compile(rf"update_topology has waited \d+ s for {names}")
        waiting = background(peers[0].update_topology)
        eventually(lambda: any(map(warning.fullmatch, caplog.messages)), "the warning")
        together(*(peer.update_topology for peer in peers[1:]))
        waiting.result()

        assert {record.name for record in caplog.records if "has waited" in record.message} == {"pccl.peer"}


def test_a_straggler_is_kicked_when_asked_for() -> None:
    """Goal: vote_timeout ends the wait of the others; the reason names the waiting peers, the call and the time."""
    # The others must vote within this time, also on a busy machine.
    limit = 3.0
    with running_master(quick(vote_timeout=limit)) as master, peers_of(master.address, 0, 0, 0) as peers:
        straggler = peers.pop()
        waiting = sorted(peer.peer_id for peer in peers)
        peers.update()
        error = background(straggler.are_peers_pending).error()
        straggler.close()

        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        assert isinstance(error, KickedError)
        names = f"peers {waiting[0]}, {waiting[1]}"
        found = re.search(rf"straggler: {names} waited (\d+\.\d) s for it in update_topology", error.reason)
        assert found, error.reason
        assert float(found[1]) >= limit


# ---------------------------------------------------------------------------------------------- calls that never meet


def test_calls_that_never_meet_are_explained(master: MasterNode) -> None:
    """Goal: one in update_topology, one in are_peers_pending: both get the reason, and may continue."""
    with peers_of(master.address, 0, 0) as peers:
        calls = [background(peers[0].update_topology), background(peers[1].are_peers_pending)]
        errors = [call.error() for call in calls]  # type: ignore[attr-defined]

        for error in errors:
            assert isinstance(error, UsageError)
            assert error.result is Result.INVALID_USAGE
            assert f"peer {peers[0].peer_id} in update_topology" in str(error)
            assert f"peer {peers[1].peer_id} in are_peers_pending" in str(error)
        peers.update()


def test_a_peer_that_computes_is_no_deadlock() -> None:
    """Goal: while a member is in no call, the calls of the others may still complete, however long it takes."""
    with running_master(quick(deadlock_timeout=0.2)) as master, peers_of(master.address, 0, 0) as peers:
        waiting = background(peers[0].update_topology)
        eventually(lambda: voters(master, "update_topology") == 1, "its vote is at the master")
        assert not waiting.ended.wait(1.0)
        # In this order: if the second peer asked first, the two would be in calls that never meet, for a moment.
        asking = background(peers[0].are_peers_pending)
        eventually(lambda: voters(master, "are_peers_pending") == 1, "its question is at the master")
        peers[1].are_peers_pending()
        asking.result()
        peers[1].update_topology()
        waiting.result()

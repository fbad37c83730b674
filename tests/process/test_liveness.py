"""Every wait ends: processes that stop, die or dawdle, and calls that can never meet.

A stopped process is the hardest kind of dead: its sockets stay open and nothing is ever said. Bounds are those of the
options, plus the patience of the helpers.
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
    crew_of,
    eventually,
    gone,
    master_pid,
    quick,
    running_master,
    stopped,
    together,
)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


# ---------------------------------------------------------------------------------------------- stopped processes


def test_a_stopped_actor_is_dropped_and_told_why(master: MasterNode) -> None:
    """Goal: survivors go on within the timeout; who was stopped gets the reason when it runs again."""
    with crew_of(master.address, 0, 0, 0) as crew:
        victim = crew.pop()
        with stopped(actor_pid(victim)):
            crew.update()
        error = background(victim.update_topology).error()
        victim.close()

        assert crew[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        assert isinstance(error, KickedError)
        assert error.result is Result.RANK_CONNECTION_LOST
        assert "nothing heard for 2 s" in error.reason


def update_until_alone(peer: Communicator) -> None:
    """Hold topology rounds until nobody else is left."""
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
    with crew_of(master.address, 0) as crew, Script(code, master.address) as script:
        assert crew[0].wait_for_world_size(2, timeout=15) == 2
        script.expect("in")
        actor = eventually(lambda: children(script.pid).get("pccl-peer"), "the script's actor")
        with stopped(script.pid, actor, *children(actor).values()):
            background(partial(update_until_alone, crew[0])).result()

        assert script.expect("error").startswith("KickedError update_topology: nothing heard for 2 s")
        assert script.end() == 0


def test_a_caller_notices_that_its_own_actor_is_stopped(master: MasterNode) -> None:
    """Goal: the wait ends within the bound with an error that names the process, and connect() is the way on.

    The actor must not come back as a member that nobody speaks for: the others go on without it."""
    with crew_of(master.address, 0, 0) as crew:
        actor = actor_pid(crew[0])
        with stopped(actor):
            error = background(crew[0].update_topology).error()
        assert isinstance(error, MasterLostError)
        assert f"pid {actor}" in str(error)
        assert gone(actor)
        crew[1].update_topology()
        together(crew[0].connect, lambda: crew[1].wait_for_world_size(2))


def test_a_killed_actor_is_an_error_at_once(master: MasterNode) -> None:
    """Goal: the caller learns from which signal its actor died, others lose it at once, and connect() is the way on."""
    with crew_of(master.address, 0, 0) as crew:
        waiting = background(crew[0].update_topology)
        os.kill(actor_pid(crew[0]), signal.SIGKILL)

        error = waiting.error(1.0)
        assert isinstance(error, MasterLostError)
        assert "killed by signal 9" in str(error)
        crew[1].update_topology()
        together(crew[0].connect, lambda: crew[1].wait_for_world_size(2))


def test_a_master_may_pause(master: MasterNode) -> None:
    """Goal: a master that is stopped for less than the timeout loses nobody, and neither do its peers lose it."""
    with crew_of(master.address, 0, 0) as crew:
        with stopped(master_pid(master)):
            waiting = [background(peer.update_topology) for peer in crew]
            # The pause itself is what is tested; nothing happens in it that could be waited for.
            time.sleep(QUICK.heartbeat_timeout / 2)
        for call in waiting:
            call.result()

        assert crew[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_a_stopped_master_is_lost_within_the_timeout(master: MasterNode) -> None:
    """Goal: every blocking call of every peer ends with MasterLostError, though the connection stays open."""
    with crew_of(master.address, 0, 0) as crew:
        with stopped(master_pid(master)):
            calls = [background(crew[0].update_topology), background(crew[1].are_peers_pending)]
            errors = [call.error() for call in calls]  # type: ignore[attr-defined]

        assert [type(error) for error in errors] == [MasterLostError] * 2
        assert "heartbeat_timeout" in str(errors[0])


def test_a_killed_master_is_lost_at_once(master: MasterNode) -> None:
    """Goal: all blocking calls raise MasterLostError quickly, also in a newcomer that has attempts left."""
    with crew_of(master.address, 0, 0) as crew:
        newcomer = crew.newcomer()
        joining = background(lambda: newcomer.connect(n_attempts=1))
        eventually(lambda: all(together(*(peer.are_peers_pending for peer in crew[:2]))), "the newcomer is registered")
        calls = [background(crew[0].update_topology), background(lambda: crew[1].wait_for_world_size(3))]
        os.kill(master_pid(master), signal.SIGKILL)

        assert [type(call.error(1.0)) for call in calls] == [MasterLostError] * 2  # type: ignore[attr-defined]
        assert joining.error(1.0) is not None
        assert background(crew[0].are_peers_pending).error(1.0).result is Result.MASTER_CONNECTION_FAILED  # type: ignore[union-attr]


def test_each_side_has_its_own_rhythm() -> None:
    """Goal: a peer that watches its actor more closely than the master asks for beats sees no stop in that."""
    slow = quick(heartbeat_interval=5.0, heartbeat_timeout=20.0)
    with running_master(slow) as master, crew_of(master.address, 0, 0, options=quick(heartbeat_timeout=0.5)) as crew:
        waiting = background(lambda: crew[0].wait_for_world_size(3, timeout=1.5))

        error = waiting.error()
        assert error is not None
        assert error.result is Result.TOO_FEW_PEERS  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- slow peers


def test_a_long_vote_names_who_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: one warning in the user's own log, with who is missing and which call they are in instead."""
    caplog.set_level(logging.WARNING, "pccl.peer")
    with running_master(quick(vote_warning=0.3)) as master, crew_of(master.address, 0, 0, 0) as crew:
        waiting = background(crew[0].update_topology)
        missing = sorted(peer.peer_id for peer in crew[1:])
        line = eventually(lambda: [line for line in caplog.messages if "update_topology waits" in line], "the warning")
        together(*(peer.update_topology for peer in crew[1:]))
        waiting.result()

        names = f"peers {missing[0]}, {missing[1]} (in no call)"
        assert re.fullmatch(rf"update_topology waits since \d s for {re.escape(names)}", line[0])
        assert len([line for line in caplog.messages if "update_topology waits" in line]) == 1
        assert {record.name for record in caplog.records if "waits" in record.message} == {"pccl.peer"}


def test_a_straggler_is_kicked_when_asked_for() -> None:
    """Goal: vote_timeout ends the wait of the others and tells the straggler who waited, where and for how long."""
    with running_master(quick(vote_timeout=0.5)) as master, crew_of(master.address, 0, 0, 0) as crew:
        straggler = crew.pop()
        waiting = sorted(peer.peer_id for peer in crew)
        crew.update()
        error = background(straggler.are_peers_pending).error()
        straggler.close()

        assert crew[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        assert isinstance(error, KickedError)
        names = f"peers {waiting[0]}, {waiting[1]}"
        assert re.search(rf"straggler: {names} waited 0\.\d s for it in update_topology", error.reason)


# ---------------------------------------------------------------------------------------------- calls that never meet


def test_calls_that_never_meet_are_explained(master: MasterNode) -> None:
    """Goal: one in update_topology, one in are_peers_pending: both learn why, and may go on."""
    with crew_of(master.address, 0, 0) as crew:
        calls = [background(crew[0].update_topology), background(crew[1].are_peers_pending)]
        errors = [call.error() for call in calls]  # type: ignore[attr-defined]

        for error in errors:
            assert isinstance(error, UsageError)
            assert error.result is Result.INVALID_USAGE
            assert f"peer {crew[0].peer_id} in update_topology" in str(error)
            assert f"peer {crew[1].peer_id} in are_peers_pending" in str(error)
        crew.update()


def test_a_peer_that_computes_is_no_deadlock() -> None:
    """Goal: while somebody is in no call, calls may still meet, however long it takes."""
    with running_master(quick(deadlock_timeout=0.2)) as master, crew_of(master.address, 0, 0) as crew:
        waiting = background(crew[0].update_topology)
        assert not waiting.ended.wait(1.0)
        together(crew[0].are_peers_pending, crew[1].are_peers_pending)
        crew[1].update_topology()
        waiting.result()

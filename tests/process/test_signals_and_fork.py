"""Ctrl-C, termination signals and forks: a signal ends no actor, and a forked child cannot use its parent's one.

The peer under test is a script in a session of its own, because a signal to this process would end the tests. The
other member is in this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pccl import Attribute, MasterNode
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status

from .helpers import (
    Script,
    background,
    children,
    eventually,
    free_port,
    gone,
    is_asleep,
    peers_of,
    quick,
    running_master,
    together,
)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


def votes(master: MasterNode) -> list[Any]:
    """The votes that the master holds now."""
    found: list[Any] = query_status(*parse_address(master.address), quick())["votes"]
    return found


# ---------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("call", ["update_topology()", "are_peers_pending()", "wait_for_world_size(3)"])
def test_ctrl_c_ends_a_call_and_the_next_one_works(master: MasterNode, call: str) -> None:
    """Goal: KeyboardInterrupt at once, the vote is withdrawn, and the same call right after it casts a new vote."""
    code = f"""
        peer = join()
        say("calling")
        try:
            peer.{call}
        except KeyboardInterrupt:
            say("interrupted")
        sys.stdin.readline()
        peer.update_topology()
        say("updated", peer.are_peers_pending())
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(2, timeout=15)
        script.expect("calling")
        eventually(lambda: votes(master), "the master has the vote")
        eventually(lambda: is_asleep(script.pid), "the call waits")
        script.signal(signal.SIGINT)
        script.expect("interrupted")
        # The withdrawal and the next peer's vote travel on different connections.
        eventually(lambda: not votes(master), "the master has the withdrawal")

        waiting = background(peers[0].update_topology)
        assert not waiting.ended.wait(0.2), "a vote that was given up closed the round"
        script.say()
        waiting.result()
        assert peers[0].are_peers_pending() is False
        script.expect("updated False")
        assert script.end() == 0


def test_ctrl_c_ends_a_connect_that_waits_for_admission(master: MasterNode) -> None:
    """Goal: the newcomer is not pending any more, and connect may be called again."""
    code = """
        peer = Communicator(sys.argv[1], options=QUICK)
        try:
            peer.connect()
        except KeyboardInterrupt:
            say("interrupted")
        sys.stdin.readline()
        peer.connect()
        say("in", peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        eventually(peers[0].are_peers_pending, "the newcomer is registered")
        script.signal(signal.SIGINT)
        script.expect("interrupted")
        eventually(lambda: not peers[0].are_peers_pending(), "the newcomer is gone")

        script.say()
        peers[0].wait_for_world_size(2, timeout=15)
        script.expect("in 2")


def test_ctrl_c_ends_a_connect_that_finds_no_master() -> None:
    """Goal: attempts that are left do not hold up an interrupt, and no actor stays behind."""
    code = """
        peer = Communicator(sys.argv[1], options=quick(retry_interval=5.0))
        try:
            peer.connect(n_attempts=1000)
        except KeyboardInterrupt:
            say("interrupted")
        sys.stdin.readline()
    """
    with Script(code, f"127.0.0.1:{free_port()}") as script:
        actor = eventually(lambda: children(script.pid).get("pccl-peer"), "the actor tries")
        script.signal(signal.SIGINT)
        script.expect("interrupted")

        eventually(lambda: gone(actor), "the actor is gone")


def test_an_interrupt_finds_a_booting_actor_deaf(master: MasterNode) -> None:
    """Goal: a Ctrl-C that the training process handles does not cost it the actor that it is just starting."""
    code = """
        import subprocess
        signal.signal(signal.SIGINT, lambda *_: say("interrupted"))
        start = subprocess.Popen.__init__
        def interrupted_start(*arguments, **options):
            start(*arguments, **options)
            os.killpg(0, signal.SIGINT)  # the actor has been started, and has had no time to do anything
        subprocess.Popen.__init__ = interrupted_start
        peer = Communicator(sys.argv[1], options=QUICK)
        peer.connect()
        say("connected", peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
        peer.close()
    """
    with Script(code, master.address) as script:
        assert script.expect("connected") == "1"
        assert "interrupted" in script.lines
        assert script.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_is_the_training_process_s_business(master: MasterNode, number: signal.Signals) -> None:
    """Goal: actor and workers ignore a terminal's signal, because the training process may want to save its state."""
    code = f"""
        import select
        # A signal that comes just before a blocking read does not interrupt it; it always writes to this pipe.
        signalled, noted = os.pipe()
        os.set_blocking(noted, False)
        signal.set_wakeup_fd(noted)
        signal.signal({int(number)}, lambda *_: say("handled"))
        peer = join()
        select.select([signalled], [], [])
        sys.stdin.readline()
        peer.update_topology()
        say("updated")
        sys.stdin.readline()
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(2, timeout=15)
        script.expect("in")
        actor = children(script.pid)["pccl-peer"]
        # A worker has the name of the actor until it has set its own.
        eventually(lambda: children(actor).keys() == {"pccl-send-0", "pccl-recv-0"}, "the workers")
        before = children(actor)
        script.signal_group(number)
        script.expect("handled")
        script.say()
        peers[0].update_topology()
        script.expect("updated")

        assert children(script.pid)["pccl-peer"] == actor
        assert children(actor) == before
        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


# ---------------------------------------------------------------------------------------------- fork


def test_a_forked_child_is_told_and_disturbs_nobody(master: MasterNode) -> None:
    """Goal: each call in the child raises UsageError with the reason; its `del` and exit do not affect the parent."""
    code = """
        peer = join()
        child = os.fork()
        if not child:
            calls = {
                "connect": peer.connect, "close": peer.close, "update_topology": peer.update_topology,
                "are_peers_pending": peer.are_peers_pending, "wait_for_world_size": lambda: peer.wait_for_world_size(1),
                "get_attribute": lambda: peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
            }
            for name, call in calls.items():
                try:
                    call()
                except UsageError as error:
                    assert error.func_name == name and error.result is Result.INVALID_USAGE, error
                    assert f"belongs to process {os.getppid()}" in str(error), error
                else:
                    say("missed", name)
            del peer, calls, call
            sys.exit(0)
        say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        peer.update_topology()
        say("updated", peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
        peer.close()
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(2, timeout=15)
        assert script.expect("child") == "0", script.errors()
        peers[0].update_topology()

        assert script.expect("updated") == "2"
        assert script.end() == 0
        assert not any(line.startswith("missed") for line in script.lines)
        assert script.errors() == ""


def test_a_child_may_have_a_communicator_of_its_own(master: MasterNode) -> None:
    """Goal: a communicator that the child makes works beside the parent's, and ends with the child."""
    code = """
        peer = join()
        child = os.fork()
        if not child:
            with Communicator(sys.argv[1], options=QUICK) as own:
                own.connect()
                say("child", own.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
            os._exit(0)
        peer.wait_for_world_size(3)
        os.waitpid(child, 0)
        peer.update_topology()
        say("parent", peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(3, timeout=15)
        script.expect("child 3")
        peers[0].update_topology()

        assert script.expect("parent") == "2"


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_child_that_outlives_its_parent_keeps_no_actor_alive(master: MasterNode, thread: str) -> None:
    """Goal: a child holds copies of the mailbox, yet the actor ends with the process that it belongs to."""
    connect = "peer.connect()" if thread == "main" else "t = threading.Thread(target=peer.connect); t.start(); t.join()"
    code = f"""
        peer = Communicator(sys.argv[1], options=QUICK)
        {connect}
        child = os.fork()
        if child:
            say("child", child)
        signal.pause()
    """
    with peers_of(master.address, 0) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(2, timeout=15)
        child = int(script.expect("child"))
        try:
            actor = children(script.pid)["pccl-peer"]
            workers = children(actor).values()
            script.signal(signal.SIGKILL)
            together(peers[0].update_topology)

            assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
            for pid in (actor, *workers):
                eventually(lambda pid=pid: gone(pid), f"process {pid} ends with its training process")
            assert not gone(child)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

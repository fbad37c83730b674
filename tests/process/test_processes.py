"""The actor and the workers of a training process: their names, lifetimes, file descriptors and memory.

No process outlives a SIGKILL of any one of them, and no process inherits a descriptor that keeps a connection open.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pccl import Attribute, Communicator, MasterNode

from .helpers import (
    QUICK,
    Script,
    actor_pid,
    children,
    comm,
    eventually,
    gone,
    master_pid,
    peers_of,
    quick,
    running_master,
    sockets,
    together,
)

WORKER_BYTES_MAX = 4 << 20  # private memory of an idle worker: a pool of 128 lanes must not cost gigabytes


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that this process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return (sizes["Private_Clean"] + sizes["Private_Dirty"]) * 1024


def descriptors(pid: int) -> dict[int, str]:
    """Return the open file descriptors except the three standard ones, and what they refer to."""
    folder = Path(f"/proc/{pid}/fd")
    return {int(entry.name): os.readlink(entry) for entry in folder.iterdir() if int(entry.name) > 2}


def family(pid: int) -> dict[str, int]:
    """Return the process ids of the actor and the workers of a training process, by name."""
    actors = children(pid)
    return {**actors, **children(actors.get("pccl-peer", 0) or pid)}


def workers_of(peer: Communicator) -> dict[str, int]:
    """Wait for the workers of a peer with two lanes; return their process ids by name.

    A process that was just forked still has the name, and the descriptors, of its actor.
    """
    names = {"pccl-send-0", "pccl-send-1", "pccl-recv-0", "pccl-recv-1"}
    return eventually(lambda: set(found := children(actor_pid(peer))) == names and found, f"the workers are {names}")


# ---------------------------------------------------------------------------------------------- what they are


def test_processes_have_names(master: MasterNode) -> None:
    """Goal: `ps` tells which process is what."""
    with peers_of(master.address, 0, 0, lanes=2) as peers:
        assert comm(master_pid(master)) == "pccl-master"
        assert comm(actor_pid(peers[0])) == "pccl-peer"
        workers_of(peers[0])


def test_an_idle_worker_is_small(master: MasterNode) -> None:
    """Goal: workers share the actor's memory pages; the private memory of each stays small."""
    with peers_of(master.address, 0, 0, lanes=2) as peers:
        sizes = {name: private_bytes(pid) for name, pid in workers_of(peers[0]).items()}

        assert max(sizes.values()) < WORKER_BYTES_MAX, sizes


def test_the_actor_brings_only_what_it_needs(master: MasterNode) -> None:
    """Goal: no numpy, no torch, no logging in the actor, whatever the training process has loaded."""
    with peers_of(master.address, 0) as peers:
        mapped = Path(f"/proc/{actor_pid(peers[0])}/maps").read_text()

        assert "numpy" not in mapped
        assert "torch" not in mapped


def test_workers_inherit_nothing(master: MasterNode) -> None:
    """Goal: a worker holds its mailbox, its one connection and its bells; no listening port, no control link."""
    with peers_of(master.address, 0, 0, lanes=2) as peers:
        workers = workers_of(peers[0])
        actor = descriptors(actor_pid(peers[0]))
        for name, pid in workers.items():
            eventually(lambda pid=pid: len(sockets(pid)) == 1, "it has its connection")
            held = Counter(target.rstrip("0123456789[]") for target in descriptors(pid).values())

            # Bells of the actor and of both senders, and its own; the pipe tells the training process of its end.
            bells = 3 if "send" in name else 4
            assert held == {"socket:": 2, "pipe:": 1, "anon_inode:[eventpoll": 1, "anon_inode:[eventfd": bells}, name
            assert not {target for target in descriptors(pid).values() if target.startswith("socket")} & {
                *actor.values()
            }


def test_the_actor_inherits_nothing(master: MasterNode) -> None:
    """Goal: the actor inherits no file or socket of the training process, so it keeps no checkpoint or port open."""
    with Path("/dev/zero").open() as file, peers_of(master.address, 0) as peers:
        os.set_inheritable(file.fileno(), True)
        peers.admit(peers.newcomer())

        assert "/dev/zero" not in descriptors(actor_pid(peers[1])).values()
        pipes = [target for target in descriptors(actor_pid(peers[1])).values() if target.startswith("pipe")]
        assert len(pipes) == 1, "the one pipe is its own: it tells that the actor has ended"


# ---------------------------------------------------------------------------------------------- deaths


def is_whole(found: dict[str, int], victim: str, killed: int) -> bool:
    """Whether there are five again, with a new victim. A process that was just forked still has its parent's name."""
    return len(found) == 5 and found.get(victim, killed) != killed


@pytest.mark.parametrize("victim", ["training process", "pccl-peer", "pccl-send-0", "pccl-recv-1"])
def test_nothing_outlives_a_kill(master: MasterNode, victim: str) -> None:
    """Goal: whichever process is killed, no process of an ended membership is left."""
    code = """
        peer = Communicator(sys.argv[1], 0, 2, options=QUICK)
        peer.connect()
        say("in")
        sys.stdin.readline()
        say("closing")
        peer.close()
    """
    with peers_of(master.address, 0, lanes=2) as peers, Script(code, master.address) as script:
        peers[0].wait_for_world_size(2, timeout=15)
        script.expect("in")
        before = eventually(lambda: len(found := family(script.pid)) == 5 and found, "an actor and four workers")
        killed = script.pid if victim == "training process" else before[victim]
        os.kill(killed, signal.SIGKILL)
        if victim != "training process":
            eventually(lambda: gone(killed), "it is dead")
            if victim != "pccl-peer":
                eventually(lambda: is_whole(family(script.pid), victim, killed), "rebuilt")
            script.say()
            script.expect("closing")
        script.end()

        for name, pid in before.items():
            eventually(lambda pid=pid: gone(pid), f"{name} is gone")
        peers[0].update_topology()
        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1


# What makes an actor fail, each in another part of the code: whether it is a member by then, and the mailbox message.
FATAL_MAIL = {
    "operations that are none": (True, "pack(CallReduce(b'nothing'))"),
    "half a call": (True, "pack(connect)[:-1]"),
    "half a first call": (False, "pack(connect)[:-1]"),
    "addresses that are none": (False, "pack(replace(connect, addresses=b'nowhere'))"),
    "options that are none": (False, "pack(replace(connect, options=connect.options + b'\\nslots=many'))"),
}


@pytest.mark.parametrize(("is_member", "mail"), FATAL_MAIL.values(), ids=FATAL_MAIL.keys())
def test_an_actor_that_fails_does_not_show_the_token(is_member: bool, mail: str) -> None:
    """Goal: its traceback, with the story of its machine, goes to standard error; the token must not be in it."""
    token = "secret-that-no-log-may-show"
    code = f"""
        from pccl._core.protocol.codec import pack
        from pccl._core.protocol.mailbox import CallConnect, CallReduce
        from pccl._core.records import replace
        from pccl.client.actor_client import ActorClient
        options = quick(token={token!r})
        connect = CallConnect(0, 1, 1, 0, 1, b"127.0.0.1 1", "", 0, options.encode().encode())
        member = join(token={token!r}) if {is_member} else None
        actor = member._actor if member else ActorClient(options)
        actor.mailbox.send({mail})
        assert actor.process.wait(15.0)
        say("actor", actor.process.describe_end())
    """
    with running_master(quick(token=token)) as guarded, Script(code, guarded.address) as script:
        assert script.expect("actor") == "ended with status 1; the reason is on standard error"
        script.end()
        assert "Traceback" in script.errors()
        assert token not in script.errors()


def test_an_actor_lives_longer_than_the_thread_that_started_it(master: MasterNode) -> None:
    """Goal: a parent-death signal follows the thread; a connect in a short-lived one must not end with it."""
    with peers_of(master.address, 0) as peers:
        peer = peers.newcomer()
        connecting = threading.Thread(target=peer.connect)
        connecting.start()
        peers[0].wait_for_world_size(2, timeout=15)
        connecting.join()
        peers.update()
        peers.update()

        assert not gone(actor_pid(peer))
        assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_many_lives_leave_no_trace(master: MasterNode) -> None:
    """Goal: repeated connect and close: the leak guard checks this process, and the master keeps nothing either."""
    with peers_of(master.address, 0) as peers:
        before = len(descriptors(master_pid(master)))
        for _ in range(20):
            with Communicator(master.address, options=QUICK) as newcomer:
                together(newcomer.connect, lambda: peers[0].wait_for_world_size(2))
            peers[0].update_topology()

        eventually(lambda: len(descriptors(master_pid(master))) <= before, "the master has closed its side")


def test_a_peer_without_descriptors_for_its_workers_is_told_so(master: MasterNode) -> None:
    """Goal: without free file descriptors only this newcomer is refused, with the reason; no other peer is affected."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        try:
            Communicator(sys.argv[1], 0, 64, options=QUICK).connect()
        except KickedError as error:
            say("kicked", error.reason)
    """
    with Communicator(master.address, 0, 64, options=QUICK) as veteran:
        veteran.connect()
        with Script(code, master.address) as script:
            while script.process.poll() is None:
                veteran.update_topology()

            assert "cannot start workers: Too many open files" in script.expect("kicked")
        assert veteran.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1

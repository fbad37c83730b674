"""What runs beside a training process: names, lives, descriptors and memory of its actor and workers.

Nothing outlives a SIGKILL of any one of them, and nothing is inherited that would keep somebody else's connection open.
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
    crew_of,
    eventually,
    gone,
    master_pid,
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
    """Memory that this process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return (sizes["Private_Clean"] + sizes["Private_Dirty"]) * 1024


def descriptors(pid: int) -> dict[int, str]:
    """Open descriptors beyond the three standard ones, and what is behind them."""
    folder = Path(f"/proc/{pid}/fd")
    return {int(entry.name): os.readlink(entry) for entry in folder.iterdir() if int(entry.name) > 2}


def family(pid: int) -> dict[str, int]:
    """The actor and the workers of a training process, by name."""
    actors = children(pid)
    return {**actors, **children(actors.get("pccl-peer", 0) or pid)}


# ---------------------------------------------------------------------------------------------- what they are


def test_processes_have_names(master: MasterNode) -> None:
    """Goal: `ps` tells which process is what."""
    with crew_of(master.address, 0, 0, lanes=2) as crew:
        assert comm(master_pid(master)) == "pccl-master"
        assert comm(actor_pid(crew[0])) == "pccl-peer"
        assert set(children(actor_pid(crew[0]))) == {"pccl-send-0", "pccl-send-1", "pccl-recv-0", "pccl-recv-1"}


def test_an_idle_worker_is_small(master: MasterNode) -> None:
    """Goal: workers share the actor's pages; what each has for itself stays small."""
    with crew_of(master.address, 0, 0, lanes=2) as crew:
        sizes = {name: private_bytes(pid) for name, pid in children(actor_pid(crew[0])).items()}

        assert max(sizes.values()) < WORKER_BYTES_MAX, sizes


def test_the_actor_brings_only_what_it_needs(master: MasterNode) -> None:
    """Goal: no numpy, no torch, no logging in the actor, whatever the training process has loaded."""
    with crew_of(master.address, 0) as crew:
        mapped = Path(f"/proc/{actor_pid(crew[0])}/maps").read_text()

        assert "numpy" not in mapped
        assert "torch" not in mapped


def test_workers_inherit_nothing(master: MasterNode) -> None:
    """Goal: a worker holds its mailbox, its one connection and what it is woken by; no port, no line to the master."""
    with crew_of(master.address, 0, 0, lanes=2) as crew:
        actor = descriptors(actor_pid(crew[0]))
        for name, pid in children(actor_pid(crew[0])).items():
            eventually(lambda pid=pid: len(sockets(pid)) == 1, "it has its connection")
            held = Counter(target.rstrip("0123456789[]") for target in descriptors(pid).values())

            # Bells of the actor and of both senders, and its own; the pipe tells the training process when it is gone.
            bells = 3 if "send" in name else 4
            assert held == {"socket:": 2, "pipe:": 1, "anon_inode:[eventpoll": 1, "anon_inode:[eventfd": bells}, name
            assert not {target for target in descriptors(pid).values() if target.startswith("socket")} & {
                *actor.values()
            }


def test_the_actor_inherits_nothing(master: MasterNode) -> None:
    """Goal: files and sockets of the training process stay with it: an actor keeps no checkpoint and no port open."""
    with Path("/dev/zero").open() as file, crew_of(master.address, 0) as crew:
        os.set_inheritable(file.fileno(), True)
        crew.admit(crew.newcomer())

        assert "/dev/zero" not in descriptors(actor_pid(crew[1])).values()
        pipes = [target for target in descriptors(actor_pid(crew[1])).values() if target.startswith("pipe")]
        assert len(pipes) == 1, "one is its own: it tells when it is gone"


# ---------------------------------------------------------------------------------------------- deaths


def is_whole(found: dict[str, int], victim: str, killed: int) -> bool:
    """Whether there are five again, one of them in the victim's place. Who was just forked has its parent's name."""
    return len(found) == 5 and found.get(victim, killed) != killed


@pytest.mark.parametrize("victim", ["training process", "pccl-peer", "pccl-send-0", "pccl-recv-1"])
def test_nothing_outlives_a_kill(master: MasterNode, victim: str) -> None:
    """Goal: whoever of them is killed, in the end nobody is left who belonged to a life that is over."""
    code = """
        peer = Communicator(sys.argv[1], 0, 2, options=QUICK)
        peer.connect()
        say("in")
        sys.stdin.readline()
        say("closing")
        peer.close()
    """
    with crew_of(master.address, 0, lanes=2) as crew, Script(code, master.address) as script:
        crew[0].wait_for_world_size(2, timeout=15)
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
        crew[0].update_topology()
        assert crew[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1


# What makes an actor fail, each in another place: whether it is a member by then, and what it finds in its mailbox.
FATAL_MAIL = {
    "operations that are none": (True, "pack(CallReduce(b'nothing'))"),
    "half a call": (True, "pack(connect)[:-1]"),
    "half a first call": (False, "pack(connect)[:-1]"),
    "addresses that are none": (False, "pack(replace(connect, addresses=b'nowhere'))"),
    "options that are none": (False, "pack(replace(connect, options=connect.options + b'\\nslots=many'))"),
}


@pytest.mark.parametrize(("is_member", "mail"), FATAL_MAIL.values(), ids=FATAL_MAIL.keys())
def test_an_actor_that_fails_does_not_show_the_token(is_member: bool, mail: str) -> None:
    """Goal: its traceback, with the story of its machine, goes to standard error, which others may read."""
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
        assert script.expect("actor") == "ended with status 1"
        script.end()
        assert "Traceback" in script.errors()
        assert token not in script.errors()


def test_an_actor_lives_longer_than_the_thread_that_started_it(master: MasterNode) -> None:
    """Goal: a parent-death signal follows the thread; a connect in a short-lived one must not end with it."""
    with crew_of(master.address, 0) as crew:
        peer = crew.newcomer()
        connecting = threading.Thread(target=peer.connect)
        connecting.start()
        crew[0].wait_for_world_size(2, timeout=15)
        connecting.join()
        crew.update()
        crew.update()

        assert not gone(actor_pid(peer))
        assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_many_lives_leave_no_trace(master: MasterNode) -> None:
    """Goal: connect and close, over and over: this process has the leak guard, and the master keeps nothing either."""
    with crew_of(master.address, 0) as crew:
        before = len(descriptors(master_pid(master)))
        for _ in range(20):
            with Communicator(master.address, options=QUICK) as newcomer:
                together(newcomer.connect, lambda: crew[0].wait_for_world_size(2))
            crew[0].update_topology()

        eventually(lambda: len(descriptors(master_pid(master))) <= before, "the master has closed its side")


def test_a_peer_without_descriptors_for_its_workers_is_told_so(master: MasterNode) -> None:
    """Goal: a machine that has run out of something costs one newcomer its place, with the reason, and nobody else."""
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

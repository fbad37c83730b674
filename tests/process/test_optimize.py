"""optimize_topology with real peers on loopback: probes, new rings, losses; and foreign probes at a peer's port."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks import networks
from pccl import Attribute, Communicator, ReduceOp, Result
from pccl._core.master import optimizer
from pccl._core.master.events import BeginMoonshot, MoonshotFound
from pccl._core.protocol.hellos import JoinProbe
from pccl._core.protocol.messages import Registered
from pccl.actors.io.listener import bind
from pccl.actors.master.master_actor import MasterActor
from pccl.actors.workers.probe_worker import ANSWER
from pccl.errors import PCCLError, UsageError

from .helpers import (
    Peers,
    Script,
    actor_pid,
    background,
    children,
    eventually,
    peers_of,
    quick,
    running_master,
    together,
)
from .raw_client import RawClient

# No loss here is noticed by the heartbeat timeout, nor by that of wiring: both are longer than the helpers wait.
OPTIONS = quick(probe_time=0.2, heartbeat_timeout=60.0, wire_timeout=60.0)
WORKERS = ("pccl-probe", "pccl-count")

VICTIM = """
peer = join(probe_time=0.2, heartbeat_timeout=60.0, wire_timeout=60.0)
while True:
    try:
        peer.optimize_topology()
        say("optimized", peer.get_attribute(Attribute.LOCAL_WORLD_SIZE))
    except PCCLError as error:
        say("failed", error)
        break
    sys.stdin.readline()
"""


def optimize(peers: list[Communicator], timeout: float = 15.0) -> float:
    """Call optimize_topology on all of them; return the seconds that it took."""
    began = time.monotonic()
    together(*(member.optimize_topology for member in peers), timeout=timeout)
    return time.monotonic() - began


def reduce(peers: list[Communicator], world: int) -> None:
    """Check that the ring works: reduce over all members."""
    tensors = [np.ones(5000, np.float32) for _ in peers]
    calls = [
        partial(member.all_reduce, tensor, tensor, op=ReduceOp.SUM)
        for member, tensor in zip(peers, tensors, strict=True)
    ]
    together(*calls)
    assert all((tensor == world).all() for tensor in tensors)


def has_no_workers(member: Communicator) -> bool:
    return not [name for name in children(actor_pid(member)) if name.startswith(WORKERS)]


@contextlib.contextmanager
def reversing_master(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a master in this process that always chooses the reversed ring, so that one is adopted."""
    monkeypatch.setattr(optimizer, "choose_ring", lambda ring, *_: ([ring[0], *ring[:0:-1]], "for this test"))
    actor = MasterActor(bind("127.0.0.1", 0), b"", OPTIONS, lambda *_: None)
    thread = threading.Thread(target=actor.run)
    thread.start()
    try:
        yield f"127.0.0.1:{actor.port}"
    finally:
        actor.stop()
        thread.join()


@pytest.mark.parametrize("lanes", [1, 3])
def test_peers_measure_and_reduce_afterwards(lanes: int) -> None:
    """Goal: the first call measures, the second has nothing to do, the ring works, and no worker is left behind."""
    options = quick(probe_time=0.5)
    with running_master(options) as master, peers_of(master.address, 0, 0, 0, 1, lanes=lanes, options=options) as peers:
        first = optimize(peers)
        assert first > 1.0, "two rounds of 0.5 s"
        assert optimize(peers) < first
        assert {member.get_attribute(Attribute.GLOBAL_WORLD_SIZE) for member in peers} == {4}
        reduce(peers[:3], 3)
        for member in peers:
            eventually(partial(has_no_workers, member), "workers of the measurement end")


def test_an_adopted_ring_is_another_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: neighbours change, epochs grow, attributes are fresh, and the reduce goes over the new ring."""
    with reversing_master(monkeypatch) as address, peers_of(address, 0, 0, 0, 0, options=OPTIONS) as peers:
        before = {member._last_round("epoch").epoch for member in peers}
        optimize(peers)
        after = {member._last_round("epoch").epoch for member in peers}

        assert len(after) == 1
        assert max(before) + 1 == after.pop()
        reduce(peers, 4)


def test_the_master_searches_on_in_a_child() -> None:
    """Goal: a moonshot is a process, its rings become events, and it ends with the master."""
    rates, _ = networks.planted(20, seed=3)
    found: list[Any] = []
    actor = MasterActor(bind("127.0.0.1", 0), b"", OPTIONS, lambda *_: None)
    actor._feed = found.append  # type: ignore[assignment, method-assign]
    ring = tuple(range(101, 121))
    actor.loop.after(0, lambda: actor._search(BeginMoonshot(0, ring, rates, 1)))
    thread = threading.Thread(target=actor.run)
    thread.start()
    try:
        events = eventually(lambda: [one for one in found if isinstance(one, MoonshotFound)], "a better ring is found")
        assert set(events[0].ring) == set(ring)
        assert events[0].group == 0
        assert events[0].ring[0] == 101
    finally:
        actor.stop()
        thread.join()
    assert actor._moonshot.pid == 0


# The fault point of the victim, and whether it is lost by it; a killed worker costs only its measurement.
POINTS = {
    "vote": ("peer.send.VoteOptimize:1:kill", True),
    "probing": ("peer.BeginProbe:1:kill", True),
    "probing, the last round": ("peer.BeginProbe:2:kill", True),
    "reporting": ("peer.send.Probed:1:kill", True),
    "solving": ("peer.send.Probed:2:kill", True),
    "adopting": ("peer.send.Wired:2:kill", True),
    "a sending worker": ("probe.send:3:kill", False),
    "a counting worker": ("probe.count:3:kill", False),
}


@pytest.mark.parametrize("phase", POINTS)
def test_a_death_in_any_phase_disturbs_nobody(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the calls of all others return at once, without the help of a timeout, and the ring works."""
    fault, dies = POINTS[phase]
    with reversing_master(monkeypatch) as address, peers_of(address, 0, 0, options=OPTIONS) as peers:
        with Script(VICTIM, address, PCCL_FAULT=fault) as victim:
            eventually(partial(_let_in, peers), "the victim is a member")
            optimize(peers)
            if dies:
                victim.expect("failed")
                reduce(peers, 2)
            else:
                assert victim.expect("optimized") == "3"
                world = {member.get_attribute(Attribute.LOCAL_WORLD_SIZE) for member in peers}
                assert world == {3}


def _let_in(peers: Peers) -> bool:
    peers.update()
    return peers[0].get_attribute(Attribute.LOCAL_WORLD_SIZE) == len(peers) + 1


def test_a_vote_that_is_given_up_does_not_count() -> None:
    """Goal: after Ctrl-C or close the vote does not count; the others continue without it."""
    with running_master(OPTIONS) as master, peers_of(master.address, 0, 0, 0, options=OPTIONS) as peers:
        waiting = background(lambda: optimize(peers[:2]))
        assert not waiting.ended.wait(0.3)
        peers.dismiss(peers[2])

        waiting.result()
        reduce(peers, 2)


def test_a_lone_peer_is_told_that_it_is_alone() -> None:
    with running_master(OPTIONS) as master, peers_of(master.address, 0, options=OPTIONS) as peers:
        with pytest.raises(UsageError, match="at least 2 peers") as caught:
            peers[0].optimize_topology()
        assert caught.value.result is Result.INVALID_USAGE
        with pytest.raises(UsageError, match="connect"):
            Communicator(master.address).optimize_topology()


def test_reduces_must_be_awaited_first() -> None:
    with running_master(OPTIONS) as master, peers_of(master.address, 0, 0, options=OPTIONS) as peers:
        tensor = np.ones(10, np.float32)
        handle = peers[0].all_reduce_async(tensor, tensor, op=ReduceOp.SUM)
        with pytest.raises(PCCLError) as caught:
            peers[0].optimize_topology()
        assert caught.value.result is Result.PENDING_ASYNC_OPS
        other = np.ones(10, np.float32)
        peers[1].all_reduce(other, other, op=ReduceOp.SUM)
        assert handle.wait()[0]
        optimize(peers)


def test_calls_that_never_meet_are_explained() -> None:
    options = quick(probe_time=0.2, deadlock_timeout=0.3)
    with running_master(options) as master, peers_of(master.address, 0, 0, options=options) as peers:
        calls = [background(peers[0].optimize_topology), background(peers[1].update_topology)]
        for call in calls:
            error = call.error()
            assert isinstance(error, PCCLError)
            assert "optimize_topology" in str(error)


# --- foreign probes ---------------------------------------------------------


@pytest.fixture
def target() -> Iterator[tuple[Communicator, str, Callable[..., Any]]]:
    """Yield a member, its port, and a maker of valid hellos with changes."""
    runs: list[bytes] = []
    with running_master(OPTIONS) as master, peers_of(master.address, 0, options=OPTIONS) as peers:
        with RawClient(master.address) as client:
            client.register()
            runs.append(client.hear(Registered).run)
        port = _port_of(actor_pid(peers[0]))

        def hello(**changes: Any) -> Callable[[bytes], JoinProbe]:
            usual = {"round": 9, "source": 77, "lane": 0, "lanes": 1, "milliseconds": 200}
            fields = {"run": runs[0], "target": peers[0].peer_id, **usual, **changes}
            return lambda proof: JoinProbe(proof=proof, **fields)

        yield peers[0], f"127.0.0.1:{port}", hello


def _port_of(pid: int) -> int:
    """Return the port that a peer actor listens on."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").rstrip("]"))
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for row in [line.split() for line in file.readlines()[1:]]:
                if row[9] in inodes and row[3] == "0A":
                    return int(row[1].rpartition(":")[2], 16)
    raise AssertionError(f"process {pid} does not listen")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": bytes(16)},
        {"target": 99},
        {"lanes": 0},
        {"lane": 1},
        {"lanes": 9999},
        {"milliseconds": 0},
        {"milliseconds": 4_000_000_000},
    ],
    ids=str,
)
def test_hellos_that_make_no_sense_are_refused(target: Any, changes: dict[str, Any]) -> None:
    member, address, hello = target
    with RawClient(address) as client, pytest.raises(PermissionError):
        client.handshake(hello(**changes))
    assert has_no_workers(member)


def test_a_lane_can_be_taken_once_and_half_a_pool_is_let_go(target: Any) -> None:
    """Goal: a probe with too few connections ends by itself, and starts no worker."""
    member, address, hello = target
    with RawClient(address) as first, RawClient(address) as again:
        first.handshake(hello(lanes=2))
        with pytest.raises(PermissionError, match="is taken"):
            again.handshake(hello(lanes=2))
        assert has_no_workers(member)
        first._socket.settimeout(15)
        assert first.is_turned_away()


def test_a_stranger_to_the_master_is_counted_and_answered(target: Any) -> None:
    """Goal: a target needs no order; it answers with the bytes that came, and its worker ends."""
    member, address, hello = target
    with RawClient(address) as client:
        client.handshake(hello())
        sending = background(lambda: _send_until_answered(client._socket))
        nbytes, elapsed_ns = ANSWER.unpack(sending.result())
    assert nbytes > 0
    assert elapsed_ns > 20_000_000
    eventually(partial(has_no_workers, member), "the worker ends")


def _send_until_answered(sock: socket.socket) -> bytes:
    answer = b""
    sock.setblocking(False)
    deadline = time.monotonic() + 10
    while len(answer) < ANSWER.size and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            sock.send(bytes(10_000))
        with contextlib.suppress(BlockingIOError):
            answer += sock.recv(ANSWER.size)
        time.sleep(0.001)  # between two checks of the answer
    return answer


def test_garbage_after_the_welcome_is_only_bytes(target: Any) -> None:
    """Goal: bytes of a source are counted and never decoded, and a source that closes leaves nothing behind."""
    member, address, hello = target
    with RawClient(address) as client:
        client.handshake(hello())
        client.send(os.urandom(100_000))
    eventually(partial(has_no_workers, member), "the worker ends")
    assert isinstance(member, Communicator)
    assert member.are_peers_pending() in (True, False)

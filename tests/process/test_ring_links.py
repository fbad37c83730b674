"""Rings of real connections: which workers serve them, and which of them stay when the ring changes.

The tests identify a worker by its process name, and a connection by the inode of its socket, which changes exactly
when the connection changes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pccl import Attribute, Communicator, MasterNode, Result
from pccl._core.protocol.messages import Kick
from pccl.errors import KickedError

from .helpers import (
    actor_pid,
    background,
    children,
    eventually,
    free_port,
    peers_of,
    quick,
    running_master,
    sockets,
    together,
)
from .namespaces import HostNetwork
from .raw_client import RawClient

Lanes = dict[str, tuple[int, frozenset[str]]]  # worker's name to its pid and its connections


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


def lanes_of(peer: Communicator) -> Lanes:
    """Return the workers of a peer and the connections that they hold."""
    return {name: (pid, frozenset(sockets(pid))) for name, pid in children(actor_pid(peer)).items()}


def names(lanes: int) -> set[str]:
    """Return the names of the workers of a peer with so many lanes."""
    return {f"pccl-{way}-{lane}" for way in ("send", "recv") for lane in range(lanes)}


def is_whole(peers: list[Communicator], lanes: int = 1) -> bool:
    """Whether every worker of every peer holds one connection of its own."""
    found = [lanes_of(peer) for peer in peers]
    held = [connection for workers in found for _, connections in workers.values() for connection in connections]
    return all(set(workers) == names(lanes) for workers in found) and len(set(held)) == len(peers) * 2 * lanes


# ---------------------------------------------------------------------------------------------- whole rings


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_every_lane_has_its_two_workers(master: MasterNode, lanes: int) -> None:
    """Goal: when connect returns, each lane of each peer has a sender and a receiver with one connection each."""
    with peers_of(master.address, 0, 0, lanes=lanes) as peers:
        eventually(lambda: is_whole(peers, lanes), "all lanes have their workers")


def test_the_smaller_pool_decides(master: MasterNode) -> None:
    """Goal: neighbours with different pools use the smaller one, and no peer is refused."""
    with peers_of(master.address, 0, lanes=3) as peers:
        peers.admit(peers.newcomer(lanes=1))

        eventually(lambda: is_whole(peers, 1), "one lane each way")


def test_a_peer_alone_has_no_workers(master: MasterNode) -> None:
    """Goal: no worker is started before there is another member in the group."""
    with peers_of(master.address, 0, 1) as peers:
        assert [lanes_of(peer) for peer in peers] == [{}, {}]


# ---------------------------------------------------------------------------------------------- changes


def test_a_join_changes_one_edge(master: MasterNode) -> None:
    """Goal: a newcomer in a ring of four opens one edge; all workers and the other connections stay as they are."""
    with peers_of(master.address, 0, 0, 0, 0) as peers:
        eventually(lambda: is_whole(peers), "the ring of four")
        before = [lanes_of(peer) for peer in peers]
        peers.admit(peers.newcomer())
        eventually(lambda: is_whole(peers), "the ring of five")
        after = [lanes_of(peer) for peer in peers[:4]]

        assert [{name: pid for name, (pid, _) in lanes.items()} for lanes in before] == [
            {name: pid for name, (pid, _) in lanes.items()} for lanes in after
        ]
        changed = [name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]]
        assert sorted(changed) == ["pccl-recv-0", "pccl-send-0"]


def test_a_leave_changes_one_edge(master: MasterNode) -> None:
    """Goal: without one of four, its two neighbours get one new edge and no other edge changes."""
    with peers_of(master.address, 0, 0, 0, 0) as peers:
        eventually(lambda: is_whole(peers), "the ring of four")
        peers.dismiss(peers[2])
        before = [lanes_of(peer) for peer in peers]
        peers.update()
        eventually(lambda: is_whole(peers), "the ring of three")
        after = [lanes_of(peer) for peer in peers]

        kept = [name for old, new in zip(before, after, strict=True) for name in old if old[name] == new[name]]
        assert len(kept) >= 4, f"{kept} of six lanes were left alone"
        assert all(old[name][0] == new[name][0] for old, new in zip(before, after, strict=True) for name in old)


def test_other_groups_are_left_alone(master: MasterNode) -> None:
    """Goal: a loss in one group rewires that group, and touches no connection of another."""
    with peers_of(master.address, 0, 0, 0, 1, 1) as peers:
        eventually(lambda: is_whole(peers), "both rings")
        others = [peer for peer in peers if peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 2]
        before = [lanes_of(peer) for peer in others]
        peers.dismiss(next(peer for peer in peers if peer not in others))
        peers.update()
        eventually(lambda: is_whole(peers), "both rings again")

        assert [lanes_of(peer) for peer in others] == before


@pytest.mark.parametrize("worker", ["pccl-send-1", "pccl-recv-0"])
def test_a_killed_worker_is_replaced(master: MasterNode, worker: str) -> None:
    """Goal: the ring is whole again by itself, with a new set of workers, and every membership goes on."""
    with peers_of(master.address, 0, 0, 0, lanes=2) as peers:
        eventually(lambda: is_whole(peers, 2), "the ring of three")
        victim = lanes_of(peers[1])[worker][0]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: lanes_of(peers[1]).get(worker, (victim,))[0] != victim, "another worker has its name")
        eventually(lambda: is_whole(peers, 2), "the ring is whole again")
        peers.update()

        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 3


# ---------------------------------------------------------------------------------------------- unreachable pairs


def test_a_newcomer_that_nobody_can_dial_is_refused(master: MasterNode) -> None:
    """Goal: a wrong advertised port costs the newcomer its admission, at once; no member makes a call for that."""
    with peers_of(master.address, 0, 0) as peers:
        wrong = quick(advertise=f"127.0.0.1:{free_port()}")

        error = background(Communicator(master.address, options=wrong).connect).error()

        assert isinstance(error, KickedError)
        assert error.result is Result.RANK_CONNECTION_FAILED
        assert "the master cannot reach" in error.reason
        assert "peer 1 cannot reach peer 3" in error.reason or "peer 2 cannot reach peer 3" in error.reason
        assert wrong.advertise in error.reason
        assert not any(together(*(peer.are_peers_pending for peer in peers)))
        assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        peers.admit(peers.newcomer())


def test_an_advertised_name_is_resolved(master: MasterNode) -> None:
    """Goal: a peer may advertise a host name with a port; other peers get its numeric address."""
    port = free_port()
    with peers_of(master.address, 0) as peers:
        peers.admit(peers.newcomer(options=quick(port=port, advertise=f"localhost:{port}")))

        eventually(lambda: is_whole(peers), "the ring of two")


# Joins, waits for a world of the given size, and stays for as long as its standard input is open.
RESIDENT = """
    peer = Communicator(sys.argv[1], options=quick(connect_timeout=1.0))
    try:
        peer.connect()
        say("in", peer.peer_id)
        peer.wait_for_world_size(int(sys.argv[2]))
        say("whole")
        sys.stdin.readline()
        say("world", peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE))
    except KickedError as error:
        say("kicked", error.result.name, error.reason)
    peer.close()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_root
def test_a_ring_goes_around_a_pair_that_cannot_connect() -> None:
    """Goal: four hosts of which two cannot reach each other form a ring in which those are not neighbours."""
    with HostNetwork(hosts=4) as network, running_master(host=network.gateway) as master, ExitStack() as scripts:
        # In the order of joining the last two would be neighbours.
        network.cut(2, 3)
        peers = []
        for host in range(4):
            peers.append(scripts.enter_context(network.start(host, RESIDENT, master.address, 4)))
            peers[-1].expect("in")
        for peer in peers:
            peer.expect("whole")
            peer.say()

        assert [peer.expect("world") for peer in peers] == ["4"] * 4
        assert [peer.end() for peer in peers] == [0] * 4


@needs_root
def test_a_newcomer_without_a_ring_is_refused_and_the_veteran_stays() -> None:
    """Goal: two hosts that cannot reach each other, and a third that reaches both: the first two of a ring go on.

    While it is one against one, both are told which pair it is, and nobody is kicked.
    """
    with HostNetwork(hosts=3) as network, running_master(host=network.gateway) as master, ExitStack() as scripts:
        network.cut(0, 1)
        veteran = scripts.enter_context(network.start(0, RESIDENT, master.address, 2))
        veteran.expect("in 1")
        newcomer = scripts.enter_context(network.start(1, RESIDENT, master.address, 2))
        told = re.compile("cannot form a ring: peer [12] cannot reach peer [12] at 198")
        for one in (veteran, newcomer):
            eventually(lambda: told.search(one.errors()), "both are told which pair cannot connect")  # noqa: B023

        third = scripts.enter_context(network.start(2, RESIDENT, master.address, 2))
        reason = newcomer.expect("kicked RANK_CONNECTION_FAILED")
        assert "peer 1 cannot reach peer 2" in reason or "peer 2 cannot reach peer 1" in reason
        assert newcomer.end() == 0
        for peer in (veteran, third):
            peer.expect("whole")
            peer.say()
            assert peer.expect("world") == "2"
            assert peer.end() == 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "127.0.0.1\nERROR a line of its own", "1", "\0", "::1%lo"])
def test_a_newcomer_that_advertises_no_number_is_refused(master: MasterNode, host: str) -> None:
    """Goal: what a foreign program says about itself reaches neither the log nor the peers that would dial it."""
    with peers_of(master.address, 0) as peers, RawClient(master.address) as client:
        client.register(host=host, port=1)
        kick = client.hear(Kick)

        assert kick.result == Result.INVALID_USAGE.value
        assert repr(host) in kick.reason
        assert not peers[0].are_peers_pending()
        peers[0].update_topology()

"""Membership: admission, rounds, attributes and leaving, with real actors on loopback.

Where a test says that something is noticed *at once*, its heartbeat timeout is a minute: the timeout alone could not
have caused it within the bound of the test.
"""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pccl import Attribute, Communicator, MasterNode, Result
from pccl._core.protocol.hellos import Challenge
from pccl.actors.io.addresses import parse_address
from pccl.errors import KickedError, MasterConnectionError, MasterLostError, TooFewPeersError, UsageError

from .helpers import Script, background, eventually, free_port, peers_of, quick, running_master, together
from .raw_client import framed

PATIENT = quick(heartbeat_timeout=60.0)

CALLS: dict[str, Callable[[Communicator], object]] = {
    "update_topology": lambda peer: peer.update_topology(),
    "are_peers_pending": lambda peer: peer.are_peers_pending(),
    "wait_for_world_size": lambda peer: peer.wait_for_world_size(2),
    "get_attribute": lambda peer: peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
}


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture
def address_without_a_master() -> str:
    """Return an address at which a test may start a master. No other process listens there meanwhile."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def patient_master() -> Iterator[MasterNode]:
    with running_master(PATIENT) as node:
        yield node


def world(peer: Communicator) -> tuple[int, int, int, int]:
    """Return global world size, own group's size, number of groups, size of the largest group."""
    return (
        peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
        peer.get_attribute(Attribute.LOCAL_WORLD_SIZE),
        peer.get_attribute(Attribute.NUM_DISTINCT_PEER_GROUPS),
        peer.get_attribute(Attribute.LARGEST_PEER_GROUP_WORLD_SIZE),
    )


def pending(peers: list[Communicator]) -> bool:
    """Return the answer of are_peers_pending, and check that all members get the same."""
    answers = together(*(peer.are_peers_pending for peer in peers))
    assert len(set(answers)) == 1, f"one question, different answers: {answers}"
    return answers[0]


# ---------------------------------------------------------------------------------------------- admission


def test_the_first_peer_is_accepted_at_once(master: MasterNode) -> None:
    """Goal: an empty run admits the first peer without a round."""
    with Communicator(master.address, options=quick()) as peer:
        peer.connect()

        assert world(peer) == (1, 1, 1, 1)
        assert not peer.are_peers_pending()


def test_a_later_peer_waits_for_every_member(master: MasterNode) -> None:
    """Goal: a newcomer is neither admitted nor counted before the last member has called update_topology."""
    with peers_of(master.address, 0, 0) as peers:
        first, second = peers
        newcomer = peers.newcomer()
        joining = background(newcomer.connect)
        eventually(lambda: pending([first, second]), "the newcomer is registered")
        round_of_first = background(first.update_topology)
        assert pending([first, second])

        assert not joining.ended.is_set()
        assert not round_of_first.ended.is_set()
        assert world(first) == world(second) == (2, 2, 1, 2)

        second.update_topology()
        round_of_first.result()
        joining.result()

        assert [world(peer) for peer in peers] == [(3, 3, 1, 3)] * 3
        assert not pending(peers)


def test_everybody_who_waits_is_admitted_in_one_round(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: all newcomers of a round are in each other's first attributes. Each logs that it waits."""
    waits = "not admitted yet: update_topology waits for peer 1"
    # Long enough that its second report, which comes after twice the time, is not taken for another newcomer's.
    with running_master(quick(vote_warning=2.0)) as master, peers_of(master.address, 0) as peers:
        joining = [background(peers.newcomer(group).connect) for group in (0, 1, 1)]
        eventually(lambda: caplog.text.count(waits) == 3, "three wait")
        peers[0].update_topology()
        for call in joining:
            call.result()

        assert [world(peer) for peer in peers] == [(4, 2, 2, 2)] * 4


def test_groups_are_counted_apart(master: MasterNode) -> None:
    """Goal: local size is the group's, largest and number of groups are the world's, and all see one world."""
    with peers_of(master.address, 0, 0, 7, 4_294_967_295) as peers:
        assert [world(peer) for peer in peers] == [(4, 2, 3, 2), (4, 2, 3, 2), (4, 1, 3, 2), (4, 1, 3, 2)]


def test_several_runs_in_one_process(master: MasterNode) -> None:
    """Goal: communicators of one process share nothing, not even a master."""
    with running_master() as other, peers_of(master.address, 0, 0) as here, peers_of(other.address, 0) as there:
        assert world(here[0]) == (2, 2, 1, 2)
        assert world(there[0]) == (1, 1, 1, 1)
        there[0].close()
        here.update()


# ---------------------------------------------------------------------------------------------- rounds


def test_update_topology_is_a_barrier(master: MasterNode) -> None:
    """Goal: no member leaves a round before all members have entered it, also in repeated rounds."""
    with peers_of(master.address, 0, 0, 1) as peers:
        entered = [0] * len(peers)

        def train(index: int) -> None:
            for step in range(1, 51):
                entered[index] = step
                peers[index].update_topology()
                assert min(entered) >= step

        together(*(lambda index=index: train(index) for index in range(len(peers))))


def test_pending_overlaps_a_round(master: MasterNode) -> None:
    """Goal: are_peers_pending works from another thread while update_topology waits, True and False alike."""
    with peers_of(master.address, 0, 0) as peers:
        first, second = peers
        waiting = background(first.update_topology)
        assert not pending([first, second])
        joining = background(peers.newcomer().connect)
        eventually(lambda: pending([first, second]), "the newcomer is registered")
        assert not waiting.ended.is_set()

        second.update_topology()
        waiting.result()
        joining.result()
        assert not pending(peers)


def test_two_threads_in_one_call(master: MasterNode) -> None:
    """Goal: of two threads in update_topology one gets UsageError at once, the other's vote stands."""
    with peers_of(master.address, 0, 0) as peers:
        first, second = peers
        calls = [background(first.update_topology) for _ in range(2)]
        eventually(lambda: any(call.ended.is_set() for call in calls), "one of them is refused")
        refused = next(call for call in calls if call.ended.is_set())

        error = refused.error()
        assert isinstance(error, UsageError)
        assert error.result is Result.INVALID_USAGE
        assert "another thread" in str(error)

        second.update_topology()
        for call in calls:
            if call is not refused:
                call.result()


# ---------------------------------------------------------------------------------------------- wait_for_world_size


def count_rounds(peer: Communicator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each vote that this communicator casts."""
    votes: list[int] = []
    vote = peer._update_topology

    def counted(name: str, wanted: int, deadline_ns: int | None) -> None:
        votes.append(wanted)
        vote(name, wanted, deadline_ns)

    monkeypatch.setattr(peer, "_update_topology", counted)
    return votes


def test_waiting_for_peers_does_not_spin(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: one vote waits while no newcomer comes; each newcomer that is not enough costs one more vote."""
    with peers_of(master.address, 0, 0) as peers:
        votes = [count_rounds(peer, monkeypatch) for peer in peers]
        waiting = [background(lambda peer=peer: peer.wait_for_world_size(3)) for peer in peers]
        outsider = peers.newcomer(group=5)
        outsider.connect()
        outsider_waits = background(lambda: outsider.wait_for_world_size(2))
        peers.newcomer().connect()

        assert [call.result() for call in waiting] == [3, 3]
        assert votes == [[3, 3], [3, 3]]
        peers.dismiss(outsider)
        assert isinstance(outsider_waits.error(), UsageError)


def test_the_last_one_to_come_need_not_wait(master: MasterNode) -> None:
    """Goal: the same lines in every peer, connect then wait_for_world_size, end for all of them with one round."""
    with peers_of(master.address, 0) as peers:
        early = background(lambda: peers[0].wait_for_world_size(2))
        late = peers.newcomer()
        late.connect()

        assert early.result() == 2
        # The early peer continues and does not vote again; the late peer must not wait for its vote.
        assert late.wait_for_world_size(2) == 2


def test_a_wait_that_times_out_withdraws_its_vote(master: MasterNode) -> None:
    """Goal: TooFewPeersError in time, and the withdrawn vote counts neither for others nor against the next call."""
    with peers_of(master.address, 0, 0) as peers:
        first, second = peers
        with pytest.raises(TooFewPeersError) as caught:
            first.wait_for_world_size(3, timeout=0.2)
        assert caught.value.result is Result.TOO_FEW_PEERS
        assert not pending([first, second])  # the master reads a peer's messages in order, so it has the withdrawal now

        alone = background(second.update_topology)
        assert not pending([first, second])
        assert not alone.ended.is_set()
        first.update_topology()
        alone.result()
        assert world(first) == world(second) == (2, 2, 1, 2)


# ---------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize("name", CALLS)
def test_calls_before_connect_and_after_close(name: str) -> None:
    """Goal: without a membership every call says so, and what to do."""
    peer = Communicator("127.0.0.1:1", options=quick())
    with pytest.raises(UsageError, match=r"call connect\(\) first") as early:
        CALLS[name](peer)
    peer.close()
    with pytest.raises(UsageError, match="closed") as late:
        CALLS[name](peer)

    assert early.value.result is late.value.result is Result.INVALID_USAGE
    assert early.value.func_name == name


def test_numbers_are_asked_for_while_connect_waits(master: MasterNode) -> None:
    """Goal: a call of another thread before connect() has returned gets this reason, not an internal error."""
    with peers_of(master.address, 0) as peers:
        newcomer = peers.newcomer()
        joining = background(newcomer.connect)
        eventually(lambda: newcomer._actor, "connect() has begun")

        with pytest.raises(UsageError, match="this peer is not a member yet"):
            newcomer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        peers[0].wait_for_world_size(2, timeout=15)
        joining.result()

        assert newcomer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_more_calls_than_slots(master: MasterNode) -> None:
    """Goal: calls in flight are bounded, and the one beyond is refused with the number and the remedy."""
    with peers_of(master.address, 0, 0, options=quick(slots=1)) as peers:
        first, second = peers
        waiting = background(first.update_topology)
        eventually(lambda: first._actor.calls.table.idle_slots == 0, "the slot is taken")  # type: ignore[union-attr]

        with pytest.raises(UsageError, match="all 1 completion slots are in use"):
            first.are_peers_pending()
        second.update_topology()
        waiting.result()


def test_connect_twice(master: MasterNode) -> None:
    """Goal: a second connect is refused and does not disturb the membership."""
    with peers_of(master.address, 0) as peers:
        with pytest.raises(UsageError, match="already connected") as caught:
            peers[0].connect()

        assert caught.value.result is Result.INVALID_USAGE
        peers[0].update_topology()


def test_no_master_there(address_without_a_master: str) -> None:
    """Goal: the last failed attempt ends connect with the address and the number of attempts."""
    peer = Communicator(address_without_a_master, options=quick())
    with pytest.raises(MasterConnectionError, match=rf"{address_without_a_master} within 2 attempts") as caught:
        peer.connect(n_attempts=2)

    assert caught.value.result is Result.MASTER_CONNECTION_FAILED


def test_connect_waits_for_a_master_that_comes_later(address_without_a_master: str) -> None:
    """Goal: attempts are spaced out, so that peers may be started before their master."""
    with Communicator(address_without_a_master, options=quick()) as peer:
        joining = background(lambda: peer.connect(n_attempts=100))
        eventually(lambda: peer._actor, "the first attempt is under way")
        with MasterNode(address_without_a_master, options=quick()):
            joining.result()

            assert world(peer) == (1, 1, 1, 1)


# ---------------------------------------------------------------------------------------------- leaving


def test_close_is_noticed_at_once(patient_master: MasterNode) -> None:
    """Goal: a leaving member stops counting at once, and close may be repeated."""
    with peers_of(patient_master.address, 0, 0, 0, options=PATIENT) as peers:
        waiting = [background(peer.update_topology) for peer in peers[1:]]
        leaver = peers[0]
        peers.dismiss(leaver)
        leaver.close()

        for call in waiting:
            call.result()
        assert [world(peer) for peer in peers] == [(2, 2, 1, 2)] * 2


def test_with_and_del_say_goodbye(patient_master: MasterNode) -> None:
    """Goal: the end of a `with` block and `del` both tell the other members at once."""
    with peers_of(patient_master.address, 0, options=PATIENT) as peers:
        with Communicator(patient_master.address, options=PATIENT) as newcomer:
            together(newcomer.connect, lambda: peers[0].wait_for_world_size(2))
        peers[0].update_topology()
        assert world(peers[0]) == (1, 1, 1, 1)

        dropped = Communicator(patient_master.address, options=PATIENT)
        together(dropped.connect, lambda: peers[0].wait_for_world_size(2))
        del dropped
        gc.collect()
        peers[0].update_topology()
        assert world(peers[0]) == (1, 1, 1, 1)


def test_a_process_that_ends_without_close_is_dropped_at_once(patient_master: MasterNode) -> None:
    """Goal: an exit that runs no destructor is noticed as quickly as close()."""
    code = """
        peer = join(heartbeat_timeout=60.0)
        sys.stdin.readline()
        os._exit(0)
    """
    with peers_of(patient_master.address, 0, options=PATIENT) as peers:
        with Script(code, patient_master.address) as script:
            assert peers[0].wait_for_world_size(2, timeout=15) == 2
            script.expect("in")
            script.say()
            peers[0].update_topology()

            assert world(peers[0]) == (1, 1, 1, 1)
            assert script.end() == 0


def test_the_same_communicator_connects_again_after_its_master_was_lost() -> None:
    """Goal: after MasterLostError, connect() alone makes the communicator a member again."""
    with running_master(port=free_port()) as master, peers_of(master.address, 0) as peers:
        address = master.address
        master.interrupt()
        eventually(lambda: isinstance(background(peers[0].update_topology).error(), MasterLostError), "it is noticed")
        with MasterNode(address, options=quick()):
            peers[0].connect()

            assert world(peers[0]) == (1, 1, 1, 1)
            peers[0].update_topology()


def test_the_same_communicator_connects_again_after_it_was_kicked() -> None:
    """Goal: KickedError carries the master's reason, and connect() makes the communicator a member again."""
    with running_master(quick(vote_timeout=0.3)) as master, peers_of(master.address, 0, 0) as peers:
        first, second = peers
        first.update_topology()
        with pytest.raises(KickedError, match="straggler"):
            second.update_topology()
        together(second.connect, lambda: first.wait_for_world_size(2))

        assert world(first) == world(second) == (2, 2, 1, 2)


def test_a_damaged_answer_of_the_master_is_tried_again(address_without_a_master: str) -> None:
    """Goal: a flipped bit in the handshake is a damaged frame, not another program; the next attempt succeeds."""
    port_is_free = threading.Event()

    def answer_badly(listener: socket.socket) -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                whole = framed(Challenge(bytes(32)))
                connection.sendall(whole[:-1] + b"!")
                connection.recv(4096)  # until it closes
        port_is_free.set()

    address = address_without_a_master
    listener = socket.create_server(parse_address(address))
    threading.Thread(target=answer_badly, args=(listener,), daemon=True).start()
    with Communicator(address, options=quick()) as peer:
        connecting = background(lambda: peer.connect(n_attempts=50))
        assert port_is_free.wait(15)
        with MasterNode(address):
            connecting.result()
            assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1

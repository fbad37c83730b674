"""One peer that does something else than the others: it alone is kicked, and the others go on and lose no step.

More than half of the peers must agree. Without a majority all of them get the explanation, and nobody is kicked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from pccl import Attribute, Communicator, MasterNode, ReduceOp, Result, SharedState, TensorInfo
from pccl.errors import KickedError, PeerLostError, UsageError

from .helpers import background, everybody, peers_of, ring_order, running_master
from .test_beginners import CALLS, ONES, check, explains, refusal

COUNT = 1000


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


def reduce_ones(peer: Communicator, count: int = COUNT, tag: int = 0) -> float:
    """Reduce an array of ones; return the first element of the sum."""
    array = np.ones(count, np.float32)
    peer.all_reduce(array, array, op=ReduceOp.SUM, tag=tag)
    assert array.min() == array.max()
    return float(array[0])


def train(peer: Communicator, wish: threading.Event) -> tuple[int, list[str]]:
    """Make steps until one member wishes to stop; return how many, and the reasons of what had to be repeated."""
    steps, lost = 0, []
    while True:
        peer.update_topology()
        gradient = np.ones(COUNT, np.float32)
        gradient[0] = float(wish.is_set())
        total = np.zeros_like(gradient)
        while True:
            try:
                info = peer.all_reduce(gradient, total, op=ReduceOp.SUM)
                break
            except PeerLostError as error:
                lost.append(str(error))
        assert info.local_world_size == 3, "the newcomer took part in no reduce"
        assert (total[1:] == 3).all()
        steps += 1
        if total[0]:
            return steps, lost


def test_a_newcomer_with_another_size_is_kicked_alone(master: MasterNode) -> None:
    """Goal: its error names both sizes; the three members repeat one reduce, and have made the same steps."""
    wish = threading.Event()
    with peers_of(master.address, 0, 0, 0) as peers:
        training = [background(partial(train, peer, wish)) for peer in peers]
        newcomer = peers.newcomer()
        newcomer.connect()
        with pytest.raises(KickedError) as caught:
            reduce_ones(newcomer, COUNT + 1)
        wish.set()
        ended = [member.result() for member in training]

        assert caught.value.result is Result.INVALID_ARGUMENT
        assert "it gave 1,001 x FLOAT, SUM; peers 1, 2, 3 gave 1,000 x FLOAT, SUM." in caught.value.reason
        assert len({steps for steps, _ in ended}) == 1
        for _, lost in ended:
            assert len(lost) == 1
            assert f"peer 4 was kicked: {caught.value.reason}" in lost[0]


def sync(peer: Communicator, state: SharedState) -> None:
    peer.sync_shared_state(state)
    state.push_revision()


def ask(peer: Communicator, _: SharedState) -> None:
    peer.are_peers_pending()


def hold_a_round(peer: Communicator, _: SharedState) -> None:
    peer.update_topology()


@pytest.mark.parametrize("step", [hold_a_round, sync, ask])
def test_a_newcomer_with_another_program_is_kicked_alone(
    master: MasterNode, step: Callable[[Communicator, SharedState], None]
) -> None:
    """Goal: it reduces while the others never do: it learns within 5 s what they do, and no call of theirs fails."""

    def follow(peer: Communicator) -> list[int]:
        """Make steps until the world has grown to 4 and is 3 again; the same decision on all members."""
        state = SharedState([TensorInfo.from_numpy(np.zeros(10), "weights")])
        worlds = [3]
        while worlds[-2:] != [4, 3]:
            for call in (hold_a_round, step):
                call(peer, state)
                world = peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
                if world != worlds[-1]:
                    worlds.append(world)
        return worlds

    with peers_of(master.address, 0, 0, 0) as peers:
        following = [background(partial(follow, peer)) for peer in peers]
        newcomer = peers.newcomer()
        newcomer.connect()
        began = time.monotonic()
        with pytest.raises(KickedError) as caught:
            reduce_ones(newcomer)
        seconds = time.monotonic() - began

        assert seconds < 5
        assert caught.value.result is Result.INVALID_USAGE
        assert "it waits in all_reduce (tag 0), and the majority (peers 1, 2, 3) in " in caught.value.reason
        assert [member.result() for member in following] == [[3, 4, 3]] * 3


def test_two_against_two_sizes_are_explained_to_all(master: MasterNode) -> None:
    """Goal: nobody is kicked without a majority, and the next reduce works."""
    with peers_of(master.address, 0, 0, 0, 0) as peers:

        def act(peer: Communicator, rank: int) -> str:
            with pytest.raises(UsageError) as caught:
                reduce_ones(peer, COUNT + rank // 2)
            assert caught.value.result is Result.INVALID_ARGUMENT
            return str(caught.value)

        [text] = set(everybody(peers, act))
        assert "peers 1, 2: 1,000 x FLOAT, SUM" in text
        assert "peers 3, 4: 1,001 x FLOAT, SUM" in text
        assert everybody(peers, lambda peer, _: reduce_ones(peer)) == [4] * 4


def test_two_against_two_calls_are_explained_to_all(master: MasterNode) -> None:
    """Goal: nobody is kicked without a majority, and the next calls work."""
    with peers_of(master.address, 0, 0, 0, 0) as peers:

        def act(peer: Communicator, rank: int) -> str:
            call = partial(reduce_ones, peer) if rank < 2 else peer.update_topology
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.result is Result.INVALID_USAGE
            return caught.value.message

        [text] = set(everybody(peers, act))
        assert "peers 1, 2 in all_reduce (tag 0); peers 3, 4 in update_topology" in text
        peers.update()
        assert everybody(peers, lambda peer, _: reduce_ones(peer)) == [4] * 4


def test_a_member_in_another_call_does_not_end_a_reduce(master: MasterNode) -> None:
    """Goal: the majority repeats its reduce and has the sum of those that remain."""
    with peers_of(master.address, 0, 0, 0) as peers:
        first, second, odd = ring_order(peers)
        waiting = background(odd.update_topology)

        def act(peer: Communicator) -> float:
            with pytest.raises(PeerLostError, match="was kicked: it waits in update_topology"):
                reduce_ones(peer, tag=7)
            return reduce_ones(peer, tag=7)

        calls = [background(partial(act, peer)) for peer in (first, second)]

        assert [call.result() for call in calls] == [2, 2]
        error = waiting.error()
        assert isinstance(error, KickedError)
        assert "the majority (peers 1, 2) in all_reduce (tag 7)" in error.reason


# ---------------------------------------------------------------------------------------------- the page


@explains("Another call than the majority")
def test_one_reduces_while_two_hold_a_round(master: MasterNode) -> None:
    """Goal: the odd one reads in which call the majority is; the round completes."""
    with peers_of(master.address, 0, 0, 0) as peers:

        def act(peer: Communicator, rank: int) -> str:
            if rank == 2:
                return refusal(CALLS["all_reduce"], peer)
            peer.update_topology()
            return ""

        check("Another call than the majority", everybody(peers, act)[2])


@explains("Another reduce than the majority")
def test_a_tensor_that_does_not_match_those_of_a_majority(master: MasterNode) -> None:
    """Goal: the odd one reads what it gave and what the others gave; the others read why it was kicked."""
    with peers_of(master.address, 0, 0, 0) as peers:

        def act(peer: Communicator, rank: int) -> str:
            array = np.ones(9 if rank == 2 else 8, np.float32)
            return refusal(lambda peer: peer.all_reduce(array, array.copy(), op=ReduceOp.SUM), peer)

        first, second, odd = everybody(peers, act)
        check("Another reduce than the majority", odd)
        assert first == second
        assert "peer 3 was kicked: it does not agree with the majority" in first


@explains("Peers sync different things")
@explains("Another state than the others")
def test_states_that_do_not_match(master: MasterNode) -> None:
    """Goal: without an agreed state or a majority both read the difference; after that the odd one does."""

    def sync(peer: Communicator, *names: str) -> None:
        peer.sync_shared_state(SharedState([TensorInfo.from_numpy(ONES.copy(), name) for name in names]))

    with peers_of(master.address, 0, 0) as peers:
        for message in everybody(peers, lambda peer, rank: refusal(lambda peer: sync(peer, "ab"[rank]), peer)):
            check("Peers sync different things", message)

        def act(peer: Communicator, rank: int) -> str:
            sync(peer, "a")
            if rank == 1:
                return refusal(lambda peer: sync(peer, "b"), peer)
            sync(peer, "a")
            return ""

        check("Another state than the others", everybody(peers, act)[1])

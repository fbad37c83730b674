"""Many reduces at once: handles, threads, groups, lists, interruptions, and the end of a membership in the middle.

Members are communicators of this process, each driven by threads of its own; what needs a signal runs in a script.
"""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Attribute, Communicator, DataType, MasterNode, ReduceInfo, ReduceOp, Result
from pccl.client.handle import AsyncReduceHandle
from pccl.errors import TooFewPeersError, UsageError

from .helpers import (
    Peers,
    Script,
    actor_pid,
    background,
    bytes_in_use,
    eventually,
    everybody,
    is_asleep,
    peers_of,
    ring_order,
    running_master,
    stopped,
    together,
)

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture(scope="module")
def trio(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0, 0, lanes=2) as peers:
        yield peers


def launch(peer: Communicator, array: Array, tag: int) -> AsyncReduceHandle:
    return peer.all_reduce_async(array, array, op=ReduceOp.SUM, tag=tag)


def filled(count: int, value: float, *, shared: bool = True) -> Array:
    array = pccl.empty(count) if shared else np.empty(count, np.float32)
    array[:] = value
    return array


def listed(arrays: list[Array], op: ReduceOp = ReduceOp.SUM) -> list[pccl.ReduceOpDescriptor]:
    """Return descriptors of reduces in place, each with its own tag."""
    operand = pccl.ReduceOperandDescriptor(DataType.FLOAT)
    return [
        pccl.ReduceOpDescriptor.from_numpy(array, array, pccl.ReduceDescriptor(array.size, op, tag, operand, None))
        for tag, array in enumerate(arrays)
    ]


# ---------------------------------------------------------------------------------------------- handles


def test_two_hundred_in_flight(trio: Peers) -> None:
    """Goal: any number at once, of all sizes; waited for in another order than they were launched in."""
    chance = random.Random(1)
    sizes = [chance.choice([1, 10, 5_000, 100_000]) for _ in range(200)]

    def act(peer: Communicator, rank: int) -> None:
        arrays = [filled(size, tag + rank, shared=tag % 2 == 0) for tag, size in enumerate(sizes)]
        handles = [launch(peer, array, tag) for tag, array in enumerate(arrays)]
        for tag in random.Random(rank).sample(range(200), 200):
            assert handles[tag].wait()[:2] == (True, 0)
            assert arrays[tag].min() == arrays[tag].max() == 3 * tag + 3

    everybody(trio, act, timeout=30)
    assert bytes_in_use() == 0


def test_a_handle_is_patient_and_remembers(trio: Peers) -> None:
    """Goal: wait(timeout) may time out without an effect, wait() keeps its outcome, done() does not wait."""
    first, *others = ring_order(trio)
    array = filled(1000, 1)
    handle = launch(first, array, 0)

    assert not handle.done()
    began = time.monotonic()
    assert handle.wait(timeout=0.05) == (False, Result.PENDING_ASYNC_OPS.value, ReduceInfo(0, 0, 0))
    assert handle.wait(timeout=0) == (False, Result.PENDING_ASYNC_OPS.value, ReduceInfo(0, 0, 0))
    assert time.monotonic() - began >= 0.05
    with pytest.raises(UsageError):
        first.update_topology()

    together(*(partial(peer.all_reduce, filled(1000, 1), filled(1000, 1), op=ReduceOp.SUM) for peer in others))
    eventually(handle.done, "done without a wait()")
    ended = handle.wait()
    assert ended[:2] == (True, 0)
    assert ended[2].local_world_size == 3
    assert handle.wait() is ended
    assert handle.wait(timeout=0) is ended
    assert array.min() == array.max() == 3


def test_a_handle_of_several_threads(trio: Peers) -> None:
    """Goal: threads that wait for one handle at the same time, with a timeout or without, get the same outcome."""
    first, *others = ring_order(trio)
    for turn in range(20):
        array = filled(1000, 1, shared=turn % 2 == 0)
        handle = launch(first, array, 0)
        waiting = [background(partial(handle.wait, timeout)) for timeout in (None, None, 30.0, float("inf"))]
        assert background(partial(handle.wait, 0.01)).result()[1] == Result.PENDING_ASYNC_OPS.value
        together(*(partial(peer.all_reduce, filled(1000, 1), filled(1000, 1), op=ReduceOp.SUM) for peer in others))
        outcomes = [call.result() for call in waiting]
        assert outcomes[0][0]
        assert all(outcome is outcomes[0] for outcome in outcomes)
        assert array.min() == array.max() == 3


def test_a_handle_that_nobody_keeps(trio: Peers) -> None:
    """Goal: a handle may be dropped; the memory is held until the reduce ends, and the tag counts as un-awaited."""

    def act(peer: Communicator, rank: int) -> None:
        if rank == 0:
            launch(peer, filled(50_000, 1), 0)
            gc.collect()
        else:
            array = filled(50_000, 1)
            peer.all_reduce(array, array, op=ReduceOp.SUM)
            assert array.min() == array.max() == 3

    with running_master() as node, peers_of(node.address, 0, 0, 0) as peers:
        everybody(peers, act)
        with pytest.raises(UsageError, match="tags 0"):
            ring_order(peers)[0].update_topology()
    assert bytes_in_use() == 0


def test_threads_with_their_own_tags(trio: Peers) -> None:
    """Goal: several threads of each peer reduce at the same time, while another asks for newcomers."""
    rounds, threads = 15, 4

    def reduce_often(peer: Communicator, tag: int) -> None:
        for turn in range(rounds):
            array = filled(2_000 * tag + 1, turn, shared=turn % 2 == 0)
            peer.all_reduce(array, array, op=ReduceOp.SUM, tag=tag)
            assert array.min() == array.max() == 3 * turn

    def ask_often(peer: Communicator) -> None:
        for _ in range(rounds):
            assert not peer.are_peers_pending()

    calls = [partial(reduce_often, peer, tag) for peer in trio for tag in range(threads)]
    together(*calls, *(partial(ask_often, peer) for peer in trio), timeout=30)


def test_newcomers_are_seen_while_reduces_wait(master: MasterNode) -> None:
    """Goal: are_peers_pending is answered between launch and wait, and does not disturb."""
    with running_master() as node, peers_of(node.address, 0, 0) as peers:
        joining = background(peers.newcomer().connect)
        members = peers[:2]
        handles = [launch(members[0], filled(10, 1), 0)]
        eventually(lambda: all(together(*(peer.are_peers_pending for peer in members))), "the newcomer is pending")
        handles.append(launch(members[1], filled(10, 1), 0))
        assert [handle.wait()[0] for handle in handles] == [True, True]
        together(*(peer.update_topology for peer in members))
        joining.result()

        assert everybody(peers, lambda peer, _: peer.all_reduce(filled(9, 1), filled(9, 1), op=ReduceOp.SUM).world_size)


def test_groups_work_side_by_side() -> None:
    """Goal: three groups with many reduces in flight; a slow group does not delay the others."""
    with running_master() as node, peers_of(node.address, 0, 0, 1, 1, 2, 2) as peers:
        groups: dict[int, list[Communicator]] = {}
        for peer in peers:
            groups.setdefault(peer._group, []).append(peer)
        late = launch(groups[0][0], filled(10, 1), 0)

        def act(peer: Communicator) -> None:
            handles = [launch(peer, filled(3_000, 1), tag) for tag in range(30)]
            assert all(handle.wait()[0] for handle in handles)

        together(*(partial(act, peer) for peer in (*groups[1], *groups[2])))
        assert not late.done()
        assert launch(groups[0][1], filled(10, 1), 0).wait()[0]
        assert late.wait()[0]


# ---------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("in_flight", [1, 4, 50])
def test_a_list_of_twenty(trio: Peers, in_flight: int) -> None:
    """Goal: all of them are reduced, whatever the bound in flight; the byte counts are added up."""

    def act(peer: Communicator, rank: int) -> ReduceInfo:
        arrays = [filled(1_000 * tag + 1, rank, shared=tag % 3 > 0) for tag in range(20)]
        info = peer.all_reduce_multiple_with_retry(listed(arrays), max_in_flight=in_flight)
        assert all(array.min() == array.max() == 3 for array in arrays)
        return info

    infos = everybody(trio, act, timeout=30)
    payload = 4 * sum(1_000 * tag + 1 for tag in range(20))
    assert sum(info.tx_bytes for info in infos) == sum(info.rx_bytes for info in infos) == 4 * payload
    assert {info.local_world_size for info in infos} == {3}


@pytest.mark.parametrize("in_flight", [1, 4, 50])
def test_a_list_survives_a_loss(in_flight: int) -> None:
    """Goal: a member leaves in the middle of the list; the others finish it without the lost one."""
    with running_master() as node, peers_of(node.address, 0, 0, 0, lanes=2) as peers:
        leaver = peers[-1]
        rest = peers[:2]

        def act(peer: Communicator) -> list[float]:
            arrays = [filled(200_000, 1) for _ in range(30)]
            info = peer.all_reduce_multiple_with_retry(listed(arrays), max_in_flight=in_flight)
            assert info.local_world_size == 2
            assert all(array.min() == array.max() for array in arrays)
            return [float(array[0]) for array in arrays]

        def leave() -> list[float]:
            for tag in range(3):
                launch(leaver, filled(200_000, 1), tag)
            peers.dismiss(leaver)
            return []

        first, second, _ = together(*(partial(act, peer) for peer in rest), leave)
        assert first == second
        assert set(first) <= {2.0, 3.0}
    assert bytes_in_use() == 0


def test_a_list_ends_when_nobody_else_is_left() -> None:
    """Goal: TOO_FEW_PEERS as soon as the group has fallen to one; what was not reduced is as it was."""
    with running_master() as node, peers_of(node.address, 0, 0) as peers:
        arrays = [filled(100_000, 1) for _ in range(8)]
        running = background(partial(peers[0].all_reduce_multiple_with_retry, listed(arrays)))
        assert not running.ended.wait(0.1)
        peers.dismiss(peers[1])

        assert isinstance(running.error(), TooFewPeersError)
        assert peers[0].get_attribute(Attribute.LOCAL_WORLD_SIZE) == 1
        assert all(array.min() == array.max() == 1 for array in arrays)
        peers[0].update_topology()
    del arrays, running
    assert bytes_in_use() == 0


# ---------------------------------------------------------------------------------------------- the end in the middle


@pytest.mark.parametrize("how", ["close", "another thread", "collected"])
@pytest.mark.timeout(60)
def test_the_end_of_a_membership_restores_everything(how: str) -> None:
    """Goal: close with reduces in flight, one of them half done: old bits, and the others get a loss at once."""
    end_in_the_middle(how)
    assert bytes_in_use() == 0


def end_in_the_middle(how: str) -> None:
    with running_master() as node, peers_of(node.address, 0, 0, 0) as peers:
        leaver = ring_order(peers)[0]
        others = [peer for peer in peers if peer is not leaver]
        arrays = [filled(2_000_000, tag) for tag in range(4)]
        theirs = [[filled(2_000_000, tag) for tag in range(3)] for _ in others]
        with stopped(actor_pid(others[1])):  # so that no reduce can end
            handles = [launch(leaver, array, tag) for tag, array in enumerate(arrays)]
            waiting = [
                background(partial(peer.all_reduce_multiple_with_retry, listed(mine)))
                for peer, mine in zip(others, theirs, strict=True)
            ]
        eventually(lambda: any((array != tag).any() for tag, array in enumerate(arrays)), "some block has come")
        peers.remove(leaver)
        if how == "collected":
            del handles
            leaver.__del__()
        else:
            blocked = background(handles[3].wait) if how == "another thread" else None
            leaver.close()
            if blocked is not None:
                assert blocked.result()[0] is False
        for tag, array in enumerate(arrays):
            # A reduce with a verdict before the end is a whole sum; no tensor is half reduced.
            assert array.min() == array.max()
            assert array[0] in (tag, 3 * tag)
        assert arrays[3][0] == 3
        if how == "close":
            ended = [handle.wait() for handle in handles]
            assert ended[3][0] is False
        for call in waiting:
            call.result()
        for mine in theirs:
            assert all(array.min() == array.max() for array in mine)
            assert all(array[0] in (2 * tag, 3 * tag) for tag, array in enumerate(mine))


# Begins a reduce that no other member joins, is interrupted, and makes further calls.
INTERRUPTED = """
    import numpy as np, pccl
    peer = Communicator(sys.argv[1], options=QUICK)
    peer.connect()
    say("in")
    peer.wait_for_world_size(2)
    array = pccl.empty(1000)
    array[:] = 1
    for call in ("all_reduce", "wait", "list"):
        if call == "wait":
            handle = peer.all_reduce_async(array, array, op=ReduceOp.SUM, tag=2)
        try:
            say("waiting", call)
            if call == "all_reduce":
                peer.all_reduce(array, array, op=ReduceOp.SUM, tag=1)
            elif call == "wait":
                handle.wait()
            else:
                operand = ReduceOperandDescriptor(DataType.FLOAT)
                reduces = [ReduceDescriptor(1000, ReduceOp.SUM, tag, operand, None) for tag in (3, 4)]
                peer.all_reduce_multiple_with_retry(
                    [ReduceOpDescriptor.from_numpy(array, array, reduce) for reduce in reduces])
            say("not interrupted")
        except KeyboardInterrupt:
            assert array.min() == array.max() == 1
            say("interrupted")
    sys.stdin.readline()
    print(handle.wait()[0], flush=True)
    array[:] = 1
    peer.update_topology()
    peer.all_reduce(array, array, op=ReduceOp.SUM, tag=1)
    say("sum", array.min(), array.max())
    peer.close()
"""


def test_an_interrupted_reduce() -> None:
    """Goal: Ctrl-C ends every kind of wait at once; the reduce is withdrawn, and its tag can be used again."""
    with running_master() as node, Script(INTERRUPTED, node.address) as script:
        script.expect("in")
        with Communicator(node.address) as peer:
            peer.connect()
            for call in ("all_reduce", "wait", "list"):
                script.expect(f"waiting {call}")
                # While it sleeps, which is the harder case; an earlier signal must end the call as well.
                eventually(lambda: is_asleep(script.pid), "the call waits")
                script.signal(signal.SIGINT)
                script.expect("interrupted")
            array = filled(1000, 1)
            handle = launch(peer, array, 2)
            script.say()
            assert handle.wait()[0]
            peer.update_topology()
            array[:] = 1
            peer.all_reduce(array, array, op=ReduceOp.SUM, tag=1)
            assert script.expect("sum") == "2.0 2.0"
            assert script.end() == 0
            assert array.min() == array.max() == 2


def test_a_call_that_was_interrupted_on_its_way_to_the_mailbox(trio: Peers) -> None:
    """Goal: an interrupted call ends, also if the actor never received it."""
    link = trio[0]._actor
    assert link is not None
    slot = link.calls.acquire("all_reduce")
    link.cancel(slot)
    eventually(lambda: slot.done, "the call has ended")
    assert link.calls.take(slot)[0] != 0

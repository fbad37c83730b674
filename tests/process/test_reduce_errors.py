"""Reduces that are refused: wrong arguments, wrong moments, and members with different signatures.

A refused reduce changes nothing: each test ends with a reduce that works.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import (
    Attribute,
    Communicator,
    DataType,
    MasterNode,
    PCCLError,
    QuantizationOptions,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
)
from pccl.errors import KickedError, TooFewPeersError, UsageError

from .helpers import QUICK, ROOT, Peers, bytes_in_use, everybody, peers_of, ring_order, running_master, together


@pytest.fixture(scope="module")
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture(scope="module")
def pair(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0) as peers:
        yield peers


def check_works(peers: Peers) -> None:
    """Reduce on all members with tag 0 and check the known result."""

    def act(peer: Communicator, rank: int) -> list[float]:
        array = np.full(100, rank + 1.0)
        peer.all_reduce(array, array, op=ReduceOp.SUM)
        found: list[float] = array.tolist()
        return found

    expected = [sum(range(1, len(peers) + 1))] * 100
    assert everybody(peers, act) == [expected] * len(peers)


# ---------------------------------------------------------------------------------------------- arguments


def torch() -> Any:
    """Return the module; a case that needs it is skipped where there is none."""
    return pytest.importorskip("torch")


WRONG: list[tuple[str, type[Exception], Callable[[], dict[str, Any]]]] = [
    ("mixed kinds", ValueError, lambda: {"send": np.zeros(3, np.float32), "recv": torch().zeros(3)}),
    ("a list", ValueError, lambda: {"send": [1.0], "recv": [1.0]}),
    ("None", ValueError, lambda: {"recv": None}),
    ("complex numbers", ValueError, lambda: {"send": np.zeros(3, complex), "recv": np.zeros(3, complex)}),
    ("another byte order", ValueError, lambda: {"send": np.zeros(3, ">f8"), "recv": np.zeros(3, ">f8")}),
    ("a sparse tensor", ValueError, lambda: {"send": torch().eye(3).to_sparse(), "recv": torch().eye(3).to_sparse()}),
    ("a negative tag", ValueError, lambda: {"tag": -1}),
    ("a tag of 65 bits", ValueError, lambda: {"tag": 1 << 64}),
    ("every second element", AssertionError, lambda: {"send": np.zeros(8)[::2], "recv": np.zeros(4)}),
    ("a transposed tensor", AssertionError, lambda: {"send": torch().zeros(2, 3).T, "recv": torch().zeros(3, 2)}),
    ("another dtype", AssertionError, lambda: {"recv": np.zeros(3, np.float32)}),
    ("another size", AssertionError, lambda: {"recv": np.zeros(4)}),
    ("another operand", AssertionError, lambda: {"operand_descriptor": ReduceOperandDescriptor(DataType.INT8)}),
]


@pytest.mark.parametrize(("kind", "arguments"), [pytest.param(*rest, id=name) for name, *rest in WRONG])
def test_wrong_arguments(pair: Peers, kind: type[Exception], arguments: Callable[[], dict[str, Any]]) -> None:
    """Goal: refused at the call, in both forms, before any message is sent."""
    before = bytes_in_use()
    given = {"send": np.zeros(3), "recv": np.zeros(3), "op": ReduceOp.SUM, **arguments()}
    send, recv = given.pop("send"), given.pop("recv")
    for call in (pair[0].all_reduce, pair[0].all_reduce_async):
        with pytest.raises(kind):
            call(send, recv, **given)

    assert bytes_in_use() == before
    check_works(pair)


def test_a_read_only_array_may_be_sent(pair: Peers) -> None:
    """Goal: an array that cannot be written is refused as a target, and fine as a source."""
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(AssertionError, match="read-only"):
        pair[0].all_reduce(frozen, frozen, op=ReduceOp.SUM)

    targets = [np.zeros(3), np.zeros(3)]
    everybody(pair, lambda peer, rank: peer.all_reduce(frozen, targets[rank], op=ReduceOp.SUM))
    assert [target.tolist() for target in targets] == [[2.0] * 3] * 2


def test_the_largest_tag(pair: Peers) -> None:
    """Goal: every number of 64 bits is a valid tag."""
    arrays = [np.ones(1), np.ones(1)]
    everybody(pair, lambda peer, rank: peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM, tag=(1 << 64) - 1))
    assert arrays[0] == arrays[1] == 2


@pytest.mark.parametrize("in_flight", [0, -1])
def test_none_in_flight(pair: Peers, in_flight: int) -> None:
    """Goal: a bound of zero reduces in flight is refused."""
    with pytest.raises(ValueError, match="max_in_flight"):
        pair[0].all_reduce_multiple_with_retry([], max_in_flight=in_flight)


def test_no_reduces_at_all(pair: Peers) -> None:
    """Goal: an empty list succeeds at once."""
    info = pair[0].all_reduce_multiple_with_retry([])
    assert (info.tx_bytes, info.rx_bytes) == (0, 0)


# ---------------------------------------------------------------------------------------------- moments


def reduce_one(peer: Communicator) -> None:
    peer.all_reduce(np.zeros(1), np.zeros(1), op=ReduceOp.SUM)


def reduce_one_later(peer: Communicator) -> None:
    peer.all_reduce_async(np.zeros(1), np.zeros(1), op=ReduceOp.SUM)


def reduce_several(peer: Communicator) -> None:
    array = np.zeros(1)
    reduce = pccl.ReduceDescriptor(1, ReduceOp.SUM, 0, ReduceOperandDescriptor(DataType.DOUBLE), None)
    peer.all_reduce_multiple_with_retry([pccl.ReduceOpDescriptor.from_numpy(array, array, reduce)])


CALLS = [reduce_one, reduce_one_later, reduce_several]


@pytest.mark.parametrize("call", CALLS)
def test_not_connected(master: MasterNode, call: Callable[[Communicator], None]) -> None:
    """Goal: before connect and after close: INVALID_USAGE at launch, with what to do."""
    peer = Communicator(master.address, options=QUICK)
    with pytest.raises(UsageError, match="connect") as caught:
        call(peer)
    assert caught.value.result is Result.INVALID_USAGE
    peer.close()
    with pytest.raises(UsageError, match="closed") as caught:
        call(peer)
    assert caught.value.result is Result.INVALID_USAGE


@pytest.mark.parametrize("call", CALLS)
def test_a_peer_alone_in_its_group(call: Callable[[Communicator], None]) -> None:
    """Goal: a world of one: TOO_FEW_PEERS at launch, however many there are in other groups."""
    with running_master() as master, peers_of(master.address, 0, 1, 1) as peers:
        alone = next(peer for peer in peers if peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 1)
        with pytest.raises(TooFewPeersError) as caught:
            call(alone)
        assert caught.value.result is Result.TOO_FEW_PEERS


def test_a_tag_that_is_in_use(pair: Peers) -> None:
    """Goal: the same tag again before wait(): INVALID_ARGUMENT at launch; the first reduce is not harmed."""
    arrays = [np.ones(10), np.ones(10)]

    def act(peer: Communicator, rank: int) -> None:
        handle = peer.all_reduce_async(arrays[rank], arrays[rank], op=ReduceOp.SUM, tag=5)
        for call in (peer.all_reduce, peer.all_reduce_async):
            with pytest.raises(UsageError, match="tag 5") as caught:
                call(np.ones(10), np.ones(10), op=ReduceOp.SUM, tag=5)
            assert caught.value.result is Result.INVALID_ARGUMENT
        assert handle.wait()[0]
        peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM, tag=5)

    everybody(pair, act)
    assert arrays[0].tolist() == arrays[1].tolist() == [4.0] * 10


def test_one_tag_twice_in_a_list(pair: Peers) -> None:
    """Goal: two reduces of one list that would be in flight with the same tag: INVALID_ARGUMENT, and none begins."""
    before = bytes_in_use()
    array = np.zeros(1)
    reduce = pccl.ReduceDescriptor(1, ReduceOp.SUM, 9, ReduceOperandDescriptor(DataType.DOUBLE), None)
    twice = [pccl.ReduceOpDescriptor.from_numpy(array, array, reduce)] * 2
    with pytest.raises(UsageError, match="tag 9") as caught:
        pair[0].all_reduce_multiple_with_retry(twice)

    assert caught.value.result is Result.INVALID_ARGUMENT
    assert bytes_in_use() == before
    everybody(pair, lambda peer, _: peer.all_reduce_multiple_with_retry(twice, max_in_flight=1))


def test_topology_with_reduces_that_were_not_awaited(pair: Peers) -> None:
    """Goal: update_topology and wait_for_world_size: PENDING_ASYNC_OPS that names the tags, until wait() is called."""

    def act(peer: Communicator, rank: int) -> None:
        handles = [peer.all_reduce_async(np.ones(1), np.ones(1), op=ReduceOp.SUM, tag=tag) for tag in (7, 3)]
        for call in (peer.update_topology, lambda: peer.wait_for_world_size(3)):
            with pytest.raises(UsageError, match="tags 3, 7") as caught:
                call()
            assert caught.value.result is Result.PENDING_ASYNC_OPS
        assert all(handle.wait()[0] for handle in handles)
        peer.update_topology()

    everybody(pair, act)


def test_more_reduces_than_slots(master: MasterNode) -> None:
    """Goal: a reduce beyond the slots is refused with this reason, and reduces in flight continue."""
    with running_master() as node, peers_of(node.address, 0, 0, options=pccl.Options(slots=8)) as peers:

        def act(peer: Communicator, _: int) -> None:
            arrays = [np.ones(2) for _ in range(9)]
            handles = [
                peer.all_reduce_async(array, array, op=ReduceOp.SUM, tag=tag) for tag, array in enumerate(arrays[:8])
            ]
            with pytest.raises(UsageError, match="slots are in use"):
                peer.all_reduce_async(arrays[8], arrays[8], op=ReduceOp.SUM, tag=8)
            assert all(handle.wait()[0] for handle in handles)
            peer.all_reduce(arrays[8], arrays[8], op=ReduceOp.SUM, tag=8)
            assert all(array.tolist() == [2.0, 2.0] for array in arrays)

        everybody(peers, act)


# ---------------------------------------------------------------------------------------------- disagreement


DISAGREE: list[tuple[str, dict[str, Any], tuple[str, str]]] = [
    ("count", {"array": np.ones(11)}, ("10", "11")),
    ("dtype", {"array": np.ones(10, np.int64)}, ("DOUBLE", "INT64")),
    ("op", {"op": ReduceOp.MAX}, ("SUM", "MAX")),
    ("quantization", {"quantization_options": QuantizationOptions()}, ("", "MIN_MAX")),
]


@pytest.mark.parametrize(("changes", "sides"), [pytest.param(*rest, id=name) for name, *rest in DISAGREE])
@pytest.mark.parametrize("shared", [False, True], ids=["staged", "shared"])
def test_members_that_do_not_agree(pair: Peers, changes: dict[str, Any], sides: tuple[str, str], shared: bool) -> None:
    """Goal: all get INVALID_ARGUMENT with a message that names both sides; nothing changed, and the next one works."""
    before = bytes_in_use()

    def act(peer: Communicator, rank: int) -> str:
        given = {"array": np.ones(10), "op": ReduceOp.SUM, "tag": 4, **(changes if rank else {})}
        plain = given.pop("array")
        array = pccl.empty(plain.shape, plain.dtype) if shared else plain.copy()
        array[:] = plain
        with pytest.raises(UsageError) as caught:
            peer.all_reduce(array, array, **given)
        assert caught.value.result is Result.INVALID_ARGUMENT
        assert np.array_equal(array, plain)
        handle = peer.all_reduce_async(array, array, **given)
        ok, status, info = handle.wait()
        assert (ok, status, info.tx_bytes) == (False, Result.INVALID_ARGUMENT.value, 0)
        with pytest.raises(PCCLError) as several:
            peer.all_reduce_multiple_with_retry([descriptor_of(array, given)])
        assert several.value.result is Result.INVALID_ARGUMENT
        return str(caught.value)

    first, second = everybody(pair, act)
    assert first == second
    for peer, side in zip(sorted(member.peer_id for member in pair), sides, strict=True):
        assert f"peer {peer}: " in first
        assert side in first
    assert bytes_in_use() == before
    check_works(pair)


def descriptor_of(array: Any, given: dict[str, Any]) -> pccl.ReduceOpDescriptor:
    """Return the descriptor of the same reduce, for a list of reduces."""
    operand = ReduceOperandDescriptor(DataType.from_numpy_dtype(array.dtype))
    reduce = pccl.ReduceDescriptor(array.size, given["op"], given["tag"], operand, given.get("quantization_options"))
    return pccl.ReduceOpDescriptor.from_numpy(array, array, reduce)


def test_the_odd_one_of_many() -> None:
    """Goal: it is kicked; the others fail once, and their list of reduces repeats by itself."""
    with running_master() as node, peers_of(node.address, 0, 0, 0, 0) as peers:

        def act(peer: Communicator, rank: int) -> Exception | float:
            given = {"op": ReduceOp.SUM, "tag": 4}
            array = np.ones(6 if rank == 3 else 5)
            try:
                peer.all_reduce_multiple_with_retry([descriptor_of(array, given)])
            except KickedError as error:
                return error
            return float(array.max())

        *others, odd = ring_order(peers)
        names = ", ".join(map(str, sorted(member.peer_id for member in others)))
        *sums, error = everybody(peers, act)
        assert sums == [3.0] * 3
        assert isinstance(error, KickedError)
        assert f"it gave 6 x DOUBLE, SUM; peers {names} gave 5 x DOUBLE, SUM" in error.reason
        peers.dismiss(odd)
        check_works(peers)


def test_other_tags_are_not_disturbed(pair: Peers) -> None:
    """Goal: a disagreement on one tag ends that one alone."""

    def act(peer: Communicator, rank: int) -> list[tuple[bool, int]]:
        handles = [
            peer.all_reduce_async(np.ones(size), np.ones(size), op=ReduceOp.SUM, tag=tag)
            for tag, size in enumerate([10_000, 10 + rank, 10_000])
        ]
        return [handle.wait()[:2] for handle in handles]

    wrong = (False, Result.INVALID_ARGUMENT.value)
    assert everybody(pair, act) == [[(True, 0), wrong, (True, 0)]] * 2


# ---------------------------------------------------------------------------------------------- without numpy or torch


def test_neither_library_is_needed_or_loaded() -> None:
    """Goal: a program without torch can reduce, and pccl does not import torch."""
    code = """
import sys, threading
import numpy as np
from pccl import *
from tests.process.helpers import everybody, peers_of, running_master
if __name__ == "__main__":
    with running_master() as master, peers_of(master.address, 0, 0) as peers:
        arrays = [np.ones(3), np.ones(3)]
        everybody(peers, lambda peer, rank: peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM))
        assert arrays[0].tolist() == [2.0] * 3
    assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_groups_do_not_meet() -> None:
    """Goal: two groups reduce at the same time under the same tag, each among themselves."""
    with running_master() as master, peers_of(master.address, 0, 0, 1, 1, 1) as peers:
        worlds = {peer: peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) for peer in peers}

        def act(peer: Communicator) -> float:
            array = np.ones(1000)
            for _ in range(20):
                peer.all_reduce(array, array, op=ReduceOp.AVG, tag=1)
            return peer.all_reduce(array, array, op=ReduceOp.SUM, tag=1).local_world_size + float(array[0])

        found = together(*(lambda peer=peer: act(peer) for peer in peers))
        assert found == [2.0 * worlds[peer] for peer in peers]

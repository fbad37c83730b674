"""One reduce in the training process: where its memory is, and what happens to it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pccl
from pccl._core.dataplane.board import FLAG_BACKED_UP
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.events import NUMBERS, REDUCED
from pccl._core.protocol.mailbox import CallReduce
from pccl._core.protocol.operations import Operation, pack_operations, unpack_operations
from pccl.client.reduce_descriptor import ReduceOpDescriptor
from pccl.client.reduce_request import PendingReduce, request, request_of
from pccl.memory.arena import default
from pccl.memory.completion_slots import Slot, SlotTable
from pccl.values import (
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
)
from tests.unit._core.dataplane.loopback import Member, connect, eventually, frame

Array = np.ndarray[Any, Any]


_slots: list[Slot] = []

WORLD = NUMBERS.pack(1, 2, 3, 4, 5, 6, 7)  # the world's numbers, after the statistics of a successful reduce


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """The slot of all launches here: number 3, generation 4."""
    with SlotTable.create(4) as table:
        held = [table.acquire() for _ in range(3)]
        for _ in range(3):
            used = table.acquire()
            table.complete(used.index, used.generation, 0)
            used.release()
        _slots.append(table.acquire())
        yield
        _slots.clear()
        del held


def launch(send: Array, recv: Array, world: int = 2, quantization: QuantizationOptions | None = None) -> PendingReduce:
    return PendingReduce(_slots[0], request(send, recv, ReduceOp.SUM, 9, None, quantization), world)


def told(launched: PendingReduce) -> Operation:
    """Return the operation as the actor reads it."""
    (operation,) = unpack_operations(launched.operation())
    return operation


def find(array: Array) -> tuple[int, int]:
    found = default().find(array.ctypes.data, array.nbytes)
    assert found is not None
    return found


def shared(count: int = 100) -> Array:
    array = pccl.empty(count)
    array[:] = np.arange(count)
    return array


def test_the_message_is_what_the_mailbox_declares() -> None:
    """Goal: the message that a launch builds in C is a CallReduce with one operation, byte for byte."""
    tensor = shared()
    for quantization in (None, QuantizationOptions(DataType.INT8)):
        launched = launch(tensor, tensor, quantization=quantization)
        assert unpack(launched.message()) == CallReduce(launched.operation())
        assert launched.message() == pack(CallReduce(pack_operations([told(launched)])))
        assert told(launched).slot == 3
        launched.release()


def asked_for(send: Any, recv: Any, tag: int = 9, **options: Any) -> Operation:
    """Return the operation that a call would send to the actor, without staging."""
    words = {"op": ReduceOp.MAX, "operand": None, "quantization": None} | options
    launched = PendingReduce(_slots[0], request(send, recv, tag=tag, **words), 2)
    operation = told(launched)
    launched.release()
    return operation


@pytest.mark.parametrize("datatype", [datatype for datatype in DataType if datatype is not DataType.BFLOAT16])
def test_plain_arrays_of_a_kind_that_was_seen_are_asked_for_alike(datatype: DataType) -> None:
    """Goal: a tensor that is read in C gives the same request as the first of its dtype, which Python reads."""
    send, recv = (pccl.zeros((3, 5), datatype.to_numpy_dtype()) for _ in range(2))
    first = asked_for(send, recv)
    assert (first.count, first.datatype, first.op, first.tag) == (15, datatype.value, ReduceOp.MAX.value, 9)
    assert (first.send_segment, first.send_offset) == find(send)
    assert (first.recv_segment, first.recv_offset) == find(recv)
    assert asked_for(send, recv) == first
    assert asked_for(send, recv, operand=ReduceOperandDescriptor(datatype)) == first
    assert asked_for(recv, recv).flags == FLAG_BACKED_UP


def test_numbers_of_numpy_are_numbers() -> None:
    """Goal: a count or a tag that was computed with numpy is as good as an int."""
    numbers = ReduceDescriptor(
        np.prod((2, 3)), ReduceOp.SUM, np.uint8(9), ReduceOperandDescriptor(DataType.FLOAT), None
    )  # type: ignore[arg-type]
    descriptor = ReduceOpDescriptor.from_numpy(shared(), shared(), numbers)

    assert (request_of(descriptor).elements, request_of(descriptor).tag) == (6, 9)


@pytest.mark.parametrize("parameter", [False, True])
def test_plain_tensors_of_torch_are_asked_for_alike(parameter: bool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(7, dtype=torch.bfloat16)
    tensor = torch.nn.Parameter(tensor) if parameter else tensor
    first = asked_for(tensor, tensor)
    assert (first.count, first.datatype) == (7, DataType.BFLOAT16.value)
    assert asked_for(tensor, tensor) == first
    with pytest.raises(AssertionError, match="must be contiguous"):
        asked_for(torch.zeros(4, 4).T, torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="layout"):
        asked_for(torch.zeros(4).to_sparse(), torch.zeros(4).to_sparse())


def test_what_is_wrong_is_said_also_of_a_kind_that_was_seen() -> None:
    """Goal: one validator for tensors that are read in C and for all others; the error says what is wrong."""
    array = shared(10)
    asked_for(array, array)
    locked = shared(10)
    locked.flags.writeable = False
    assert asked_for(locked, array).count == 10
    with pytest.raises(AssertionError, match="recv is read-only"):
        asked_for(array, locked)
    with pytest.raises(AssertionError, match="must be contiguous"):
        asked_for(array[::2], array[::2])
    with pytest.raises(AssertionError, match="send has 10 elements but recv has 5"):
        asked_for(array, array[:5])
    with pytest.raises(AssertionError, match="send is FLOAT but recv is INT32"):
        asked_for(array, array.view(np.int32))
    with pytest.raises(AssertionError, match="descriptor says DOUBLE"):
        asked_for(array, array, operand=ReduceOperandDescriptor(DataType.DOUBLE))
    with pytest.raises(ValueError, match="expected a torch tensor or a numpy array"):
        asked_for(None, None)
    for tag in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"a tag is 0 to {(1 << 64) - 1}, not {tag}"):
            asked_for(array, array, tag)
    assert asked_for(array, array, (1 << 64) - 1).tag == (1 << 64) - 1
    assert asked_for(array, array, np.uint8(5)).tag == 5  # type: ignore[arg-type]


def test_what_a_reduce_did_is_an_ordinary_value() -> None:
    """Goal: an info that was filled in C is equal to one that Python made, frozen, and pickles."""
    tensor = shared()
    numbers = (3, (1 << 64) - 1, 1 << 40, 7_500_000_000, 1, (1 << 64) - 1)
    info = launch(tensor, tensor).succeed(REDUCED.pack(*numbers) + WORLD)
    assert info == ReduceInfo(*numbers[:3], *(number / 1e9 for number in numbers[3:]))
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(AttributeError):
        info.tx_bytes = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="with 81 bytes, not 80"):
        launch(tensor, tensor).succeed(REDUCED.pack(*numbers) + WORLD + b"?")


def test_shared_tensors_are_reduced_where_they_are() -> None:
    send, recv = shared(), pccl.zeros(100)
    launched = launch(send, recv)
    what = told(launched)

    assert (what.send_segment, what.send_offset) == find(send)
    assert (what.recv_segment, what.recv_offset) == find(recv)
    assert (what.flags, what.backup_segment) == (0, 0)
    assert launched.segments == (what.send_segment, what.recv_segment, 0, 0)
    assert (what.slot, what.generation, what.tag, what.count) == (3, 4, 9, 100)
    launched.fail()
    assert (send == np.arange(100)).all()


@pytest.mark.parametrize("kind", ["shared", "in place", "staged"])
def test_a_quantized_reduce_has_an_area(kind: str) -> None:
    """Goal: it has memory for its coded blocks, wherever the tensors are; released however the reduce ends."""
    before = default().statistics().bytes_in_use
    send = np.ones(100, np.float32) if kind == "staged" else shared()
    recv = send if kind == "in place" else np.zeros_like(send) if kind == "staged" else pccl.zeros(100)
    held = default().statistics().bytes_in_use
    launched = launch(send, recv, quantization=QuantizationOptions(DataType.INT8))
    what = told(launched)

    assert (what.datatype, what.algorithm, what.quantized) == (10, 1, 1)
    assert what.area_segment == launched.segments[3] > 0
    assert default().statistics().bytes_in_use > held
    launched.fail()
    assert default().statistics().bytes_in_use == held >= before


def test_no_algorithm_has_neither_area_nor_type() -> None:
    """Goal: without an algorithm the signatures match, whatever quantized type is set."""
    tensor = shared()
    what = launch(tensor, tensor, quantization=QuantizationOptions(DataType.INT8, QuantizationAlgorithm.NONE))
    assert (told(what).algorithm, told(what).quantized, told(what).area_segment) == (0, 0, 0)
    what.fail()


def test_memory_that_cannot_be_had_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the area is allocated last; if that fails, all earlier memory is released."""
    tensor = shared()
    held = default().statistics().bytes_in_use

    def refuse(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("pccl.client.reduce_request.area_bytes", refuse)
    with pytest.raises(MemoryError):
        launch(tensor, tensor, quantization=QuantizationOptions())
    assert default().statistics().bytes_in_use == held


def test_a_shared_tensor_in_place_has_a_backup() -> None:
    tensor = shared()
    launched = launch(tensor, tensor)
    what = told(launched)

    assert (what.send_segment, what.send_offset) == (what.recv_segment, what.recv_offset) == find(tensor)
    assert what.flags == FLAG_BACKED_UP
    assert what.backup_segment in launched.segments
    launched.fail()  # no bytes were changed, so none are restored
    assert (tensor == np.arange(100)).all()


@pytest.mark.parametrize(("send_is_shared", "recv_is_shared"), [(False, False), (True, False), (False, True)])
def test_other_tensors_are_staged(send_is_shared: bool, recv_is_shared: bool) -> None:
    send = shared() if send_is_shared else np.arange(100, dtype=np.float32)
    recv = pccl.zeros(100) if recv_is_shared else np.zeros(100, np.float32)
    launched = launch(send, recv)
    what = told(launched)

    assert (what.send_segment, what.send_offset) == (what.recv_segment, what.recv_offset)
    assert (what.flags, what.backup_segment) == (0, 0)
    assert launched._staging is not None
    staged = np.frombuffer(launched._staging.view, np.float32)[:100]
    assert (staged == np.arange(100)).all()
    staged += 1
    info = launched.succeed(REDUCED.pack(2, 5, 6, 7_000_000_000, 8_000_000_000, 9_000_000_000) + WORLD)
    assert info == ReduceInfo(2, 5, 6, 7.0, 8.0, 9.0)
    assert (recv == np.arange(1, 101)).all()
    assert (send == np.arange(100)).all()


def test_a_failure_leaves_a_staged_tensor_alone() -> None:
    tensor = np.arange(100, dtype=np.float32)
    launched = launch(tensor, tensor)
    assert launched._staging is not None
    np.frombuffer(launched._staging.view, np.float32)[:] = -1
    launched.fail()
    assert (tensor == np.arange(100)).all()


def test_tensors_that_overlap_are_staged() -> None:
    whole = shared(150)
    launched = launch(whole[:100], whole[50:])
    assert launched._staging is not None
    np.frombuffer(launched._staging.view, np.float32)[:100] *= 2
    launched.succeed(REDUCED.pack(2, 0, 0, 0, 0, 0) + WORLD)
    assert (whole[50:] == 2 * np.arange(100)).all()
    # Adjacent tensors are not staged.
    whole = shared(200)
    assert launch(whole[:100], whole[100:])._staging is None


def test_nothing_is_reduced_as_well() -> None:
    empty = pccl.empty(0)
    launched = launch(empty, empty)
    assert told(launched).count == 0
    launched.succeed(REDUCED.pack(1, 0, 0, 0, 0, 0) + WORLD)


def test_memory_is_given_back_once() -> None:
    tensor = shared()
    for _ in range(3):
        launched = launch(tensor, tensor)
        place = told(launched).backup_segment, told(launched).backup_offset
        launched.release()
        launched.release()
        again = launch(tensor, tensor)
        assert (told(again).backup_segment, told(again).backup_offset) == place
        again.release()


def test_a_real_worker_fills_the_backup_and_a_failure_empties_it() -> None:
    """Goal: workers understand the format of the backup that the training process prepared."""
    tensor = shared(1000)
    launched = launch(tensor, tensor)
    member = Member()
    try:
        near, far = connect()
        with near:
            for segment in filter(None, launched.segments):
                member.segments[segment] = default().descriptor(segment)
            worker = member.worker(False, 0, far)
            assert member.board.begin(1, told(launched), 0, 2)
            near.sendall(frame(1, 0, 1, 0, np.ones(500, np.float32).tobytes()))
            eventually(lambda: member.board.statistics(1)[1] == 2000)
            assert (tensor[500:] == np.arange(501, 1001)).all()
            member.abort(1)
            launched.fail()
            assert (tensor == np.arange(1000)).all()
            assert not worker.problems
    finally:
        member.segments.clear()  # the arena owns their descriptors
        member.close()

"""Enums and frozen values: the integers are a contract, and tensors are checked once, when a value is made."""

from __future__ import annotations

import pickle
import weakref
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from pccl.client.reduce_descriptor import ReduceOpDescriptor
from pccl.client.tensors import TensorMemory
from pccl.values import (
    Attribute,
    DataType,
    DeviceType,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

# A copy of the source's numbers, on purpose: both must change
# before an integer that peers exchange can change.
CONTRACT: dict[type[Enum], str] = {
    Result: "SUCCESS 0, NOT_INITIALIZED 1, INTERNAL_ERROR 2, INVALID_ARGUMENT 3, INVALID_USAGE 4, TOO_FEW_PEERS 5,"
    " MASTER_CONNECTION_FAILED 6, RANK_CONNECTION_FAILED 7, RANK_CONNECTION_LOST 8, NO_SHARED_STATE_AVAILABLE 9,"
    " PENDING_ASYNC_OPS 10, UPDATE_TOPOLOGY_FAILED 11, TOPOLOGY_OPTIMIZATION_FAILED 12",
    ReduceOp: "SUM 0, AVG 1, PROD 2, MAX 3, MIN 4",
    Attribute: "GLOBAL_WORLD_SIZE 1, LOCAL_WORLD_SIZE 2, PEER_GROUP_WORLD_SIZE 2, NUM_DISTINCT_PEER_GROUPS 3,"
    " LARGEST_PEER_GROUP_WORLD_SIZE 4",
    SharedStateSyncStrategy: "ENFORCE_POPULAR 0, RECEIVE_ONLY 1, SEND_ONLY 2",
    DataType: "UINT8 0, INT8 1, INT16 2, UINT16 3, UINT32 4, INT32 5, UINT64 6, INT64 7, FLOAT16 8, BFLOAT16 9,"
    " FLOAT 10, DOUBLE 11",
    DeviceType: "CPU 0, CUDA 1",
    DistributionHint: "NONE 0, NORMAL 1, UNIFORM 2",
    QuantizationAlgorithm: "NONE 0, MIN_MAX 1, ZERO_POINT_SCALE 2",
}


@pytest.mark.parametrize("enum", CONTRACT, ids=lambda enum: enum.__name__)
def test_members_have_the_integers_of_the_contract(enum: type[Enum]) -> None:
    """Goal: no member is missing, renamed, renumbered or added below 100."""
    expected = {name: int(number) for name, number in (part.split() for part in CONTRACT[enum].split(","))}
    actual = {name: member.value for name, member in enum.__members__.items() if member.value < 100}

    assert expected == actual


def test_peer_group_world_size_is_an_alias() -> None:
    """Goal: both names are one member, so that they compare equal."""
    assert Attribute.LOCAL_WORLD_SIZE is Attribute.PEER_GROUP_WORLD_SIZE


@pytest.mark.parametrize("datatype", DataType)
def test_torch_dtypes_round_trip(datatype: DataType) -> None:
    """Goal: every data type has its torch dtype, of the same size."""
    dtype = datatype.to_torch_dtype()

    assert DataType.from_torch_dtype(dtype) is datatype
    assert datatype.itemsize == dtype.itemsize


@pytest.mark.parametrize("datatype", [datatype for datatype in DataType if datatype is not DataType.BFLOAT16])
def test_numpy_dtypes_round_trip(datatype: DataType) -> None:
    """Goal: every data type that numpy knows has its dtype, of the same size; scalar types do as well."""
    dtype = datatype.to_numpy_dtype()

    assert DataType.from_numpy_dtype(dtype) is datatype
    assert DataType.from_numpy_dtype(dtype.type) is datatype
    assert datatype.itemsize == dtype.itemsize


def test_numpy_has_no_bfloat16() -> None:
    """Goal: the one type that numpy lacks is refused, not approximated."""
    with pytest.raises(ValueError, match="BFLOAT16"):
        DataType.BFLOAT16.to_numpy_dtype()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, np.dtype("float32"), "float32", None])
def test_unknown_torch_dtypes_are_refused(dtype: Any) -> None:
    """Goal: a dtype that cannot be reduced, or is not torch's, is a ValueError."""
    with pytest.raises(ValueError, match="dtype"):
        DataType.from_torch_dtype(dtype)


@pytest.mark.parametrize("dtype", [np.dtype(bool), np.dtype(">f4"), np.complex64, np.dtype("M8[ns]"), object(), None])
def test_unknown_numpy_dtypes_are_refused(dtype: Any) -> None:
    """Goal: also dtypes with swapped bytes, which have the same name, and None, which numpy reads as float64."""
    with pytest.raises(ValueError, match="dtype"):
        DataType.from_numpy_dtype(dtype)


def test_device_types_by_torch_name() -> None:
    """Goal: two names are known; every other name is a ValueError that lists them."""
    assert DeviceType.from_torch_device_type("cpu") is DeviceType.CPU
    assert DeviceType.from_torch_device_type("cuda") is DeviceType.CUDA
    with pytest.raises(ValueError, match="mps"):
        DeviceType.from_torch_device_type("mps")


def test_defaults_of_descriptors() -> None:
    """Goal: optional fields have the defaults of the contract; a descriptor of a reduce has no optional field."""
    assert ReduceOperandDescriptor(DataType.FLOAT).distribution_hint is DistributionHint.NONE
    assert QuantizationOptions() == QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    with pytest.raises(TypeError):
        ReduceDescriptor(1, ReduceOp.SUM, 0)  # type: ignore[call-arg]


def test_values_are_frozen_and_pickle() -> None:
    """Goal: a value can be shared, kept in a set and sent to another process."""
    info = ReduceInfo(local_world_size=3, tx_bytes=1, rx_bytes=2)

    assert info.world_size == 3
    assert {info, pickle.loads(pickle.dumps(info))} == {info}
    with pytest.raises(AttributeError):
        info.tx_bytes = 5
    assert SharedStateSyncInfo(tx_bytes=1, rx_bytes=2) == SharedStateSyncInfo(1, 2, (), 0)
    divergent = SharedStateSyncInfo(0, 8, ("bias",), 3)
    assert pickle.loads(pickle.dumps(divergent)) == divergent


def describe(count: int, datatype: DataType = DataType.FLOAT) -> ReduceDescriptor:
    """Return a descriptor of a sum of this many elements."""
    return ReduceDescriptor(
        count=count,
        op=ReduceOp.SUM,
        tag=7,
        operand_descriptor=ReduceOperandDescriptor(datatype=datatype),
        quantization_options=None,
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_descriptor_points_at_the_tensors(kind: str) -> None:
    """Goal: views at odd offsets are described by their own address, by keyword and in place."""
    memory = np.zeros(41, dtype=np.uint8)
    array = memory[1:].view(np.float32)
    if kind == "numpy":
        descriptor = ReduceOpDescriptor.from_numpy(send=array, recv=array, reduce_descriptor=describe(10))
    else:
        tensor = torch.from_numpy(array)
        descriptor = ReduceOpDescriptor.from_torch(send=tensor, recv=tensor, reduce_descriptor=describe(10))

    assert descriptor.send == descriptor.recv
    assert descriptor.send.data_ptr == memory.ctypes.data + 1
    assert (descriptor.send.numel, descriptor.send.nbytes) == (10, 40)
    assert descriptor.send.device_type is DeviceType.CPU
    assert TensorMemory.of(array) == descriptor.send


def test_a_descriptor_keeps_its_tensors_alive() -> None:
    """Goal: a caller may drop its own reference; the memory stays until the descriptor is deleted."""
    array = np.zeros(4, dtype=np.float32)
    alive = weakref.ref(array)
    descriptor = ReduceOpDescriptor.from_numpy(array, array, describe(4))
    del array

    assert alive() is not None
    del descriptor
    assert alive() is None


F4 = np.zeros(4, dtype=np.float32)
READ_ONLY = np.zeros(4, dtype=np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("send", "recv", "descriptor", "reason"),
    [
        (np.zeros(8, dtype=np.float32)[::2], F4, describe(4), "contiguous"),
        (F4, np.zeros(8, dtype=np.float32)[::2], describe(4), "contiguous"),
        (F4, np.zeros(4), describe(4), "DOUBLE"),
        (F4, np.zeros(5, dtype=np.float32), describe(4), "5"),
        (F4, F4, describe(5), "counts 5"),
        (F4, F4, describe(4, DataType.INT32), "INT32"),
        (F4, READ_ONLY, describe(4), "read-only"),
    ],
)
def test_arguments_that_do_not_match_fail_an_assertion(
    send: Any, recv: Any, descriptor: ReduceDescriptor, reason: str
) -> None:
    """Goal: the error names what differs, for numpy and for torch."""
    with pytest.raises(AssertionError, match=reason):
        ReduceOpDescriptor.from_numpy(send, recv, descriptor)
    if recv is not READ_ONLY:  # torch has no read-only tensors
        with pytest.raises(AssertionError, match=reason):
            ReduceOpDescriptor.from_torch(torch.from_numpy(send), torch.from_numpy(recv), descriptor)


def test_foreign_types_are_refused() -> None:
    """Goal: mixing numpy and torch, or passing something else, is a ValueError that names the type."""
    array, tensor = np.zeros(4, dtype=np.float32), torch.zeros(4)
    with pytest.raises(ValueError, match="ndarray"):
        ReduceOpDescriptor.from_torch(tensor, array, describe(4))
    with pytest.raises(ValueError, match="Tensor"):
        ReduceOpDescriptor.from_numpy(tensor, array, describe(4))
    with pytest.raises(ValueError, match="list"):
        TensorMemory.of([1.0])


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, device="meta"), torch.zeros(4).to_sparse(), torch.zeros(4, dtype=torch.complex64)],
    ids=["meta", "sparse", "complex"],
)
def test_tensors_without_plain_memory_are_refused(tensor: torch.Tensor) -> None:
    """Goal: a tensor whose bytes cannot be read is refused when the descriptor is made, not at a wild pointer."""
    with pytest.raises(ValueError, match="not supported"):
        TensorMemory.from_torch(tensor)

"""Wrong arguments of the public interface: each is refused, with the kind of exception that the contract names.

`python -O` removes assertions, also those of compiled code, and no argument check may go with them: `make test` runs
this file a second time under -O (tests/unit/project/test_without_assertions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pccl import (
    Attribute,
    Communicator,
    DataType,
    MasterNode,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedState,
    TensorInfo,
)
from pccl import torch as sharing
from pccl.client.state_sync import Syncs
from pccl.client.tensors import TensorMemory
from pccl.memory.arrays import empty
from pccl.values import DeviceType, SharedStateSyncStrategy

torch = pytest.importorskip("torch")

PEER = Communicator("127.0.0.1:48148")  # not connected: arguments are checked first
FLOAT = ReduceOperandDescriptor(DataType.FLOAT)


def ones(count: int = 3, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(count, dtype)


def frozen(count: int = 3) -> np.ndarray[Any, Any]:
    """An array that cannot be written."""
    array = ones(count)
    array.flags.writeable = False
    return array


REDUCES: list[tuple[type[Exception], str, Callable[[], dict[str, Any]]]] = [
    (AssertionError, "send has 100000 elements but recv has 10;", lambda: {"send": ones(100_000), "recv": ones(10)}),
    (AssertionError, "send is FLOAT but recv is FLOAT16;", lambda: {"recv": ones(dtype=np.float16)}),
    (AssertionError, "the array must be contiguous", lambda: {"send": ones(6)[::2]}),
    (AssertionError, "the array must be contiguous", lambda: {"recv": np.ones((2, 3), np.float32).T}),
    (AssertionError, "the tensor must be contiguous", lambda: {"send": torch.ones(6)[::2], "recv": torch.ones(3)}),
    (AssertionError, "the tensor must be contiguous", lambda: {"send": torch.ones(3), "recv": torch.ones(2, 3).T}),
    (AssertionError, "recv is read-only", lambda: {"recv": frozen()}),
    (AssertionError, "the descriptor says INT8 but", lambda: {"operand": ReduceOperandDescriptor(DataType.INT8)}),
    (ValueError, "send is a numpy tensor but recv is a torch one", lambda: {"recv": torch.ones(3)}),
    (ValueError, "expected a torch tensor or a numpy array, got builtins.list", lambda: {"send": [1.0]}),
    (ValueError, "expected a torch tensor or a numpy array, got builtins.NoneType", lambda: {"recv": None}),
    (ValueError, "tensor layout torch.sparse_coo", lambda: {"send": torch.eye(3).to_sparse(), "recv": torch.ones(3)}),
    (ValueError, "complex128", lambda: {"send": ones(dtype=complex), "recv": ones(dtype=complex)}),
    (ValueError, "op must be a ReduceOp such as ReduceOp.AVG, not 'avg'", lambda: {"op": "avg"}),
    (ValueError, "op must be a ReduceOp such as ReduceOp.AVG, not 1", lambda: {"op": 1}),
    (ValueError, "op must be a ReduceOp such as ReduceOp.AVG, not None", lambda: {"op": None}),
    (ValueError, "op must be a ReduceOp such as .*, not <Attribute", lambda: {"op": Attribute.LOCAL_WORLD_SIZE}),
    (ValueError, "tag must be an integer, not 'first'", lambda: {"tag": "first"}),
    (ValueError, "tag must be an integer, not 1.5", lambda: {"tag": 1.5}),
    (ValueError, "tag must be an integer, not None", lambda: {"tag": None}),
    (ValueError, "a tag is 0 to 18446744073709551615, not -1", lambda: {"tag": -1}),
    (ValueError, "a tag is 0 to 18446744073709551615, not 18446744073709551616", lambda: {"tag": 1 << 64}),
    (ValueError, "operand_descriptor must be a ReduceOperandDescriptor or", lambda: {"operand": DataType.FLOAT}),
    (ValueError, "the datatype of an .* a DataType, not 'f", lambda: {"operand": ReduceOperandDescriptor("float")}),  # type: ignore[arg-type]
    (ValueError, "quantization_options must be a QuantizationOptions or", lambda: {"quantization": DataType.UINT8}),
    (ValueError, "the quantized_datatype of .*, not 8", lambda: {"quantization": QuantizationOptions(8)}),  # type: ignore[arg-type]
    (
        ValueError,
        "the algorithm of quantization_options must be a QuantizationAlgorithm, not 'min_max'",
        lambda: {"quantization": QuantizationOptions(DataType.UINT8, "min_max")},  # type: ignore[arg-type]
    ),
    (ValueError, "FLOAT cannot hold codes", lambda: {"quantization": QuantizationOptions(DataType.FLOAT)}),
    (
        ValueError,
        "packs two codes into a UINT8, not into INT8",
        lambda: {"quantization": QuantizationOptions(DataType.INT8, QuantizationAlgorithm.MIN_MAX_4BIT)},
    ),
    (
        ValueError,
        "only floats can be quantized, not INT32",
        lambda: {"send": ones(dtype=np.int32), "recv": ones(dtype=np.int32), "quantization": QuantizationOptions()},
    ),
    (
        ValueError,
        "FLOAT16 quantized to UINT16 would not be smaller",
        lambda: {
            "send": ones(dtype=np.float16),
            "recv": ones(dtype=np.float16),
            "quantization": QuantizationOptions(DataType.UINT16),
        },
    ),
]


@pytest.mark.parametrize("call", [PEER.all_reduce, PEER.all_reduce_async], ids=["all_reduce", "all_reduce_async"])
@pytest.mark.parametrize("seen", [False, True], ids=["first", "seen"])
@pytest.mark.parametrize(("kind", "text", "arguments"), REDUCES)
def test_a_reduce_refuses(
    call: Callable[..., object], seen: bool, kind: type[Exception], text: str, arguments: Callable[[], dict[str, Any]]
) -> None:
    """Goal: refused at the call, also where tensors of the class and dtype were seen before and are read in C."""
    given = {"send": ones(), "recv": ones(), "op": ReduceOp.SUM, "tag": 0, "operand": None, "quantization": None}
    if seen:
        for tensor in (ones(), torch.ones(3), ones(dtype=np.float16), ones(dtype=np.int32)):
            with pytest.raises(AssertionError, match="recv has 2;"):
                call(tensor, tensor[:2], op=ReduceOp.SUM)
    given |= arguments()
    words = {"operand_descriptor": given["operand"], "quantization_options": given["quantization"]}
    with pytest.raises(kind, match=text):
        call(given["send"], given["recv"], op=given["op"], tag=given["tag"], **words)


def described(
    send: Any = None, recv: Any = None, count: Any = 3, op: Any = ReduceOp.SUM, tag: Any = 0, operand: Any = FLOAT,
    quantization: Any = None,
) -> ReduceOpDescriptor:  # fmt: skip
    """A reduce as a value, of valid arguments but for those that are given."""
    send, recv = (ones() if array is None else array for array in (send, recv))
    return ReduceOpDescriptor.from_numpy(send, recv, ReduceDescriptor(count, op, tag, operand, quantization))


MEMORY = TensorMemory.from_numpy(ones())
OTHERS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    # Descriptors of reduces.
    (AssertionError, "the descriptor counts 4 elements but", lambda: described(count=4)),
    (AssertionError, "the descriptor counts", lambda: described(count=1 << 70)),
    (AssertionError, "send has 3 elements but recv has 5", lambda: described(recv=ones(5))),
    (AssertionError, "the array must be contiguous", lambda: described(send=ones(6)[::2])),
    (ValueError, "count must be an integer that is not negative, not -1", lambda: described(count=-1)),
    (ValueError, "count must be an integer that is not negative, not 'all'", lambda: described(count="all")),
    (ValueError, "op must be a ReduceOp such as ReduceOp.AVG, not 'avg'", lambda: described(op="avg")),
    (ValueError, "tag must be an integer", lambda: described(tag="a")),
    (ValueError, "a ReduceDescriptor needs an operand_descriptor", lambda: described(operand=None)),
    (ValueError, "operand_descriptor must be a ReduceOperandDescriptor", lambda: described(operand=DataType.FLOAT)),
    (ValueError, "quantization_options must be", lambda: described(quantization="min_max")),
    (ValueError, "expected a ReduceDescriptor", lambda: ReduceOpDescriptor.from_numpy(ones(), ones(), None)),  # type: ignore[arg-type]
    (ValueError, "expected a TensorMemory", lambda: ReduceOpDescriptor(ones(), MEMORY, described().reduce_descriptor)),  # type: ignore[arg-type]
    (ValueError, "expected a numpy array", lambda: ReduceOpDescriptor.from_numpy(torch.ones(1), ones(), None)),  # type: ignore[arg-type]
    # Shared states.
    (AssertionError, "a shared state needs at least one tensor", lambda: SharedState([])),
    (AssertionError, "the array must be contiguous", lambda: TensorInfo.from_numpy(ones(6)[::2], "w")),
    (AssertionError, "the tensor must be contiguous", lambda: TensorInfo.from_torch(torch.ones(2, 3).T, "w")),
    (AssertionError, "'w' has changed its size; make a new SharedState", lambda: resized().address),
    (AssertionError, "'w' is read-only; a peer that only sends", lambda: sync_of(frozen())),
    (ValueError, "expected a TensorInfo, got ndarray", lambda: SharedState([ones()])),  # type: ignore[list-item]
    (ValueError, "two tensors of the shared state are called 'w'", lambda: SharedState([resized(), resized()])),
    (ValueError, "a tensor's name must be a str, not int", lambda: TensorInfo.from_numpy(ones(), 5)),  # type: ignore[arg-type]
    (ValueError, "expected a torch tensor", lambda: TensorInfo.from_torch(ones(), "w")),
    (ValueError, "expected a SharedState, got list", lambda: PEER.sync_shared_state([])),  # type: ignore[arg-type]
    (ValueError, "strategy must be a SharedStateSyncStrategy such as SharedStateSyncStrategy.ENFORCE_POPULAR, not 'p",
     lambda: PEER.sync_shared_state(state(), "popular")),  # type: ignore[arg-type]
    (ValueError, "revision -1 is not an unsigned 64-bit", lambda: setattr(state(), "revision", -1)),
    (ValueError, "revision '1' is not an unsigned 64-bit", lambda: setattr(state(), "revision", "1")),
    # Communicators and masters.
    (ValueError, "address '10.0.0.7' must be host:port", lambda: Communicator("10.0.0.7")),
    (ValueError, "address '48148' is only a port; write the host before it, like 10.0.0.7:48148",
     lambda: Communicator("48148")),
    (ValueError, "an address must be a text like '10.0.0.7:48148', not 48148", lambda: Communicator(48148)),  # type: ignore[arg-type]
    (ValueError, "an address must be a text", lambda: MasterNode(48148)),  # type: ignore[arg-type]
    (ValueError, "address '10.0.0.7' must be host:port", lambda: MasterNode("10.0.0.7")),
    (ValueError, "peer_group must be 0 to 4294967295, not -1", lambda: Communicator("a:1", -1)),
    (ValueError, "peer_group must be 0 to 4294967295, not 'a'", lambda: Communicator("a:1", "a")),  # type: ignore[arg-type]
    (ValueError, "p2p_connection_pool_size must be 0 to 256, not 257", lambda: Communicator("a:1", 0, 257)),
    (ValueError, "p2p_connection_pool_size must be 0 to 256, not None", lambda: Communicator("a:1", 0, None)),  # type: ignore[arg-type]
    (ValueError, "options must be a pccl.Options, not {}", lambda: Communicator("a:1", options={})),  # type: ignore[arg-type]
    (ValueError, "n_attempts must be at least 1, not 0", lambda: PEER.connect(0)),
    (ValueError, "n_attempts must be at least 1, not '5'", lambda: PEER.connect("5")),  # type: ignore[arg-type]
    (ValueError, "n must be at least 1, not 0", lambda: PEER.wait_for_world_size(0)),
    (ValueError, "n must be at least 1, not None", lambda: PEER.wait_for_world_size(None)),  # type: ignore[arg-type]
    (ValueError, "max_in_flight must be at least 1", lambda: PEER.all_reduce_multiple_with_retry([], max_in_flight=0)),
    # Values.
    (ValueError, "is not a torch dtype", lambda: DataType.from_torch_dtype(np.float32)),
    (ValueError, "torch dtype torch.complex64 is not supported", lambda: DataType.from_torch_dtype(torch.complex64)),
    (ValueError, "None is not a numpy dtype", lambda: DataType.from_numpy_dtype(None)),  # type: ignore[arg-type]
    (ValueError, "device type 'tpu' is not supported", lambda: DeviceType.from_torch_device_type("tpu")),
    # Memory.
    (ValueError, "an array cannot have the shape", lambda: empty(-1)),
    (ValueError, "a tensor cannot have the shape", lambda: sharing.empty(-1)),
    (ValueError, "make it dense first", lambda: sharing.share_(torch.eye(2).to_sparse())),
    (TypeError, "cannot share str", lambda: sharing.share_("tensor")),
]  # fmt: skip


def state() -> SharedState:
    return SharedState([TensorInfo.from_numpy(ones(), "w")])


def resized() -> TensorInfo:
    """The info of a tensor that has another size since."""
    tensor = torch.ones(3)
    info = TensorInfo.from_torch(tensor, "w")
    tensor.resize_(7)
    return info


def sync_of(array: np.ndarray[Any, Any]) -> None:
    """Begin a sync that may overwrite this array; the check comes before the first use of the actor."""
    syncs = Syncs(None, lambda _: None, 1)  # type: ignore[arg-type]
    syncs.run(SharedState([TensorInfo.from_numpy(array, "w")]), SharedStateSyncStrategy.ENFORCE_POPULAR)


@pytest.mark.parametrize(("kind", "text", "call"), OTHERS)
def test_the_rest_refuses(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    """Goal: every other argument that can be wrong gets the kind of exception and the text that it had."""
    with pytest.raises(kind, match=text):
        call()

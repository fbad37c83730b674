"""The values that describe a shared state: names, sizes and the revision; nothing is synchronised here."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from pccl.shared_state import SharedState, TensorInfo
from pccl.values import DataType, DeviceType


def info(name: str = "weights") -> TensorInfo:
    """Return a TensorInfo with this name."""
    return TensorInfo.from_numpy(np.zeros(3, dtype=np.float32), name)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_tensor_is_described_as_it_lies(kind: str) -> None:
    """Goal: pointer, sizes, type and device are those of the tensor; the order is (tensor, name)."""
    array = np.zeros((2, 3), dtype=np.float64)
    described = (
        TensorInfo.from_numpy(array, "weights", allow_content_inequality=True)
        if kind == "numpy"
        else TensorInfo.from_torch(torch.from_numpy(array), "weights", allow_content_inequality=True)
    )

    assert described.name == "weights"
    assert described.data_ptr == array.ctypes.data
    assert (described.numel, described.nbytes) == (6, 48)
    assert described.dtype is DataType.DOUBLE
    assert described.device_type is DeviceType.CPU
    assert described.allow_content_inequality


@pytest.mark.parametrize("dtype", [datatype.to_torch_dtype() for datatype in DataType], ids=str)
def test_scalars_of_every_type_are_fine(dtype: torch.dtype) -> None:
    """Goal: a 0-dim tensor is one element, such as the step counter of an optimiser."""
    assert TensorInfo.from_torch(torch.zeros((), dtype=dtype), "step").numel == 1
    assert not TensorInfo.from_numpy(np.zeros(()), "step").allow_content_inequality


def test_a_parameter_is_a_tensor() -> None:
    """Goal: a parameter of a module can be passed directly, with or without gradients."""
    parameter = torch.nn.Parameter(torch.zeros(3))

    assert TensorInfo.from_torch(parameter, "weights").data_ptr == parameter.data_ptr()


def test_a_distributed_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a DTensor is refused; a stand-in is used, because the real class takes seconds to import."""

    class DTensor(torch.Tensor):
        pass

    stand_in = types.ModuleType("torch.distributed.tensor")
    stand_in.DTensor = DTensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", stand_in)

    with pytest.raises(ValueError, match="DTensor"):
        TensorInfo.from_torch(torch.zeros(3).as_subclass(DTensor), "weights")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: TensorInfo.from_numpy(np.zeros((4, 4))[:, 0], "w"), AssertionError),
        (lambda: TensorInfo.from_torch(torch.zeros(4, 4).T[1:], "w"), AssertionError),
        (lambda: TensorInfo.from_torch(np.zeros(3), "w"), ValueError),
        (lambda: TensorInfo.from_numpy(torch.zeros(3), "w"), ValueError),
        (lambda: TensorInfo.from_numpy("w", np.zeros(3)), ValueError),  # type: ignore[arg-type]
        (lambda: TensorInfo.from_numpy(np.zeros(3), 5), ValueError),  # type: ignore[arg-type]
        (lambda: SharedState([]), AssertionError),
        (lambda: SharedState([np.zeros(3)]), ValueError),  # type: ignore[list-item]
        (lambda: SharedState([info(), info()]), ValueError),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception]) -> None:
    """Goal: each mistake gets the kind of exception that the contract names."""
    with pytest.raises(error):
        call()


def test_the_revision_starts_at_zero_and_moves() -> None:
    """Goal: the revision can be set, as when a run resumes, and pushed, as between two syncs."""
    state = SharedState(iter([info("a"), info("b")]))

    assert [entry.name for entry in state.tensor_infos] == ["a", "b"]
    assert state.revision == 0
    state.push_revision()
    assert state.revision == 1
    state.revision = 41
    state.push_revision()
    assert state.revision == 42


@pytest.mark.parametrize("revision", [-1, 2**64])
def test_a_revision_fits_the_wire(revision: int) -> None:
    """Goal: a number that does not fit its message field is refused here and changes nothing."""
    state = SharedState([info()])

    with pytest.raises(ValueError, match="64-bit"):
        state.revision = revision
    assert state.revision == 0


def test_a_state_keeps_its_tensors_alive() -> None:
    """Goal: a caller may drop its own reference; the memory stays until the state is deleted."""
    array = np.zeros(3)
    alive = weakref.ref(array)
    state = SharedState([TensorInfo.from_numpy(array, "weights")])
    del array

    assert alive() is not None
    del state
    assert alive() is None

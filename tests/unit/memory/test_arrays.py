"""numpy arrays in shared memory: like numpy's own, except for their location and lifetime."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pccl
from pccl.memory.arena import default
from tests import ROOT
from tests.leaks import Footprint


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Disable garbage collection, so that garbage of earlier tests does not return to the arena while a test counts."""
    gc.disable()
    yield
    gc.enable()


def lies_in_the_arena(array: np.ndarray[Any, Any]) -> bool:
    return default().find(array.ctypes.data, array.nbytes) is not None


@pytest.mark.parametrize("make", [pccl.empty, pccl.zeros])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 4), (300, 1000), [2, 3], 5, np.int64(7)])
def test_every_shape_is_a_plain_array_in_shared_memory(make: Any, shape: Any) -> None:
    array = make(shape)

    assert array.shape == np.empty(shape).shape
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0
    assert lies_in_the_arena(array)


@pytest.mark.parametrize("datatype", [kind for kind in pccl.DataType if kind is not pccl.DataType.BFLOAT16])
def test_every_dtype_that_can_be_reduced_is_there(datatype: pccl.DataType) -> None:
    """Goal: the dtype may be given as a dtype, as a scalar type or by name."""
    dtype = datatype.to_numpy_dtype()
    for spelled in (dtype, dtype.type, dtype.name):
        array = pccl.zeros((3, 5), spelled)

        assert array.dtype == dtype
        assert array.nbytes == 15 * datatype.itemsize
        assert not array.any()


@pytest.mark.parametrize("dtype", [bool, np.complex64, ">f4", "M8[ns]", object, None])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype"):
        pccl.empty(3, dtype)


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_negative_sizes_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="sizes are at least 0"):
        pccl.empty(shape)


@pytest.mark.parametrize("shape", [1.5, (2, 1.5), "ab"])
def test_shapes_that_are_no_integers_are_refused(shape: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        pccl.empty(shape)


def test_zeros_are_zero_in_memory_that_was_used_before() -> None:
    array = pccl.empty(1000)
    place = array.ctypes.data
    array.fill(3)
    del array
    again = pccl.zeros(1000)

    assert again.ctypes.data == place
    assert not again.any()


@pytest.mark.parametrize("shape", [(0,), (100,), (2 << 20,)])
def test_memory_returns_with_the_last_view(shape: tuple[int, ...]) -> None:
    before = default().statistics().bytes_in_use
    array = pccl.empty(shape)
    view = array.reshape(-1)[::2]
    del array
    assert default().statistics().bytes_in_use > before
    del view

    assert default().statistics().bytes_in_use == before


def test_arrays_leave_nothing_behind() -> None:
    default().trim()
    with Footprint.watch() as footprint:
        arrays = [pccl.empty(nbytes, np.uint8) for nbytes in (0, 100, 1 << 20, 5 << 20)]
        assert footprint.leaks(0) != []
        arrays.clear()
        default().trim()

        assert footprint.leaks() == []


def test_arithmetic_leaves_shared_memory_alone() -> None:
    """Goal: results are ordinary numpy arrays; in-place results stay in shared memory."""
    array = pccl.zeros(10)
    place = array.ctypes.data
    array += 1

    assert array.ctypes.data == place
    assert not lies_in_the_arena(array + array)


def test_the_names_are_reached_but_not_starred() -> None:
    """Goal: `from pccl import *` does not replace the user's `zeros` or `torch`; dir() shows all names."""
    assert {"empty", "zeros", "torch"} <= set(dir(pccl))
    assert {"empty", "zeros", "torch"} & set(pccl.__all__) == set()


def test_numpy_and_torch_are_loaded_by_who_needs_them() -> None:
    """Goal: the name loads nothing; the first array loads numpy; only pccl.torch loads torch."""
    code = """
import sys, pccl
pccl.empty
assert not {"numpy", "torch"} & set(sys.modules)
pccl.empty(3)
assert "numpy" in sys.modules and "torch" not in sys.modules
import pccl.torch
assert "torch" in sys.modules
assert sys.modules["torch"] is not pccl.torch and pccl.torch.empty(3).dtype is sys.modules["torch"].float32
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")

"""The expected result of a reduce, bit for bit: the same sums in the same order, computed with numpy.

Chunk c starts with the contribution of rank c and moves along the ring; an average is divided once, with the last sum,
at its owner. 16-bit floats are added in single precision and rounded at every hop. numpy has no bfloat16: its bits are
uint16 here, and become a torch tensor where one is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pccl import DataType, ReduceOp
from pccl._core.dataplane.plan import Cut

Array = np.ndarray[Any, Any]


def carrier(datatype: DataType) -> np.dtype[Any]:
    """The numpy type that holds the bits of a data type."""
    return np.dtype(np.uint16) if datatype is DataType.BFLOAT16 else datatype.to_numpy_dtype()


def contribution(datatype: DataType, op: ReduceOp, count: int, seed: int) -> Array:
    """Return random numbers of one rank: any integers, or floats whose sums and products are finite and rounded."""
    chance = np.random.default_rng(seed)
    kind = carrier(datatype)
    if kind.kind in "iu" and datatype is not DataType.BFLOAT16:
        return np.frombuffer(chance.bytes(count * kind.itemsize), kind).copy()
    values = chance.uniform(0.5, 1.5, count) if op is ReduceOp.PROD else chance.normal(0, 100, count)
    return narrow(values.astype(np.float32), datatype) if kind.itemsize == 2 else values.astype(kind)


def widen(bits: Array, datatype: DataType) -> Array:
    """Return the numbers in the precision in which they are added."""
    if datatype is DataType.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32) if datatype is DataType.FLOAT16 else bits


def narrow(values: Array, datatype: DataType) -> Array:
    """Return the numbers in the data type that is sent: rounded to nearest, ties to even."""
    if datatype is DataType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(carrier(datatype))


def reduced(contributions: list[Array], datatype: DataType, op: ReduceOp) -> Array:
    """Return the result that every peer must have; contributions are in the order of the ring."""
    world, count = len(contributions), contributions[0].size
    cut = Cut(count, datatype.itemsize, world)
    result = np.empty(count, carrier(datatype))
    for chunk in range(world):
        begin, end = cut.chunk(chunk)
        total = contributions[chunk][begin:end]
        for step in range(1, world):
            addend = contributions[(chunk + step) % world][begin:end]
            combined = _combine(widen(total, datatype), widen(addend, datatype), op)
            if op is ReduceOp.AVG and step == world - 1:
                combined = _divide(combined, world)
            total = narrow(combined, datatype)
        result[begin:end] = total
    return result


def _combine(left: Array, right: Array, op: ReduceOp) -> Array:
    with np.errstate(over="ignore"):
        if op is ReduceOp.PROD:
            return left * right
        if op is ReduceOp.MAX:
            return np.maximum(left, right)
        if op is ReduceOp.MIN:
            return np.minimum(left, right)
        return left + right


def _divide(values: Array, by: int) -> Array:
    """Divide as C does: integers are rounded towards zero."""
    if values.dtype.kind == "f":
        return (values / values.dtype.type(by)).astype(values.dtype)
    if values.dtype.kind == "u":
        return values // values.dtype.type(by)
    divisor = values.dtype.type(by)
    floor = values // divisor
    return floor + ((values < 0) & (floor * divisor != values)).astype(values.dtype)

"""A second implementation of the quantization in `quantize_groups.h`: in numpy, one group after the other."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import numpy as np

from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.quantization import coded_size, decode_into, encode_into
from pccl._core.kernels.arithmetic import reduce_into
from pccl.values import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

Array = np.ndarray[Any, Any]

FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
LIMITS = dict(zip(FLOATS, (65504.0, 2.0**128 - 2.0**120, 2.0**128 - 2.0**104, sys.float_info.max), strict=True))
PACKED = (QuantizationAlgorithm.MIN_MAX_4BIT, QuantizationAlgorithm.ZERO_POINT_SCALE_4BIT)
ANCHORED = (QuantizationAlgorithm.ZERO_POINT_SCALE, QuantizationAlgorithm.ZERO_POINT_SCALE_4BIT)

# All supported combinations.
WAYS = [
    (datatype, QuantizationOptions(quantized, algorithm))
    for datatype in FLOATS
    for algorithm in QuantizationAlgorithm
    for quantized in (DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16)
    if algorithm is not QuantizationAlgorithm.NONE
    and quantized.itemsize < datatype.itemsize
    and (algorithm not in PACKED or quantized is DataType.UINT8)
]


def bits_of(how: QuantizationOptions) -> int:
    """Return the bits of one code."""
    return 4 if how.algorithm in PACKED else 8 * how.quantized_datatype.itemsize


def group_of(datatype: DataType) -> int:
    """Return the number of elements that share a scale."""
    return 1024 if datatype is DataType.DOUBLE else 512


def wide(datatype: DataType) -> np.dtype[Any]:
    """Return the type in which the quantization computes."""
    return np.dtype(np.float64 if datatype is DataType.DOUBLE else np.float32)


def room(datatype: DataType) -> float:
    """Return the largest difference that this type can hold."""
    return LIMITS[DataType.DOUBLE if datatype is DataType.DOUBLE else DataType.FLOAT]


def widened(datatype: DataType, values: Array) -> Array:
    """Convert elements to numbers, exactly; bfloat16 is given as its bits."""
    if datatype is DataType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # which aarch64 reports for a signalling NaN
        return values.astype(wide(datatype))


def narrowed(datatype: DataType, values: Array) -> Array:
    """Convert numbers back, rounded to nearest, ties to even; every NaN becomes the one without a payload."""
    if datatype is DataType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    with np.errstate(over="ignore"):
        return values.astype(datatype.to_numpy_dtype())


def coded(datatype: DataType, how: QuantizationOptions, values: Array) -> bytes:
    """Encode elements with the library."""
    numbers = datatype.value, how.algorithm.value, how.quantized_datatype.value
    block = bytearray(coded_size(len(values), *numbers))
    encode_into(*numbers, block, values)
    return bytes(block)


def decoded(datatype: DataType, how: QuantizationOptions, block: bytes, like: Array) -> Array:
    """Decode elements with the library."""
    values = np.empty_like(like)
    decode_into(datatype.value, how.algorithm.value, how.quantized_datatype.value, values, block)
    return values


def ring_reduced(datatype: DataType, how: QuantizationOptions, op: ReduceOp, inputs: list[Array]) -> Array:
    """Return the result for all members: every hop adds the decoded elements, and the final chunk is coded again."""
    world = len(inputs)
    cut = Cut(len(inputs[0]), datatype.itemsize, world)
    result = inputs[0].copy()
    for chunk in range(world):
        begin, end = cut.chunk(chunk)
        so_far = inputs[chunk][begin:end]
        for step in range(1, world):
            arrived = decoded(datatype, how, coded(datatype, how, so_far), so_far)
            own = inputs[(chunk + step) % world][begin:end]
            so_far = np.empty_like(own)
            divisor = world if op is ReduceOp.AVG and step == world - 1 else 0
            reduce_into(datatype.value, op.value, so_far, own, arrived, divisor=divisor)
        result[begin:end] = decoded(datatype, how, coded(datatype, how, so_far), so_far)
    return result


# --- the reference ------------------------------------------------------------------------------------------------


def expected_code(datatype: DataType, how: QuantizationOptions, values: Array) -> bytes:
    """Encode elements with the reference."""
    numbers, group = widened(datatype, values), group_of(datatype)
    return b"".join(
        _one_group(datatype, how, numbers[begin : begin + group]) for begin in range(0, len(numbers), group)
    )


def expected_values(datatype: DataType, how: QuantizationOptions, block: bytes, count: int) -> Array:
    """Decode elements with the reference."""
    group, at, parts = group_of(datatype), 0, [np.empty(0, wide(datatype))]
    for begin in range(0, count, group):
        some = min(group, count - begin)
        low, step, rough = _read_scale(datatype, block[at:])
        at += 12 if datatype is DataType.DOUBLE else 6
        nbytes = (some * bits_of(how) + 7) // 8
        codes = _unpack(how, block[at : at + nbytes], some)
        at += nbytes
        parts.append(_values(datatype, how, codes, low, step, rough))
    assert at == len(block)
    return narrowed(datatype, np.concatenate(parts))


def _one_group(datatype: DataType, how: QuantizationOptions, numbers: Array) -> bytes:
    largest = (1 << bits_of(how)) - 1
    finite = numbers[np.isfinite(numbers)].astype(np.float64)
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    rough, low, step = len(finite) < len(numbers), least, 0.0
    if not rough and least != most:
        low, step = _scale(datatype, how, least, most)
        limit, reach = LIMITS[datatype], largest * step
        rough = not (reach <= room(datatype) and -limit <= low and low + reach <= limit)
    if rough:
        return _rough_group(datatype, how, numbers, least, most)
    codes = np.zeros(len(numbers), np.uint32)
    if step:
        kind = wide(datatype).type
        codes = np.rint((numbers - kind(low)) / kind(step)).astype(np.uint32)
    return _write_scale(datatype, low, step, False) + _pack(how, codes)


def _scale(datatype: DataType, how: QuantizationOptions, least: float, most: float) -> tuple[float, float]:
    steps = (1 << bits_of(how)) - 1
    if how.algorithm in ANCHORED:
        least, most, steps = min(least, 0.0), max(most, 0.0), steps - 1
    if most - least > room(datatype):
        return least, np.inf
    step = _step(datatype, max((most - least) / steps, 5e-324))
    return (-math.ceil(-least / step) * step if how.algorithm in ANCHORED else least), step


def _step(datatype: DataType, exact: float) -> float:
    """Return the smallest number >= `exact` whose lower half of bits is zero."""
    if datatype is DataType.DOUBLE:
        upper = struct.unpack("<Q", struct.pack("<d", exact))[0] >> 32
        while struct.unpack("<d", struct.pack("<Q", upper << 32))[0] < exact:
            upper += 1
        return float(struct.unpack("<d", struct.pack("<Q", upper << 32))[0])
    upper = max((int(np.float32(exact).view(np.uint32)) >> 16) - 1, 0)
    while float(np.uint32(upper << 16).view(np.float32)) < exact:
        upper += 1
    return float(np.uint32(upper << 16).view(np.float32))


def _rough_group(datatype: DataType, how: QuantizationOptions, numbers: Array, least: float, most: float) -> bytes:
    top = (1 << bits_of(how)) - 4
    step = 0.0
    if least < most:
        exact = (most - least) / top if np.isfinite(most - least) else most / top - least / top
        step = _step(datatype, max(exact, 5e-324))
    codes = []
    with np.errstate(invalid="ignore"):  # signalling NaN
        doubles = numbers.astype(np.float64)
    for number in doubles.tolist():
        if not np.isfinite(number):
            codes.append(top + (1 if np.isnan(number) else 2 if number < 0 else 3))
        else:
            codes.append(min(top, int(np.rint((number / 2 - least / 2) / (step / 2)))) if step else 0)
    return _write_scale(datatype, least, step, True) + _pack(how, np.array(codes, np.uint32))


def _values(datatype: DataType, how: QuantizationOptions, codes: Array, low: float, step: float, rough: bool) -> Array:
    kind = wide(datatype).type
    if not rough:
        return kind(low) + codes.astype(wide(datatype)) * kind(step)
    top = (1 << bits_of(how)) - 4
    with np.errstate(over="ignore"):
        numbers = np.minimum(2 * (low / 2 + codes.astype(np.float64) * (step / 2)), LIMITS[datatype])
    numbers = np.where(codes > top, np.array([np.nan, -np.inf, np.inf])[np.maximum(codes, top + 1) - top - 1], numbers)
    return (numbers if step else np.where(codes > top, numbers, low)).astype(wide(datatype))


def _pack(how: QuantizationOptions, codes: Array) -> bytes:
    if bits_of(how) > 4:
        return codes.astype(np.uint8 if bits_of(how) == 8 else np.uint16).tobytes()
    below, above = codes[: (len(codes) + 1) // 2].copy(), codes[(len(codes) + 1) // 2 :]
    below[: len(above)] |= above << 4
    return below.astype(np.uint8).tobytes()


def _unpack(how: QuantizationOptions, data: bytes, count: int) -> Array:
    if bits_of(how) > 4:
        return np.frombuffer(data, np.uint8 if bits_of(how) == 8 else np.uint16).astype(np.uint32)
    packed = np.frombuffer(data, np.uint8).astype(np.uint32)
    return np.concatenate([packed & 15, packed >> 4])[:count]


def _write_scale(datatype: DataType, low: float, step: float, rough: bool) -> bytes:
    low = low or 0.0  # minus zero is zero
    if datatype is DataType.DOUBLE:
        return struct.pack("<dI", low, int(np.float64(step).view(np.uint64)) >> 32 | rough << 31)
    return struct.pack("<fH", low, int(np.float32(step).view(np.uint32)) >> 16 | rough << 15)


def _read_scale(datatype: DataType, data: bytes) -> tuple[float, float, bool]:
    if datatype is DataType.DOUBLE:
        low, step = struct.unpack_from("<dI", data)
        return low, float(np.uint64((step & 0x7FFFFFFF) << 32).view(np.float64)), bool(step >> 31)
    low, step = struct.unpack_from("<fH", data)
    return low, float(np.uint32((step & 0x7FFF) << 16).view(np.float32)), bool(step >> 15)

"""Quantization without lanes: every instruction set gives the documented bits, and errors stay within bounds.

`quantize_groups.h` defines the format; `quantization_reference` is a second implementation, and both must give the
same bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.dataplane.plan import Cut
from pccl._core.dataplane.quantization import (
    area_bytes,
    coded_size,
    decode_into,
    encode_into,
    group_elements,
    reduce_coded_into,
)
from pccl._core.kernels import arithmetic
from pccl.client.tensors import check_quantization
from pccl.values import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceOp

from .quantization_reference import (
    ANCHORED,
    FLOATS,
    LIMITS,
    WAYS,
    bits_of,
    coded,
    decoded,
    expected_code,
    expected_values,
    group_of,
    narrowed,
    wide,
    widened,
)

Array = np.ndarray[Any, Any]

MIN_MAX, ZERO_POINT = QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE

# Counts around the sizes of vectors and groups, then across several groups.
COUNTS = [0, 1, 2, 3, 7, 8, 15, 31, 33, 64, 255, 511, 512, 513, 1023, 1024, 1025, 2600]

ways = pytest.mark.parametrize(
    ("datatype", "how"),
    WAYS,
    ids=[f"{datatype.name}-{how.algorithm.name}-{how.quantized_datatype.name}" for datatype, how in WAYS],
)


@pytest.fixture(params=arithmetic.available())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    before = arithmetic.chosen()
    arithmetic.use(request.param)
    yield request.param
    arithmetic.use(before)


def drawn(kind: str, datatype: DataType, count: int, seed: int = 1) -> Array:
    """Return elements of a distribution, in their own type."""
    source = np.random.default_rng([seed, count])
    made: dict[str, Any] = {
        "normal": lambda: source.normal(size=count),
        "uniform": lambda: source.uniform(-3, 40, count),
        "heavy": lambda: source.standard_cauchy(count) * 10,
        "above": lambda: source.uniform(1000, 1001, count),
        "below": lambda: -source.uniform(1, 5, count),
        "tiny": lambda: source.normal(size=count) * {2: 1e-6}.get(datatype.itemsize, 1e-43),
        "minute": lambda: source.normal(size=count) * 1e-310,
        "sparse": lambda: source.normal(size=count) * (source.random(count) < 0.05),
        "huge": lambda: source.uniform(-1, 1, count) * LIMITS[datatype],
        "constant": lambda: np.full(count, 42.5),
        "zeros": lambda: np.zeros(count) * source.choice([-1, 1], count),
    }
    with np.errstate(over="ignore", under="ignore"):
        values = np.clip(made[kind](), -LIMITS[datatype], LIMITS[datatype]).astype(wide(datatype))
        return narrowed(datatype, values)


KINDS = ("normal", "uniform", "heavy", "above", "below", "tiny", "minute", "sparse", "huge", "constant", "zeros")


def check_bits(datatype: DataType, how: QuantizationOptions, values: Array) -> Array:
    """Check that library and reference agree; return the decoded elements."""
    block = coded(datatype, how, values)
    assert block == expected_code(datatype, how, values)
    arrived = decoded(datatype, how, block, values)
    assert arrived.tobytes() == expected_values(datatype, how, block, len(values)).tobytes()
    return arrived


@pytest.mark.usefixtures("variant")
class TestBits:
    """What every instruction set must agree on."""

    @ways
    def test_finite_values(self, datatype: DataType, how: QuantizationOptions) -> None:
        for kind in KINDS:
            for count in COUNTS[:: 1 if kind == "normal" else 4]:
                check_bits(datatype, how, drawn(kind, datatype, count))

    @ways
    def test_any_bits_at_all(self, datatype: DataType, how: QuantizationOptions) -> None:
        """Goal: random bits have all magnitudes and every NaN; each group is encoded in the rough form."""
        data = random.Random(1).randbytes(1600 * datatype.itemsize)
        carrier = np.uint16 if datatype is DataType.BFLOAT16 else datatype.to_numpy_dtype()
        check_bits(datatype, how, np.frombuffer(data, carrier))

    @ways
    def test_odd_addresses_and_no_byte_too_many(self, datatype: DataType, how: QuantizationOptions) -> None:
        values, numbers = drawn("normal", datatype, 1037), _numbers(datatype, how)
        block = expected_code(datatype, how, values)
        for shift in (0, 1, 3):
            room = bytearray(b"\xa5" * (len(block) + 64))
            source = bytearray(shift) + values.tobytes()
            encode_into(*numbers, memoryview(room)[shift : shift + len(block)], memoryview(source)[shift:])
            assert bytes(room) == b"\xa5" * shift + block + b"\xa5" * (64 - shift)
            target = bytearray(b"\x5a" * (values.nbytes + 64))
            decode_into(
                *numbers, memoryview(target)[shift : shift + values.nbytes], memoryview(room)[shift : -64 + shift]
            )
            arrived = expected_values(datatype, how, block, len(values)).tobytes()
            assert bytes(target) == b"\x5a" * shift + arrived + b"\x5a" * (64 - shift)

    @ways
    def test_reducing_is_decoding_and_then_reducing(self, datatype: DataType, how: QuantizationOptions) -> None:
        local, incoming = drawn("normal", datatype, 1551), drawn("uniform", datatype, 1551, seed=2)
        block = coded(datatype, how, incoming)
        arrived = decoded(datatype, how, block, incoming)
        for op, divisor in [*((op, 0) for op in ReduceOp), (ReduceOp.AVG, 3)]:
            expected, got = np.empty_like(local), local.copy()
            arithmetic.reduce_into(datatype.value, op.value, expected, local, arrived, divisor=divisor)
            reduce_coded_into(*_numbers(datatype, how), op.value, got, got, block, divisor=divisor)
            assert got.tobytes() == expected.tobytes(), op


def _numbers(datatype: DataType, how: QuantizationOptions) -> tuple[int, int, int]:
    return datatype.value, how.algorithm.value, how.quantized_datatype.value


# --- Errors -------------------------------------------------------------------------------------------------------


def errors(datatype: DataType, how: QuantizationOptions, values: Array) -> Array:
    """Return each element's error, relative to the range of its group, beyond the resolution of its type."""
    arrived = widened(datatype, check_bits(datatype, how, values)).astype(np.float64)
    numbers = widened(datatype, values).astype(np.float64)
    group = group_of(datatype)
    ulps = {DataType.FLOAT16: 2**-10, DataType.BFLOAT16: 2**-7, DataType.FLOAT: 2**-23, DataType.DOUBLE: 2**-52}
    found = []
    for begin in range(0, len(numbers), group):
        some, got = numbers[begin : begin + group], arrived[begin : begin + group]
        least, most = some.min(), some.max()
        if how.algorithm in ANCHORED:
            least, most = min(least, 0.0), max(most, 0.0)
        slack = np.maximum(np.abs(some), np.abs(got)) * ulps[datatype]
        found.append(np.maximum(np.abs(got - some) - slack, 0) / ((most - least) or 1))
    return np.concatenate(found)


@ways
@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy", "above", "below", "sparse"])
def test_no_value_is_further_off_than_half_a_step(datatype: DataType, how: QuantizationOptions, kind: str) -> None:
    """Goal: the step is the range divided by the codes (ZERO_POINT_SCALE has one less), rounded up by 1/128 at most."""
    steps = (1 << bits_of(how)) - (2 if how.algorithm in ANCHORED else 1)
    worst = errors(datatype, how, drawn(kind, datatype, 5000)).max()

    assert worst <= 0.5 / steps * (1 + 1 / 128) * 1.01
    assert bits_of(how) < 8 or worst < 0.01
    assert kind != "normal" or worst > 0


@given(
    st.lists(st.floats(-(2**125), 2**125, width=32, allow_subnormal=False), min_size=1, max_size=700),
    st.sampled_from([how for datatype, how in WAYS if datatype is DataType.FLOAT]),
)
@settings(max_examples=150)
def test_the_bound_holds_for_any_floats(values: list[float], how: QuantizationOptions) -> None:
    array = np.array(values, np.float32)
    ranges = [np.ptp(array[begin : begin + 512].astype(float)) for begin in range(0, len(array), 512)]
    steps = (1 << bits_of(how)) - (2 if how.algorithm in ANCHORED else 1)

    # Values closer than the smallest step count as equal.
    assert errors(DataType.FLOAT, how, array).max() <= 0.505 / steps * (1 + 1 / 128) or min(ranges) < 1e-37


@ways
def test_equal_values_are_exact(datatype: DataType, how: QuantizationOptions) -> None:
    """Goal: 42 and 43 make 85, also where no step could represent it."""
    for value in (42, 43, 1 / 3, -1e-7, 6e4, 0, 5e-324, LIMITS[datatype], -LIMITS[datatype]):
        values = narrowed(datatype, np.full(700, value, wide(datatype)))
        assert (check_bits(datatype, how, values) == values).all(), value


@ways
def test_an_outlier_costs_its_own_group_only(datatype: DataType, how: QuantizationOptions) -> None:
    group = group_of(datatype)
    plain = drawn("normal", datatype, 3 * group)
    spoilt = plain.copy()
    spoilt[group + 5] = narrowed(datatype, np.array([60000], wide(datatype)))[0]
    before, after = (check_bits(datatype, how, values) for values in (plain, spoilt))

    assert before[:group].tobytes() == after[:group].tobytes()
    assert before[2 * group :].tobytes() == after[2 * group :].tobytes()
    assert (before[group : 2 * group] != after[group : 2 * group]).any()


@ways
def test_zero_is_exact_where_it_is_an_anchor(datatype: DataType, how: QuantizationOptions) -> None:
    values = drawn("sparse", datatype, 4000)
    arrived = widened(datatype, check_bits(datatype, how, values))
    zeros = widened(datatype, values) == 0

    assert how.algorithm not in ANCHORED or (arrived[zeros] == 0).all()
    assert zeros.sum() > 3000


# --- What is no ordinary number -----------------------------------------------------------------------------------


@ways
def test_no_number_stays_where_it_was(datatype: DataType, how: QuantizationOptions) -> None:
    """Goal: NaN and infinities arrive unchanged, at their positions; the elements beside them stay finite."""
    numbers = widened(datatype, drawn("normal", datatype, 3000))
    places = {5: np.nan, 6: np.inf, 511: -np.inf, 1500: np.nan, 2999: np.inf}
    for place, value in places.items():
        numbers[place] = value
    values = narrowed(datatype, numbers)
    arrived = widened(datatype, check_bits(datatype, how, values))

    finite = np.isfinite(numbers)
    assert np.isnan(arrived[np.isnan(numbers)]).all()
    assert (arrived[np.isinf(numbers)] == numbers[np.isinf(numbers)]).all()
    assert np.isfinite(arrived[finite]).all()
    # Three codes are reserved; of 16, that is a fifth.
    assert np.abs(arrived[finite] - widened(datatype, values)[finite]).max() < np.ptp(numbers[finite]) * 0.6 / (
        (1 << bits_of(how)) - 4
    )


@ways
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_group_without_any_number(datatype: DataType, how: QuantizationOptions, value: float) -> None:
    values = narrowed(datatype, np.full(77, value, wide(datatype)))
    assert np.array_equal(widened(datatype, check_bits(datatype, how, values)), np.full(77, value), equal_nan=True)


@ways
def test_no_range_is_too_large(datatype: DataType, how: QuantizationOptions) -> None:
    """Goal: a range over the whole type gives no infinity, and a slightly wider bound."""
    limit = LIMITS[datatype]
    for kind in ("both ends", "upper end", "lower end", "beyond half"):
        span = {"both ends": (-1, 1), "upper end": (0.2, 1), "lower end": (-1, -0.2), "beyond half": (-0.6, 0.6)}[kind]
        numbers = np.random.default_rng(4).uniform(*span, 600) * limit
        numbers[:2] = np.array(span) * limit
        values = narrowed(datatype, numbers.astype(wide(datatype)))
        arrived = widened(datatype, check_bits(datatype, how, values)).astype(np.float64)
        assert np.isfinite(arrived).all(), kind
        off = np.abs(arrived / 2 - widened(datatype, values).astype(np.float64) / 2)
        assert off.max() <= limit * (1.02 if bits_of(how) > 4 else 1.3) * 0.5 / ((1 << bits_of(how)) - 4) + limit / 200


@ways
def test_the_smallest_numbers(datatype: DataType, how: QuantizationOptions) -> None:
    """Goal: subnormals stay finite, with an error of at most a group's range or half of the smallest step."""
    values = drawn("minute" if datatype is DataType.DOUBLE else "tiny", datatype, 1300)
    arrived = widened(datatype, check_bits(datatype, how, values)).astype(np.float64)

    off = np.abs(arrived - widened(datatype, values).astype(np.float64)).max()
    assert off <= max(np.ptp(widened(datatype, values).astype(np.float64)), 2.0**-134)


# --- Sizes, and what is refused -----------------------------------------------------------------------------------


@ways
def test_little_is_added_to_the_codes(datatype: DataType, how: QuantizationOptions) -> None:
    """Goal: within 3 % of the codes alone."""
    count = 1 << 16
    ideal = count * bits_of(how) // 8

    assert ideal < coded_size(count, *_numbers(datatype, how)) <= ideal * 1.024
    assert group_elements(*_numbers(datatype, how)) == group_of(datatype)


@given(
    st.integers(0, 1 << 22),
    st.sampled_from(WAYS),
    st.integers(1, 40),
    st.data(),
)
@settings(max_examples=200)
def test_an_area_has_a_place_for_each_block_of_every_smaller_ring(
    count: int, way: tuple[DataType, QuantizationOptions], world: int, data: st.DataObject
) -> None:
    datatype, how = way
    fewer = data.draw(st.integers(1, world))
    cut = Cut(count, datatype.itemsize, fewer)
    room = area_bytes(count, *_numbers(datatype, how), world)

    assert cut.block % group_of(datatype) == 0
    assert cut.blocks_numbered * coded_size(cut.block, *_numbers(datatype, how)) <= room


def test_what_cannot_be_quantized_is_refused() -> None:
    """Goal: the check at launch and the check of the data plane accept the same."""
    for datatype in DataType:
        for algorithm in QuantizationAlgorithm:
            for quantized in DataType:
                how = QuantizationOptions(quantized, algorithm)
                if (datatype, how) in WAYS:
                    check_quantization(datatype, how)
                    assert area_bytes(1000, *_numbers(datatype, how), 3) > 0
                elif algorithm is QuantizationAlgorithm.NONE:
                    check_quantization(datatype, how)
                else:
                    with pytest.raises(ValueError, match=r"choose|quantization_options=None|packs two codes"):
                        check_quantization(datatype, how)
                    with pytest.raises(ValueError, match="cannot be quantized"):
                        area_bytes(1000, *_numbers(datatype, how), 3)
    assert len(WAYS) == len(FLOATS) * 2 * 3 + 2 * 2 * 2


@pytest.mark.parametrize("algorithm", [3, 99, 102, 255])
def test_unknown_algorithms_are_refused(algorithm: int) -> None:
    with pytest.raises(ValueError, match=f"by algorithm {algorithm}"):
        area_bytes(10, DataType.FLOAT.value, algorithm, DataType.UINT8.value, 2)


def test_buffers_of_the_wrong_length_are_refused() -> None:
    values = np.zeros(600, np.float32)
    numbers = _numbers(DataType.FLOAT, QuantizationOptions(DataType.UINT8, MIN_MAX))
    block = bytearray(coded_size(600, *numbers))

    with pytest.raises(ValueError, match="coded has 611 bytes but needs 612"):
        encode_into(*numbers, block[:-1], values)
    with pytest.raises(ValueError, match="coded has 613 bytes but needs 612"):
        decode_into(*numbers, values, block + b"x")
    with pytest.raises(ValueError, match="operation 9 is unknown"):
        reduce_coded_into(*numbers, 9, values, values, block)

"""Frozen records: values that compare, print, hash, pickle and match, and refuse to change."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from pccl._core.records import record, replace


@record
class Point:
    """Two numbers, the second optional."""

    x: int
    y: int = 7

    def total(self) -> int:
        """Records may have methods."""
        return self.x + self.y


@record
class Pixel:
    """A record with the same fields and another class."""

    x: int
    y: int = 7


@record
class Nothing:
    """No field at all."""


def test_they_are_made_by_position_keyword_and_default() -> None:
    """Goal: constructors read like those of a dataclass."""
    assert Point(1) == Point(1, 7) == Point(x=1, y=7)
    assert Point(1, 2).total() == 3


@pytest.mark.parametrize("arguments", [(), (1, 2, 3)])
def test_wrong_arguments_are_a_type_error(arguments: tuple[int, ...]) -> None:
    """Goal: a missing or superfluous field is noticed where the record is made."""
    with pytest.raises(TypeError, match="argument"):
        Point(*arguments)


@pytest.mark.parametrize(
    ("keywords", "complaint"), [({"z": 1}, "no argument 'z'"), ({"x": 1}, "two values for argument 'x'")]
)
def test_wrong_names_are_a_type_error(keywords: dict[str, int], complaint: str) -> None:
    """Goal: a field that is misspelt, or given twice, is named."""
    with pytest.raises(TypeError, match=complaint):
        Point(0, **keywords)


def test_they_are_made_alike_from_a_tuple_and_a_dictionary() -> None:
    """Goal: a class called from C with a tuple and a dictionary makes the same record."""
    assert type.__call__(Point, 1, y=2) == Point(1, 2)
    with pytest.raises(TypeError, match="lacks its argument 'x'"):
        type.__call__(Point, y=2)


def test_nothing_is_derived_from_them() -> None:
    """Goal: records cannot be subclassed, because they are created without calling their class."""
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Longer", (Point,), {})


def test_they_let_go_of_what_they_hold() -> None:
    """Goal: references are counted correctly: one when a field is set, none after the record ends or was refused."""
    held = object()
    before = sys.getrefcount(held)
    for _ in range(100):
        Point(held, y=held)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            Point(held, x=held)  # type: ignore[arg-type]
    assert sys.getrefcount(held) == before


def test_they_compare_by_kind_and_value() -> None:
    """Goal: tests compare whole lists of actions, so two kinds with equal fields must differ."""
    assert Point(1) != Point(2)
    assert Point(1) != Pixel(1)
    assert Nothing() == Nothing()


def test_they_hash_as_they_compare() -> None:
    """Goal: records are keys and members of sets."""
    assert len({Point(1), Point(1, 7), Pixel(1), Nothing()}) == 3


def test_they_print_what_they_hold() -> None:
    """Goal: a failing comparison of actions can be read."""
    assert repr(Point(1)) == "Point(x=1, y=7)"
    assert repr(Nothing()) == "Nothing()"


def test_they_cannot_be_changed() -> None:
    """Goal: an action never changes after it was returned."""
    point = Point(1)
    with pytest.raises(AttributeError, match=r"Point\.x cannot be assigned"):
        point.x = 2
    with pytest.raises(AttributeError, match=r"Point\.x cannot be deleted"):
        del point.x
    with pytest.raises(AttributeError, match="cannot be assigned"):
        point.z = 2  # type: ignore[attr-defined]
    assert point == Point(1)


def test_they_carry_no_dictionary() -> None:
    """Goal: a machine makes thousands of them a second; slots keep them small."""
    assert not hasattr(Point(1), "__dict__")


def test_they_match_by_position() -> None:
    """Goal: `case Point(x, y)` works."""
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)
        case _:
            pytest.fail("no match")


def test_they_pickle() -> None:
    """Goal: stories can be kept and replayed."""
    assert pickle.loads(pickle.dumps([Point(1), Nothing()])) == [Point(1), Nothing()]


def test_replace_makes_a_changed_copy() -> None:
    """Goal: one field is changed, the original and the rest are not."""
    point = Point(1, 2)

    assert replace(point, y=3) == Point(1, 3)
    assert point == Point(1, 2)
    with pytest.raises(TypeError):
        replace(point, z=3)


def test_they_cost_nothing_to_import() -> None:
    """Goal: the peer actor never imports `dataclasses` and `inspect`, which cost tens of milliseconds."""
    code = (
        "import sys; import pccl._core.protocol.messages, pccl._core.protocol.events, pccl._core.peer.peer_state; "
        "print(sorted({'dataclasses', 'inspect', 'typing', 'logging', 'numpy', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"

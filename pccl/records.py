"""Frozen records: the one way in which events, actions, messages and options are written down.

A record is declared like a dataclass and behaves like one that is frozen and slotted: it compares by type and
value, prints itself, hashes, pickles and matches by position. It exists because the peer actor must start in tens of
milliseconds, and importing `dataclasses` alone costs twenty.

A leaf: imports nothing of ours and nothing slow.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar
    from typing import dataclass_transform as dataclass_transform  # noqa: PLC0414 - `wire` declares with it too

    T = TypeVar("T")
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        """Type checkers see the real one; at run time there is nothing to do."""
        return lambda function: function


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Turn a class with annotated fields into a frozen, slotted value type."""
    names = tuple(cls.__dict__.get("__annotations__", ()))
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    body: dict[str, Any] = {
        key: value
        for key, value in cls.__dict__.items()
        if key not in defaults and key not in ("__dict__", "__weakref__")
    }
    body.update(__slots__=names, __match_args__=names, __defaults__=defaults)
    for special in (_equal, _hash, _represent, _reduce, _refuse_set, _refuse_delete):
        body.setdefault(_SPECIAL_NAMES[special], special)
    frozen: Any = type(cls.__name__, cls.__bases__, body)
    frozen.__init__ = _make_init(frozen, names, defaults)
    return frozen  # type: ignore[no-any-return]


def replace(value: T, **changes: object) -> T:
    """A copy of the record with some fields changed."""
    names: tuple[str, ...] = value.__match_args__  # type: ignore[attr-defined]
    fields = {name: getattr(value, name) for name in names}
    return type(value)(**{**fields, **changes})


def _make_init(cls: Any, names: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    """Slot descriptors set the fields directly, because the class itself refuses every assignment."""
    scope: dict[str, Any] = {f"_set_{name}": getattr(cls, name).__set__ for name in names}
    scope.update({f"_default_{name}": value for name, value in defaults.items()})
    parameters = "".join(f", {name}=_default_{name}" if name in defaults else f", {name}" for name in names)
    lines = "".join(f"\n    _set_{name}(self, {name})" for name in names) or "\n    pass"
    exec(f"def __init__(self{parameters}):{lines}", scope)
    return scope["__init__"]


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in self.__match_args__])


def _equal(self: Any, other: object) -> bool:
    return type(self) is type(other) and _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _represent(self: Any) -> str:
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{type(self).__name__}({fields})"


def _reduce(self: Any) -> tuple[Any, tuple[Any, ...]]:
    return type(self), _values(self)


def _refuse_set(self: Any, name: str, _value: object) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be assigned: records are frozen")


def _refuse_delete(self: Any, name: str) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted: records are frozen")


_SPECIAL_NAMES: dict[Any, str] = {
    _equal: "__eq__",
    _hash: "__hash__",
    _represent: "__repr__",
    _reduce: "__reduce__",
    _refuse_set: "__setattr__",
    _refuse_delete: "__delattr__",
}

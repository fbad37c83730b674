from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

class Fields:
    names: tuple[str, ...]
    def __init__(self, cls: type, names: tuple[str, ...], defaults: dict[str, Any]) -> None: ...

@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]: ...
def replace(value: T, **changes: object) -> T: ...

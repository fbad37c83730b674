from typing import Self, final

from typing_extensions import Buffer, disjoint_base

@final
class Mapping(Buffer):
    nbytes: int
    def __new__(cls, fd: int, nbytes: int, *, populate: bool = False) -> Self: ...
    @property
    def address(self) -> int: ...

@disjoint_base
class Window(Buffer):
    nbytes: int
    def __new__(cls, mapping: Mapping, offset: int, nbytes: int, *_: object) -> Self: ...
    @property
    def address(self) -> int: ...
    @property
    def view(self) -> memoryview: ...
    def surrender(self) -> bool: ...

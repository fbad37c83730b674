from typing import Self, final

@final
class PathBuilder:
    def __new__(cls, count: int) -> Self: ...

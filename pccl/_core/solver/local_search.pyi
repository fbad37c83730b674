from typing import Self, final

@final
class Search:
    def __new__(cls, count: int, seed: int) -> Self: ...

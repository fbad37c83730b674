from typing import Self, final

@final
class Weaver:
    def __new__(cls, count: int) -> Self: ...

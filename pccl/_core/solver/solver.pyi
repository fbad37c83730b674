from collections.abc import Sequence
from typing import Final, final

from typing_extensions import Buffer

EXACT_MAX: Final[int]
MEMBERS_MAX: Final[int]
STEPS: Final[int]
RATE_MIN: Final[float]
RATE_MAX: Final[float]

@final
class Solution:
    order: list[int]
    bottleneck: float
    total: float
    exact: bool
    def __init__(self, order: list[int], bottleneck: float, total: float, exact: bool) -> None: ...

@final
class Table: ...

def evaluate(rates: Buffer, order: Sequence[int]) -> tuple[float, float] | None: ...
def solve(
    rates: Buffer,
    count: int,
    start: Sequence[int] | None = None,
    seed: int = 0,
    steps: int = ...,
    budget_ns: int = 0,
    exact: bool = True,
) -> Solution | None: ...

from typing import final

from pccl._core.records import record

from .collectives import OpenReduce
from .state_consensus import StateConsensus

@final
@record
class Vote:
    call: int
    wanted: int
    since_ns: int

@final
@record
class OpenCall:
    name: str
    missing: frozenset[int]
    waiting: dict[int, int]
    tag: OpenReduce | None = None
    consensus: StateConsensus | None = None
    def waited_ns(self, now_ns: int) -> int: ...

@final
@record
class Deadlock:
    reason: str
    involved: list[tuple[OpenCall, int]]
    odd: dict[int, str]

@final
class Ballots:
    votes: dict[str, dict[int, Vote]]
    def __init__(self, *names: str) -> None: ...
    def cast(self, name: str, peer: int, vote: Vote) -> str: ...
    def withdraw(self, peer: int, call: int) -> bool: ...
    def drop(self, peer: int) -> None: ...
    def close(self, name: str) -> dict[int, Vote]: ...
    def open_calls(self, electorate: set[int]) -> list[OpenCall]: ...

def name_missing(missing: frozenset[int] | set[int], calls: list[OpenCall]) -> str: ...
def find_deadlock(calls: list[OpenCall], oldest_ns: int, threads: dict[int, int]) -> Deadlock | None: ...

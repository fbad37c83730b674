"""What the parts of the harness tell each other: the task of a training process, its steps, and what is promised.

Values only. They travel as one line of JSON each, because a bundle of them is what somebody reads after a failure.
Times are nanoseconds of the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pccl import communicator

CONNECT = "connect"
TOPOLOGY = "update_topology"
WAIT = "wait_for_world_size"
PENDING = "are_peers_pending"

ROUNDS = frozenset({TOPOLOGY, WAIT})  # calls that take part in topology rounds


class Numbers(communicator.Numbers):
    """What a round told a peer."""

    __slots__ = ()

    @property
    def common(self) -> tuple[int, int, int]:
        """The part that is the same for all groups."""
        return self.global_world, self.groups, self.largest_group

    @property
    def of_group(self) -> tuple[int, int]:
        """The part that is the same within a group."""
        return self.epoch, self.group_world


@dataclass(frozen=True, slots=True)
class Task:
    """What a forked process shall be: a master if it has no address to connect to, else a training process."""

    life: int  # every training process of a run has a number of its own; it is not the peer id, which the master gives
    options: str  # Options.encode()
    address: str = ""
    group: int = 0
    lanes: int = 1
    seed: int = 0
    pause: float = 0.02  # seconds of "training" between two rounds, at most
    ask_interval: float = 0.2  # seconds between two are_peers_pending of the second thread; 0: there is none
    wait_share: float = 0.05  # how many of the rounds are made by wait_for_world_size
    wait_timeout: float = 0.3  # seconds that those wait for more peers

    def encode(self) -> bytes:
        """One line, without its end."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """The inverse of `encode`."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Step:
    """One call of one training process, told after it ended."""

    life: int
    group: int
    call: str
    start_ns: int
    end_ns: int
    numbers: Numbers | None = None
    error: str = ""  # class and text of what it raised

    @property
    def seconds(self) -> float:
        """How long the call took."""
        return (self.end_ns - self.start_ns) / 1e9

    def encode(self) -> bytes:
        """One line. Far below the size up to which a pipe takes a line as a whole."""
        row = [self.life, self.group, self.call, self.start_ns, self.end_ns, self.numbers, self.error[:2000]]
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """The inverse of `encode`."""
        life, group, call, start_ns, end_ns, numbers, error = json.loads(line)
        return cls(life, group, call, start_ns, end_ns, Numbers(*numbers) if numbers else None, error)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the library promises, in seconds, and what the harness allows for the machine it runs on."""

    call: float = 1.0  # a round after the last fault, or after its own start
    silence: float = 2.0  # heartbeat_timeout of the run: how long a stopped peer may hold up the others
    join: float = 5.0  # from the start of a training process until it is a member
    exit: float = 5.0  # from the deed until the training process and all of its processes are gone
    hang: float = 10.0  # a call that nobody hears of for so long, beyond every excuse, never returns
    grown_bytes: int = 4 << 20  # what a long-lived process may gain over a run; allocators settle, leaks do not


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not happen, and did."""

    at_ns: int
    law: str
    text: str

    def __str__(self) -> str:
        return f"{self.law}: {self.text}"


@dataclass(slots=True)
class Tally:
    """The run in numbers, for the view and the report."""

    steps: int = 0
    rounds: int = 0
    joins: int = 0
    lives: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    missed: int = 0  # faults whose victim was not there, or had no such process
    longest: float = 0.0  # seconds of the longest update_topology
    lateness: float = 0.0  # seconds that the supervisor itself was kept from running: how overloaded the machine was
    responses: list[float] = field(default_factory=list)  # seconds from a fault until the last survivor went on

    def as_json(self) -> dict[str, Any]:
        """As the report file has it."""
        return {**asdict(self), "responses": spread(self.responses)}


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum; empty if there is nothing to describe."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "median": round(ordered[last // 2], 4),
        "p99": round(ordered[round(last * 0.99)], 4),
        "max": round(ordered[-1], 4),
    }

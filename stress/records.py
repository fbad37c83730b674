"""The records of the harness: the task of a training process, its steps, the bounds, and the totals.

Values only. Each travels as one line of JSON, so that people can read them after a failure. Times are nanoseconds of
the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Self

from pccl import communicator

CONNECT = "connect"
TOPOLOGY = "update_topology"
WAIT = "wait_for_world_size"
PENDING = "are_peers_pending"
SYNC = "sync_shared_state"
REDUCE = "all_reduce"
OPTIMIZE = "optimize_topology"
APPLY = "apply"  # no call of the library: the state was updated

# Exit statuses: of a process that was told to exit without closing; and of bad newcomers.
VANISHED = 7
REFUSED = 8  # it was refused with an error that is meant for it
SPARED = 9  # it found too few members, or lost its chance because one of them died
UNTOLD = 10  # it was accepted, or got an error that says something else

ROUNDS = frozenset({TOPOLOGY, WAIT})  # calls that take part in topology rounds


class Numbers(communicator.Numbers):
    """The numbers that a round gave to a peer."""

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

    life: int  # the number of the training process, unique in a run; not the peer id, which the master gives
    options: str  # Options.encode()
    address: str = ""
    group: int = 0
    lanes: int = 1
    seed: int = 0  # of this process: its pauses
    pause: float = 0.02  # seconds of "training" between two rounds, at most
    ask_interval: float = 0.2  # seconds between two are_peers_pending of the second thread; 0: there is none
    wait_share: float = 0.05  # share of rounds by wait_for_world_size; not for peers that reduce between rounds
    wait_timeout: float = 0.3  # seconds that those wait for more peers
    place: int = 0
    places: int = 0  # 0: rounds only; else the number of places: the length of the list of participants in a tensor
    run_seed: int = 0  # the same for all: what is reduced in which round
    checkpoints: str = ""  # folder for checkpoints of groups that lose all members; empty: no state is kept
    role: str = "peer"  # or "master", or "proxy"
    mistake: str = ""  # of a bad newcomer: a kind of fault; empty: a peer that trains

    def encode(self) -> bytes:
        """One line, without its end."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """The inverse of `encode`."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Reduced:
    """One attempt at a reduce: checksums before and after, and which peers took part."""

    round: int
    index: int  # which of the round's operations
    attempt: int
    ok: bool
    world: int  # world size in its ReduceInfo; 0 if it failed
    before: int  # checksum of the tensor when it was launched
    after: int  # the same when it had ended
    members: tuple[tuple[int, int], ...] = ()  # place and life of each that took part, read from the result
    span: tuple[float, float] = (0.0, 0.0)  # of a quantized result: smallest and largest element
    exhibit: tuple[int, int] | None = None  # of a failed one: where the tensor lies, untouched, and how long it is
    progress: tuple[int, float] = (0, 0.0)  # of a failed one whose target shows it: see `arithmetic.progress_of`


@dataclass(frozen=True, slots=True)
class Synced:
    """A sync that returned: what this peer held before and after."""

    round: int
    revision_before: int
    before: int
    revision: int
    after: int
    tx_bytes: int
    rx_bytes: int
    resumed: bool = False  # it had found no state, and came back with a checkpoint


@dataclass(frozen=True, slots=True)
class Applied:
    """An update of the state: the content before, the results, the content after."""

    round: int
    revision: int
    before: int
    after: int
    results: tuple[tuple[int, int], ...]  # index and checksum of every result, in the order of their application


FACTS: dict[str, type[Any]] = {REDUCE: Reduced, SYNC: Synced, APPLY: Applied}
Fact = Reduced | Synced | Applied


def _tuples(value: Any) -> Any:
    """Turn lists of JSON into the tuples that they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Step:
    """One call of one training process, reported after its end."""

    life: int
    group: int
    call: str
    start_ns: int
    end_ns: int
    numbers: Numbers | None = None
    error: str = ""  # class and text of what it raised
    fact: Fact | None = None

    @property
    def seconds(self) -> float:
        """How long the call took."""
        return (self.end_ns - self.start_ns) / 1e9

    def encode(self) -> bytes:
        """One line, shorter than what a pipe takes in one write."""
        fact = None if self.fact is None else astuple(self.fact)
        row = [self.life, self.group, self.call, self.start_ns, self.end_ns, self.numbers, self.error[:1000], fact]
        return json.dumps(row).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self:
        """The inverse of `encode`."""
        life, group, call, start_ns, end_ns, numbers, error, fact = json.loads(line)
        told = None if fact is None else FACTS[call](*_tuples(fact))
        return cls(life, group, call, start_ns, end_ns, Numbers(*numbers) if numbers else None, error, told)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds that the library guarantees, in seconds, with an allowance for the machine."""

    call: float = 1.0  # a call after the last fault, or after its own start
    silence: float = 2.0  # heartbeat_timeout of the run: how long a stopped peer may hold up the others
    stall: float = 1.5  # stall_timeout of the run: how long a link without a sign of life may hold up a reduce
    measuring: float = 1.0  # what the probes of the run add to an optimisation, each with processes to be started
    join: float = 5.0  # from the start of a training process until it is a member
    refusal: float = 15.0  # from the start of a bad newcomer until it has ended, told what is wrong
    exit: float = 5.0  # from the fault until the training process and all of its processes are gone
    hang: float = 4.0  # how much longer a call may take because of faults of others, however many
    grown_bytes: int = 2 << 20  # growth of master and actor that is allowed in a run; allocators settle, leaks do not
    grown_tensor_bytes: int = 24 << 20  # the same for a training process, whose tensors have random sizes
    grown_count: int = 24  # the same for descriptors and mapped segments


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated law: when, which, and how."""

    at_ns: int
    law: str
    text: str

    def __str__(self) -> str:
        return f"{self.law}: {self.text}"


@dataclass(slots=True)
class RunTotals:
    """The numbers of a run, for the view and the report."""

    steps: int = 0
    rounds: int = 0
    joins: int = 0
    lives: int = 0
    reduces: int = 0  # that succeeded, each counted at every peer
    aborts: int = 0  # that failed because a peer was lost
    retries: int = 0  # attempts after the first
    syncs: int = 0
    received: int = 0  # syncs that brought content
    revisions: int = 0  # over all groups
    inspected: int = 0  # tensors of failed reduces that were read from outside
    faults: dict[str, int] = field(default_factory=dict)
    missed: int = 0  # faults whose victim was not there, or had no such process
    refused: int = 0  # bad newcomers that were refused
    longest: float = 0.0  # seconds of the longest call that no pause of a stopped or silent peer explains
    lateness: float = 0.0  # longest time in seconds that the supervisor did not run: shows an overloaded machine
    responses: list[float] = field(default_factory=list)  # seconds from a fault until the last survivor went on
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill until the last survivor had reduced
    recovered_ns: list[int] = field(default_factory=list)  # when each of those was
    paths: dict[str, int] = field(default_factory=dict)  # rare paths, and how often each was seen

    def as_json(self) -> dict[str, Any]:
        """As the report file has it."""
        measured = {"responses": spread(self.responses), "recoveries": spread(self.recoveries)}
        return {name: measured.get(name, value) for name, value in asdict(self).items() if name != "recovered_ns"}


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

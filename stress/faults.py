"""The faults, and the plan that says which fault hits which peer, and when.

The plan is drawn from a seed before the run and does not depend on the run: the same seed gives the same faults at the
same times to the same places. A *place* is a number that peers occupy one after another. Place 0 belongs to the elder,
which only loses workers: so a run always has one member, and one process whose memory can be watched. The scheduling of
the machine is not repeatable; a fault whose victim does not exist at that moment is counted as missed.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from .records import VANISHED

if TYPE_CHECKING:
    from collections.abc import Iterator

ELDER = 0  # the place of the peer that is never ended


class FaultKind(StrEnum):
    """The kinds of faults, with the names that reports and plots use."""

    KILL_TRAINING = "kill-training"
    KILL_TWO = "kill-two"
    KILL_ACTOR = "kill-actor"
    KILL_SENDER = "kill-sender"
    KILL_RECEIVER = "kill-receiver"
    KILL_STATE_WORKER = "kill-state-worker"
    TERMINATE = "terminate"
    VANISH = "vanish"
    CLOSE = "close"
    STOP_TRAINING = "stop-training"
    STOP_ACTOR = "stop-actor"
    STOP_PEER = "stop-peer"
    BLACK_HOLE = "black-hole"
    RESET_RING = "reset-ring"
    RESET_MASTER = "reset-master"
    HALF_CLOSE_RING = "half-close-ring"
    HALF_CLOSE_MASTER = "half-close-master"
    FLIP_RING = "flip-ring"
    FLIP_MASTER = "flip-master"
    MASS_DEATH = "mass-death"
    NEWCOMER_DEAF = "newcomer-deaf"
    NEWCOMER_SILENT = "newcomer-silent"
    NEWCOMER_STRANGER = "newcomer-stranger"
    NEWCOMER_STATE = "newcomer-state"
    NEWCOMER_SHAPE = "newcomer-shape"
    NEWCOMER_CALL = "newcomer-call"


# Fault families: kinds that the command line switches on together, and how often each is drawn. Kills are the most
# frequent: the library is built for processes that end without warning.
FAMILIES: dict[str, dict[FaultKind, int]] = {
    "kill": {
        FaultKind.KILL_TRAINING: 30,
        FaultKind.KILL_TWO: 10,
        FaultKind.KILL_ACTOR: 15,
        FaultKind.KILL_SENDER: 10,
        FaultKind.KILL_RECEIVER: 10,
        FaultKind.KILL_STATE_WORKER: 6,
    },
    "term": {FaultKind.TERMINATE: 8},
    "vanish": {FaultKind.VANISH: 8},
    "close": {FaultKind.CLOSE: 8},
    "stop": {FaultKind.STOP_TRAINING: 3, FaultKind.STOP_ACTOR: 3, FaultKind.STOP_PEER: 4},
    "blackhole": {FaultKind.BLACK_HOLE: 5},
    "link": {
        FaultKind.RESET_RING: 3,
        FaultKind.RESET_MASTER: 2,
        FaultKind.HALF_CLOSE_RING: 3,
        FaultKind.HALF_CLOSE_MASTER: 2,
        FaultKind.FLIP_RING: 4,
        FaultKind.FLIP_MASTER: 2,
    },
    "mass": {FaultKind.MASS_DEATH: 2},
    # Bad newcomers: nobody can dial them, they belong to another run, or they do something else than the members.
    "unreachable": {FaultKind.NEWCOMER_DEAF: 3, FaultKind.NEWCOMER_SILENT: 3},
    "stranger": {FaultKind.NEWCOMER_STRANGER: 3},
    "misfit": {FaultKind.NEWCOMER_STATE: 2, FaultKind.NEWCOMER_SHAPE: 3, FaultKind.NEWCOMER_CALL: 3},
}
ALL_FAMILIES = tuple(FAMILIES)

# Faults that hit no peer: a process asks to join with a mistake (`bad_newcomer`), and only that process may notice.
NEWCOMERS = frozenset({*FAMILIES["unreachable"], *FAMILIES["stranger"], *FAMILIES["misfit"]})
# Of those, the ones that are refused because most members of the group do something else.
OUTVOTED = frozenset(FAMILIES["misfit"])
STOPS = frozenset({FaultKind.STOP_TRAINING, FaultKind.STOP_ACTOR, FaultKind.STOP_PEER})
PAUSES = STOPS | {FaultKind.BLACK_HOLE}  # faults with a duration
# Faults that cost no membership: the peer replaces the process or the connection.
MENDED = frozenset(
    {
        *(FaultKind.KILL_SENDER, FaultKind.KILL_RECEIVER, FaultKind.KILL_STATE_WORKER),
        *(FaultKind.RESET_RING, FaultKind.HALF_CLOSE_RING, FaultKind.FLIP_RING),
    }
)
# Faults of links, which only hit peers behind a proxy: the command to the proxy, and the links (ring or master).
LINK_FAULTS = {
    FaultKind.BLACK_HOLE: ("silence", ("ring", "master")),
    FaultKind.RESET_RING: ("reset", ("ring",)),
    FaultKind.RESET_MASTER: ("reset", ("master",)),
    FaultKind.HALF_CLOSE_RING: ("half_close", ("ring",)),
    FaultKind.HALF_CLOSE_MASTER: ("half_close", ("master",)),
    FaultKind.FLIP_RING: ("flip", ("ring",)),
    FaultKind.FLIP_MASTER: ("flip", ("master",)),
}

# Exit status of the training process after each fault that ends it; minus the signal if it was one.
ENDINGS = {
    FaultKind.KILL_TRAINING: -signal.SIGKILL,
    FaultKind.MASS_DEATH: -signal.SIGKILL,
    FaultKind.TERMINATE: -signal.SIGTERM,
    FaultKind.VANISH: VANISHED,
    FaultKind.CLOSE: 0,
}

SHORT_STOP = (0.05, 0.5)  # seconds: a pause that costs no membership
LONG_STOP = (0.5, 1.5)  # seconds beyond the heartbeat timeout: the run continues without the stopped peer
RESPAWN = (0.0, 1.0)  # seconds until a dead peer is replaced
PROXIED_EVERY = 3  # one of so many places is behind a proxy; the other peers connect directly, as users do


def is_proxied(place: int) -> bool:
    """Whether link faults can hit this place. Never the elder's."""
    return place % PROXIED_EVERY == 1


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the plan."""

    number: int
    at: float  # seconds after the run began
    kind: FaultKind
    place: int  # of the victim; in a mass death, of the survivor; of a bad newcomer, a place in its group
    pause: float  # seconds: how long a stop lasts, or until a dead peer is followed by the next

    def __str__(self) -> str:
        return f"{self.at:9.3f} s  {self.kind:<14} place={self.place} pause={self.pause:.3f}"


def draw_plan(
    seed: int,
    places: int,
    interval: tuple[float, float],
    silence: float,
    families: tuple[str, ...] = ALL_FAMILIES,
) -> Iterator[Fault]:
    """Faults without end, at random intervals. `silence` is the run's heartbeat timeout."""
    rng = random.Random(seed)
    weighed = {kind: weight for name in families for kind, weight in FAMILIES[name].items()}
    kinds, weights = list(weighed), list(weighed.values())
    at, number = 0.0, 0
    while kinds:
        at += rng.uniform(*interval)
        number += 1
        kind = rng.choices(kinds, weights)[0]
        place = _draw_place(rng, kind, places)
        pause = rng.uniform(*RESPAWN)
        if kind in PAUSES:
            # A stopped training process looks like a slow one, so the other peers wait for it.
            short = kind is FaultKind.STOP_TRAINING or rng.random() < 0.5
            pause = rng.uniform(*SHORT_STOP) if short else silence + rng.uniform(*LONG_STOP)
        yield Fault(number, at, kind, place, pause)


def _draw_place(rng: random.Random, kind: FaultKind, places: int) -> int:
    if kind is FaultKind.MASS_DEATH or places == 1:
        return ELDER
    if kind in LINK_FAULTS:
        return rng.choice([place for place in range(places) if is_proxied(place)])
    return rng.randrange(ELDER if kind in MENDED else ELDER + 1, places)


# ---------------------------------------------------------------------------------------------- processes of a peer


@dataclass(frozen=True, slots=True)
class PeerProcesses:
    """The processes of one peer at this moment, from /proc."""

    training: int
    actors: tuple[int, ...]  # one, or none between two memberships
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    state_workers: tuple[int, ...] = ()  # only while a state moves

    @property
    def everyone(self) -> tuple[int, ...]:
        """All of them, the training process first."""
        return (self.training, *self.actors, *self.senders, *self.receivers, *self.state_workers)


def processes_of(training: int) -> PeerProcesses:
    """A training process and its descendants. A process that ends meanwhile is left out."""
    actors = children_of(training)
    senders: list[int] = []
    receivers: list[int] = []
    state_workers: list[int] = []
    for actor in actors:
        for worker in children_of(actor):
            name = name_of(worker)
            if name.startswith("pccl-send"):
                senders.append(worker)
            elif name.startswith("pccl-recv"):
                receivers.append(worker)
            elif name.startswith(("pccl-serve", "pccl-fetch")):
                state_workers.append(worker)
    return PeerProcesses(training, tuple(actors), tuple(senders), tuple(receivers), tuple(state_workers))


def children_of(pid: int) -> list[int]:
    """The children that the main thread of a process has started and that can still be killed."""
    with suppress(OSError):
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [child for child in children if can_be_killed(child)]
    return []


def can_be_killed(pid: int) -> bool:
    """Whether a process has neither ended nor been killed already.

    On a busy machine a killed process is shown as running for milliseconds. An actor that replaces its workers has
    killed the old ones, and a fault that hits one of those changes nothing.
    """
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        # Of the whole process; a SIGKILL stays there until the process is reaped.
        pending = int(fields["ShdPnd"], 16)
        return fields["State"][0] not in "ZX" and not pending & (1 << signal.SIGKILL - 1)
    return False


def name_of(pid: int) -> str:
    """As `ps` shows it; empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


# ---------------------------------------------------------------------------------------------- faults

_SIGNALS = {
    FaultKind.TERMINATE: signal.SIGTERM,
    FaultKind.VANISH: signal.SIGUSR1,
    FaultKind.CLOSE: signal.SIGUSR2,
    FaultKind.STOP_TRAINING: signal.SIGSTOP,
    FaultKind.STOP_ACTOR: signal.SIGSTOP,
    FaultKind.STOP_PEER: signal.SIGSTOP,
}


def commit(kind: FaultKind, training: int) -> tuple[int, ...]:
    """Commit a fault. Returns the processes that were hit; none if the peer has no such process now."""
    processes = processes_of(training)
    targets: tuple[int, ...]
    match kind:
        case FaultKind.KILL_ACTOR | FaultKind.STOP_ACTOR:
            targets = processes.actors
        case FaultKind.KILL_SENDER:
            targets = processes.senders[:1]
        case FaultKind.KILL_RECEIVER:
            targets = processes.receivers[:1]
        case FaultKind.KILL_STATE_WORKER:
            targets = processes.state_workers[:1]
        case FaultKind.STOP_PEER:
            targets = processes.everyone
        case _:
            targets = (training,)
    number = _SIGNALS.get(kind, signal.SIGKILL)
    return tuple(pid for pid in targets if send(pid, number))


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

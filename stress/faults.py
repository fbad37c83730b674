"""What can be done to a peer, and the plan that says what is done to whom and when.

The plan is drawn from a seed before anything happens and does not look at the run: the same seed gives the same faults
at the same times to the same places. A *place* is a number that peers occupy one after another. Place 0 belongs to the
elder, who only ever loses workers: a run always has one member, and one whose memory can be watched. What the machine
makes of a plan, by scheduling, is not repeatable; a fault whose victim is not there just then is counted as missed.
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

from .workload import VANISHED

if TYPE_CHECKING:
    from collections.abc import Iterator

ELDER = 0  # the place of the peer that is never ended


class Kind(StrEnum):
    """The names that reports and plots use."""

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


# What the command line calls them: kinds that are switched on together, and how often each is drawn. Kills lead: a
# process that ends without a word is what the library is built for.
FAMILIES: dict[str, dict[Kind, int]] = {
    "kill": {
        Kind.KILL_TRAINING: 30,
        Kind.KILL_TWO: 10,
        Kind.KILL_ACTOR: 15,
        Kind.KILL_SENDER: 10,
        Kind.KILL_RECEIVER: 10,
        Kind.KILL_STATE_WORKER: 6,
    },
    "term": {Kind.TERMINATE: 8},
    "vanish": {Kind.VANISH: 8},
    "close": {Kind.CLOSE: 8},
    "stop": {Kind.STOP_TRAINING: 3, Kind.STOP_ACTOR: 3, Kind.STOP_PEER: 4},
    "blackhole": {Kind.BLACK_HOLE: 5},
    "link": {
        Kind.RESET_RING: 3,
        Kind.RESET_MASTER: 2,
        Kind.HALF_CLOSE_RING: 3,
        Kind.HALF_CLOSE_MASTER: 2,
        Kind.FLIP_RING: 4,
        Kind.FLIP_MASTER: 2,
    },
    "mass": {Kind.MASS_DEATH: 2},
}
ALL_FAMILIES = tuple(FAMILIES)

STOPS = frozenset({Kind.STOP_TRAINING, Kind.STOP_ACTOR, Kind.STOP_PEER})
PAUSES = STOPS | {Kind.BLACK_HOLE}  # what lasts for a while
# Processes that a peer replaces, and connections that it makes anew: neither costs a membership.
MENDED = frozenset(
    {
        *(Kind.KILL_SENDER, Kind.KILL_RECEIVER, Kind.KILL_STATE_WORKER),
        *(Kind.RESET_RING, Kind.HALF_CLOSE_RING, Kind.FLIP_RING),
    }
)
# What is done to the network, and so only to peers behind a proxy: the order, and whether to the ring or the master.
LINK_FAULTS = {
    Kind.BLACK_HOLE: ("silence", ("ring", "master")),
    Kind.RESET_RING: ("reset", ("ring",)),
    Kind.RESET_MASTER: ("reset", ("master",)),
    Kind.HALF_CLOSE_RING: ("half_close", ("ring",)),
    Kind.HALF_CLOSE_MASTER: ("half_close", ("master",)),
    Kind.FLIP_RING: ("flip", ("ring",)),
    Kind.FLIP_MASTER: ("flip", ("master",)),
}

# Exit status of the training process after each deed that ends it; minus the signal if it was one.
ENDINGS = {
    Kind.KILL_TRAINING: -signal.SIGKILL,
    Kind.MASS_DEATH: -signal.SIGKILL,
    Kind.TERMINATE: -signal.SIGTERM,
    Kind.VANISH: VANISHED,
    Kind.CLOSE: 0,
}

SHORT_STOP = (0.05, 0.5)  # seconds: a stall that the run sits out
LONG_STOP = (0.5, 1.5)  # seconds beyond the heartbeat timeout: the run goes on without the stopped peer
RESPAWN = (0.0, 1.0)  # seconds until the place of a dead peer is taken by the next
PROXIED_EVERY = 3  # every so many places are behind a proxy, so that most traffic takes the way of most users


def is_proxied(place: int) -> bool:
    """Whether the links of a place can be harmed. Never the elder's."""
    return place % PROXIED_EVERY == 1


@dataclass(frozen=True, slots=True)
class Fault:
    """One deed of the plan."""

    number: int
    at: float  # seconds after the run began
    kind: Kind
    place: int  # whose peer suffers; in a mass death, who is spared
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
    chance = random.Random(seed)
    weighed = {kind: weight for name in families for kind, weight in FAMILIES[name].items()}
    kinds, weights = list(weighed), list(weighed.values())
    at, number = 0.0, 0
    while kinds:
        at += chance.uniform(*interval)
        number += 1
        kind = chance.choices(kinds, weights)[0]
        place = _draw_place(chance, kind, places)
        pause = chance.uniform(*RESPAWN)
        if kind in PAUSES:
            # Nobody is told that a training process stands still, so the others wait for it as for any slow peer.
            short = kind is Kind.STOP_TRAINING or chance.random() < 0.5
            pause = chance.uniform(*SHORT_STOP) if short else silence + chance.uniform(*LONG_STOP)
        yield Fault(number, at, kind, place, pause)


def _draw_place(chance: random.Random, kind: Kind, places: int) -> int:
    if kind is Kind.MASS_DEATH or places == 1:
        return ELDER
    if kind in LINK_FAULTS:
        return chance.choice([place for place in range(places) if is_proxied(place)])
    return chance.randrange(ELDER if kind in MENDED else ELDER + 1, places)


# ---------------------------------------------------------------------------------------------- processes of a peer


@dataclass(frozen=True, slots=True)
class Family:
    """The processes of one peer, as the system shows them at this moment."""

    training: int
    actors: tuple[int, ...]  # one, or none between two memberships
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    state_workers: tuple[int, ...] = ()  # only while a state moves

    @property
    def everyone(self) -> tuple[int, ...]:
        """All of them, the training process first."""
        return (self.training, *self.actors, *self.senders, *self.receivers, *self.state_workers)


def family_of(training: int) -> Family:
    """Look at a training process and its descendants. Whoever ends meanwhile is not in the picture."""
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
    return Family(training, tuple(actors), tuple(senders), tuple(receivers), tuple(state_workers))


def children_of(pid: int) -> list[int]:
    """The living children that the main thread of a process has started."""
    with suppress(OSError):
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [child for child in children if state_of(child) not in ("Z", "X", "")]
    return []


def state_of(pid: int) -> str:
    """One letter, as `ps` shows it: Z has ended and waits to be reaped; empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def name_of(pid: int) -> str:
    """As `ps` shows it; empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


# ---------------------------------------------------------------------------------------------- deeds

_SIGNALS = {
    Kind.TERMINATE: signal.SIGTERM,
    Kind.VANISH: signal.SIGUSR1,
    Kind.CLOSE: signal.SIGUSR2,
    Kind.STOP_TRAINING: signal.SIGSTOP,
    Kind.STOP_ACTOR: signal.SIGSTOP,
    Kind.STOP_PEER: signal.SIGSTOP,
}


def commit(kind: Kind, training: int) -> tuple[int, ...]:
    """Do it to this peer; the processes that were hit, none if it has no such process just now."""
    family = family_of(training)
    targets: tuple[int, ...]
    match kind:
        case Kind.KILL_ACTOR | Kind.STOP_ACTOR:
            targets = family.actors
        case Kind.KILL_SENDER:
            targets = family.senders[:1]
        case Kind.KILL_RECEIVER:
            targets = family.receivers[:1]
        case Kind.KILL_STATE_WORKER:
            targets = family.state_workers[:1]
        case Kind.STOP_PEER:
            targets = family.everyone
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

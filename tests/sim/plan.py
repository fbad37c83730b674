"""The plan of a run, drawn from its seed: the number of peers, the network, the faults, the programs.

Swarm testing: every seed switches whole kinds of faults on or off and draws its own bounds, so that a thousand runs
are a thousand different environments and not one environment a thousand times. Printed first by the command line.
"""

from __future__ import annotations

from random import Random
from typing import Any

from pccl._core.records import record
from pccl._core.solver.solver import EXACT_MAX
from pccl.options import Options

FAULTS = (
    "crash",  # a peer's processes die; its connections close
    "vanish",  # a peer's host dies; no connection closes
    "freeze_peer",  # a peer is stopped for a while and goes on
    "freeze_master",  # the master is stopped for a while and goes on
    "restart_master",  # the master dies and starts again, with what it has saved or without anything
    "inquire",  # an operator asks the master for its status
    "cut",  # no message passes between a peer and the master for a while
    "break_control",  # a control connection is reset
    "break_frame",  # a frame on a control connection arrives broken
    "break_lane",  # a lane is reset
    "partition",  # one peer cannot dial another for a while
    "fumble",  # a peer cannot continue a transfer or a reduce, though its links are up
    "stall",  # the operations of a ring move nothing for a while
    "disturb",  # another fault hits a peer that serves or fetches a state
    "kill_worker",  # a worker process dies
    "kill_app",  # a training process dies, its peer actor notices
    "join",  # a new peer joins
    "intruder",  # a peer breaks the protocol, or holds the wrong token
)

# Weights below those of other faults, which are whole numbers: one of these ends every membership, one has no effect.
WEIGHTS = {"restart_master": 0.1, "inquire": 0.2, "break_frame": 0.3}

UNEQUAL = (1, 10, 20, 100)
NEARLY_EQUAL = (96, 97, 98, 99, 100)  # no other ring is so much faster that it would be adopted

# What a training loop looks like. The first is the loop of the documentation; the last makes calls that never meet.
STYLES = ("train", "ask_then_update", "always_update", "wait_for_world", "optimize", "anything")


@record
class Plan:
    """Everything that was drawn for one run."""

    seed: int
    peers: int  # that start the run
    peers_max: int  # at most at a time
    hosts: int  # of the peers
    durable: bool  # the master has a state file
    groups: int
    lanes: int  # the largest pool; each peer draws its own
    delay_ms: tuple[int, int]  # of every message, each drawn anew
    rates: tuple[int, ...]  # of edges, in MB/s; each edge has one of them
    think_ms: tuple[int, int]  # between two calls of a program
    nap: float  # how often a program thinks for seconds, while others wait for it
    styles: tuple[str, ...]  # of programs; each draws one
    mistake: float  # how often a program makes another call than its style says
    tags: int  # reduces that a training step runs at a time
    work_ms: int  # the longest time of a reduce after all have begun it, and of an abort
    together: float  # how often reduces are launched in one call
    mismatch: float  # how often a reduce has another signature than the others
    syncs: bool  # a training step syncs a shared state
    strategies: tuple[int, ...]  # of synchronisations; each call draws one
    dirty: float  # how often a peer has computed something else than the others
    repeat: float  # how often a program does not increment its revision
    jump: float  # how often it increments it twice
    odd: float  # how often a program has another schema than the others
    patience: float  # how often a call is given up after a while
    threads: float  # how often a second thread makes a call of its own
    leave: float  # how often a program closes instead of calling
    rejoin: float  # how often an ended program starts again
    faults: dict[str, float]  # kind to weight
    fault_every_ms: int  # mean time between faults
    trouble_ms: int  # how long the first phase lasts
    trouble_for_ms: tuple[int, int]  # how long a freeze, a cut or a partition lasts
    handshakes: bool  # connections begin with a real handshake
    bytes: bool  # messages travel as encoded bytes
    options: Options
    finishes: bool  # in the end the programs finish the run; else they leave
    finish: float  # how often a program wants to finish the run, beside others
    names: int  # of runs; each program belongs to one

    @property
    def is_crowd(self) -> bool:
        """Whether there are more peers than the solver compares one by one."""
        return self.peers > EXACT_MAX


def draw(seed: int) -> Plan:
    """Draw the plan of this seed."""
    random = Random(seed)
    crowd = random.random() < 0.02
    interval = random.choice((0.3, 0.5, 1.0))
    silence = interval * random.choice((4, 5, 8))
    slowest_ms = int(interval * 1000 * random.choice((0.02, 0.1, 0.25)))
    connect = max(random.choice((0.5, 1.0, 2.0)), 5 * slowest_ms / 1000)
    dials = random.choice((1, 2, 2, 3))
    deadlock = random.choice((0.5, 1.0, 3.0))
    nap = random.choice((0.0, 0.0, 0.1))  # a program that naps is a straggler, if there is a limit
    options = Options(
        heartbeat_interval=interval,
        heartbeat_timeout=silence,
        connect_timeout=connect,
        handshake_timeout=connect,
        retry_interval=random.choice((0.2, 1.0)),
        dial_attempts=dials,
        wire_timeout=random.choice((1.1, 1.1, 3.0)) * (dials * (connect + 0.1) + 8 * slowest_ms / 1000),
        unreachable_expiry=random.choice((0.5, 2.0, 5.0)),
        vote_warning=random.choice((0.5, 2.0)),
        vote_timeout=deadlock + 3 * interval + 0.5 if random.random() < (0.7 if nap else 0.2) else 0.0,
        deadlock_timeout=deadlock,
        stall_timeout=random.choice((1.0, 3.0)) + 10 * slowest_ms / 1000,
        probe_time=random.choice((0.05, 0.3, 1.0)),
        probe_rounds=30 if crowd else random.choice((1, 3, 30)),
        rates_expiry=random.choice((0.5, 5.0, 600.0)),
        moonshot_time=random.choice((0.5, 3.0)),
        check=True,
    )
    syncs = random.random() < 0.5
    present = [fault for fault in FAULTS if random.random() < 0.5]
    return Plan(
        seed=seed,
        peers=EXACT_MAX + random.randint(1, 3) if crowd else random.randint(1, 8),
        peers_max=EXACT_MAX + 4 if crowd else 9,
        hosts=random.randint(1, 3),
        durable=random.random() < 0.7,
        groups=1 if crowd else random.choice((1, 1, 2, 3)),
        lanes=random.randint(1, 3),
        delay_ms=(random.choice((0, slowest_ms // 2)), slowest_ms),
        rates=random.choice((UNEQUAL, NEARLY_EQUAL)) if crowd else UNEQUAL,
        think_ms=(0, random.choice((1, 50, 500))),
        nap=nap,
        styles=("optimize",) if crowd else _draw_styles(random, syncs=syncs),
        mistake=random.choice((0.0, 0.0, 0.1)),
        tags=random.randint(1, 3),
        work_ms=random.choice((10, 200, 1500)),
        together=random.choice((0.0, 0.5, 1.0)),
        mismatch=random.choice((0.0, 0.0, 0.05)),
        syncs=syncs,
        strategies=random.choice(((0,), (0,), (0,), (1, 2, 2), (1, 2), (2,), (0, 1, 2))),
        dirty=random.choice((0.0, 0.2, 0.5)),
        repeat=random.choice((0.0, 0.1, 0.3)),
        jump=random.choice((0.0, 0.0, 0.05)),
        odd=random.choice((0.0, 0.0, 0.0, 0.2)),
        patience=random.choice((0.0, 0.1, 0.3)),
        threads=random.choice((0.0, 0.0, 0.2)),
        leave=random.choice((0.0, 0.02, 0.1)),
        rejoin=random.choice((0.0, 0.5, 1.0)),
        faults={fault: random.randint(1, 5) * WEIGHTS.get(fault, 1) for fault in present},
        fault_every_ms=3000 if crowd else random.choice((50, 100, 200, 500, 1500)),
        trouble_ms=random.choice((2000, 4000, 12000)),
        trouble_for_ms=random.choice(((10, 300), (100, 3000), (1000, int(1500 * silence)))),
        handshakes=random.random() < 0.2,
        bytes=random.random() < 0.3,
        options=options,
        **_draw_ends(random),
    )


def _draw_ends(random: Random) -> dict[str, Any]:
    """Draw what concerns names and ends of runs."""
    return {
        "finishes": random.random() < 0.3,
        "finish": random.choice((0.0, 0.0, 0.0, 0.02)),
        "names": random.choice((1, 1, 1, 2, 3)),
    }


def _draw_styles(random: Random, *, syncs: bool) -> tuple[str, ...]:
    """Draw one style for all programs, or several; with a shared state, often only the style that syncs."""
    if syncs and random.random() < 0.4:
        return ("sync",)
    chance = random.random()
    if chance < 0.55:
        return ("train",) if chance < 0.35 else ("optimize",)
    return tuple(random.sample(STYLES, random.randint(1, len(STYLES))))


def describe(plan: Plan) -> str:
    """The plan, one line to a field."""
    return "\n".join(f"  {name} = {getattr(plan, name)}" for name in Plan.__match_args__)

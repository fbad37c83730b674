"""Play seeds from the command line: one seed with its story, or a range or hours of them to find violations.

Exit codes: 0 no violation, 1 a violation (printed with the command that replays it), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

from .paths import PATHS
from .plan import describe, draw
from .world import ViolationError, World, run


def main() -> int:
    """Parse, play, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="play one seed")
    which.add_argument("--seeds", metavar="A-B", help="play a range of seeds, both ends included")
    which.add_argument("--hours", type=float, help="play new seeds for this many hours")
    parser.add_argument("--story", action="store_true", help="with --seed: print one line per transition")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return play_one(arguments.seed, tell=arguments.story)
    if arguments.seeds:
        first, last = (int(part) for part in arguments.seeds.split("-"))
        return play_many(iter(range(first, last + 1)))
    return play_many(fresh_seeds(arguments.hours * 3600))


def play_one(seed: int, *, tell: bool) -> int:
    """Play one seed; print its plan, its story if asked for, and how it ended."""
    plan = draw(seed)
    print(f"seed {seed}\n{describe(plan)}", flush=True)
    world = World(plan, tell=tell)
    try:
        world.play_or_explain()
    except ViolationError as error:
        ended = f"violation: {error}"
    else:
        ended = "all held"
    if world.lines is not None:
        print("\n".join(world.lines))
    print(f"{world.clock.steps} steps, {world.clock.now_ns / 1e9:.3f} s of virtual time: {ended}")
    return 0 if ended == "all held" else 1


def fresh_seeds(seconds: float) -> Iterator[int]:
    """Yield seeds from the time of day on, so that no two calls play the same seeds."""
    end, seed = time.monotonic() + seconds, time.time_ns() // 1_000_000
    while time.monotonic() < end:
        yield seed
        seed += 1


def play_many(seeds: Iterator[int]) -> int:
    """Play until the end or the first violation, with a line of progress now and then."""
    began = shown = time.monotonic()
    played, steps = 0, 0
    taken: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = run(seed)
        except ViolationError as error:
            print(error)
            return 1
        played += 1
        steps += world.clock.steps
        taken.update(world.paths.taken)
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(
                f"{played} seeds, {played / (shown - began):.0f} a second, latest {seed}", file=sys.stderr, flush=True
            )
    took = max(time.monotonic() - began, 1e-9)
    for name in sorted(PATHS, key=lambda name: (taken[name], name)):
        print(f"{taken[name]:9} {name}")
    print(f"{played} seeds held: {steps} steps in {took:.1f} s, {played / took:.0f} seeds a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())

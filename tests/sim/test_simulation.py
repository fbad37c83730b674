"""The real machines under thousands of seeds: safety while everything may fail, liveness after the last fault.

A failure prints the command that replays it. What a seed does depends on the code as well; a fixed bug becomes a named
case in `tests/unit`, not a remembered seed.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from .paths import PATHS
from .plan import draw
from .world import run_many, story_hash

SEEDS = 2000
BLOCK = 400


@cache
def play(block: int) -> Counter[str]:
    """Play the seeds of one block; cached, so that the test of the paths plays nothing twice."""
    return run_many(range(block * BLOCK, (block + 1) * BLOCK))


@pytest.mark.parametrize("block", range(SEEDS // BLOCK))
def test_seeds_hold(block: int) -> None:
    """Goal: no invariant is ever broken, and every run converges and ends with an empty master."""
    play(block)


def test_every_rare_path_was_taken() -> None:
    """Goal: the seeds above took every rare path, so that their success proves something."""
    taken = sum((play(block) for block in range(SEEDS // BLOCK)), Counter())

    assert PATHS == set(taken), f"never taken: {sorted(PATHS - set(taken))}"


@pytest.mark.parametrize("seed", [1, 2, 77])
def test_same_seed_same_story(seed: int) -> None:
    """Goal: a run is a function of its seed, or no violation could be replayed."""
    assert story_hash(seed) == story_hash(seed)


def test_plans_differ() -> None:
    """Goal: swarm testing; a hundred seeds are a hundred environments, and each kind of fault is absent from some."""
    plans = [draw(seed) for seed in range(100)]

    assert len({str(plan.options) for plan in plans}) > 90
    for fault in {fault for plan in plans for fault in plan.faults}:
        present = sum(fault in plan.faults for plan in plans)
        assert 20 < present < 80, f"{fault} is in {present} of 100 plans"

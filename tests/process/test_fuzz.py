"""A sample of the fuzzing that `python -m tests.fuzz` does at length."""

from __future__ import annotations

import pytest

from tests.fuzz.trial import hold_trial

FRAMES = 20_000


@pytest.mark.parametrize("seed", [1])
def test_a_master_stands_a_sample_of_the_fuzz(seed: int) -> None:
    """Goal: damaged frames and wrong messages disturb no other member, and leak neither memory nor descriptors."""
    outcome = hold_trial(FRAMES, seed, show=lambda _: None)

    assert outcome.frames >= FRAMES
    assert outcome.rounds > 0

"""Calculations of the benchmarks: sizes, patterns, the time of a round, and its goal."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.all_reduce import wanted
from benchmarks.facts import size, size_text, time_text
from benchmarks.ranks import PERIOD, fill, summarize, verify, verify_untouched
from benchmarks.throttling import SENDER
from benchmarks.wan import earlier
from benchmarks.wan_optimised import predicted_us

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(("text", "nbytes"), [("4K", 4096), ("64m", 64 << 20), ("1G", 1 << 30), ("12", 12)])
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-4", "6", "0", "4.5M", "4T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        size(text)


def test_sizes_and_times_are_shown_with_units() -> None:
    assert [size_text(n) for n in (4, 4096, 64 << 20, 1 << 30)] == ["4 B", "4 KiB", "64 MiB", "1 GiB"]
    assert [time_text(t) for t in (12.3, 1234, 2_500_000)] == ["12 µs", "1.23 ms", "2.5 s"]


@pytest.mark.parametrize("count", [1, PERIOD, 3 * PERIOD + 5, 2_000_000])
def test_a_correct_sum_passes(count: int) -> None:
    """Goal: the patterns of the ranks add up to the expected sum, for tensors of any length."""
    total, one = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for rank in range(3):
        fill(one, rank, 7)
        total += one

    verify(total, 3, 7, "sum")
    verify_untouched(one, 2, 7, "source")


@pytest.mark.parametrize("spoil", ["stale", "one element", "two blocks swapped", "not reduced"])
def test_a_wrong_sum_has_no_speed(spoil: str) -> None:
    """Goal: every wrong result of a reduce is found."""
    array = np.zeros(1 << 20, np.float32)
    fill(array, 2, 8 if spoil == "stale" else 9)  # rank 2 of three contributes as much as ranks 0 and 1 together
    verify(array, 2, 8 if spoil == "stale" else 9, "before")
    if spoil == "one element":
        array[777_777] += 1
    elif spoil == "two blocks swapped":
        array[: 1 << 16], array[1 << 16 : 1 << 17] = array[1 << 16 : 1 << 17].copy(), array[: 1 << 16].copy()
    elif spoil == "not reduced":
        fill(array, 0, 9)

    with pytest.raises(RuntimeError, match="reduce: wrong sum at element"):
        verify(array, 2, 9, "reduce")


def test_a_round_lasts_from_the_last_start_to_the_last_end() -> None:
    """Goal: a late start does not count, a late end counts for all; in microseconds."""
    first = [(0, 5_000), (100_000, 104_000), (200_000, 206_000)]
    second = [(1_000, 4_000), (100_000, 108_000), (201_000, 204_000)]

    summary = summarize([first, second], nbytes=1000)

    assert summary["median_us"] == 5  # of 4, 8 and 5
    assert summary["rounds"] == 3
    assert summary["bytes_per_second"] == 200_000_000
    assert summarize([first[:1]], nbytes=4)["p75_us"] == 5


@pytest.mark.parametrize(
    ("name", "rival", "world", "nbytes", "goal"),
    [
        ("zero-copy", "gloo", 2, 256 * MIB, 2),
        ("zero-copy", "gloo", 8, 64 * MIB, 1.3),
        ("staged", "gloo", 2, 64 * MIB, 1.5),
        ("staged", "gloo", 4, 64 * MIB, 1.1),
        ("zero-copy", "gloo", 4, 400 * KIB, 2),
        ("zero-copy", "gloo", 8, 4 * KIB, 1),
        ("tcp zero-copy", "gloo", 2, 256 * MIB, 2),
        ("tcp staged", "gloo", 4, 64 * MIB, 1.1),
        ("tcp zero-copy", "gloo alike", 8, 64 * MIB, 1),
        ("zero-copy", "gloo alike", 8, 64 * MIB, None),
        ("staged", "gloo", 2, 4 * KIB, None),
        ("out of place", "gloo", 2, 64 * MIB, None),
        ("zero-copy", "gloo alike", 2, 4 * KIB, None),
    ],
)
def test_what_is_wanted(name: str, rival: str, world: int, nbytes: int, goal: float | None) -> None:
    assert wanted(name, rival, world, nbytes) == goal


def test_senders_are_found_among_sockets() -> None:
    """Goal: only the sending side of a lane is throttled, by its own port."""
    lines = (
        'ESTAB 0      0         127.0.0.1:58232     127.0.0.1:48150 users:(("pccl-send-0",pid=15844,fd=4))\n'
        'ESTAB 0      0         127.0.0.1:45222     127.0.0.1:42303 users:(("pccl-peer",pid=15842,fd=11))\n'
        'ESTAB 0      0      [::ffff:127.0.0.1]:48150 [::ffff:127.0.0.1]:58244 users:(("pccl-recv-1",pid=1,fd=4))\n'
    )

    assert SENDER.findall(lines) == [("58232", "pccl-send-0")]


@pytest.mark.parametrize(
    ("only", "rate", "kept"),
    [(["hidden"], 1000.0, {"gloo"}), (["hidden"], 100.0, set()), (None, 1000.0, set())],
    ids=["left out", "other links", "all anew"],
)
def test_experiments_that_are_left_out_stay(
    tmp_path: Path, only: list[str] | None, rate: float, kept: set[str]
) -> None:
    """Goal: measuring one experiment again keeps the numbers of all others, and the facts of their run."""
    path = tmp_path / "wan.json"
    by_experiment: dict[str, dict] = {"gloo": {}, "hidden": {}}
    path.write_text(json.dumps({"rate_bits": 1e9, "loss": 0, "runs": by_experiment, "experiments": by_experiment}))

    found = earlier(argparse.Namespace(only=only, json=path, rate=rate, loss=0))

    assert {key: set(names) for key, names in found.items()} == {"runs": kept, "experiments": kept}


def test_links_predict_which_ring_is_faster() -> None:
    """Goal: a ring that crosses the sites over slow links is slower by almost the ratio of its links."""
    nbytes = 1 << 30

    assert 4.5 < predicted_us([0, 1, 2, 3], nbytes) / predicted_us([0, 2, 1, 3], nbytes) < 5

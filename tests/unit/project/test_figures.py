"""Figures in the text of a page are those of the measurements that it cites, in benchmarks/results.

`docs/benchmarks.md` is written from these files, and another test compares it. Sentences elsewhere are written by hand:
each that quotes a measurement is listed here with the way to compute it, so that a new measurement finds all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def span(values: Iterable[float], digits: int) -> tuple[str, str]:
    """The least and the largest of these, as a page writes them."""
    ordered = sorted(values)
    return f"{ordered[0]:.{digits}f}", f"{ordered[-1]:.{digits}f}"


def gain_of_host_memory() -> tuple[str, ...]:
    """How much faster two peers on one host are without TCP, for large tensors."""
    sizes = results("all_reduce")["worlds"]["2"]["sizes"]
    large = [kinds for size, kinds in sizes.items() if int(size) >= 64 << 20]
    return span((kinds["tcp zero-copy"]["median_us"] / kinds["zero-copy"]["median_us"] for kinds in large), 1)


def gain_of_codes() -> tuple[str, ...]:
    found = results("quantized")["contenders"]
    exact = found["as they are"]["median_us"]
    return tuple(f"{exact / found[f'MIN_MAX, {bits} bits']['median_us']:.2f}" for bits in (16, 8, 4))


def rates_of_codes() -> tuple[str, ...]:
    rates = results("kernels")["gigabytes_per_second"]
    kinds = ("encode float32, 8 bits", "decode and sum float32, 8 bits")
    coding, adding = (span((rates[kind][simd] for simd in ("avx2", "avx512")), 0) for kind in kinds)
    return *coding, *adding


def times_after_a_kill() -> tuple[str, ...]:
    worlds = results("recovery")["worlds"]
    return tuple(f"{worlds[world]['median'] * 1e3:.1f}" for world in ("3", "4"))


def times_over_a_wide_area() -> tuple[str, ...]:
    """From the printed table, which says which of the many measurements these are."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = {
        name: re.search(rf"^\| 100 ms, {name} \| ([\d.]+) s ", page, re.MULTILINE) for name in ("pool of 8", "gloo")
    }
    return tuple(row[1] if row else "no such row" for row in rows.values())


FIGURES: list[tuple[str, str, Callable[[], tuple[str, ...]]]] = [
    ("README.md", r"takes ([\d.]+) s with 8 connections; Gloo takes ([\d.]+) s", times_over_a_wide_area),
    ("docs/getting-started.md", r"64 MiB to 1 GiB this is ([\d.]+) to ([\d.]+) times as fast", gain_of_host_memory),
    ("CHANGELOG.md", r"sending them through TCP: ([\d.]+) to ([\d.]+) times as fast", gain_of_host_memory),
    ("docs/quantization.md", r"1 Gbit/s was ([\d.]+), ([\d.]+) and ([\d.]+) times as fast", gain_of_codes),
    ("docs/quantization.md", r"codes (\d+) to (\d+) GB/s .* decodes and adds (\d+) to (\d+)\)", rates_of_codes),
    ("docs/reliability.md", r"the median is ([\d.]+) ms with 3 peers and ([\d.]+) ms with 4", times_after_a_kill),
]


@pytest.mark.parametrize(("page", "sentence", "figures"), FIGURES)
def test_a_sentence_quotes_what_was_measured(page: str, sentence: str, figures: Callable[[], tuple[str, ...]]) -> None:
    """Goal: no page goes on saying what an older measurement said."""
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(sentence, text)

    assert found, f"{page} does not have this sentence any more: {sentence}"
    assert found.groups() == figures(), f"{page}: {found[0]}"

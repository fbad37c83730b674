"""The benchmarks themselves: they run, check their results, and write table and numbers. No test looks at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import box, wan
from benchmarks.linked import reason_against as reason_against_link
from benchmarks.throttling import reason_against
from benchmarks.wan_hidden import KINDS

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="Gloo comes with torch")


def run(module: str, folder: Path, *arguments: str, status: tuple[int, ...] = (0,)) -> tuple[str, dict[str, Any]]:
    """Run a benchmark as users start it; return its table and its numbers."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", str(folder / "numbers.json"), *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)  # ends with the test, by its timeout
    assert outcome.returncode in status, outcome.stdout + outcome.stderr
    numbers = json.loads((folder / "numbers.json").read_text())
    assert {"date", "machine", "versions", "congestion_control", "commit"} <= set(numbers["facts"])
    return outcome.stdout, numbers


@needs_torch
def test_all_reduce_compares_every_contender_with_gloo(tmp_path: Path) -> None:
    """Goal: one run gives the times of all, ratios against both kinds of Gloo with their targets, and a picture."""
    picture = tmp_path / "picture.png"
    extent = ("--worlds", "2", "3", "--sizes", "4K", "400K", "--rounds", "2")
    table, numbers = run("all_reduce", tmp_path, *extent, "--plot", str(picture))

    assert set(numbers["worlds"]) == {"2", "3"}
    for measured in numbers["worlds"].values():
        assert set(measured["sizes"]) == {"4096", "409600"}
        for contenders in measured["sizes"].values():
            assert {"gloo", "zero-copy", "staged", "out of place"} <= set(contenders)
            assert {"tcp zero-copy", "tcp staged", "tcp checked"} <= set(contenders)
            assert all(row["rounds"] == 2 for row in contenders.values())
    goals = {
        (r["world"], r["bytes"]): r["wanted"]
        for r in numbers["ratios"]
        if (r["name"], r["rival"]) == ("zero-copy", "gloo")
    }
    assert goals == {(2, 4096): 1, (2, 409600): 2, (3, 4096): 1, (3, 409600): 2}
    assert "400 KiB" in table
    assert "as it comes" in table
    assert picture.exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_rings_are_compared_with_the_best_known(tmp_path: Path) -> None:
    """Goal: every kind of network is compared; a best ring that is not yet known is searched and saved."""
    best = tmp_path / "best.json"
    extent = ("--sizes", "8", "14", "--seeds", "3", "--budgets", "0.02", "--long", "0.1", "--best", str(best))
    table, numbers = run("solver", tmp_path, *extent)

    assert set(numbers["sorts"]) == {"scattered", "sites", "planted"}
    for sizes in numbers["sorts"].values():
        assert sizes["8"]["0.02"]["proven"]
        assert sizes["14"]["0.02"]["bottleneck"] <= 1
    assert set(json.loads(best.read_text())) == {"scattered 14 3", "sites 14 3"}
    assert "proven in" in table


def test_pools_are_compared_and_throttled(tmp_path: Path) -> None:
    """Goal: pools are compared, also with one slow connection if a namespace is possible; else the reason."""
    table, numbers = run("pool", tmp_path, "--size", "1M", "--rounds", "1")

    assert {"pool of 1", "pool of 8", "8 at once"} <= set(numbers["contenders"])
    assert ("one throttled" in numbers["contenders"]) == (not reason_against())
    assert "one throttled by all alike" in table or "left out" in table


def test_quantization_is_measured_over_a_slow_link(tmp_path: Path) -> None:
    """Goal: quantized against plain reduces if a link is possible, else the reason; and the errors of quantization."""
    table, numbers = run("quantized", tmp_path, "--size", "1M", "--rounds", "1")

    assert ("contenders" in numbers) == (not reason_against_link())
    for name, row in numbers.get("contenders", {}).items():
        assert row["sent_bytes"] < (1 << 20) * {"16": 0.52, "8 ": 0.26, "4 ": 0.13}.get(name.split(", ")[-1][:2], 1.01)
    assert numbers["errors_percent"]["MIN_MAX, 8 bits"]["constant"] == 0
    assert 0 < numbers["errors_percent"]["MIN_MAX, 8 bits"]["uniform"] < 1
    assert "times as fast" in table or "left out" in table


def test_recovery_is_measured(tmp_path: Path) -> None:
    """Goal: every kill has a time until all survivors have reduced again, with 3 peers and with 4."""
    table, numbers = run("recovery", tmp_path, "--kills", "2")

    assert set(numbers["worlds"]) == {"3", "4"}
    assert all(row["count"] == 2 and 0 < row["median"] <= row["max"] for row in numbers["worlds"].values())
    assert "wanted: median below" in table


def test_latencies_are_measured(tmp_path: Path) -> None:
    """Goal: calls and launches of both sizes, next to Gloo's if torch is here."""
    table, numbers = run("latency", tmp_path, "--rounds", "1", "--calls", "3")

    assert {f"{kind}, {size}" for kind in ("all_reduce", "launch") for size in ("4 B", "400 KiB")} <= set(
        numbers["kinds"]
    )
    assert "launch, 4 B" in table


def test_syncs_are_measured(tmp_path: Path) -> None:
    """Goal: syncs of equal and of changed states, and of a newcomer that gets all, gets a part, and loses a source."""
    table, numbers = run("shared_state", tmp_path, "--rounds", "2", "--calls", "10", "--bytes", "8M", "--fetches", "1")

    assert set(numbers["steady"]) == {"sync", "sync, one dirty", "update_topology"}
    assert numbers["newcomer"]["received"] == [8 << 20]
    assert numbers["newcomer"]["part_received"] == [256 << 10]
    assert numbers["newcomer"]["killed_received"] >= 8 << 20
    assert "one source killed" in table


def test_digests_are_measured_next_to_plain_reads(tmp_path: Path) -> None:
    """Goal: every instruction set on each number of threads beside reading, and states of many tensors."""
    table, numbers = run("digest", tmp_path, "--size", "4M", "--rounds", "2", "--threads", "1", "3")

    assert set(numbers["large"]) == {"1", "3"}
    for by_simd in numbers["large"].values():
        assert "portable" in by_simd
        assert all(row["share"] > 0 for row in by_simd.values())
    assert "1000 of 400 B" in numbers["states"]
    assert "float32 tensor of 4 MiB" in table


# A box needs root and TUN devices; the reason says which is missing.
@pytest.mark.skipif(bool(box.reason_against()), reason=box.reason_against() or "there is a box")
def test_a_wide_area_network_is_measured(tmp_path: Path) -> None:
    """Goal: every contender reduces rightly over a link with a delay, and none is faster than the link."""
    extent = ("--round-trips", "10", "--pools", "8", "--size", "2M", "--rounds", "1", "--idle", "0.1")
    only = ("--only", "connections", "at once", *(["gloo"] if importlib.util.find_spec("torch") else []))
    table, numbers = run("wan", tmp_path, *extent, *only, "--folder", str(tmp_path))

    assert [row["name"] for row in numbers["experiments"]["connections"]] == ["pool of 8"]
    assert [row["name"] for row in numbers["experiments"]["at once"]] == ["one striped", "8 at once"]
    for rows in numbers["experiments"].values():
        assert all(0 < row["idle_share"] < 1 and 0 < row["warm_share"] < 1 for row in rows)
    assert "the emulator itself carries" in table
    assert (tmp_path / "connections.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


# A box needs root and TUN devices; the reason says which is missing.
@pytest.mark.skipif(bool(box.reason_against()), reason=box.reason_against() or "there is a box")
def test_optimising_and_hiding_over_a_wide_area_network_are_measured(tmp_path: Path) -> None:
    """Goal: the best ring over two sites is found and compared with the prediction; both kinds of step are timed."""
    table, numbers = run("wan", tmp_path, "--quick", "--only", "optimised", "hidden", "--folder", str(tmp_path))

    optimised, hidden = numbers["experiments"]["optimised"], numbers["experiments"]["hidden"]
    assert [row["order"] for row in optimised["rings"]] == [[0, 1, 2, 3], [0, 2, 1, 3]]
    assert optimised["rings"][1]["bottleneck_mbit"] == optimised["best_bottleneck_mbit"] == 200
    assert len(optimised["links"]) == 12
    assert [set(row) for row in hidden["loads"]] == [{"load", *KINDS, "by_longer", "is_disturbed"}]
    assert "times as fast" in table
    assert "by the longer" in table


# A box needs root and TUN devices; the reason says which is missing.
@pytest.mark.skipif(bool(box.reason_against()), reason=box.reason_against() or "there is a box")
def test_rings_over_known_links_are_measured(tmp_path: Path) -> None:
    """Goal: every edge is measured and the ring with the best bottleneck is chosen. Rates are not tested under load."""
    table, numbers = run("topology", tmp_path, "--quick", "--size", "256K", "--rounds", "1", status=(0, 1))

    assert len(numbers["edges"]) == 12
    assert numbers["kept"]["best bottleneck"]
    assert [row["ring"] for row in numbers["rings"]] == ["worst", "joined", "optimised"]
    assert "optimised over joined" in table


def test_a_user_that_is_not_root_is_told_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["wan", "--quick"])

    assert wan.main() == 2
    assert capsys.readouterr().err == "wan: a box needs root, for namespaces and devices in them\n"

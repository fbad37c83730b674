"""Results as Markdown: a table for each benchmark, from its file in `results/` and from nothing else.

A cell that has a target shows it in brackets, and says so if it is missed; a `GoalCount` counts both. Targets are in
the results beside the measurements, so that a page shows the targets of its own measurements. Tables of `wan` are in
`wan_tables`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from .facts import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Results = dict[str, Any]

MISSED = "missed"


class GoalCount:
    """The number of targets, and of those that were missed."""

    def __init__(self) -> None:
        self.targets = 0
        self.missed = 0

    def least(self, value: float, goal: float | None, show: Callable[[float], str]) -> str:
        """A value that should reach a goal, if there is one."""
        return self._judged(show(value), goal, f"≥ {show(goal)}" if goal is not None else "", value >= (goal or 0))

    def most(self, value: float, goal: float | None, show: Callable[[float], str]) -> str:
        """A value that should not exceed a goal, if there is one."""
        return self._judged(show(value), goal, f"≤ {show(goal)}" if goal is not None else "", value <= (goal or 0))

    def _judged(self, text: str, goal: float | None, rule: str, is_met: bool) -> str:
        if goal is None:
            return text
        self.targets += 1
        self.missed += not is_met
        return f"{text} ({rule})" if is_met else f"**{text}** ({rule}, {MISSED})"


def table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    names = [str(head) for head in heads]
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.0f} %"


def times(ratio: float) -> str:
    """A ratio of two speeds."""
    return f"{ratio:.2f}"


def milliseconds(value: float) -> str:
    """A time that is kept in milliseconds."""
    return time_text(value * 1000)


def spread(row: Results, *keys: str) -> list[str]:
    """Times that are kept in microseconds."""
    return [time_text(row[key]) for key in keys]


def megabytes(row: Results) -> str:
    """Effective throughput in MB/s, with at least two digits."""
    rate = row["bytes_per_second"] / 1e6
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


# --- One function for each file -----------------------------------------------


def all_reduce(results: Results, goals: GoalCount) -> str:
    """Throughput and ratios: with defaults, and with all bytes through TCP."""
    as_it_comes = _next_to_gloo(results, goals, "", [("zero-copy", "gloo"), ("staged", "gloo")])
    pairs = [
        ("tcp zero-copy", "gloo"),
        ("tcp staged", "gloo"),
        ("tcp zero-copy", "gloo alike"),
        ("tcp checked", "gloo alike"),
    ]
    through_tcp = _next_to_gloo(results, goals, "tcp ", pairs)
    said = (
        "The same rounds with `host_memory` off: every byte goes through TCP. In the last column peers treat each other"
        "\nas different hosts: blocks have checksums, and sockets have the system's buffers."
    )
    return f"{as_it_comes}\n{said}\n\n{through_tcp}"


def _next_to_gloo(results: Results, goals: GoalCount, way: str, pairs: list[tuple[str, str]]) -> str:
    """One table: speeds of Gloo and of us, then the ratios of these pairs."""
    judged = {
        (str(entry["world"]), str(entry["bytes"]), entry["name"], entry["rival"]): entry for entry in results["ratios"]
    }
    names = ("gloo", f"{way}zero-copy", f"{way}staged")
    rows = []
    for world, measured in results["worlds"].items():
        for nbytes, numbers in measured["sizes"].items():
            cells = [f"{world} peers, {size_text(int(nbytes))}"]
            cells += [megabytes(numbers[name]) if name in numbers else "" for name in names]
            for pair in pairs:
                entry = judged.get((str(world), str(nbytes), *pair))
                cells.append(goals.least(entry["ratio"], entry["wanted"], times) if entry else "")
            rows.append(cells)
    speeds = ("Gloo, MB/s", "zero-copy, MB/s", "staged, MB/s")
    alike = "zero-copy / Gloo, same congestion control"
    titles = ("zero-copy / Gloo", "staged / Gloo", alike, f"{alike}, as between hosts")[: len(pairs)]
    return table(("", *speeds, *titles), rows)


def latency(results: Results, _goals: GoalCount) -> str:
    """Each kind of call."""
    keys = ("median_us", "best_us", "worst_us")
    return table(
        ("call", "median", "best", "worst"), [(kind, *spread(row, *keys)) for kind, row in results["kinds"].items()]
    )


def pool(results: Results, goals: GoalCount) -> str:
    """Contenders, then their ratios."""
    speeds = [
        (name, *spread(row, "median_us", "p25_us", "p75_us"), megabytes(row), row["rounds"])
        for name, row in results["contenders"].items()
    ]
    ratios = [
        (f"{entry['name']} / {entry['rival']}", goals.least(entry["ratio"], entry["wanted"], times))
        for entry in results["ratios"]
    ]
    heads = (size_text(results["bytes"]), "median", "quartile", "quartile", "MB/s", "rounds")
    return table(heads, speeds) + "\n" + table(("throughput", "ratio"), ratios)


def quantized(results: Results, goals: GoalCount) -> str:
    """Times over the link, if there was one, and the error of each quantization."""
    parts = []
    if "contenders" in results:
        found = {entry["name"]: entry for entry in results["ratios"]}
        rows = []
        for name, row in results["contenders"].items():
            entry = found.get(name)
            ratio = goals.least(entry["ratio"], entry["wanted"], times) if entry else ""
            rows.append((name, time_text(row["median_us"]), f"{row['sent_bytes'] / 1e6:.1f}", ratio))
        what = f"{size_text(results['bytes'])} over {results['rate_mbit']} Mbit/s"
        parts.append(table((what, "median", "MB sent", "times as fast"), rows))
    errors = results["errors_percent"]
    names = list(next(iter(errors.values())))
    rows = [(way, *(f"{row[name]:.3g}" for name in names)) for way, row in errors.items()]
    parts.append(table(("error of one coding, %", *names), rows))
    return "\n".join(parts)


def topology(results: Results, goals: GoalCount) -> str:
    """Rings, and what the optimised one gains over the others."""
    gains = {gain["over"]: gain for gain in results["gains"]}
    rows = []
    for row in results["rings"]:
        gain = gains.get(row["ring"])
        ratio = f"{gain['measured']:.2f}, {gain['predicted']:.2f} predicted" if gain else ""
        order = " → ".join(map(str, row["order"]))
        taken = time_text(row["time"]["median_us"])
        rows.append((f"{row['ring']}: {order}", f"{row['bottleneck_mbit']} Mbit/s", taken, ratio))
    kept = []
    for promise, is_kept in results["kept"].items():
        goals.targets += 1
        goals.missed += not is_kept
        kept.append((promise, "yes" if is_kept else f"**no** ({MISSED})"))
    heads = ("ring", "slowest link", "median", "optimised is faster by")
    notes = f"\nAll links were measured in {results['optimize_seconds']:.1f} s; at most "
    notes += f"{100 * results['off_max']:.1f} % off.\n\n"
    return table(heads, rows) + notes + table(("promised", "kept"), kept)


def recovery(results: Results, goals: GoalCount) -> str:
    """From the kill to the next reduce."""
    rows = [
        (
            f"{world} peers, {row['count']} kills",
            goals.most(row["median"] * 1e3, results["wanted_ms"], milliseconds),
            milliseconds(row["p99"] * 1e3),
            milliseconds(row["max"] * 1e3),
        )
        for world, row in results["worlds"].items()
    ]
    return table(("", "median", "p99", "slowest"), rows)


def shared_state(results: Results, _goals: GoalCount) -> str:
    """Syncs if all peers agree, and if a newcomer has nothing."""
    keys = ("median_us", "best_us", "worst_us")
    steady = [(kind, *spread(row, *keys)) for kind, row in results["steady"].items()]
    found = results["newcomer"]
    rows = []
    for kind, spent, moved in (
        ("everything", found["whole_us"], found["received"]),
        ("a part of the blocks", found["part_us"], found["part_received"]),
        ("everything, one source killed", [found["killed_us"]], [found["killed_received"]]),
    ):
        rows.append((kind, time_text(statistics.median(spent)), f"{statistics.median(moved) / 1e6:,.0f}"))
    heads = (f"a newcomer lacks, of {size_text(found['bytes'])}", "median", "MB received")
    return table(("all have the state", "median", "best", "worst"), steady) + "\n" + table(heads, rows)


def digest(results: Results, _goals: GoalCount) -> str:
    """Beside plain reading, and for states of ordinary sizes."""
    rows = [
        (
            f"{simd}, threads: {threads}",
            f"{row['read_gigabytes_per_second']:.1f}",
            f"{row['digest_gigabytes_per_second']:.1f}",
            percent(row["share"]),
        )
        for threads, by_simd in results["large"].items()
        for simd, row in by_simd.items()
    ]
    states = [(state, time_text(spent)) for state, spent in results["states"].items()]
    heads = (f"{size_text(results['bytes'])} of float32", "read, GB/s", "digest, GB/s", "share, by CPU time")
    return table(heads, rows) + "\n" + table(("state in cache", "median"), states)


def control(results: Results, goals: GoalCount) -> str:
    """Calls by world, and what starting costs."""
    rows = [
        (f"{name}, {world} peers", *spread(row, "median_us", "best_us", "worst_us"))
        for world, kinds in results["worlds"].items()
        for name, row in kinds.items()
    ]
    wanted = results.get("wanted", {})
    starts = [
        (text, goals.most(results[key]["median"], wanted.get(key), milliseconds))
        for text, key in (
            ("first connect() of a run", "actor_start_ms"),
            ("start of a lane's worker", "worker_start_ms"),
        )
    ]
    memory = goals.most(results["worker_private_kib"], wanted.get("worker_private_kib"), lambda kib: f"{kib:.0f} KiB")
    starts.append(("private memory of an idle worker", memory))
    return table(("call", "median", "best", "worst"), rows) + "\n" + table(("", "median"), starts)


def solver(results: Results, _goals: GoalCount) -> str:
    """The worst of the seeds, by kind, size and time."""
    rows = []
    for sort, sizes in results["sorts"].items():
        for count, cells in sizes.items():
            found = [f"{100 * cell['bottleneck']:.1f} %, +{100 * cell['above']:.2f} %" for cell in cells.values()]
            proven = next((time_text(cell["us"]) for cell in cells.values() if cell["proven"]), "")
            rows.append((f"{sort}, {count} members", *found, proven))
    budgets = next(iter(next(iter(results["sorts"].values())).values()))
    return table(("network", *(f"within {budget} s" for budget in budgets), "proven in"), rows)


def growth(results: Results, _goals: GoalCount) -> str:
    """CPU time of the master's machine per peer, in microseconds."""
    by_peers = results["per_peer"]
    works = next(iter(by_peers.values()))
    rows = [(work, *(f"{cells[work]['microseconds']:.1f} µs" for cells in by_peers.values())) for work in works]
    return table(("per peer", *(f"{peers} peers" for peers in by_peers)), rows)


def kernels(results: Results, _goals: GoalCount) -> str:
    """Rates by instruction set."""
    rates = results["gigabytes_per_second"]
    sets = list(next(iter(rates.values())))
    rows = [(name, *(f"{row[simd]:.1f}" for simd in sets)) for name, row in rates.items()]
    return table((f"GB/s, blocks of {size_text(results['block_bytes'])}", *sets), rows)

"""Results of `wan` as Markdown, a table for each experiment; see `tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .facts import size_text, time_text
from .tables import percent, table, times
from .wan_hidden import KINDS
from .wan_optimised import ring_text

if TYPE_CHECKING:
    from .tables import GoalCount

    Rows = list[dict[str, Any]]


def connections(rows: Rows, goals: GoalCount) -> str:
    """Round trips by connections, and in each cell the share of the link: warm, then after idleness."""
    lanes = list(dict.fromkeys(row["connections"] for row in rows))
    lines = []
    for milliseconds in dict.fromkeys(row["round_trip_ms"] for row in rows):
        own = {row["connections"]: row for row in rows if row["round_trip_ms"] == milliseconds}
        lines.append((f"{milliseconds:g} ms", *(_shares(own[number], goals) for number in lanes if number in own)))
    return table((f"{size_text(rows[0]['bytes'])}, connections:", *lanes), lines)


def _shares(row: dict[str, Any], goals: GoalCount) -> str:
    return f"{goals.least(row['warm_share'], row['wanted'], percent)}, {percent(row['idle_share'])}"


def contenders(rows: Rows, goals: GoalCount) -> str:
    """A line for each contender."""
    lines = [
        (
            f"{row['round_trip_ms']:g} ms, {row['name']}",
            time_text(row["warm"]["median_us"]),
            goals.least(row["warm_share"], row["wanted"], percent),
            time_text(row["idle"]["median_us"]),
            percent(row["idle_share"]),
        )
        for row in rows
    ]
    heads = (size_text(rows[0]["bytes"]), "warm", "share of the link", "after idleness", "share of the link")
    return table(heads, lines)


def optimised(found: dict[str, Any], goals: GoalCount) -> str:
    """Both rings, the gain, and every link."""
    rings = [
        (
            f"{row['ring']}: {ring_text(row['order'])}",
            f"{row['bottleneck_mbit']:g} Mbit/s",
            time_text(row["time"]["median_us"]),
            time_text(row["predicted_us"]),
        )
        for row in found["rings"]
    ]
    gain = found["gain"]
    faster = (goals.least(gain["measured"], gain["wanted"], times), times(gain["predicted"]))
    heads = (f"ring, {size_text(found['bytes'])}", "slowest link", "measured", "predicted")
    links = [
        (
            f"{row['source']} → {row['target']}",
            f"{row['mbit']:g} Mbit/s",
            f"{row['delay_ms']:g} ms",
            f"{row['measured_mbit']:.0f} Mbit/s",
        )
        for row in found["links"]
    ]
    text = table(heads, [*rings, ("times as fast", "", *faster)])
    text += f"\nMeasuring all links took {found['optimize_seconds']:.1f} s:\n\n"
    return text + table(("link", "rate", "delay", "measured by `optimize_topology()`"), links)


def hidden(found: dict[str, Any], goals: GoalCount) -> str:
    """A line for each load: what each part takes alone, and a step of both ways beside sum and maximum.

    A row that says that it was disturbed by others on the machine meets no goal and misses none.
    """
    lines = []
    for row in found["loads"]:
        compute, communication, waited, asynchronous = (row[kind]["median_us"] for kind in KINDS)
        lines.append(
            (
                time_text(compute),
                time_text(communication),
                f"{time_text(waited)} ({time_text(compute + communication)})",
                f"{time_text(asynchronous)} ({time_text(max(compute, communication))})",
                f"{times(row['by_longer'])} (disturbed)"
                if row["is_disturbed"]
                else goals.most(row["by_longer"], found["wanted"], times),
            )
        )
    heads = ("compute", "communication", "waited for (sum)", "hidden (the longer one)", "hidden by the longer one")
    note = f"{size_text(found['bytes'])} over {found['rate_bits'] / 1e6:g} Mbit/s, round trip "
    return note + f"{found['round_trip_ms']:g} ms; times of a step:\n\n" + table(heads, lines)

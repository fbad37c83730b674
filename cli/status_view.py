"""The output of `pccl status`: pure functions from the status report to lines of text.

Plain columns without colours, so that the text can be pasted anywhere.
"""

from __future__ import annotations

from typing import Any

RING_LINE_MAX = 16  # members of a ring that are drawn one by one; a longer ring shows its ends
MATRIX_MAX = 12  # members whose bandwidths are shown as a matrix; a larger matrix does not fit a screen
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def render(run: dict[str, Any], address: str) -> str:
    """The whole page."""
    name = f"{run['name']!r} ({run['run'][:12]})" if run["name"] else run["run"][:12]
    name += ", finished," if run["finished"] else ""
    head = (
        f"run {name} at {address}, pccl {run['version']} (protocol {run['protocol_version']}), "
        f"up {duration(run['uptime_seconds'])}, round {run['round']}, "
        f"{count(run['world'], 'peer')} in {count(run['groups_count'], 'group')}"
    )
    parts = [head, _peers(run), *[_group(group) for group in run["groups"]], _newcomers(run), _votes(run)]
    parts.append(_remembered(run))
    parts.append("counters: " + ", ".join(f"{name} {number}" for name, number in run["counters"].items()))
    return "\n\n".join(part for part in parts if part)


def _peers(run: dict[str, Any]) -> str:
    if not run["peers"]:
        return "no peers: the run is finished" if run["finished"] else "no peers: the run is empty"
    head = ["peer", "group", "address", "lanes", "state", "since", "call", "for", "heard", "tx", "rx"]
    rows = [
        [
            str(peer["id"]),
            str(peer["group"]),
            peer["address"],
            str(peer["lanes"]),
            peer["state"],
            duration(peer["phase_seconds"]),
            peer["call"] or "-",
            duration(peer["call_seconds"]) if peer["call"] else "-",
            f"{duration(peer['heard_seconds'])} ago",
            rate(peer["tx_bytes_per_second"]),
            rate(peer["rx_bytes_per_second"]),
        ]
        for peer in run["peers"]
    ]
    divergent = [
        f"peer {peer['id']} was overwritten by {count(peer['overwritten'], 'sync')}: its log names the tensors"
        for peer in run["peers"]
        if peer["overwritten"]
    ]
    return "\n".join([table(head, rows) + _more(run["peers_count"] - len(rows), "peer"), *divergent])


def _group(group: dict[str, Any]) -> str:
    lines = [f"group {group['group']}, epoch {group['epoch']}: {draw_ring(group['ring'])}"]
    if group["revision"] is not None:
        lines[0] += f", shared state at revision {group['revision']}"
        lines[0] += f" ({group['digest']})" if group["digest"] else ""
    if group["wiring"]:
        lines.append(f"  being connected; not ready yet: {names(group['wiring'])}")
    if group["running"]:
        lines.append(f"  {count(group['running'], 'collective')} running, {group['commenced']} commenced so far")
    for pair in group["unreachable"]:
        left = duration(pair["seconds_left"])
        lines.append(
            f"  peer {pair['source']} cannot reach peer {pair['target']}: {pair['reason']} (avoided for {left})"
        )
    if edges := group["bandwidths"]["edges"]:
        known = [(edge["source"], edge["target"], edge["bytes_per_second"]) for edge in edges]
        lines.append(draw_matrix(group["ring"], known))
    return "\n".join(lines)


def _newcomers(run: dict[str, Any]) -> str:
    newcomers = run["newcomers"]
    if not newcomers["count"]:
        return ""
    return f"{count(newcomers['count'], 'newcomer')} waiting ({names(newcomers['peers'])}): {newcomers['reason']}"


def _votes(run: dict[str, Any]) -> str:
    lines = []
    for vote in run["votes"]:
        where = "" if vote["group"] is None else f" in group {vote['group']}"
        present, voters = vote["present_count"], vote["present_count"] + vote["missing_count"]
        lines.append(f"{vote['call']}{where}: {present} of {voters} for {duration(vote['seconds'])}, {vote['reason']}")
    return "\n".join(lines) + _more(run["votes_count"] - len(lines), "vote")


def _remembered(run: dict[str, Any]) -> str:
    lines = []
    for other in run["remembered"]:
        state = "finished" if other["finished"] else f"agreed revisions by group {other['revisions']}"
        lines.append(f"remembers run {other['name']!r}: {state}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- drawing


def draw_ring(ring: list[int]) -> str:
    """`1 -> 4 -> 2 -> 1`."""
    if not ring:
        return "no member"
    if len(ring) == 1:
        return f"{ring[0]} (alone)"
    shown = [str(peer) for peer in ring]
    if len(ring) > RING_LINE_MAX:
        shown[RING_LINE_MAX // 2 : -RING_LINE_MAX // 2] = [f"... {len(ring) - RING_LINE_MAX} more ..."]
    return " -> ".join([*shown, shown[0]])


def draw_matrix(ring: list[int], bandwidths: list[tuple[int, int, float]]) -> str:
    """The rate from each peer to each other peer in megabytes per second; a dot where nothing was measured."""
    known = {(source, target): speed for source, target, speed in bandwidths}
    members = sorted(ring)
    if len(members) > MATRIX_MAX:
        slowest = min(known, key=lambda pair: known[pair])
        line = f"  {len(known)} bandwidths measured; the slowest is {slowest[0]} -> {slowest[1]}"
        return f"{line} with {rate(known[slowest])}"
    rows = [[f"{source} ->", *(_megabytes(known.get((source, target))) for target in members)] for source in members]
    lines = table(["MB/s", *map(str, members)], rows).splitlines()
    return "\n".join(f"  {line}" for line in lines)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; numbers are aligned right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    is_number = [all(row[index][:1].isdigit() or row[index] in "-." for row in rows) for index in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = zip(row, widths, is_number, strict=True)
        lines.append("  ".join(f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right in cells))
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------------------------------------- words and numbers


def duration(seconds: float) -> str:
    """`0.3 s`, `42 s`, `5 m 10 s`, `3 h 20 m`, `2 d 4 h`: two units at most."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"


def rate(bytes_per_second: float) -> str:
    """`1.2 GB/s`; a dash for nothing."""
    return f"{size(bytes_per_second)}/s" if bytes_per_second else "-"


def size(nbytes: float) -> str:
    """`1.2 GB`, in powers of 1000 as networks count."""
    power = 0
    while nbytes >= 999.5 and power < len(UNITS) - 1:
        nbytes /= 1000
        power += 1
    digits = 0 if power == 0 or nbytes >= 99.5 else 1
    return f"{nbytes:.{digits}f} {UNITS[power]}"


def count(number: int, noun: str) -> str:
    """`1 peer`, `2 peers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def names(peers: list[int]) -> str:
    """`peer 3` or `peers 1, 2`."""
    return f"peer{'' if len(peers) == 1 else 's'} {', '.join(map(str, peers))}"


def _megabytes(bytes_per_second: float | None) -> str:
    return "." if bytes_per_second is None else f"{bytes_per_second / 1e6:.0f}"


def _more(number: int, noun: str) -> str:
    return f"\n... and {count(number, f'more {noun}')}" if number > 0 else ""

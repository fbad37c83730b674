"""The table that `make coverage` prints: lines that tests executed, for each folder and in total.

Reads the report that `coverage json` writes. Runs no test and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

COMPILED = (".pyx", ".pxd")
HEADER = ("folder", "lines of Python", "executed", "lines of Cython", "executed")


def room_of(name: str) -> str:
    """Return the folder of a source file, or "." for a file without a folder."""
    return name.rpartition("/")[0] or "."


def share(executed: int, lines: int) -> str:
    """Return a percentage, rounded down so that 100 means all; a dash if there are no lines."""
    return f"{100 * executed // lines} %" if lines else "-"


def table(files: dict[str, dict[str, dict[str, int]]]) -> str:
    """The report's files as a Markdown table, one row for each folder that holds code, the total last."""
    counts: dict[str, Counter[str]] = {}
    for name, content in sorted(files.items()):
        kind = "Cython" if name.endswith(COMPILED) else "Python"
        for room in (room_of(name), "total"):
            count = counts.setdefault(room, Counter())
            count[f"{kind} lines"] += content["summary"]["num_statements"]
            count[f"{kind} executed"] += content["summary"]["covered_lines"]
    total = counts.pop("total", Counter())
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1))]
    for room, count in [*((f"`{room}/`", count) for room, count in counts.items()), ("**total**", total)]:
        if count.total():
            cells = [(count[f"{kind} lines"], count[f"{kind} executed"]) for kind in ("Python", "Cython")]
            rows.append((room, *(text for n, executed in cells for text in (f"{n:,}", share(executed, n)))))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def never_loaded(files: dict[str, object], sources: Path) -> list[str]:
    """Return compiled modules that no test imported: coverage.py does not list a module that never ran."""
    return [name for path in sorted(sources.rglob("*.pyx")) if (name := str(path)) not in files]


def main() -> int:
    """Print the table; return 1 if a compiled module is missing in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `coverage json` wrote")
    parser.add_argument("sources", type=Path, help="the folder whose compiled modules must all be in the report")
    arguments = parser.parse_args()
    files = json.loads(arguments.report.read_text())["files"]
    print(table(files))
    missing = never_loaded(files, arguments.sources)
    if missing:
        print(f"not in the table, because no test has imported them: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())

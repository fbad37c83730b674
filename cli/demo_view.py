"""The output of `pccl demo`: a table that is redrawn, the events below it, and the loss curve at the end.

On a terminal the table is live. In a pipe there are only the events, and the table once, at the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

EVENT_LINES = 8  # events that are shown below the table
REDRAW_SECONDS = 0.1  # the shortest time between two drawings
UP, CLEAR = "\x1b[{}F", "\x1b[J"
HEAD = ("peer", "pid", "step", "loss", "MB/s", "peers", "state")
WIDTHS = (4, 8, 5, 9, 8, 6, 34)


@dataclass
class PeerRow:
    """The latest report of one peer."""

    name: str
    pid: int
    number: int | None = None  # its peer id at the master
    step: int = 0
    loss: float | None = None
    rate: float = 0.0
    world: int = 0
    state: str = "starts"
    digest: str = ""
    is_gone: bool = False
    curve: list[tuple[float, float]] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        """The cells of its line in the table."""
        if self.loss is None or self.is_gone:
            return (self.name, str(self.pid), "", "", "", "", self.state)
        numbers = (str(self.step), f"{self.loss:.4f}", f"{self.rate / 1e6:.1f}", str(self.world))
        return (self.name, str(self.pid), *numbers, self.state)


class View:
    """Draws the table and the events."""

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._began = time.monotonic()
        self._drawn, self._drawn_at = 0, 0.0
        self._events: list[str] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def say(self, line: str) -> None:
        """Show one event."""
        line = f"{self.elapsed:6.1f} s  {line}"
        if self._live:
            self._events.append(line)
            self._drawn_at = 0.0
        else:
            click.echo(line)

    def draw(self, rows: Iterable[PeerRow], ring: str, *, at_end: bool = False) -> None:
        """Draw the table over the previous one; in a pipe only at the end."""
        now = time.monotonic()
        if not at_end and (not self._live or now - self._drawn_at < REDRAW_SECONDS):
            return
        lines = [click.style(_line(HEAD), bold=True), *map(_styled, rows), "", f"ring  {ring}", ""]
        lines += self._events if at_end else self._events[-EVENT_LINES:]
        over = UP.format(self._drawn) + CLEAR if self._drawn else ""
        click.echo(over + "\n".join(lines))
        self._drawn, self._drawn_at = len(lines), now


def _line(cells: tuple[str, ...]) -> str:
    """One line: numbers aligned right, words left."""
    first, *numbers, last = (cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join((first.strip().ljust(WIDTHS[0]), *numbers, last.strip()))


def _styled(row: PeerRow) -> str:
    line = _line(row.cells())
    if row.is_gone:
        return click.style(line, fg="red")
    return click.style(line, fg="green") if row.state == "done" else line


def plot(rows: Iterable[PeerRow], path: Path, marks: dict[str, float]) -> str:
    """Plot the loss of all peers over time, with the events. Returns where the plot is, or how to get it."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no loss curve: matplotlib is not installed; pip install 'pccl[plots]' draws it next time"
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in rows:
        if row.curve:
            axes.plot(*zip(*row.curve, strict=True), label=f"peer {row.name}", marker="x" if row.is_gone else None)
    for what, when in marks.items():
        axes.axvline(when, color="grey", linestyle=":")
        axes.annotate(what, (when, 0.97), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top")
    axes.set(xlabel="seconds", ylabel="training loss", yscale="log", title="async DiLoCo while peers come and go")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return f"loss curve: {path}"

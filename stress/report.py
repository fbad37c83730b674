"""What people see of a run: a live view or lines, the verdict, and a folder for whoever was not there.

Reads the supervisor, changes nothing in it. The folder has what is needed to see the run again: the seed, the faults so
far, the logs of master and peers, and the command that runs the same plan; further a report for machines and, if
matplotlib is there, a plot.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .records import spread

if TYPE_CHECKING:
    from pathlib import Path

    from .records import Violation
    from .supervisor import Settings, Supervisor

VIEW_INTERVAL = 0.5  # seconds between two pictures
LINE_INTERVAL = 5.0  # seconds between two lines where pictures are not wanted
CLEAR_LINE = "\x1b[K"


class View:
    """Shows the run as it goes: pictures in a terminal, lines elsewhere."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = 0.0
        self._height = 0
        self._told = 0  # violations that were shown already

    def __call__(self, run: Supervisor) -> None:
        """Called at every turn of the supervisor; most of them are not worth a picture."""
        for violation in run.judge.violations[self._told :]:
            self._line(f"VIOLATION at {_since(run, violation):.2f} s: {violation}")
        self._told = len(run.judge.violations)
        now = time.monotonic()
        if now - self._shown < (VIEW_INTERVAL if self._terminal else LINE_INTERVAL):
            return
        self._shown = now
        if self._terminal:
            lines = picture(run)
            up = f"\x1b[{self._height}A" if self._height else ""
            sys.stdout.write(up + "".join(f"{line}{CLEAR_LINE}\n" for line in lines))
            self._height = len(lines)
            sys.stdout.flush()
        else:
            self._line(one_line(run))

    def _line(self, text: str) -> None:
        self._height = 0
        print(text, flush=True)


def _since(run: Supervisor, violation: Violation) -> float:
    return (violation.at_ns - run.began_ns) / 1e9


def states(run: Supervisor) -> dict[str, int]:
    """How many peers are in which state."""
    found: Counter[str] = Counter()
    for peer in run.peers.values():
        life = run.judge.lives[peer.life]
        if peer.stopped:
            found["stopped"] += 1
        elif life.ended_ns:
            found["ending"] += 1
        else:
            found["member" if life.joined else "joining"] += 1
    return dict(sorted(found.items()))


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _memory(run: Supervisor) -> str:
    parts = [f"{name} {sizes[-1] / 1e6:.1f} MB" for name, sizes in run.watcher.sizes.items() if sizes]
    return ", ".join(parts) or "-"


def _response(run: Supervisor) -> str:
    found = spread(run.judge.tally.responses)
    if not found:
        return "-"
    return f"median {found['median'] * 1e3:.0f} ms, p99 {found['p99'] * 1e3:.0f} ms, max {found['max'] * 1e3:.0f} ms"


def picture(run: Supervisor) -> list[str]:
    """The live view, line by line."""
    tally, violations = run.judge.tally, run.judge.violations
    remaining = max(run.settings.duration - run.elapsed, 0.0)
    faults = dict(sorted(tally.faults.items()))
    return [
        f"pccl stress  {run.phase}  elapsed {run.elapsed:.0f} s  remaining {remaining:.0f} s  seed {run.settings.seed}",
        f"  peers      {_words(states(run))}",
        f"  calls      {tally.steps} steps, {tally.rounds} rounds, {tally.joins} joins, {tally.lives} processes",
        f"  faults     {_words(faults)}; {tally.missed} missed",
        f"  after one  {_response(run)}",
        f"  longest    update_topology {tally.longest:.3f} s; this process was kept waiting {tally.lateness:.3f} s",
        f"  memory     {_memory(run)}",
        f"  violations {len(violations)}{'; last: ' + str(violations[-1])[:100] if violations else ''}",
    ]


def one_line(run: Supervisor) -> str:
    """The same for logs."""
    tally = run.judge.tally
    return (
        f"{run.elapsed:7.1f} s {run.phase}: peers {_words(states(run))}; steps {tally.steps}, rounds {tally.rounds}, "
        f"joins {tally.joins}, faults {sum(tally.faults.values())}, after a fault {_response(run)}, "
        f"longest {tally.longest:.3f} s, {_memory(run)}, violations {len(run.judge.violations)}"
    )


def replay_command(settings: Settings) -> str:
    """What to type to see the same faults again."""
    low, high = settings.interval
    return (
        f"pccl stress --churn --duration {settings.duration:g}s --peers {settings.peers} --groups {settings.groups} "
        f"--lanes {settings.lanes} --kill-interval {low:g}-{high:g} --seed {settings.seed}"
    )


def summary(run: Supervisor) -> dict[str, Any]:
    """Everything that a machine may want to know about a run."""
    return {
        "passed": not run.judge.violations,
        "seed": run.settings.seed,
        "replay": replay_command(run.settings),
        "seconds": round(run.elapsed, 1),
        "tally": run.judge.tally.as_json(),
        "memory_bytes": {name: {"first": sizes[0], "last": sizes[-1]} for name, sizes in run.watcher.sizes.items() if sizes},
        "violations": [f"{_since(run, violation):.3f} s {violation}" for violation in run.judge.violations],
    }


def conclude(run: Supervisor) -> bool:
    """Print the verdict and write the files; True if the run passed."""
    folder, found = run.settings.folder, summary(run)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "faults.txt").write_text("".join(f"{fault}\n" for fault in run.done))
    (folder / "replay.txt").write_text(found["replay"] + "\n")
    _plot(run, folder / "run.png")
    print("\n".join(picture(run)[1:]))
    if found["passed"]:
        print(f"PASSED after {found['seconds']} s; report in {folder}")
        return True
    for line in found["violations"][:10]:
        print(f"  {line}")
    if run.judge.tally.lateness > run.settings.bounds.call / 4:
        print(f"  The machine is overloaded: it kept the supervisor waiting for {run.judge.tally.lateness:.2f} s.")
    print(f"FAILED: {len(found['violations'])} violations. Everything about it is in {folder}; to run the plan again:")
    print(f"  {found['replay']}")
    return False


def _plot(run: Supervisor, path: Path) -> None:
    """Memory over time and the answers to faults, if matplotlib is there and the run had both."""
    if find_spec("matplotlib") is None or not run.judge.tally.responses:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    for name, sizes in run.watcher.sizes.items():
        upper.plot([size / 1e6 for size in sizes], label=name)
    upper.set(title="Resident memory", xlabel="seconds watched", ylabel="MB", ylim=(0, None))
    upper.legend()
    lower.hist([seconds * 1e3 for seconds in run.judge.tally.responses], bins=60)
    lower.set(title="From a fault until the last survivor has gone on", xlabel="ms", ylabel="faults", yscale="log")
    figure.savefig(path, dpi=100)
    plt.close(figure)

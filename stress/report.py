"""The output of a stress run: a live view or lines, the verdict, and the folder of the stress report.

Reads the supervisor and changes nothing in it. The folder has what is needed to run the plan again: the settings with
the seed, the faults, the logs of master and peers, and after a failure the latest steps of the peers; also a report as
JSON and, if matplotlib is installed, a plot.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .paths import missing
from .records import Bounds, spread
from .settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from .records import Violation
    from .supervisor import Supervisor

VIEW_INTERVAL = 0.5  # seconds between two pictures
LINE_INTERVAL = 5.0  # seconds between two lines where pictures are not wanted
CLEAR_LINE = "\x1b[K"
SETTINGS = "settings.json"  # in the folder of a report


class View:
    """Shows the running test: a live view in a terminal, lines elsewhere."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = 0.0
        self._height = 0
        self._told = 0  # violations already shown

    def __call__(self, run: Supervisor) -> None:
        """Draw, at most once per interval. The supervisor calls this at every turn."""
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


def _times(seconds: list[float]) -> str:
    found = spread(seconds)
    if not found:
        return "-"
    return f"median {found['median'] * 1e3:.0f} ms, p99 {found['p99'] * 1e3:.0f} ms, max {found['max'] * 1e3:.0f} ms"


def picture(run: Supervisor) -> list[str]:
    """The live view, line by line."""
    totals, violations, settings = run.judge.totals, run.judge.violations, run.settings
    remaining = max(settings.duration - run.elapsed, 0.0)
    faults = dict(sorted(totals.faults.items()))
    asked = len(missing({}, settings.kinds, settings.groups))
    return [
        f"pccl stress  {run.phase}  elapsed {run.elapsed:.0f} s  remaining {remaining:.0f} s  seed {settings.seed}",
        f"  peers      {_words(states(run))}; {totals.lives} processes",
        f"  steps      {totals.rounds} rounds, {totals.revisions} revisions, {totals.reduces} reduces",
        f"  state      {totals.syncs} syncs, {totals.received} of them brought content; {totals.joins} joins",
        f"  undone     {totals.aborts} aborts, {totals.retries} retries, {totals.inspected} restored tensors inspected",
        f"  faults     {_words(faults)}; {totals.missed} missed; {totals.refused} newcomers refused",
        f"  to answer  {_times(totals.responses)}",
        f"  to reduce  {_times(totals.recoveries)}",
        f"  longest    call {totals.longest:.3f} s; the supervisor was late by {totals.lateness:.3f} s",
        f"  memory     {_memory(run)}",
        f"  paths      {len(totals.paths)} of {asked} rare ones",
        f"  violations {len(violations)}{'; last: ' + str(violations[-1])[:100] if violations else ''}",
    ]


def one_line(run: Supervisor) -> str:
    """The same in one line, for logs."""
    totals = run.judge.totals
    return (
        f"{run.elapsed:7.1f} s {run.phase}: peers {_words(states(run))}; rounds {totals.rounds}, "
        f"reduces {totals.reduces}, aborts {totals.aborts}, retries {totals.retries}, joins {totals.joins}, "
        f"faults {sum(totals.faults.values())}, to reduce again {_times(totals.recoveries)}, "
        f"longest {totals.longest:.3f} s, {_memory(run)}, violations {len(run.judge.violations)}"
    )


# ---------------------------------------------------------------------------------------------- the folder


def write_settings(settings: Settings) -> None:
    """Write the settings, from which `--replay` draws the same plan."""
    text = {
        "duration": settings.duration,
        "peers": settings.peers,
        "groups": settings.groups,
        "lanes": settings.lanes,
        "interval": settings.interval,
        "families": settings.families,
        "seed": settings.seed,
        "all_paths": settings.all_paths,
        "call": settings.bounds.call,
    }
    (settings.folder / SETTINGS).write_text(json.dumps(text, indent=2) + "\n")


def read_settings(folder: Path, report: Path) -> Settings:
    """The settings of an earlier run, whose report is in `folder`; the new one goes to `report`."""
    text = json.loads((folder / SETTINGS).read_text())
    text["interval"], text["families"] = tuple(text["interval"]), tuple(text["families"])
    return Settings(folder=report, bounds=Bounds(call=text.pop("call")), **text)


def replay_command(settings: Settings) -> str:
    """The command that runs the same plan again."""
    return shlex.join(["pccl", "stress", "--replay", f"{settings.folder}", "--report", f"{settings.folder}-replay"])


def summary(run: Supervisor) -> dict[str, Any]:
    """The report of a run as a JSON-ready dict."""
    watcher = run.watcher
    return {
        "passed": not run.judge.violations,
        "seed": run.settings.seed,
        "replay": replay_command(run.settings),
        "seconds": round(run.elapsed, 1),
        "totals": run.judge.totals.as_json(),
        "never_happened": missing(run.judge.totals.paths, run.settings.kinds, run.settings.groups),
        "first_and_last": {
            name: [values[0], values[-1]] for name, values in {**watcher.sizes, **watcher.counts}.items() if values
        },
        "violations": [f"{_since(run, violation):.3f} s {violation}" for violation in run.judge.violations],
    }


def conclude(run: Supervisor) -> bool:
    """Print the verdict and write the files; True if the run passed."""
    folder, found = run.settings.folder, summary(run)
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "faults.txt").write_text("".join(f"{fault}\n" for fault in run.done))
    write_settings(run.settings)
    _plot(run, folder / "run.png")
    print("\n".join(picture(run)[1:]))
    if found["passed"]:
        print(f"PASSED after {found['seconds']} s; report in {folder}")
        return True
    _write_journals(run)
    for line in found["violations"][:10]:
        print(f"  {line}")
    if run.judge.totals.lateness > run.settings.bounds.call / 4:
        print(f"  The machine is overloaded: it kept the supervisor waiting for {run.judge.totals.lateness:.2f} s.")
    print(f"FAILED: {len(found['violations'])} violations. The report is in {folder}; run the plan again with:")
    print(f"  {found['replay']}")
    return False


def _write_journals(run: Supervisor) -> None:
    """Write the latest steps of each life, next to the logs of master and peers."""
    folder = run.settings.folder / "journals"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for life, lines in run.journals.items():
        (folder / f"life-{life}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


def _plot(run: Supervisor, path: Path) -> None:
    """Plot the run over time, if matplotlib is installed and the run was long enough."""
    if find_spec("matplotlib") is None or len(run.timeline) < 2:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times = [at for at, *_ in run.timeline]
    pairs = list(pairwise(run.timeline))
    figure, axes = plt.subplots(4, 1, figsize=(10, 10), layout="constrained", sharex=True)
    axes[0].step(times, [members for *_, members in run.timeline], where="post")
    axes[0].set(title=f"pccl stress, seed {run.settings.seed}", ylabel="members", ylim=(0, None))
    for axis, index, label in ((axes[1], 1, "reduces per second"), (axes[2], 2, "faults per second")):
        rates = [(after[index] - before[index]) / max(after[0] - before[0], 1e-9) for before, after in pairs]
        axis.plot(times[1:], rates, linewidth=0.8)
        axis.set(ylabel=label, ylim=(0, None))
    totals = run.judge.totals
    points = [(at - run.began_ns) / 1e9 for at in totals.recovered_ns]
    axes[3].semilogy(points, [seconds * 1e3 for seconds in totals.recoveries], ".", markersize=3)
    axes[3].set(xlabel="seconds", ylabel="ms from a kill until\nall survivors reduced")
    figure.savefig(path, dpi=100)
    plt.close(figure)

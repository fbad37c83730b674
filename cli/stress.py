"""`pccl stress --churn`: tries to refute that there is no bad time to kill a peer, for as long as it is given."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path

import click
from pccl.stress.records import Bounds
from pccl.stress.report import View, conclude
from pccl.stress.supervisor import Settings, Supervisor

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """`45`, `60s`, `10m` or `8h`, as seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, or a message that shows the form."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is no duration; write 60s, 10m or 8h", param, ctx)
        return float(match[1]) * UNITS[match[2]]


class Interval(click.ParamType[tuple[float, float]]):
    """`0.5-1.0`, as the two ends."""

    name = "seconds-seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Two numbers, the smaller first, or a message that shows the form."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", str(value))
        if match is None or not 0 < float(match[1]) <= float(match[2]):
            self.fail(f"{value!r} is no interval; write 0.5-1.0", param, ctx)
        return float(match[1]), float(match[2])


@click.command(
    epilog="\b\nExamples:\n  pccl stress --churn\n  pccl stress --churn --duration 8h --peers 16 --seed 7\n\n"
    "Exit codes: 0 no promise was broken, 1 one was and the report says which, 2 wrong command line."
)
@click.option("--churn", is_flag=True, required=True, help="Let peers come, go and die. The one workload so far.")
@click.option(
    "--duration", type=Duration(), default="60s", show_default=True, help="How long faults go on: 60s, 10m, 8h."
)
@click.option(
    "--peers", type=click.IntRange(2, 256), default=10, show_default=True, metavar="N", help="Places for peers."
)
@click.option(
    "--groups", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N", help="Groups they divide into."
)
@click.option(
    "--lanes", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="Connections per neighbour."
)
@click.option(
    "--kill-interval",
    type=Interval(),
    default="0.5-1.0",
    show_default=True,
    help="Seconds between two faults, from-to.",
)
@click.option(
    "--bound", type=click.FloatRange(0), default=1.0, show_default=True, metavar="SECONDS", help="What a call may take."
)
@click.option("--seed", type=click.IntRange(0), help="Draw the faults from this seed; by default a new one.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    default="stress-report",
    show_default=True,
    help="Folder for the report, the logs and, after a failure, everything to reproduce it.",
)
@click.option("--no-tty", is_flag=True, help="Print lines instead of a live view.")
def stress(
    *,
    churn: bool,
    duration: float,
    peers: int,
    groups: int,
    lanes: int,
    kill_interval: tuple[float, float],
    bound: float,
    seed: int | None,
    report: Path,
    no_tty: bool,
) -> None:
    """Kill real processes for hours, check every promise.

    Training processes come, go, are killed, stopped and replaced, while their reports are judged. It needs no network
    beyond this machine; everything to reproduce a failure is in the report's folder.
    """
    assert churn
    settings = Settings(
        duration=duration,
        peers=peers,
        groups=groups,
        lanes=lanes,
        interval=kill_interval,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        folder=report,
        bounds=Bounds(call=bound),
    )
    click.echo(f"seed {settings.seed}: {peers} peers in {groups} groups for {duration:g} s, logs in {report / 'logs'}")
    run = Supervisor(settings, View(terminal=not no_tty and sys.stdout.isatty()))
    run.run()
    sys.exit(0 if conclude(run) else 1)

"""`pccl stress --churn`: kills peers at all times, for as long as it is told, and checks every guarantee."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path

import click
from pccl.stress.faults import ALL_FAMILIES
from pccl.stress.records import Bounds
from pccl.stress.report import View, conclude, read_settings
from pccl.stress.settings import Settings
from pccl.stress.supervisor import Supervisor

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """`45`, `60s`, `10m` or `8h`, as seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds; fails with a message that shows the format."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value))
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a duration; write 60s, 10m or 8h", param, ctx)
        return float(match[1]) * UNITS[match[2]]


class Interval(click.ParamType[tuple[float, float]]):
    """`0.5-1.0`, as the two ends."""

    name = "seconds-seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Two numbers, the smaller first; fails with a message that shows the format."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", str(value))
        if match is None or not 0 < float(match[1]) <= float(match[2]):
            self.fail(f"{value!r} is not an interval; write 0.5-1.0", param, ctx)
        return float(match[1]), float(match[2])


class Families(click.ParamType[tuple[str, ...]]):
    """Names of fault families, such as `kill,stop,mass`; or `all`, or `none`."""

    name = "name,name"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, each once, in the order in which plans draw from them; fails with a message that lists them."""
        words = set(str(value).split(","))
        chosen = set(ALL_FAMILIES) if words == {"all"} else set() if words == {"none"} else words
        if chosen - set(ALL_FAMILIES):
            self.fail(f"{value!r}: choose from {', '.join(ALL_FAMILIES)}, or all, or none", param, ctx)
        return tuple(name for name in ALL_FAMILIES if name in chosen)


@click.command(
    epilog="\b\nExamples:\n  pccl stress --churn\n  pccl stress --churn --duration 8h --peers 16 --seed 7\n"
    "  pccl stress --churn --faults kill,stop --groups 1\n  pccl stress --replay stress-report\n\n"
    "Exit codes: 0 every guarantee held, 1 one was violated (the report says which), 2 wrong command line."
)
@click.option("--churn", is_flag=True, help="Let peers join, train, leave and die. The only workload so far.")
@click.option("--replay", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Run the plan of an earlier run again; DIR is the folder of its report.")  # fmt: skip
@click.option("--duration", type=Duration(), default="60s", show_default=True,
              help="How long faults are committed: 60s, 10m, 8h.")  # fmt: skip
@click.option(
    "--peers",
    type=click.IntRange(2, 256),
    default=10,
    show_default=True,
    help="Number of peers; dead ones are replaced.",
)
@click.option("--groups", type=click.IntRange(1, 64), default=2, show_default=True,
              help="Number of peer groups.")  # fmt: skip
@click.option(
    "--lanes", type=click.IntRange(1, 64), default=1, show_default=True, help="Connections to each neighbour."
)
@click.option("--faults", type=Families(), default="all", show_default=True,
              help=f"Faults to commit: {', '.join(ALL_FAMILIES)}; all or none.")  # fmt: skip
@click.option("--kill-interval", type=Interval(), default="0.5-1.0", show_default=True,
              help="Seconds between two faults.")  # fmt: skip
@click.option("--bound", type=click.FloatRange(0), default=2.0, show_default=True,
              help="Seconds that a call may take after the last fault.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), help="Seed of the faults; default: a new one.")
@click.option(
    "--all-paths", is_flag=True, help="Fail if a rare path was never taken; for runs of ten minutes and more."
)
@click.option("--report", type=click.Path(file_okay=False, path_type=Path), default="stress-report", show_default=True,
              help="Folder for the report, the logs and, after a failure, the plan.")  # fmt: skip
@click.option("--no-tty", is_flag=True, help="Print lines instead of a live view.")
def stress(
    *,
    churn: bool,
    replay: Path | None,
    duration: float,
    peers: int,
    groups: int,
    lanes: int,
    faults: tuple[str, ...],
    kill_interval: tuple[float, float],
    bound: float,
    seed: int | None,
    all_paths: bool,
    report: Path,
    no_tty: bool,
) -> None:
    """Kill real processes for hours and check every guarantee.

    Training processes sync a state and reduce several times a second. They join, leave, are killed, stopped, cut off
    and replaced; everything that they report is compared with the expected results. The command needs no network beyond
    this machine. The folder of the report has everything to run a failed plan again.
    """
    if churn == (replay is not None):
        raise click.UsageError("say what to do: --churn, or --replay DIR")
    settings = Settings(
        duration=duration,
        peers=peers,
        groups=groups,
        lanes=lanes,
        interval=kill_interval,
        families=faults,
        seed=secrets.randbelow(1 << 32) if seed is None else seed,
        all_paths=all_paths,
        folder=report,
        bounds=Bounds(call=bound),
    )
    if replay is not None:
        settings = read_settings(replay, report)
    click.echo(
        f"seed {settings.seed}: {settings.peers} peers in {settings.groups} groups for {settings.duration:g} s, "
        f"logs in {settings.folder / 'logs'}"
    )
    run = Supervisor(settings, View(terminal=not no_tty and sys.stdout.isatty()))
    run.run()
    sys.exit(0 if conclude(run) else 1)

"""The stress harness as users start it: it passes on a correct library, it can fail, and it leaves nothing behind.

Its plans and its laws are pure, and tested in tests/unit/stress.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from pccl.stress.faults import children_of
from pccl.stress.paths import Path as RarePath
from pccl.stress.procfs import marked_processes
from pccl.stress.records import Step
from pccl.stress.report import read_settings

from tests import leaks

from .helpers import eventually

START_SECONDS = 20  # a run starts many interpreters, which takes long on a busy machine


def run_stress(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as users start it."""
    command = [sys.executable, "-m", "pccl.cli", "stress", "--churn", "--no-tty", "--report", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.timeout(200)
def test_churn_passes(tmp_path: Path) -> None:
    """Goal: `pccl stress --churn` keeps every law on this machine, and its report says so.

    A fault causes an abort only if a reduce is running, which takes a small part of the time. At the default interval,
    a run of 20 s has a handful of them, or none; at this one, many.
    """
    plan = ["--peers", "8", "--seed", "1", "--kill-interval", "0.15-0.3"]
    outcome = run_stress("--duration", "20s", "--bound", "3", *plan, folder=tmp_path)

    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["totals"]
    assert report["passed"]
    assert report["violations"] == []
    assert totals["rounds"] > 30
    assert totals["revisions"] > 30
    assert totals["reduces"] > 300
    assert sum(totals["faults"].values()) > 15
    assert min(totals["aborts"], totals["retries"], totals["inspected"], totals["received"]) > 0
    assert totals["recoveries"]["count"] > 1
    assert {RarePath.MADE_AGAIN, RarePath.RECEIVED, RarePath.REPLACED} <= set(totals["paths"])
    assert (tmp_path / "logs" / "master.log").stat().st_size > 0
    assert not list((tmp_path / "scratch").iterdir())


def test_a_broken_promise_fails_the_run_and_leaves_a_bundle(tmp_path: Path) -> None:
    """Goal: a run with a violation exits with 1 and leaves all files that are needed to replay it."""
    outcome = run_stress("--duration", "3s", "--peers", "2", "--seed", "5", "--bound", "0.000001", folder=tmp_path)

    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    assert "promptness" in outcome.stdout
    assert shlex.join(["pccl", "stress", "--replay", str(tmp_path)]) in outcome.stdout
    assert read_settings(tmp_path, Path("again")).seed == 5
    assert (tmp_path / "faults.txt").exists()
    journals = list((tmp_path / "journals").iterdir())
    assert all(Step.decode(line) for path in journals for line in path.read_bytes().splitlines())
    assert len(journals) >= 2
    assert not json.loads((tmp_path / "report.json").read_text())["passed"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """Goal: Ctrl-C ends a run in order, with its stress report; all processes end also with a killed supervisor."""
    command = [sys.executable, "-m", "pccl.cli", "stress", "--churn", "--no-tty", "--peers", "3", "--seed", "2"]
    run = subprocess.Popen([*command, "--report", str(tmp_path)], stdout=subprocess.DEVNULL, start_new_session=True)
    log = tmp_path / "logs" / "master.log"
    eventually(lambda: log.exists() and "world=3" in log.read_text(), "three peers are in", START_SECONDS)

    os.killpg(run.pid, number)

    assert run.wait(30) == status
    mark = os.environ[leaks.MARK]
    eventually(lambda: marked_processes(mark, leaks.MARK) <= {os.getpid()}, "all other processes have ended")


def test_a_process_that_was_killed_is_no_victim() -> None:
    """Goal: no fault hits a process that another one has just killed, because that would change nothing.

    Each child has the lowest priority on this test's core, so that hardly any ends before the test has looked.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    seen = Counter[str]()
    try:
        for _ in range(20):
            with subprocess.Popen(["sleep", "1000"]) as child:
                os.sched_setscheduler(child.pid, os.SCHED_IDLE, os.sched_param(0))
                seen["alive"] += child.pid in children_of(os.getpid())
                child.kill()
                seen["killed"] += child.pid in children_of(os.getpid())
                seen["ending"] += os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    finally:
        os.sched_setaffinity(0, cores)

    assert seen["alive"] == 20
    assert seen["killed"] == 0
    assert seen["ending"] > 0

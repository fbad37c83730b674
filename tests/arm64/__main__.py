"""`python -m tests.arm64 [TESTS...]`: prepare everything, run the tests, and list what ran and what did not.

TESTS are folders or files as pytest takes them; by default the three tiers. The exit code is 0 if everything passed, 1
if a test failed or left_out.toml is out of date, and 2 if the machine lacks something that the run needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from tests import ROOT

from .crossbuild import build_package, copy_tree
from .emulator import build_interpreter, check_emulation, emulated, environment
from .needs import check_needs
from .places import PYTHON, TREE, WORK, fail, say
from .sysroot import make_environment, make_sysroot

TIERS = ("tests/unit", "tests/sim", "tests/process")

# Emulated code takes about ten times as long; a test that hangs must still end.
TIMEOUT_SECONDS = 1200


@dataclass(frozen=True)
class Tier:
    """The outcome of one run of pytest."""

    name: str
    seconds: float
    outcome: dict[str, Any]

    @property
    def is_good(self) -> bool:
        """Whether there is no failure, and no entry of left_out.toml without a test."""
        return not self.outcome["failed"] and not self.outcome["stale"]

    def __str__(self) -> str:
        kinds = ("passed", "failed", "skipped", "left_out")
        numbers = ", ".join(f"{len(self.outcome[kind])} {kind.replace('_', ' ')}" for kind in kinds)
        return f"{self.name}: {numbers}, in {self.seconds:.0f} s"


def compare_kernels() -> None:
    """Check that every instruction set of both machines computes the same bits, and that the emulated one uses NEON."""
    module = ("-m", "tests.arm64.fingerprint")
    ours = subprocess.run([sys.executable, *module], cwd=ROOT, capture_output=True, text=True, check=False)
    command = emulated(PYTHON, *module)
    theirs = subprocess.run(command, cwd=TREE, env=environment(), capture_output=True, text=True, check=False)
    results: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for machine, done in (("x86-64", ours), ("aarch64", theirs)):
        if done.returncode != 0:
            fail(f"the kernels of {machine} cannot be tried: {done.stderr}")
        header, *lines = done.stdout.splitlines()
        _, chosen, *sets = header.split()
        say(f"kernels of {machine}: {', '.join(sets)}; {chosen} is chosen")
        if machine == "aarch64" and chosen != "neon":
            fail("the kernels of aarch64 do not use NEON")
        for line in lines:
            name, what = line.split(" ", 1)
            work, result = what.rsplit(" ", 1)
            results[work][result].add(f"{machine} {name}")
    different = {work: dict(found) for work, found in results.items() if len(found) > 1}
    if different:
        fail("the kernels do not compute the same bits:\n" + "\n".join(f"{w}: {f}" for w, f in different.items()))
    say(f"{len(results)} kinds of work give the same bits on every instruction set of both machines")


def run_tests(target: str) -> Tier:
    """Run pytest once for a folder or file, with its progress on the terminal."""
    name = target.removeprefix("tests/")
    say(f"running {target} under emulation")
    outcome = WORK / f"outcome-{name.replace('/', '-')}.json"
    outcome.unlink(missing_ok=True)
    options = [f"--outcome={outcome}", "-p", "tests.arm64.selection", "-p", "no:cacheprovider", "-q"]
    options += ["-o", f"timeout={TIMEOUT_SECONDS}", "-o", f"faulthandler_timeout={TIMEOUT_SECONDS - 60}"]
    begin = time.monotonic()
    done = subprocess.run(emulated(PYTHON, "-m", "pytest", target, *options), cwd=TREE, env=environment(), check=False)
    if not outcome.exists():
        fail(f"pytest ended with code {done.returncode} before it could say what ran")
    return Tier(name, time.monotonic() - begin, json.loads(outcome.read_text()))


def report(tiers: list[Tier]) -> None:
    """Print the tests that were left out or skipped, by reason, then the failures, then the totals."""
    titles = {"left_out": "left out, as tests/arm64/left_out.toml says", "skipped": "skipped by the test itself"}
    for kind, title in titles.items():
        by_reason = defaultdict(list)
        for tier in tiers:
            for test, reason in tier.outcome[kind].items():
                by_reason[reason].append(test)
        for reason, tests in by_reason.items():
            print(f"\n{title}: {reason}")
            print("\n".join(f"    {test}" for test in tests))
    print()
    for tier in tiers:
        for test, phase in tier.outcome["failed"].items():
            print(f"FAILED ({phase}) {test}")
        for line in tier.outcome["stale"]:
            print(f"OUT OF DATE {line}")
    for tier in tiers:
        say(str(tier))


def main() -> int:
    """Run all steps in order."""
    parser = argparse.ArgumentParser(prog="python -m tests.arm64", description=__doc__)
    parser.add_argument("tests", nargs="*", default=list(TIERS), help="folders or files (default: the three tiers)")
    arguments = parser.parse_args()
    check_needs()
    build_interpreter()
    make_sysroot()
    make_environment()
    check_emulation()
    copy_tree()
    build_package()
    compare_kernels()
    tiers = [run_tests(target) for target in arguments.tests]
    report(tiers)
    return 0 if all(tier.is_good for tier in tiers) else 1


if __name__ == "__main__":
    sys.exit(main())

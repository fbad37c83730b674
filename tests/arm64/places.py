"""Every path that the steps share, and functions to run and log commands. Importing this module writes nothing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from typing import NoReturn

from tests import ROOT

WORK = ROOT / "build" / "arm64"
SYSROOT = WORK / "root"
VENV = WORK / "venv"
TREE = WORK / "tree"
LOGS = WORK / "logs"

PYTHON = VENV / "bin" / "python"  # emulated


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"arm64: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Print an error and exit with code 2."""
    print(f"arm64: error: {text}", file=sys.stderr, flush=True)
    sys.exit(2)


def run_logged(step: str, command: list[str], **options: object) -> None:
    """Run a command with its output in a log file; if it fails, print the end of the log and exit."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{step}.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
        fail(f"{step} failed with exit code {done.returncode}; all of its output is in {log}")


class Stamp:
    """Records the inputs of a finished step, so that a second run repeats only the steps whose inputs changed."""

    def __init__(self, step: str, *ingredients: bytes | str) -> None:
        self._file = WORK / f".{step}"
        digest = hashlib.sha256()
        for ingredient in ingredients:
            data = ingredient.encode() if isinstance(ingredient, str) else ingredient
            digest.update(len(data).to_bytes(8, "big") + data)
        self._value = digest.hexdigest()

    @property
    def is_current(self) -> bool:
        """Whether the step was done with exactly these ingredients."""
        return self._file.exists() and self._file.read_text() == self._value

    def set(self) -> None:
        """Record that the step is done."""
        self._file.write_text(self._value)

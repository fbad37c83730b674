"""`python -m tests.fuzz --frames 1000000 --seed 7`: run one trial, show progress, and end with an exit code."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .trial import hold_trial


def main() -> int:
    """Return 0 if the trial passed; print the reason and return 1 if it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many frames to send (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of all random values")
    arguments = parser.parse_args()
    # Members log one line for every kind of bad connection; here nearly all connections are bad.
    logging.getLogger("pccl").setLevel(logging.ERROR)
    print(f"seed {arguments.seed}, {arguments.frames} frames", flush=True)
    try:
        outcome = hold_trial(arguments.frames, arguments.seed, Progress())
    except Exception as error:  # noqa: BLE001 - print the seed for every kind of failure
        print(f"\nfailed with seed {arguments.seed}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"\n{outcome}")
    return 0


class Progress:
    """Progress as one line that is overwritten on a terminal, or as a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._shown > (0.2 if sys.stdout.isatty() else 5.0):
            self._shown = now
            print(f"\r{line}", end="" if sys.stdout.isatty() else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())

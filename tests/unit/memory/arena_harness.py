"""Helpers for the tests of the arena: an arena that must leave nothing behind, and a fresh interpreter."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator

from pccl.memory.arena import Arena, ArenaStatistics
from tests import ROOT
from tests.leaks import Footprint

MIB = 1 << 20


@contextlib.contextmanager
def private_arena() -> Iterator[Arena]:
    """Yield a new arena; fail if it leaves a descriptor or a mapping."""
    with Footprint.watch() as footprint:
        arena = Arena()
        yield arena
        gc.collect()
        arena.trim()
        assert arena.statistics() == ArenaStatistics(0, 0, 0, 0)
        assert footprint.leaks() == []


def run(code: str, *options: str) -> str:
    """Run a program in a fresh interpreter; return its output, and fail if it writes to standard error."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout

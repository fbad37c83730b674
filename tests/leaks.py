"""Detect what a test left behind: processes, descriptors and shared segments.

A footprint is taken before the test and compared after it. Processes are found
in two ways: as descendants of the test process, and by a mark in their
environment, because an orphan is no longer a descendant of the test.
Every leak is reported and then removed, so that one leak fails only one test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pccl.memory.arena import default

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "PCCL_TEST_MARK"

# How long a process may take to end after the test. Killed actors need
# milliseconds; the rest is reserve for a loaded machine.
WAIT_SECONDS_MAX = 5.0

POLL_SECONDS = 0.01

NAME_PREFIX = "pccl-"
SEGMENT = re.compile(r"/memfd:pccl\S*")


@dataclass(frozen=True)
class Footprint:
    """What existed before the test."""

    mark: str
    processes: frozenset[psutil.Process]
    descriptors: dict[int, str]
    segments: Counter[str]

    @classmethod
    @contextlib.contextmanager
    def watch(cls) -> Iterator[Footprint]:
        """Take a footprint and mark every process that is started inside the block."""
        mark = uuid.uuid4().hex
        before = os.environ.get(MARK)
        os.environ[MARK] = mark
        try:
            _collect()
            gc.freeze()  # skip existing objects in later collections: with torch loaded, each takes 0.2 s
            yield cls(mark, frozenset(_descendants()), _descriptors(), _segments())
        finally:
            if before is None:
                del os.environ[MARK]
            else:
                os.environ[MARK] = before

    def leaks(self, wait_seconds: float = WAIT_SECONDS_MAX) -> list[str]:
        """Return one line for each process, descriptor and segment that did not exist before the test."""
        _collect()
        found = self._process_leaks(wait_seconds)
        found += [
            f"descriptor {number} -> {target}"
            for number, target in sorted(_descriptors().items())
            if self.descriptors.get(number) != target
        ]
        found += [f"mapped segment {name}" for name in sorted((_segments() - self.segments).elements())]
        return found

    def _process_leaks(self, wait_seconds: float) -> list[str]:
        descendants = _descendants() - self.processes
        left = descendants | (_marked(self.mark) - self.processes)
        # A zombie child has ended but was never reaped; in a long training run zombies
        # fill the process table. The wait below would hide it.
        # Orphans of a killed peer are not descendants: waiting for them is the task of init.
        zombies = {process for process in descendants if _is_zombie(process)}
        names = {process: _describe(process) for process in left}
        alive = _wait_for_end(left, wait_seconds)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_for_end(alive, wait_seconds)
        found = [f"process {names[process]}, ended but not waited for" for process in zombies]
        found += [f"process {names[process]}, still running" for process in alive]
        return sorted(found)


def _collect() -> None:
    """Run __del__ methods, which close resources, and free what the arena caches: neither counts as a leak."""
    gc.collect()
    default().trim()


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _marked(mark: str) -> set[psutil.Process]:
    """Return the processes of the library on this machine that this test started."""
    found = set()
    for process in psutil.process_iter(["name"]):
        if not (process.info["name"] or "").startswith(NAME_PREFIX):
            continue
        # It may end while we look, or belong to another user.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.add(process)
    return found


def _wait_for_end(processes: set[psutil.Process], wait_seconds: float) -> set[psutil.Process]:
    """Return the processes that still run after this time. A zombie counts as ended, even if init does not reap it."""
    deadline = time.monotonic() + wait_seconds
    running = {process for process in processes if not has_ended(process)}
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        running = {process for process in running if not has_ended(process)}
    for process in processes - running:
        with contextlib.suppress(psutil.Error):  # already reaped, or not our child
            process.wait(timeout=0)
    return running


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, reaped or not."""
    return _is_zombie(process) or not process.is_running()


def _is_zombie(process: psutil.Process) -> bool:
    """Return whether a process has ended and waits to be reaped; only then are its ports and descriptors closed.

    A killed process is shown as a zombie as soon as its main thread has ended. Its other threads, such as the one that
    an emulated interpreter has, hold the descriptors a little longer.
    """
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())[:120]
        return f"{process.pid} ({process.name()}: {command})" if command else f"{process.pid} ({process.name()})"
    return str(process.pid)


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        # The descriptor of this very listing is gone by the time it is read.
        with contextlib.suppress(FileNotFoundError):
            found[int(entry.name)] = str(entry.readlink())
    return found


def _segments() -> Counter[str]:
    return Counter(SEGMENT.findall(Path("/proc/self/maps").read_text()))

"""The watcher: looks at the processes of a run once a second and at its end, and reports what must not be there.

No process outlives its training process. Memory, descriptors and mapped segments of long-lived processes do not grow.
After the end there is no process, and so no segment and no socket, no port, no file, and no traceback in a log.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .checkers import judge_growth
from .faults import processes_of, send
from .procfs import count_descriptors, count_segments, descends_from, describe, marked_processes, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .records import Bounds

GROWTH_INTERVAL = 20  # samples between two checks of trends
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at
REMAINS_PAUSE = 0.05  # seconds between two checks for processes that are still ending


class ProcessWatcher:
    """Checks the processes of a run through /proc."""

    def __init__(self, mark: str, bounds: Bounds, add_violation: Callable[[str, str], None]) -> None:
        self.sizes: dict[str, list[int]] = {}  # process -> its resident bytes, once a second
        self.counts: dict[str, list[int]] = {}  # what a process holds -> how many, once a second
        self._mark = mark
        self._bounds = bounds
        self._add_violation = add_violation
        self._pids: dict[str, int] = {}
        self._strays: dict[int, float] = {}  # process that does not descend from the zygote -> since when
        self._complained: set[str] = set()
        # Before the selector of the supervisor, which holds one.
        self._descriptors = count_descriptors(os.getpid())
        self._shared = set(os.listdir(SHARED_MEMORY))

    def look(self, zygote: int, master: int, elder: int) -> None:
        """Sample the memory of long-lived processes, and look for processes that have lost their parent."""
        watched = {"master": master, "elder": elder}
        for actor in processes_of(elder).actors[:1]:
            watched["elder's actor"] = actor
        for name, pid in watched.items():
            if self._pids.get(name) != pid:
                self._pids[name] = pid
                self.sizes[name] = []
                self.counts[f"descriptors of {name}"] = []
                self.counts[f"segments of {name}"] = []
            size = resident_bytes(pid)
            if not size:
                continue  # it has just ended
            self.sizes[name].append(size)
            self.counts[f"descriptors of {name}"].append(count_descriptors(pid))
            self.counts[f"segments of {name}"].append(count_segments(pid))
        if len(self.sizes["master"]) % GROWTH_INTERVAL == 0:
            self.judge_growth()
        now = time.monotonic()
        strays = {pid for pid in marked_processes(self._mark) if not descends_from(pid, zygote)}
        self._strays = {pid: self._strays.get(pid, now) for pid in strays}
        for pid, since in self._strays.items():
            # A process that was still starting when its parent died checks for the parent when it is ready.
            if now - since > self._bounds.exit:
                self._add_violation("orphans", f"process {pid} has outlived its training process: {describe(pid)}")
                self._strays[pid] = now

    def judge_growth(self) -> None:
        """Report each size that grows, once."""
        bounds = self._bounds
        series = [("leaks", name, values, bounds.grown_count) for name, values in self.counts.items()]
        for name, values in self.sizes.items():
            series.append(
                ("memory", name, values, bounds.grown_tensor_bytes if name == "elder" else bounds.grown_bytes)
            )
        for law, name, values, allowed in series:
            text = judge_growth(name, values, allowed)
            if text and name not in self._complained:
                self._complained.add(name)
                self._add_violation(law, text)

    def judge_remains(self, addresses: Iterable[tuple[str, int]], folder: Path, logs: Path) -> None:
        """Check that nothing is left, after all processes have ended."""
        deadline = time.monotonic() + self._bounds.exit
        left = marked_processes(self._mark)
        while left and time.monotonic() < deadline:
            time.sleep(REMAINS_PAUSE)
            left = marked_processes(self._mark)
        for pid in left:
            self._add_violation("remains", f"process {pid} is left: {describe(pid)}")
            send(pid, signal.SIGKILL)
        held = count_descriptors(os.getpid())
        if held > self._descriptors:
            self._add_violation("remains", f"this process holds {held} descriptors, {self._descriptors} before the run")
        for host, port in addresses:
            with socket.socket() as probe:
                if probe.connect_ex((host, port)) == 0:
                    self._add_violation("remains", f"a process still listens on {host}:{port}")
        files = [str(path) for path in folder.rglob("*")]
        files += [str(SHARED_MEMORY / name) for name in set(os.listdir(SHARED_MEMORY)) - self._shared if "pccl" in name]
        if files:
            self._add_violation("remains", f"files are left: {files[:5]}")
        for path in sorted(logs.iterdir()):
            count = path.read_text(errors="replace").count("Traceback (most recent call last)")
            if count:
                self._add_violation("errors", f"{count} tracebacks in {path}")
        self.judge_growth()

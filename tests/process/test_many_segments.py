"""A pool of workers forked by an actor that holds hundreds of shared segments."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests import ROOT

# More than the mailbox of a worker takes before it is read for the first time, which is about 278; and with more than
# 1,024 all new descriptors, mailboxes among them, are beyond what select() takes.
PROGRAM = """
import os, resource, sys
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.mapping import create_memory_file
from pccl.actors.io.loop import Loop
from pccl.actors.peer.lane_pool import LanePool

SEGMENTS, LIMIT_NS = int(sys.argv[1]), monotonic_ns() + 20_000_000_000
problems = []
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
loop, life = Loop(), os.pipe()
pool = LanePool(loop, life[1], on_link_ended=lambda *_: None, on_worker_died=problems.append)
early, late = range(1, SEGMENTS), range(SEGMENTS, SEGMENTS + 400)
for number in early:
    pool.share(number, create_memory_file("segment", 4096), 4096)
pool.size = 2
pool.spawn(2)
for number in late:
    pool.share(number, create_memory_file("segment", 4096), 4096)

def look():
    pool.call()
    loop.after(1_000_000, stop_if_answered)

def stop_if_answered():
    if pool.silent() and not problems and monotonic_ns() < LIMIT_NS:
        loop.after(1_000_000, stop_if_answered)
    else:
        loop.stop()

loop.after(0, look)
loop.run(lambda: monotonic_ns() + 1_000_000_000, lambda _: None)
assert not problems, problems
assert not pool.silent(), "workers that do not answer"
pool.kill()
pool.wait_for_exit()
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""


@pytest.mark.parametrize("segments", [400, 1200])
def test_workers_are_forked_with_any_number_of_segments(segments: int) -> None:
    """Goal: all of them live, none is left behind, and segments that come later reach them, however many at once."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(segments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout.strip(), done.returncode) == ("no child is left", 0), done.stderr

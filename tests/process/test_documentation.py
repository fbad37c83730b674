"""Every Python block in README and docs, run as printed but for the address of the master.

A block that names the master's address is a program for peers: two processes run it at the same time against a master
of its own, and both must end with success. Any other block is run once. A block that cannot be run here says so in its
first line, which readers see too: `# Not run by the tests: ` and the reason. The README's loop runs with a killed peer
and a newcomer.
"""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from .helpers import ROOT, Script, eventually, running_master

ADDRESS = "127.0.0.1:48148"
NOT_RUN = "# Not run by the tests: "
NOT_RUN_MAX = 2
PATIENCE = 60.0  # seconds for a block, some of which import torch

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, without blocks of other languages."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def shell_blocks(page: Path) -> list[str]:
    """The shell commands in a page."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[str]:
    """Return the Python blocks of a page that are run."""
    return [block for block in blocks(page) if not block.startswith(NOT_RUN)]


# Runs the blocks that it is given one by one, each as a program of its own, and says after each that it is done.
RUNNER = """
import json
for number, block in enumerate(json.loads(sys.stdin.readline())):
    exec(compile(block, f"block {number}", "exec"), {"__name__": "__main__"})
    say("done", number)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_the_code_in_a_page_runs(page: Path) -> None:
    """Goal: what readers copy works, and two peers that run it meet and end."""
    with ExitStack() as stack:
        shared, single = [], []
        for block in runnable(page):
            if ADDRESS in block:
                shared.append(block.replace(ADDRESS, stack.enter_context(running_master()).address))
            else:
                single.append(block)
        work = [[*single, *shared], shared] if shared else [single]
        peers = [stack.enter_context(Script(RUNNER)) for _ in work]
        for peer, given in zip(peers, work, strict=True):
            peer.say(json.dumps(given))
        for peer, given in zip(peers, work, strict=True):
            for number in range(len(given)):
                assert peer.expect("done", PATIENCE) == str(number)
            assert peer.end() == 0, peer.errors()


def test_few_blocks_are_not_run() -> None:
    """Goal: only a few blocks use the exception."""
    left_out = [block for page in (README, *PAGES) for block in blocks(page) if block.startswith(NOT_RUN)]

    assert len(left_out) <= NOT_RUN_MAX


@pytest.mark.timeout(300)
def test_the_loop_in_the_readme_survives_a_killed_peer() -> None:
    """Goal: what newcomers copy works: three start, one is killed, one joins, and all have the same weights."""
    (loop,) = blocks(README)
    assert ADDRESS in loop
    with running_master() as master, ExitStack() as stack:
        code = loop.replace(ADDRESS, master.address)

        def start() -> Script:
            return stack.enter_context(Script(code, PYTHONUNBUFFERED="1"))

        def until(peers: list[Script], size: int, what: str) -> None:
            for peer in peers:
                eventually(lambda peer=peer: peer.expect("step").endswith(f"{size} peers"), what)

        peers = [start() for _ in range(3)]
        until(peers, 3, "three peers see each other")
        peers.pop().signal(signal.SIGKILL)
        until(peers, 2, "the survivors go on")
        peers.append(start())
        until(peers, 3, "the newcomer is in")
        newest = peers[-1].lines[-1]
        for peer in peers[:-1]:
            if newest not in peer.lines:
                assert f"step {peer.expect(newest.split(':')[0])}".split(": ")[1] == newest.split(": ")[1]


@pytest.mark.parametrize("exists", [False, True], ids=["new", "was readable by all"])
def test_documented_commands_make_a_secret_that_only_its_owner_reads(tmp_path: Path, exists: bool) -> None:
    """Goal: the documented commands write a token file of mode 600, also over an older file with an open mode."""
    written = [
        (block, name)
        for page in (README, *PAGES)
        for block in shell_blocks(page)
        for name in re.findall(r"/dev/urandom.*> *(\S+)", block)
    ]
    assert written, "no page says how to make a token any more"
    for number, (block, name) in enumerate(written):
        folder = tmp_path / str(number)
        folder.mkdir()
        if exists:
            (folder / name).write_text("old")
            (folder / name).chmod(0o644)
        commands = [line for line in block.splitlines() if not line.startswith("pccl ")]
        script = "\n".join(["set -eu", "umask 022", *commands])
        subprocess.run(["bash", "-c", script], cwd=folder, check=True, timeout=PATIENCE)

        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert len((folder / name).read_text().strip()) >= 40

"""The examples as users run them: a master, three peers, one is killed, another joins, and the loss is that of one process.

Peers pause while there are fewer than three, so the newcomer is never late, however slow the machine. The one process
sees as many samples as they do; tolerances are relative.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from .helpers import ROOT, Script, running_master

PATIENCE = 60.0  # seconds for a process that begins by importing torch, on a machine that is busy with others

EXAMPLES = {
    "naive_ddp": (("--steps", 120), 0.25),
    "diloco": (("--steps", 20), 0.25),
    "async_diloco": (("--steps", 30, "--sync-every", 7), 0.25),
    "language_model": (("--steps", 40), 0.10),
}


class End(NamedTuple):
    """What an example says at the end."""

    loss: float
    revision: int
    digest: str


def start(example: str, *arguments: object) -> Script:
    """An example with one thread per process, as its own process."""
    path = ROOT / "examples" / f"{example}.py"
    return Script.command(sys.executable, path, *arguments, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


# Runs every example by itself, one after the other, in an interpreter that imports torch only once.
REFERENCES = """
import runpy, sys
for name, *flags in EXAMPLES:
    for more in (["--help"], ["--alone", "--min-peers", "3", *flags]):
        sys.argv = [f"{name}.py", *more]
        print("example", name, more[0], flush=True)
        try:
            runpy.run_path(f"{FOLDER}/{name}.py", run_name="__main__")
        except SystemExit:
            pass
"""


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], str]:
    """What each example prints for --help, and when it trains in one process alone."""
    folder = ROOT / "examples"
    commands = [[name, *map(str, flags)] for name, (flags, _) in EXAMPLES.items()]
    program = f"EXAMPLES, FOLDER = {commands!r}, {str(folder)!r}" + REFERENCES
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^example (\w+) (\S+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return {(parts[i], parts[i + 1]): parts[i + 2] for i in range(0, len(parts), 3)}


def end_of(script: Script) -> End:
    """Its last line, once it has ended well."""
    end = parse_end(script.expect("done", PATIENCE))
    assert script.end(PATIENCE) == 0, script.errors()
    return end


def parse_end(line: str) -> End:
    """What follows the word done."""
    _, loss, _, revision, _, digest = line.split()
    return End(float(loss), int(revision), digest)


def reach(script: Script, step: int, peers: int) -> None:
    """Wait until it has made that step, or a later one, together with so many peers."""
    while True:
        found = re.match(r"(\d+) .*peers (\d+)", script.expect("step", PATIENCE))
        if found and int(found[1]) >= step and int(found[2]) == peers:
            return


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_reaches_the_loss_of_one_process_while_peers_come_and_go(
    example: str, references: dict[tuple[str, str], str]
) -> None:
    """Goal: killed and new peers cost neither accuracy nor a single bit of agreement."""
    arguments, tolerance = EXAMPLES[example]
    with running_master() as master, ExitStack() as stack:

        def peer() -> Script:
            return stack.enter_context(start(example, master.address, *arguments, "--min-peers", 3))

        peers = [peer() for _ in range(3)]
        reach(peers[0], 4, 3)
        peers.pop(1).signal(signal.SIGKILL)
        newcomer = peer()
        ends = [end_of(script) for script in (*peers, newcomer)]

    assert len({(end.revision, end.digest, end.loss) for end in ends}) == 1, ends
    expected = parse_end(references[example, "--alone"].rpartition("done")[2])
    assert ends[0].loss == pytest.approx(expected.loss, rel=tolerance)
    assert any(line.startswith("received") for line in newcomer.lines), newcomer.lines


@pytest.mark.timeout(300)
def test_a_run_goes_on_from_its_checkpoints_as_if_it_had_not_ended(tmp_path: Path) -> None:
    """Goal: after the end of everybody, master included, the run ends with the bits of one that was not disturbed."""

    def run(steps: int, *files: str) -> set[End]:
        with running_master() as master, ExitStack() as stack:
            flags = [("--checkpoint", tmp_path / name) for name in files] or [(), ()]
            peers = [stack.enter_context(start("naive_ddp", master.address, "--steps", steps, *more)) for more in flags]
            return {end_of(peer) for peer in peers}

    (undisturbed,) = run(40)
    (half,) = run(20, "a", "b")
    (resumed,) = run(40, "a", "b")

    assert half.revision == 20
    assert resumed == undisturbed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_explains_itself(example: str, references: dict[tuple[str, str], str]) -> None:
    """Goal: `--help` says what it is, how to start it, and every default."""
    told = references[example, "--help"]

    assert "pccl run-master" in told
    assert "(default: 2)" in told

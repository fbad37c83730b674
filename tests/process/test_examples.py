"""The examples as users run them: a master and three peers; one is killed, another joins, and nothing is lost by it.

Peers pause while there are fewer than three, so the newcomer is never late, however slow the machine. The run
with one process uses as many samples. Tolerances are relative, and several times the measured effect of churn.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from pccl import MasterNode

from .fork_server import ForkServer, fork_server
from .helpers import QUICK, ROOT, Script, free_port, running_master

PATIENCE = 60.0  # seconds for a process that begins by importing torch, on a machine that is busy with others

EXAMPLES = {
    "naive_ddp": (("--steps", 120), 0.05),
    "diloco": (("--steps", 20), 0.10),
    "async_diloco": (("--steps", 80, "--sync-every", 7), 0.25),
    "language_model": (("--steps", 40), 0.05),
}


class End(NamedTuple):
    """The last line of an example, parsed."""

    loss: float
    revision: int
    digest: str


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Yield a server that starts examples, each process with one thread."""
    with fork_server() as server:
        yield server


def start(server: ForkServer, example: str, *arguments: object) -> Script:
    """An example as its own process."""
    return server.run(ROOT / "examples" / f"{example}.py", *arguments)


# Runs examples as a single peer, one after the other, in an interpreter that imports torch only once.
ALONE = """
import runpy, shutil, sys
for name, label, *flags in RUNS:
    if label == "second":
        shutil.copy(KEPT, flags[-1])
    sys.argv = [f"{name}.py", *flags]
    print("run", name, label, flush=True)
    try:
        runpy.run_path(f"{FOLDER}/{name}.py", run_name="__main__")
    except SystemExit:
        pass
"""


class Alone(NamedTuple):
    """What examples print without any other process, by name and label, and a checkpoint of one of them."""

    told: dict[tuple[str, str], str]
    checkpoint: Path

    def end(self, example: str, label: str) -> End:
        """Its last line."""
        return parse_end(self.told[example, label].rpartition("done")[2])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The help of each example, its training in one process, and one that is resumed in the middle."""
    folder, kept = ROOT / "examples", tmp_path_factory.mktemp("alone") / "kept"
    runs = [(name, "help", "--help") for name in EXAMPLES]
    runs += [(name, "whole", "--alone", "--min-peers", 3, *flags) for name, (flags, _) in EXAMPLES.items()]
    steps = (("first", 20, kept), ("second", 40, kept.with_name("going on")), ("both", 40, kept.with_name("other")))
    runs += [("naive_ddp", label, "--alone", "--steps", count, "--checkpoint", file) for label, count, file in steps]
    given = [tuple(map(str, run)) for run in runs]
    program = f"RUNS, FOLDER, KEPT = {given!r}, {str(folder)!r}, {str(kept)!r}" + ALONE
    environment = {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^run (\w+) (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return Alone({(parts[i], parts[i + 1]): parts[i + 2] for i in range(0, len(parts), 3)}, kept)


def end_of(script: Script) -> End:
    """Wait for success and return its parsed last line."""
    end = parse_end(script.expect("done", PATIENCE))
    assert script.end(PATIENCE) == 0, script.errors()
    return end


def parse_end(line: str) -> End:
    """Parse what follows the word `done`."""
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
    example: str, alone: Alone, server: ForkServer
) -> None:
    """Goal: killed and new peers cost no accuracy, and all peers end with the same bits."""
    arguments, tolerance = EXAMPLES[example]
    with running_master() as master, ExitStack() as stack:

        def peer() -> Script:
            return stack.enter_context(start(server, example, master.address, *arguments, "--min-peers", 3))

        peers = [peer() for _ in range(3)]
        reach(peers[0], 4, 3)
        peers.pop(1).signal(signal.SIGKILL)
        newcomer = peer()
        ends = [end_of(script) for script in (*peers, newcomer)]

    assert len({(end.revision, end.digest, end.loss) for end in ends}) == 1, ends
    assert ends[0].loss == pytest.approx(alone.end(example, "whole").loss, rel=tolerance)
    assert any(line.startswith("received") for line in newcomer.lines), newcomer.lines


@pytest.mark.timeout(300)
def test_peers_of_an_example_come_back_to_a_master_that_was_restarted(server: ForkServer) -> None:
    """Goal: they join the new master as newcomers and continue where they were, without a restart."""
    with ExitStack() as stack:
        with running_master(port=free_port()) as master:
            address = master.address
            flags = ("--steps", 60, "--pace", 0.02)
            peers = [stack.enter_context(start(server, "naive_ddp", address, *flags)) for _ in range(2)]
            reach(peers[0], 5, 2)
        with MasterNode(address, options=QUICK):
            ends = {end_of(peer) for peer in peers}

    assert {end.revision for end in ends} == {60}
    assert len(ends) == 1
    assert all(any(line.startswith("out of the run") for line in peer.lines) for peer in peers)


@pytest.mark.timeout(300)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(alone: Alone) -> None:
    """Goal: every bit equals that of training without an interruption."""
    assert alone.end("naive_ddp", "first").revision == 20
    assert "resumed revision 20" in alone.told["naive_ddp", "second"]
    assert alone.end("naive_ddp", "second") == alone.end("naive_ddp", "both")


@pytest.mark.timeout(300)
def test_one_checkpoint_is_enough_to_resume_a_run(alone: Alone, server: ForkServer) -> None:
    """Goal: with a new master, peers without a checkpoint receive the highest revision. They also optimize the ring."""
    with running_master() as master, ExitStack() as stack:
        flags = (master.address, "--steps", 40, "--optimize-every", 25)
        resumed = stack.enter_context(start(server, "naive_ddp", *flags, "--checkpoint", alone.checkpoint))
        fresh = stack.enter_context(start(server, "naive_ddp", *flags))
        ends = [end_of(resumed), end_of(fresh)]

    assert ends[0] == ends[1]
    assert ends[0].revision == 40
    assert any(line.startswith("resumed revision 20") for line in resumed.lines)
    assert any(re.match(r"received \d+ bytes, revision 20", line) for line in fresh.lines), fresh.lines


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_explains_itself(example: str, alone: Alone) -> None:
    """Goal: `--help` says what it is, how to start it, and every default."""
    told = alone.told[example, "help"]

    assert "pccl run-master" in told
    assert "(default: 2)" in told

"""`pccl bench` as users start it: on several hosts, of which one may die, start late, or have other arguments."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack

import pytest

from .helpers import Script, eventually, running_master

PCCL = [sys.executable, "-m", "pccl.cli"]
SMALL = ["--size", "64kB", "--seconds", "1.5", "--pool", "1"]


def bench(address: str, *arguments: object) -> Script:
    return Script.command(*PCCL, "bench", address, *arguments, PYTHONUNBUFFERED="1")


def test_two_peers_measure() -> None:
    """Goal: lines of progress, then a table for people and an object for programs."""
    with running_master() as master:
        with bench(master.address, *SMALL) as people, bench(master.address, *SMALL, "--json") as program:
            numbers = json.loads("{" + program.expect("{"))
            eventually(lambda: "2 peers" in people.expect("   "), "a line of progress")
            people.expect("peers ")
            assert people.end() == program.end() == 0

            assert numbers["peers"] == 2
            assert numbers["size_bytes"] == 64_000
            assert numbers["reduces"] == sum(lap["reduces"] for lap in numbers["laps"]) > 10
            assert 0 < numbers["median_ms"] <= numbers["p99_ms"]
            assert numbers["bytes_per_second"] > 0
            # In a ring of two, each peer sends and receives the whole tensor once.
            assert numbers["tx_bytes_per_second"] == pytest.approx(numbers["rx_bytes_per_second"], rel=0.1)
            assert numbers["failure"] is None


def test_a_peer_dies_and_another_comes() -> None:
    """Goal: the others print the loss and continue; a newcomer joins their measurements."""
    plan = ["--peers", "3", "--size", "1MB", "--seconds", "600", "--pool", "1"]
    with running_master() as master, ExitStack() as stack:

        def start() -> Script:
            return stack.enter_context(bench(master.address, *plan))

        peers = [start() for _ in range(3)]
        victim = peers.pop()
        eventually(lambda: "effective" in victim.expect(""), "it measures")
        victim.signal(signal.SIGKILL)
        eventually(lambda: "; 2 peers continue" in peers[0].expect(""), "it is said")
        peers.append(start())
        for peer in (peers[-1], *peers[:-1]):
            eventually(lambda peer=peer: "  3 peers  " in peer.expect("", 30), "all three measure", timeout=60)


def test_left_alone() -> None:
    """Goal: it prints what was measured, and one line says why it ended."""
    with running_master() as master:
        plan = ["--peers", "2", "--size", "64kB", "--seconds", "60"]
        with bench(master.address, *plan) as survivor, bench(master.address, *plan) as victim:
            eventually(lambda: "effective" in survivor.expect(""), "it measures")
            victim.signal(signal.SIGKILL)

            survivor.expect("peers ")
            assert survivor.end() == 1
            # The table is about the reduces, which had two peers.
            assert survivor.expect("").split()[0] == "2"
            assert survivor.errors().splitlines()[-1] == "Error: all other peers are gone"


def test_peers_that_do_not_come() -> None:
    """Goal: waiting has a bound, and the message says how many came."""
    with running_master() as master, bench(master.address, "--peers", 3, "--wait", 0.5) as lonely:
        assert lonely.end() == 1
        (line,) = lonely.errors().splitlines()
        assert line == "Error: 1 of 3 peers came within 0.5 s; start the others, or wait longer"


def test_ctrl_c_shows_what_there_is() -> None:
    """Goal: Ctrl-C prints the table, and the other peers print that this peer left."""
    with running_master() as master:
        plan = ["--size", "64kB", "--seconds", "60"]
        with bench(master.address, *plan) as one, bench(master.address, *plan) as other:
            eventually(lambda: "effective" in one.expect(""), "it measures")
            one.signal(signal.SIGINT)
            one.expect("peers ")

            assert one.end() == 1
            assert one.errors().splitlines()[-1] == "Error: interrupted"
            assert other.end() == 1
            assert "Traceback" not in one.errors() + other.errors()


def test_peers_that_were_told_different_sizes() -> None:
    """Goal: the message names both signatures, on both peers."""
    with running_master() as master:
        with bench(master.address, "--size", "4kB") as one, bench(master.address, "--size", "8kB") as other:
            for script in (one, other):
                assert script.end() == 1
                (line,) = script.errors().splitlines()
                assert "do not agree on what all_reduce (tag 0) is" in line
                assert "1,000 x FLOAT" in line
                assert "2,000 x FLOAT" in line


def test_without_numpy() -> None:
    """Goal: the message names the missing package and the command that installs it."""
    code = """
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "numpy":
                raise ModuleNotFoundError("blocked", name="numpy")

    sys.meta_path.insert(0, Blocker())
    from pccl.cli import main
    main(["bench", "127.0.0.1:1"])
    """
    with Script(code) as script:
        assert script.end() == 1
        assert script.errors().splitlines()[-1] == "Error: pccl bench needs numpy; install it: pip install numpy"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["127.0.0.1:http"], "'127.0.0.1:http' must be host:port"),
        (["127.0.0.1", "--size", "large"], "'large' is not a size; write 4096, 64MB or 1GiB"),
        (["127.0.0.1", "--size", "0"], "'0' is not a size"),
        (["127.0.0.1", "--dtype", "bfloat16"], "'bfloat16' is not one of"),
        ([], "Missing argument 'HOST:PORT'"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], complaint: str) -> None:
    """Goal: code 2 and what would be right."""
    with Script.command(*PCCL, "bench", *arguments) as script:
        assert script.end() == 2
        assert complaint in script.errors()

"""Silence speaks: who waits is told in one line for what, and what does not fit is named. Entries of the page, too."""

from __future__ import annotations

import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from pccl import Communicator, MasterNode
from pccl.errors import MasterConnectionError

from .helpers import (
    QUICK,
    Script,
    actor_pid,
    background,
    eventually,
    peers_of,
    quick,
    running_master,
    sockets,
    stopped,
)
from .troubleshooting_page import check, explains, is_quoted


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the lines in the user's log, from information on."""
    caplog.set_level(logging.INFO, "pccl.peer")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


def first(lines: Callable[[], list[str]], title: str) -> str:
    """Wait for the line that an entry of the page quotes."""
    return eventually(lambda: [line for line in lines() if is_quoted(title, line)], title)[0]


# ---------------------------------------------------------------------------------------------- reaching the master


@explains("The master does not answer")
@explains("An attempt to reach the master failed")
def test_a_master_that_does_not_answer(lines: Callable[[], list[str]]) -> None:
    """Goal: a port that swallows everything: a line while the first attempt lasts, one for each that failed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = quick(connect_timeout=0.4, handshake_timeout=0.4, vote_warning=0.3)
        with Communicator(address, options=options) as peer, pytest.raises(MasterConnectionError):
            peer.connect(n_attempts=3)

    assert len(lines()) == 3
    check("The master does not answer", lines()[0])
    assert f"the master at {address} has not answered for 0.3 s (attempt 1 of 3)" in lines()
    for attempt in (1, 2):
        check("An attempt to reach the master failed", lines()[attempt])
        assert f"attempt {attempt} of 3 to reach the master at {address} failed" in lines()[attempt]


def test_a_name_that_does_not_resolve(lines: Callable[[], list[str]]) -> None:
    """Goal: each failed attempt is a line, as for an address that cannot be reached."""
    with Communicator("no-such-host.invalid:48148", options=QUICK) as peer:
        with pytest.raises(MasterConnectionError):
            peer.connect(n_attempts=3)

    assert len(lines()) == 2
    for attempt, line in enumerate(lines(), 1):
        assert line.startswith(f"attempt {attempt} of 3 to resolve the master's name 'no-such-host.invalid' failed: ")
        assert line.endswith(". The next one is in 0.1 s")


@explains("The port of a peer")
def test_the_port_of_a_peer_instead_of_the_master(master: MasterNode) -> None:
    """Goal: the message says whose port it is and which one is usual; another attempt would get the same answer."""
    with peers_of(master.address, 0) as peers:
        port = listening_ports(actor_pid(peers[0]))[0]
        with Communicator(f"127.0.0.1:{port}", options=QUICK) as peer:
            with pytest.raises(MasterConnectionError) as caught:
                peer.connect(n_attempts=5)
        check("The port of a peer", caught.value)
        peers.update()


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on."""
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets(pid):
                    found.append(int(fields[1].rpartition(":")[2], 16))
    return found


# ---------------------------------------------------------------------------------------------- waiting for others


@explains("Members are missing in a call")
def test_a_vote_names_the_missing(lines: Callable[[], list[str]]) -> None:
    """Goal: the caller that waits is told for whom, in its own log."""
    with running_master(quick(vote_warning=0.4)) as master, peers_of(master.address, 0, 0) as peers:
        waiting = background(peers[0].update_topology)
        told = first(lines, "Members are missing in a call")
        peers[1].update_topology()
        waiting.result()
    assert told.startswith("update_topology has waited")


@explains("A group stays too small")
def test_peers_in_different_groups(lines: Callable[[], list[str]]) -> None:
    """Goal: the most common reason why a peer waits alone is named."""
    with running_master(quick(vote_warning=0.4)) as master, peers_of(master.address, 0, 1) as peers:
        waiting = background(lambda: peers[0].wait_for_world_size(2, timeout=3))
        while not any(is_quoted("A group stays too small", line) for line in lines()) and not waiting.ended.is_set():
            peers[1].update_topology()
        told = first(lines, "A group stays too small")
        peers[1].close()
        assert waiting.error() is not None
    assert "group 0 has 1 of 2 members. Start 1 more; 1 peer is in group 1" in told


def test_a_lone_peer_is_told_that_it_waits(lines: Callable[[], list[str]]) -> None:
    """Goal: the README loop in a single terminal prints a line."""
    with running_master(quick(vote_warning=0.3)) as master, peers_of(master.address, 0) as peers:
        assert background(lambda: peers[0].wait_for_world_size(2, timeout=1.5)).error() is not None
    assert any(line.endswith("group 0 has 1 of 2 members. Start 1 more") for line in lines())


@explains("A ring is not wired")
def test_a_ring_that_cannot_be_wired(lines: Callable[[], list[str]]) -> None:
    """Goal: the members that wait for the ring are told which peer holds it up."""
    with running_master(quick(vote_warning=0.3, heartbeat_timeout=60.0)) as master:
        with peers_of(master.address, 0) as peers:
            newcomer = peers.newcomer(options=quick(heartbeat_timeout=60.0))
            joining = background(newcomer.connect)
            eventually(peers[0].are_peers_pending, "it is registered")
            with stopped(actor_pid(newcomer)):
                waiting = background(peers[0].update_topology)
                told = first(lines, "A ring is not wired")
            waiting.result()
            joining.result()
    assert "to connect to the neighbours" in told


# ---------------------------------------------------------------------------------------------- what does not fit


@explains("An unknown environment variable")
def test_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: peers, masters and commands refuse it in one line with the nearest right name."""
    monkeypatch.setenv("PCCL_HEARTBEAT_TIMOUT", "3")
    for make in (lambda: Communicator("127.0.0.1:1"), lambda: MasterNode("127.0.0.1:0")):
        with pytest.raises(ValueError) as caught:
            make()
        check("An unknown environment variable", caught.value)
        assert "did you mean PCCL_HEARTBEAT_TIMEOUT?" in str(caught.value)
    for command in (["pccl.cli", "run-master"], ["pccl.cli", "status"], ["pccl.master"]):
        with Script.command(sys.executable, "-m", *command) as script:
            assert script.end() == 1
            assert "did you mean PCCL_HEARTBEAT_TIMEOUT?" in script.errors()
            assert "Traceback" not in script.errors()


@explains("An option that the master decides")
def test_an_option_that_only_the_master_reads(master: MasterNode, lines: Callable[[], list[str]]) -> None:
    """Goal: a bound that has no effect here is named, with the place where it has one."""
    with peers_of(master.address, 0, options=quick(vote_timeout=5.0)):
        told = first(lines, "An option that the master decides")
    assert told.startswith("vote_timeout=5 has no effect here: the master decides it, and uses 0")


# ---------------------------------------------------------------------------------------------- debug logs

TAKES_PART = """
    import numpy as np
    with MasterNode("127.0.0.1:0", options=QUICK) as master:
        sys.argv[1:] = [master.address]
        peer = join()
        threads = [threading.Thread(target=lambda: join().wait_for_world_size(2))]
        threads[0].start()
        peer.wait_for_world_size(2)
        threads[0].join()
        say("done")
        peer.close()
"""


@pytest.mark.parametrize("level", ["WARN", "DEBUG", "TRACE"])
def test_the_debug_log_shows_what_happens(level: str) -> None:
    """Goal: from DEBUG on, joins, ring orders, lanes and workers of the master and of the peers; none at WARN."""
    with Script(TAKES_PART, PCCL_LOG_LEVEL=level) as script:
        script.expect("done")
        assert script.end() == 0
        shown = script.errors()

    expected = [
        *("pccl.master from=1 VoteTopology", "pccl.master to=2 RingOrder epoch=", "topology phase=closed was=voting"),
        *("pccl.peer peer=1 from=master RingOrder", "membership phase=member was=joining"),
        *("event LinkUp link=", "worker=pccl-send-0 pid=", "worker=pccl-recv-0 pid="),
    ]
    assert [text for text in expected if text in shown] == ([] if level == "WARN" else expected)
    assert not re.search(r"PCCL_TOKEN|hunter2", shown)
    assert ("TRACE pccl." in shown) == (level == "TRACE")
    if level == "WARN":  # a peer that leaves may close a lane before the master reads its goodbye, which is a warning
        assert not re.search(r"\b(TRACE|DEBUG|INFO)\b", shown)

"""`pccl status` and the status query: an operator sees the current run, and the run is not affected."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pccl import Attribute, MasterNode
from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.hellos import TO_CALLER, AskStatus
from pccl._core.protocol.messages import Report, VoteTopology
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.errors import MasterConnectionError
from pccl.options import STATUS_REPORT_TIME, Options
from tests.readable import is_readable

from .helpers import (
    BOUND,
    ROOT,
    Script,
    background,
    eventually,
    free_port,
    master_pid,
    peers_of,
    quick,
    running_master,
    sockets,
    stopped,
)
from .raw_client import RawClient

TOKEN = "a secret that never travels"
PCCL = [sys.executable, "-m", "pccl.cli"]


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


def ask(master: MasterNode, **options: Any) -> dict[str, Any]:
    return query_status(*parse_address(master.address), quick(**options))


def status(*arguments: object, **environment: str) -> Script:
    return Script.command(*PCCL, "status", *arguments, **environment)


# ---------------------------------------------------------------------------------------------- what is told


def test_a_run_is_described(master: MasterNode) -> None:
    """Goal: peers, rings, newcomers and votes as they are at this moment."""
    with peers_of(master.address, 0, 0, 4, lanes=2) as peers:
        waiting = background(peers[0].update_topology)
        eventually(lambda: ask(master)["votes"], "the vote is there")
        run = ask(master)

        assert run["protocol_version"] == PROTOCOL_VERSION
        assert re.fullmatch(r"\d+\.\d+.*", run["version"])
        groups = {member.peer_id: group for member, group in zip(peers, (0, 0, 4), strict=True)}
        assert {peer["id"]: peer["group"] for peer in run["peers"]} == groups
        assert all(peer["lanes"] == 2 and peer["address"].startswith("127.0.0.1:") for peer in run["peers"])
        assert sorted(run["groups"][0]["ring"]) == sorted(member.peer_id for member in peers[:2])
        (vote,) = run["votes"]
        assert vote["present"] == [peers[0].peer_id]
        assert vote["missing"] == sorted(member.peer_id for member in peers[1:])
        for member in peers[1:]:
            background(member.update_topology)
        waiting.result()
        assert ask(master)["votes"] == []


def test_an_operator_is_no_peer(master: MasterNode) -> None:
    """Goal: a status query counts as no peer, delays no member, and leaves no connection behind."""
    with peers_of(master.address, 0, 0) as peers:
        before = sockets(master_pid(master))
        asked: list[int] = []
        over = threading.Event()
        asking = background(lambda: _ask_until(master, over, asked))
        for _ in range(20):
            peers.update()
            assert peers[0].get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
        eventually(lambda: len(asked) > 20 or asking.ended.is_set(), "the operator has asked often enough")
        over.set()
        asking.result()
        run = ask(master)

        assert run["world"] == run["peers_count"] == 2
        assert {name: run["counters"][name] for name in ("lost", "left", "kicked")} == {
            "lost": 0,
            "left": 0,
            "kicked": 0,
        }
        eventually(lambda: sockets(master_pid(master)) == before, "every inquiry's connection is closed")


def _ask_until(master: MasterNode, over: threading.Event, worlds: list[int]) -> None:
    """Ask until `over` is set; add the world size of each answer to the list."""
    while not over.is_set():
        worlds.append(ask(master)["world"])


def test_an_operator_cannot_vote(master: MasterNode) -> None:
    """Goal: a message of an operator after its hello ends its connection, and has no other effect."""
    with peers_of(master.address, 0) as peers:
        before = sockets(master_pid(master))
        with RawClient(master.address) as client:
            client._reader.set_limits({**TO_CALLER, 0x48: 1 << 16})  # before it asks: both answers may come at once
            client.handshake(AskStatus)
            client.hear(Report)
            client.say(VoteTopology(1, 0))

            # The master has announced that nothing follows; it closes long before the timeout of a silent operator.
            eventually(
                lambda: sockets(master_pid(master)) == before, "it closes the connection", STATUS_REPORT_TIME / 2
            )
        assert ask(master)["votes"] == []
        peers.update()
        assert ask(master)["counters"]["kicked"] == 0


def test_an_operator_that_does_not_read_holds_up_nobody(master: MasterNode) -> None:
    """Goal: connections that ask and do not read the answer do not affect the run."""
    with peers_of(master.address, 0, 0) as peers:
        clients = [RawClient(master.address) for _ in range(20)]
        for client in clients:
            client.handshake(AskStatus)
        peers.update()
        assert ask(master)["world"] == 2
        for client in clients:
            client.close()


# ---------------------------------------------------------------------------------------------- which callers may ask


def test_a_caller_without_the_token_learns_nothing() -> None:
    """Goal: the reason, and not a byte about the run."""
    with running_master(quick(token=TOKEN)) as master:
        with pytest.raises(MasterConnectionError, match="the token does not match this run's"):
            ask(master)
        assert ask(master, token=TOKEN)["world"] == 0


def test_a_stranger_that_claims_to_be_a_master_is_found_out() -> None:
    """Goal: an operator accepts only a master that proves that it holds the token."""
    with running_master() as master, pytest.raises(MasterConnectionError, match="token"):
        ask(master, token=TOKEN)


def test_nobody_there() -> None:
    """Goal: one sentence with the address and the reason."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(MasterConnectionError) as caught:
            query_status("127.0.0.1", port, Options())

    assert (
        caught.value.message
        == f"no answer from the master at 127.0.0.1:{port}: nothing listens there (Connection refused)"
    )


def test_a_master_that_is_stopped(master: MasterNode) -> None:
    """Goal: asking has a bound of its own."""
    with stopped(master_pid(master)):
        began = time.monotonic()
        with pytest.raises(MasterConnectionError, match="did not answer as pccl does within 0.4 s"):
            ask(master, connect_timeout=0.2, handshake_timeout=0.2)
        assert time.monotonic() - began < BOUND


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_prints_a_page(master: MasterNode) -> None:
    """Goal: the text has the run, its peers in columns, and the ring as a line."""
    with peers_of(master.address, 0, 0) as peers, status(master.address) as script:
        ring = f"{peers[0].peer_id} -> {peers[1].peer_id}"
        assert script.expect("run ").partition(" at ")[2].startswith(master.address)
        script.expect("peer  group")
        line = script.expect("group 0, epoch ")

        assert ring in line + " -> " + line.partition(": ")[2]
        script.expect("counters: admitted 2")
        assert script.end() == 0
        assert script.errors() == ""


def test_the_command_speaks_json(master: MasterNode) -> None:
    """Goal: the same for programs."""
    with peers_of(master.address, 0), status(master.address, "--json") as script:
        run = json.loads("{" + script.expect("{"))

        assert script.end() == 0
        assert run["world"] == 1


def test_watching_until_ctrl_c(master: MasterNode) -> None:
    """Goal: a line for each query; a missing master is printed and waited for; Ctrl-C ends with code 0."""
    with status(master.address, "--json", "--watch", "0.1") as script:
        for _ in range(3):
            assert json.loads("{" + script.expect("{"))["world"] == 0
        master.interrupt()
        eventually(lambda: "error" in json.loads("{" + script.expect("{")), "it says that the master is away")
        script.signal(signal.SIGINT)

        assert script.end() == 0
        assert "Traceback" not in script.errors()


def test_watching_before_there_is_a_master() -> None:
    """Goal: it waits for the master, says once why, and shows the run when the master is there."""
    address = f"127.0.0.1:{free_port()}"
    with status(address, "--watch") as script:
        eventually(lambda: "waiting for a master" in script.errors(), "it says that it waits")
        with MasterNode(address):
            script.expect("no peers: the run is empty")
            script.signal(signal.SIGINT)
            assert script.end() == 0
        (line,) = script.errors().splitlines()

    assert line.startswith(f"waiting for a master at {address}, until Ctrl-C: no answer from the master at {address}: ")


def test_watch_before_the_address() -> None:
    """Goal: --watch takes the next word for its number, and says where the address belongs."""
    with status("--watch", "127.0.0.1:48148") as script:
        assert script.end() == 2
        assert "'127.0.0.1:48148' is not a number of seconds; write the address before --watch" in script.errors()


def test_a_live_view_in_a_terminal(master: MasterNode) -> None:
    """Goal: a terminal shows one screen that is drawn again, not growing output."""
    ours, theirs = os.openpty()
    command = [*PCCL, "status", master.address, "--watch", "0.1"]
    shown = b""
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        deadline = time.monotonic() + BOUND
        try:
            while shown.count(b"\x1b[H\x1b[J") < 3 or not shown.endswith(b"\n"):
                left = deadline - time.monotonic()  # below 0 also while output never stops
                assert left > 0, f"no third page within {BOUND:g} s: {shown[-300:]!r}"
                assert is_readable(ours, left), f"no third page within {BOUND:g} s: {shown[-300:]!r}"
                shown += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            assert process.wait(BOUND) == 0
        finally:
            process.kill()  # otherwise the test would wait for ever for a process that does not end
            os.close(ours)
    assert shown.count(b"no peers: the run is empty") >= 2
    assert b"Traceback" not in shown


@pytest.mark.parametrize("way", ["file", "variable", "neither"])
def test_the_command_and_the_token(tmp_path: Path, way: str) -> None:
    """Goal: --token-file or PCCL_TOKEN, as for a master; without it one line and code 1."""
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    arguments = ["--token-file", secret] if way == "file" else []
    environment = {"PCCL_TOKEN": TOKEN} if way == "variable" else {}
    with running_master(quick(token=TOKEN)) as master, status(master.address, *arguments, **environment) as script:
        assert script.end() == (1 if way == "neither" else 0)
        if way == "neither":
            (line,) = script.errors().splitlines()
            assert line == (
                f"Error: no answer from the master at {master.address}: the token does not match this run's: "
                "set PCCL_TOKEN or --token-file to the same secret everywhere"
            )

"""Mistakes of beginners: each gives a clear message, and `docs/troubleshooting.md` explains it.

Each test names the entry of the page that it belongs to, and compares what a user would read with what the page quotes.
The last test compares both: no entry without a test, no test without an entry.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, ReduceOp, SharedState, TensorInfo
from pccl._core.master.events import PeerSaid, PeerWent
from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.hellos import ClientHello
from pccl._core.protocol.messages import EdgeLost, ReduceFailed
from pccl._core.protocol.outcomes import KIND_PLAIN
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.errors import (
    KickedError,
    MasterConnectionError,
    MasterLostError,
    PCCLError,
    PeerLostError,
    TooFewPeersError,
    error_from_outcome,
)
from tests.unit._core.master.master_harness import running, sent

from . import test_liveness, test_waits  # noqa: F401 - they test entries of the page too
from .helpers import (
    BOUND,
    Peers,
    Script,
    actor_pid,
    background,
    eventually,
    everybody,
    free_port,
    peers_of,
    quick,
    ring_order,
    running_master,
    stopped_fetchers,
)
from .raw_client import framed
from .troubleshooting_page import QUOTES, TESTED, TITLES, check, explains


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


@pytest.fixture
def pair(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0) as peers:
        yield peers


def fail_to_connect(address: str, **options: Any) -> str:
    """Return the message of a connect() that fails."""
    with Communicator(address, options=quick(**options)) as peer:
        with pytest.raises(MasterConnectionError) as caught:
            peer.connect(n_attempts=2)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- reaching the master


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that is no master; it calls `answer` for each connection, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    held.append(connection)
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            # A thread in accept wakes up when its socket is shut down, not when it is closed.
            server.shutdown(socket.SHUT_RDWR)
            thread.join(BOUND)
            for connection in held:
                connection.close()


@explains("Nothing listens")
def test_no_master_runs() -> None:
    """Goal: the message has the address, and says that nothing listens there."""
    check("Nothing listens", fail_to_connect(f"127.0.0.1:{free_port()}"))


@explains("Something else listens")
def test_the_port_of_a_web_server() -> None:
    """Goal: the message says that this is not pccl, rather than how its bytes decode."""

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with listening(answer) as address:
        check("Something else listens", fail_to_connect(address))


@explains("Something listens and says nothing")
def test_the_port_of_something_silent() -> None:
    """Goal: the wait for an answer has a bound, and the message says what happened."""
    with listening(lambda _: None) as address:
        message = fail_to_connect(address, connect_timeout=0.2, handshake_timeout=0.2)

    check("Something listens and says nothing", message)


@explains("The name is unknown")
def test_a_name_that_nobody_knows() -> None:
    """Goal: the message quotes the name, and says that it is unknown."""
    check("The name is unknown", fail_to_connect("no-such-host.invalid:48148"))


@explains("The address is invalid")
@pytest.mark.parametrize("text", ["10.0.0.7", "10.0.0.7:http", ":48148"])
def test_an_address_without_a_port(text: str) -> None:
    """Goal: the message shows a correct example, before anything is sent."""
    with pytest.raises(ValueError) as caught:
        Communicator(text)

    check("The address is invalid", caught.value)


@explains("The token differs, or is missing on one side")
@pytest.mark.parametrize(("theirs", "ours"), [("secret", "another"), ("secret", ""), ("", "secret")])
def test_tokens_that_differ(theirs: str, ours: str) -> None:
    """Goal: a wrong token and a missing token, on either side, are named as the reason."""
    with running_master(quick(token=theirs)) as master:
        check("The token differs, or is missing on one side", fail_to_connect(master.address, token=ours))


@explains("Different releases")
def test_a_master_of_another_release() -> None:
    """Goal: both versions are named."""
    with listening(
        lambda connection: connection.sendall(framed(ClientHello(bytes(32)), PROTOCOL_VERSION + 1))
    ) as address:
        check("Different releases", fail_to_connect(address))


@explains("The master's port is taken")
def test_a_second_master(master: MasterNode) -> None:
    """Goal: one line, no traceback."""
    with Script.command(sys.executable, "-m", "pccl.cli", "run-master", "--listen", master.address) as script:
        assert script.end() == 1
        (line,) = script.errors().splitlines()

    check("The master's port is taken", line)


# ---------------------------------------------------------------------------------------------- being let in


@explains("A newcomer waits")
@explains("Members keep a newcomer waiting")
def test_a_forgotten_update_topology(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: after vote_warning both sides are told what to do; the member reads it in its next call."""
    caplog.set_level(logging.WARNING, "pccl.peer")

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    with running_master(quick(vote_warning=0.3)) as master, peers_of(master.address, 0) as peers:
        joining = background(peers.newcomer().connect)
        told = eventually(lambda: [line for line in warnings() if line.startswith("not admitted")], "it is told")[0]
        check("A newcomer waits", told)

        # are_peers_pending admits no peer, but shows the member the notices of its actor.
        eventually(
            lambda: peers[0].are_peers_pending() and any("cannot join" in line for line in warnings()), "told too"
        )
        told = next(line for line in warnings() if "cannot join" in line)
        check("Members keep a newcomer waiting", told)
        peers[0].update_topology()
        joining.result()


@explains("Too few peers in time")
def test_waiting_for_peers_that_do_not_come(pair: Peers) -> None:
    """Goal: the message says how many peers there are, of how many, in which group."""

    def act(peer: Communicator, _: int) -> str:
        with pytest.raises(TooFewPeersError) as caught:
            peer.wait_for_world_size(3, timeout=0.3)
        return str(caught.value)

    for message in everybody(pair, act):
        check("Too few peers in time", message)
        assert "2 of 3 peers are in group 0 after 0.3 s" in message


# ---------------------------------------------------------------------------------------------- calls out of place

ONES = np.ones(8, np.float32)

CALLS: dict[str, Callable[[Communicator], object]] = {
    "update_topology": lambda peer: peer.update_topology(),
    "are_peers_pending": lambda peer: peer.are_peers_pending(),
    "wait_for_world_size": lambda peer: peer.wait_for_world_size(2),
    "all_reduce": lambda peer: peer.all_reduce(ONES, ONES.copy(), op=ReduceOp.SUM),
    "all_reduce_async": lambda peer: peer.all_reduce_async(ONES, ONES.copy(), op=ReduceOp.SUM),
}


def refusal(call: Callable[[Communicator], object], peer: Communicator) -> str:
    """Return the message of a call that is wrong here."""
    with pytest.raises(PCCLError) as caught:
        call(peer)
    return str(caught.value)


@explains("Not connected")
@pytest.mark.parametrize("name", CALLS)
def test_a_forgotten_connect(name: str) -> None:
    """Goal: every call gives the remedy."""
    check("Not connected", refusal(CALLS[name], Communicator("127.0.0.1:48148")))


@explains("Closed")
@pytest.mark.parametrize("name", CALLS)
def test_a_closed_communicator(master: MasterNode, name: str) -> None:
    """Goal: the message for closed differs from the one for never connected, and its remedy works."""
    with Communicator(master.address, options=quick()) as peer:
        peer.connect()
    check("Closed", refusal(CALLS[name], peer))
    with peer:
        peer.connect()


@explains("After a fork")
def test_a_communicator_of_the_parent(master: MasterNode) -> None:
    """Goal: the message in a forked child names the owning process; the parent continues."""
    code = """
    peer = join()
    child = os.fork()
    if child == 0:
        try:
            peer.update_topology()
        except UsageError as error:
            say("told", error)
        os._exit(0)
    os.waitpid(child, 0)
    peer.update_topology()
    peer.close()
    """
    with Script(code, master.address) as script:
        check("After a fork", script.expect("told"))
        assert script.end() == 0


@explains("Alone")
def test_a_reduce_of_one(master: MasterNode) -> None:
    """Goal: TOO_FEW_PEERS, and the message names the call that waits for others."""
    with peers_of(master.address, 0) as peers:
        check("Alone", refusal(CALLS["all_reduce"], peers[0]))


@explains("Reduces that were not awaited")
@explains("A tag in use")
def test_a_handle_that_was_forgotten(pair: Peers) -> None:
    """Goal: both the round that it forbids and the tag that it holds are explained; after wait() both work."""

    def act(peer: Communicator, _: int) -> None:
        handle = peer.all_reduce_async(ONES, ONES.copy(), op=ReduceOp.SUM, tag=7)
        check("Reduces that were not awaited", refusal(CALLS["update_topology"], peer))
        again = partial(peer.all_reduce_async, ONES, ONES.copy(), op=ReduceOp.SUM, tag=7)
        check("A tag in use", refusal(lambda _: again(), peer))
        assert handle.wait()[0]
        peer.update_topology()
        assert again().wait()[0]

    everybody(pair, act)


@explains("Calls that can never meet")
def test_one_reduces_while_the_other_holds_a_round(pair: Peers) -> None:
    """Goal: both messages name the call that the other peer is in."""

    def act(peer: Communicator, rank: int) -> str:
        return refusal(CALLS["all_reduce" if rank else "update_topology"], peer)

    for message in everybody(pair, act):
        check("Calls that can never meet", message)
        assert "peer 1 in update_topology" in message
        assert "peer 2 in all_reduce (tag 0)" in message


# ---------------------------------------------------------------------------------------------- tensors


@explains("Peers reduce different things")
@pytest.mark.parametrize(
    ("array", "op", "side"),
    [
        (np.ones(9, np.float32), ReduceOp.SUM, "9 x FLOAT, SUM"),
        (np.ones(8, np.float64), ReduceOp.SUM, "8 x DOUBLE, SUM"),
        (np.ones(8, np.float32), ReduceOp.MAX, "8 x FLOAT, MAX"),
    ],
    ids=["count", "dtype", "op"],
)
def test_tensors_that_do_not_match(pair: Peers, array: np.ndarray[Any, Any], op: ReduceOp, side: str) -> None:
    """Goal: the message names both signatures, on both peers."""

    def act(peer: Communicator, rank: int) -> str:
        given = (array, op) if rank else (ONES, ReduceOp.SUM)
        return refusal(lambda peer: peer.all_reduce(given[0], given[0].copy(), op=given[1]), peer)

    first, second = [peer.peer_id for peer in ring_order(pair)]
    for message in everybody(pair, act):
        check("Peers reduce different things", message)
        assert f"peer {first}: 8 x FLOAT, SUM" in message
        assert f"peer {second}: {side}" in message


def refuse_tensors(title: str, peer: Communicator, send: Any, recv: Any) -> None:
    """Check that a reduce of these tensors is refused as the page says."""
    with pytest.raises(AssertionError) as caught:
        peer.all_reduce(send, recv, op=ReduceOp.SUM)
    check(title, caught.value)


@explains("Not contiguous (numpy)")
@explains("Send and receive differ")
def test_arrays_that_cannot_be_reduced(pair: Peers) -> None:
    """Goal: refused before any message is sent, with the call that fixes it."""
    gaps = np.ones((4, 4), np.float32).T[:2]
    refuse_tensors("Not contiguous (numpy)", pair[0], gaps, gaps)
    refuse_tensors("Send and receive differ", pair[0], ONES, np.ones(9, np.float32))


@explains("Not contiguous (torch)")
def test_a_torch_tensor_that_cannot_be_reduced(pair: Peers) -> None:
    """Goal: the same for torch, whose remedy has another name."""
    torch = pytest.importorskip("torch")
    gaps = torch.ones(4, 4).T[:2]
    refuse_tensors("Not contiguous (torch)", pair[0], gaps, gaps)


# ---------------------------------------------------------------------------------------------- losing each other


@explains("A peer was lost")
@explains("A connection between two peers broke")
@pytest.mark.parametrize(
    ("title", "event"),
    [
        ("A peer was lost", PeerWent(3, "it was killed")),
        ("A connection between two peers broke", PeerSaid(2, EdgeLost(2, 2, 3, "closed by the other side"))),
    ],
)
def test_the_lost_peer_is_named(title: str, event: PeerSaid | PeerWent) -> None:
    """Goal: the verdict names the cause, whichever event is first. In the master's machine, because they race."""
    harness = running(1, 2, 3)
    verdict = sent(harness.wire(harness.feed(event)), ReduceFailed)[1]

    check(title, error_from_outcome(verdict.result, KIND_PLAIN, "all_reduce", verdict.reason))


@explains("The master is gone")
def test_somebody_is_gone(master: MasterNode, pair: Peers) -> None:
    """Goal: the message names the lost peer; the loss of a peer and of the master are different errors."""
    survivor, victim = pair
    reducing = background(lambda: survivor.all_reduce(ONES, ONES.copy(), op=ReduceOp.SUM))
    eventually(lambda: query_status(*parse_address(master.address), quick())["votes"], "the master has its vote")
    os.kill(actor_pid(victim), 9)
    lost = reducing.error()
    assert isinstance(lost, PeerLostError)
    check("A peer was lost" if "was lost" in str(lost) else "A connection between two peers broke", lost)
    master.interrupt()
    with pytest.raises(MasterLostError) as caught:
        survivor.update_topology()

    check("The master is gone", caught.value)


@explains("All peers with the state were lost")
@explains("The state cannot be fetched")
@pytest.mark.parametrize(
    ("fault", "title", "error"),
    [
        ("state.fetch.manifest:1:stop", "All peers with the state were lost", PeerLostError),
        ("state.fetch.FetchManifest:1:kill", "The state cannot be fetched", KickedError),
    ],
)
def test_a_state_that_does_not_come(
    master: MasterNode, monkeypatch: pytest.MonkeyPatch, fault: str, title: str, error: type[PCCLError]
) -> None:
    """Goal: two errors: all sources are lost, or the newcomer cannot reach a source that other peers can reach."""
    states = [SharedState([TensorInfo.from_numpy(np.full(10, value), "weights")]) for value in (1.0, 0.0)]
    with peers_of(master.address, 0) as peers:
        peers[0].sync_shared_state(states[0])
        states[0].push_revision()
        monkeypatch.setenv("PCCL_FAULT", fault)
        newcomer = peers.newcomer()
        peers.admit(newcomer)
        monkeypatch.undo()
        veteran, receiving = (background(partial(p.sync_shared_state, s)) for p, s in zip(peers, states, strict=True))
        if error is PeerLostError:
            eventually(lambda: stopped_fetchers(newcomer), "the newcomer is in the middle")
            os.kill(actor_pid(peers[0]), 9)
            assert isinstance(veteran.error(), MasterLostError)
        else:
            assert veteran.result().rx_bytes == 0
        failure = receiving.error()

    assert isinstance(failure, error)
    check(title, failure)


@explains("A member is overwritten")
@explains("A member is outdated")
def test_a_member_that_diverges(pair: Peers, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the warnings of a different step and of a forgotten push_revision are those of the page."""
    arrays = [np.zeros(10) for _ in pair]
    states = [SharedState([TensorInfo.from_numpy(array, "weights")]) for array in arrays]

    def act(peer: Communicator, rank: int) -> None:
        for own_pushes in (1, 1 - rank):
            peer.sync_shared_state(states[rank])
            arrays[rank] += rank
            states[rank].revision += own_pushes
        peer.sync_shared_state(states[rank])

    everybody(pair, act)
    first, second = [record.getMessage() for record in caplog.records if "overwrote" in record.getMessage()]
    check("A member is overwritten", first)
    check("A member is outdated", second)


# ---------------------------------------------------------------------------------------------- the page


def test_the_page_and_the_tests_know_the_same_mistakes() -> None:
    """Goal: each entry of the page has a test here or in the modules named here, and each test has an entry."""
    for module in (".test_odd_ones", ".test_beginner_runs"):
        importlib.import_module(module, __package__)
    assert set(TITLES) == set(QUOTES) == TESTED


def test_messages_are_short() -> None:
    """Goal: each message is one or two sentences."""
    assert all(len(quote) < 330 for quote in QUOTES.values()), max(QUOTES.values(), key=len)

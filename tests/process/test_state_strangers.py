"""Wrong requests and wrong answers on a state link: only that link ends, with a reason, and other links continue."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from pccl._core.kernels.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.peer.events import StateFetched, StateUnfetched
from pccl._core.protocol.codec import PROTOCOL_VERSION, decode
from pccl._core.protocol.handshake import Admit, Caller, PendingConnections, Say
from pccl._core.protocol.hellos import HANDSHAKE_TO_PEER, JoinState, Refused
from pccl._core.protocol.sources import Source
from pccl._core.protocol.state_manifest import StateManifest, pack_manifest
from pccl._core.protocol.state_stream import (
    ANSWER,
    ASK_MANIFEST,
    MAGIC,
    REQUEST,
    UNIT,
    UnitRequest,
    pack_answer,
    pack_request,
)
from pccl._core.records import replace
from pccl.actors.io.framing import FrameReader
from tests.leaks import has_ended

from .helpers import BOUND, eventually
from .raw_client import RawClient, framed
from .state_peers import RUN, TOKEN, StatePeer, peers_with

MIB = 1 << 20
STATE, STALE = {"a": Random(1).randbytes(8 * MIB)}, {"a": bytes(8 * MIB)}


# ---------------------------------------------------------------------------------------------- callers


@pytest.fixture
def source() -> Iterator[StatePeer]:
    """Yield a source that serves round 1; check at the end that it still does."""
    with peers_with(STATE, STALE) as (peer, sink):
        content = peer.serve().content_digest()
        yield peer
        sink.fetch(content, peer)
        assert sink.hear() == StateFetched(1)
        eventually(lambda: len(peer.workers()) == 1, "no other link is served any more")


def client_at(source: StatePeer, token: bytes = TOKEN) -> RawClient:
    return RawClient(f"127.0.0.1:{source.port}", token)


def joined(source: StatePeer) -> RawClient:
    client = client_at(source)
    client.handshake(lambda proof: JoinState(proof, RUN, 1, source.peer, 9))
    return client


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": bytes(16)}, "another peer, or another run"),
        ({"source": 7}, "another peer, or another run"),
        ({"round": 2}, "round 2 is not served here"),
    ],
)
def test_a_hello_for_something_else_is_refused(source: StatePeer, change: dict[str, object], reason: str) -> None:
    with client_at(source) as client, pytest.raises(PermissionError, match=reason):
        client.handshake(lambda proof: replace(JoinState(proof, RUN, 1, source.peer, 9), **change))


def test_without_the_token_there_is_nothing_to_fetch(source: StatePeer) -> None:
    with client_at(source, b"guessed") as client, pytest.raises(PermissionError, match="PCCL_TOKEN"):
        client.handshake(lambda proof: JoinState(proof, RUN, 1, source.peer, 9))


def test_a_caller_that_speaks_while_it_is_held_is_shut_out(source: StatePeer) -> None:
    caller = Caller(TOKEN, os.urandom(32), lambda proof: JoinState(proof, RUN, 2, source.peer, 9))
    with client_at(source) as client:
        client.say(caller.opening())
        hello = caller.received(client.hear(object))
        client.send(framed(hello) + bytes(100))
        # Without a reason here: only a link that is held until its timeout receives one.
        with pytest.raises((EOFError, ConnectionResetError)):
            client.hear(Refused)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(Random(3).randbytes(REQUEST.size), id="noise"),
        pytest.param(struct.pack("<IIIII", MAGIC, 9, 0, 0, 1), id="a kind that is none"),
        pytest.param(pack_request(UnitRequest(UNIT, 1, 0, 1)), id="a key that is none"),
        pytest.param(pack_request(UnitRequest(UNIT, 0, 31, 2)), id="beyond the end"),
        pytest.param(pack_request(UnitRequest(UNIT, 0, 0, 17)), id="more than a unit"),
    ],
)
def test_a_request_that_cannot_be_answered_ends_the_link(source: StatePeer, data: bytes) -> None:
    with joined(source) as client:
        client.send(data)
        assert client.is_turned_away()


def test_half_a_request_keeps_nobody() -> None:
    """Goal: while the rest of a request is missing, others are served; the rest is answered, or the round ends."""
    request = pack_request(ASK_MANIFEST)
    with peers_with(STATE, STALE) as (source, sink):
        content = source.serve().content_digest()
        answer = manifest_answer(pack_manifest(manifest_of(STATE, source).rows))
        with joined(source) as client:
            client.send(request[:7])
            waiting = source.worker()
            eventually(lambda: unread_bytes(source.port, client.port) == 0, "the worker has read the first half")
            sink.fetch(content, source)
            assert sink.hear() == StateFetched(1)
            assert waiting.pid in {one.pid for one in source.workers()}, "it was given up, but blocked no link"
            client.send(request[7:] + request[:7])
            assert client.read(len(answer)) == answer
            source.end()
            assert client.is_turned_away()
            assert has_ended(waiting)


def unread_bytes(port: int, remote_port: int) -> int:
    """Return how many bytes from that remote port are unread at a port of this host; fail if there is no connection."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        if (int(local.split(":")[1], 16), int(remote.split(":")[1], 16)) == (port, remote_port):
            return int(queues.split(":")[1], 16)
    raise AssertionError(f"no connection from port {remote_port} to port {port}")


def test_a_caller_that_asks_and_does_not_read_is_given_up(source: StatePeer) -> None:
    """Goal: a link that takes no byte for the stall limit is closed, whatever was asked for on it."""
    with joined(source) as client:
        client.send(pack_request(UnitRequest(UNIT, 0, 0, 16)) * 100)
        worker = source.worker()
        eventually(
            lambda: not worker.is_running() or worker.pid not in {one.pid for one in source.workers()}, "it ends"
        )


# ---------------------------------------------------------------------------------------------- sources


class Liar:
    """A simulated source: it does a correct handshake, and then what the test says."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(BOUND)
        self.source = Source(7, "127.0.0.1", self._listener.getsockname()[1])
        self.calls = 0
        self._lock = threading.Lock()  # a connection that arrives while we close is shut down or never served
        self._is_closed = False
        self._sock: socket.socket | None = None  # the last connection
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with self._lock:
                    if self._is_closed:
                        sock.close()
                        return
                    self.calls += 1
                    self._sock = sock
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(BOUND)
                    self._shake_hands(sock)
                    self._answer(sock)
                    while sock.recv(65536):
                        pass

    def _shake_hands(self, sock: socket.socket) -> None:
        pending = PendingConnections(TOKEN, JoinState, lambda: os.urandom(32), 10**12, 8)
        pending.arrived(1, "here", 0)
        reader = FrameReader(HANDSHAKE_TO_PEER, PROTOCOL_VERSION)
        while 1 in pending:
            data = sock.recv(65536)
            if not data:
                raise ConnectionResetError("the caller closed the connection in the handshake")
            for opcode, body in reader.feed(data):
                for action in pending.received(1, decode(opcode, body)):
                    assert isinstance(action, Say | Admit)
                    sock.sendall(framed(action.message if isinstance(action, Say) else action.welcome))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # closed already
                    self._sock.shutdown(socket.SHUT_RDWR)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(BOUND)
        assert not self._thread.is_alive()


def manifest_of(state: dict[str, bytes], peer: StatePeer) -> StateManifest:
    """Return the manifest that a correct peer with that state sends."""
    return StateManifest(StateManifest(pack_manifest([peer._row(name) for name in sorted(state)])).without_locations())


MANIFEST_HEADER = ANSWER.pack(MAGIC, 1, 0, 0, 0, 1 << 40)


def manifest_answer(manifest: bytes) -> bytes:
    return pack_answer(ASK_MANIFEST, len(manifest)) + manifest


@pytest.mark.parametrize(
    ("distort_table", "distort_unit", "reason"),
    [
        pytest.param(lambda _: b"", None, "closed by the other side", id="hangs up"),
        pytest.param(lambda _: Random(3).randbytes(100), None, "something else than it was asked for", id="noise"),
        pytest.param(lambda _: MANIFEST_HEADER, None, "announced 1099511627776 bytes, where", id="a huge manifest"),
        pytest.param(lambda manifest: manifest_answer(manifest[:-1]), None, "bytes, where", id="a short manifest"),
        pytest.param(lambda manifest: manifest_answer(bytes(len(manifest))), None, "cannot be read", id="zeros"),
        pytest.param(
            lambda manifest: manifest_answer(manifest)[:-1], None, "closed by the other side", id="half a manifest"
        ),
        pytest.param(
            lambda manifest: manifest_answer(manifest[:-8] + bytes(8)), None, "do not add up", id="wrong digests"
        ),
        pytest.param(None, lambda unit: unit[:-1] + b"!", "is not what its manifest says", id="a flipped byte"),
        pytest.param(None, lambda unit: b"?" + unit, "something else than it was asked for", id="a byte too many"),
        pytest.param(None, lambda unit: unit[: MIB // 2], "closed by the other side", id="half a unit"),
        pytest.param(None, lambda _: MANIFEST_HEADER, "something else than it was asked for", id="a manifest again"),
    ],
)
def test_a_source_that_lies_is_left(
    distort_table: Callable[[bytes], bytes] | None, distort_unit: Callable[[bytes], bytes] | None, reason: str
) -> None:
    """Goal: the link ends with the reason, dialling that source has a bound, and a correct source serves all units."""
    with peers_with(STATE, STALE) as (honest, sink):
        content = honest.serve().content_digest()
        manifest = pack_manifest(manifest_of(STATE, honest).rows)
        blocks = STATE["a"][: 16 * BLOCK]
        unit = pack_answer(UnitRequest(UNIT, 0, 0, 16), len(blocks)) + blocks

        def lie(sock: socket.socket) -> None:
            while request := sock.recv(REQUEST.size, socket.MSG_WAITALL):
                asked_for_manifest = request == pack_request(ASK_MANIFEST)
                distort = distort_table if asked_for_manifest else distort_unit
                if distort is not None:
                    sock.sendall(distort(manifest if asked_for_manifest else unit))
                    sock.shutdown(socket.SHUT_WR)
                    return
                sock.sendall(manifest_answer(manifest) if asked_for_manifest else unit)

        liar = Liar(lie)
        try:
            sink.fetch(content, sources=(liar.source,))
            failed = sink.hear()
            assert isinstance(failed, StateUnfetched)
            assert "peer 7: " in failed.reason
            assert reason in failed.reason
            assert liar.calls <= 4
            sink.end()
            sink.fetch(content, sources=(liar.source, honest.source))
            assert sink.hear() == StateFetched(1)
            assert sink.tensors["a"].tobytes() == STATE["a"]
        finally:
            liar.close()


def test_what_nobody_asked_for_ends_the_link() -> None:
    with peers_with(STATE, STALE) as (honest, sink):
        content = honest.serve().content_digest()
        manifest = manifest_answer(pack_manifest(manifest_of(STATE, honest).rows))
        liar = Liar(lambda sock: sock.sendall(manifest + manifest))
        try:
            sink.fetch(content, sources=(liar.source,))
            failed = sink.hear()
            assert isinstance(failed, StateUnfetched)
            assert "without a request" in failed.reason or "something else" in failed.reason
        finally:
            liar.close()

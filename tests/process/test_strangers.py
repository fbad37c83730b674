"""Foreign connections to the ports of a healthy run: each is refused and counted, and the members are not disturbed.

A master runs in its own process, with its log on standard error; two members here hold topology rounds all the time.
Each attack is made twice on either kind of port: the first of its kind is a warning, further ones are only counted.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pccl import Attribute, Communicator, Result
from pccl._core.protocol.codec import PROTOCOL_VERSION
from pccl._core.protocol.hellos import Challenge, ClientHello, JoinLane, Refused, Welcome
from pccl._core.protocol.messages import Registered, Wired
from pccl._core.records import replace
from pccl.actors.io.addresses import parse_address
from pccl.actors.io.framing import HEADER_BYTES
from pccl.errors import MasterConnectionError, UsageError
from pccl.options import PENDING_CONNECTIONS_MAX
from tests.readable import is_readable

from .helpers import BOUND, Script, background, eventually, free_port, peers_of, quick
from .raw_client import RawClient, framed

TOKEN = "a secret that never travels"
# Longer than a test, so that no member of a busy machine is taken for a foreign program. A test that waits for one of
# them gives another value to its run.
OPTIONS = quick(token=TOKEN, heartbeat_timeout=10.0, handshake_timeout=60.0, wire_timeout=60.0)
SILENT_CONNECTIONS = 1000
STEP = 0.02  # seconds of training between two rounds


class HealthyRun:
    """A master and two members that hold topology rounds while a test attacks their ports."""

    def __init__(self, script: Script, master: str, peers: list[Communicator], peer_log: Callable[[], str]) -> None:
        self.ports = {"master": master, "peer": f"127.0.0.1:{peers[0]._options.port}"}
        self._logs: dict[str, Callable[[], str]] = {"master": script.errors, "peer": peer_log}
        self.attacked, self.neighbour = peers[0].peer_id, peers[1].peer_id  # the port's owner, and the other member
        self._peers = peers
        self._rounds = [0] * len(peers)
        self._over = False
        self._members = [background(lambda index=index: self._train(index)) for index in range(len(peers))]

    def _train(self, index: int) -> None:
        peer = self._peers[index]
        while not self._over:
            try:
                peer.update_topology()
            except UsageError:
                assert self._over, "only its own end may end a healthy member"
                return
            if peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
                assert self._over, "both stay until the end, when they leave one after the other"
                return
            self._rounds[index] += 1
            # A step of training, so that the host has time for the attacks too.
            time.sleep(STEP)

    def goes_on(self) -> None:
        """Check that both members complete further rounds with a world size of two."""
        wanted = [rounds + 3 for rounds in self._rounds]
        eventually(
            lambda: (
                all(done >= want for done, want in zip(self._rounds, wanted, strict=True))
                or any(member.ended.is_set() for member in self._members)
            ),
            "the healthy members go on",
        )
        for member in self._members:
            assert not member.ended.is_set(), member.error()

    def lines(self, port: str, kind: str) -> list[tuple[str, int]]:
        """Return level and running total of each refusal of this kind that the owner of the port has logged."""
        pattern = rf"(\w+) +pccl\.\w+\S* refused a connection kind={kind} total=(\d+): 127\.0\.0\.1"
        return [(level, int(total)) for level, total in re.findall(pattern, self._logs[port]())]

    def log_of(self, port: str) -> str:
        """Return everything that the owner of the port has logged."""
        return self._logs[port]()

    def end(self) -> None:
        """Stop training: all members leave, whichever call they are in. A member that failed before fails the test."""
        self._over = True
        for peer in self._peers:
            peer.close()
        for member in self._members:
            member.result()


@pytest.fixture
def run(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[HealthyRun]:
    """Yield a healthy run. The parameter, if any, is a dict with other options."""
    options = replace(OPTIONS, **getattr(request, "param", {}))
    # Members whose rounds never wait collect their actor's log lines only now and then; this test needs them at once.
    monkeypatch.setattr("pccl.client.actor_client.NOTICE_INTERVAL_NS", 0)
    caplog.set_level(logging.DEBUG, "pccl.peer")
    caplog.handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    environment = {"PCCL_LOG_LEVEL": "DEBUG", "PCCL_TOKEN": TOKEN, "PCCL_CHECK": "1"}
    for name in ("heartbeat_interval", "heartbeat_timeout", "handshake_timeout", "wire_timeout"):
        environment[f"PCCL_{name.upper()}"] = str(getattr(options, name))
    command = [sys.executable, "-m", "pccl.master", "--listen-address", "127.0.0.1:0"]
    with Script.command(*command, **environment) as script:
        address = eventually(lambda: re.search(r"listening on (\S+)", script.errors()), "the master listens")[1]
        with peers_of(address) as peers:
            for _ in range(2):
                peers.newcomer(options=replace(options, port=free_port()))
            peers.admit(*peers)
            healthy = HealthyRun(script, address, list(peers), lambda: caplog.text)
            try:
                yield healthy
                healthy.goes_on()
            finally:
                healthy.end()
        assert "Traceback" not in script.errors()


# ---------------------------------------------------------------------------------------------- attacks


def random_bytes(client: RawClient) -> None:
    client.send(random.Random(7).randbytes(5000))


def huge_length(client: RawClient) -> None:
    hello = framed(ClientHello(bytes(32)))
    client.send(hello[:4] + struct.pack("<I", 0xFFFFFFFF) + hello[8:])


def half_a_header(client: RawClient) -> None:
    client.send(framed(ClientHello(bytes(32)))[: HEADER_BYTES // 2])


def flipped_bit(client: RawClient) -> None:
    hello = bytearray(framed(ClientHello(bytes(32))))
    hello[-1] ^= 1
    client.send(bytes(hello))


def unknown_message(client: RawClient) -> None:
    client.say(Wired(1))


def hello_twice(client: RawClient) -> None:
    client.say(ClientHello(bytes(32)))
    client.hear(Challenge)
    client.say(ClientHello(bytes(32)))


def hello_and_close(client: RawClient) -> None:
    client.say(ClientHello(bytes(32)))
    client.hear(Challenge)
    client.close()


HELD_OPEN = "half a header, held open"
ATTACKS: dict[str, tuple[Callable[[RawClient], None], str]] = {
    "random bytes": (random_bytes, "magic"),
    "a huge length": (huge_length, "length"),
    HELD_OPEN: (half_a_header, "silence"),
    "a flipped bit": (flipped_bit, "crc"),
    "a message of members": (unknown_message, "opcode"),
    "two client hellos": (hello_twice, "order"),
    "a client hello and no more": (hello_and_close, "closed"),
}


@pytest.mark.parametrize(
    ("attack", "run"),
    # Long enough for the handshakes of the members, and not too long to wait for.
    [(attack, {"handshake_timeout": 2.0} if attack == HELD_OPEN else {}) for attack in ATTACKS],
    indirect=["run"],
    ids=list(ATTACKS),
)
def test_garbage_is_turned_away(run: HealthyRun, attack: str) -> None:
    """Goal: closed, counted by kind, a warning once per host, and the run continues; on both kinds of port."""
    perform, kind = ATTACKS[attack]
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(RawClient(address)) for address in run.ports.values()]
            for client in clients:
                perform(client)
            for client in clients:
                assert kind == "closed" or client.is_turned_away()
    for port in run.ports:
        # A connection that closes within the handshake is more often a dead peer than an attack.
        expected = [("INFO" if kind == "closed" else "WARNING", 1), ("DEBUG", 2)]
        eventually(lambda: run.lines(port, kind) == expected, f"{port}: {expected} for {kind}")  # noqa: B023
    run.goes_on()


def test_another_version_is_told_both_versions(run: HealthyRun) -> None:
    """Goal: a caller with another version gets the versions of both sides in the refusal."""
    for port, address in run.ports.items():
        with RawClient(address) as client:
            client.send(framed(ClientHello(bytes(32)), version=PROTOCOL_VERSION + 1))
            refused = client.hear(Refused)

        assert refused.result == Result.INVALID_USAGE.value
        assert f"version {PROTOCOL_VERSION}" in refused.reason
        assert str(PROTOCOL_VERSION + 1) in refused.reason
        eventually(lambda: run.lines(port, "version") == [("WARNING", 1)], "it is counted")  # noqa: B023


@pytest.mark.parametrize("token", [b"", b"another secret"])
def test_a_wrong_token_learns_nothing(run: HealthyRun, token: bytes) -> None:
    """Goal: a caller without the token receives a challenge and a refusal with the remedy, and nothing else."""
    with RawClient(run.ports["master"], token) as client, pytest.raises(PermissionError, match="PCCL_TOKEN"):
        client.register()
    with RawClient(run.ports["peer"], token) as client, pytest.raises(PermissionError, match="PCCL_TOKEN"):
        client.join_lane(bytes(16), 1, 1, 2)

    for port in run.ports:
        eventually(lambda: run.lines(port, "token") == [("WARNING", 1)], "it is counted")  # noqa: B023
    assert "registered group=0 lanes=1 at=127.0.0.1:1\n" not in run.log_of("master")


def test_a_replayed_hello_fails(run: HealthyRun) -> None:
    """Goal: the recorded bytes of a real member are refused on another connection."""
    with Recorder(run.ports["master"]) as recorder:
        peer = Communicator(recorder.address, options=OPTIONS)
        peer.connect()
        peer.close()
        words = recorder.said()[0]
    assert words.count(framed(ClientHello(bytes(32)))[:4]) == 1
    hello_end = HEADER_BYTES + 32
    hello_end += HEADER_BYTES + struct.unpack_from("<I", words, hello_end + 4)[0]
    with RawClient(run.ports["master"]) as client:
        client.send(words[: HEADER_BYTES + 32])
        client.hear(Challenge)
        client.send(words[HEADER_BYTES + 32 : hello_end])

        assert "token" in client.hear(Refused).reason
    eventually(lambda: run.lines("master", "token") == [("WARNING", 1)], "it is counted")


def test_a_thousand_silent_connections(run: HealthyRun) -> None:
    """Goal: the oldest pending connection is closed for the newest, so that a flood does not block a peer."""
    count = min(SILENT_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    for port, address in run.ports.items():
        with contextlib.ExitStack() as crowd:
            silent = [crowd.enter_context(socket.create_connection(parse_address(address))) for _ in range(count)]
            eventually(lambda: is_readable(silent[0].fileno()), "the oldest makes room")  # noqa: B023
            assert not is_readable(silent[-1].fileno()), "the newest was refused, and not the oldest"
            with RawClient(address) as client:
                client.say(ClientHello(bytes(32)))
                client.hear(Challenge)
            run.goes_on()
            eventually(lambda: run.lines(port, "crowd"), "the crowd is noticed")  # noqa: B023

        levels = [level for level, _ in run.lines(port, "crowd")]
        assert levels[0] == "WARNING"
        assert levels.count("WARNING") == 1
    kinds = ("crowd", "closed")
    eventually(lambda: sum(len(run.lines("master", kind)) for kind in kinds) > count, "the master counted all of them")


class Flood:
    """Silent connections to one port, none of which is closed before the block ends."""

    def __init__(self, address: str) -> None:
        self._address = parse_address(address)
        self._held: list[socket.socket] = []
        self._pouring = threading.Lock()  # the recorder's threads call pour()

    def pour(self, count: int) -> None:
        """Open `count` more, one after the other."""
        with self._pouring:
            for _ in range(count):
                self._held.append(socket.create_connection(self._address, timeout=BOUND))

    def __enter__(self) -> Flood:
        return self

    def __exit__(self, *_: object) -> None:
        with self._pouring:
            for connection in self._held:
                connection.close()


# Silent connections that arrive before each of the two messages of a valid handshake: more than half of the limit of
# pending connections, and too few to make the valid connection the oldest.
POURED = PENDING_CONNECTIONS_MAX // 3


def test_a_flood_that_goes_on_keeps_nobody_out(run: HealthyRun) -> None:
    """Goal: with more silent connections than the limit, and more between its messages, a peer succeeds at first try.

    The handshake timeout is longer than the test, so only the eviction of the oldest pending connection makes room.
    """
    with Flood(run.ports["master"]) as at_master, Flood(run.ports["peer"]) as at_peer:
        for port, flood in (("master", at_master), ("peer", at_peer)):
            flood.pour(PENDING_CONNECTIONS_MAX + POURED)
            eventually(lambda: run.lines(port, "crowd"), f"{port}: the crowd is too large")  # noqa: B023
        crowds = {port: len(run.lines(port, "crowd")) for port in run.ports}
        with RawClient(run.ports["peer"], TOKEN.encode()) as client:
            hello = partial(JoinLane, run=bytes(16), epoch=1, source=run.neighbour, target=run.attacked, lane=0)
            with pytest.raises(PermissionError, match="another run"):  # only a caller with the token gets this reason
                client.handshake(hello, before_each=lambda: at_peer.pour(POURED))
        with (
            Recorder(run.ports["master"], before_hello=lambda: at_master.pour(POURED)) as relay,
            Communicator(relay.address, options=OPTIONS) as newcomer,
        ):
            newcomer.connect(n_attempts=1)
            assert newcomer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 3
        for port, count in crowds.items():
            eventually(lambda: len(run.lines(port, "crowd")) >= count + 2 * POURED, f"{port}: more came")  # noqa: B023
        run.goes_on()


# ---------------------------------------------------------------------------------------------- lanes of others


@pytest.mark.parametrize("run", [{"wire_timeout": 3.0}], indirect=True, ids=["a lane is held for 3 s"])
def test_lanes_of_another_run_or_time_are_refused(run: HealthyRun) -> None:
    """Goal: a caller that holds the token and is not part of this ring gets the reason, and the ring stays whole."""
    with RawClient(run.ports["master"], TOKEN.encode()) as client:
        client.register(group=9)
        known = client.hear(Registered)
    cases = [
        ((bytes(16), 2, run.neighbour, run.attacked), "another run"),
        ((known.run, 2, run.neighbour, 77), "maybe of another run"),
        ((known.run, 0, run.neighbour, run.attacked), "epoch 0 is over"),
        ((known.run, 99, run.neighbour, run.attacked), "no order for epoch 99 came"),
    ]
    for lane, reason in cases:
        with RawClient(run.ports["peer"], TOKEN.encode()) as client, pytest.raises(PermissionError, match=reason):
            client.join_lane(*lane)
    for _, reason in cases:
        eventually(lambda: re.search(f"refused a lane: .*{reason}", run.log_of("peer")), reason)  # noqa: B023
    run.goes_on()


# ---------------------------------------------------------------------------------------------- the token


def test_a_peer_without_the_token_is_told_at_once(run: HealthyRun) -> None:
    """Goal: connect fails with the remedy at the first attempt, because a second attempt would be refused too."""
    for token in ("", "another secret"):
        peer = Communicator(run.ports["master"], options=quick(token=token, retry_interval=60.0))
        with pytest.raises(MasterConnectionError, match="PCCL_TOKEN") as caught:
            peer.connect(n_attempts=5)

        assert caught.value.result is Result.MASTER_CONNECTION_FAILED
        assert TOKEN not in str(caught.value)


def test_the_token_never_travels(run: HealthyRun) -> None:
    """Goal: neither side sends the token, as a proxy that records every byte shows."""
    with Recorder(run.ports["master"]) as recorder:
        with Communicator(recorder.address, options=OPTIONS) as peer:
            peer.connect()
        eventually(lambda: len(recorder.said()[0]) > 100, "something was said")
        words = b"".join(recorder.said())

    assert TOKEN.encode() not in words
    assert TOKEN not in run.log_of("master")
    assert TOKEN not in run.log_of("peer")


def test_an_impostor_is_recognised() -> None:
    """Goal: a peer accepts only a master that proves that it holds the token."""

    def pose_as_master(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(framed(Challenge(bytes(32))))
            connection.recv(4096)
            connection.sendall(framed(Welcome(bytes(32))))
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        impostor = background(lambda: pose_as_master(listener))
        peer = Communicator(f"127.0.0.1:{listener.getsockname()[1]}", options=OPTIONS)
        with pytest.raises(MasterConnectionError, match="does not hold this run's token"):
            peer.connect(n_attempts=5)
        impostor.result()


class Recorder:
    """A proxy in front of a port that records the bytes of both sides.

    `before_hello` is called before each of the two messages of the caller's handshake is passed on.
    """

    def __init__(self, target: str, before_hello: Callable[[], None] = lambda: None) -> None:
        self._target = parse_address(target)
        self._before_hello = before_hello
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._words = [bytearray(), bytearray()]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def said(self) -> tuple[bytes, bytes]:
        """Return the bytes that callers sent, and the bytes that they received."""
        return bytes(self._words[0]), bytes(self._words[1])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                target = socket.create_connection(self._target)
                self._sockets += [caller, target]
                for way in ((caller, target, self._words[0], 2), (target, caller, self._words[1], 0)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=way, daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, words: bytearray, hellos: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if hellos:
                    hellos -= 1
                    self._before_hello()
                words += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        # A thread in accept or recv wakes up when its socket is shut down, not when it is closed.
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()


def test_a_master_without_descriptors_serves_its_members() -> None:
    """Goal: foreign connections use all descriptors; members continue, one log line says so, newcomers join later."""
    code = """
        import resource
        from pccl.master import main
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        main(["--listen-address", "127.0.0.1:0"])
    """
    with Script(code, PCCL_LOG_LEVEL="INFO") as master:
        found = eventually(lambda: re.search(r"listening on 127.0.0.1:(\d+)\n", master.errors()), "the master listens")
        port = int(found[1])
        with peers_of(f"127.0.0.1:{port}", 0) as peers:
            with contextlib.ExitStack() as connections:
                for _ in range(80):
                    connections.enter_context(socket.create_connection(("127.0.0.1", port)))
                eventually(lambda: "cannot accept" in master.errors(), "the master runs out of descriptors")
                for _ in range(100):
                    peers[0].update_topology()

                assert master.errors().count("cannot accept") == 1
            joining = background(peers.newcomer().connect)
            peers[0].wait_for_world_size(2, timeout=15)
            joining.result()

"""The handshake: how a pending connection proves that it belongs to the run, in two round trips, before anything else.

    caller                                   answerer
      ClientHello(nonce) ──────────────────────────▶        no secret, no name: neither side is trusted yet
           ◀────────────────────────── Challenge(nonce)
      Hello(proof, what it wants) ───────────▶        proof = HMAC(token, "caller", both nonces, the hello's fields)
           ◀──────────────────── Welcome(proof)       proof = HMAC(token, "answerer", both nonces, the caller's proof)

The token itself is never sent. A hello that is replayed fails because the challenge is new; a hello that was altered
fails because the proof covers its fields. The answerer proves itself last, so that a client without the token cannot
collect proofs from it. A run without a token uses the empty one: the same steps, no second path.

`PendingConnections` has the pending connections of one port: it limits their number and their time, and counts the
refused ones by kind. Pure: it takes decoded messages and times, and returns actions.
"""

from __future__ import annotations

import hmac

from pccl._core.records import record

from .codec import encode
from .hellos import WRONG_PORT, Challenge, ClientHello, Refused, Welcome
from .outcomes import INVALID_USAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NONCE_BYTES = 32  # random, so that none is ever used twice
PROOF_BYTES = 32  # an HMAC with SHA-256; the first field of every hello


@record
class Say:
    """Send this message on the pending connection."""

    conn: int
    message: Any


@record
class Admit:
    """The client's proof is right: give its hello to the machine, and send `welcome` if the machine accepts it."""

    conn: int
    hello: Any
    welcome: Welcome


@record
class Refuse:
    """Close the connection. `first`: it is the first refusal of this kind from this host, and gets a log line."""

    conn: int
    kind: str
    reason: str
    first: bool
    total: int  # refusals of this kind, including this one


class PendingConnection:
    """A connection whose handshake is not finished."""

    __slots__ = ("caller_nonce", "conn", "deadline_ns", "host", "nonce")

    def __init__(self, conn: int, host: str, deadline_ns: int) -> None:
        self.conn = conn
        self.host = host
        self.deadline_ns = deadline_ns
        self.caller_nonce = b""  # empty until its ClientHello
        self.nonce = b""


class PendingConnections:
    """The pending connections of one port, and the answerer's side of their handshakes."""

    def __init__(
        self,
        token: bytes,
        hellos: type[Any] | tuple[type[Any], ...],
        nonces: Callable[[], bytes],
        timeout_ns: int,
        most: int,
    ) -> None:
        self._token = token
        self._hellos = hellos  # the kinds of hello that this port answers
        self._nonces = nonces  # returns NONCE_BYTES new bytes per call; a seeded source in tests
        self._timeout_ns = timeout_ns
        self._most = most
        self.connections: dict[int, PendingConnection] = {}  # in order of arrival, so the first is the oldest
        self._logged: set[tuple[str, str]] = set()  # (host, kind) of refusals that have a log line
        self.counts: dict[str, int] = {}  # refusals by kind

    def __len__(self) -> int:
        return len(self.connections)

    def __contains__(self, conn: int) -> bool:
        return conn in self.connections

    @property
    def next_deadline_ns(self) -> int | None:
        """The deadline of the oldest pending connection."""
        for pending in self.connections.values():
            return pending.deadline_ns
        return None

    def arrived(self, conn: int, host: str, now_ns: int) -> list[Any]:
        """Add a connection that the port has accepted. If there are too many, refuse the oldest pending one."""
        actions: list[Any] = []
        if len(self.connections) >= self._most:
            oldest = next(iter(self.connections))
            actions += self.refuse(oldest, "crowd", f"more than {self._most} connections with an unfinished handshake")
        self.connections[conn] = PendingConnection(conn, host, now_ns + self._timeout_ns)
        return actions

    def received(self, conn: int, message: Any) -> list[Any]:
        """Handle a decoded message of a pending connection."""
        pending = self.connections[conn]
        if isinstance(message, ClientHello) and not pending.caller_nonce:
            pending.caller_nonce = message.nonce
            pending.nonce = self._nonces()
            return [Say(conn, Challenge(pending.nonce))]
        if isinstance(message, self._hellos) and pending.caller_nonce:
            expected = caller_proof(self._token, pending.caller_nonce, pending.nonce, message)
            if not hmac.compare_digest(expected, message.proof):
                reason = (
                    "the token does not match this run's: set PCCL_TOKEN or --token-file to the same secret everywhere"
                )
                return [Say(conn, Refused(INVALID_USAGE, reason)), *self.refuse(conn, "token", "wrong token")]
            del self.connections[conn]
            proof = answerer_proof(self._token, pending.caller_nonce, pending.nonce, message.proof)
            return [Admit(conn, message, Welcome(proof))]
        if type(message) in WRONG_PORT and pending.caller_nonce:
            reason = WRONG_PORT[type(message)]
            what = f"{type(message).__name__} is not for this port"
            return [Say(conn, Refused(INVALID_USAGE, reason)), *self.refuse(conn, "port", what)]
        return self.refuse(conn, "order", f"{type(message).__name__} out of turn")

    def refuse(self, conn: int, kind: str, reason: str) -> list[Any]:
        """Refuse a pending connection and count it: a bad frame, a wrong proof, silence, a closed connection."""
        pending = self.connections.pop(conn, None)
        if pending is None:
            return []
        self.counts[kind] = self.counts.get(kind, 0) + 1
        first = (pending.host, kind) not in self._logged
        # This set is bounded too: a scan from many hosts may log a line twice, but cannot fill the memory.
        if len(self._logged) >= 64 * self._most:
            self._logged.clear()
        self._logged.add((pending.host, kind))
        return [Refuse(conn, kind, f"{pending.host}: {reason}", first, self.counts[kind])]

    def tick(self, now_ns: int) -> list[Any]:
        """Refuse every pending connection whose deadline has passed."""
        late = [pending for pending in self.connections.values() if pending.deadline_ns <= now_ns]
        actions: list[Any] = []
        for pending in late:
            said = "no hello after its ClientHello" if pending.caller_nonce else "silent"
            actions += self.refuse(pending.conn, "silence", f"{said} for {self._timeout_ns / 1e9:g} s")
        return actions

    def check(self) -> None:
        """Invariants: never more pending connections than allowed, and the oldest first."""
        deadlines = [pending.deadline_ns for pending in self.connections.values()]
        assert len(deadlines) <= self._most, len(deadlines)
        assert deadlines == sorted(deadlines), deadlines


class Caller:
    """The client's side: opens the handshake, proves itself, and checks that the answerer holds the token too."""

    def __init__(self, token: bytes, nonce: bytes, hello: Callable[[bytes], Any]) -> None:
        self._token = token
        self._nonce = nonce
        self._hello = hello  # builds the hello from its proof; called with zeros first, to know what the proof covers
        self._proof = b""
        self._answer_nonce = b""
        self.done = False

    def opening(self) -> ClientHello:
        """The first message on the connection."""
        return ClientHello(self._nonce)

    def received(self, message: Any) -> Any:
        """Return the reply to send, or None when the handshake is done. Raises PermissionError with the reason."""
        if isinstance(message, Refused):
            raise PermissionError(message.reason)
        if isinstance(message, Challenge) and not self._proof:
            self._answer_nonce = message.nonce
            self._proof = caller_proof(self._token, self._nonce, message.nonce, self._hello(bytes(PROOF_BYTES)))
            return self._hello(self._proof)
        if isinstance(message, Welcome) and self._proof and not self.done:
            expected = answerer_proof(self._token, self._nonce, self._answer_nonce, self._proof)
            if not hmac.compare_digest(expected, message.proof):
                raise PermissionError("the other side does not hold this run's token: it is not what it claims to be")
            self.done = True
            return None
        raise PermissionError(f"{type(message).__name__} out of turn in the handshake")


def caller_proof(token: bytes, caller_nonce: bytes, answerer_nonce: bytes, hello: Any) -> bytes:
    """Return the caller's proof. It covers both nonces, the kind of the hello and its fields after the proof."""
    opcode, body = encode(hello)
    covered = bytes([opcode]) + body[PROOF_BYTES:]
    return hmac.digest(token, b"pccl caller" + caller_nonce + answerer_nonce + covered, "sha256")


def answerer_proof(token: bytes, caller_nonce: bytes, answerer_nonce: bytes, proof: bytes) -> bytes:
    """Return the answerer's proof. It covers the whole exchange, because the caller's proof does."""
    return hmac.digest(token, b"pccl answerer" + caller_nonce + answerer_nonce + proof, "sha256")

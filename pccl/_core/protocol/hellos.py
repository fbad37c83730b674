"""The messages of the handshake: both ends of a connection prove to each other that they hold the run's token.

They come before everything else, on the master's port and on peers' ports alike; `handshake` says in which order. A
*hello* is the caller's second message: its kind says what the connection is for, and its first field is the proof.
Declarations only: `codec` encodes them.
"""

from __future__ import annotations

from .codec import limits, message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .codec import bytes16, bytes32, text, u8, u16, u32, u64


@message(0x01, "caller to answerer")
class ClientHello:
    """Opens every connection: a number used once, and nothing else, because neither side is trusted yet."""

    nonce: bytes32


@message(0x02, "answerer to caller")
class Challenge:
    """The answerer's own nonce; the caller's proof must cover both nonces."""

    nonce: bytes32


@message(0x03, "answerer to caller")
class Welcome:
    """The answerer's proof that it holds the token too; it ends the handshake."""

    proof: bytes32


@message(0x04, "answerer to caller")
class Refused:
    """The last message to a caller that is refused: a Result, and what to do about it."""

    result: u8
    reason: text


@message(0x10, "peer to master")
class Register:
    """A peer's hello to the master: its group, its pool, where others may dial it, and the name of its run."""

    proof: bytes32  # covers both nonces and every field below
    group: u32
    lanes: u16
    host: text  # empty: the address the master sees
    port: u16
    instance: bytes16  # random: names this process, so that whoever dials that port can tell that it is the right one
    run: text = ""  # its name


@message(0x14, "operator to master")
class AskStatus:
    """An operator's hello to the master: asks for the status report. Answered by Report; does not register a peer."""

    proof: bytes32  # covers both nonces


@message(0x11, "peer to peer")
class JoinLane:
    """A peer's hello to the next peer in the ring: this connection is the link of this lane of this edge."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    epoch: u32  # of the edge: the group's epoch when the master ordered it
    source: u64
    target: u64
    lane: u16


@message(0x12, "peer to peer")
class JoinState:
    """A peer's hello to a source of the elected state: the caller will fetch over this connection."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    round: u64  # of the transfer
    source: u64  # the answerer, which has the state
    target: u64  # the caller, which fetches it


@message(0x15, "master or peer to peer")
class JoinTrial:
    """A hello that asks for nothing but the answer: it shows that the caller reaches this peer. The caller hangs up."""

    proof: bytes32  # covers both nonces and every field below
    instance: bytes16  # the peer that the caller wants to reach


@message(0x13, "peer to peer")
class JoinProbe:
    """A peer's hello to the target of a probe: count the bytes that arrive over this connection, and send the count."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    round: u64  # the number of the probe round
    source: u64  # the caller, which sends
    target: u64  # the answerer, which counts
    lane: u16
    lanes: u16  # connections of this probe
    milliseconds: u32  # how long to count


# What a caller is told whose hello is for another kind of port.
PORT_OF_PEER = "this is the port of a peer, not of a master (a master listens on 48148 by default): correct the address"
PORT_OF_MASTER = "this is the port of a master, not of a peer: correct Options.advertise, or the port that is forwarded"
WRONG_PORT: dict[type, str] = {
    **dict.fromkeys((Register, AskStatus), PORT_OF_PEER),
    **dict.fromkeys((JoinLane, JoinState, JoinProbe, JoinTrial), PORT_OF_MASTER),
}

# The messages that are legal on a connection until its handshake is done. Every port reads every hello: it refuses the
# hellos that are not for it with a reason.
HANDSHAKE_TO_MASTER = HANDSHAKE_TO_PEER = limits(
    *(ClientHello, Register, AskStatus, JoinLane, JoinState, JoinProbe, JoinTrial)
)
TO_CALLER = limits(Challenge, Welcome, Refused)

"""Every message of the protocol, in one table: the vocabulary of callers, master, peers, and their own processes.

Four conversations share it. *At the door* two strangers prove to each other that they hold the run's token, on the
master's port and on peers' ports alike. *Control* is between a peer and the master. *Mailbox* is between a training
process and its own peer actor. *Lane* is between a peer actor and its worker processes.
Declarations only; `wire` gives them bytes, the machines give them meaning.
"""

from __future__ import annotations

from .wire import limits, message

TYPE_CHECKING = False
if TYPE_CHECKING:
    # What each wire type is in Python.
    u8 = int
    u16 = int
    u32 = int
    u64 = int
    flag = bool
    text = str
    blob = bytes
    bytes16 = bytes
    bytes32 = bytes

# ---------------------------------------------------------------------------------------------- at the door


@message(0x01, "caller to answerer")
class Knock:
    """Opens every connection: a number used once, and nothing else, because nobody is trusted yet."""

    nonce: bytes32


@message(0x02, "answerer to caller")
class Challenge:
    """The answerer's own number; the caller's proof must cover both."""

    nonce: bytes32


@message(0x03, "answerer to caller")
class Welcome:
    """The answerer's proof that it holds the token too; the connection now belongs to its purpose."""

    proof: bytes32


@message(0x04, "answerer to caller")
class Refused:
    """The last word to a caller that may not come in: a Result and what to do about it."""

    result: u8
    reason: text


@message(0x10, "peer to master")
class Register:
    """A peer's hello to the master: its group, its pool, and where others may dial it."""

    proof: bytes32  # covers both nonces and every field below
    group: u32
    lanes: u16
    host: text  # empty: the address the master sees
    port: u16


@message(0x11, "peer to peer")
class JoinLane:
    """A peer's hello to the next one in the ring: this connection is that lane of that edge."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    epoch: u32  # of the edge: the group's epoch when the master ordered it
    source: u64
    target: u64
    lane: u16


# ---------------------------------------------------------------------------------------------- control, to the master


@message(0x20, "peer to master")
class VoteTopology:
    """This peer is in update_topology; `wanted` members in its group are worth waiting for (0: do not wait)."""

    call: u32
    wanted: u32


@message(0x21, "peer to master")
class VotePending:
    """This peer asks whether newcomers wait."""

    call: u32


@message(0x22, "peer to master")
class Withdraw:
    """The caller gave up; the vote does not count unless the round is already closed."""

    call: u32


@message(0x23, "peer to master")
class Wired:
    """Every lane of this peer's two edges is up for that epoch."""

    epoch: u32


@message(0x24, "peer to master")
class WireFailed:
    """This peer could not reach its next one; the ring should go another way."""

    epoch: u32  # of the edge
    target: u64
    reason: text


@message(0x25, "peer to master")
class EdgeLost:
    """An edge that was up is broken, though both its peers may live."""

    epoch: u32
    source: u64
    target: u64
    reason: text


@message(0x26, "peer to master")
class Leave:
    """A goodbye: nobody has to wait for a timeout."""

    reason: text


@message(0x27, "both ways on the control link")
class Beat:
    """I am alive. Carries the sender's clock, so that a story can be lined up."""

    now: u64


# ---------------------------------------------------------------------------------------------- control, to the peer


@message(0x30, "master to peer")
class Registered:
    """The name of a newcomer, the run it waits to join, and the rhythm of heartbeats."""

    peer: u64
    run: bytes16
    beat_ms: u32
    silence_ms: u32


@message(0x31, "master to peer")
class Accepted:
    """The newcomer is a member, wired into its ring, and counted by everyone."""

    round: u64  # counts the topology rounds of the run: the one clock that all members share
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x32, "master to peer")
class TopologyDone:
    """The round this peer voted in is closed; the same numbers go to everybody."""

    call: u32
    round: u64
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x33, "master to peer")
class PendingAnswer:
    """Whether newcomers wait: one answer for all who asked in this round."""

    call: u32
    pending: flag


@message(0x34, "master to peer")
class CallFailed:
    """The call cannot succeed, and why."""

    call: u32
    result: u8
    reason: text


@message(0x35, "master to peer")
class Wire:
    """Your two neighbours from this epoch on. An edge that you already have with that peer and epoch stays up."""

    epoch: u32
    next_peer: u64  # 0: you are alone
    next_epoch: u32  # when the edge to the next peer was ordered
    next_lanes: u16
    previous_peer: u64
    previous_epoch: u32
    previous_lanes: u16
    next_port: u16
    next_host: text


@message(0x36, "master to peer")
class Kick:
    """The master ends this membership, and why."""

    result: u8
    reason: text


@message(0x37, "master to peer, peer actor to training process")
class Notice:
    """A line for the user's log, by logging level."""

    level: u8
    line: text


# ------------------------------------------------------------------------------------- mailbox of the peer actor


@message(0x50, "training process to peer actor")
class CallConnect:
    """Join the run. The addresses are numeric, `host port` pairs, so that the actor never waits for a resolver."""

    slot: u32
    sequence: u32
    attempts: u32
    group: u32
    lanes: u16
    addresses: blob
    advertise_host: text
    advertise_port: u16
    options: blob


@message(0x51, "training process to peer actor")
class CallTopology:
    """update_topology, or one round of wait_for_world_size."""

    slot: u32
    sequence: u32
    wanted: u32


@message(0x52, "training process to peer actor")
class CallPending:
    """are_peers_pending."""

    slot: u32
    sequence: u32


@message(0x53, "training process to peer actor")
class CallCancel:
    """The caller of that slot gave up: Ctrl-C or a timeout."""

    slot: u32
    sequence: u32


@message(0x54, "training process to peer actor")
class CallLeave:
    """close(): say goodbye, then end."""

    slot: u32
    sequence: u32


# ------------------------------------------------------------------------------------- mailbox of a lane worker


@message(0x60, "peer actor to worker")
class Attach:
    """Serve this connection; the descriptor comes along."""

    link: u64


@message(0x61, "peer actor to worker")
class Detach:
    """Close the connection, if it is still this one."""

    link: u64


@message(0x62, "worker to peer actor")
class LinkEnded:
    """The connection broke or the other side closed it."""

    link: u64
    reason: text


# What may be said where. A connection moves from one set to the next as it proves itself.
AT_MASTER_DOOR = limits(Knock, Register)
AT_PEER_DOOR = limits(Knock, JoinLane)
TO_CALLER = limits(Challenge, Welcome, Refused)
TO_MASTER = limits(VoteTopology, VotePending, Withdraw, Wired, WireFailed, EdgeLost, Leave, Beat)
TO_PEER = limits(Registered, Accepted, TopologyDone, PendingAnswer, CallFailed, Wire, Kick, Notice, Beat)

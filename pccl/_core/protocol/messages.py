"""Every message that travels between hosts, in one table: the vocabulary of callers, master and peers.

Two conversations share it. In the *handshake* both ends of a connection prove to each other that they hold the run's
token, on the master's port and on peers' ports alike. *Control* is between a peer and the master. What the processes of
one peer say to each other is in `mailbox`. Declarations only; `codec` gives them bytes, the machines give them meaning.
"""

from __future__ import annotations

from .codec import BLOB_BYTES_MAX, limits, message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .codec import blob, bytes16, bytes32, flag, text, u8, u16, u32, u64

REPORT_BYTES_MAX = 4 << 20  # half of what may wait for a slow reader (options.SEND_QUEUE_BYTES_MAX)
REPORT_PAGES_MAX = -(-REPORT_BYTES_MAX // BLOB_BYTES_MAX)
# ---------------------------------------------------------------------------------------------- handshake


@message(0x01, "caller to answerer")
class ClientHello:
    """Opens every connection: a number used once, and nothing else, because neither side is trusted yet."""

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
    """The last message to a caller that is refused: a Result, and what to do about it."""

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


@message(0x14, "operator to master")
class AskStatus:
    """An operator's hello to the master: asks for the status of the run. Answered by Reports; makes nobody a peer."""

    proof: bytes32  # covers both nonces


@message(0x48, "master to operator")
class Report:
    """One page of the status report, as JSON (see `status_report`); the pages come in order."""

    page: u16  # from 0
    pages: u16
    text: blob


@message(0x11, "peer to peer")
class JoinLane:
    """A peer's hello to the next one in the ring: this connection is that lane of that edge."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    epoch: u32  # of the edge: the group's epoch when the master ordered it
    source: u64
    target: u64
    lane: u16


@message(0x12, "peer to peer")
class JoinState:
    """A peer's hello to one that has the elected state: let me fetch it over this connection."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    round: u64  # of the transfer
    source: u64  # who has the state and is called
    target: u64  # who fetches it and calls


@message(0x13, "peer to peer")
class JoinProbe:
    """A peer's hello to one that it measures the way to: count what comes over this connection, and say so."""

    proof: bytes32  # covers both nonces and every field below
    run: bytes16
    round: u64  # of the measurement
    source: u64  # who sends and calls
    target: u64  # who counts and is called
    lane: u16
    lanes: u16  # how many connections belong together
    milliseconds: u32  # how long to count


# ---------------------------------------------------------------------------------------------- control, to the master


@message(0x18, "peer to master")
class VoteOptimize:
    """This peer is in optimize_topology."""

    call: u32


@message(0x19, "peer to master")
class Probed:
    """What came of a Probe: so much arrived at the target, or nothing could be measured."""

    round: u64
    target: u64
    bytes_per_second: u64  # 0: it failed
    reason: text  # empty unless it failed


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
    """I am alive. Carries the sender's clock, so that a story can be lined up, and what a peer's lanes have moved."""

    now: u64
    tx_bytes: u64 = 0
    rx_bytes: u64 = 0
    previous: u64 = 0  # source of the edge that reduces used since the last heartbeat; 0: none
    bytes_per_second: u64 = 0  # what that edge carried while they ran
    was_limit: flag = False  # the edge was waited for, and nothing else


@message(0x28, "peer to master")
class Initiate:
    """This peer is in reduces of these signatures (see `operations`); a reduce that all members are in commences."""

    signatures: blob


@message(0x29, "peer to master")
class Finished:
    """This peer is done with its part: everything sent and received, or given up and its memory as it was before."""

    sequence: u64
    ok: flag
    reason: text  # empty if ok


@message(0x2A, "peer to master")
class Awaiting:
    """The caller has been blocking on this tag for a while: it can make no other call until the tag is answered."""

    tag: u64


@message(0x2B, "peer to master")
class WithdrawReduce:
    """The caller gave up; answered with ReduceFailed unless the tag has commenced or failed already."""

    tag: u64


@message(0x2C, "peer to master")
class VoteSync:
    """This peer is in sync_shared_state, with a state of this revision, schema and content."""

    call: u32
    revision: u64
    strategy: u8
    torn: flag  # an earlier transfer ended in the middle of this state: it is nobody's, and never elected
    keys: u32
    schema: bytes16
    content: bytes16


@message(0x2D, "peer to master")
class Schema:
    """The answer to AskSchema, in pages of rows (see `state_schema`), which arrive in order."""

    call: u32
    page: u32
    pages: u32
    rows: blob


@message(0x2E, "peer to master")
class Fetched:
    """This peer holds the elected state now, or could not get it."""

    call: u32
    round: u64
    ok: flag
    reason: text  # empty if ok


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
class RingOrder:
    """Your two neighbours from this epoch on. An edge that you already have with that peer and epoch stays up.

    Whatever reduces run are over with it: memory goes back to what it was, and their verdicts come when all are wired.
    """

    epoch: u32
    rank: u32  # this peer's place in the ring
    world: u32  # how many are in the ring
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


@message(0x38, "master to peer")
class Commence:
    """All members gave the same signature for each of these tags: begin, under the sequence numbers given here."""

    epoch: u32
    pairs: blob  # (tag, sequence), sequences ascending; the same for all members


@message(0x39, "master to peer")
class AbortReduce:
    """Some member could not finish: give up, restore the memory, then say so."""

    sequence: u64
    reason: text


@message(0x3A, "master to peer")
class ReduceDone:
    """The verdict: all members finished, so the result stands everywhere."""

    sequence: u64


@message(0x3B, "master to peer")
class ReduceFailed:
    """The verdict: it stands nowhere. The survivors are wired, and these are the numbers of their world."""

    tag: u64
    sequence: u64  # 0: it never commenced
    result: u8
    reason: text
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32
    round: u64


@message(0x3C, "master to peer")
class AskSchema:
    """Schemas differ, and yours is unknown: send it, so that the difference can be named."""

    call: u32


@message(0x3D, "master to peer")
class Serve:
    """The state of this peer was elected: serve it to the others until the call is answered."""

    call: u32
    round: u64


@message(0x3E, "master to peer")
class Fetch:
    """Another state was elected: fetch what differs from these sources, and report when it is complete."""

    call: u32
    round: u64
    whole: flag  # this peer was outdated: it also takes the entries that may differ, all from the first source
    revision: u64
    content: bytes16
    sources: blob  # see `sources`


@message(0x3F, "master to peer")
class SourceGone:
    """A source of that round is lost or gave up; the others still have everything."""

    call: u32
    round: u64
    peer: u64


@message(0x40, "master to peer")
class SyncDone:
    """All participants hold the same state, of this revision."""

    call: u32
    revision: u64


@message(0x41, "master to peer")
class Probe:
    """Send to this peer for so long, over so many connections, and say how much of it arrived."""

    round: u64
    target: u64
    lanes: u16
    milliseconds: u32
    port: u16
    host: text


@message(0x42, "master to peer")
class OptimizeDone:
    """Every group has the best ring that is known by now, and all are wired; the same numbers go to everybody."""

    call: u32
    round: u64
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x43, "master to peer")
class MoreSources:
    """You had no source left, but these have finished fetching: go on with them."""

    call: u32
    round: u64
    sources: blob  # see `sources`


@message(0x44, "master to peer")
class World:
    """The numbers of the world have changed. Collectives that commence from now on have these numbers."""

    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32
    round: u64


# What may be said where. A connection moves from one set to the next as it proves itself.
HANDSHAKE_TO_MASTER = limits(ClientHello, Register, AskStatus)
HANDSHAKE_TO_PEER = limits(ClientHello, JoinLane, JoinState, JoinProbe)
TO_CALLER = limits(Challenge, Welcome, Refused)
TO_OPERATOR = limits(Report)
TO_MASTER = limits(
    *(VoteTopology, VotePending, Withdraw, Wired, WireFailed, EdgeLost, Leave, Beat),
    *(Initiate, Finished, Awaiting, WithdrawReduce, VoteSync, Schema, Fetched),
    *(VoteOptimize, Probed),
)
TO_PEER = limits(
    *(Registered, Accepted, TopologyDone, PendingAnswer, CallFailed, RingOrder, Kick, Notice, Beat),
    *(Commence, AbortReduce, ReduceDone, ReduceFailed, AskSchema, Serve, Fetch, SourceGone, SyncDone),
    *(Probe, OptimizeDone, MoreSources, World),
)

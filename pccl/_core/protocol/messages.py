"""Every message on a control link, between a peer and the master, and the status report.

What is said before, until both ends have proved themselves, is in `hellos`; the messages between the processes of one
peer are in `mailbox`. Declarations only: `codec` encodes them, the machines handle them.
"""

from __future__ import annotations

from .codec import BLOB_BYTES_MAX, limits, message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .codec import blob, bytes16, flag, text, u8, u16, u32, u64

REPORT_BYTES_MAX = 4 << 20  # half of what may wait for a slow reader (options.SEND_QUEUE_BYTES_MAX)
REPORT_PAGES_MAX = -(-REPORT_BYTES_MAX // BLOB_BYTES_MAX)

# ---------------------------------------------------------------------------------------------- to an operator


@message(0x48, "master to operator")
class Report:
    """One page of the status report, as JSON (see `status_report`); the pages come in order."""

    page: u16  # from 0
    pages: u16
    text: blob


# ---------------------------------------------------------------------------------------------- to the master


@message(0x18, "peer to master")
class VoteOptimize:
    """This peer is in optimize_topology."""

    call: u32


@message(0x19, "peer to master")
class Probed:
    """The result of a Probe: the rate at which bytes arrived at the target, or why there is none."""

    round: u64
    target: u64
    bytes_per_second: u64  # 0: it failed
    reason: text  # empty unless it failed


@message(0x1A, "peer to master")
class Tried:
    """The report of a trial: why this peer cannot reach the target, empty if it has reached it."""

    target: u64
    reason: text


@message(0x1B, "peer to master")
class VoteFinish:
    """This peer is in finish: it agrees that the run ends."""

    call: u32


@message(0x1C, "peer to master")
class Threads:
    """So many threads of this peer were in calls at the same time: in a deadlock, all of them are."""

    count: u32


@message(0x20, "peer to master")
class VoteTopology:
    """This peer is in update_topology, and prefers to wait for `wanted` members in its group (0: not to wait)."""

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
    """This peer could not reach its next peer; the master should choose another ring."""

    epoch: u32  # of the edge
    target: u64
    reason: text


@message(0x25, "peer to master")
class EdgeLost:
    """An edge that was up is broken; both its peers may still be alive."""

    epoch: u32
    source: u64
    target: u64
    reason: text


@message(0x26, "peer to master")
class Leave:
    """This peer leaves the run; the other peers need not wait for a timeout."""

    reason: text


@message(0x27, "both ways on the control link")
class Beat:
    """A heartbeat. Carries the sender's clock, to align stories, and the bytes that a peer's lanes have moved."""

    now: u64
    tx_bytes: u64 = 0
    rx_bytes: u64 = 0
    previous: u64 = 0  # source of the edge that reduces used since the last heartbeat; 0: none
    bytes_per_second: u64 = 0  # the rate of that edge while they ran
    was_limit: flag = False  # reduces waited for this edge and for nothing else


@message(0x28, "peer to master")
class Initiate:
    """This peer is in reduces of these signatures (see `operations`); a reduce that all members are in commences."""

    signatures: blob


@message(0x29, "peer to master")
class Finished:
    """This peer has done its part: it has sent and received everything, or it has given up and drained the reduce."""

    sequence: u64
    ok: flag
    reason: text  # empty if ok


@message(0x2A, "peer to master")
class Awaiting:
    """The caller has waited for this tag for a while: it can make no other call until the tag is answered."""

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
    torn: flag  # an earlier transfer ended in the middle of this state: it is never elected
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


# ---------------------------------------------------------------------------------------------- to the peer


@message(0x30, "master to peer")
class Registered:
    """The peer id of a newcomer, the run that it waits to join, the interval and timeout of heartbeats, and options."""

    peer: u64
    run: bytes16
    beat_ms: u32
    silence_ms: u32
    timing: text = ""  # the fields of Options that the master decides, one `field=value` per line


@message(0x31, "master to peer")
class Accepted:
    """The newcomer is a member: it is wired into its ring and counts in the world sizes."""

    round: u64  # counts the topology rounds of the run: the only clock that all members share
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x32, "master to peer")
class TopologyDone:
    """The topology round that this peer voted in is closed; all members get the same numbers."""

    call: u32
    round: u64
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x33, "master to peer")
class PendingAnswer:
    """Whether newcomers wait: the same answer for all members."""

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
    """The two neighbours of this peer from this epoch on. An edge that exists with this peer and epoch stays up.

    It ends all running reduces: the peer drains them, and their verdicts follow when all members are wired.
    """

    epoch: u32
    rank: u32  # of this peer
    world: u32  # members of the ring
    next_peer: u64  # 0: this peer is alone
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
    """A member could not finish: abort the reduce, drain it, then send Finished."""

    sequence: u64
    reason: text


@message(0x3A, "master to peer")
class ReduceDone:
    """The verdict: all members finished, so the reduce succeeded on every member."""

    sequence: u64


@message(0x3B, "master to peer")
class ReduceFailed:
    """The verdict: the reduce failed on every member. The remaining members are wired; these are their numbers."""

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
    """Schemas differ, and the master does not know this peer's: send it, so that the master can name the difference."""

    call: u32


@message(0x3D, "master to peer")
class Serve:
    """The state of this peer was elected: serve it to the others until the call is answered."""

    call: u32
    round: u64


@message(0x3E, "master to peer")
class Fetch:
    """Another state was elected: fetch what differs from these sources, and send Fetched when it is complete."""

    call: u32
    round: u64
    whole: flag  # this peer was outdated: it also fetches the tensors that may differ, all from the first source
    revision: u64
    content: bytes16
    sources: blob  # see `sources`


@message(0x3F, "master to peer")
class SourceGone:
    """A source of this transfer round is lost or gave up; the other sources still have the whole state."""

    call: u32
    round: u64
    peer: u64


@message(0x40, "master to peer")
class SyncDone:
    """All members hold the same state, of this revision."""

    call: u32
    revision: u64


@message(0x41, "master to peer")
class Probe:
    """Send to this peer for this time, over this many connections, and send Probed with the rate of arrival."""

    round: u64
    target: u64
    lanes: u16
    milliseconds: u32
    port: u16
    host: text


@message(0x45, "master to peer")
class Try:
    """Make a trial, a dial without any other effect, of this peer, and send Tried."""

    target: u64
    instance: bytes16
    port: u16
    host: text


@message(0x42, "master to peer")
class OptimizeDone:
    """Every group has the best known ring, and all rings are wired; all members get the same numbers."""

    call: u32
    round: u64
    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32


@message(0x43, "master to peer")
class MoreSources:
    """This peer had no source left, but these peers have finished fetching: continue with them."""

    call: u32
    round: u64
    sources: blob  # see `sources`


@message(0x44, "master to peer")
class World:
    """The numbers about the run have changed. Collectives that commence from now on have these numbers."""

    epoch: u32
    global_world: u32
    group_world: u32
    groups: u32
    largest_group: u32
    round: u64


@message(0x46, "master to peer")
class RunFinished:
    """The run is finished, and with it this membership. Answers the vote of a member, or a peer that waits to join."""

    call: u32  # of finish; 0: this peer is not in it
    reason: text


# The messages that are legal on a connection whose handshake is done.
TO_OPERATOR = limits(Report)
TO_MASTER = limits(
    *(VoteTopology, VotePending, Withdraw, Wired, WireFailed, EdgeLost, Leave, Beat),
    *(Initiate, Finished, Awaiting, WithdrawReduce, VoteSync, Schema, Fetched),
    *(VoteOptimize, Probed, Tried, VoteFinish, Threads),
)
TO_PEER = limits(
    *(Registered, Accepted, TopologyDone, PendingAnswer, CallFailed, RingOrder, Kick, Notice, Beat),
    *(Commence, AbortReduce, ReduceDone, ReduceFailed, AskSchema, Serve, Fetch, SourceGone, SyncDone),
    *(Probe, OptimizeDone, MoreSources, World, Try, RunFinished),
)

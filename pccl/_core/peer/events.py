"""The events that the peer's machine takes, and the actions that it returns.

Events are facts and actions are orders. Both are frozen records, so tests compare whole lists of them. Links are small
numbers that the actor gives to connections; the machine never sees a socket. What the parts of the machine tell each
other is at the end.
"""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pccl._core.protocol.hellos import JoinLane
    from pccl._core.protocol.operations import Operation
    from pccl._core.protocol.sources import Source

# ---------------------------------------------------------------------------------------------- events


@record
class Called:
    """The training process made a call (a mailbox message)."""

    call: Any


@record
class AppGone:
    """The training process is gone: closed, crashed or killed."""

    reason: str


@record
class AppStopped:
    """The training process does not run: it was stopped for too long, and may continue later."""

    reason: str


@record
class MasterUp:
    """The control connection is up, and its handshake is done."""


@record
class MasterSaid:
    """The master sent a message."""

    message: Any


@record
class MasterDown:
    """The control connection failed or was lost; `final` if another attempt would be refused too."""

    reason: str
    final: bool = False


@record
class LinkCame:
    """A peer passed the handshake at this peer's port and wants to join a lane."""

    link: int
    hello: JoinLane


@record
class LinkUp:
    """A lane that this peer dialled was welcomed."""

    link: int


@record
class LinkDown:
    """A lane's connection failed, was refused, or broke."""

    link: int
    reason: str


@record
class WorkerDied:
    """A worker process ended without being told to."""

    reason: str


@record
class ReduceEnded:
    """This peer's part in an operation is complete: it received and sent everything."""

    sequence: int
    tx_bytes: int
    rx_bytes: int
    network_ns: int
    neighbour_ns: int
    reduce_ns: int


@record
class ReduceDrained:
    """The answer to AbortOperation: no worker touches the memory any more."""

    sequence: int


@record
class ReduceProgress:
    """How many bytes an operation has moved so far; comes ahead of a Tick, for each one that runs."""

    sequence: int
    moved: int


@record
class StateFetched:
    """This peer's memory holds the elected state: every block was verified."""

    round: int


@record
class StateUnfetched:
    """No source is left, or this peer cannot take the state."""

    round: int
    reason: str


@record
class TransferEnded:
    """The answer to EndTransfer: no worker touches the memory any more."""

    round: int
    tx_bytes: int
    rx_bytes: int


@record
class ProbeDone:
    """The answer to BeginProbe: what arrived at the target, or 0 and the reason."""

    round: int
    bytes_per_second: int
    reason: str


@record
class TrialEnded:
    """The answer to BeginTrial: why this peer cannot reach the target, empty if it has reached it."""

    target: int
    reason: str


@record
class Traffic:
    """How many bytes all lanes have moved since this process began; comes ahead of a Tick."""

    tx_bytes: int
    rx_bytes: int


# ---------------------------------------------------------------------------------------------- actions


@record
class DialMaster:
    """Connect to the master; attempts count from 0 and may use different addresses."""

    attempt: int


@record
class UseTiming:
    """The heartbeat interval and timeout of the master: from now on they hold inside this peer too."""

    interval_ns: int
    silence_ns: int


@record
class HangUp:
    """Close the control connection after everything sent has left."""


@record
class SendMaster:
    """Send a message on the control connection."""

    message: Any


@record
class BeginTrial:
    """Dial a peer and hang up; `TrialEnded` follows."""

    target: int
    host: str
    port: int
    instance: bytes


@record
class SpawnLanes:
    """Have this many pairs of sender and receiver processes running."""

    lanes: int


@record
class KillLanes:
    """End all lane workers; new ones are started when they are needed."""


@record
class Dial:
    """Connect a lane to a peer."""

    link: int
    host: str
    port: int
    hello: JoinLane


@record
class AnswerLink:
    """Welcome a lane that came, or refuse it with a reason."""

    link: int
    reason: str = ""  # empty: welcome


@record
class AttachLink:
    """Give the connection to a worker: the sender or the receiver of that lane."""

    link: int
    sends: bool
    lane: int


@record
class DropLink:
    """Close the connection, wherever it is."""

    link: int


@record
class BeginOperation:
    """Run an operation over the ring, whose lanes are all up. Sequences grow; all members begin in the same order."""

    sequence: int
    operation: Operation
    rank: int
    world: int


@record
class AbortOperation:
    """Let go of an operation that was begun; the training process restores what it overwrote.

    Answered by exactly one ReduceDrained, which is a later event. Comes ahead of every action of the same event that
    touches lanes or workers.
    """

    sequence: int


@record
class EndOperation:
    """Forget the operation: its verdict is there, and its memory belongs to the caller again.

    Comes exactly once for each BeginOperation, just ahead of the Complete of its slot, unless this process ends first:
    after success at once, after an abort when it is drained and has its verdict.
    """

    sequence: int


@record
class ServeState:
    """Let other peers fetch this peer's state; segments have the numbers under which they were shared."""

    round: int
    manifest: int
    nbytes: int  # of the manifest
    window: int


@record
class FetchState:
    """Fetch from these sources what differs in this peer's memory; answered by StateFetched or StateUnfetched."""

    round: int
    manifest: int
    nbytes: int  # of the manifest
    window: int
    whole: bool  # also the entries that may differ, all of them from the first source
    content: bytes  # the digest that the state must have in the end
    sources: tuple[Source, ...]


@record
class ServeFetched:
    """Let other peers fetch what this peer has fetched itself, in the same round."""

    round: int


@record
class AddSources:
    """The transfer had no source left: continue with these. Answered by StateFetched or StateUnfetched, once more."""

    round: int
    sources: tuple[Source, ...]


@record
class DropSource:
    """That source is gone. Its links may already be down."""

    round: int
    peer: int


@record
class EndTransfer:
    """Stop serving and fetching: end the workers of this round.

    Answered by exactly one TransferEnded, which is a later event. Comes exactly once for each ServeState and
    FetchState, unless this process ends first.
    """

    round: int


@record
class SendSchema:
    """Read the schema from the manifest, and send it to the master in pages."""

    call: int
    manifest: int
    nbytes: int  # of the manifest


@record
class BeginProbe:
    """Measure the rate to that peer; answered by one ProbeDone, later, unless EndProbe comes before."""

    round: int
    target: int
    lanes: int
    milliseconds: int
    host: str
    port: int


@record
class EndProbe:
    """End a probe that is not needed any more. Does nothing if the probe is over."""

    round: int


@record
class Complete:
    """The end of a call: its slot, a Result, a kind (see `errors`), and a payload or a text."""

    slot: int
    generation: int
    result: int
    kind: int
    payload: bytes


@record
class Tell:
    """One line for the user's log, in the training process."""

    level: int
    line: str


@record
class Stop:
    """End this process, once everything sent has left."""


# ---------------------------------------------------------------------------------------------- inside the machine


@record
class MembershipEnded:
    """The machine tells its parts that the membership is over: what has no answer ends now."""


@record
class EdgeDropped:
    """An edge is dropped with all its lanes."""


class ProtocolViolationError(Exception):
    """A part of the machine got a message that no honest master would send: `PeerState` ends the membership.

    If anything but a message of the master causes it, it is a bug of this process.
    """

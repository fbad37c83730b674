"""What happens to a machine, and what a machine asks for: the events and actions of master and peer.

Events are facts, actions are orders; both are frozen records, so tests compare whole lists of them. The master's
machine and the peer's machine share what means the same for both. Connections and links are small numbers that the
I/O shell gives out and keeps; a machine never sees a socket.
"""

from __future__ import annotations

import struct

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from typing import Any

    from .messages import JoinLane, Register
    from .operations import Operation
    from .sources import Source

# Levels of the logging module, by number, because the actors do not import it before they have something to say.
DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40

# Calls are known by the names their users know them by.
TOPOLOGY = "update_topology"
PENDING = "are_peers_pending"
SYNC = "sync_shared_state"
OPTIMIZE = "optimize_topology"

# The payload of a completed connect, update_topology or optimize_topology: peer id, round, epoch, then the world in
# numbers (global, own group, groups, largest group).
NUMBERS = struct.Struct("<QQIIIII")
# The payload of a completed reduce: members of the ring, bytes sent and received, then where the time went (waiting for
# the network, waiting for the neighbours to have something, reducing). That of a failed one is NUMBERS and the reason,
# under KIND_REDUCE; where there is no world to count, the kind says so and the payload is the reason alone.
REDUCED = struct.Struct("<IQQQQQ")
# The payload of a completed sync_shared_state: the revision that was agreed, bytes sent and received.
SYNCED = struct.Struct("<QQQ")

# ---------------------------------------------------------------------------------------------- shared


@record
class Tick:
    """The deadline that the machine asked for has come, or time has passed."""


@record
class Log:
    """One line for the log of this process."""

    level: int
    line: str


# ---------------------------------------------------------------------------------------------- master: events


@record
class PeerCame:
    """A connection proved itself at the door and registers; `host` is where it comes from."""

    conn: int
    register: Register
    host: str


@record
class PeerSaid:
    """A registered connection sent a message."""

    conn: int
    message: Any


@record
class PeerWent:
    """The connection is gone."""

    conn: int
    reason: str


@record
class MoonshotFound:
    """The search in the background found a ring: these peers, in this order."""

    group: int
    ring: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- master: actions


@record
class SendTo:
    """Send a message to a peer."""

    conn: int
    message: Any


@record
class Dismiss:
    """Close the connection after everything sent to it has left."""

    conn: int


@record
class Save:
    """What a master that starts again must know has changed: keep it before anything that follows is sent."""


@record
class BeginMoonshot:
    """Search on for a better ring of this group, in the background, instead of whatever is searched for by now."""

    group: int
    ring: tuple[int, ...]  # the present one
    rates: array[float]  # the solver's table, in the order of the ring
    seed: int


@record
class CancelMoonshot:
    """The group has other members now: whatever is found would be of no use."""

    group: int


# ---------------------------------------------------------------------------------------------- peer: events


@record
class Called:
    """The training process made a call (a mailbox message)."""

    call: Any


@record
class AppGone:
    """The training process is gone: closed, crashed or killed."""

    reason: str


@record
class MasterUp:
    """The control connection is up and its door is open."""


@record
class MasterSaid:
    """The master sent a message."""

    message: Any


@record
class MasterDown:
    """The control connection failed or was lost; `final` if another attempt would meet the same refusal."""

    reason: str
    final: bool = False


@record
class LinkCame:
    """A peer proved itself at our port and wants to be a lane."""

    link: int
    hello: JoinLane


@record
class LinkUp:
    """A lane we dialled was welcomed."""

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
class ReduceBroken:
    """This peer cannot go on with an operation, though its lanes stand: memory that cannot be mapped, for example."""

    sequence: int
    reason: str


@record
class ReduceQuiet:
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
class Traffic:
    """How many bytes all lanes have moved since this process began; comes ahead of a Tick."""

    tx_bytes: int
    rx_bytes: int


# ---------------------------------------------------------------------------------------------- peer: actions


@record
class DialMaster:
    """Connect to the master; attempts count from 0 and may use different addresses."""

    attempt: int


@record
class HangUp:
    """Close the control connection after everything sent has left."""


@record
class SendMaster:
    """Send a message on the control connection."""

    message: Any


@record
class SpawnLanes:
    """Have this many pairs of sender and receiver processes running."""

    lanes: int


@record
class KillLanes:
    """End all worker processes; they are built anew when they are needed."""


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
    """Let go of an operation that was begun; what it overwrote is restored by the training process.

    Answered by exactly one ReduceQuiet, later, never while this is being done. Comes ahead of every action of the same
    event that touches lanes or workers.
    """

    sequence: int


@record
class EndOperation:
    """Forget the operation: its verdict is there, and its memory belongs to the caller again.

    Comes exactly once for each BeginOperation, just ahead of the Complete of its slot, unless this process ends first:
    after success at once, after an abort when it is both quiet and judged.
    """

    sequence: int


@record
class ServeState:
    """Let other peers fetch this peer's state; segments by the numbers under which they were shared."""

    round: int
    description: int
    nbytes: int  # of the description
    window: int


@record
class FetchState:
    """Fetch what differs from these sources into this peer's memory; answered by StateFetched or StateUnfetched."""

    round: int
    description: int
    nbytes: int  # of the description
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
    """The transfer had no source left; go on with these. Answered by StateFetched or StateUnfetched, once more."""

    round: int
    sources: tuple[Source, ...]


@record
class DropSource:
    """That source is gone. Its link may have told so before."""

    round: int
    peer: int


@record
class EndTransfer:
    """Serve no more, fetch no more: end the workers of this round.

    Answered by exactly one TransferEnded, later, never while this is being done. Comes exactly once for each ServeState
    and FetchState, unless this process ends first.
    """

    round: int


@record
class SendSchema:
    """Read the layout from the description, and send it to the master in pages."""

    call: int
    description: int
    nbytes: int  # of the description


@record
class BeginProbe:
    """Measure what arrives at that peer; answered by one ProbeDone, later, unless it is ended before."""

    round: int
    target: int
    lanes: int
    milliseconds: int
    host: str
    port: int


@record
class EndProbe:
    """That measurement is of no use any more. Harmless when it is over."""

    round: int


@record
class Complete:
    """The end of a call: its slot, a Result, a kind (see `errors`), and a payload or a text."""

    slot: int
    sequence: int
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

"""The events that the master's machine takes, those that it finds by itself, and the actions that it returns.

Events are facts and actions are orders. Both are frozen records, so tests compare whole lists of them. Connections are
small numbers that the actor gives out and keeps; the machine never sees a socket.
"""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from typing import Any

    from pccl._core.protocol.hellos import Register

# ---------------------------------------------------------------------------------------------- events


@record
class PeerCame:
    """A caller passed the handshake and registers; `host` is the address that it connects from."""

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
class DialledBack:
    """The answer to DialBack: the reason why the master cannot reach that peer, empty if it has reached it."""

    conn: int
    reason: str


@record
class MoonshotFound:
    """The moonshot found a ring: these peers, in this order."""

    group: int
    ring: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- inner events

# A part of the machine finds these by itself after any other event. They stand in its table and carry nothing.


@record
class VoteComplete:
    """All members have voted, and no ring is being wired."""


@record
class VoteReopened:
    """A vote that was complete is not any more: a caller gave up, or no member is left."""


@record
class NewcomerWaits:
    """A newcomer fits into a ring, after all members have voted."""


@record
class ProbesOver:
    """A group has no probe under way, and can go on."""


@record
class RingsWired:
    """No ring is being wired any more."""


@record
class CallersGone:
    """No member waits for the answer any more: all callers are gone or gave up."""


# ---------------------------------------------------------------------------------------------- actions


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
class DialBack:
    """Find out whether the master reaches this peer where others will dial it; `DialledBack` follows."""

    conn: int
    host: str
    port: int
    instance: bytes


@record
class Save:
    """Write the state file before any later action is sent: what a restarted master must know has changed."""


@record
class BeginMoonshot:
    """Search for a better ring of this group in the background; this replaces a search that is under way."""

    group: int
    ring: tuple[int, ...]  # the present one
    rates: array[float]  # the solver's table, in the order of the ring
    seed: int


@record
class CancelMoonshot:
    """End the search for this group: its members changed, so a ring that is found would be useless."""

    group: int

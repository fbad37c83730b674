"""What the two machines share: the passing of time, lines for the log, names of calls, payloads of completed slots.

The events and actions of each machine are in its own room: `_core/master/events.py` and `_core/peer/events.py`.
"""

from __future__ import annotations

import struct

from pccl._core.records import record

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
# the network, waiting for the neighbours to have something, reducing). NUMBERS of that collective follow.
REDUCED = struct.Struct("<IQQQQQ")
# The payload of a completed sync_shared_state: the revision that was agreed, bytes sent and received. NUMBERS follow.
SYNCED = struct.Struct("<QQQ")
# The payload of a reduce or a sync that the master failed is NUMBERS and the reason, under KIND_COLLECTIVE; any other
# failure has the reason alone.


@record
class Tick:
    """The deadline that the machine asked for has come, or time has passed."""


@record
class Log:
    """One line for the log of this process."""

    level: int
    line: str

"""Definitions that the two machines share: ticks, log lines, names of calls, payloads of completed slots.

The events and actions of each machine are in its own folder: `_core/master/events.py` and `_core/peer/events.py`.
"""

from __future__ import annotations

import struct

from pccl._core.records import record

# Levels of the logging module, by number, because the actors import it only when they log their first line.
DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40

# The names of calls, as users know them.
TOPOLOGY = "update_topology"
PENDING = "are_peers_pending"
SYNC = "sync_shared_state"
OPTIMIZE = "optimize_topology"
FINISH = "finish"

# The payload of a completed connect, update_topology or optimize_topology: peer id, topology round, epoch, then global
# world size, world size of the own group, number of groups, world size of the largest group.
NUMBERS = struct.Struct("<QQIIIII")
# The payload of a completed reduce: members of the ring, bytes sent and received, then nanoseconds of the workers
# (waiting for the network, waiting for the previous peer to send, reducing). NUMBERS of that collective follow.
REDUCED = struct.Struct("<IQQQQQ")
# The payload of a completed sync_shared_state: the agreed revision, bytes sent and received. NUMBERS follow.
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

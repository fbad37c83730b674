"""The tables of a group's machines: which event may lead from which phase to which.

(phase, event) -> the phases that may follow when the event is over. An event is a message of any member, or one of:

- PeerWent: a member of this group was removed, in whatever way; a sender that is kicked for its message is removed too.
  The vote that completes a tag may remove the minority of its members, and so interrupt the tag at once.
- Tick: a sweep broke a deadlock, or ended the probes of an optimisation.

An event that is not here changes no phase. The tables have no handlers: `group_dispatch` passes a message to the group
of its sender, whatever the phases are, and one message may move many tags. `master_check` compares every change with
these tables after every event in all tests. Data only.
"""

from __future__ import annotations

from pccl._core.protocol.events import Tick
from pccl._core.protocol.messages import (
    EdgeLost,
    Fetched,
    Finished,
    Initiate,
    Probed,
    Schema,
    VoteSync,
    Wired,
    WireFailed,
    Withdraw,
    WithdrawReduce,
)

from .collectives import ABORTING, DONE, FAILED, FREE, INTERRUPTED, OPEN, RUNNING
from .events import PeerWent
from .state_consensus import ASKING, IDLE, TRANSFERRING, VOTING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    PhaseTable = dict[tuple[str, type[Any]], tuple[str, ...]]

# The consensus of a group on its shared state. The removal of a member may complete the vote of the others.
CONSENSUS: PhaseTable = {
    (IDLE, VoteSync): (VOTING, IDLE),
    (IDLE, Schema): (IDLE,),
    (IDLE, Fetched): (IDLE,),
    (IDLE, Withdraw): (IDLE,),
    (IDLE, PeerWent): (IDLE,),
    (VOTING, VoteSync): (VOTING, ASKING, TRANSFERRING, IDLE),
    (VOTING, Schema): (VOTING,),
    (VOTING, Fetched): (VOTING,),
    (VOTING, Withdraw): (VOTING, IDLE),
    (VOTING, PeerWent): (VOTING, ASKING, TRANSFERRING, IDLE),
    (VOTING, Tick): (VOTING, IDLE),
    (ASKING, VoteSync): (ASKING, TRANSFERRING, IDLE),
    (ASKING, Schema): (ASKING, VOTING, IDLE),
    (ASKING, Fetched): (ASKING,),
    (ASKING, Withdraw): (ASKING, VOTING, IDLE),
    (ASKING, PeerWent): (ASKING, VOTING, TRANSFERRING, IDLE),
    (TRANSFERRING, VoteSync): (TRANSFERRING,),
    (TRANSFERRING, Schema): (TRANSFERRING,),
    (TRANSFERRING, Fetched): (TRANSFERRING, VOTING, IDLE),
    (TRANSFERRING, Withdraw): (TRANSFERRING, VOTING, IDLE),
    (TRANSFERRING, PeerWent): (TRANSFERRING, VOTING, ASKING, IDLE),
}

# A tag of a member that remains in the group, whichever member sends the message. The last probe of an optimisation, or
# the end of a late one, may change the ring while a member that gave the optimisation up reduces.
COLLECTIVES: PhaseTable = {
    (FREE, Initiate): (OPEN, RUNNING, INTERRUPTED, FAILED),
    (OPEN, Initiate): (OPEN, RUNNING, FAILED),
    (OPEN, WithdrawReduce): (OPEN, FAILED),
    (OPEN, Wired): (OPEN, RUNNING, INTERRUPTED, FAILED),
    (OPEN, Probed): (OPEN, INTERRUPTED),
    (OPEN, WireFailed): (OPEN, INTERRUPTED),
    (OPEN, EdgeLost): (OPEN, INTERRUPTED),
    (OPEN, PeerWent): (INTERRUPTED,),
    (OPEN, Tick): (OPEN, INTERRUPTED, FAILED),
    (RUNNING, Finished): (RUNNING, ABORTING, DONE),
    (RUNNING, WireFailed): (RUNNING, INTERRUPTED),
    (RUNNING, EdgeLost): (RUNNING, INTERRUPTED),
    (RUNNING, Probed): (RUNNING, INTERRUPTED),
    (RUNNING, PeerWent): (INTERRUPTED,),
    (RUNNING, Tick): (RUNNING, INTERRUPTED),
    (ABORTING, Finished): (ABORTING, FAILED),
    (ABORTING, WireFailed): (ABORTING, INTERRUPTED),
    (ABORTING, EdgeLost): (ABORTING, INTERRUPTED),
    (ABORTING, Probed): (ABORTING, INTERRUPTED),
    (ABORTING, PeerWent): (INTERRUPTED,),
    (ABORTING, Tick): (ABORTING, INTERRUPTED),
    (INTERRUPTED, Wired): (INTERRUPTED, FAILED),
}

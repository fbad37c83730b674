"""The tables of a group's machines: which message may lead from which phase to which, and what handles it.

Both have the format of `master_state.TRANSITIONS`: (phase, message of a member) -> (handler, next phases). The next
phases are those that may follow when the event is over; () if the message comes too late to change anything. PeerWent
stands for every way in which a member is removed; a sender that is kicked for its message counts as removed.
`master_check` compares every change with these tables after every event in all tests. Data only.
"""

from __future__ import annotations

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

from .collectives import ABORTING, DONE, FAILED, FREE, INTERRUPTED, OPEN, RUNNING, Collectives
from .events import PeerWent
from .membership import Membership
from .optimizer import Optimizer
from .state_consensus import ASKING, IDLE, TRANSFERRING, VOTING, StateConsensus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Table = dict[tuple[str, type[Any]], tuple[Callable[..., Any], tuple[str, ...]]]

# The consensus of a group on its shared state. The removal of a member may complete the vote of the others.
CONSENSUS: Table = {
    (IDLE, VoteSync): (StateConsensus.vote, (VOTING, IDLE)),
    (IDLE, Schema): (StateConsensus.give_schema, ()),
    (IDLE, Fetched): (StateConsensus.fetched, ()),
    (IDLE, Withdraw): (StateConsensus.withdraw, ()),
    (IDLE, PeerWent): (StateConsensus.remove, ()),
    (VOTING, VoteSync): (StateConsensus.vote, (VOTING, ASKING, TRANSFERRING, IDLE)),
    (VOTING, Schema): (StateConsensus.give_schema, ()),
    (VOTING, Fetched): (StateConsensus.fetched, ()),
    (VOTING, Withdraw): (StateConsensus.withdraw, (VOTING, IDLE)),
    (VOTING, PeerWent): (StateConsensus.remove, (VOTING, ASKING, TRANSFERRING, IDLE)),
    (ASKING, VoteSync): (StateConsensus.vote, (ASKING, TRANSFERRING, IDLE)),
    (ASKING, Schema): (StateConsensus.give_schema, (ASKING, VOTING, TRANSFERRING, IDLE)),
    (ASKING, Fetched): (StateConsensus.fetched, ()),
    (ASKING, Withdraw): (StateConsensus.withdraw, (ASKING, VOTING, IDLE)),
    (ASKING, PeerWent): (StateConsensus.remove, (ASKING, VOTING, TRANSFERRING, IDLE)),
    (TRANSFERRING, VoteSync): (StateConsensus.vote, (TRANSFERRING,)),
    (TRANSFERRING, Schema): (StateConsensus.give_schema, ()),
    (TRANSFERRING, Fetched): (StateConsensus.fetched, (TRANSFERRING, VOTING, IDLE)),
    (TRANSFERRING, Withdraw): (StateConsensus.withdraw, (TRANSFERRING, VOTING, IDLE)),
    (TRANSFERRING, PeerWent): (StateConsensus.remove, (TRANSFERRING, VOTING, ASKING, IDLE)),
}

# A tag of a member that remains in the group, whichever member sends the message. A message that is not here changes
# no tag. The last probe of an optimisation may change the ring while a member that gave the optimisation up reduces.
COLLECTIVES: Table = {
    (FREE, Initiate): (Collectives.initiate, (OPEN, RUNNING, FAILED)),
    (OPEN, Initiate): (Collectives.initiate, (OPEN, RUNNING, FAILED)),
    (OPEN, WithdrawReduce): (Collectives.withdraw, (OPEN, FAILED)),
    (OPEN, Wired): (Membership.on_wired, (OPEN, RUNNING, INTERRUPTED, FAILED)),
    (OPEN, Probed): (Optimizer.on_probed, (OPEN, INTERRUPTED)),
    (OPEN, WireFailed): (Membership.on_wire_failed, (OPEN, INTERRUPTED)),
    (OPEN, EdgeLost): (Membership.on_edge_lost, (OPEN, INTERRUPTED)),
    (OPEN, PeerWent): (Collectives.abort, (INTERRUPTED,)),
    (RUNNING, Finished): (Collectives.finished, (RUNNING, ABORTING, DONE)),
    (RUNNING, WireFailed): (Membership.on_wire_failed, (RUNNING, INTERRUPTED)),
    (RUNNING, EdgeLost): (Membership.on_edge_lost, (RUNNING, INTERRUPTED)),
    (RUNNING, Probed): (Optimizer.on_probed, (RUNNING, INTERRUPTED)),
    (RUNNING, PeerWent): (Collectives.abort, (INTERRUPTED,)),
    (ABORTING, Finished): (Collectives.finished, (ABORTING, FAILED)),
    (ABORTING, WireFailed): (Membership.on_wire_failed, (ABORTING, INTERRUPTED)),
    (ABORTING, EdgeLost): (Membership.on_edge_lost, (ABORTING, INTERRUPTED)),
    (ABORTING, Probed): (Optimizer.on_probed, (ABORTING, INTERRUPTED)),
    (ABORTING, PeerWent): (Collectives.abort, (INTERRUPTED,)),
    (INTERRUPTED, Wired): (Membership.on_wired, (INTERRUPTED, FAILED)),
}

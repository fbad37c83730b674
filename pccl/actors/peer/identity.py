"""What the parts of a peer actor that deal with other peers need to know of their own peer. Data only."""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@record
class Identity:
    """What this peer is called, and how long it waits; known once it is registered."""

    run: bytes
    peer: int
    lanes: int  # size of the pool, which the links to all sources share
    token: bytes
    stall_ns: int
    dial_ns: int  # for one call with its handshake
    connect_ns: int  # for one call to somebody who is known to answer
    new_link: Callable[[], int]  # numbers the connections
    check: bool  # machines verify their invariants after every event

"""The identity of this peer and its timeouts, for the parts of its actor that connect to other peers. Data only."""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@record
class Identity:
    """The identity of this peer and its timeouts; known once it is registered."""

    run: bytes
    peer: int
    lanes: int  # size of the pool, which the links to all sources share
    token: bytes
    stall_ns: int
    dial_ns: int  # to connect, with the handshake
    connect_ns: int  # to connect to a peer that is known to answer
    new_link: Callable[[], int]  # numbers the connections
    check: bool  # machines verify their invariants after every event
    report_ns: int = 0  # how long a transfer takes before it is reported; 0: never

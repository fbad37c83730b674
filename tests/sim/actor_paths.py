"""Rare paths between the machines and the actors; recognised in the same way as in `paths`.

A master that dies and starts again, broken frames, addresses that no peer can dial, status queries, passive rates, and
rings of moonshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.master.bandwidths import CONFIRMED
from pccl._core.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable

ACTOR_PATHS = frozenset({
    # connections that an actor ends by itself
    "the wrong secret is refused",
    "an address that is a name is refused",
    "a broken frame ends a peer's connection",
    "a broken frame ends a membership at the peer",
    "an operator asks while a ring is wired",
    # a master that starts again
    "the master is killed in the middle of an event",
    "a master without a state file begins another run",
    "a master goes on with what was agreed",
    "an unannounced state is agreed again",
    "a restored run agrees on its next state",
    "a peer that joins waits for the next master",
    # rates without probes
    "reduces show the rate of an edge",
    "reduces confirm the rate of an edge",
    "the rate of an edge that is gone is ignored",
    # rings from the background
    "a better ring is found in the background",
    "a ring from the background is compared",
    "a search in the background finds nothing better",
    "a search in the background gives way to the next",
    "a search in the background ends with its members",
    "a ring is found for members that are gone",
})  # fmt: skip


def mark_before(state: Any, event: Any, mark: Callable[[str], None]) -> bool:
    """Mark the paths before the master handles an event; return whether a ring of a moonshot waits to be compared."""
    if type(event) is master_events.PeerSaid and type(event.message) is messages.Beat and event.message.previous:
        _mark_rate(state, event, mark)
    return bool(state.optimizer.found)


def _mark_rate(state: Any, event: Any, mark: Callable[[str], None]) -> None:
    """Mark the paths of a heartbeat with a passive rate."""
    peer, message = state.members.conns.get(event.conn), event.message
    if peer is None:
        return
    group = state.members.groups.get(peer.group)
    if group is None or (message.previous, peer.id) not in group.edges:
        mark("the rate of an edge that is gone is ignored")
    elif message.was_limit:
        mark("reduces show the rate of an edge")
    else:
        known = group.bandwidths.get(message.previous, peer.id)
        if known is not None and known.rate * CONFIRMED <= message.bytes_per_second:
            mark("reduces confirm the rate of an edge")


def mark_after(
    state: Any, found: bool, event: Any, actions: list[Any], lines: list[str], mark: Callable[[str], None]
) -> None:
    """Mark the paths after the event; `found` is what `mark_before` returned, `lines` is what the master logs."""
    if type(event) is master_events.PeerWent and event.reason.startswith("broke the protocol ("):
        mark("a broken frame ends a peer's connection")
    if type(event) is master_events.MoonshotFound:
        assert state.optimizer.found == event.ring, "the ring of a search under way was not kept"
        mark("a better ring is found in the background")
    elif found and any("keeps its ring" in line or "takes another ring" in line for line in lines):
        mark("a ring from the background is compared")
    if any(type(action) is master_events.CancelMoonshot for action in actions):
        mark("a search in the background ends with its members")


def mark_loss(phase: str, next_phase: str, event: Any, mark: Callable[[str], None]) -> None:
    """Mark the paths of a peer in that phase that lost the master, or did not reach it."""
    if event.final:
        mark("the wrong secret is refused")
    elif event.reason.startswith("crc: ") and phase == "member":
        mark("a broken frame ends a membership at the peer")
    elif event.reason == "connection refused" and next_phase == "dialling":
        mark("a peer that joins waits for the next master")

"""Rare paths of the shared state that the seeds must have taken; recognised in the same way as in `paths`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.peer import events as peer_events
from pccl._core.peer.fetch import FETCHING, SEEKING, STRANDED, CloseLink, DialSource
from pccl._core.protocol import mailbox, messages
from pccl._core.protocol.events import Log
from pccl._core.protocol.outcomes import NO_SHARED_STATE_AVAILABLE, PENDING_ASYNC_OPS

if TYPE_CHECKING:
    from collections.abc import Callable

SYNC_PATHS = frozenset({
    # at the master
    "equal states are agreed at once",
    "a revision is repeated",
    "a state is fetched and agreed",
    "a transfer goes on without one of its sources",
    "every source is lost, and all calls fail",
    "a receiver is lost in a transfer",
    "a receiver that cannot fetch is kicked",
    "a caller gives up in a transfer",
    "a ring changes under a transfer",
    "a torn state is voted",
    "a divergent member is counted",
    "an outdated state is overwritten",
    "no peer may send its state",
    "no peer has the agreed state",
    "schemas are asked for",
    "an odd schema is kicked",
    "schemas without a majority are explained",
    "a revision beyond is kicked",
    "mixed strategies are kicked",
    "a losing sender is kicked",
    "a sync and another call never meet",
    "a straggler of a sync is kicked",
    "a long sync names the missing",
    # at a peer
    "a state is described",
    "an answer waits for the description",
    "an order comes after its sync was given up",
    "a description is given up",
    "a source is lost before the description",
    "a source is dropped",
    "a stranded peer is given sources",
    "a transfer ends with the membership",
    "close waits for a transfer",
    "a description comes after the end",
    "no sync with reduces under way",
    "no sync beside another call",
    "no topology vote beside a sync",
    # at a fetch
    "a link comes before the order to serve",
    "a source is dialled again",
    "a link to a source is closed",
    "a unit is half overwritten",
    "the holder is lost, and other manifests are asked for",
    "a stranded fetch goes on",
})  # fmt: skip


def mark_master(
    state: Any, before: tuple[Any, ...], event: Any, actions: list[Any], mark: Callable[[str], None]
) -> None:
    """Mark the paths of an event that the master handled; `before` is what `remember` returned."""
    sent = [action.message for action in actions if type(action) is master_events.SendTo]
    message = event.message if type(event) is master_events.PeerSaid else None
    kinds = {type(one) for one in sent}
    if messages.SyncDone in kinds:
        if type(message) is messages.VoteSync:
            mark("equal states are agreed at once" if master_events.Save() in actions else "a revision is repeated")
        elif type(message) is messages.Fetched:
            mark("a state is fetched and agreed")
    if any(type(action) is Log and "overwritten by a sync" in action.line for action in actions):
        mark("a divergent member is counted")
    if messages.RingOrder in kinds and any(group.consensus.transfer for group in state.members.groups.values()):
        mark("a ring changes under a transfer")
    transfer, receivers = before
    if receivers - state.members.peers.keys():
        mark("a receiver is lost in a transfer")
    if type(message) is messages.Withdraw and transfer is not None:
        mark("a caller gives up in a transfer")
    if type(message) is messages.VoteSync and message.torn:
        mark("a torn state is voted")
    for one in sent:
        _mark_word(one, mark)


def remember(state: Any, event: Any) -> tuple[Any, set[int]]:
    """Return the transfer in which the sender of the event takes part, and the peers that fetch in any."""
    transfers = [group.consensus.transfer for group in state.members.groups.values() if group.consensus.transfer]
    receivers = {peer for transfer in transfers for peer in transfer.fetching}
    peer = state.members.conns.get(getattr(event, "conn", 0))
    mine = [transfer for transfer in transfers if peer is not None and peer.id in transfer.votes]
    return (mine[0] if mine else None), receivers


def _mark_word(message: Any, mark: Callable[[str], None]) -> None:
    kind = type(message)
    if kind is messages.Fetch and message.whole:
        mark("an outdated state is overwritten")
    elif kind is messages.AskSchema:
        mark("schemas are asked for")
    elif kind is messages.SourceGone:
        mark("a transfer goes on without one of its sources")
    elif kind is messages.Notice and message.line.startswith("sync_shared_state"):
        mark("a long sync names the missing")
    elif kind is messages.CallFailed and message.result == NO_SHARED_STATE_AVAILABLE:
        mark("no peer has the agreed state")
    elif kind is messages.CallFailed or kind is messages.Kick:
        for part, name in _REASONS.items():
            if part in message.reason:
                mark(name)


_REASONS = {
    "every peer that had the state": "every source is lost, and all calls fail",
    "it cannot fetch the shared state": "a receiver that cannot fetch is kicked",
    "with RECEIVE_ONLY: no peer": "no peer may send its state",
    " in sync_shared_state;": "a sync and another call never meet",
    "the members do not agree on what the shared state is": "schemas without a majority are explained",
    "its shared state is laid out differently": "an odd schema is kicked",
    "its shared state is at revision": "a revision beyond is kicked",
    "with ENFORCE_POPULAR": "mixed strategies are kicked",
    "with SEND_ONLY, but its state": "a losing sender is kicked",
    "for it in sync_shared_state": "a straggler of a sync is kicked",
}


def mark_peer(phase: str, event: Any, actions: list[Any], mark: Callable[[str], None]) -> None:
    """Mark the paths of an event that a peer in that phase handled."""
    kinds = {type(action) for action in actions}
    if type(event) is peer_events.MasterSaid:
        _mark_order(type(event.message), kinds, mark)
    elif type(event) is peer_events.TransferEnded and phase == "gone":
        mark("a transfer ends with the membership")
        if peer_events.Stop in kinds:
            mark("close waits for a transfer")
    elif type(event) is peer_events.Called:
        _mark_call(phase, type(event.call), actions, kinds, mark)


def _mark_order(word: type[Any], kinds: set[type[Any]], mark: Callable[[str], None]) -> None:
    if word in (messages.Serve, messages.Fetch) and peer_events.Complete in kinds:
        mark("a state is described")
    elif word in (messages.Serve, messages.Fetch) and not kinds:
        mark("an order comes after its sync was given up")
    elif word is messages.SyncDone and not kinds:
        mark("an answer waits for the description")
    elif word is messages.MoreSources and peer_events.AddSources in kinds:
        mark("a stranded peer is given sources")
    elif word is messages.SourceGone:
        mark("a source is dropped" if peer_events.DropSource in kinds else "a source is lost before the description")


def _mark_call(
    phase: str, call: type[Any], actions: list[Any], kinds: set[type[Any]], mark: Callable[[str], None]
) -> None:
    if call is mailbox.CallManifest and phase == "gone":
        mark("a description comes after the end")
    elif call is mailbox.CallCancel and [type(getattr(action, "message", None)) for action in actions] == [
        messages.Withdraw
    ]:
        mark("a description is given up")
    elif call is mailbox.CallSync and peer_events.Complete in kinds and phase == "member":
        busy = actions[0].result == PENDING_ASYNC_OPS
        mark("no sync with reduces under way" if busy else "no sync beside another call")
    elif call is mailbox.CallTopology and peer_events.Complete in kinds and b"is in sync_shared" in actions[0].payload:
        mark("no topology vote beside a sync")


def mark_fetch(before: str, after: str, actions: list[Any], mark: Callable[[str], None]) -> None:
    """Mark the paths of an event that took a fetch from one phase to another."""
    if any(type(action) is DialSource and action.attempt for action in actions):
        mark("a source is dialled again")
    if any(type(action) is CloseLink for action in actions):
        mark("a link to a source is closed")
    if (before, after) == (FETCHING, SEEKING):
        mark("the holder is lost, and other manifests are asked for")
    if before == STRANDED and after != STRANDED:
        mark("a stranded fetch goes on")

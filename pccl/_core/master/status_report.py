"""The status report for operators: one JSON-ready dict of plain numbers, texts and lists, made when an operator asks.

A pure function of the machine: it reads public attributes, changes nothing and keeps nothing, so it costs nothing while
no operator asks. Durations are seconds, peers are named by their ids, everything is in a fixed order. Every list
is cut at a bound, with the full count beside it, so that the report of the largest run fits.

    run name finished round uptime_seconds world counters   the run as a whole
    remembered[] name finished revisions      other runs of this master
    newcomers   count peers reason            peers that wait to become members, and for what
    peers[]     id group address lanes state phase_seconds call call_seconds heard_seconds, and what its lanes move
    groups[]    group members epoch ring wiring revision digest unreachable running commenced bandwidths
    votes[]     call group seconds present missing reason

A group's `bandwidths` are what is known of its directed edges, with age and origin (see `bandwidths`).
"""

from __future__ import annotations

from itertools import chain, islice

from pccl._core.protocol.codec import BLOB_BYTES_MAX
from pccl._core.protocol.events import OPTIMIZE, SYNC, TOPOLOGY
from pccl._core.protocol.messages import REPORT_BYTES_MAX, Report
from pccl._core.records import record

from .ballots import OpenCall, name_missing
from .deadlock import name_peers
from .topology_round import CLOSED, HELD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .group import Group
    from .master_state import MasterState
    from .membership import Peer

REPORT_ITEMS_MAX = 1024  # of any list: more than a person reads, and a report of a few hundred kilobytes
REPORT_TAGS_MAX = 32  # of a group's collectives, the oldest first: a loop may launch thousands, and all wait alike


@record
class WaitingCall:
    """A call that has no answer yet, and the peers that it waits for."""

    name: str
    group: int | None  # None: a call of all members of the run
    began_ns: int
    present: dict[int, int]  # peer in it -> since when
    missing: frozenset[int]  # peers that have yet to make it; empty: it is under way


def report_pages(state: MasterState, now_ns: int, **facts: Any) -> list[Report]:
    """Return the status report, with these facts about the master's process, as the pages that are sent."""
    import json  # here, because a master needs it only if an operator asks

    most = REPORT_ITEMS_MAX
    while True:
        text = json.dumps({**facts, **status_document(state, now_ns, most)}, separators=(",", ":")).encode()
        if len(text) <= REPORT_BYTES_MAX or most == 1:
            break
        most //= 2  # many groups with large rings: shorter lists until it fits
    cuts = range(0, len(text), BLOB_BYTES_MAX)
    return [Report(page, len(cuts), text[cut : cut + BLOB_BYTES_MAX]) for page, cut in enumerate(cuts)]


def status_document(state: MasterState, now_ns: int, most: int = REPORT_ITEMS_MAX) -> dict[str, Any]:
    """The run at this moment. No list is longer than `most`."""
    members = state.members
    votes = _votes(state)
    busy = _who_is_in_what(state, votes)
    groups = sorted(members.groups)
    return {
        "run": members.run.hex(),
        "name": members.run_name,
        "finished": state.runs.finished,
        "round": members.round,
        "uptime_seconds": _seconds(now_ns - members.began_ns),
        "world": len(members.accepted),
        "counters": dict(members.counters),
        "newcomers": {
            "count": len(members.registered) + len(members.admitting),
            "peers": _cut(members.registered | members.admitting, most),
            "reason": _why_newcomers_wait(state, votes),
        },
        "peers_count": len(members.peers),
        "peers": [_peer(state, members.peers[peer], busy.get(peer), now_ns) for peer in _cut(members.peers, most)],
        "remembered": [
            {"name": name, "finished": run.finished, "revisions": dict(islice(run.revisions().items(), most))}
            for name, run in state.runs.table.runs.items()
        ],
        "groups_count": len(groups),
        "groups": [_group(members.groups[number], now_ns, most) for number in groups[:most]],
        "votes_count": len(votes),
        "votes": [_vote(state, call, votes, now_ns, most) for call in votes[:most]],
    }


# ---------------------------------------------------------------------------------------------- calls under way


def _votes(state: MasterState) -> list[WaitingCall]:
    """Return the calls that members have made and that are not answered: those of the run, then each group's."""
    members = state.members
    calls = []
    for name, votes in state.votes.items():
        if votes:
            since = {peer: vote.since_ns for peer, vote in votes.items()}
            closed = name == TOPOLOGY and state.topology_round.phase == CLOSED
            missing = frozenset() if closed else frozenset(members.accepted - votes.keys())
            calls.append(WaitingCall(name, None, min(since.values()), since, missing))
    if state.optimizer.waiting:
        since = {peer: vote.since_ns for peer, vote in state.optimizer.waiting.items()}
        calls.append(WaitingCall(OPTIMIZE, None, min(since.values()), since, frozenset()))
    for number, group in sorted(members.groups.items()):
        for open_tag in islice(group.collectives.open.values(), REPORT_TAGS_MAX):
            since = dict.fromkeys(open_tag.signatures, open_tag.began_ns)
            name = f"all_reduce (tag {open_tag.tag})"
            calls.append(WaitingCall(name, number, open_tag.began_ns, since, frozenset(group.ring) - since.keys()))
        if group.consensus.votes:
            since = {peer: vote.since_ns for peer, vote in group.consensus.votes.items()}
            calls.append(WaitingCall(SYNC, number, min(since.values()), since, frozenset(group.ring) - since.keys()))
    return calls


def _who_is_in_what(state: MasterState, votes: list[WaitingCall]) -> dict[int, tuple[str, str, int]]:
    """Return peer -> (state, call, since when). Votes replace reduces: a peer that votes waits for others."""
    busy: dict[int, tuple[str, str, int]] = {}
    for group in state.members.groups.values():
        for run in islice(group.collectives.running.values(), REPORT_TAGS_MAX):
            for peer in run.members:
                busy.setdefault(peer, ("reducing", f"all_reduce (tag {run.tag})", run.began_ns))
    for call in reversed(votes):
        for peer, since_ns in call.present.items():
            busy[peer] = "voting", call.name, since_ns
    return busy


def _why_newcomers_wait(state: MasterState, votes: list[WaitingCall]) -> str:
    """Why newcomers wait; empty if there are none."""
    members = state.members
    if members.wiring and (members.registered or members.admitting):
        late = chain.from_iterable(members.groups[number].waiting for number in members.wiring)
        return f"rings are being wired; reports are missing of {name_peers(sorted(late))}"
    if not members.registered:
        return ""
    missing = members.accepted - state.votes[TOPOLOGY].keys()
    return f"they are admitted when all members call update_topology; missing: {_name_missing(missing, votes)}"


def _name_missing(missing: Iterable[int], votes: list[WaitingCall]) -> str:
    return name_missing(set(missing), [OpenCall(call.name, call.missing, call.present) for call in votes])


# ---------------------------------------------------------------------------------------------- the parts


def _peer(state: MasterState, peer: Peer, busy: tuple[str, str, int] | None, now_ns: int) -> dict[str, Any]:
    members = state.members
    what, call, since_ns = busy or ("idle", None, now_ns)
    if peer.id in members.registered:
        what = "newcomer"
    elif peer.id in members.admitting:
        what = "joining"
    elif peer.id in members.groups[peer.group].waiting:
        what = "wiring"
    return {
        "id": peer.id,
        "group": peer.group,
        "address": f"[{peer.host}]:{peer.port}" if ":" in peer.host else f"{peer.host}:{peer.port}",
        "lanes": peer.lanes,
        "state": what,
        "phase_seconds": _seconds(now_ns - peer.phase_ns),
        "call": call,
        "call_seconds": _seconds(now_ns - since_ns) if call else None,
        "heard_seconds": _seconds(now_ns - peer.heard_ns),
        "tx_bytes": peer.tx_bytes,
        "rx_bytes": peer.rx_bytes,
        "tx_bytes_per_second": round(peer.tx_rate),
        "rx_bytes_per_second": round(peer.rx_rate),
        "overwritten": peer.overwritten,
    }


def _group(group: Group, now_ns: int, most: int) -> dict[str, Any]:
    marks = sorted((pair, mark) for pair, mark in group.marks.items() if mark[0] > now_ns)
    return {
        "group": group.number,
        "members": group.size(),
        "epoch": group.epoch,
        "ring": group.ring[:most],
        "wiring": _cut(group.waiting, most),
        "revision": group.consensus.revision if group.consensus.revision >= 0 else None,
        "digest": group.consensus.content.hex() or None,
        "unreachable": [
            {"source": source, "target": target, "reason": reason, "seconds_left": _seconds(expiry_ns - now_ns)}
            for (source, target), (expiry_ns, reason) in marks[:most]
        ],
        "running": len(group.collectives.running),
        "commenced": group.collectives.latest,
        "bandwidths": _bandwidths(group, now_ns, most),
    }


def _bandwidths(group: Group, now_ns: int, most: int) -> dict[str, Any]:
    known = group.bandwidths.report(now_ns)
    edges = known["edges"]
    return {"edges_count": len(edges), "edges": edges[:most], "stale": known["stale"], "unknown": known["unknown"]}


def _vote(state: MasterState, call: WaitingCall, votes: list[WaitingCall], now_ns: int, most: int) -> dict[str, Any]:
    if call.missing:
        reason = f"waits for {_name_missing(call.missing, votes)}"
    elif call.name == OPTIMIZE:
        measuring = sorted(number for number, one in state.optimizer.measurements.items() if not one.is_over())
        reason = f"all have voted; groups {measuring} measure their edges" if measuring else "the rings are being wired"
    elif call.group is None and state.topology_round.phase == CLOSED:
        reason = "all have voted; the rings are being wired"
    elif call.group is None and state.topology_round.phase == HELD:
        reason = "all have voted, and each waits for a larger group (wait_for_world_size)"
    else:
        reason = "all have voted; the ring is being wired"
    return {
        "call": call.name,
        "group": call.group,
        "seconds": _seconds(now_ns - call.began_ns),
        "present_count": len(call.present),
        "present": _cut(call.present, most),
        "missing_count": len(call.missing),
        "missing": _cut(call.missing, most),
        "reason": reason,
    }


def _cut(peers: Iterable[int], most: int) -> list[int]:
    return sorted(peers)[:most]


def _seconds(duration_ns: int) -> float:
    return round(max(duration_ns, 0) / 1e9, 3)

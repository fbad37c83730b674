"""The invariants of the master's machine between two events, and the changes that an event may make.

Run after every event in all tests. Every change is compared with the tables of the peers' phases, of a group's
consensus and of its collectives. Pure, changes nothing.
"""

from __future__ import annotations

from pccl._core.protocol.events import PENDING, TOPOLOGY
from pccl._core.records import record

from .collectives import DONE, FAILED, FREE
from .events import PeerSaid, PeerWent
from .group_phases import COLLECTIVES, CONSENSUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .group import Group
    from .group_phases import Table
    from .membership import Peer


@record
class Before:
    """The phases before an event: of its sender and of the sender's group."""

    peer: Peer
    phase: str
    group: Group | None  # None: the sender is in no ring
    ring: set[int]
    consensus: str
    tags: dict[tuple[int, int], str] | None  # (member, tag) -> phase; None: too many to compare after every event


# Pairs of member and tag that are compared after every event. In a live run with hundreds of tags in flight the
# comparison would take longer than the reduces, and a master that is busy with it looks dead to its peers.
PAIRS_MAX = 128


def observe(master: Any, event: Any) -> Before | None:
    """Note the phases before an event. None if the event is not about a peer that the master knows."""
    peer = master.members.conns.get(event.conn) if type(event) in (PeerSaid, PeerWent) else None
    if peer is None:
        return None
    group = master.members.groups.get(peer.group)
    if group is None or peer.id not in group.ring:
        return Before(peer, peer.phase, None, set(), "", {})
    return Before(peer, peer.phase, group, set(group.ring), group.consensus.phase(), _tags_of(group))


def _tags_of(group: Group) -> dict[tuple[int, int], str] | None:
    pairs = sum(len(held) for held in group.collectives.held.values())
    return group.collectives.phases() if pairs <= PAIRS_MAX else None


def check_transitions(before: Before, event: Any, table: Table) -> None:
    """Assert that a table allows every change that an event made. `table` is that of the peers' phases."""
    kind = type(event.message) if type(event) is PeerSaid else PeerWent
    peer, group = before.peer, before.group
    row = table.get((before.phase, kind))
    if row is not None:
        assert peer.phase in row[1], f"{kind.__name__} led from {before.phase} to {peer.phase}"
    if group is None or not group.ring:
        return
    gone = before.ring - set(group.ring)
    kinds = {kind, PeerWent} if gone else {kind} - {PeerWent}
    after = group.consensus.phase()
    legal = _next_phases(CONSENSUS, before.consensus, kinds)
    assert after in legal, f"{kind.__name__} led the consensus from {before.consensus} to {after}"
    tags = _tags_of(group)
    if before.tags is None or tags is None:
        return
    for key in before.tags.keys() | tags.keys():
        was, now = before.tags.get(key, FREE), tags.get(key, FREE)
        if key[0] in gone:
            continue
        legal = _next_phases(COLLECTIVES, was, kinds)
        if now == FREE:
            ended = legal & {FREE, DONE, FAILED}
            assert ended, f"{kind.__name__} ended tag {key[1]} of peer {key[0]}, which was {was}"
        else:
            assert now in legal, f"{kind.__name__} led tag {key[1]} of peer {key[0]} from {was} to {now}"


def _next_phases(table: Table, phase: str, kinds: set[type[Any]]) -> set[str]:
    """Return the phases that these rows name; the same phase if they name none."""
    rows = [table[phase, kind][1] for kind in kinds if (phase, kind) in table]
    return {following for row in rows for following in row} or {phase}


def check_master(master: Any) -> None:
    """Raise AssertionError if an invariant is broken. Private parts of the machine are read here."""
    members = master.members
    ids = set(members.peers)
    assert {peer.id for peer in members.conns.values()} == ids, "a connection without its peer, or the reverse"
    assert members.accepted | members.registered | members.admitting == ids, "a peer in no phase"
    assert len(members.accepted) + len(members.registered) + len(members.admitting) == len(ids), "a peer in two phases"
    assert members.admission or not members.admitting, "admitting outside a round"
    assert not members.changed, f"groups {members.changed} changed, but were not ordered anew"
    assert not members.unsettled, f"groups {members.unsettled} were not settled"
    assert members.accepted or not members.registered or members.admission, "newcomers wait in a run without members"
    in_rings = {peer_id for group in members.groups.values() for peer_id in group.ring}
    assert in_rings == members.accepted | members.admitting, f"rings hold {in_rings}"
    for number, group in members.groups.items():
        group.check()
        wired = number not in members.wiring
        group.collectives.check(group.ring, wired, wired and not group.newcomers)
        _check_consensus(master, group)
        assert bool(group.waiting) == (number in members.wiring), f"group {number}: waiting {group.waiting}"
        assert group.newcomers == members.admitting & set(group.ring), (
            f"group {number}: newcomers in the ring are not admitted"
        )
        assert all(members.peers[peer_id].group == number for peer_id in group.ring), f"group {number}: wrong member"
    for name, votes in master.votes.items():
        assert set(votes) <= members.accepted, f"{name}: a vote of a peer that is no member"
    assert not master.votes[PENDING] or len(master.votes[PENDING]) < len(members.accepted), "a vote was not answered"
    assert not master.on_hold or not master._is_a_voter_content(), "a round is on hold without a reason"
    assert members.wiring or members.admission or not master._round_is_ripe(), "a unanimous round was left open"
    assert not (members.admission and not members.wiring), "a wired round was left open"


def _check_consensus(master: Any, group: Any) -> None:
    """Assert that a member in a sync is in no other major call."""
    consensus = group.consensus
    if consensus.is_idle():
        consensus.check(set())
        return
    members = group.members()
    consensus.check(members)
    for peer_id in members:
        if consensus.holds(peer_id):
            assert peer_id not in master.votes[TOPOLOGY], f"peer {peer_id} votes on the topology beside a sync"
            assert peer_id not in master.optimizer.waiting, f"peer {peer_id} optimises beside a sync"
            assert not group.collectives.holds(peer_id), f"peer {peer_id} reduces beside a sync"

"""The invariants of the master's machine between two events, and the changes that an event may make.

Run after every event in all tests. Every change is compared with the tables of the peers' phases, of the groups'
consensus and of their collectives; the topology round and the optimisation do that themselves. Pure, changes nothing.
"""

from __future__ import annotations

from pccl._core.protocol.events import PENDING, TOPOLOGY, Tick
from pccl._core.records import record

from .collectives import DONE, FAILED, FREE
from .events import PeerSaid, PeerWent
from .group_phases import COLLECTIVES, CONSENSUS
from .membership import GONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .group import Group
    from .group_phases import PhaseTable
    from .membership import Peer

    Table = Mapping[tuple[str, type[Any]], tuple[Any, tuple[str, ...]]]


@record
class GroupBefore:
    """The phases of one group before an event."""

    group: Group
    ring: set[int]
    consensus: str
    tags: dict[tuple[int, int], str] | None  # (member, tag) -> phase; None: too many to compare after every event


@record
class Before:
    """The phases before an event, of all peers that it concerns and of all groups."""

    peers: list[tuple[Peer, str]]  # the sender, or every peer if time has passed
    groups: list[GroupBefore]


# Pairs of member and tag, in all groups, that are compared after every event. In a live run with hundreds of tags in
# flight the comparison would take longer than the reduces, and a master that is busy with it looks dead to its peers.
PAIRS_MAX = 128


def observe(master: Any, event: Any) -> Before:
    """Note the phases before an event."""
    members = master.members
    peers: list[Peer] = []
    if type(event) in (PeerSaid, PeerWent):
        peers = [members.conns[event.conn]] if event.conn in members.conns else []
    elif type(event) is Tick:
        peers = list(members.peers.values())
    few = _has_few_pairs(master)
    groups = [
        GroupBefore(group, set(group.ring), group.consensus.phase(), group.collectives.phases() if few else None)
        for group in members.groups.values()
    ]
    return Before([(peer, peer.phase) for peer in peers], groups)


def _has_few_pairs(master: Any) -> bool:
    pairs = 0
    for group in master.members.groups.values():
        pairs += sum(map(len, group.collectives.held.values()))
        if pairs > PAIRS_MAX:
            return False
    return True


def check_transitions(master: Any, before: Before, event: Any, table: Table) -> None:
    """Assert that a table allows every change that an event made. `table` is that of the peers' phases."""
    kind = type(event.message) if type(event) is PeerSaid else type(event)
    for peer, phase in before.peers:
        _, legal = table.get((phase, kind), (None, (GONE,)))
        assert peer.phase in legal, f"{kind.__name__} led from {phase} to {peer.phase}"
    few = _has_few_pairs(master)
    for noted in before.groups:
        if noted.group.ring:
            gone = noted.ring - set(noted.group.ring)
            kinds = {kind, PeerWent} if gone else {kind} - {PeerWent}  # the loss concerns only the group that has it
            _check_group(noted, kinds, gone, kind.__name__, few)


def _check_group(before: GroupBefore, kinds: set[type[Any]], gone: set[int], name: str, few: bool) -> None:
    """Assert that the tables allow every change in a group. `gone` are members that it lost."""
    after = before.group.consensus.phase()
    legal = _next_phases(CONSENSUS, before.consensus, kinds)
    assert after in legal, f"{name} led the consensus from {before.consensus} to {after}"
    if before.tags is None or not few:
        return
    tags = before.group.collectives.phases()
    for key in before.tags.keys() | tags.keys():
        was, now = before.tags.get(key, FREE), tags.get(key, FREE)
        if key[0] in gone:
            continue
        legal = _next_phases(COLLECTIVES, was, kinds)
        if now == FREE:
            ended = legal & {FREE, DONE, FAILED}
            assert ended, f"{name} ended tag {key[1]} of peer {key[0]}, which was {was}"
        else:
            assert now in legal, f"{name} led tag {key[1]} of peer {key[0]} from {was} to {now}"


def _next_phases(table: PhaseTable, phase: str, kinds: set[type[Any]]) -> set[str]:
    """Return the phases that these rows name; the same phase if there is no row."""
    return {following for kind in kinds for following in table.get((phase, kind), ())} or {phase}


def check_master(master: Any) -> None:
    """Raise AssertionError if an invariant is broken. Private parts of the machine are read here."""
    members = master.members
    ids = set(members.peers)
    assert {peer.id for peer in members.conns.values()} == ids, "a connection without its peer, or the reverse"
    assert members.accepted | members.registered | members.admitting == ids, "a peer in no phase"
    assert len(members.accepted) + len(members.registered) + len(members.admitting) == len(ids), "a peer in two phases"
    assert not members.changed, f"groups {members.changed} changed, but were not ordered anew"
    assert not members.unsettled, f"groups {members.unsettled} were not settled"
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


def _check_consensus(master: Any, group: Any) -> None:
    """Assert that a member in a sync is in no other major call."""
    consensus = group.consensus
    assert consensus.synced <= set(group.ring), f"group {group.number}: {consensus.synced} synced, but are no members"
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

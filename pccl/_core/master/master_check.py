"""What holds in the master's machine between two events; run after every one in all tests. Pure, changes nothing."""

from __future__ import annotations

from pccl._core.protocol.events import PENDING, TOPOLOGY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def check_master(master: Any) -> None:
    """Raises an AssertionError that says what was expected. The machine shows more of itself here than elsewhere."""
    ids = set(master.peers)
    assert {peer.id for peer in master.conns.values()} == ids, "a connection without its peer, or the reverse"
    assert master.accepted | master.registered | master.admitting == ids, "a peer in no phase"
    assert len(master.accepted) + len(master.registered) + len(master.admitting) == len(ids), "a peer in two phases"
    assert master.admission or not master.admitting, "admitting outside a round"
    assert not master.members.changed, f"groups {master.members.changed} changed, but were not ordered anew"
    assert not master.members.unsettled, f"groups {master.members.unsettled} were not settled"
    assert master.accepted or not master.registered or master.admission, "newcomers wait in a run without members"
    in_rings = {peer_id for group in master.groups.values() for peer_id in group.ring}
    assert in_rings == master.accepted | master.admitting, f"rings hold {in_rings}"
    for number, group in master.groups.items():
        group.check()
        wired = number not in master.wiring
        group.collectives.check(group.ring, wired, wired and not group.newcomers)
        _check_consensus(master, group)
        assert bool(group.waiting) == (number in master.wiring), f"group {number}: waiting {group.waiting}"
        assert group.newcomers == master.admitting & set(group.ring), f"group {number}: strangers in the ring"
        assert all(master.peers[peer_id].group == number for peer_id in group.ring), f"group {number}: wrong member"
    for name, votes in master.votes.items():
        assert set(votes) <= master.accepted, f"{name}: a vote of somebody who is no member"
    assert not master.votes[PENDING] or len(master.votes[PENDING]) < len(master.accepted), "an answer was forgotten"
    assert not master.on_hold or not master._is_a_voter_content(), "a round is held though somebody is content"
    assert master.wiring or master.admission or not master._round_is_ripe(), "a unanimous round was left open"
    assert not (master.admission and not master.wiring), "a wired round was left open"


def _check_consensus(master: Any, group: Any) -> None:
    """Whoever synchronises makes no other major call meanwhile."""
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

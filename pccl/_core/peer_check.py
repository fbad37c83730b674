"""What holds in the peer's machine between two events; run after every one in all tests. Pure, changes nothing."""

from __future__ import annotations

from .events import OPTIMIZE, TOPOLOGY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def check_peer(peer: Any) -> None:
    """Raises an AssertionError that says what was expected."""
    phase, wiring, reductions, syncing = peer.phase, peer.wiring, peer.reductions, peer.syncing
    wiring.check()
    assert phase in ("joining", "member") or not wiring.links, f"lanes while {phase}"
    assert phase in ("dialling", "joining", "member") or not wiring.early, f"early lanes while {phase}"
    assert phase in ("joining", "member") or not wiring.id, f"peer {wiring.id} while {phase}"
    assert phase != "member" or wiring.id, "a member without a name"
    reductions.check(phase == "member")
    syncing.check(phase == "member")
    busy = reductions.tags or syncing.sync is not None
    assert phase in ("member", "gone") or not busy, f"reduces or a sync while {phase}"
    votes = peer.calls.open.keys() & {TOPOLOGY, OPTIMIZE}
    assert not votes or not busy, f"in {votes} with reduces or a sync under way"
    assert len(votes) < 2, f"in {TOPOLOGY} and {OPTIMIZE} at once"
    assert phase == "member" or peer.probe is None, f"measures an edge while {phase}"
    assert not reductions.tags or syncing.sync is None, "a sync beside reduces"
    assert not peer.leaving or (phase == "gone" and busy), "close() was not answered"
    peer.calls.check()
    assert phase == "member" or not peer.calls.open, f"calls {peer.calls.open} while {phase}"
    assert (peer.connecting is not None) == (phase in ("dialling", "joining")), f"connect() lost while {phase}"

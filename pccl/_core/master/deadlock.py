"""Deadlocks: calls that can never complete, found from which peers wait for which.

A blocking call completes when its whole electorate has made it. A peer in no call may still make any call; a peer in a
call continues when one of its calls completes. The search begins with the free peers and adds every peer that can
continue, until nothing changes; the other peers wait for ever. A peer with threads in several calls counts as free when
one of these calls can complete, and while one of its threads is in no call; so there is no false alarm.

Stuck peers that wait for each other form one *knot*; two knots do not concern each other. If more than half of a knot
waits in the same call, the peers that this call misses are *odd*: without them it completes, because every other peer
that it misses can continue. Pure functions over names and peer ids.
"""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from typing import Any

REMEDY = "Let all peers make the same blocking calls in the same order."


@record
class BlockingCall:
    """One call under way: its name, the peers that must make it, and the peers that have."""

    name: str
    electorate: frozenset[int]
    present: frozenset[int]


def find_stuck(calls: list[BlockingCall], free: AbstractSet[int] = frozenset()) -> set[int]:
    """Return the peers that wait in calls which can never complete; those in `free` may still make any call."""
    blocked: set[int] = set()
    for call in calls:
        blocked |= call.present
    free = set(free)
    changed = True
    while changed:
        changed = False
        for call in calls:
            if call.present <= free:
                continue
            if all(peer in free or peer not in blocked for peer in call.electorate - call.present):
                free |= call.present
                changed = True
    return blocked - free


def find_knots(calls: list[BlockingCall], stuck: set[int]) -> list[set[int]]:
    """Return the stuck peers, those together that share a call or wait for each other; the lowest peer first."""
    knots: list[set[int]] = []
    for call in calls:
        if call.present & stuck:
            joined = set(call.present | call.electorate) & stuck
            apart = [knot for knot in knots if not knot & joined]
            knots = [*apart, joined.union(*[knot for knot in knots if knot & joined])]
    return sorted(knots, key=min)


def find_odd(calls: list[BlockingCall], knot: set[int]) -> dict[int, str]:
    """Return the peers of a knot that its majority waits for, each with the reason; nothing without a majority."""
    largest = max(calls, key=lambda call: len(call.present & knot))
    majority = largest.present & knot
    if 2 * len(majority) <= len(knot):
        return {}
    odd = sorted(largest.electorate & knot - majority)
    return {peer: _explain_odd(calls, peer, largest.name, majority) for peer in odd}


def _explain_odd(calls: list[BlockingCall], peer: int, name: str, majority: frozenset[int]) -> str:
    own = " and ".join(sorted({call.name for call in calls if peer in call.present}))
    return (
        f"it waits in {own}, and the majority ({name_peers(sorted(majority))}) in {name}: these calls can never meet. "
        f"{REMEDY}"
    )


def explain_stuck(calls: list[BlockingCall], stuck: set[int]) -> str:
    """One sentence that names every call, the peers in it, and the remedy."""
    parts = []
    for call in sorted(calls, key=lambda call: call.name):
        present = sorted(call.present & stuck)
        if present:
            parts.append(f"{name_peers(present)} in {call.name}")
    return f"these calls can never meet: {'; '.join(parts)}. Each waits for the others to make the same call. {REMEDY}"


def describe_missing(votes: dict[str, dict[int, Any]], missing: list[int]) -> str:
    """Which peers are missing, and which calls they are in instead; `votes` is call name to voters."""
    parts, idle = [], set(missing)
    for name in sorted(votes):
        busy = [peer for peer in missing if peer in votes[name]]
        if busy:
            parts.append(f"{name_peers(busy)} (in {name})")
            idle.difference_update(busy)
    if idle:
        parts.append(f"{name_peers(sorted(idle))} (in no call)")
    return ", ".join(parts) or "nobody"


def name_peers(peers: list[int], most: int = 8) -> str:
    """`peer 3` or `peers 1, 2, 5 and 90 more`: short also in a run of a hundred peers."""
    if len(peers) == 1:
        return f"peer {peers[0]}"
    shown = ", ".join(str(peer) for peer in peers[:most])
    rest = f" and {len(peers) - most} more" if len(peers) > most else ""
    return f"peers {shown}{rest}"

"""Deadlocks: calls that can never complete, found from which peers wait for which.

A blocking call completes when its whole electorate has made it. A peer in no call may still make any call; a peer in a
call continues when one of its calls completes. The search begins with the free peers and adds every peer that can
continue, until nothing changes; the other peers wait for ever. A peer with threads in several calls counts as free when
one of these calls can complete, so there is no false alarm. Pure functions over names and peer ids.
"""

from __future__ import annotations

from pccl._core.records import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@record
class BlockingCall:
    """One call under way: its name, the peers that must make it, and the peers that have."""

    name: str
    electorate: frozenset[int]
    present: frozenset[int]


def find_stuck(calls: list[BlockingCall]) -> set[int]:
    """Return the peers that wait in calls which can never complete."""
    blocked: set[int] = set()
    for call in calls:
        blocked |= call.present
    free: set[int] = set()
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


def explain_stuck(calls: list[BlockingCall], stuck: set[int]) -> str:
    """One sentence that names every call, the peers in it, and the remedy."""
    parts = []
    for call in sorted(calls, key=lambda call: call.name):
        present = sorted(call.present & stuck)
        if present:
            parts.append(f"{name_peers(present)} in {call.name}")
    return (
        f"these calls can never meet: {'; '.join(parts)}. Each waits for the others to make the same call. "
        "Let all peers make the same blocking calls in the same order."
    )


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

"""Ring orders that avoid the pairs which cannot connect.

A ring visits every member once and comes back; a forbidden pair (source, target) may not be one of its steps. The
preferred order wins whenever it is legal, so that as few connections as possible change. Finding a ring around
forbidden pairs is the Hamiltonian cycle problem: exact for small groups, a bounded search for large ones, where a real
network has few forbidden pairs and most orders are legal. Pure functions over peer ids; deterministic.
"""

from __future__ import annotations

EXHAUSTIVE_MAX = 12  # the exact search takes 2^n * n steps: some ten milliseconds at twelve
SPARING_MAX = 9  # members up to which every single removal is tried: nine searches of at most a few milliseconds
SEARCH_STEPS_MAX = 50_000  # the bounded search gives up after this, well below a tenth of a second

Pair = tuple[int, int]  # source, target


def steps_of(order: list[int]) -> list[Pair]:
    """The (source, target) steps of a ring; none if it has one member."""
    if len(order) < 2:
        return []
    return [(order[index - 1], order[index]) for index in range(len(order))]


def is_legal(order: list[int], forbidden: set[Pair]) -> bool:
    """Whether no step of the ring is forbidden."""
    return not forbidden or not any(step in forbidden for step in steps_of(order))


def find_ring(preferred: list[int], forbidden: set[Pair]) -> list[int] | None:
    """The preferred order if it is legal, else another ring of the same members, else None."""
    if is_legal(preferred, forbidden):
        return list(preferred)
    if len(preferred) <= EXHAUSTIVE_MAX:
        return _find_exactly(preferred, forbidden)
    return _find_by_search(preferred, forbidden)


def choose_victim(order: list[int], newcomers: set[int], forbidden: set[Pair], suspects: set[int]) -> int:
    """Return the peer to kick when no ring exists.

    The larger set that can form a ring goes on: a peer without which the others have a ring is preferred, a newcomer
    among such; then the peer with most forbidden pairs, then the youngest. Suspects are members that have fallen
    silent: a peer that cannot reach them must not be kicked for it.
    """
    members = set(order)
    blame = dict.fromkeys(order, 0)
    for source, target in forbidden:
        if source in members and target in members:
            blame[source] += 1
            blame[target] += 1
    guilty = [peer for peer in order if blame[peer]]
    silent = [peer for peer in guilty if peer in suspects]
    if silent:
        return max(silent, key=lambda peer: (blame[peer], peer))
    if len(order) <= SPARING_MAX:
        enough = [peer for peer in order if find_ring([other for other in order if other != peer], forbidden)]
        if enough:
            return max(enough, key=lambda peer: (peer in newcomers, blame[peer], peer))
    return max(guilty or order, key=lambda peer: (blame[peer], peer in newcomers, peer))


def _find_exactly(preferred: list[int], forbidden: set[Pair]) -> list[int] | None:
    """Dynamic programming over sets of members: where walks from the first member through a set can end."""
    count = len(preferred)
    sources = [0] * count  # bit s of sources[t]: the step from s to t is allowed
    for source in range(count):
        for target in range(count):
            if source != target and (preferred[source], preferred[target]) not in forbidden:
                sources[target] |= 1 << source
    ends = [0] * (1 << count)
    ends[1] = 1
    for visited in range(1, 1 << count, 2):
        if ends[visited]:
            for target in range(1, count):
                if not visited >> target & 1 and ends[visited] & sources[target]:
                    ends[visited | 1 << target] |= 1 << target
    visited = (1 << count) - 1
    last = ends[visited] & sources[0]
    if not last:
        return None
    walk: list[int] = []
    while visited != 1:
        index = last.bit_length() - 1
        walk.append(preferred[index])
        visited &= ~(1 << index)
        last = ends[visited] & sources[index]
    return [preferred[0], *reversed(walk)]


def _find_by_search(preferred: list[int], forbidden: set[Pair]) -> list[int] | None:
    """Depth first, trying the preferred successor first, so that most of the old ring survives."""
    count = len(preferred)
    position = {peer: index for index, peer in enumerate(preferred)}
    walk, used = [preferred[0]], {preferred[0]}
    trials = [iter(range(1, count + 1))]  # distances from the last member to the next candidate, in the preferred order
    for _ in range(SEARCH_STEPS_MAX):
        if len(walk) == count and (walk[-1], walk[0]) not in forbidden:
            return walk
        here = position[walk[-1]]
        for ahead in trials[-1] if len(walk) < count else ():
            candidate = preferred[(here + ahead) % count]
            if candidate not in used and (walk[-1], candidate) not in forbidden:
                walk.append(candidate)
                used.add(candidate)
                trials.append(iter(range(1, count + 1)))
                break
        else:
            trials.pop()
            used.discard(walk.pop())
            if not walk:
                return None
    return None

"""The rounds in which bandwidths are measured: in one round no peer sends to two peers or receives from two.

Two probes that share an uplink or a downlink would each measure half of it. A peer can send one probe and receive
another at once, because links carry both directions. So this is the colouring of the edges of a bipartite graph:
sources on one side, targets on the other, one colour per round. The peer with most edges on one side needs one round
for each of them; by König's theorem that many rounds are enough for all peers, and its proof is the algorithm. A new
edge takes a round that is free at both its ends. If there is none, it takes a round `ours` that is free at its source.
Another round `theirs` is free at its target: on the path of edges that begins at the target and that are in `ours` and
in `theirs` by turns, the two rounds are exchanged.

All edges among n peers take n - 1 rounds. Edges are taken in the order of the circle: first each peer to the next,
then each peer to the next but one; so a complete set needs no exchange.
Pure functions over peer ids; deterministic.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .ring import Pair


def rounds_needed(edges: Iterable[Pair]) -> int:
    """Return how many rounds these edges take: the most edges over which one peer sends, or receives."""
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for source, target in set(edges):
        sends[source] = sends.get(source, 0) + 1
        receives[target] = receives.get(target, 0) + 1
    return max([*sends.values(), *receives.values()], default=0)


def schedule(edges: Iterable[Pair]) -> list[list[Pair]]:
    """Return the rounds, the fullest first, each with its edges in order; every edge is in exactly one of them.

    Raises ValueError for an edge from a peer to itself.
    """
    wanted = set(edges)
    if any(source == target for source, target in wanted):
        raise ValueError("a peer has no edge to itself")
    position = {peer: index for index, peer in enumerate(sorted({peer for edge in wanted for peer in edge}))}
    count = rounds_needed(wanted)
    targets: dict[int, dict[int, int]] = {peer: {} for peer in position}  # source -> round -> target
    sources: dict[int, dict[int, int]] = {peer: {} for peer in position}  # target -> round -> source
    for source, target in sorted(
        wanted, key=lambda edge: ((position[edge[1]] - position[edge[0]]) % len(position), edge)
    ):
        ours = _free_round(count, targets[source], sources[target])
        if ours is None:
            ours = _free_round(count, targets[source], {})
            theirs = _free_round(count, {}, sources[target])
            assert ours is not None, "a source has as many edges as there are rounds, and one more"
            assert theirs is not None, "a target has as many edges as there are rounds, and one more"
            _make_way(target, ours, theirs, targets, sources)
        targets[source][ours] = target
        sources[target][ours] = source
    rounds: list[list[Pair]] = [[] for _ in range(count)]
    for source, by_round in targets.items():
        for index, goal in by_round.items():
            rounds[index].append((source, goal))
    return sorted(map(sorted, rounds), key=lambda edges: (-len(edges), edges))


def _free_round(count: int, one: dict[int, int], other: dict[int, int]) -> int | None:
    """Return the first round in which neither end has an edge; None if there is none."""
    for index in range(count):
        if index not in one and index not in other:
            return index
    return None


def _make_way(
    target: int, ours: int, theirs: int, targets: dict[int, dict[int, int]], sources: dict[int, dict[int, int]]
) -> None:
    """Free the round `ours` at the target, where `theirs` is free: exchange both along the path that begins there.

    The path goes from a target to a source over an edge of `ours`, and to the next target over an edge of `theirs`. It
    reaches every source over an edge of `ours`, so it never reaches the source of the new edge, which has none.
    """
    path: list[Pair] = []
    here: int | None = target
    while here is not None and ours in sources[here]:
        source = sources[here][ours]
        path.append((source, here))
        here = targets[source].get(theirs)
        if here is not None:
            path.append((source, here))
    # Remove all edges before the first is added: adjacent edges of the path exchange their rounds.
    for index, (source, goal) in enumerate(path):
        former = theirs if index % 2 else ours
        del targets[source][former], sources[goal][former]
    for index, (source, goal) in enumerate(path):
        later = ours if index % 2 else theirs
        targets[source][later] = goal
        sources[goal][later] = source

"""Long waits: what the master says about them, to which peers, and how often.

A wait that lasts is reported in one line, in the log of the master and to the peers that wait: what waits, since when,
for which peers, and in which call each of these is. The first report comes after `vote_warning`, the next ones after
twice, four times, eight times that time, measured from the begin of the wait. So a forgotten call is noticed within
seconds, and a long wait does not fill a log.

`find_waits` lists everything that waits at the master; `WaitWatch` remembers what was reported. Pure.
"""

from __future__ import annotations

from pccl._core.protocol.events import INFO, OPTIMIZE, SYNC, TOPOLOGY, WARNING
from pccl._core.records import record

from .ballots import name_missing
from .deadlock import name_peers
from .optimizer import IDLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .admission import Admission
    from .ballots import Ballots, OpenCall
    from .group import Group
    from .membership import Membership
    from .optimizer import Optimizer
    from .topology_round import TopologyRound

EDGES_MAX = 4  # edges that a line names


@record
class Wait:
    """One wait, as it is now."""

    key: tuple[object, ...]  # names the wait: the same as long as it lasts
    since_ns: int | None  # None: since it was seen first
    told: Iterable[int]  # peers that get the line
    line: Callable[[int], str]  # the line, for a wait of so many seconds
    level: int = WARNING
    logged: bool = True  # in the master's log too


class WaitWatch:
    """Which waits were reported, and when each is reported next."""

    def __init__(self, first_ns: int) -> None:
        self._first_ns = first_ns  # of the first report; 0: there are none
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}  # key -> (since when, reported next after so long)

    def due(self, waits: Iterable[Wait], now_ns: int) -> list[tuple[Wait, str]]:
        """Return the waits to report now with their lines. `waits` are all that there are; the others are over."""
        if not self._first_ns:
            return []
        known, found = {}, []
        for wait in waits:
            began_ns, next_ns = self._known.get(wait.key, (now_ns, self._first_ns))
            since_ns = began_ns if wait.since_ns is None else wait.since_ns
            waited_ns = now_ns - since_ns
            if waited_ns >= next_ns:
                found.append((wait, wait.line(round(waited_ns / 1e9))))
                while next_ns <= waited_ns:
                    next_ns *= 2
            known[wait.key] = since_ns, next_ns
        self._known = known
        return found


def find_waits(
    members: Membership,
    admission: Admission,
    ballots: Ballots,
    topology: TopologyRound,
    optimizer: Optimizer,
    calls: list[OpenCall],
) -> Iterator[Wait]:
    """Yield everything that waits. `calls` are the open calls."""
    for call in calls:
        if call.missing and call.waiting:
            yield _vote(members, call, calls)
    for number in sorted(members.wiring):
        yield _ring(members, ballots, optimizer, members.groups[number], calls)
    if optimizer.measurements:
        yield _measurement(optimizer)
    for group in members.groups.values():
        if group.consensus.transfer is not None:
            yield _transfer(group)
    yield from _small_groups(members, topology)
    if members.registered:
        yield from _newcomers(members, admission, ballots, optimizer, calls)


def _vote(members: Membership, call: OpenCall, calls: list[OpenCall]) -> Wait:
    """Members wait for others to make the same call."""
    since_ns = min(call.waiting.values())
    key = call.name, id(call.tag), getattr(call.consensus, "number", None), since_ns
    return Wait(
        key,
        since_ns,
        call.waiting.keys() & members.accepted,
        lambda seconds: f"{call.name} has waited {seconds} s for {name_missing(call.missing, calls)}",
    )


def _ring(members: Membership, ballots: Ballots, optimizer: Optimizer, group: Group, calls: list[OpenCall]) -> Wait:
    """A ring is being wired: its members wait, and so do all that are in a call of the whole run."""
    told = {*group.ring, *ballots.votes[TOPOLOGY], *ballots.votes[OPTIMIZE], *optimizer.waiting}
    limit = members.options.wire_timeout
    return Wait(
        ("ring", group.number, group.epoch),
        group.ordered_ns,
        told,
        lambda seconds: (
            f"the ring of group {group.number} has waited {seconds} s for {name_missing(group.waiting, calls)} "
            f"to connect to the neighbours (wire_timeout is {limit:g} s)"
        ),
    )


def _measurement(optimizer: Optimizer) -> Wait:
    """Probes are under way: each round has a deadline, so this is progress."""

    def line(seconds: int) -> str:
        parts = []
        for number, measurement in sorted(optimizer.measurements.items()):
            edges = [f"{source}->{target}" for source, target in sorted(measurement.pending)]
            more = f" and {len(edges) - EDGES_MAX} more" if len(edges) > EDGES_MAX else ""
            left = measurement.rounds_left
            parts.append(f"group {number} waits for {', '.join(edges[:EDGES_MAX])}{more}, then {left} more rounds")
        return f"{OPTIMIZE} has measured edges for {seconds} s: {'; '.join(parts)}"

    return Wait((OPTIMIZE, "measures"), None, optimizer.waiting, line, level=INFO)


def _transfer(group: Group) -> Wait:
    """A shared state travels from member to member; they say themselves when nothing moves."""
    transfer = group.consensus.transfer
    assert transfer is not None
    return Wait(
        (SYNC, group.number, transfer.round),
        None,
        transfer.votes,
        lambda seconds: (
            f"{SYNC} of group {group.number} has waited {seconds} s for {name_peers(sorted(transfer.fetching))} "
            f"to fetch the state from {name_peers(sorted(transfer.sources))}"
        ),
        level=INFO,
    )


def _small_groups(members: Membership, topology: TopologyRound) -> Iterator[Wait]:
    """Members of a group wait until it is larger."""
    groups: dict[int, list[int]] = {}
    for peer_id in topology.wanting:
        groups.setdefault(members.peers[peer_id].group, []).append(peer_id)
    for number, peers in sorted(groups.items()):
        wanted = max(topology.wanting[peer_id][1] for peer_id in peers)
        since_ns = min(topology.wanting[peer_id][0] for peer_id in peers)
        size = len(members.groups[number].ring)
        if size < wanted:
            yield Wait(
                ("size", number, since_ns),
                since_ns,
                peers,
                lambda seconds, number=number, wanted=wanted, size=size: (  # type: ignore[misc]
                    f"wait_for_world_size has waited {seconds} s: group {number} has {size} of {wanted} members. "
                    f"Start {wanted - size} more{_name_others(members, number)}"
                ),
            )


def _name_others(members: Membership, number: int) -> str:
    """Name the members of other groups: a peer with another group than its neighbours is a common mistake."""
    sizes = {group.number: group.size() for group in members.groups.values() if group.number != number and group.size()}
    if not sizes:
        return ""
    parts = [
        f"{size} {'peers are' if size > 1 else 'peer is'} in group {other}" for other, size in sorted(sizes.items())
    ]
    return f"; {', '.join(parts[:EDGES_MAX])}: is peer_group the same everywhere?"


def _newcomers(
    members: Membership, admission: Admission, ballots: Ballots, optimizer: Optimizer, calls: list[OpenCall]
) -> Iterator[Wait]:
    """Newcomers wait for trials or for a round: they are told why, and the members that they wait for what to do."""
    missing = members.accepted - ballots.votes[TOPOLOGY].keys()

    def why() -> str:
        if members.wiring:
            return "a ring is being wired"
        if optimizer.phase is not IDLE:
            return f"{OPTIMIZE} is under way"
        return f"{TOPOLOGY} waits for {name_missing(missing, calls)}"

    def tell(peer_id: int) -> str:
        obstacle = admission.why(peer_id)
        return f"not admitted yet: {obstacle or f'{why()}. Members admit newcomers by {TOPOLOGY}()'}"

    for peer_id in sorted(members.registered):
        yield Wait(
            ("newcomer", peer_id),
            members.peers[peer_id].phase_ns,
            (peer_id,),
            lambda _, peer_id=peer_id: tell(peer_id),  # type: ignore[misc]
            logged=False,
        )
    fitting = sorted(admission.fitting)
    if fitting:
        oldest_ns = min(members.peers[peer_id].phase_ns for peer_id in fitting)
        yield Wait(
            ("newcomers", oldest_ns),
            oldest_ns,
            sorted(missing),
            lambda _: f"{name_peers(fitting)} cannot join: {why()}. Call {TOPOLOGY}() on every member",
        )

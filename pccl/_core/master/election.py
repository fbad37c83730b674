"""The election: which state a group takes over, as functions of the votes and of the agreed state.

A vote names a revision, a strategy, and the digests of schema and content. The decision is made once all members have
voted, and does not depend on the order of the votes:

1. *Schemas* must be equal. The right schema is that of the agreed state, else the one that more than half of the peers
   have. A peer with another schema is kicked, and told which key differs. If there is no right schema, all calls fail
   with that explanation.
2. *Strategies*: ENFORCE_POPULAR does not go together with the others. Peers with the others are kicked, unless they are
   the majority: then those with ENFORCE_POPULAR are. If no peer would give its state, all calls fail.
3. *Revisions*: one more than the agreed revision is expected; a peer beyond that is kicked. Before the first agreed
   state the highest revision is expected. If no peer has the expected revision, only the agreed content is a candidate,
   at any revision.
4. *The election*: the content that most candidates hold wins; among equals, that of the lowest peer id. The other peers
   take it over; a SEND_ONLY peer that differs is kicked instead, because it may not be overwritten.

A state is *torn* if a transfer into it ended in the middle. A torn state is no candidate.
Part of the master's machine; pure.
"""

from __future__ import annotations

from collections import Counter

from pccl._core.protocol.outcomes import INVALID_ARGUMENT, INVALID_USAGE, NO_SHARED_STATE_AVAILABLE
from pccl._core.protocol.state_schema import explain_difference
from pccl._core.records import record

from .deadlock import name_peers
from .run_table import name_run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# By number, as in the public enum.
ENFORCE_POPULAR, RECEIVE_ONLY, SEND_ONLY = 0, 1, 2
STRATEGIES = ("ENFORCE_POPULAR", "RECEIVE_ONLY", "SEND_ONLY")

SCHEMAS_MAX = 3  # different schemas that an explanation names; more would not help a reader

NEVER = -1  # the agreed revision before the first agreed state


@record
class StateVote:
    """One peer's part in a synchronisation."""

    call: int  # the peer's own number for it
    revision: int
    strategy: int
    torn: bool  # a transfer into it ended in the middle
    schema: bytes
    content: bytes
    since_ns: int


@record
class Decision:
    """What follows from the votes: peers must be kicked first, or all calls fail, or a state is elected."""

    kicks: dict[int, tuple[int, str]]  # peer -> result and reason; if there are any, the other votes are decided again
    failure: tuple[int, str] | None = None  # result and reason, the same for all
    revision: int = NEVER  # of the elected state
    content: bytes = b""
    sources: tuple[int, ...] = ()  # peers that have it and may give it
    receivers: tuple[tuple[int, bool], ...] = ()  # peers that lack it; True: outdated, takes over everything


def choose_schema(votes: Mapping[int, StateVote], agreed: bytes) -> bytes | None:
    """Return the schema that all peers should have; None if no state is agreed and there is no majority."""
    holders = Counter(vote.schema for vote in votes.values())
    if agreed in holders:
        return agreed
    [(schema, count)] = holders.most_common(1)
    return schema if 2 * count > len(votes) else None


def kick_odd_schemas(
    votes: Mapping[int, StateVote], right: bytes, schemas: Mapping[bytes, bytes]
) -> dict[int, tuple[int, str]]:
    """Peers with another schema than the right one, and which key differs. `schemas` is digest to schema."""
    return {
        peer: (INVALID_ARGUMENT, f"its shared state is laid out differently: {_explain(right, vote.schema, schemas)}")
        for peer, vote in votes.items()
        if vote.schema != right
    }


def explain_schemas(votes: Mapping[int, StateVote], schemas: Mapping[bytes, bytes]) -> str:
    """Say how the schemas differ from that of the lowest peer, if there is no right one."""
    holders: dict[bytes, list[int]] = {}
    for peer in sorted(votes):
        holders.setdefault(votes[peer].schema, []).append(peer)
    first, *others = holders
    parts = [f"{name_peers(holders[other])}: {_explain(first, other, schemas)}" for other in others]
    more = f"; and {len(parts) - SCHEMAS_MAX} more" if len(parts) > SCHEMAS_MAX else ""
    return (
        f"the members do not agree on what the shared state is. Compared with {name_peers(holders[first])}, "
        f"{'; '.join(parts[:SCHEMAS_MAX])}{more}. Pass tensors of the same names, dtypes and sizes on every peer"
    )


def _explain(right: bytes, wrong: bytes, schemas: Mapping[bytes, bytes]) -> str:
    return explain_difference(schemas[right], schemas[wrong])


def decide(votes: Mapping[int, StateVote], agreed: int, content: bytes, run: str = "") -> Decision:
    """The decision over votes with equal schemas. `agreed` is the agreed revision, `content` its digest.

    Reasons show `run`, the name of the run.
    """
    popular = [peer for peer, vote in votes.items() if vote.strategy == ENFORCE_POPULAR]
    others = [peer for peer in votes if peer not in popular]
    if popular and others:
        odd, right = (popular, others) if len(others) > len(popular) else (others, popular)
        return Decision(_kick_mixed(votes, odd, right))
    givers = {peer: vote for peer, vote in votes.items() if vote.strategy != RECEIVE_ONLY}
    if not givers:
        reason = "every peer of the group called sync_shared_state with RECEIVE_ONLY: no peer may send its state"
        return Decision({}, (INVALID_USAGE, reason))
    whole = {peer: vote for peer, vote in givers.items() if not vote.torn}
    if agreed == NEVER:
        if not whole:
            return Decision({}, (NO_SHARED_STATE_AVAILABLE, _NOTHING_WHOLE))
        highest = max(vote.revision for vote in whole.values())
        return _elect(votes, {peer: vote for peer, vote in whole.items() if vote.revision == highest}, highest, None)
    expected = agreed + 1
    candidates = {peer: vote for peer, vote in whole.items() if vote.revision == expected}
    kicks = {
        peer: (INVALID_USAGE, _explain_jump(vote.revision, agreed))
        for peer, vote in votes.items()
        if vote.revision > expected and (candidates or vote.content != content)
    }
    if kicks:
        return Decision(kicks)
    if candidates:
        return _elect(votes, candidates, expected, None)
    holders = {peer: vote for peer, vote in givers.items() if vote.content == content}
    if holders:
        return _elect(votes, holders, agreed, content)
    return Decision({}, (NO_SHARED_STATE_AVAILABLE, _explain_want(votes, agreed, content, run)))


def _elect(
    votes: Mapping[int, StateVote], candidates: Mapping[int, StateVote], revision: int, resumed: bytes | None
) -> Decision:
    """Elect the content of most candidates; `resumed` is the agreed content if no other can be elected."""
    ballots = Counter(vote.content for vote in candidates.values())
    lowest: dict[bytes, int] = {}
    for peer in sorted(candidates, reverse=True):
        lowest[candidates[peer].content] = peer
    elected = max(ballots, key=lambda content: (ballots[content], -lowest[content]))
    kicks, receivers = {}, []
    for peer, vote in sorted(votes.items()):
        has_it = vote.content == elected
        current = has_it if resumed is not None else vote.revision == revision and not vote.torn
        if has_it and current:
            continue
        if vote.strategy != SEND_ONLY:
            receivers.append((peer, not current))
        elif not has_it:
            kicks[peer] = (INVALID_USAGE, _explain_loser(vote, revision, ballots[elected]))
    if kicks:
        return Decision(kicks)
    sources = tuple(sorted(peer for peer, vote in candidates.items() if vote.content == elected))
    return Decision({}, None, revision, elected, sources, tuple(receivers))


# ---------------------------------------------------------------------------------------------- reasons

_NOTHING_WHOLE = (
    "no peer here has a whole state: a transfer ended in the middle, and the peers that had the state are gone. "
    "Load a checkpoint and connect again."
)


def _kick_mixed(votes: Mapping[int, StateVote], odd: list[int], right: list[int]) -> dict[int, tuple[int, str]]:
    theirs = " and ".join(sorted({STRATEGIES[votes[peer].strategy] for peer in right}))
    others = name_peers(sorted(right))
    return {
        peer: (
            INVALID_USAGE,
            f"called sync_shared_state with {STRATEGIES[votes[peer].strategy]}, but {others} with {theirs}",
        )
        for peer in odd
    }


def _explain_jump(revision: int, agreed: int) -> str:
    return (
        f"its shared state is at revision {revision}, but the group agreed on {agreed}: add exactly one between two "
        f"calls of sync_shared_state"
    )


def _explain_loser(vote: StateVote, revision: int, count: int) -> str:
    return (
        f"called sync_shared_state with SEND_ONLY, but its state (revision {vote.revision}, digest "
        f"{vote.content.hex()}) is not the one that was elected (revision {revision}, given by {count})"
    )


def _explain_want(votes: Mapping[int, StateVote], agreed: int, content: bytes, run: str) -> str:
    if all(vote.revision == agreed for vote in votes.values()):
        return (
            f"every peer is at revision {agreed}, but with another content than {name_run(run)} agreed on for it "
            f"(digest {content.hex()}): nobody called push_revision() since the state has changed. Call it exactly "
            "once between two calls of sync_shared_state"
        )
    best = max(votes.values(), key=lambda vote: vote.revision)
    return (
        f"no peer is at revision {agreed + 1}, and none has the state that {name_run(run)} agreed on earlier (revision "
        f"{agreed}, digest {content.hex()}); the newest here is revision {best.revision}. Load the checkpoint of "
        f"revision {agreed} to continue that run. To begin another one, set another Options.run, or start the master "
        "with --new-run; call comm.finish() at the end of every run"
    )

"""The election: which state a group takes over, for every sentence of the contract. A vote is (revision, content)."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pccl._core.master.election import NEVER, STRATEGIES, Decision, StateVote, choose_schema, decide
from pccl._core.protocol.outcomes import INVALID_USAGE, NO_SHARED_STATE_AVAILABLE
from pccl.values import SharedStateSyncStrategy

from .master_harness import POPULAR, RECEIVE, SEND, digest


def vote(
    revision: int, content: str, strategy: int = POPULAR, *, torn: bool = False, schema: bytes = b"l"
) -> StateVote:
    return StateVote(1, revision, strategy, torn, schema, digest(content), 0)


def elect(votes: dict[int, StateVote], agreed: int = NEVER, content: str = "") -> Decision:
    return decide(votes, agreed, digest(content) if content else b"")


def elected(votes: dict[int, StateVote], agreed: int = NEVER, content: str = "") -> tuple[int, str, Any, Any]:
    """Return (revision, content, sources, receivers with whether they take all); no peer is kicked, nothing fails."""
    decision = elect(votes, agreed, content)
    assert not decision.kicks
    assert decision.failure is None
    return decision.revision, decision.content.decode().strip("."), set(decision.sources), dict(decision.receivers)


def test_strategies_are_those_of_the_public_enum() -> None:
    """Goal: the machine has the same numbers and names as the public enum."""
    assert {strategy.value: strategy.name for strategy in SharedStateSyncStrategy} == dict(enumerate(STRATEGIES))


# --- The first sync of a run ---


def test_the_highest_revision_of_the_first_round_wins() -> None:
    """Goal: a resumed run starts at its checkpoint's revision, 13; others at 0 receive it, also if they are more."""
    assert elected({1: vote(0, "x"), 2: vote(0, "x"), 3: vote(13, "a")}) == (13, "a", {3}, {1: True, 2: True})


def test_any_revision_is_legal_in_the_first_round() -> None:
    """Goal: there is no jump before anything was agreed."""
    assert elected({1: vote(1 << 63, "a")}) == (1 << 63, "a", {1}, {})


# --- Revisions ---


def test_everybody_up_to_date_and_equal_moves_nothing() -> None:
    """Goal: in the normal case nothing is transferred."""
    assert elected({1: vote(5, "a"), 2: vote(5, "a")}, 4, "z") == (5, "a", {1, 2}, {})


def test_who_skipped_push_revision_is_dragged_along() -> None:
    """Goal: a lower revision is outdated: it is overwritten as a whole, even by a single peer."""
    assert elected({1: vote(4, "z"), 2: vote(4, "z"), 3: vote(5, "a")}, 4, "z") == (5, "a", {3}, {1: True, 2: True})


def test_an_outdated_peer_with_equal_content_still_takes_over_everything() -> None:
    """Goal: an outdated peer also receives the tensors that may differ."""
    assert elected({1: vote(3, "a"), 2: vote(5, "a")}, 4, "z") == (5, "a", {2}, {1: True})


def test_a_jump_by_two_is_kicked_with_the_reason() -> None:
    """Goal: a revision higher than expected means that the program counts wrong."""
    decision = elect({1: vote(5, "a"), 2: vote(6, "a"), 3: vote(7, "b")}, 4, "z")

    assert set(decision.kicks) == {2, 3}
    result, reason = decision.kicks[2]
    assert result == INVALID_USAGE
    assert "at revision 6, but the group agreed on 4: add exactly one" in reason


def test_everybody_jumps_by_two_and_is_kicked() -> None:
    """Goal: also a majority is kicked for it."""
    assert set(elect({1: vote(6, "a"), 2: vote(6, "a")}, 4, "z").kicks) == {1, 2}


def test_everybody_repeats_the_last_revision() -> None:
    """Goal: the sync succeeds and changes nothing; the revision stays."""
    assert elected({1: vote(4, "z"), 2: vote(4, "z")}, 4, "z") == (4, "z", {1, 2}, {})


def test_a_repeated_revision_with_changed_content_is_mended() -> None:
    """Goal: a peer with the agreed content is up to date; one that changed it at the same revision is not."""
    assert elected({1: vote(4, "y"), 2: vote(4, "z"), 3: vote(4, "y")}, 4, "z") == (4, "z", {2}, {1: True, 3: True})


# --- The election ---


def test_the_majority_wins_also_if_the_minority_has_the_lowest_id() -> None:
    """Goal: the content with most votes wins, and only blocks that differ are received."""
    votes = {1: vote(5, "b"), 2: vote(5, "a"), 3: vote(5, "a")}

    assert elected(votes, 4, "z") == (5, "a", {2, 3}, {1: False})


def test_a_tie_goes_to_the_lowest_id() -> None:
    """Goal: the rule does not depend on the order of the votes."""
    votes = {4: vote(5, "a"), 2: vote(5, "b"), 3: vote(5, "a"), 9: vote(5, "b")}

    assert elected(votes, 4, "z") == (5, "b", {2, 9}, {3: False, 4: False})


def test_three_different_states_have_one_winner() -> None:
    """Goal: pairs of equal size are ordered by their lowest member."""
    assert elected({1: vote(0, "c"), 2: vote(0, "b"), 3: vote(0, "a")})[1:3] == ("c", {1})


def test_one_veteran_beats_any_number_of_newcomers() -> None:
    """Goal: an outdated state is no candidate, however many have it."""
    votes = {1: vote(5, "a"), **{peer: vote(0, "x") for peer in range(2, 9)}}

    assert elected(votes, 4, "z") == (5, "a", {1}, dict.fromkeys(range(2, 9), True))


# --- No peer is up to date ---


def test_the_last_agreed_content_resumes_the_run_whatever_its_revision() -> None:
    """Goal: the last up-to-date peer is lost; a checkpoint with that digest is up to date at any revision."""
    assert elected({1: vote(0, "x"), 2: vote(0, "z")}, 13, "z") == (13, "z", {2}, {1: True})
    assert elected({1: vote(0, "x"), 2: vote(99, "z")}, 13, "z") == (13, "z", {2}, {1: True})


def test_nobody_has_what_was_agreed() -> None:
    """Goal: an older state never replaces a newer one; the message says which content is needed."""
    decision = elect({1: vote(12, "x"), 2: vote(0, "y")}, 13, "z")

    assert decision.failure is not None
    assert decision.failure[0] == NO_SHARED_STATE_AVAILABLE
    assert f"revision 13, digest {digest('z').hex()}" in decision.failure[1]
    assert "the newest here is revision 12" in decision.failure[1]
    assert not decision.kicks


def test_who_is_beyond_goes_before_the_rest_is_told_what_is_wanted() -> None:
    """Goal: a jump is kicked also if no peer is up to date."""
    assert set(elect({1: vote(12, "x"), 2: vote(15, "y")}, 13, "z").kicks) == {2}


# --- Strategies ---


def test_one_with_the_default_strategy_does_not_fell_the_others() -> None:
    """Goal: of three that send and receive, none is kicked for a newcomer that forgot to choose its strategy."""
    decision = elect({1: vote(0, "a", SEND), 2: vote(0, "a", RECEIVE), 3: vote(0, "a", RECEIVE), 4: vote(0, "b")})

    assert set(decision.kicks) == {4}
    assert "with ENFORCE_POPULAR, but peers 1, 2, 3 with RECEIVE_ONLY and SEND_ONLY" in decision.kicks[4][1]


def test_enforce_popular_kicks_what_is_mixed_with_it() -> None:
    """Goal: the strategies of a group must fit; a kicked peer is told which peers have ENFORCE_POPULAR."""
    decision = elect({1: vote(0, "a"), 2: vote(0, "a", RECEIVE), 3: vote(0, "a", SEND), 4: vote(0, "a")})

    assert set(decision.kicks) == {2, 3}
    assert "with RECEIVE_ONLY, but peers 1, 4 with ENFORCE_POPULAR" in decision.kicks[2][1]
    assert "with SEND_ONLY" in decision.kicks[3][1]


def test_all_receive_only_fails_for_all_and_kicks_nobody() -> None:
    """Goal: no state can be elected, and no single peer is the cause."""
    decision = elect({1: vote(5, "a", RECEIVE), 2: vote(0, "b", RECEIVE)}, 4, "z")

    assert decision.failure is not None
    assert decision.failure[0] == INVALID_USAGE
    assert "no peer may send its state" in decision.failure[1]
    assert not decision.kicks


def test_receive_only_is_never_a_candidate() -> None:
    """Goal: one sender wins over any number of receivers; receivers with equal content fetch nothing."""
    votes = {1: vote(5, "b", RECEIVE), 2: vote(5, "b", RECEIVE), 3: vote(5, "a", SEND), 4: vote(5, "a", RECEIVE)}

    assert elected(votes, 4, "z") == (5, "a", {3}, {1: False, 2: False})


def test_receive_only_at_a_higher_revision_receives_in_the_first_round() -> None:
    """Goal: the highest revision of the peers that may send is elected."""
    assert elected({1: vote(9, "b", RECEIVE), 2: vote(3, "a", SEND)}) == (3, "a", {2}, {1: True})


def test_an_outdated_sender_has_nothing_to_give_to_receivers_that_went_on() -> None:
    """Goal: a higher revision is never overwritten by a lower one, unless that is the agreed state itself."""
    stale = elect({1: vote(5, "b", RECEIVE), 2: vote(3, "y", SEND)}, 4, "z")

    assert stale.failure is not None
    assert stale.failure[0] == NO_SHARED_STATE_AVAILABLE
    assert elected({1: vote(5, "b", RECEIVE), 2: vote(4, "z", SEND)}, 4, "z") == (4, "z", {2}, {1: True})


def test_several_senders_must_be_identical_and_losers_are_kicked() -> None:
    """Goal: SEND_ONLY is never overwritten."""
    decision = elect(
        {1: vote(5, "b", SEND), 2: vote(5, "a", SEND), 3: vote(5, "a", SEND), 4: vote(5, "c", RECEIVE)}, 4, "z"
    )

    assert set(decision.kicks) == {1}
    assert "SEND_ONLY, but its state (revision 5, digest" in decision.kicks[1][1]
    assert "(revision 5, given by 2)" in decision.kicks[1][1]


def test_an_outdated_sender_with_other_content_is_kicked() -> None:
    """Goal: the sender must not be overwritten and cannot stay outdated, so it is kicked."""
    assert set(elect({1: vote(4, "z", SEND), 2: vote(5, "a", SEND)}, 4, "z").kicks) == {1}


def test_an_outdated_sender_with_the_same_content_only_learns_the_revision() -> None:
    """Goal: there is nothing to overwrite."""
    assert elected({1: vote(4, "a", SEND), 2: vote(5, "a", SEND)}, 4, "z") == (5, "a", {2}, {})


# --- Torn states ---


def test_a_torn_state_is_no_candidate() -> None:
    """Goal: a mixture of two states is never sent to others, and is replaced as a whole."""
    votes = {1: vote(5, "t", torn=True), 2: vote(5, "t", torn=True), 3: vote(5, "a")}

    assert elected(votes, 4, "z") == (5, "a", {3}, {1: True, 2: True})


def test_without_a_whole_state_a_torn_one_does_not_do() -> None:
    """Goal: a torn state is never elected, except with exactly the agreed content, which proves that it is complete."""
    first = elect({1: vote(0, "t", torn=True)})
    later = elect({1: vote(5, "t", torn=True)}, 4, "z")

    assert first.failure is not None
    assert later.failure is not None
    assert first.failure[0] == later.failure[0] == NO_SHARED_STATE_AVAILABLE
    assert "Load a checkpoint and connect again" in first.failure[1]
    assert elected({1: vote(5, "z", torn=True)}, 4, "z") == (4, "z", {1}, {})


# --- Schemas ---


def test_the_agreed_schema_is_right_then_that_of_a_majority() -> None:
    """Goal: the agreed state decides; before it, more than half of the peers; otherwise no schema is right."""
    votes = {1: vote(0, "a", schema=b"x"), 2: vote(0, "a", schema=b"y"), 3: vote(0, "a", schema=b"y")}

    assert choose_schema(votes, b"") == b"y"
    assert choose_schema(votes, b"x") == b"x"
    assert choose_schema(votes, b"gone") == b"y"
    assert choose_schema({1: votes[1], 2: votes[2]}, b"") is None
    assert choose_schema(votes | {4: vote(0, "a", schema=b"z")}, b"") is None, "half of them is no majority"


# --- Any votes at all ---

VOTES = st.dictionaries(
    st.integers(1, 9),
    st.builds(
        vote,
        st.integers(2, 7),
        st.sampled_from("abz"),
        st.sampled_from((POPULAR, POPULAR, RECEIVE, SEND)),
        torn=st.booleans(),
    ),
    min_size=1,
)
AGREED = st.sampled_from([(NEVER, ""), (4, "z"), (5, "a")])


@given(VOTES, AGREED, st.randoms())
def test_the_order_of_votes_has_no_part_in_it(
    votes: dict[int, StateVote], agreed: tuple[int, str], random: Any
) -> None:
    """Goal: permutations of the votes have the same outcome."""
    shuffled = list(votes.items())
    random.shuffle(shuffled)

    assert elect(dict(shuffled), *agreed) == elect(votes, *agreed)


@given(VOTES, AGREED)
def test_a_decision_keeps_the_promises(votes: dict[int, StateVote], agreed: tuple[int, str]) -> None:
    """Goal: any votes lead to a decision; a peer that must not be overwritten is not, and no revision goes back."""
    left = dict(votes)
    for _ in range(len(votes) + 1):
        decision = elect(left, *agreed)
        if not decision.kicks:
            break
        assert decision.kicks.keys() <= left.keys()
        left = {peer: one for peer, one in left.items() if peer not in decision.kicks}
        if not left:
            return
    assert not decision.kicks
    if decision.failure is not None:
        return
    assert agreed[0] == NEVER or decision.revision in (agreed[0], agreed[0] + 1)
    assert agreed[0] != decision.revision or decision.content == digest(agreed[1])
    assert decision.sources
    receivers = dict(decision.receivers)
    for peer, one in left.items():
        if peer in decision.sources:
            assert one.content == decision.content
            assert one.strategy != RECEIVE
            assert peer not in receivers
        elif peer in receivers:
            assert one.strategy != SEND
        else:
            assert one.content == decision.content

"""The consensus of a group: votes, schemas, kicks, agreed state. Transfers: test_state_consensus_transfers.py."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import PeerWent, Save, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.protocol import messages as m
from pccl._core.protocol.codec import BLOB_BYTES_MAX
from pccl._core.protocol.state_schema import SchemaRow, digest_schema, pack_schema
from pccl.options import KEYS_MAX, Options

from .master_harness import (
    INVALID_ARGUMENT,
    INVALID_USAGE,
    LOST,
    NO_STATE,
    POPULAR,
    RECEIVE,
    SCHEMA,
    SEND,
    MasterHarness,
    agree,
    agreed,
    digest,
    done,
    failed,
    of,
    sent,
)


def vote_all(harness: MasterHarness, votes: dict[int, tuple[Any, ...]]) -> list[Any]:
    """All peers vote; return what follows from the last vote."""
    actions: list[Any] = []
    for peer, (revision, content, *strategy) in votes.items():
        assert not done(actions), "nobody waited for the last vote"
        actions = harness.sync(peer, revision, content, *strategy)
    return actions


# --- The vote ---------------------------------------------------------------


def test_equal_states_are_agreed_with_the_last_vote() -> None:
    """Goal: equal states take one message from each peer and one to each, and the agreed state is saved first."""
    harness = of(1, 2)

    assert harness.sync(1, 5, "a") == []
    actions = harness.sync(2, 5, "a")

    assert [type(action).__name__ for action in actions] == ["Save", "Log", "SendTo", "SendTo"]
    assert actions[2:] == [SendTo(1, m.SyncDone(101, 5)), SendTo(2, m.SyncDone(102, 5))]
    assert agreed(harness) == (5, "a")


def test_a_world_of_one_works() -> None:
    """Goal: the same program also works for a single peer."""
    harness = of(1)

    assert done(harness.sync(1, 0, "a")) == {1: 0}
    assert done(harness.sync(1, 1, "b")) == {1: 1}
    assert agreed(harness) == (1, "b")


def test_a_completed_round_raises_what_is_expected_by_one() -> None:
    """Goal: an application adds exactly one between two calls."""
    harness = agree(of(1, 2), 5, "a")

    assert done(vote_all(harness, {1: (6, "b"), 2: (6, "b")})) == {1: 6, 2: 6}
    assert done(vote_all(harness, {1: (7, "c"), 2: (7, "c")})) == {1: 7, 2: 7}


def test_a_repeated_revision_is_a_success_that_changes_nothing() -> None:
    """Goal: if all peers repeat the last agreed revision, nothing has to be saved."""
    harness = agree(of(1, 2), 5, "a")

    actions = vote_all(harness, {1: (5, "a"), 2: (5, "a")})

    assert done(actions) == {1: 5, 2: 5}
    assert Save() not in actions
    assert agreed(harness) == (5, "a")


def test_a_jump_by_two_is_kicked_and_the_others_go_on() -> None:
    """Goal: the peer is kicked with the reason, and peers that wait for it are answered in the same event."""
    harness = agree(of(1, 2, 3), 5, "a")

    actions = vote_all(harness, {1: (7, "b"), 2: (6, "b"), 3: (6, "b")})

    kick = sent(actions, m.Kick)
    assert set(kick) == {1}
    assert kick[1].result == INVALID_USAGE
    assert "at revision 7, but the group agreed on 5" in kick[1].reason
    assert done(actions) == {2: 6, 3: 6}


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_the_order_of_votes_does_not_matter(order: tuple[int, ...]) -> None:
    """Goal: a minority that votes first has no advantage."""
    harness = of(1, 2, 3)
    votes = {1: (0, "b"), 2: (0, "a"), 3: (0, "a")}

    actions = vote_all(harness, {peer: votes[peer] for peer in order})

    assert set(sent(actions, m.Fetch)) == {1}
    assert set(sent(actions, m.Serve)) == {2, 3}


def test_groups_agree_independently_and_at_the_same_time() -> None:
    """Goal: neither waits for the other, each has its own revision."""
    harness = of(1, 2)
    harness.admit(3, 4, group=1)
    harness.sync(1, 5, "a")
    harness.sync(3, 9, "c")

    assert done(harness.sync(4, 9, "c")) == {3: 9, 4: 9}
    assert agreed(harness) is None
    assert done(harness.sync(2, 5, "a")) == {1: 5, 2: 5}
    assert (agreed(harness), agreed(harness, 1)) == ((5, "a"), (9, "c"))


def test_newcomers_that_are_not_accepted_do_not_vote() -> None:
    """Goal: only members take part in the election; newcomers change nothing."""
    harness = agree(of(1, 2), 5, "a")
    harness.come(3)

    assert done(vote_all(harness, {1: (6, "b"), 2: (6, "b")})) == {1: 6, 2: 6}


def test_one_veteran_beats_a_majority_of_newcomers() -> None:
    """Goal: newcomers receive the state, however many they are."""
    harness = agree(of(1), 5, "a")
    harness.admit(2, 3, 4)

    actions = vote_all(harness, {2: (0, "x"), 3: (0, "x"), 4: (0, "x"), 1: (6, "b")})

    assert {peer: fetch.whole for peer, fetch in sent(actions, m.Fetch).items()} == {2: True, 3: True, 4: True}
    assert set(sent(actions, m.Serve)) == {1}


def test_a_lost_member_is_waited_for_no_longer() -> None:
    """Goal: its vote is removed and it is no voter any more; the sync does not wait for the rewired ring."""
    harness = of(1, 2, 3)
    harness.sync(1, 0, "b")
    harness.sync(2, 0, "a")

    actions = harness.feed(PeerWent(3, "reset"))

    assert set(sent(actions, m.Fetch)) == {2}
    assert set(sent(actions, m.RingOrder)) == {1, 2}


def test_a_lost_voter_takes_its_vote_along() -> None:
    """Goal: the vote of a lost peer does not count."""
    harness = of(1, 2, 3, 4)
    harness.sync(1, 0, "b")
    harness.sync(2, 0, "b")
    harness.sync(3, 0, "a")
    harness.feed(PeerWent(1, "reset"))
    harness.feed(PeerWent(2, "reset"))

    assert done(harness.sync(4, 0, "a")) == {3: 0, 4: 0}


def test_a_withdrawn_vote_does_not_count() -> None:
    """Goal: a peer that withdrew is waited for like one that never called; a stale withdrawal is ignored."""
    harness = of(1, 2)
    harness.sync(1, 0, "a")
    harness.say(1, m.Withdraw(101))
    assert done(harness.sync(2, 0, "a")) == {}

    harness.say(2, m.Withdraw(101))
    assert done(harness.sync(1, 0, "a")) == {1: 0, 2: 0}


# --- No peer is up to date ----------------------------------------------------


def test_the_last_up_to_date_peer_is_lost_and_resumed_from_a_checkpoint() -> None:
    """Goal: only the agreed digest resumes the run, at any revision; others receive it."""
    harness = agree(of(1, 2), 13, "a")
    harness.feed(PeerWent(1, "reset"))
    harness.wire(harness.feed(PeerWent(2, "reset")))
    harness.admit(3, 4)

    stale = vote_all(harness, {3: (12, "x"), 4: (0, "y")})
    assert {(peer, end.result) for peer, end in failed(stale).items()} == {(3, NO_STATE), (4, NO_STATE)}
    assert f"revision 13, digest {digest('a').hex()}" in failed(stale)[3].reason
    resumed = vote_all(harness, {3: (0, "a"), 4: (0, "y")})
    assert set(sent(resumed, m.Serve)) == {3}
    assert sent(resumed, m.Fetch)[4].whole
    assert done(harness.say(4, m.Fetched(sent(resumed, m.Fetch)[4].call, 1, True, ""))) == {3: 13, 4: 13}


def test_a_master_that_starts_again_resumes_only_from_what_was_agreed() -> None:
    """Goal: after a restart neither an empty nor an older state is accepted, as before it."""
    before = agree(of(1), 13, "a")
    harness = MasterHarness()
    harness.state = MasterState.restore(before.state.snapshot(), Options(check=True))
    harness.wire(harness.come(1))

    assert failed(harness.sync(1, 0, "x"))[1].result == NO_STATE
    assert failed(harness.sync(1, 12, "x"))[1].result == NO_STATE
    assert done(harness.sync(1, 0, "a")) == {1: 13}
    assert done(harness.sync(1, 14, "b")) == {1: 14}


# --- Strategies -------------------------------------------------------------


def test_all_receive_only_fails_everywhere_and_kicks_nobody() -> None:
    """Goal: INVALID_USAGE and a message; the group can call again."""
    harness = of(1, 2)

    actions = vote_all(harness, {1: (0, "a", RECEIVE), 2: (0, "b", RECEIVE)})

    assert {(peer, end.result) for peer, end in failed(actions).items()} == {(1, INVALID_USAGE), (2, INVALID_USAGE)}
    assert not sent(actions, m.Kick)
    assert done(vote_all(harness, {1: (0, "a"), 2: (0, "a")})) == {1: 0, 2: 0}


def test_mixed_strategies_kick_the_others() -> None:
    """Goal: with ENFORCE_POPULAR in the group, peers with other strategies are kicked, and the rest goes on."""
    harness = of(1, 2, 3, 4)

    actions = vote_all(harness, {1: (0, "a", POPULAR), 2: (0, "a", SEND), 3: (0, "b", RECEIVE), 4: (0, "a", POPULAR)})

    assert set(sent(actions, m.Kick)) == {2, 3}
    assert done(actions) == {1: 0, 4: 0}


def test_a_majority_with_other_strategies_stays() -> None:
    """Goal: a newcomer with the default strategy does not end a run in which one peer sends and the others receive."""
    harness = of(1, 2, 3)

    actions = vote_all(harness, {1: (0, "a", SEND), 2: (0, "a", RECEIVE), 3: (0, "a", POPULAR)})

    assert set(sent(actions, m.Kick)) == {3}
    assert done(actions) == {1: 0, 2: 0}


def test_a_sender_that_loses_is_kicked() -> None:
    """Goal: SEND_ONLY is never overwritten, so it cannot stay."""
    harness = of(1, 2, 3)

    actions = vote_all(harness, {1: (0, "b", SEND), 2: (0, "a", SEND), 3: (0, "a", SEND)})

    assert set(sent(actions, m.Kick)) == {1}
    assert done(actions) == {2: 0, 3: 0}


def test_senders_give_and_receivers_take() -> None:
    """Goal: SEND_ONLY and RECEIVE_ONLY work together."""
    actions = vote_all(of(1, 2, 3), {1: (7, "b", RECEIVE), 2: (0, "a", SEND), 3: (0, "a", RECEIVE)})

    assert set(sent(actions, m.Serve)) == {2}
    assert set(sent(actions, m.Fetch)) == {1}


# --- Schemas ----------------------------------------------------------------

ODD = {
    "name": ([SchemaRow("biaz", 10, False, 16)], "'bias' is missing"),
    "datatype": ([SchemaRow("bias", 8, False, 16)], "'bias' is FLOAT16, 16 bytes"),
    "size": ([SchemaRow("bias", 10, False, 32)], "'bias' is FLOAT, 32 bytes"),
    "flag": ([SchemaRow("bias", 10, True, 16)], "'bias' is FLOAT, 16 bytes, allow_content_inequality"),
}
REST = [SchemaRow("seed", 7, True, 8), SchemaRow("weight", 10, False, 64)]


def answer(harness: MasterHarness, actions: list[Any], schemas: dict[int, bytes]) -> list[Any]:
    """Every peer that is asked for its schema sends it in one page; return everything that follows."""
    after = []
    for peer, ask in sent(actions, m.AskSchema).items():
        after += harness.say(peer, m.Schema(ask.call, 0, 1, schemas[peer]))
    return after


@pytest.mark.parametrize("what", ODD)
def test_the_odd_schema_is_kicked_with_the_key(what: str) -> None:
    """Goal: a wrong name, datatype, size or flag costs only the peer that has it, and the message names the key."""
    rows, difference = ODD[what]
    odd = pack_schema([*rows, *REST])
    harness = of(1, 2, 3)
    harness.sync(1, 0, "a", packed=odd)
    harness.sync(2, 0, "a")
    asked = harness.sync(3, 0, "a")
    assert sorted(sent(asked, m.AskSchema)) == [1, 2], "one holder of each"

    actions = answer(harness, asked, {1: odd, 2: SCHEMA})

    kick = sent(actions, m.Kick)
    assert set(kick) == {1}
    assert kick[1].result == INVALID_ARGUMENT
    assert difference in kick[1].reason
    assert done(actions) == {2: 0, 3: 0}


def test_the_agreed_schema_beats_a_majority() -> None:
    """Goal: newcomers with another model do not displace an old member."""
    odd = pack_schema(REST)
    harness = agree(of(1), 5, "a")
    harness.admit(2, 3)
    harness.sync(2, 0, "x", packed=odd)
    harness.sync(3, 0, "x", packed=odd)

    actions = answer(harness, harness.sync(1, 6, "b"), {1: SCHEMA, 2: odd})

    assert set(sent(actions, m.Kick)) == {2, 3}
    assert done(actions) == {1: 6}


def test_a_schema_comes_in_pages() -> None:
    """Goal: the pages of a large schema travel in order, and count only when complete."""
    large = pack_schema([SchemaRow(f"layer.{n:05}", 10, False, 4) for n in range(1000)])
    pages = [large[at : at + BLOB_BYTES_MAX] for at in range(0, len(large), BLOB_BYTES_MAX)]
    assert len(pages) == 3
    harness = agree(of(1), 5, "a", packed=large)
    harness.admit(2)
    harness.sync(1, 6, "b", packed=large)
    harness.sync(2, 0, "a")
    harness.say(2, m.Schema(103, 0, 1, SCHEMA))

    for page, rows in enumerate(pages[:2]):
        assert harness.say(1, m.Schema(102, page, 3, rows)) == []
    actions = harness.say(1, m.Schema(102, 2, 3, pages[2]))

    assert "'bias' (FLOAT, 16 bytes) is not in" in sent(actions, m.Kick)[2].reason
    assert done(actions) == {1: 6}


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (m.Schema(101, 1, 2, b"x"), "sent page 1 of 2 of its schema after 0"),
        (m.Schema(101, 0, 0, b"x"), "sent page 0 of 0"),
        (m.Schema(101, 0, 1 << 20, b"x"), "sent page 0 of 1048576"),
        (m.Schema(101, 0, 1, b"x"), "sent no schema: row 0 of a schema is cut off"),
        (m.Schema(101, 0, 1, SCHEMA), "sent another schema than the one it voted with"),
    ],
)
def test_a_false_schema_costs_its_sender(page: m.Schema, reason: str) -> None:
    """Goal: a peer whose schema does not match its vote is kicked; then the others' schemas are not needed."""
    harness = of(1, 2)
    harness.sync(1, 0, "a", packed=pack_schema(REST))
    harness.sync(2, 0, "a")

    actions = harness.say(1, page)

    assert reason in sent(actions, m.Kick)[1].reason
    assert done(actions) == {2: 0}


@pytest.mark.parametrize("how", ["lost", "withdrawn"])
def test_another_holder_is_asked_if_the_first_one_goes(how: str) -> None:
    """Goal: the consensus does not wait for the schema of a lost peer."""
    odd = pack_schema(REST)
    harness = of(1, 2, 3)
    harness.sync(1, 0, "a", packed=odd)
    harness.sync(2, 0, "a", packed=odd)
    assert sorted(sent(harness.sync(3, 0, "a"), m.AskSchema)) == [1, 3]

    if how == "lost":
        actions = harness.feed(PeerWent(1, "reset"))
    else:
        harness.say(1, m.Withdraw(101))
        actions = harness.sync(1, 0, "a")

    assert sorted(sent(actions, m.AskSchema)) == [2]
    assert harness.state.members.groups[0].consensus.asked.keys() == {digest_schema(odd), digest_schema(SCHEMA)}


def test_a_late_schema_is_ignored() -> None:
    """Goal: a peer whose call ended before its schema arrived did nothing wrong."""
    harness = of(1, 2)
    harness.sync(1, 0, "a", packed=pack_schema(REST))
    harness.sync(2, 0, "a")
    assert done(harness.feed(PeerWent(1, "reset"))) == {2: 0}

    assert harness.say(2, m.Schema(102, 0, 1, SCHEMA)) == []


# --- What a peer may not do -------------------------------------------------


@pytest.mark.parametrize(
    ("before", "then", "reason"),
    [
        (lambda s: s.sync(1, 0, "a"), lambda s: s.sync(1, 0, "a"), "voted twice in sync_shared_state"),
        (lambda s: s.say(1, m.VoteTopology(1, 0)), lambda s: s.sync(1, 0, "a"), "while it votes on the topology"),
        (lambda s: s.reduce(1, 5), lambda s: s.sync(1, 0, "a"), "while a reduce of its own has no verdict"),
        (lambda s: s.sync(1, 0, "a"), lambda s: s.say(1, m.VoteTopology(1, 0)), "on the topology while it is in sync"),
        (lambda s: s.sync(1, 0, "a"), lambda s: s.reduce(1, 5), "initiated a reduce while it is in sync_shared_state"),
        (lambda s: s, lambda s: s.sync(1, 0, "a", 3), "voted nonsense in sync_shared_state: strategy 3"),
        (lambda s: s, lambda s: s.sync(1, 0, "a", keys=0), "voted nonsense in sync_shared_state: strategy 0, 0 keys"),
        (lambda s: s, lambda s: s.sync(1, 0, "a", keys=KEYS_MAX + 1), "65537 keys"),
        (lambda s: s, lambda s: s.say(1, m.Fetched(1, 1, True, "")), "fetched in transfer 1, which has not begun"),
    ],
)  # fmt: skip
def test_what_no_honest_peer_does_costs_its_connection(before: Any, then: Any, reason: str) -> None:
    """Goal: one major call at a time; the reason is sent first, and the others are not affected."""
    harness = of(1, 2)
    before(harness)

    actions = then(harness)

    assert reason in sent(actions, m.Kick)[1].reason
    assert harness.state.members.accepted == {2}


def test_a_round_does_not_close_over_a_sync() -> None:
    """Goal: a topology round waits until the members in a sync have voted."""
    harness = of(1, 2)
    harness.come(3)
    harness.sync(1, 0, "b")
    harness.sync(2, 0, "a")
    assert harness.state.members.groups[0].consensus.transfer is not None
    harness.say(2, m.Fetched(102, 1, True, ""))
    harness.say(1, m.VoteTopology(1, 0))

    assert set(sent(harness.say(2, m.VoteTopology(1, 0)), m.RingOrder)) == {1, 2, 3}


# --- Waiting ----------------------------------------------------------------


def test_a_long_wait_names_who_is_missing() -> None:
    """Goal: users are told which peers they wait for."""
    harness = of(1, 2, 3, vote_warning=30)
    harness.sync(1, 0, "a")

    notices = sent(harness.pass_time(40), m.Notice)

    assert "sync_shared_state has waited 30 s for peers 2, 3 (in no call)" in notices[1].line
    assert not sent(harness.pass_time(19), m.Notice)


def test_a_straggler_is_kicked_where_there_is_a_limit() -> None:
    """Goal: vote_timeout holds for this call too, and the others go on without the missing peers."""
    harness = of(1, 2, 3, vote_timeout=5)
    harness.sync(1, 0, "a")
    harness.sync(2, 0, "a")

    actions = harness.pass_time(8)

    kick = sent(actions, m.Kick)
    assert set(kick) == {3}
    assert "straggler: peers 1, 2 waited" in kick[3].reason
    assert kick[3].result == LOST
    assert done(actions) == {1: 0, 2: 0}


def test_who_does_not_show_its_schema_is_a_straggler_too() -> None:
    """Goal: also a peer that does not send its schema counts as missing."""
    harness = of(1, 2, vote_timeout=5)
    harness.sync(1, 0, "a", packed=pack_schema(REST))
    harness.sync(2, 0, "a")
    harness.say(2, m.Schema(102, 0, 1, SCHEMA))

    actions = harness.pass_time(8)

    assert set(sent(actions, m.Kick)) == {1}
    assert done(actions) == {2: 0}


def test_calls_that_never_meet_are_explained() -> None:
    """Goal: one in sync_shared_state, one in update_topology: both fail within seconds, and can call again."""
    harness = of(1, 2)
    harness.sync(1, 0, "a")
    harness.say(2, m.VoteTopology(7, 0))

    actions = harness.pass_time(6)

    ends = failed(actions)
    assert {(peer, end.call, end.result) for peer, end in ends.items()} == {
        (1, 101, INVALID_USAGE),
        (2, 7, INVALID_USAGE),
    }
    assert "peer 1 in sync_shared_state; peer 2 in update_topology" in ends[1].reason
    assert harness.state.members.groups[0].consensus.is_idle()


def test_a_transfer_is_no_deadlock() -> None:
    """Goal: peers that wait for a large state to be sent just wait, and no peer is kicked."""
    harness = of(1, 2)
    harness.admit(3, group=1)
    harness.sync(1, 0, "b")
    harness.sync(2, 0, "a")
    harness.say(3, m.VoteTopology(7, 0))

    assert not failed(harness.pass_time(60))

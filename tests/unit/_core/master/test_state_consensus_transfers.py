"""The master's side of a transfer: which peers serve, which fetch, and what happens when one is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.master.events import PeerWent, Save
from pccl._core.master.state_consensus import CUT_OFF, SOURCES_LOST
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import DEBUG, WARNING, Log
from pccl._core.protocol.sources import Source, unpack_sources

from .master_harness import (
    INVALID_USAGE,
    LOST,
    RECEIVE,
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


def transferring(**contents: str) -> MasterHarness:
    """Peers p1, p2, ... with these contents had agreed revision 4 and are at revision 5; a transfer runs."""
    votes = {int(name[1:]): content for name, content in contents.items()}
    harness = agree(of(*votes), 4, "z")
    harness.calls = 0
    for peer, content in votes.items():
        harness.sync(peer, 5, content)
    assert harness.state.members.groups[0].consensus.transfer is not None
    return harness


def fetched(harness: MasterHarness, peer: int, *, ok: bool = True, transfer: int = 1) -> list[Any]:
    """A peer reports its fetch; in `transferring` the call number is the peer's number."""
    return harness.say(peer, m.Fetched(peer, transfer, ok, "" if ok else "no memory"))


def test_winners_serve_and_losers_fetch() -> None:
    """Goal: the orders name the round, the revision, the digest, and where to dial; sources come first."""
    harness = agree(of(1, 2, 3), 4, "z")
    harness.calls = 0
    harness.sync(1, 5, "a")
    harness.sync(2, 5, "b")

    actions = harness.sync(3, 5, "a")

    assert [(action.conn, type(action.message)) for action in actions] == [(1, m.Serve), (3, m.Serve), (2, m.Fetch)]
    order = sent(actions, m.Fetch)[2]
    assert (order.call, order.round, order.whole, order.revision, order.content) == (2, 1, False, 5, digest("a"))
    assert unpack_sources(order.sources) == (Source(1, "host1", 1001), Source(3, "host3", 1003))
    assert not done(actions)
    assert agreed(harness) == (4, "z"), "nothing is agreed before everybody has it"


def test_all_are_told_when_the_last_receiver_has_it() -> None:
    """Goal: success means that all participants hold the same content at the same revision."""
    harness = transferring(p1="a", p2="b", p3="a", p4="c")

    assert fetched(harness, 2) == []
    actions = fetched(harness, 4)

    assert actions[0] == Save()
    assert done(actions) == dict.fromkeys((1, 2, 3, 4), 5)
    assert agreed(harness) == (5, "a")


def test_receivers_begin_with_different_sources() -> None:
    """Goal: several sources are used in parallel from the start."""
    harness = agree(of(1, 2, 3, 4), 4, "z")
    for peer, content in {1: "a", 2: "a", 3: "b"}.items():
        harness.sync(peer, 5, content)

    fetches = sent(harness.sync(4, 5, "c"), m.Fetch)

    assert [[source.peer for source in unpack_sources(fetches[peer].sources)] for peer in (3, 4)] == [[1, 2], [2, 1]]


@pytest.mark.parametrize("how", ["lost", "withdrawn"])
def test_a_source_that_goes_is_crossed_off(how: str) -> None:
    """Goal: receivers go on with the other sources; receivers that have finished are not told."""
    harness = transferring(p1="a", p2="b", p3="a", p4="c")
    fetched(harness, 4)

    actions = harness.feed(PeerWent(3, "reset")) if how == "lost" else harness.say(3, m.Withdraw(3))

    assert sent(actions, m.SourceGone) == {2: m.SourceGone(2, 1, 3)}
    assert done(fetched(harness, 2)) == {1: 5, 2: 5, 4: 5}
    assert agreed(harness) == (5, "a")


def test_all_sources_are_lost() -> None:
    """Goal: all receivers are told to call again; the earlier agreed state stays."""
    harness = transferring(p1="a", p2="b", p3="a", p4="c")
    harness.wire(harness.feed(PeerWent(1, "reset")))
    assert set(sent(harness.feed(PeerWent(3, "reset")), m.SourceGone)) == {2, 4}
    assert not failed(fetched(harness, 2, ok=False)), "the other one may have finished: nobody knows yet"

    actions = fetched(harness, 4, ok=False)

    assert {peer: (end.result, end.reason) for peer, end in failed(actions).items()} == {
        2: (LOST, SOURCES_LOST),
        4: (LOST, SOURCES_LOST),
    }
    assert agreed(harness) == (4, "z")
    assert harness.state.members.groups[0].consensus.is_idle()


def test_the_survivors_of_a_lost_source_agree_among_themselves() -> None:
    """Goal: receivers that were up to date and not torn go on with their own content."""
    harness = transferring(p1="a", p2="b", p3="c")
    harness.wire(harness.feed(PeerWent(1, "reset")))
    fetched(harness, 2, ok=False)
    fetched(harness, 3, ok=False)

    harness.sync(2, 5, "b")
    actions = harness.sync(3, 5, "c")

    assert set(sent(actions, m.Serve)) == {2}
    assert sent(actions, m.Fetch)[3].round == 2
    assert done(fetched(harness, 3, transfer=1)) == {}, "the word of an earlier transfer is not about this one"


@pytest.mark.parametrize("first", ["finished", "stranded"])
def test_whoever_had_it_all_before_the_sources_were_lost_serves_it(first: str) -> None:
    """Goal: a finished receiver holds the state: the others fetch it from there, and no call fails."""
    harness = transferring(p1="a", p2="b", p3="c", p4="d")
    if first == "finished":
        fetched(harness, 2)
    harness.wire(harness.feed(PeerWent(1, "reset")))
    fetched(harness, 3, ok=False)
    actions = fetched(harness, 4, ok=False)
    if first == "stranded":
        assert actions == [], "the third one has not said anything"
        actions = fetched(harness, 2)

    assert sent(actions, m.Serve) == {2: m.Serve(2, 1)}
    orders = sent(actions, m.MoreSources)
    assert {peer: unpack_sources(order.sources) for peer, order in orders.items()} == dict.fromkeys(
        (3, 4), (Source(2, "host2", 1002),)
    )
    assert not failed(actions)
    fetched(harness, 3)
    assert done(fetched(harness, 4)) == {2: 5, 3: 5, 4: 5}
    assert agreed(harness) == (5, "a")


def test_an_heir_may_be_lost_as_well() -> None:
    """Goal: each finished receiver becomes the source once; after the last one is lost, all calls fail."""
    harness = transferring(p1="a", p2="b", p3="c", p4="d")
    fetched(harness, 2)
    harness.wire(harness.feed(PeerWent(1, "reset")))
    fetched(harness, 3, ok=False)
    fetched(harness, 4, ok=False)
    fetched(harness, 4)
    harness.wire(harness.feed(PeerWent(2, "reset")))

    actions = fetched(harness, 3, ok=False)
    assert (set(sent(actions, m.Serve)), set(sent(actions, m.MoreSources))) == ({4}, {3})
    harness.wire(harness.feed(PeerWent(4, "reset")))

    assert {peer: end.reason for peer, end in failed(fetched(harness, 3, ok=False)).items()} == {3: SOURCES_LOST}
    assert agreed(harness) == (4, "z")


def test_who_cannot_fetch_goes_when_the_others_have_finished() -> None:
    """Goal: a receiver that reaches no source delays the others only for a short time, and they stay consistent."""
    harness = transferring(p1="a", p2="b", p3="c")
    assert fetched(harness, 2, ok=False) == []

    actions = fetched(harness, 3)

    assert sent(actions, m.Kick) == {2: m.Kick(LOST, f"{CUT_OFF}: no memory")}
    assert not sent(actions, m.MoreSources)
    assert done(actions) == {1: 5, 3: 5}


@pytest.mark.parametrize("how", ["lost", "withdrawn", "unable"])
def test_a_receiver_that_goes_holds_nobody_up(how: str) -> None:
    """Goal: with no receivers left the transfer completes for the other peers."""
    harness = transferring(p1="a", p2="b", p3="a")

    if how == "lost":
        actions = harness.feed(PeerWent(2, "reset"))
    elif how == "withdrawn":
        actions = harness.say(2, m.Withdraw(2))
    else:
        actions = fetched(harness, 2, ok=False)
        assert sent(actions, m.Kick) == {2: m.Kick(LOST, f"{CUT_OFF}: no memory")}

    assert done(actions) == {1: 5, 3: 5}
    assert agreed(harness) == (5, "a")


def test_everybody_gives_up() -> None:
    """Goal: a transfer that all peers have given up leaves nothing behind."""
    harness = transferring(p1="a", p2="b")
    harness.say(1, m.Withdraw(1))
    assert set(failed(fetched(harness, 2, ok=False))) == {2}

    assert agreed(harness) == (4, "z")
    assert harness.state.members.groups[0].consensus.is_idle()


def test_who_gave_up_may_call_again_and_waits_for_the_others() -> None:
    """Goal: a vote during a running transfer belongs to the next one."""
    harness = transferring(p1="a", p2="b", p3="c")
    harness.say(2, m.Withdraw(2))
    harness.sync(2, 5, "b")

    assert done(fetched(harness, 3)) == {1: 5, 3: 5}
    harness.sync(1, 6, "d")
    assert set(sent(harness.sync(3, 6, "d"), m.Fetch)) == {2}


def test_a_ring_that_is_rewired_does_not_disturb_a_transfer() -> None:
    """Goal: a broken edge ends reduces, and nothing else."""
    harness = transferring(p1="a", p2="b", p3="a")
    epoch = harness.state.members.groups[0].epoch

    actions = harness.say(1, m.EdgeLost(epoch, 1, 2, "reset"))

    assert set(sent(actions, m.RingOrder)) == {1, 2, 3}
    assert not failed(actions)
    assert done(fetched(harness, 2)) == {1: 5, 2: 5, 3: 5}, "and it completes before the ring does"


def test_a_newcomer_of_the_next_round_is_no_part_of_a_transfer() -> None:
    """Goal: a peer that is accepted during a transfer, because all had withdrawn from the round, votes alone."""
    harness = agree(of(1, 2), 4, "z")
    harness.calls = 0
    harness.come(3)
    harness.say(1, m.VoteTopology(91, 0))
    orders = harness.say(2, m.VoteTopology(92, 0))
    harness.say(1, m.Withdraw(91))
    harness.say(2, m.Withdraw(92))
    harness.sync(1, 5, "a")
    harness.sync(2, 5, "b")
    harness.wire(orders)
    assert 3 in harness.state.members.accepted

    harness.sync(3, 0, "x")
    assert done(fetched(harness, 2)) == {1: 5, 2: 5}
    harness.sync(1, 6, "c")
    assert set(sent(harness.sync(2, 6, "c"), m.Fetch)) == {3}


@pytest.mark.parametrize(
    ("peer", "count", "reason"),
    [(1, 1, "in which it has nothing to fetch"), (2, 2, "in which it has nothing to fetch")],
    ids=["a source", "twice"],
)
def test_a_false_report_costs_its_connection(peer: int, count: int, reason: str) -> None:
    """Goal: only a peer that was ordered to fetch may report it, and only once."""
    harness = transferring(p1="a", p2="b", p3="c")
    for _ in range(count - 1):
        fetched(harness, peer)

    kick = sent(fetched(harness, peer), m.Kick)

    assert kick[peer].result == INVALID_USAGE
    assert reason in kick[peer].reason


def test_the_last_word_of_a_receiver_counts_though_its_source_is_gone() -> None:
    """Goal: a receiver that has everything when its source is lost counts as finished, and the state is agreed."""
    harness = transferring(p1="a", p2="b")
    harness.wire(harness.feed(PeerWent(1, "reset")))

    assert done(fetched(harness, 2)) == {2: 5}
    assert agreed(harness) == (5, "a")


def test_who_is_stranded_has_nothing_more_to_say() -> None:
    """Goal: a receiver without sources waits for the master; any other message ends its connection."""
    harness = transferring(p1="a", p2="b", p3="c")
    fetched(harness, 2, ok=False)

    assert "had no source left" in sent(fetched(harness, 2), m.Kick)[2].reason


def test_one_key_of_many_is_a_matter_between_peers() -> None:
    """Goal: where only content differs, the master orders a comparison of digests, not a transfer of everything."""
    harness = transferring(p1="a", p2="a", p3="b")

    assert harness.state.members.groups[0].consensus.transfer is not None
    assert harness.state.members.groups[0].consensus.transfer.fetching == {3}


def test_an_outdated_sender_with_the_same_content_waits_for_the_others_and_learns_the_revision() -> None:
    """Goal: SEND_ONLY is not overwritten where there is nothing to overwrite."""
    harness = agree(of(1, 2), 4, "a")
    harness.sync(1, 4, "a", SEND)

    assert done(harness.sync(2, 5, "a", SEND)) == {1: 5, 2: 5}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((4, 5))), min_size=1, max_size=5), st.randoms())
def test_permutations_of_votes_give_the_same_orders(states: list[tuple[str, int]], random: Any) -> None:
    """Goal: the orders do not depend on the order of the votes."""
    orders = []
    for _ in range(2):
        harness = agree(of(*range(1, len(states) + 1)), 4, "a")
        voters = list(enumerate(states, 1))
        random.shuffle(voters)
        actions: list[Any] = []
        for peer, (content, revision) in voters:
            actions = harness.sync(peer, revision, content)
        fetches = {peer: (order.whole, order.revision, order.content) for peer, order in sent(actions, m.Fetch).items()}
        orders.append((set(sent(actions, m.Serve)), fetches, done(actions), set(failed(actions))))

    assert orders[0] == orders[1]


# --- Divergent members ------------------------------------------------------


def overwritten(harness: MasterHarness) -> dict[int, int]:
    """Return how often each peer was overwritten as a divergent member."""
    members = harness.state.members
    times = {peer.id: peer.overwritten for peer in members.peers.values() if peer.overwritten}
    assert members.counters["overwritten"] >= sum(times.values())
    return times


def test_a_member_that_is_overwritten_is_counted() -> None:
    """Goal: an operator sees which peer diverges; the first time is a warning, so that it is not missed."""
    harness = transferring(p1="a", p2="b", p3="a")
    assert overwritten(harness) == {}, "the transfer has not ended"

    first = logged(fetched(harness, 2))
    harness.calls = 0
    for peer in (1, 2, 3):
        harness.sync(peer, 5 + (peer != 2), "cdc"[peer - 1])
    second = logged(fetched(harness, 2, transfer=2))

    assert first == [Log(WARNING, "peer=2 overwritten by a sync group=0 times=1 revision=5 agreed=5")]
    assert second == [Log(DEBUG, "peer=2 overwritten by a sync group=0 times=2 revision=5 agreed=6")]
    assert overwritten(harness) == {2: 2}
    assert harness.state.members.counters["overwritten"] == 2


def test_a_newcomer_is_not_divergent() -> None:
    """Goal: nobody is in the first sync of a run, and a newcomer is not in its first sync."""
    harness = of(1, 2, 3)
    harness.calls = 0
    for peer, content in {1: "a", 2: "b", 3: "a"}.items():
        harness.sync(peer, 5, content)
    fetched(harness, 2)
    harness.admit(4)
    harness.calls = 0
    for peer, content in {1: "a", 2: "a", 3: "a", 4: "x"}.items():
        harness.sync(peer, 0 if peer == 4 else 6, content)
    assert done(fetched(harness, 4, transfer=2)) == dict.fromkeys((1, 2, 3, 4), 6)
    assert overwritten(harness) == {}

    harness.calls = 0
    for peer, content in {1: "a", 2: "a", 3: "a", 4: "x"}.items():
        harness.sync(peer, 7, content)
    fetched(harness, 4, transfer=3)

    assert overwritten(harness) == {4: 1}


def test_a_receiver_by_choice_is_not_divergent() -> None:
    """Goal: RECEIVE_ONLY asks to be overwritten."""
    harness = agree(of(1, 2), 4, "z")
    harness.calls = 0
    harness.sync(1, 5, "a", SEND)
    harness.sync(2, 5, "b", RECEIVE)

    assert done(fetched(harness, 2)) == {1: 5, 2: 5}
    assert overwritten(harness) == {}


def test_a_divergent_member_that_gives_up_is_not_counted() -> None:
    """Goal: only a sync that succeeded counts, as in the peer's own count."""
    harness = transferring(p1="a", p2="b", p3="b", p4="a", p5="a")
    fetched(harness, 2)

    assert set(done(harness.say(3, m.Withdraw(3)))) == {1, 2, 4, 5}
    assert overwritten(harness) == {2: 1}


def logged(actions: list[Any]) -> list[Log]:
    return [action for action in actions if isinstance(action, Log) and "overwritten" in action.line]

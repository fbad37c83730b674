"""A state on its way through the group: who serves, who fetches, and what becomes of it when somebody is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl._core.master.events import PeerWent, Save
from pccl._core.master.state_consensus import CUT_OFF, SOURCES_LOST
from pccl._core.protocol import messages as m
from pccl._core.protocol.sources import Source, unpack_sources

from .master_harness import INVALID_USAGE, LOST, SEND, Scene, agree, agreed, digest, done, failed, of, sent


def transferring(**contents: str) -> Scene:
    """Peers p1, p2, ... with these contents agreed on revision 4 before, and are at 5 now; a transfer is under way."""
    votes = {int(name[1:]): content for name, content in contents.items()}
    scene = agree(of(*votes), 4, "z")
    scene.calls = 0
    for peer, content in votes.items():
        scene.sync(peer, 5, content)
    assert scene.state.members.groups[0].consensus.transfer is not None
    return scene


def fetched(scene: Scene, peer: int, *, ok: bool = True, transfer: int = 1) -> list[Any]:
    """In `transferring` every peer's call has the peer's number."""
    return scene.say(peer, m.Fetched(peer, transfer, ok, "" if ok else "no memory"))


def test_winners_serve_and_losers_fetch() -> None:
    """Goal: the orders name the round, the revision, the digest, and where to dial; sources come first."""
    scene = agree(of(1, 2, 3), 4, "z")
    scene.calls = 0
    scene.sync(1, 5, "a")
    scene.sync(2, 5, "b")

    actions = scene.sync(3, 5, "a")

    assert [(action.conn, type(action.message)) for action in actions] == [(1, m.Serve), (3, m.Serve), (2, m.Fetch)]
    order = sent(actions, m.Fetch)[2]
    assert (order.call, order.round, order.whole, order.revision, order.content) == (2, 1, False, 5, digest("a"))
    assert unpack_sources(order.sources) == (Source(1, "host1", 1001), Source(3, "host3", 1003))
    assert not done(actions)
    assert agreed(scene) == (4, "z"), "nothing is agreed before everybody has it"


def test_all_are_told_when_the_last_receiver_has_it() -> None:
    """Goal: success means that all who take part hold the same content at the same revision."""
    scene = transferring(p1="a", p2="b", p3="a", p4="c")

    assert fetched(scene, 2) == []
    actions = fetched(scene, 4)

    assert actions[0] == Save()
    assert done(actions) == dict.fromkeys((1, 2, 3, 4), 5)
    assert agreed(scene) == (5, "a")


def test_receivers_begin_with_different_sources() -> None:
    """Goal: several sources are used in parallel from the first moment."""
    scene = agree(of(1, 2, 3, 4), 4, "z")
    for peer, content in {1: "a", 2: "a", 3: "b"}.items():
        scene.sync(peer, 5, content)

    fetches = sent(scene.sync(4, 5, "c"), m.Fetch)

    assert [[source.peer for source in unpack_sources(fetches[peer].sources)] for peer in (3, 4)] == [[1, 2], [2, 1]]


@pytest.mark.parametrize("how", ["lost", "withdrawn"])
def test_a_source_that_goes_is_crossed_off(how: str) -> None:
    """Goal: receivers go on with the other sources, and whoever finished before hears nothing of it."""
    scene = transferring(p1="a", p2="b", p3="a", p4="c")
    fetched(scene, 4)

    actions = scene.feed(PeerWent(3, "reset")) if how == "lost" else scene.say(3, m.Withdraw(3))

    assert sent(actions, m.SourceGone) == {2: m.SourceGone(2, 1, 3)}
    assert done(fetched(scene, 2)) == {1: 5, 2: 5, 4: 5}
    assert agreed(scene) == (5, "a")


def test_all_sources_are_lost() -> None:
    """Goal: all who fetch are told to call again; nothing was agreed, so what was agreed before still counts."""
    scene = transferring(p1="a", p2="b", p3="a", p4="c")
    scene.wire(scene.feed(PeerWent(1, "reset")))
    assert set(sent(scene.feed(PeerWent(3, "reset")), m.SourceGone)) == {2, 4}
    assert not failed(fetched(scene, 2, ok=False)), "the other one may have finished: nobody knows yet"

    actions = fetched(scene, 4, ok=False)

    assert {peer: (end.result, end.reason) for peer, end in failed(actions).items()} == {
        2: (LOST, SOURCES_LOST),
        4: (LOST, SOURCES_LOST),
    }
    assert agreed(scene) == (4, "z")
    assert scene.state.members.groups[0].consensus.is_idle()


def test_the_survivors_of_a_lost_source_agree_among_themselves() -> None:
    """Goal: receivers that were up to date, and whole, go on with what they have."""
    scene = transferring(p1="a", p2="b", p3="c")
    scene.wire(scene.feed(PeerWent(1, "reset")))
    fetched(scene, 2, ok=False)
    fetched(scene, 3, ok=False)

    scene.sync(2, 5, "b")
    actions = scene.sync(3, 5, "c")

    assert set(sent(actions, m.Serve)) == {2}
    assert sent(actions, m.Fetch)[3].round == 2
    assert done(fetched(scene, 3, transfer=1)) == {}, "the word of an earlier transfer is not about this one"


@pytest.mark.parametrize("first", ["finished", "stranded"])
def test_whoever_had_it_all_before_the_sources_were_lost_serves_it(first: str) -> None:
    """Goal: a finished receiver holds the state: the others get it from there, and no call fails."""
    scene = transferring(p1="a", p2="b", p3="c", p4="d")
    if first == "finished":
        fetched(scene, 2)
    scene.wire(scene.feed(PeerWent(1, "reset")))
    fetched(scene, 3, ok=False)
    actions = fetched(scene, 4, ok=False)
    if first == "stranded":
        assert actions == [], "the third one has not said anything"
        actions = fetched(scene, 2)

    assert sent(actions, m.Serve) == {2: m.Serve(2, 1)}
    orders = sent(actions, m.MoreSources)
    assert {peer: unpack_sources(order.sources) for peer, order in orders.items()} == dict.fromkeys(
        (3, 4), (Source(2, "host2", 1002),)
    )
    assert not failed(actions)
    fetched(scene, 3)
    assert done(fetched(scene, 4)) == {2: 5, 3: 5, 4: 5}
    assert agreed(scene) == (5, "a")


def test_an_heir_may_be_lost_as_well() -> None:
    """Goal: each of those who finish inherits once; with the last of them the hope is lost, for all alike."""
    scene = transferring(p1="a", p2="b", p3="c", p4="d")
    fetched(scene, 2)
    scene.wire(scene.feed(PeerWent(1, "reset")))
    fetched(scene, 3, ok=False)
    fetched(scene, 4, ok=False)
    fetched(scene, 4)
    scene.wire(scene.feed(PeerWent(2, "reset")))

    actions = fetched(scene, 3, ok=False)
    assert (set(sent(actions, m.Serve)), set(sent(actions, m.MoreSources))) == ({4}, {3})
    scene.wire(scene.feed(PeerWent(4, "reset")))

    assert {peer: end.reason for peer, end in failed(fetched(scene, 3, ok=False)).items()} == {3: SOURCES_LOST}
    assert agreed(scene) == (4, "z")


def test_who_cannot_fetch_goes_when_the_others_have_finished() -> None:
    """Goal: a receiver that reaches no source holds nobody up for long, and the others stay in step."""
    scene = transferring(p1="a", p2="b", p3="c")
    assert fetched(scene, 2, ok=False) == []

    actions = fetched(scene, 3)

    assert sent(actions, m.Kick) == {2: m.Kick(LOST, f"{CUT_OFF}: no memory")}
    assert not sent(actions, m.MoreSources)
    assert done(actions) == {1: 5, 3: 5}


@pytest.mark.parametrize("how", ["lost", "withdrawn", "unable"])
def test_a_receiver_that_goes_holds_nobody_up(how: str) -> None:
    """Goal: no receivers left: the round completes for the rest."""
    scene = transferring(p1="a", p2="b", p3="a")

    if how == "lost":
        actions = scene.feed(PeerWent(2, "reset"))
    elif how == "withdrawn":
        actions = scene.say(2, m.Withdraw(2))
    else:
        actions = fetched(scene, 2, ok=False)
        assert sent(actions, m.Kick) == {2: m.Kick(LOST, f"{CUT_OFF}: no memory")}

    assert done(actions) == {1: 5, 3: 5}
    assert agreed(scene) == (5, "a")


def test_everybody_gives_up() -> None:
    """Goal: a transfer without anybody leaves nothing behind."""
    scene = transferring(p1="a", p2="b")
    scene.say(1, m.Withdraw(1))
    assert set(failed(fetched(scene, 2, ok=False))) == {2}

    assert agreed(scene) == (4, "z")
    assert scene.state.members.groups[0].consensus.is_idle()


def test_who_gave_up_may_call_again_and_waits_for_the_others() -> None:
    """Goal: a vote beside a running transfer belongs to the next round."""
    scene = transferring(p1="a", p2="b", p3="c")
    scene.say(2, m.Withdraw(2))
    scene.sync(2, 5, "b")

    assert done(fetched(scene, 3)) == {1: 5, 3: 5}
    scene.sync(1, 6, "d")
    assert set(sent(scene.sync(3, 6, "d"), m.Fetch)) == {2}


def test_a_ring_that_is_rewired_does_not_disturb_a_transfer() -> None:
    """Goal: a broken edge ends reduces, and nothing else."""
    scene = transferring(p1="a", p2="b", p3="a")
    epoch = scene.state.members.groups[0].epoch

    actions = scene.say(1, m.EdgeLost(epoch, 1, 2, "reset"))

    assert set(sent(actions, m.RingOrder)) == {1, 2, 3}
    assert not failed(actions)
    assert done(fetched(scene, 2)) == {1: 5, 2: 5, 3: 5}, "and it completes before the ring does"


def test_a_newcomer_of_the_next_round_is_no_part_of_a_transfer() -> None:
    """Goal: who is accepted while a transfer runs, because all had withdrawn from the round, votes for itself."""
    scene = agree(of(1, 2), 4, "z")
    scene.calls = 0
    scene.come(3)
    scene.say(1, m.VoteTopology(91, 0))
    orders = scene.say(2, m.VoteTopology(92, 0))
    scene.say(1, m.Withdraw(91))
    scene.say(2, m.Withdraw(92))
    scene.sync(1, 5, "a")
    scene.sync(2, 5, "b")
    scene.wire(orders)
    assert 3 in scene.state.members.accepted

    scene.sync(3, 0, "x")
    assert done(fetched(scene, 2)) == {1: 5, 2: 5}
    scene.sync(1, 6, "c")
    assert set(sent(scene.sync(2, 6, "c"), m.Fetch)) == {3}


@pytest.mark.parametrize(
    ("peer", "count", "reason"),
    [(1, 1, "in which it has nothing to fetch"), (2, 2, "in which it has nothing to fetch")],
    ids=["a source", "twice"],
)
def test_a_false_report_costs_its_connection(peer: int, count: int, reason: str) -> None:
    """Goal: only who was told to fetch can have fetched, and only once."""
    scene = transferring(p1="a", p2="b", p3="c")
    for _ in range(count - 1):
        fetched(scene, peer)

    kick = sent(fetched(scene, peer), m.Kick)

    assert kick[peer].result == INVALID_USAGE
    assert reason in kick[peer].reason


def test_the_last_word_of_a_receiver_counts_though_its_source_is_gone() -> None:
    """Goal: the source was lost while the receiver said that it has everything: it has, and that is agreed."""
    scene = transferring(p1="a", p2="b")
    scene.wire(scene.feed(PeerWent(1, "reset")))

    assert done(fetched(scene, 2)) == {2: 5}
    assert agreed(scene) == (5, "a")


def test_who_is_stranded_has_nothing_more_to_say() -> None:
    """Goal: it waits for the master's word; anything else costs its connection."""
    scene = transferring(p1="a", p2="b", p3="c")
    fetched(scene, 2, ok=False)

    assert "had no source left" in sent(fetched(scene, 2), m.Kick)[2].reason


def test_one_key_of_many_is_a_matter_between_peers() -> None:
    """Goal: the master orders a comparison of what is comparable, not of everything, where only content differs."""
    scene = transferring(p1="a", p2="a", p3="b")

    assert scene.state.members.groups[0].consensus.transfer is not None
    assert scene.state.members.groups[0].consensus.transfer.fetching == {3}


def test_an_outdated_sender_with_the_same_content_waits_for_the_others_and_learns_the_revision() -> None:
    """Goal: SEND_ONLY is not overwritten where there is nothing to overwrite."""
    scene = agree(of(1, 2), 4, "a")
    scene.sync(1, 4, "a", SEND)

    assert done(scene.sync(2, 5, "a", SEND)) == {1: 5, 2: 5}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((4, 5))), min_size=1, max_size=5), st.randoms())
def test_permutations_of_votes_give_the_same_orders(states: list[tuple[str, int]], random: Any) -> None:
    """Goal: who serves and who fetches does not depend on who voted first."""
    orders = []
    for _ in range(2):
        scene = agree(of(*range(1, len(states) + 1)), 4, "a")
        voters = list(enumerate(states, 1))
        random.shuffle(voters)
        actions: list[Any] = []
        for peer, (content, revision) in voters:
            actions = scene.sync(peer, revision, content)
        fetches = {peer: (order.whole, order.revision, order.content) for peer, order in sent(actions, m.Fetch).items()}
        orders.append((set(sent(actions, m.Serve)), fetches, done(actions), set(failed(actions))))

    assert orders[0] == orders[1]

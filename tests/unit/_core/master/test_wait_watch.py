"""Long waits at the master: each is reported in one line to the peers that wait, then ever more rarely."""

from __future__ import annotations

from typing import Any

from pccl._core.master.wait_watch import Wait, WaitWatch
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import INFO, WARNING, Log

from .master_harness import SECOND, MasterHarness, is_sent, of, sent


def lines_to(peer: int, actions: list[Any]) -> list[str]:
    """Return the lines that this peer is told."""
    return [action.message.line for action in actions if is_sent(action, m.Notice) and action.conn == peer]


# --- How often --------------------------------------------------------------


def test_reports_come_ever_more_rarely() -> None:
    """Goal: after 5, 10, 20, 40 ... seconds from the begin of the wait: a handful of lines for an hour."""
    harness = of(1, 2)
    harness.say(1, m.VoteTopology(1, 0))

    told = lines_to(1, harness.pass_time(3600))

    assert told == [
        f"update_topology has waited {seconds} s for peer 2 (in no call)"
        for seconds in (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
    ]


def test_a_wait_that_is_over_is_forgotten() -> None:
    """Goal: the next wait with the same name begins with its own first report."""
    watch = WaitWatch(5 * SECOND)
    wait = Wait(("a",), 0, (1,), lambda seconds: f"{seconds} s")

    assert [line for _, line in watch.due([wait], 12 * SECOND)] == ["12 s"]
    assert watch.due([wait], 19 * SECOND) == []
    assert [line for _, line in watch.due([wait], 20 * SECOND)] == ["20 s"]
    assert watch.due([], 21 * SECOND) == []
    assert [line for _, line in watch.due([wait], 22 * SECOND)] == ["22 s"]


def test_a_wait_without_a_known_begin_counts_from_when_it_was_seen() -> None:
    watch = WaitWatch(5 * SECOND)
    wait = Wait(("a",), None, (1,), lambda seconds: f"{seconds} s")

    assert watch.due([wait], 100 * SECOND) == []
    assert [line for _, line in watch.due([wait], 106 * SECOND)] == ["6 s"]


def test_reports_can_be_switched_off() -> None:
    """Goal: vote_warning=0 means never, as for the other bounds that may be 0."""
    harness = of(1, 2, vote_warning=0.0)
    harness.say(1, m.VoteTopology(1, 0))

    assert not sent(harness.pass_time(100), m.Notice)


# --- Which waits ------------------------------------------------------------


def test_a_ring_that_is_not_wired_names_who_has_not_reported() -> None:
    """Goal: members of the ring, and those that wait for the round, learn which peer holds it up."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(1, 0))
    actions = harness.say(2, m.VoteTopology(1, 0))
    epoch = sent(actions, m.RingOrder)[1].epoch
    harness.say(1, m.Wired(epoch))

    actions = harness.pass_time(6)

    line = (
        "the ring of group 0 has waited 5 s for peers 2, 3 (in no call) to connect to the neighbours "
        "(wire_timeout is 20 s)"
    )
    assert [lines_to(peer, actions) for peer in (1, 2, 3)] == [[line]] * 3
    assert Log(WARNING, line) in actions


def test_a_measurement_tells_its_progress() -> None:
    """Goal: it may take half a minute; a caller that looks can see which edges it waits for."""
    harness = of(1, 2, 3, probe_time=30.0)
    for peer in (1, 2, 3):
        harness.say(peer, m.VoteOptimize(1))

    actions = harness.pass_time(7)

    (line,) = lines_to(2, actions)
    assert line == (
        "optimize_topology has measured edges for 5 s: group 0 waits for 1->2, 2->3, 3->1, then 1 more rounds"
    )
    assert Log(INFO, line) in actions


def test_a_transfer_tells_who_fetches_from_whom() -> None:
    """Goal: a large state takes a while, and members that have it wait for the others."""
    harness = of(1, 2, 3)
    for peer, content in ((1, "a"), (2, "a"), (3, "b")):
        harness.sync(peer, 0, content)

    actions = harness.pass_time(7)

    line = "sync_shared_state of group 0 has waited 5 s for peer 3 to fetch the state from peers 1, 2"
    assert [lines_to(peer, actions) for peer in (1, 2, 3)] == [[line]] * 3
    assert Log(INFO, line) in actions


def test_a_lone_peer_that_waits_for_others_is_told_so() -> None:
    """Goal: the first thing that a new user sees is not silence."""
    harness = of(1)
    harness.say(1, m.VoteTopology(1, 2))

    (line,) = lines_to(1, harness.pass_time(6))

    assert line == "wait_for_world_size has waited 5 s: group 0 has 1 of 2 members. Start 1 more"


def test_peers_in_different_groups_are_asked_whether_they_mean_it() -> None:
    """Goal: the rounds of the others close all the time, and the one that waits still gets its word."""
    harness = of(1)
    harness.admit(2, 3, 4, group=1)
    said: list[str] = []
    for step in range(1, 15):
        harness.say(1, m.VoteTopology(step, 2))
        for peer in (2, 3, 4):
            actions = harness.say(peer, m.VoteTopology(step, 0))
        assert set(sent(actions, m.TopologyDone)) == {1, 2, 3, 4}
        said += lines_to(1, harness.pass_time(1))

    hint = "Start 1 more; 3 peers are in group 1: is peer_group the same everywhere?"
    assert said == [
        f"wait_for_world_size has waited {seconds} s: group 0 has 1 of 2 members. {hint}" for seconds in (5, 10)
    ]


def test_a_group_that_is_large_enough_waits_no_more() -> None:
    """Goal: a member that was satisfied, gave up or left is not reported."""
    harness = of(1)
    harness.say(1, m.VoteTopology(1, 2))
    harness.wire(harness.come(2))
    assert not harness.state.topology_round.wanting

    harness.say(1, m.VoteTopology(2, 3))
    assert set(harness.state.topology_round.wanting) == {1}
    harness.say(1, m.Withdraw(2))
    assert not harness.state.topology_round.wanting
    harness.say(1, m.VoteTopology(3, 3))
    harness.say(1, m.Leave("close"))
    assert not harness.state.topology_round.wanting


def test_a_newcomer_learns_of_an_optimisation() -> None:
    """Goal: it is not told to wait for update_topology of members that could not call it."""
    harness = of(1, 2, probe_time=30.0)
    for peer in (1, 2):
        harness.say(peer, m.VoteOptimize(1))
    harness.come(3)

    lines = lines_to(3, harness.pass_time(6))

    assert lines == ["not admitted yet: optimize_topology is under way. Members admit newcomers by update_topology()"]


def test_a_newcomer_alone_is_in_at_once_and_reports_nothing() -> None:
    """Goal: a healthy run prints nothing."""
    harness = MasterHarness()
    harness.wire(harness.come(1))

    assert not sent(harness.pass_time(100), m.Notice)

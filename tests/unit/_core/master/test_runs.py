"""The beginning and the end of runs at the master: names, the vote that finishes a run, and who comes too late."""

from __future__ import annotations

import pytest

from pccl._core.master.events import DialledBack, Dismiss, PeerWent, Save, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.master.run_table import RUNS_MAX
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import WARNING, Log
from pccl.options import Options

from .master_harness import (
    INVALID_USAGE,
    NO_STATE,
    RUN,
    SECOND,
    MasterHarness,
    agree,
    agreed,
    failed,
    is_sent,
    lose,
    of,
    sent,
)


def empty(harness: MasterHarness) -> MasterHarness:
    """All peers leave."""
    for conn in list(harness.state.members.conns):
        harness.feed(PeerWent(conn, "closed"))
    return harness


# --- Names ------------------------------------------------------------------


def test_the_first_peer_names_the_run() -> None:
    """Goal: peers of the same name join it, and a status report can show the name."""
    harness = of(1, 2, run="llama")

    assert harness.state.members.run_name == "llama"
    assert harness.state.members.run != RUN, "every run has an id of its own"


def test_a_peer_that_nobody_reaches_does_not_hold_the_master() -> None:
    """Goal: a first peer behind a firewall, of another name, makes way for a run, and is told why."""
    harness = MasterHarness()
    harness.register(1, run="pccl bench")
    waiting = harness.come(2, run="llama")
    assert "another master" in sent(waiting, m.Kick)[2].reason, "its dial-back may still succeed"
    harness.feed(DialledBack(1, "no answer within 5 s"))

    actions = harness.come(3, run="llama")

    for part in ("run 'llama' begins here", "no answer within 5 s", "PCCL_ADVERTISE"):
        assert part in sent(actions, m.Kick)[1].reason
    assert set(sent(harness.wire(actions), m.Accepted)) == {3}
    assert harness.state.members.run_name == "llama"


@pytest.mark.parametrize(("present", "other"), [("llama", ""), ("", "pccl bench"), ("llama", "pccl bench")])
def test_a_peer_of_another_run_is_refused_with_both_names(present: str, other: str) -> None:
    """Goal: a peer that was started on the wrong master is told so, and no member notices it."""
    harness = of(1, 2, run=present)

    actions = harness.come(3, run=other)

    [kick] = sent(actions, m.Kick).values()
    assert kick.result == INVALID_USAGE
    for name in (present, other):
        assert (repr(name) if name else "the run without a name") in kick.reason
    assert f"Set Options.run or PCCL_RUN to {present!r}" in kick.reason
    assert actions[-1] == Dismiss(3)
    assert not any(isinstance(action, SendTo) and action.conn != 3 for action in actions)
    assert harness.state.members.counters["refused"] == 1
    assert harness.state.members.registered == set()


def test_a_newcomer_that_waits_keeps_others_out_too() -> None:
    """Goal: a run has peers from the first registration on, not only from the first admission."""
    harness = MasterHarness()
    harness.come(1, run="a")  # registered, and its ring is not wired yet

    assert sent(harness.come(2, run="b"), m.Kick)
    assert not sent(harness.come(3, run="a"), m.Kick)


@pytest.mark.parametrize("name", ["a\nb", "x" * 129, "\x1b[31m"])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    """Goal: no peer writes control characters into the master's log."""
    [kick] = sent(MasterHarness().come(1, run=name), m.Kick).values()

    assert "Correct Options.run" in kick.reason


def test_an_empty_master_serves_the_next_name_and_forgets_nothing() -> None:
    """Goal: what the old run has agreed on waits for its name; peer ids and rounds are never used again."""
    harness = agree(of(1, 2, run="old"), 7, "a")
    run, members = harness.state.members.run, harness.state.members
    round_before = members.round
    empty(harness)

    actions = harness.come(3, run="new")
    assert actions.index(Save()) < next(i for i, action in enumerate(actions) if is_sent(action, m.Registered))
    harness.wire(actions)
    assert members.run != run
    assert sent(actions, m.Registered)[3].run == members.run
    assert agreed(harness, 0) is None, "the new run begins with nothing"
    agree(harness, 1, "b")
    assert sent(harness.come(4, run="old"), m.Kick)
    empty(harness)

    harness.wire(harness.come(5, run="old"))
    assert members.run == run
    assert agreed(harness) == (7, "a")
    assert members.peers.keys() == {4}, "peer ids go on: the refused peer had none"
    assert members.round > round_before
    assert harness.state.runs.table.runs["new"].revisions() == {0: 1}
    assert failed(harness.sync(5, 0, "x"))[5].result == NO_STATE, "an old run resumes only from its agreed state"


def test_a_run_that_agreed_on_nothing_is_not_remembered() -> None:
    """Goal: a hundred trials of a beginner fill no table."""
    harness = MasterHarness()
    for number in range(1, 2 * RUNS_MAX):
        harness.wire(harness.come(number, run=f"trial {number}"))
        empty(harness)

    assert not harness.state.runs.table.runs


def test_the_oldest_run_is_forgotten_with_a_warning() -> None:
    """Goal: the table is bounded, and the log says which run is lost."""
    harness = MasterHarness()
    lines = []
    for number in range(1, RUNS_MAX + 2):
        actions = harness.come(number, run=f"run {number}")
        harness.wire(actions)
        lines += [action.line for action in actions if isinstance(action, Log) and action.level == WARNING]
        agree(harness, number, "a")
        empty(harness)

    assert lines == ["forgets run 'run 1': too many other runs came after it"]


def test_the_message_about_a_missing_state_names_the_run() -> None:
    """Goal: who starts a second training on the same master reads whose state is wanted, and how to begin anew."""
    harness = empty(agree(of(1, run="llama"), 7, "a"))
    harness.wire(harness.come(2, run="llama"))

    reason = failed(harness.sync(2, 0, "x"))[2].reason

    assert "the state that run 'llama' agreed on earlier (revision 7" in reason
    for way in ("comm.finish()", "Options.run", "--new-run"):
        assert way in reason


def test_a_forgotten_push_revision_is_named() -> None:
    """Goal: a loop that changes its state and never pushes a revision is not told to load a checkpoint."""
    harness = agree(of(1, 2), 0, "a")

    harness.sync(1, 0, "b")
    reason = failed(harness.sync(2, 0, "c"))[1].reason

    assert "nobody called push_revision() since" in reason
    assert "exactly once" in reason
    assert "checkpoint" not in reason


# --- The end ----------------------------------------------------------------


def test_all_members_finish_the_run() -> None:
    """Goal: saved before anybody is told; then every caller is answered, and nobody is a peer any more."""
    harness = of(1, 2, run="llama")
    harness.admit(3, group=1, run="llama")
    assert harness.say(1, m.VoteFinish(5)) == []
    assert harness.say(2, m.VoteFinish(6)) == []

    actions = harness.say(3, m.VoteFinish(7))

    assert actions[0] == Save()
    told = sent(actions, m.RunFinished)
    assert {peer: message.call for peer, message in told.items()} == {1: 5, 2: 6, 3: 7}
    assert {action.conn for action in actions if isinstance(action, Dismiss)} == {1, 2, 3}
    assert "run 'llama' is finished" in told[1].reason
    assert not harness.state.members.peers
    assert harness.state.runs.finished
    assert harness.state.members.counters["finished"] == 3
    assert not any(isinstance(action, Log) and action.level >= WARNING for action in actions)


def test_newcomers_and_late_peers_are_told_and_never_wait() -> None:
    """Goal: a peer that died near the end and is restarted hears that nothing is left to do."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteFinish(5))
    actions = harness.say(2, m.VoteFinish(5))
    assert sent(actions, m.RunFinished)[3].call == 0

    harness.now_ns += 5 * SECOND
    late = harness.come(4)

    assert list(sent(late, m.RunFinished)) == [4]
    assert late[-1] == Dismiss(4)
    assert not sent(late, m.Registered)
    assert harness.state.runs.told_ns == harness.now_ns


def test_a_lost_member_is_not_waited_for() -> None:
    """Goal: the vote shrinks with the electorate."""
    harness = of(1, 2, 3)
    harness.say(1, m.VoteFinish(5))
    harness.say(2, m.VoteFinish(5))

    actions = harness.feed(PeerWent(3, "killed"))

    assert sent(actions, m.RunFinished).keys() == {1, 2}


def test_a_withdrawn_vote_does_not_count() -> None:
    """Goal: Ctrl-C in finish() takes the vote back."""
    harness = of(1, 2)
    harness.say(1, m.VoteFinish(5))
    harness.say(1, m.Withdraw(5))

    assert not sent(harness.say(2, m.VoteFinish(5)), m.RunFinished)
    assert sent(harness.say(1, m.VoteFinish(6)), m.RunFinished)[1].call == 6


def test_a_closed_round_is_completed_first() -> None:
    """Goal: newcomers that are being admitted become members, and are asked too."""
    harness = of(1)
    harness.come(2)
    orders = harness.say(1, m.VoteTopology(4, 0))
    harness.say(1, m.Withdraw(4))
    assert not sent(harness.say(1, m.VoteFinish(5)), m.RunFinished)

    assert not sent(harness.wire(orders), m.RunFinished), "peer 2 is a member, and has not voted"
    assert sent(harness.say(2, m.VoteFinish(1)), m.RunFinished).keys() == {1, 2}


def test_an_optimisation_is_completed_first() -> None:
    """Goal: nobody gets two ends; the peer that gave up optimize_topology waits for the others in it."""
    harness = of(1, 2)
    harness.say(1, m.VoteOptimize(4))
    harness.say(2, m.VoteOptimize(4))
    harness.say(1, m.Withdraw(4))
    harness.say(1, m.VoteFinish(5))
    assert sent(harness.say(2, m.VoteFinish(5)), m.Kick), "a member is in one call of the whole run at a time"

    assert harness.state.runs.finished, "the other one was alone then"


def test_a_changed_ring_does_not_delay_the_end() -> None:
    """Goal: survivors that have voted end at once; their ring is not needed any more."""
    harness = of(1, 2, 3)
    harness.feed(PeerWent(3, "killed"))
    harness.say(1, m.VoteFinish(5))

    assert sent(harness.say(2, m.VoteFinish(5)), m.RunFinished).keys() == {1, 2}


@pytest.mark.parametrize("call", ["reduce", "sync", "topology", "optimize"])
def test_finish_excludes_other_calls(call: str) -> None:
    """Goal: an honest peer never does this, so it is kicked, whichever of the two comes first."""

    def do(harness: MasterHarness) -> list[object]:
        if call == "reduce":
            return harness.reduce(1, 5)
        if call == "sync":
            return harness.sync(1, 0, "a")
        return harness.say(1, m.VoteTopology(8, 0) if call == "topology" else m.VoteOptimize(8))

    harness = of(1, 2)
    do(harness)
    assert "voted in finish while" in sent(harness.say(1, m.VoteFinish(5)), m.Kick)[1].reason

    harness = of(1, 2)
    harness.say(1, m.VoteFinish(5))
    assert "in finish" in sent(do(harness), m.Kick)[1].reason


def test_calls_that_never_meet_finish_are_explained() -> None:
    """Goal: one peer ends while another goes on: both hear it, the vote is taken back, and the run continues."""
    harness = of(1, 2)
    harness.say(1, m.VoteFinish(5))
    harness.say(2, m.VoteTopology(6, 0))

    told = failed(harness.pass_time(5))

    assert told.keys() == {1, 2}
    assert "peer 1 in finish; peer 2 in update_topology" in told[1].reason
    harness.say(1, m.VoteFinish(7))
    assert sent(harness.say(2, m.VoteFinish(8)), m.RunFinished).keys() == {1, 2}


def test_another_name_begins_after_the_end() -> None:
    """Goal: the master can be used again, and the finished run stays finished, also while another one has peers."""
    harness = of(1, run="a")
    harness.say(1, m.VoteFinish(5))
    harness.wire(harness.come(2, run="b"))

    assert harness.state.members.accepted == {2}
    assert not harness.state.runs.finished
    assert sent(harness.come(3, run="a"), m.RunFinished)
    assert sent(harness.come(4, run="c"), m.Kick)


def test_the_end_and_the_names_survive_a_restart() -> None:
    """Goal: a restarted master knows every run, which of them are finished, and the agreed states."""
    harness = agree(of(1, run="a"), 7, "x")
    empty(harness)
    harness.admit(2, run="b")
    harness.say(2, m.VoteFinish(5))
    saved = harness.state.snapshot()

    harness.state = MasterState.restore(saved, Options(check=True), harness.now_ns)

    assert harness.state.runs.finished
    assert harness.state.members.run_name == "b"
    assert sent(harness.come(3, run="b"), m.RunFinished)
    harness.wire(harness.come(4, run="a"))
    assert agreed(harness) == (7, "x")
    assert sent(harness.come(5, run="b"), m.RunFinished)
    assert {**harness.state.snapshot(), "next_id": 0}["runs"][0]["name"] == "b"


def test_lose_and_rejoin_near_the_end() -> None:
    """Goal: while one member has not voted, a restarted peer is a newcomer like any other."""
    harness = of(1, 2, 3)
    harness.say(1, m.VoteFinish(5))
    lose(harness, 3)
    actions = harness.come(4)
    assert sent(actions, m.Registered)

    assert sent(harness.say(2, m.VoteFinish(5)), m.RunFinished).keys() == {1, 2, 4}

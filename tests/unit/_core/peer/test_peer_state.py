"""The peer's machine: one membership from connect() to its end, and the calls in between."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import (
    AnswerLink,
    AppGone,
    AppStopped,
    Called,
    Complete,
    DialMaster,
    DropLink,
    HangUp,
    KillLanes,
    LinkCame,
    LinkDown,
    LinkUp,
    MasterDown,
    MasterSaid,
    MasterUp,
    ProbeDone,
    ReduceDrained,
    ReduceEnded,
    ReduceProgress,
    SendMaster,
    SpawnLanes,
    StateFetched,
    StateUnfetched,
    Stop,
    Tell,
    Traffic,
    TransferEnded,
    TrialEnded,
    WorkerDied,
)
from pccl._core.peer.peer_state import IGNORED, TRANSITIONS
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import NUMBERS, WARNING, Tick

from .peer_harness import (
    ALONE,
    CANCELLED,
    INVALID_USAGE,
    KICKED,
    MASTER_FAILED,
    MASTER_LOST,
    PLAIN,
    RUN,
    SECOND,
    SUCCESS,
    PeerHarness,
    commence,
    connect,
    describe,
    dialling,
    ends,
    fetch,
    joining,
    lane,
    member,
    operation,
    reduce,
    reducing,
    sync,
    told,
    verdict,
    wire,
    wired,
)

# --- Joining ----------------------------------------------------------------


def test_from_connect_to_member() -> None:
    """Goal: the shortest way to become a member, action by action."""
    peer = PeerHarness()

    assert peer.call(connect()) == [DialMaster(0)]
    assert peer.feed(MasterUp()) == []
    assert peer.hear(m.Registered(2, RUN, 1000, 10000)) == []
    assert peer.hear(ALONE) == [SendMaster(m.Wired(1))]
    assert peer.hear(m.Accepted(6, 1, 4, 1, 3, 2)) == [
        Complete(0, 1, SUCCESS, PLAIN, NUMBERS.pack(2, 6, 1, 4, 1, 3, 2)),
    ]
    assert peer.state.phase == "member"


def test_an_unreachable_master_is_tried_again_and_then_given_up() -> None:
    """Goal: the given number of attempts, a pause between them, and the last reason for the caller."""
    peer = PeerHarness(retry_interval=1.0)
    peer.call(connect(attempts=2))

    line = "attempt 1 of 2 to reach the master at host:7 failed: refused. The next one is in 1 s"
    assert peer.feed(MasterDown("refused")) == [Tell(WARNING, line)]
    assert peer.pass_time(0.9) == []
    assert peer.pass_time(0.1) == [DialMaster(1)]
    assert peer.feed(MasterDown("refused again")) == [
        HangUp(),
        Complete(0, 1, MASTER_FAILED, PLAIN, b"refused again"),
    ]


def test_a_final_refusal_is_not_tried_again() -> None:
    """Goal: another attempt with the same wrong token would get the same answer."""
    actions = dialling().feed(MasterDown("wrong token", final=True))

    assert ends(actions) == [(0, MASTER_FAILED, PLAIN)]


def test_a_master_lost_before_the_acceptance_costs_an_attempt() -> None:
    """Goal: connect() registers again; nothing of the old registration is kept."""
    peer = joining(retry_interval=1.0)
    peer.hear(wire(1, 3, 1, 1, 1))

    assert [action for action in peer.feed(MasterDown("reset")) if not isinstance(action, Tell)] == [DropLink(1)]
    assert (peer.state.phase, peer.state.id, peer.state.ring_links.epoch) == ("dialling", 0, 0)
    assert peer.pass_time(1.0) == [DialMaster(1)]


def test_a_newcomer_that_hears_nothing_hangs_up_and_starts_again() -> None:
    """Goal: a silent master does not block connect() for ever."""
    peer = joining()

    actions = peer.pass_time(11, master_beats=False)

    assert HangUp() in actions
    assert peer.state.phase == "dialling"


def test_without_a_name_there_is_no_rush() -> None:
    """Goal: a peer that is not registered sends no heartbeats, and must not ask for ticks without a pause."""
    peer = dialling()
    peer.feed(MasterUp())
    peer.now_ns = 3 * SECOND

    assert peer.feed(Tick()) == []
    assert peer.state.next_deadline_ns > peer.now_ns


@pytest.mark.parametrize("peer", [dialling(), joining()], ids=["dialling", "joining"])
def test_connect_can_be_given_up(peer: PeerHarness) -> None:
    """Goal: Ctrl-C in connect() ends it at once; a connected master is told first."""
    registered = peer.state.phase == "joining"

    actions = peer.call(mailbox.CallCancel(0, 1))

    assert bool(told(actions, m.Leave)) == registered
    assert ends(actions) == [(0, INVALID_USAGE, CANCELLED)]
    assert peer.state.phase == "gone"


# --- Calls ------------------------------------------------------------------


def test_calls_become_votes_and_answers_find_their_call() -> None:
    """Goal: two calls at once, each with a number of its own."""
    peer = member()

    assert peer.call(mailbox.CallTopology(3, 30, 5)) == [SendMaster(m.VoteTopology(1, 5))]
    assert peer.call(mailbox.CallPending(4, 40)) == [SendMaster(m.VotePending(2))]
    assert peer.hear(m.PendingAnswer(2, True)) == [Complete(4, 40, SUCCESS, PLAIN, b"\1")]
    assert peer.hear(m.TopologyDone(1, 7, 1, 9, 1, 2, 8)) == [
        Complete(3, 30, SUCCESS, PLAIN, NUMBERS.pack(2, 7, 1, 9, 1, 2, 8))
    ]


def test_the_answer_to_a_call_that_was_given_up_is_dropped() -> None:
    """Goal: a late answer is never taken for the answer to a later call."""
    peer = member()
    peer.call(mailbox.CallTopology(0, 2, 0))

    assert peer.call(mailbox.CallCancel(0, 2)) == [
        SendMaster(m.Withdraw(1)),
        Complete(0, 2, INVALID_USAGE, CANCELLED, b"given up by its caller"),
    ]
    peer.call(mailbox.CallTopology(0, 3, 0))

    assert peer.hear(m.TopologyDone(1, 7, 1, 1, 1, 1, 1)) == []
    assert ends(peer.hear(m.TopologyDone(2, 7, 1, 1, 1, 1, 1))) == [(0, SUCCESS, PLAIN)]


def test_a_cancel_that_comes_too_late_answers_nobody() -> None:
    """Goal: the call has already ended; its slot may belong to another call."""
    peer = member()

    assert peer.call(mailbox.CallCancel(0, 1)) == []


def test_a_failed_call_tells_why() -> None:
    """Goal: the caller gets the master's text, and the membership goes on."""
    peer = member()
    peer.call(mailbox.CallPending(1, 2))

    assert peer.hear(m.CallFailed(1, INVALID_USAGE, "never meet")) == [
        Complete(1, 2, INVALID_USAGE, PLAIN, b"never meet")
    ]
    assert peer.state.phase == "member"


def test_a_second_thread_in_the_same_call_is_refused() -> None:
    """Goal: one vote per peer and call; the first caller is not affected."""
    peer = member()
    peer.call(mailbox.CallTopology(0, 2, 0))

    actions = peer.call(mailbox.CallTopology(1, 3, 0))

    assert ends(actions) == [(1, INVALID_USAGE, PLAIN)]
    assert b"another thread" in actions[0].payload
    assert ends(peer.hear(m.TopologyDone(1, 7, 1, 1, 1, 1, 1))) == [(0, SUCCESS, PLAIN)]


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (PeerHarness(), b"call connect() first"),
        (dialling(), b"call connect() first"),
        (joining(), b"call connect() first"),
    ],
    ids=["new", "dialling", "joining"],
)
def test_calls_before_the_membership_are_refused(peer: PeerHarness, reason: bytes) -> None:
    """Goal: the error says what to do first."""
    (end,) = peer.call(mailbox.CallTopology(5, 6, 0))

    assert (end.slot, end.result) == (5, INVALID_USAGE)
    assert reason in end.payload


@pytest.mark.parametrize("peer", [dialling(), joining(), member()], ids=["dialling", "joining", "member"])
def test_connect_is_called_once(peer: PeerHarness) -> None:
    """Goal: a second connect() gets an error and changes nothing."""
    phase = peer.state.phase

    (end,) = peer.call(mailbox.CallConnect(5, 6, 1, 0, 1, b"", "", 0, b""))

    assert b"already called" in end.payload
    assert peer.state.phase == phase


# --- The end ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "result", "kind", "text"),
    [
        (MasterSaid(m.Kick(8, "straggler")), 8, KICKED, b"straggler"),
        (MasterDown("reset"), MASTER_FAILED, MASTER_LOST, b"the master is gone: reset"),
        (
            MasterSaid(m.Registered(3, RUN, 1, 2)),
            MASTER_FAILED,
            MASTER_LOST,
            b"the master broke the protocol: Registered while member",
        ),
    ],
    ids=["kicked", "lost", "broke the protocol"],
)
def test_the_end_reaches_everybody_who_waits_and_everybody_who_comes_later(
    event: Any, result: int, kind: int, text: bytes
) -> None:
    """Goal: lanes and workers end, every call ends with the reason, and so does every later call."""
    peer = wired()
    peer.call(mailbox.CallTopology(0, 2, 0))
    peer.call(mailbox.CallPending(1, 3))

    assert peer.feed(event) == [
        DropLink(1),
        DropLink(2),
        KillLanes(),
        HangUp(),
        Complete(0, 2, result, kind, text),
        Complete(1, 3, result, kind, text),
    ]
    assert peer.call(mailbox.CallPending(1, 4)) == [Complete(1, 4, result, kind, text)]
    assert peer.call(mailbox.CallLeave(2, 5)) == [Complete(2, 5, SUCCESS, PLAIN, b""), Stop()]


def test_the_first_reason_wins() -> None:
    """Goal: messages that the master sent before the end do not replace the reason of the end."""
    peer = member()
    peer.hear(m.Kick(8, "straggler"))

    assert peer.hear(m.Beat(1)) == []
    assert peer.hear(m.TopologyDone(1, 7, 1, 1, 1, 1, 1)) == []
    assert peer.feed(MasterDown("closed")) == []
    assert peer.state.ending[2] == "straggler"


def test_a_cancel_after_the_end_completes_nothing_twice() -> None:
    """Goal: the call ended with the membership; a Ctrl-C after that changes nothing."""
    peer = member()
    peer.call(mailbox.CallTopology(0, 2, 0))
    peer.feed(MasterDown("reset"))

    assert peer.call(mailbox.CallCancel(0, 2)) == []


def test_a_goodbye_is_said_before_hanging_up() -> None:
    """Goal: the others learn at once, without a timeout, that this peer left."""
    actions = wired().call(mailbox.CallLeave(7, 8))

    assert actions == [
        SendMaster(m.Leave("close")),
        DropLink(1),
        DropLink(2),
        KillLanes(),
        HangUp(),
        Complete(7, 8, SUCCESS, PLAIN, b""),
        Stop(),
    ]


@pytest.mark.parametrize("make", [PeerHarness, dialling, joining, member, wired])
def test_the_actor_ends_with_its_training_process(make: Any) -> None:
    """Goal: in every phase a dead training process ends the actor; a connected master is told first."""
    peer = make()

    actions = peer.feed(AppGone("killed"))

    assert actions[-1] == Stop()
    assert told(actions, m.Leave) == ([m.Leave("killed")] if make in (joining, member, wired) else [])


def test_a_silent_master_ends_the_membership_in_time() -> None:
    """Goal: the membership ends after the silence that the master has set, and not earlier."""
    peer = member()
    peer.call(mailbox.CallTopology(0, 2, 0))

    assert peer.pass_time(9.9, master_beats=False) == []
    actions = peer.pass_time(0.2, master_beats=False)

    assert ends(actions) == [(0, MASTER_FAILED, MASTER_LOST)]
    assert b"nothing heard from the master for 10 s" in actions[-1].payload


def test_its_own_pause_is_not_the_masters_silence() -> None:
    """Goal: after a stop of its own process for a minute, a peer gives the master the usual time again, and no more."""
    peer = member()
    peer.now_ns += 60 * SECOND

    peer.feed(Tick())
    assert peer.state.phase == "member"
    peer.pass_time(8, master_beats=False)
    assert peer.state.phase == "member"
    peer.pass_time(4, master_beats=False)
    assert peer.state.phase == "gone"


def test_notices_reach_the_user() -> None:
    """Goal: the master's notice about a long wait is in the user's log."""
    assert member().hear(m.Notice(WARNING, "waits")) == [Tell(WARNING, "waits")]


# --- The table --------------------------------------------------------------

EVENTS: dict[type[Any], Any] = {
    mailbox.CallConnect: Called(connect()),
    mailbox.CallTopology: Called(mailbox.CallTopology(5, 5, 0)),
    mailbox.CallPending: Called(mailbox.CallPending(5, 5)),
    mailbox.CallFinish: Called(mailbox.CallFinish(5, 5)),
    mailbox.CallCancel: Called(mailbox.CallCancel(9, 9)),
    mailbox.CallThreads: Called(mailbox.CallThreads(2)),
    mailbox.CallLeave: Called(mailbox.CallLeave(9, 9)),
    m.Registered: MasterSaid(m.Registered(2, RUN, 1000, 10000)),
    m.RingOrder: MasterSaid(wire(9, 3, 9, 1, 9)),
    m.Accepted: MasterSaid(m.Accepted(1, 1, 1, 1, 1, 1)),
    m.TopologyDone: MasterSaid(m.TopologyDone(77, 7, 1, 1, 1, 1, 1)),
    m.PendingAnswer: MasterSaid(m.PendingAnswer(77, False)),
    m.CallFailed: MasterSaid(m.CallFailed(77, 4, "x")),
    m.Kick: MasterSaid(m.Kick(4, "x")),
    m.RunFinished: MasterSaid(m.RunFinished(77, "x")),
    m.Notice: MasterSaid(m.Notice(30, "x")),
    m.Beat: MasterSaid(m.Beat(1)),
    mailbox.CallReduce: Called(reduce(operation(5, 6))),
    mailbox.CallAwait: Called(mailbox.CallAwait(9, 9)),
    m.Commence: MasterSaid(commence((7, 9))),
    m.AbortReduce: MasterSaid(m.AbortReduce(1, "x")),
    m.ReduceDone: MasterSaid(m.ReduceDone(2)),
    m.ReduceFailed: MasterSaid(verdict(7, 0)),
    m.World: MasterSaid(m.World(3, 5, 2, 2, 3, 9)),
    ReduceEnded: ReduceEnded(1, 0, 0, 0, 0, 0),
    ReduceDrained: ReduceDrained(1),
    ReduceProgress: ReduceProgress(1, 5),
    Traffic: Traffic(1, 2),
    mailbox.CallSync: Called(sync()),
    mailbox.CallManifest: Called(describe()),
    m.AskSchema: MasterSaid(m.AskSchema(77)),
    m.Serve: MasterSaid(m.Serve(77, 1)),
    m.Fetch: MasterSaid(fetch(call=77)),
    m.MoreSources: MasterSaid(m.MoreSources(77, 1, b"")),
    m.SourceGone: MasterSaid(m.SourceGone(77, 1, 3)),
    m.SyncDone: MasterSaid(m.SyncDone(77, 1)),
    StateFetched: StateFetched(1),
    StateUnfetched: StateUnfetched(1, "x"),
    TransferEnded: TransferEnded(1, 0, 0),
    mailbox.CallOptimize: Called(mailbox.CallOptimize(5, 5)),
    m.OptimizeDone: MasterSaid(m.OptimizeDone(77, 7, 1, 1, 1, 1, 1)),
    m.Probe: MasterSaid(m.Probe(1, 9, 1, 100, 1009, "host9")),
    ProbeDone: ProbeDone(1, 5, ""),
    m.Try: MasterSaid(m.Try(3, RUN, 1003, "host3")),
    TrialEnded: TrialEnded(3, ""),
    AppGone: AppGone("x"),
    AppStopped: AppStopped("x"),
    MasterUp: MasterUp(),
    MasterDown: MasterDown("x"),
    LinkCame: LinkCame(50, lane(1, 2, 40)),
    LinkUp: LinkUp(50),
    LinkDown: LinkDown(50, "x"),
    WorkerDied: WorkerDied("x"),
    Tick: Tick(),
}


def in_phase(phase: str) -> PeerHarness:
    if phase == "gone":
        peer = member()
        peer.hear(m.Kick(8, "straggler"))
        return peer
    return {"new": PeerHarness, "dialling": dialling, "joining": joining, "member": reducing}[phase]()


@pytest.mark.parametrize(("phase", "kind"), TRANSITIONS, ids=lambda part: getattr(part, "__name__", part))
def test_every_row_of_the_table_works(phase: str, kind: type[Any]) -> None:
    """Goal: no event that the table allows is a protocol violation, and the invariants hold after it."""
    peer = in_phase(phase)

    actions = peer.feed(EVENTS[kind])

    assert "broke the protocol" not in str(actions)
    assert peer.state.story[-1] == (0, EVENTS[kind], actions)


PHASES = ("new", "dialling", "joining", "member", "gone")
OUTSIDE = [(phase, kind) for phase in PHASES for kind in EVENTS if (phase, kind) not in TRANSITIONS]


@pytest.mark.parametrize(("phase", "kind"), OUTSIDE, ids=lambda part: getattr(part, "__name__", part))
def test_what_is_not_in_the_table_is_refused_ended_or_ignored(phase: str, kind: type[Any]) -> None:
    """Goal: a call gets an error, a message of the master ends the membership, a late event is ignored."""
    peer = in_phase(phase)
    event = EVENTS[kind]
    if isinstance(event, LinkCame):
        with pytest.raises(TypeError, match="knows no"):  # there is no listener before connect()
            peer.feed(event)
        return

    actions = peer.feed(event)

    if isinstance(event, Called):
        unanswered = kind in (mailbox.CallCancel, mailbox.CallAwait, mailbox.CallThreads)
        assert [type(action) for action in actions] == ([] if unanswered else [Complete])
    elif isinstance(event, MasterSaid):
        assert peer.state.phase == ("gone" if phase in ("joining", "member") else phase)
        assert bool(actions) == (phase in ("joining", "member"))
    else:
        assert kind in IGNORED
        assert actions == []


def test_a_lane_that_comes_after_the_end_is_told_so() -> None:
    """Goal: the other side gets an answer instead of a timeout, and the connection is not kept."""
    peer = in_phase("gone")

    assert peer.come(lane(1, 2, 9)) == (1, [AnswerLink(1, "straggler")])


def test_a_worker_that_dies_between_two_attempts_is_replaced() -> None:
    """Goal: workers outlive a lost registration, so the death of one in between must be remembered."""
    peer = joining(retry_interval=1.0)
    peer.hear(wire(1, 3, 1, 1, 1))
    peer.feed(MasterDown("reset"))

    assert KillLanes() in peer.feed(WorkerDied("signal 9"))
    peer.pass_time(1)
    peer.feed(MasterUp())
    peer.hear(m.Registered(4, RUN, 1000, 10000))
    assert SpawnLanes(1) in peer.hear(wire(1, 3, 1, 1, 1))

"""What a peer does when its training process is stopped, what it takes over from the master, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import (
    AppGone,
    AppStopped,
    Complete,
    MasterDown,
    MasterUp,
    ReduceEnded,
    ReduceProgress,
    Stop,
    Tell,
    UseTiming,
)
from pccl._core.peer.progress import Progress, name_addresses
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import INFO, WARNING, Tick
from pccl.options import Options

from .peer_harness import (
    KICKED,
    LOST,
    RUN,
    SECOND,
    PeerHarness,
    connect,
    dialling,
    joining,
    member,
    running,
    told,
    wired,
)


@pytest.mark.parametrize("make", [dialling, joining, member, wired])
def test_a_stopped_training_process_leaves_the_run_and_its_actor_stays(make: Any) -> None:
    """Goal: the others need not wait for it; its calls say what happened, and a later one too."""
    peer = make()
    peer.call(mailbox.CallTopology(5, 6, 0))

    actions = peer.feed(AppStopped("it was stopped for more than 10 s"))

    why = b"it was stopped for more than 10 s, so its peer left the run; call connect() again"
    assert told(actions, m.Leave) == ([m.Leave("it was stopped for more than 10 s")] if make is not dialling else [])
    assert Stop() not in actions
    assert {action.payload for action in actions if isinstance(action, Complete)} == {why}
    assert peer.call(mailbox.CallPending(7, 8)) == [Complete(7, 8, LOST, KICKED, why)]
    assert peer.feed(AppStopped("again")) == []
    assert peer.feed(AppGone("killed"))[-1] == Stop()


def test_the_options_of_the_master_count() -> None:
    """Goal: a peer follows the master, and says once which value of its own has no effect."""
    peer = PeerHarness(vote_timeout=5.0, vote_warning=5.0)
    peer.call(connect())
    peer.feed(MasterUp())
    timing = Options(wire_timeout=7.0).of_master()

    line = "vote_timeout=5 has no effect here: the master decides it, and uses 0; set it where the master runs"
    assert peer.hear(m.Registered(2, RUN, 1000, 10000, timing)) == [
        UseTiming(SECOND, 10 * SECOND),
        Tell(WARNING, line),
    ]
    assert peer.state.ring_links.options.wire_timeout == 7.0


def test_a_master_with_impossible_options_is_lost() -> None:
    """Goal: a peer does not work with bounds that let a call wait for ever."""
    peer = PeerHarness()
    peer.call(connect())
    peer.feed(MasterUp())

    actions = peer.hear(m.Registered(2, RUN, 1000, 10000, "wire_timeout=0"))

    assert "the master broke the protocol: Registered with wrong options: Options.wire_timeout" in str(actions)


# --- What takes long --------------------------------------------------------


def lines(actions: list[Any]) -> list[tuple[int, str]]:
    """Return the lines for the user's log, with their levels."""
    return [(action.level, action.line) for action in actions if isinstance(action, Tell)]


def test_many_attempts_are_reported_ever_more_rarely() -> None:
    """Goal: a launcher that tries for an hour does not fill the log."""
    peer = PeerHarness(retry_interval=1.0)
    peer.call(connect(attempts=100))
    reported = []
    for attempt in range(1, 100):
        if lines(peer.feed(MasterDown("refused"))):
            reported.append(attempt)
        peer.pass_time(1.0)

    assert reported == [1, 2, 3, 4, 5, 8, 16, 32, 64]


def test_a_master_that_swallows_packets_is_named_while_the_first_attempt_lasts() -> None:
    """Goal: no silence until the attempt fails, which takes twice as long."""
    peer = PeerHarness(vote_warning=5.0)
    peer.call(connect(attempts=5))

    assert peer.pass_time(4.9) == []
    assert lines(peer.pass_time(60)) == [(WARNING, "the master at host:7 has not answered for 5 s (attempt 1 of 5)")]


def test_all_addresses_of_a_master_are_named() -> None:
    assert name_addresses(b"::1 7\n10.0.0.1 8") == "[::1]:7 or 10.0.0.1:8"


def run_for(peer: PeerHarness, moved: list[int]) -> list[Any]:
    """Let a second pass for each of these numbers of bytes that sequence 1 has moved by then."""
    actions = []
    for count in moved:
        peer.now_ns += SECOND
        peer.hear(m.Beat(1))
        peer.feed(ReduceProgress(1, count))
        actions += peer.feed(Tick())
    return actions


def test_a_reduce_that_takes_long_tells_its_progress() -> None:
    """Goal: information while bytes move, a warning when none do, and ever more rarely."""
    peer = running(3, 4, vote_warning=5.0, stall_timeout=60.0)

    moving = lines(run_for(peer, [1_000_000 * second for second in range(1, 16)]))
    still = lines(run_for(peer, [15_000_000] * 10))

    assert moving == [
        (INFO, "all_reduce (tag 3) and 1 more runs for 5 s: 6.0 MB so far"),
        (INFO, "all_reduce (tag 3) and 1 more runs for 10 s: 11.0 MB so far"),
    ]
    assert still == [(WARNING, "all_reduce (tag 3) and 1 more runs for 20 s: 15.0 MB so far, and nothing for 6 s")]


def test_a_reduce_that_is_done_here_says_that_it_waits_for_the_others() -> None:
    """Goal: the peer that finds nothing to do is not the one to look at."""
    peer = running(3, vote_warning=5.0)
    peer.feed(ReduceEnded(1, 0, 0, 0, 0, 0))

    ((level, line),) = lines(peer.pass_time(8))

    assert level == INFO
    assert line.endswith("this peer is done, others are not")


def test_something_short_is_never_reported() -> None:
    """Goal: a healthy run prints nothing, however many short things it does."""
    progress = Progress()
    for key in range(100):
        for second in range(4):
            assert progress.look(key, second, (4 * key + second) * SECOND, 5 * SECOND) is None
    assert progress.look("off", 0, 10**12, 0) is None

"""What a peer does when its training process is stopped, what it takes over from the master, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.peer.events import AppGone, AppStopped, Complete, MasterUp, Stop, Tell, UseTiming
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import WARNING
from pccl.options import Options

from .peer_harness import KICKED, LOST, RUN, SECOND, PeerHarness, connect, dialling, joining, member, told, wired


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
    peer = PeerHarness(vote_timeout=5.0)
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

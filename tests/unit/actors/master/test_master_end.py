"""A master that ends with its run: not before the run is finished, and not before late peers were told."""

from __future__ import annotations

from typing import Any

import pytest

from pccl._core.master.events import DialledBack, PeerCame, PeerSaid
from pccl._core.protocol import hellos
from pccl._core.protocol import messages as m
from pccl.actors.io.listener import bind
from pccl.actors.master import master_actor
from pccl.actors.master.master_actor import MasterActor
from pccl.options import Options, nanoseconds


def begin(**how: Any) -> tuple[MasterActor, list[str]]:
    """Return a master with one member, and the lines that it logs."""
    lines: list[str] = []
    actor = MasterActor(bind("127.0.0.1", 0), b"", Options(check=True), lambda _, line: lines.append(line), **how)
    actor._feed(PeerCame(1, hellos.Register(bytes(32), 0, 1, "", 1, bytes(16)), "127.0.0.1"))
    actor._feed(DialledBack(1, ""))
    actor._feed(PeerSaid(1, m.Wired(actor.state.members.groups[0].epoch)))
    return actor, lines


def test_it_ends_some_time_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: `run` returns by itself, the log says why, and that time begins anew with every peer that comes late."""
    monkeypatch.setattr(master_actor, "FINISHED_STAY", 0.05)
    actor, lines = begin(exit_when_finished=True)
    stay_ns = nanoseconds(0.05)
    assert not actor._is_over(actor.state.runs.told_ns + stay_ns), "the run is not finished"
    actor._feed(PeerSaid(1, m.VoteFinish(1)))
    before_ns = actor.state.runs.told_ns
    actor._feed(PeerCame(2, hellos.Register(bytes(32), 0, 1, "", 1, bytes(16)), "127.0.0.1"))

    assert actor.state.runs.told_ns > before_ns
    assert not actor._is_over(before_ns + stay_ns)
    assert actor._is_over(actor.state.runs.told_ns + stay_ns)
    actor.run()  # would never return otherwise
    assert lines[-1].startswith("the run is finished: this master ends")


def test_without_the_flag_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a master that was not told to end answers late peers for ever."""
    monkeypatch.setattr(master_actor, "FINISHED_STAY", 0.0)
    actor, lines = begin()
    actor._feed(PeerSaid(1, m.VoteFinish(1)))
    actor.loop.after(2_500_000_000, actor.stop)

    actor.run()

    assert not any("this master ends" in line for line in lines)

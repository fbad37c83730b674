"""The loop of an actor: timers, stop, close, and garbage collection."""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Iterator

import pytest

from pccl._core.system.futex import monotonic_ns
from pccl.actors.io.connection import Connection
from pccl.actors.io.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def run(loop: Loop, milliseconds: int) -> None:
    loop.after(milliseconds * 1_000_000, loop.stop)
    loop.run(lambda: monotonic_ns() + 1_000_000_000, lambda _: None)


def test_what_only_refers_to_itself_is_taken_away(loop: Loop) -> None:
    """Goal: reference cycles are collected, so that an actor that wires rings for weeks does not grow."""

    class Edge:
        pass

    def lose_one() -> weakref.ref[Edge]:
        edge = Edge()
        edge.lanes = [edge]  # type: ignore[attr-defined]
        return weakref.ref(edge)

    gc.disable()
    try:
        loop.collect(5_000_000)
        lost = lose_one()
        assert lost() is not None
        run(loop, 50)
        assert lost() is None
        later = lose_one()
        run(loop, 50)
        assert later() is None, "not only once"
    finally:
        gc.enable()


def test_timers_go_off_in_their_order(loop: Loop) -> None:
    """Goal: by time, then by age; a timer that another timer starts runs as well."""
    heard: list[str] = []
    loop.after(2_000_000, lambda: heard.append("late"))
    loop.after(0, lambda: heard.append("first"))
    loop.after(0, lambda: loop.after(0, lambda: heard.append("made by the second")))
    run(loop, 20)

    assert heard == ["first", "made by the second", "late"]


def test_a_stop_ahead_of_the_run_is_not_lost(loop: Loop) -> None:
    """Goal: a master that gets SIGTERM after it has printed its address and before its loop runs still ends."""
    ticks = 0

    def tick(_: int) -> None:
        nonlocal ticks
        ticks += 1
        assert ticks < 3, "it runs on"

    loop.stop()
    loop.run(lambda: 0, tick)
    assert ticks == 0

    loop.after(0, loop.stop)
    loop.run(lambda: 0, tick)
    assert ticks == 1, "one stop ends one run"


def test_a_connection_that_sends_its_last_message_is_closed_with_the_loop() -> None:
    """Goal: no owner keeps such a connection any more, so the loop must not leave its socket open."""
    loop, (ours, theirs) = Loop(), socket.socketpair()
    ours.setblocking(False)
    connection = Connection(loop, ours, number=1, limits={}, on_message=print, on_down=print)
    connection.finish()
    assert not connection.closed

    loop.close()

    assert connection.closed
    assert ours.fileno() == -1
    theirs.close()


def test_a_descriptor_that_is_only_watched_stays_open() -> None:
    """Goal: the loop closes what its watchers own, and nothing else."""
    loop, (read_end, write_end) = Loop(), os.pipe()
    loop.watch(read_end, print)

    loop.close()

    os.fstat(read_end)
    os.close(read_end)
    os.close(write_end)

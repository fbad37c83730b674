"""The moonshot process: it finds better rings, never disturbs the master, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.networks import planted, scattered
from pccl._core.master.ring_choice import is_better
from pccl._core.solver.solver import evaluate, solve
from pccl.actors.io.loop import Loop
from pccl.actors.master import moonshot
from pccl.actors.master.moonshot import Moonshot

from .helpers import BOUND, Script, comm, eventually, gone

SECOND = 1_000_000_000
POLL_NS = 2_000_000  # between two checks of a condition
COUNT = 40
RATES = scattered(COUNT, 0)
RING = [100 + index for index in range(COUNT)]  # peer ids differ from positions


class Observatory:
    """A moonshot with its loop, and what it reported."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.better = 0
        self.ends: list[str] = []
        self.moonshot = Moonshot(self.loop, on_better=self._count, on_ended=self.ends.append)

    def _count(self) -> None:
        self.better += 1

    def begin(self, rates: array[float] = RATES, seconds: float = 30) -> int:
        self.moonshot.begin(RING, rates, 1, int(seconds * SECOND))
        return self.moonshot.pid

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Run the loop until the condition holds."""
        deadline, due = time.monotonic() + BOUND, 0

        def look(now_ns: int) -> None:
            nonlocal due
            due = now_ns + POLL_NS
            if condition() or time.monotonic() > deadline:
                self.loop.stop()

        self.loop.run(lambda: due, look)
        assert condition(), what


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Observatory]:
    """Yield a moonshot at normal priority: at its own low priority it would starve while other tests run."""
    monkeypatch.setattr(moonshot, "PRIORITY", 0)
    observatory = Observatory()
    yield observatory
    observatory.moonshot.close()
    observatory.loop.close()


def tell(monkeypatch: pytest.MonkeyPatch, *reports: bytes, then: Callable[[], None] = lambda: None) -> None:
    """Replace the search of the child by these reports."""

    def search(mailbox: socket.socket, *_: Any) -> None:
        for report in reports:
            mailbox.send(report)
        then()

    monkeypatch.setattr(moonshot, "search", search)


def packed(order: list[int]) -> bytes:
    return struct.pack(f"<{len(order)}H", *order)


# ---------------------------------------------------------------------------------------------- what it is for


def test_a_better_ring_is_found_and_offered(sky: Observatory) -> None:
    """Goal: a ring of the same peers with the same first peer, better by the master's rates; it is only offered."""
    sky.begin()
    assert sky.moonshot.better_than(RING, RATES) is None
    sky.until(lambda: sky.better, "a first better ring")

    found = sky.moonshot.better_than(RING, RATES)

    assert found is not None
    assert sorted(found) == RING
    assert found[0] == RING[0]
    assert is_better(evaluate(RATES, [RING.index(peer) for peer in found]), evaluate(RATES, range(COUNT)))


def test_an_answer_is_judged_by_the_rates_of_today(sky: Observatory) -> None:
    """Goal: a ring that is no longer better by the present rates is not offered, nor one to a ring that is as good."""
    sky.begin()
    sky.until(lambda: sky.better, "a first better ring")
    found = sky.moonshot.better_than(RING, RATES)
    assert found is not None

    today = array("d", [1e6 if (at // COUNT + 1) % COUNT == at % COUNT else rate for at, rate in enumerate(RATES)])
    assert sky.moonshot.better_than(RING, today) is None
    order = [RING.index(peer) for peer in found]
    turned = array("d", [RATES[a * COUNT + b] for a in order for b in order])
    assert sky.moonshot.better_than(found, turned) is None


def test_what_is_proven_ends_the_search(sky: Observatory) -> None:
    """Goal: a child that cannot find better does not go on for its whole time."""
    rates, ring = planted(COUNT, 0)
    sky.begin(rates)
    sky.until(lambda: sky.ends, "the end of a proven search")

    begin = ring.index(0)
    assert sky.ends == ["is done"]
    assert sky.moonshot.pid == 0
    assert sky.moonshot.better_than(RING, rates) == [RING[at] for at in ring[begin:] + ring[:begin]]


def test_no_ring_at_all_ends_it_too(sky: Observatory) -> None:
    sky.begin(array("d", [0.0 if at % COUNT == 3 else rate for at, rate in enumerate(RATES)]))
    sky.until(lambda: sky.ends, "the end of a hopeless search")

    assert sky.ends == ["is done"]
    assert sky.better == 0


def test_time_ends_it(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a search that could go on for ever ends by itself, without force."""
    monkeypatch.setattr(moonshot, "GRACE_NS", 60 * SECOND)
    sky.begin(seconds=0.3)
    sky.until(lambda: sky.ends, "the end of its time")

    assert sky.ends == ["is done"]


def test_a_small_ring_is_solved_at_once(sky: Observatory) -> None:
    rates = scattered(9, 0)
    sky.moonshot.begin(RING[:9], rates, 1, 30 * SECOND)
    sky.until(lambda: sky.ends, "the end of an exact search")

    best = solve(rates, 9)
    assert best is not None
    assert sky.moonshot.better_than(RING[:9], rates) == [RING[at] for at in best.order]


# ---------------------------------------------------------------------------------------------- membership


def test_an_answer_is_for_those_who_were_asked_about(sky: Observatory) -> None:
    """Goal: with one more, one less or another peer, there is no answer."""
    sky.begin()
    sky.until(lambda: sky.better, "a first better ring")

    assert sky.moonshot.better_than(RING[:-1], scattered(COUNT - 1, 0)) is None
    assert sky.moonshot.better_than([*RING[:-1], 7], RATES) is None
    assert sky.moonshot.better_than([*RING, 7], scattered(COUNT + 1, 0)) is None
    assert sky.moonshot.better_than(RING, RATES) is not None


def test_a_cancelled_search_is_gone_and_forgotten(sky: Observatory) -> None:
    pid = sky.begin()
    sky.until(lambda: sky.better, "a first better ring")
    sky.moonshot.cancel()
    sky.moonshot.cancel()

    assert sky.moonshot.better_than(RING, RATES) is None
    assert sky.moonshot.pid == 0
    sky.until(lambda: gone(pid), "the end of the child")
    assert sky.ends == []


def test_a_new_question_ends_the_old_one(sky: Observatory) -> None:
    """Goal: at most one child searches, however often membership changes."""
    pids = [sky.begin() for _ in range(5)]
    sky.until(lambda: sky.better, "a better ring for the last question")

    assert len(set(pids)) == 5
    assert [pid for pid in pids if not gone(pid)] == [sky.moonshot.pid]


# ---------------------------------------------------------------------------------------------- its process


def test_it_takes_no_more_than_its_share(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: lowest priority, a name, no descriptor of the master's, bounds on memory and time."""
    monkeypatch.undo()

    def limits() -> dict[str, str]:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return {line[:25].strip(): line[25:].split()[0] for line in lines}

    with socket.socket():  # as the master has some
        pid = sky.begin(seconds=20)
        eventually(lambda: limits()["Max cpu time"] == "23", "the limit on its time")

        assert comm(pid) == "pccl-moonshot"
        assert os.getpriority(os.PRIO_PROCESS, pid) == moonshot.PRIORITY == 19
        assert len([fd for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]) == 1
        eventually(lambda: limits()["Max core file size"] == "0", "the last of its limits")
        assert int(limits()["Max address space"]) > moonshot.MEMORY_BYTES_MAX


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_killed_has_not_searched_in_vain(sky: Observatory, number: int) -> None:
    """Goal: a killed child leaves the rings that it reported and the reason of its end; it ignores an interrupt."""
    pid = sky.begin()
    sky.until(lambda: sky.better, "a first better ring")
    os.kill(pid, signal.SIGINT)
    os.kill(pid, number)
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == [f"was killed by signal {number}"]
    assert sky.moonshot.better_than(RING, RATES) is not None


def test_one_that_is_stopped_is_ended(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a child that cannot end itself is ended when its time is over."""
    monkeypatch.setattr(moonshot, "GRACE_NS", 100_000_000)
    pid = sky.begin(seconds=0.2)
    os.kill(pid, signal.SIGSTOP)
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == ["did not end in its time"]
    assert gone(pid)


def test_it_dies_with_the_master() -> None:
    """Goal: a SIGKILL of the master is the end of its child."""
    body = """
    from benchmarks.networks import scattered
    from pccl.actors.io.loop import Loop
    from pccl.actors.master.moonshot import Moonshot
    loop = Loop()
    shot = Moonshot(loop, on_better=lambda: say("pid", shot.pid))
    shot.begin(range(40), scattered(40, 0), 1, 60_000_000_000)
    loop.run(lambda: 1 << 62, lambda _: None)
    """
    with Script(body) as script:
        pid = int(script.expect("pid"))
        assert not gone(pid)
        script.signal(signal.SIGKILL)
        eventually(lambda: gone(pid), "the end of the child")


# ---------------------------------------------------------------------------------------------- what it may say


@pytest.mark.parametrize(
    "garbage",
    [
        b"x",
        bytes(2 * COUNT),
        bytes(2 * COUNT + 2),
        bytes(1 << 16),
        packed([*range(COUNT - 1), COUNT]),
        b"\xff" * 2 * COUNT,
    ],
    ids=["one byte", "all the same", "too long", "far too long", "a stranger", "all ones"],
)
def test_garbage_ends_the_child(sky: Observatory, monkeypatch: pytest.MonkeyPatch, garbage: bytes) -> None:
    """Goal: a report that is not a ring is ignored with all after it; rings reported before it stay."""
    best = solve(RATES, COUNT, steps=100)
    better = solve(RATES, COUNT, steps=3000)
    assert best is not None
    assert better is not None
    # It does not end by itself, so its end is caused by the parent.
    tell(monkeypatch, packed(best.order), garbage, packed(better.order), then=lambda: time.sleep(60))
    sky.begin()
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == ["reported something that is no ring"]
    assert sky.better == 1
    assert sky.moonshot.better_than(RING, RATES) == [RING[at] for at in best.order]


def test_rings_that_are_not_better_are_not_believed(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the present ring, a worse one and a forbidden one change nothing, and the last report is read."""
    worst = min(
        ([*range(at, COUNT), *range(at)][::-1] for at in range(COUNT)),
        key=lambda order: evaluate(RATES, order)[0],  # type: ignore[index]
    )
    best = solve(RATES, COUNT, steps=100)
    assert best is not None
    rates = array("d", RATES)
    rates[2 * COUNT + 1] = 0.0  # the ring backwards is forbidden
    tell(monkeypatch, packed(list(range(COUNT))), packed(worst), packed(best.order), packed(list(range(COUNT))))
    sky.begin(rates)
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == ["is done"]
    assert sky.better == 1
    assert sky.moonshot.better_than(RING, rates) == [RING[at] for at in best.order]


def test_a_child_that_fails_is_reported(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    tell(monkeypatch, then=fail)
    sky.begin()
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == ["ended with status 1"]


def test_a_child_that_wants_the_whole_memory_gets_an_error(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    # It never sleeps: the memory for the argument cannot be allocated. If it slept, the test would time out.
    tell(monkeypatch, then=lambda: time.sleep(len(bytes(1 << 30))))
    sky.begin()
    sky.until(lambda: sky.ends, "its end")

    assert sky.ends == ["ended with status 1"]


def test_without_processes_there_is_an_error_and_no_leak(sky: Observatory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the leak guard finds nothing, neither without a process nor without a descriptor for one."""

    def refuse(*_: Any) -> int:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        with pytest.raises(OSError, match="no more processes"):
            sky.begin()
    with monkeypatch.context() as patch:
        patch.setattr(moonshot, "open_pidfd", refuse)
        with pytest.raises(OSError, match="no more processes"):
            sky.begin()

    assert sky.moonshot.pid == 0
    assert sky.begin()


@pytest.mark.parametrize("rates", [array("d", [1.0]), array("d", [-1.0] * COUNT * COUNT)])
def test_a_bad_question_is_refused_before_the_fork(sky: Observatory, rates: array[float]) -> None:
    with pytest.raises(ValueError, match="rate"):
        sky.begin(rates)

    assert sky.moonshot.pid == 0

"""The in-flight budget of a far link: the rate is found, the queue stays short, and the link never stops for ever."""

from __future__ import annotations

import socket
from typing import NamedTuple

import pytest

from pccl._core.dataplane.inflight import InflightModel, reported

from .loopback import connect

RATE = 125_000_000  # bytes per second
SHORTEST_US = 100_000
CARRIED = RATE * SHORTEST_US // 1_000_000  # bytes in a round trip
LEAST_BYTES = 1 << 16
PACKET = 1448
TICK_US = 10_000


class Pipe(NamedTuple):
    """A link, simulated in steps of 10 ms."""

    rate: int = RATE
    queue: int = CARRIED  # bytes that may wait in the link
    others_us: int = 0  # delay of acknowledgements that other traffic causes
    window: int = 40_000_000  # bytes that the kernel would have in flight by itself


class Pool:
    """A pool that sends as much as its budget allows, over given links for given times."""

    def __init__(self) -> None:
        self.model = InflightModel(SHORTEST_US)
        self.limit: int | None = None
        self.in_flight_max = self.now = 0
        self.lost = 0.0  # share of the packets of the last tick
        self._arrived = self._packets = self._resent = self._waiting = 0
        self._on_the_way: list[int] = []  # bytes that arrive and are acknowledged in each of the next ticks
        self._in_flight = 0

    def send(self, pipe: Pipe, seconds: float) -> float:
        """Send for this time; return the bytes per second that arrived."""
        before, packets, resent, self.in_flight_max = self._arrived, self._packets, self._resent, 0
        per_tick = pipe.rate * TICK_US // 1_000_000
        delay = (SHORTEST_US + pipe.others_us) // TICK_US
        for _ in range(round(seconds * 1_000_000 / TICK_US)):
            self.now += TICK_US * 1000
            if self._on_the_way:
                landed = self._on_the_way.pop(0)
                self._arrived += landed
                self._in_flight -= landed
            may = pipe.window if self.limit is None else min(pipe.window, self.limit)
            more = max(0, may - self._in_flight)
            lost = max(0, self._waiting + more - per_tick - pipe.queue)
            self._packets += more // PACKET
            self._resent += lost // PACKET
            self._in_flight += more - lost
            self._waiting += more - lost
            carried = min(self._waiting, per_tick)
            self._waiting -= carried
            self._on_the_way += [0] * (delay - len(self._on_the_way))
            self._on_the_way[delay:] = [sum(self._on_the_way[delay:]) + carried]
            self.in_flight_max = max(self.in_flight_max, self._in_flight)
            round_trip_us = SHORTEST_US + pipe.others_us + self._waiting * 1_000_000 // pipe.rate
            self.limit = self.model.learn(
                self.now, self._arrived, self._in_flight, self._packets, self._resent, round_trip_us
            )
        self.lost = (self._resent - resent) / (self._packets - packets)
        return (self._arrived - before) / seconds


def test_the_rate_is_found_and_the_queue_stays_short() -> None:
    """Goal: a kernel that would overload the link is limited to what the link carries plus a quarter."""
    pool = Pool()
    pool.send(Pipe(), 5)
    rate = pool.send(Pipe(), 10)

    assert rate == pytest.approx(RATE, rel=0.03)
    assert pool.model.best == pytest.approx(RATE, rel=0.05)
    assert pool.in_flight_max < 1.4 * CARRIED


def test_a_window_that_the_kernel_limits_is_left_alone() -> None:
    """Goal: if the kernel sends less than the link carries, it is not limited, even if the rate never grows."""
    pool = Pool()
    pool.send(Pipe(window=CARRIED // 2), 20)

    assert pool.limit is None or pool.limit > CARRIED // 2
    assert pool.in_flight_max == CARRIED // 2
    assert pool.send(Pipe(), 10) > 0.9 * RATE  # also when the kernel sends more


def test_a_link_that_becomes_faster_is_noticed() -> None:
    pool = Pool()
    pool.send(Pipe(), 10)
    pool.send(Pipe(rate=2 * RATE, queue=2 * CARRIED), 10)

    assert pool.send(Pipe(rate=2 * RATE, queue=2 * CARRIED), 5) == pytest.approx(2 * RATE, rel=0.05)


def test_a_link_that_becomes_slower_is_noticed_by_its_losses() -> None:
    pool = Pool()
    pool.send(Pipe(), 10)
    slow = Pipe(rate=RATE // 4, queue=CARRIED // 4)
    pool.send(slow, 2)
    assert pool.lost > 0.02
    pool.send(slow, 20)
    rate = pool.send(slow, 5)

    assert pool.lost < 0.02
    assert pool.in_flight_max <= CARRIED // 2  # bytes on the link and in its queue
    assert rate == pytest.approx(RATE / 4, rel=0.05)


def test_delays_that_others_cause_do_not_starve_the_link() -> None:
    """Goal: with three times the round trip the rate stays above half; it recovers fully afterwards."""
    pool = Pool()
    pool.send(Pipe(), 10)
    rate = pool.send(Pipe(others_us=2 * SHORTEST_US), 60)

    assert rate > RATE / 2
    assert pool.model.best > 0.8 * RATE
    assert pool.send(Pipe(), 10) > 0.9 * RATE


def test_a_link_on_which_nothing_arrives_can_still_be_tried() -> None:
    """Goal: after a peer that was stopped some bytes may still be sent, or the link would stay idle for ever."""
    model = InflightModel(SHORTEST_US)
    limits = [model.learn(second * 10**9, 0, 1_000_000, 1000, 900, SHORTEST_US) for second in range(1, 20)]

    assert model.best == 0
    assert limits[-1] == LEAST_BYTES


def test_what_arrived_while_a_lane_did_not_report_is_no_rate() -> None:
    """Goal: a lane that reports many arrivals after a pause starts a new measurement."""
    model = InflightModel(SHORTEST_US)
    model.learn(10**9, 0, 0, 0, 0, SHORTEST_US)
    model.restart_sample()
    model.learn(2 * 10**9, 10**9, 0, 0, 0, SHORTEST_US)
    assert model.best == 0

    model.learn(3 * 10**9, 10**9 + 1000, 0, 0, 0, SHORTEST_US)
    assert model.best == pytest.approx(1000, rel=0.01)


def test_arrivals_that_seem_to_shrink_are_no_rate() -> None:
    """Goal: a count that restarts, as with a new connection, does not look like a very high rate."""
    model = InflightModel(SHORTEST_US)
    model.learn(10**9, 10**9, 0, 0, 0, SHORTEST_US)
    model.learn(2 * 10**9, 0, 0, 0, 0, SHORTEST_US)

    assert model.best == 0


def test_a_look_lasts_several_round_trips() -> None:
    """Goal: a round trip with many acknowledgements at once is averaged with those around it."""
    model = InflightModel(SHORTEST_US)
    arrived = 0
    for number in range(1, 101):
        arrived += 3 * CARRIED if number % 5 == 0 else CARRIED // 2
        model.learn(number * SHORTEST_US * 1000, arrived, 0, 0, 0, SHORTEST_US)

    assert model.best == pytest.approx(RATE, rel=0.02)


def test_the_kernel_reports_of_tcp_only() -> None:
    near, far = connect()
    with near, far:
        near.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(far.recv(1 << 16))
        far.sendall(b"!")
        assert near.recv(1) == b"!"  # it acknowledges all bytes before it
        report = reported(near.fileno())
        assert report is not None
        arrived, in_flight, unsent = report
        assert arrived >= 100_000 // 2  # counted in whole packets
        assert (in_flight, unsent) == (0, 0)
    one, other = socket.socketpair()
    with one, other:
        assert reported(one.fileno()) is None

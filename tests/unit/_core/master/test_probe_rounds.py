"""The peer's side of optimize_topology, the probe rounds, the choice of a ring, and the passive rate of an edge."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest

from pccl._core.master.probe_rounds import Measurement, plan_rounds
from pccl._core.master.ring_choice import choose_ring
from pccl._core.peer.events import BeginProbe, EndProbe, ProbeDone, ReduceEnded, SendMaster
from pccl._core.peer.member import BYTES_MIN, PassiveRate
from pccl._core.protocol import mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Tick
from tests.unit._core.peer.peer_harness import (
    INVALID_USAGE,
    PENDING_ASYNC_OPS,
    PLAIN,
    SECOND,
    SUCCESS,
    ends,
    member,
    reducing,
    sync,
    told,
    wire,
)

CALL = mailbox.CallOptimize(5, 50)
PROBE = m.Probe(4, 3, 2, 500, 1003, "host3")
ORDERED = BeginProbe(4, 3, 2, 500, "host3", 1003)

# --- a peer -----------------------------------------------------------------


def test_a_call_is_a_vote_and_its_answer_brings_numbers() -> None:
    peer = member()

    (vote,) = told(peer.call(CALL), m.VoteOptimize)
    assert ends(peer.hear(m.OptimizeDone(vote.call, 3, 4, 2, 2, 1, 2))) == [(5, SUCCESS, PLAIN)]


@pytest.mark.parametrize("other", [mailbox.CallTopology(6, 60, 0), sync(6), mailbox.CallOptimize(6, 60)])
def test_calls_that_may_not_meet_are_refused(other: Any) -> None:
    """Goal: the peer actor refuses a second thread's call, whichever call came first; the first call goes on."""
    peer = member()
    peer.call(CALL)
    assert ends(peer.call(other)) == [(6, INVALID_USAGE, PLAIN)]

    peer = member()
    peer.call(other)
    assert ends(peer.call(CALL)) == [(5, INVALID_USAGE, PLAIN)]


def test_no_optimisation_with_reduces_under_way() -> None:
    assert ends(reducing().call(CALL)) == [(5, PENDING_ASYNC_OPS, PLAIN)]


def test_a_probe_is_made_and_reported() -> None:
    """Goal: the peer answers the master's order once, with or without a call of its own."""
    peer = member()

    assert peer.hear(PROBE) == [ORDERED]
    assert peer.feed(ProbeDone(4, 1000, "")) == [SendMaster(m.Probed(4, 3, 1000, ""))]
    assert peer.feed(ProbeDone(4, 1000, "")) == []


def test_the_next_probe_ends_the_last() -> None:
    """Goal: the master has given up the earlier round; its results are ignored."""
    peer = member()
    peer.hear(PROBE)

    assert peer.hear(m.Probe(5, 1, 1, 500, 1001, "host1")) == [EndProbe(4), BeginProbe(5, 1, 1, 500, "host1", 1001)]
    assert peer.feed(ProbeDone(4, 1000, "")) == []
    assert told(peer.feed(ProbeDone(5, 0, "refused")), m.Probed) == [m.Probed(5, 1, 0, "refused")]


def test_the_end_of_a_membership_ends_its_probe() -> None:
    peer = member()
    peer.hear(PROBE)

    assert EndProbe(4) in peer.hear(m.Kick(8, "straggler"))
    assert peer.feed(ProbeDone(4, 1000, "")) == []


@pytest.mark.parametrize("fields", [{"lanes": 0}, {"lanes": 9999}, {"milliseconds": 0}, {"target": 2}])
def test_a_probe_that_cannot_be_made_ends_the_membership(fields: dict[str, int]) -> None:
    """Goal: no honest master asks for it."""
    peer = member()
    asked: dict[str, Any] = {"round": 4, "target": 3, "lanes": 2, "milliseconds": 5, "port": 1, "host": "host3"}
    question = m.Probe(**{**asked, **fields})
    peer.hear(question)

    assert peer.state.phase == "gone"


# --- rounds -----------------------------------------------------------------


def test_steps_of_the_ring_come_first() -> None:
    """Goal: after one round the rates of the present ring are known, even if there is no time for more."""
    ring = [3, 1, 2, 4]
    edges = [(a, b) for a in ring for b in ring if a != b]

    rounds = plan_rounds(ring, edges)
    assert rounds[0] == [(1, 2), (2, 4), (3, 1), (4, 3)]
    assert sorted(edge for probes in rounds for edge in probes) == sorted(edges)


@pytest.mark.parametrize("count", range(2, 20))
def test_both_directions_between_two_are_never_measured_at_once(count: int) -> None:
    """Goal: acknowledgements do not wait behind data of another probe; that costs one or two rounds more."""
    ring = list(range(count))
    rounds = plan_rounds(ring, [(a, b) for a in ring for b in ring if a != b])

    for probes in rounds:
        assert not any((target, source) in probes for source, target in probes)
        assert len({source for source, _ in probes}) == len({target for _, target in probes}) == len(probes)
    assert len(rounds) <= count + 1


def test_a_lost_peer_takes_its_edges_along() -> None:
    ring = [1, 2, 3, 4]
    measurement = Measurement(ring, [(a, b) for a in ring for b in ring if a != b], 30)
    measurement.begin_round(1, 5)
    measurement.drop(4)
    measurement.check({1, 2, 3})

    assert measurement.pending == {(1, 2), (2, 3)}
    assert not measurement.take(2, (1, 2))
    assert measurement.take(1, (1, 2))
    assert not measurement.take(1, (1, 2))
    assert measurement.give_up() == [(2, 3)]
    rest = []
    while not measurement.is_over():
        rest += measurement.begin_round(2, 5)
        measurement.give_up()
    assert sorted(rest) == [(1, 3), (2, 1), (3, 1), (3, 2)]


# --- the choice -------------------------------------------------------------


def rates(ring: list[int], slow: dict[tuple[int, int], float]) -> array[float]:
    return array("d", [slow.get((a, b), 100.0) for a in ring for b in ring])


def test_a_clearly_faster_ring_is_chosen() -> None:
    ring = [7, 5, 6, 8]
    chosen, reason = choose_ring(ring, rates(ring, {(7, 5): 10}), 1)

    assert chosen is not None
    assert chosen[0] == 7
    assert (7, 5) not in pairwise(chosen)
    assert "instead of" in reason


def test_what_was_found_in_the_background_counts_by_todays_rates() -> None:
    """Goal: the moonshot's ring is chosen only if it is better now, and not at all after the members changed."""
    ring = list(range(14))
    slow = {(a, (a + 1) % 14): 10.0 for a in range(14)}
    backwards = list(range(13, -1, -1))
    fast = {(a, (a - 1) % 14): 200.0 for a in range(14)}
    table = rates(ring, slow | fast)

    chosen, _ = choose_ring(ring, table, 1, backwards)
    assert chosen == [0, *range(13, 0, -1)]
    assert choose_ring(ring, rates(ring, {}), 1, backwards)[0] is None
    assert choose_ring(ring, rates(ring, {}), 1, [*backwards[:-1], 99])[0] is None


@pytest.mark.parametrize("count", [1, 2])
def test_small_rings_have_no_choice(count: int) -> None:
    ring = list(range(count))
    assert choose_ring(ring, rates(ring, {}), 1)[0] is None


# --- what reduces show ------------------------------------------------------


def ended(rx_bytes: int, network: int, neighbour: int, sequence: int = 1) -> ReduceEnded:
    return ReduceEnded(sequence, 0, rx_bytes, network, neighbour, 0)


def test_a_rate_is_what_came_by_the_time_something_ran() -> None:
    """Goal: reduces that overlap count once; idle time does not count."""
    meter = PassiveRate()
    meter.began(2, 0)
    meter.ended(ended(BYTES_MIN, 95, 5), SECOND)
    assert meter.take() == (0, False), "one still runs"
    meter.ended(ended(BYTES_MIN, 95, 5), 2 * SECOND)
    meter.began(1, 9 * SECOND)
    meter.ended(ended(BYTES_MIN, 95, 5), 10 * SECOND)

    assert meter.take() == (BYTES_MIN, True)
    assert meter.take() == (0, False)


def test_who_waits_for_the_previous_peer_saw_no_limit() -> None:
    meter = PassiveRate()
    meter.began(1, 0)
    meter.ended(ended(BYTES_MIN, 60, 40), SECOND)

    assert meter.take() == (BYTES_MIN, False)


def test_little_and_aborted_reduces_show_nothing() -> None:
    meter = PassiveRate()
    meter.began(1, 0)
    meter.ended(ended(BYTES_MIN - 1, 95, 5), SECOND)
    assert meter.take() == (0, False)
    meter.began(1, 0)
    meter.reset(1)
    meter.ended(ended(BYTES_MIN, 95, 5), SECOND)
    assert meter.take() == (0, False)


def test_a_reduce_that_outlives_an_abort_is_not_counted_into_the_time_of_the_next() -> None:
    """Goal: its bytes came in a time that was forgotten; counted, they would show a rate that the edge never had."""
    meter = PassiveRate()
    meter.began(2, 0)
    meter.reset(2)  # the first of the two was aborted
    meter.began(1, 9 * SECOND)
    meter.ended(ended(9 * BYTES_MIN, 95, 5, sequence=2), 10 * SECOND)
    assert meter.take() == (0, False), "the third still runs"
    meter.ended(ended(BYTES_MIN, 95, 5, sequence=3), 11 * SECOND)

    assert meter.take() == (BYTES_MIN // 2, True)


def test_beats_carry_what_was_seen_of_the_previous_peer() -> None:
    """Goal: the master learns the rate with the next heartbeat, once; a new ring starts a new measurement."""
    peer = reducing()
    peer.now_ns += SECOND // 2
    peer.feed(ReduceEnded(1, 0, 2 * BYTES_MIN, 95, 5, 0))
    seen = [(beat.previous, beat.bytes_per_second) for beat in beats_of(peer, 3)]
    assert seen == [(1, 2 * (2 * BYTES_MIN + 20)), (0, 0), (0, 0)]

    peer = reducing()
    peer.hear(wire(3, 3, 3, 1, 3))
    peer.feed(ReduceEnded(1, 0, 2 * BYTES_MIN, 95, 5, 0))
    assert not any(beat.previous for beat in beats_of(peer, 3))


def beats_of(peer: Any, seconds: int) -> list[Any]:
    found = []
    for _ in range(seconds):
        peer.now_ns += SECOND
        peer.hear(m.Beat(1))
        found += told(peer.feed(Tick()), m.Beat)
    return found

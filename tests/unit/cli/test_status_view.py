"""How `pccl status` shows a run: the text for status reports that a master could send."""

from __future__ import annotations

from typing import Any

import pytest
from pccl.cli.status_view import draw_matrix, draw_ring, duration, rate, render, size, table

from pccl._core.master.events import PeerWent
from pccl._core.master.status_report import status_document
from pccl._core.protocol import messages as m
from tests.unit._core.master.master_harness import SECOND, MasterHarness, agree, of


def rendered(harness: MasterHarness, **changes: Any) -> list[str]:
    run = {"version": "1.2", "protocol_version": 1, **status_document(harness.state, harness.now_ns), **changes}
    return render(run, "10.0.0.7:48148").splitlines()


def test_an_empty_run_says_so() -> None:
    """Goal: the text says that the run is empty, so that it does not look like a failed query."""
    lines = rendered(MasterHarness())

    first = "run 000102030405 at 10.0.0.7:48148, pccl 1.2 (protocol 1), up 0.0 s, round 0, 0 peers in 0"
    assert lines[0].startswith(first)
    assert "no peers: the run is empty" in lines


def test_a_run_at_a_glance() -> None:
    """Goal: peers in columns, the ring as a line, and a sentence for each waiting call with the peers it waits for."""
    harness = of(1, 2, 3)
    harness.come(4)
    harness.say(1, m.VoteTopology(7, 0))
    harness.now_ns += 75 * SECOND
    lines = rendered(harness)

    assert " ".join(lines[2].split()) == "peer group address lanes state since call for heard tx rx"
    assert " ".join(lines[3].split()) == "1 0 host1:1001 1 voting 1 m 15 s update_topology 1 m 15 s 1 m 15 s ago - -"
    assert "group 0, epoch 2: 1 -> 2 -> 3 -> 1" in lines
    assert (
        "1 newcomer waiting (peer 4): they are admitted when all members call update_topology; "
        "missing: peers 2, 3 (in no call)"
    ) in lines
    assert "update_topology: 1 of 3 for 1 m 15 s, waits for peers 2, 3 (in no call)" in lines
    numbers = "admitted 3, lost 0, left 0, kicked 0, rewired 2, deadlocks 0, agreed 0, overwritten 0, optimized 0"
    assert lines[-1] == f"counters: {numbers}, finished 0, refused 0"


def test_runs_have_names() -> None:
    """Goal: the name of the run, its end, and the other runs that the master remembers are on the page."""
    harness = agree(of(1, run="old"), 3, "a")
    harness.feed(PeerWent(1, "closed"))
    harness.come(2, run="new")
    harness.wire(harness.come(3, run="new"))
    text = "\n".join(rendered(harness))

    assert text.startswith("run 'new' (")
    assert "remembers run 'old': agreed revisions by group {0: 3}" in text

    harness = of(1)
    harness.say(1, m.VoteFinish(1))
    text = "\n".join(rendered(harness))
    assert text.startswith("run 000102030405, finished, at ")
    assert "no peers: the run is finished" in text


def test_what_a_group_has_beside_its_ring() -> None:
    """Goal: shared state, pairs that cannot connect, and bandwidths are shown if there are any."""
    harness = of(1, 2, 3)
    group = harness.state.members.groups[0]
    group.consensus.revision, group.consensus.content = 7, b"\xab\xcd"
    group.mark(1, 3, "no route to host", 60 * SECOND)
    group.bandwidths.put(1, 2, 5e6, 0)
    group.bandwidths.put(2, 1, 125e6, 0)
    (described,) = status_document(harness.state, 0)["groups"]
    text = "\n".join(rendered(harness, groups=[described]))

    assert "1 -> 2 -> 3 -> 1, shared state at revision 7 (abcd)" in text
    assert "  peer 1 cannot reach peer 3: no route to host (avoided for 1 m 0 s)" in text
    assert "  MB/s    1  2  3\n  1 ->    .  5  .\n  2 ->  125  .  .\n  3 ->    .  .  ." in text


def test_a_divergent_peer_is_named() -> None:
    """Goal: an operator sees which peer is overwritten, and where its tensors are named."""
    harness = of(1, 2, 3)
    harness.state.members.peers[2].overwritten = 1
    harness.state.members.peers[3].overwritten = 40
    lines = rendered(harness)

    assert lines[6:8] == [
        "peer 2 was overwritten by 1 sync: its log names the tensors",
        "peer 3 was overwritten by 40 syncs: its log names the tensors",
    ]


def test_what_was_cut_is_counted() -> None:
    """Goal: a list that is not complete says so."""
    harness = of(1, 2)

    assert "... and 7 more peers" in rendered(harness, peers_count=9)


@pytest.mark.parametrize(
    ("ring", "line"),
    [([], "no member"), ([3], "3 (alone)"), ([1, 4, 2], "1 -> 4 -> 2 -> 1")],
)
def test_rings(ring: list[int], line: str) -> None:
    """Goal: the line of a ring ends with its first member."""
    assert draw_ring(ring) == line


def test_a_long_ring_is_shortened() -> None:
    """Goal: a hundred members fit into one line."""
    line = draw_ring(list(range(1, 101)))

    assert line.startswith("1 -> 2 -> ")
    assert "... 84 more ..." in line
    assert line.endswith("100 -> 1")


def test_a_large_matrix_is_its_slowest_edge() -> None:
    """Goal: of a matrix that is too large for a screen, only the slowest edge is shown."""
    ring = list(range(1, 21))
    line = draw_matrix(ring, [(1, 2, 5e6), (2, 3, 1e6)])

    assert line == "  2 bandwidths measured; the slowest is 2 -> 3 with 1.0 MB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (42.7, "42 s"), (310, "5 m 10 s"), (12000, "3 h 20 m"), (187200, "2 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    """Goal: two units at most."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.9, "1.0 kB"), (1500, "1.5 kB"), (99.6e6, "100 MB"), (999.9e6, "1.0 GB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    """Goal: two or three digits, also at the change from one unit to the next."""
    assert size(nbytes) == text


def test_rates_and_tables() -> None:
    """Goal: a rate of zero is a dash, and numbers are aligned to the right."""
    assert rate(0) == "-"
    assert table(["a", "bc"], [["x", "1"], ["yy", "20"]]).splitlines() == ["a   bc", "x    1", "yy  20"]

"""The status report of the master: everything that goes on, as plain values, without any change of the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pccl._core.master import status_report
from pccl._core.master.events import PeerCame
from pccl._core.master.status_report import REPORT_TAGS_MAX, report_pages, status_document
from pccl._core.protocol import hellos
from pccl._core.protocol import messages as m
from pccl._core.protocol.codec import BLOB_BYTES_MAX, encode
from pccl._core.protocol.messages import REPORT_BYTES_MAX, REPORT_PAGES_MAX
from pccl.options import SEND_QUEUE_BYTES_MAX

from .master_harness import RUN, SECOND, MasterHarness, of, running


def described(harness: MasterHarness, **changes: Any) -> dict[str, Any]:
    """Return the status report as an operator gets it, encoded and decoded."""
    run: dict[str, Any] = json.loads(json.dumps(status_document(harness.state, harness.now_ns, **changes)))
    return run


def peer(run: dict[str, Any], number: int) -> dict[str, Any]:
    (found,) = [peer for peer in run["peers"] if peer["id"] == number]
    return found


def test_an_empty_run() -> None:
    """Goal: also a master without peers has a status report."""
    run = described(MasterHarness())

    assert run["run"] == RUN.hex()
    assert (run["world"], run["peers"], run["groups"], run["votes"]) == (0, [], [], [])
    assert run["newcomers"] == {"count": 0, "peers": [], "reason": ""}
    assert run["counters"]["admitted"] == 0


def test_members_and_their_ring() -> None:
    """Goal: the report lists the members, their addresses, their age and the order of the ring."""
    harness = of(1, 2, 3)
    harness.pass_time(5)
    run = described(harness)

    assert run["uptime_seconds"] == 5.0
    assert run["world"] == 3
    assert run["counters"]["admitted"] == 3
    assert peer(run, 2) == {
        "id": 2,
        "group": 0,
        "address": "host2:1002",
        "lanes": 1,
        "state": "idle",
        "phase_seconds": 5.0,
        "call": None,
        "call_seconds": None,
        "heard_seconds": 0.0,
        "tx_bytes": 0,
        "rx_bytes": 0,
        "tx_bytes_per_second": 0,
        "rx_bytes_per_second": 0,
        "overwritten": 0,
    }
    (group,) = run["groups"]
    assert group["ring"] == [1, 2, 3]
    assert (group["members"], group["wiring"], group["revision"], group["digest"]) == (3, [], None, None)


def test_an_address_with_colons_is_in_brackets() -> None:
    """Goal: a shown address can be copied and used."""
    harness = MasterHarness()
    harness.feed(PeerCame(1, hellos.Register(bytes(32), 0, 1, "fd00::7", 48149, bytes(16)), "host1"))

    assert peer(described(harness), 1)["address"] == "[fd00::7]:48149"


def test_a_vote_says_who_is_missing_and_what_they_do() -> None:
    """Goal: the report shows operators which peers the others wait for."""
    harness = of(1, 2, 3)
    harness.say(1, m.VoteTopology(7, 0))
    harness.say(2, m.VotePending(8))
    harness.now_ns += 3 * SECOND
    topology, pending = described(harness)["votes"]

    assert topology == {
        "call": "update_topology",
        "group": None,
        "seconds": 3.0,
        "present_count": 1,
        "present": [1],
        "missing_count": 2,
        "missing": [2, 3],
        "reason": "waits for peer 2 (in are_peers_pending), peer 3 (in no call)",
    }
    assert pending["missing"] == [1, 3]
    assert peer(described(harness), 1)["state"] == "voting"
    assert peer(described(harness), 1)["call"] == "update_topology"
    assert peer(described(harness), 1)["call_seconds"] == 3.0
    assert peer(described(harness), 3)["call"] is None


def test_newcomers_wait_for_a_round() -> None:
    """Goal: an operator sees at once that update_topology was not called."""
    harness = of(1, 2)
    harness.come(3)
    harness.say(1, m.VoteTopology(7, 0))
    run = described(harness)

    assert peer(run, 3)["state"] == "newcomer"
    assert run["world"] == 2
    assert run["newcomers"] == {
        "count": 1,
        "peers": [3],
        "reason": "they are admitted when all members call update_topology; missing: peer 2 (in no call)",
    }


def test_newcomers_whose_ring_is_being_wired() -> None:
    """Goal: while a round waits for its rings, the report names the peers that are not wired yet."""
    harness = of(1)
    harness.come(2)
    harness.say(1, m.VoteTopology(7, 0))
    run = described(harness)

    assert peer(run, 2)["state"] == "joining"
    assert peer(run, 1)["state"] == "wiring"
    assert run["groups"][0]["wiring"] == [1, 2]
    assert run["newcomers"]["reason"] == "rings are being wired; reports are missing of peers 1, 2"
    assert run["votes"][0]["reason"] == "all have voted; the rings are being wired"


def test_all_wait_for_a_larger_group() -> None:
    """Goal: the report says that all members wait for a larger group."""
    harness = of(1, 2)
    for voter in (1, 2):
        harness.say(voter, m.VoteTopology(7, 5))
    (vote,) = described(harness)["votes"]

    assert vote["reason"] == "all have voted, and each waits for a larger group (wait_for_world_size)"


def test_collectives() -> None:
    """Goal: the report shows running reduces, and the peers that waiting reduces wait for."""
    harness = running(1, 2, tags=(5, 6))
    harness.now_ns += SECOND
    harness.reduce(1, 9)
    harness.now_ns += SECOND
    run = described(harness)

    (group,) = run["groups"]
    assert (group["running"], group["commenced"]) == (2, 2)
    (vote,) = run["votes"]
    assert (vote["call"], vote["group"], vote["seconds"]) == ("all_reduce (tag 9)", 0, 1.0)
    assert (vote["present"], vote["missing"]) == ([1], [2])
    assert (peer(run, 1)["state"], peer(run, 1)["call"]) == ("voting", "all_reduce (tag 9)")
    assert (peer(run, 2)["state"], peer(run, 2)["call"]) == ("reducing", "all_reduce (tag 5)")
    assert peer(run, 2)["call_seconds"] == 2.0


def test_rates_are_between_two_heartbeats() -> None:
    """Goal: a rate is bytes per time that passed; delayed heartbeats that arrive together do not raise it."""
    harness = of(1, 2)
    harness.now_ns += SECOND
    harness.say(1, m.Beat(0, 1000, 500))
    harness.now_ns += 2 * SECOND
    harness.say(1, m.Beat(0, 9000, 2500))
    harness.now_ns += SECOND // 1000
    harness.say(1, m.Beat(0, 9500, 2600))
    shown = peer(described(harness), 1)

    assert (shown["tx_bytes"], shown["rx_bytes"]) == (9500, 2600)
    assert (shown["tx_bytes_per_second"], shown["rx_bytes_per_second"]) == (4000, 1000)


def test_a_counter_that_goes_back_is_no_negative_rate() -> None:
    """Goal: wrong counts of a peer do not break the report."""
    harness = of(1)
    for moved in (5000, 10):
        harness.now_ns += SECOND
        harness.say(1, m.Beat(0, moved, moved))

    assert peer(described(harness), 1)["tx_bytes_per_second"] == 0


def test_pairs_that_cannot_connect() -> None:
    """Goal: a pair that the ring avoids is shown with its reason until the mark expires."""
    harness = of(1, 2, 3)
    edge = harness.state.members.groups[0].edges[(1, 2)]
    harness.say(1, m.WireFailed(edge, 2, "no route to host"))
    harness.now_ns += 10 * SECOND
    (pair,) = described(harness)["groups"][0]["unreachable"]

    assert pair == {"source": 1, "target": 2, "reason": "no route to host", "seconds_left": 50.0}
    harness.now_ns += 50 * SECOND
    assert described(harness)["groups"][0]["unreachable"] == []


def test_what_was_agreed_of_shared_state() -> None:
    """Goal: the expected revision and its digest."""
    harness = of(1)
    consensus = harness.state.members.groups[0].consensus
    consensus.revision, consensus.content = 7, b"\xab\xcd"
    (group,) = described(harness)["groups"]

    assert (group["revision"], group["digest"]) == (7, "abcd")


def test_describing_leaves_no_trace() -> None:
    """Goal: making a status report does not change the machine."""
    harness = of(1, 2, 3)
    harness.say(1, m.VoteTopology(7, 0))
    harness.come(4)
    before = (
        harness.state.snapshot(),
        list(harness.state.story),
        harness.state.next_deadline_ns,
        dict(harness.state.votes),
    )
    first = described(harness)

    assert described(harness) == first
    state = harness.state
    assert (state.snapshot(), list(state.story), state.next_deadline_ns, dict(state.votes)) == before


# --- Bounds -----------------------------------------------------------------


def test_lists_are_cut_and_counted() -> None:
    """Goal: a large run is described in part, and says so."""
    harness = of(1, 2, 3, 4)
    harness.say(1, m.VoteTopology(7, 0))
    run = described(harness, most=2)

    assert [one["id"] for one in run["peers"]] == [1, 2]
    assert run["peers_count"] == 4
    assert run["groups"][0]["ring"] == [1, 2]
    assert run["groups"][0]["members"] == 4
    assert (run["votes"][0]["missing"], run["votes"][0]["missing_count"]) == ([2, 3], 3)


def test_a_flood_of_tags_is_not_looked_through() -> None:
    """Goal: thousands of reduces of one group do not keep the master busy with their description."""
    harness = of(1, 2)
    for first in range(0, 640, 64):
        harness.reduce(1, *range(first, first + 64))

    assert len(described(harness)["votes"]) == REPORT_TAGS_MAX


def test_pages_make_the_whole() -> None:
    """Goal: the pages joined are the whole text, and each page fits its message."""
    harness = MasterHarness()
    for number in range(1, 200):
        harness.come(number, group=number)
    pages = report_pages(harness.state, 0, version="1.2")

    assert len(pages) > 1
    assert [(page.page, page.pages) for page in pages] == [(index, len(pages)) for index in range(len(pages))]
    assert all(len(page.text) == BLOB_BYTES_MAX for page in pages[:-1])
    assert all(encode(page) for page in pages)
    run = json.loads(b"".join(page.text for page in pages))
    assert run == {"version": "1.2", **described(harness)}


def test_a_report_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a run that is too large is described in less detail, so that the report always fits the send queue."""
    assert REPORT_BYTES_MAX < SEND_QUEUE_BYTES_MAX
    assert REPORT_PAGES_MAX < 1 << 16
    harness = MasterHarness()
    for number in range(1, 300):
        harness.come(number)
    monkeypatch.setattr(status_report, "REPORT_BYTES_MAX", 20_000)
    run = json.loads(b"".join(page.text for page in report_pages(harness.state, 0)))

    assert 0 < len(run["peers"]) < 100
    assert run["peers_count"] == 299


def test_an_optimisation_is_shown_with_what_it_knows() -> None:
    """Goal: the report shows which groups probe and the known rates, and that the vote waits for no peer."""
    harness = of(1, 2)
    for voter in (1, 2):
        harness.say(voter, m.VoteOptimize(7))
    harness.say(1, m.Probed(1, 2, 5_000_000, ""))
    harness.now_ns += SECOND
    run = described(harness)

    (vote,) = run["votes"]
    assert (vote["call"], vote["present"], vote["missing"]) == ("optimize_topology", [1, 2], [])
    assert vote["reason"] == "all have voted; groups [0] measure their edges"
    (group,) = run["groups"]
    edge = {"source": 1, "target": 2, "bytes_per_second": 5e6, "age": 1.0, "fresh": True, "origin": "probe"}
    assert group["bandwidths"] == {"edges_count": 1, "edges": [edge], "stale": 0, "unknown": 1}

"""What the master tells an operator: everything that is going on, in plain values, without a trace in the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pccl._core.master import status_report
from pccl._core.master.events import PeerCame
from pccl._core.master.status_report import REPORT_TAGS_MAX, report_pages, status_document
from pccl._core.protocol import messages as m
from pccl._core.protocol.codec import BLOB_BYTES_MAX, encode
from pccl._core.protocol.messages import REPORT_BYTES_MAX, REPORT_PAGES_MAX
from pccl.options import SEND_QUEUE_BYTES_MAX

from .master_harness import RUN, SECOND, Scene, of, running


def described(scene: Scene, **changes: Any) -> dict[str, Any]:
    """What an operator reads, after its way over the wire."""
    run: dict[str, Any] = json.loads(json.dumps(status_document(scene.state, scene.now_ns, **changes)))
    return run


def peer(run: dict[str, Any], number: int) -> dict[str, Any]:
    (found,) = [peer for peer in run["peers"] if peer["id"] == number]
    return found


def test_an_empty_run() -> None:
    """Goal: a master that nobody has joined has something to say too."""
    run = described(Scene())

    assert run["run"] == RUN.hex()
    assert (run["world"], run["peers"], run["groups"], run["votes"]) == (0, [], [], [])
    assert run["newcomers"] == {"count": 0, "peers": [], "reason": ""}
    assert run["counters"]["admitted"] == 0


def test_members_and_their_ring() -> None:
    """Goal: who is in, where, since when, in which order."""
    scene = of(1, 2, 3)
    scene.pass_time(5)
    run = described(scene)

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
    }
    (group,) = run["groups"]
    assert group["ring"] == [1, 2, 3]
    assert (group["members"], group["wiring"], group["revision"], group["digest"]) == (3, [], None, None)


def test_an_address_with_colons_is_in_brackets() -> None:
    """Goal: what is shown can be copied."""
    scene = Scene()
    scene.feed(PeerCame(1, m.Register(bytes(32), 0, 1, "fd00::7", 48149), "host1"))

    assert peer(described(scene), 1)["address"] == "[fd00::7]:48149"


def test_a_vote_says_who_is_missing_and_what_they_do() -> None:
    """Goal: the question of every operator is who holds up the others."""
    scene = of(1, 2, 3)
    scene.say(1, m.VoteTopology(7, 0))
    scene.say(2, m.VotePending(8))
    scene.now_ns += 3 * SECOND
    topology, pending = described(scene)["votes"]

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
    assert peer(described(scene), 1)["state"] == "voting"
    assert peer(described(scene), 1)["call"] == "update_topology"
    assert peer(described(scene), 1)["call_seconds"] == 3.0
    assert peer(described(scene), 3)["call"] is None


def test_newcomers_wait_for_a_round() -> None:
    """Goal: a forgotten update_topology is seen at a glance."""
    scene = of(1, 2)
    scene.come(3)
    scene.say(1, m.VoteTopology(7, 0))
    run = described(scene)

    assert peer(run, 3)["state"] == "newcomer"
    assert run["world"] == 2
    assert run["newcomers"] == {
        "count": 1,
        "peers": [3],
        "reason": "they are admitted when all members call update_topology; missing: peer 2 (in no call)",
    }


def test_newcomers_whose_ring_is_being_wired() -> None:
    """Goal: who has yet to report is named while a round waits for its rings."""
    scene = of(1)
    scene.come(2)
    scene.say(1, m.VoteTopology(7, 0))
    run = described(scene)

    assert peer(run, 2)["state"] == "joining"
    assert peer(run, 1)["state"] == "wiring"
    assert run["groups"][0]["wiring"] == [1, 2]
    assert run["newcomers"]["reason"] == "rings are being wired; peers 1, 2 have yet to report"
    assert run["votes"][0]["reason"] == "all have voted; the rings are being wired"


def test_all_wait_for_a_larger_group() -> None:
    """Goal: wait_for_world_size of everybody is no mystery."""
    scene = of(1, 2)
    for voter in (1, 2):
        scene.say(voter, m.VoteTopology(7, 5))
    (vote,) = described(scene)["votes"]

    assert vote["reason"] == "all have voted, and each waits for a larger group (wait_for_world_size)"


def test_collectives() -> None:
    """Goal: what runs, and what waits for whom."""
    scene = running(1, 2, tags=(5, 6))
    scene.now_ns += SECOND
    scene.reduce(1, 9)
    scene.now_ns += SECOND
    run = described(scene)

    (group,) = run["groups"]
    assert (group["running"], group["commenced"]) == (2, 2)
    (vote,) = run["votes"]
    assert (vote["call"], vote["group"], vote["seconds"]) == ("all_reduce (tag 9)", 0, 1.0)
    assert (vote["present"], vote["missing"]) == ([1], [2])
    assert (peer(run, 1)["state"], peer(run, 1)["call"]) == ("voting", "all_reduce (tag 9)")
    assert (peer(run, 2)["state"], peer(run, 2)["call"]) == ("reducing", "all_reduce (tag 5)")
    assert peer(run, 2)["call_seconds"] == 2.0


def test_rates_are_between_two_heartbeats() -> None:
    """Goal: bytes by the time that passed; beats that were held up and come together do not make a flood."""
    scene = of(1, 2)
    scene.now_ns += SECOND
    scene.say(1, m.Beat(0, 1000, 500))
    scene.now_ns += 2 * SECOND
    scene.say(1, m.Beat(0, 9000, 2500))
    scene.now_ns += SECOND // 1000
    scene.say(1, m.Beat(0, 9500, 2600))
    shown = peer(described(scene), 1)

    assert (shown["tx_bytes"], shown["rx_bytes"]) == (9500, 2600)
    assert (shown["tx_bytes_per_second"], shown["rx_bytes_per_second"]) == (4000, 1000)


def test_a_counter_that_goes_back_is_no_negative_rate() -> None:
    """Goal: what a peer says is shown, never believed."""
    scene = of(1)
    for moved in (5000, 10):
        scene.now_ns += SECOND
        scene.say(1, m.Beat(0, moved, moved))

    assert peer(described(scene), 1)["tx_bytes_per_second"] == 0


def test_pairs_that_cannot_connect() -> None:
    """Goal: what is routed around is shown, with its reason, until it expires."""
    scene = of(1, 2, 3)
    edge = scene.state.members.groups[0].edges[(1, 2)]
    scene.say(1, m.WireFailed(edge, 2, "no route to host"))
    scene.now_ns += 10 * SECOND
    (pair,) = described(scene)["groups"][0]["unreachable"]

    assert pair == {"source": 1, "target": 2, "reason": "no route to host", "seconds_left": 50.0}
    scene.now_ns += 50 * SECOND
    assert described(scene)["groups"][0]["unreachable"] == []


def test_what_was_agreed_of_shared_state() -> None:
    """Goal: the expected revision and its digest."""
    scene = of(1)
    consensus = scene.state.members.groups[0].consensus
    consensus.revision, consensus.content = 7, b"\xab\xcd"
    (group,) = described(scene)["groups"]

    assert (group["revision"], group["digest"]) == (7, "abcd")


def test_describing_leaves_no_trace() -> None:
    """Goal: to be looked at changes nothing."""
    scene = of(1, 2, 3)
    scene.say(1, m.VoteTopology(7, 0))
    scene.come(4)
    before = (scene.state.snapshot(), list(scene.state.story), scene.state.next_deadline_ns, dict(scene.state.votes))
    first = described(scene)

    assert described(scene) == first
    state = scene.state
    assert (state.snapshot(), list(state.story), state.next_deadline_ns, dict(state.votes)) == before


# --- Bounds -----------------------------------------------------------------


def test_lists_are_cut_and_counted() -> None:
    """Goal: a large run is described in part, and says so."""
    scene = of(1, 2, 3, 4)
    scene.say(1, m.VoteTopology(7, 0))
    run = described(scene, most=2)

    assert [one["id"] for one in run["peers"]] == [1, 2]
    assert run["peers_count"] == 4
    assert run["groups"][0]["ring"] == [1, 2]
    assert run["groups"][0]["members"] == 4
    assert (run["votes"][0]["missing"], run["votes"][0]["missing_count"]) == ([2, 3], 3)


def test_a_flood_of_tags_is_not_looked_through() -> None:
    """Goal: thousands of reduces of one group do not keep the master busy with describing them."""
    scene = of(1, 2)
    for first in range(0, 640, 64):
        scene.reduce(1, *range(first, first + 64))

    assert len(described(scene)["votes"]) == REPORT_TAGS_MAX


def test_pages_make_the_whole() -> None:
    """Goal: what is cut into pages is the same when it is joined, and each page fits its message."""
    scene = Scene()
    for number in range(1, 200):
        scene.come(number, group=number)
    pages = report_pages(scene.state, 0, version="1.2")

    assert len(pages) > 1
    assert [(page.page, page.pages) for page in pages] == [(index, len(pages)) for index in range(len(pages))]
    assert all(len(page.text) == BLOB_BYTES_MAX for page in pages[:-1])
    assert all(encode(page) for page in pages)
    run = json.loads(b"".join(page.text for page in pages))
    assert run == {"version": "1.2", **described(scene)}


def test_a_report_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a run that is too large to describe is described in less detail, and always fits the send queue."""
    assert REPORT_BYTES_MAX < SEND_QUEUE_BYTES_MAX
    assert REPORT_PAGES_MAX < 1 << 16
    scene = Scene()
    for number in range(1, 300):
        scene.come(number)
    monkeypatch.setattr(status_report, "REPORT_BYTES_MAX", 20_000)
    run = json.loads(b"".join(page.text for page in report_pages(scene.state, 0)))

    assert 0 < len(run["peers"]) < 100
    assert run["peers_count"] == 299


def test_an_optimisation_is_shown_with_what_it_knows() -> None:
    """Goal: who measures, what is known of the edges by now, and that it is no vote that waits for anybody."""
    scene = of(1, 2)
    for voter in (1, 2):
        scene.say(voter, m.VoteOptimize(7))
    scene.say(1, m.Probed(1, 2, 5_000_000, ""))
    scene.now_ns += SECOND
    run = described(scene)

    (vote,) = run["votes"]
    assert (vote["call"], vote["present"], vote["missing"]) == ("optimize_topology", [1, 2], [])
    assert vote["reason"] == "all have voted; groups [0] measure their edges"
    (group,) = run["groups"]
    edge = {"source": 1, "target": 2, "bytes_per_second": 5e6, "age": 1.0, "fresh": True, "origin": "probe"}
    assert group["bandwidths"] == {"edges_count": 1, "edges": [edge], "stale": 0, "unknown": 1}

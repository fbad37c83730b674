"""Transfers between real processes: only what differs moves, from all sources, also when a process dies meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random

import numpy as np
import psutil
import pytest

from pccl._core.kernels.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.peer.events import (
    AddSources,
    DropSource,
    EndTransfer,
    ServeFetched,
    StateFetched,
    StateUnfetched,
    TransferEnded,
)
from tests.leaks import has_ended

from .helpers import BOUND, eventually, sockets
from .state_peers import STALL, StatePeer, peers_with

MIB = 1 << 20
LARGE = 24 * MIB  # six units


def content_of(seed: int, nbytes: int) -> bytes:
    return Random(seed).randbytes(nbytes)


def same(one: StatePeer, other: StatePeer) -> bool:
    return all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def stopped(worker: psutil.Process) -> bool:
    return bool(worker.status() == psutil.STATUS_STOPPED)


def fetch_all(sink: StatePeer, *sources: StatePeer, whole: bool = False) -> None:
    """Fetch from these sources, and expect success."""
    contents = {source.serve().content_digest() for source in sources}
    assert len(contents) == 1
    sink.fetch(contents.pop(), *sources, whole=whole)
    assert sink.hear() == StateFetched(1)
    assert same(sources[0], sink)


# ---------------------------------------------------------------------------------------------- what moves


def test_only_what_differs_travels() -> None:
    """Goal: only digest blocks that differ move, and both sides count the same bytes."""
    state = {"equal": content_of(1, 3 * MIB), "large": content_of(2, 25 * MIB + 17), "small": b"abc"}
    stale = bytearray(state["large"])
    for offset in (5 * BLOCK, 50 * BLOCK + 9, -1):
        stale[offset] ^= 1
    with peers_with(state, {**state, "large": bytes(stale), "small": b"abd"}) as (source, sink):
        fetch_all(sink, source)
        moved = 2 * BLOCK + 17 + 3
        assert (sink.end().rx_bytes, source.end().tx_bytes) == (moved, moved)
        assert sink.workers() == source.workers() == []


def test_equal_states_move_nothing() -> None:
    state = {"a": content_of(1, MIB)}
    with peers_with(state, state) as (source, sink):
        fetch_all(sink, source)
        assert sink.end() == TransferEnded(1, 0, 0)


@pytest.mark.parametrize("outside", [set(), {"a", "b", "empty", "large", "one", "odd"}], ids=["segments", "window"])
def test_all_kinds_of_tensors(outside: set[str]) -> None:
    """Goal: odd sizes, empty tensors, and memory that only the training process can access."""
    sizes = {"a": 7, "b": BLOCK, "empty": 0, "large": 9 * MIB + 3, "odd": BLOCK + 1, "one": 1}
    state = {name: content_of(index, size) for index, (name, size) in enumerate(sizes.items())}
    stale = {name: bytes(255 - byte for byte in content) for name, content in state.items()}
    with peers_with(state, stale, outside=outside) as (source, sink):
        fetch_all(sink, source)
        assert sink.end().rx_bytes == sum(sizes.values())


def test_thousands_of_keys() -> None:
    state = {f"layer.{index}.weight": index.to_bytes(4, "little") * (index % 50) for index in range(4000)}
    stale = {name: bytes(len(content)) for name, content in state.items()}
    outside = {name for index, name in enumerate(state) if index % 100}
    with peers_with(state, stale, outside=outside) as (source, sink):
        fetch_all(sink, source)


def test_what_may_differ_comes_along_only_for_the_outdated() -> None:
    state = {"a": content_of(1, MIB), "own": content_of(2, 5 * MIB)}
    stale = {"a": content_of(3, MIB), "own": content_of(4, 5 * MIB)}
    with peers_with(state, stale, unequal={"own"}) as (source, sink):
        content = source.serve().content_digest()
        sink.fetch(content, source)
        assert sink.hear() == StateFetched(1)
        assert sink.end().rx_bytes == MIB
        assert not same(source, sink)
        sink.fetch(content, source, whole=True)
        assert sink.hear() == StateFetched(1)
        assert same(source, sink)
        assert sink.end().rx_bytes == 5 * MIB


def test_a_hundred_rounds_leave_nothing_behind() -> None:
    """Goal: in the actor of either side neither descriptors nor mappings grow from round to round."""

    def holdings() -> list[tuple[int, int]]:
        processes = [psutil.Process(peer.process.pid) for peer in (source, sink)]
        return [(process.num_fds(), len(process.memory_maps(grouped=False))) for process in processes]

    state = {"a": content_of(1, 1000), "b": content_of(2, 1000)}
    with peers_with(state, {"a": bytes(1000), "b": bytes(1000)}, outside={"b"}) as (source, sink):
        for number in range(1, 101):
            for tensor in sink.tensors.values():
                tensor[0] ^= 255
            content = source.serve(number).content_digest()
            sink.fetch(content, source, number=number)
            assert sink.hear() == StateFetched(number)
            assert same(source, sink)
            assert sink.end(number).rx_bytes == source.end(number).tx_bytes
            if number == 5:
                before = holdings()
        for (fds, maps), (fds_before, maps_before) in zip(holdings(), before, strict=True):
            assert fds <= fds_before
            assert maps <= maps_before + 3  # the heap may have grown


# ---------------------------------------------------------------------------------------------- several sources


def resume(workers: list[psutil.Process]) -> None:
    for worker in workers:
        worker.resume()


def test_all_sources_work() -> None:
    """Goal: every link of every source is asked for a part of the state.

    Each worker of a source stops before its first answer. One worker of each source is asked for the manifest, and may
    answer when all links are up: otherwise a quick source could serve everything before the others are connected. The
    rest is asked for units.
    """
    state, stale = {"a": content_of(1, 64 * MIB)}, {"a": bytes(64 * MIB)}
    faults = dict.fromkeys((1, 2, 3), "state.serve.answer:1:stop")
    with peers_with(state, state, state, stale, lanes=6, faults=faults, stall=4 * BOUND) as (*sources, sink):
        content = {source.serve().content_digest() for source in sources}.pop()
        sink.fetch(content, *sources)
        eventually(lambda: len(sink.workers()) == 6, "all links are up")
        workers = [worker for source in sources for worker in source.workers()]
        asked = eventually(
            lambda: len(found := list(filter(stopped, workers))) == 3 and found,
            "every source is asked for its manifest",
        )
        resume(asked)
        others = [worker for worker in workers if worker not in asked]
        eventually(lambda: all(map(stopped, others)), "every other link is asked for a unit")
        resume(others)
        assert sink.hear() == StateFetched(1)
        assert same(sources[0], sink)
        assert len(sink.workers()) == 6  # two for each source
        assert sink.end().rx_bytes == 64 * MIB
        sent = [source.end().tx_bytes for source in sources]
        assert sum(sent) == 64 * MIB
        assert min(sent) > 0


def test_several_fetch_from_one() -> None:
    state, stale = {"a": content_of(1, 8 * MIB), "b": content_of(2, MIB)}, {"a": bytes(8 * MIB), "b": bytes(MIB)}
    with peers_with(state, stale, stale, outside={"b"}) as (source, *sinks):
        content = source.serve().content_digest()
        for sink in sinks:
            sink.fetch(content, source)
        for sink in sinks:
            assert sink.hear() == StateFetched(1)
            assert same(source, sink)
        assert source.end().tx_bytes == 18 * MIB


# ---------------------------------------------------------------------------------------------- deaths


@contextlib.contextmanager
def half_served(stall: float) -> Iterator[tuple[StatePeer, StatePeer, StatePeer]]:
    """Yield a source that was stopped in the middle of a transfer, another source that works, and the sink.

    The other source serves only after the first one was stopped: otherwise it might have served everything by then.
    """
    state, stale = {"a": content_of(1, LARGE)}, {"a": bytes(LARGE)}
    with peers_with(state, state, stale, faults={1: "state.serve.answer:3:stop"}, stall=stall) as (first, other, sink):
        sink.fetch(first.serve().content_digest(), first, other)
        eventually(lambda: stopped(first.worker()), "the first source hangs")
        other.serve()
        yield first, other, sink


def test_a_source_that_dies_in_the_middle_is_replaced() -> None:
    """Goal: no verified unit is fetched again, and no peer waits for the timeout, which is longer than this test."""
    with half_served(stall=4 * BOUND) as (dying, other, sink):
        dying.kill()
        assert sink.hear() == StateFetched(1)
        assert same(other, sink)
        assert sink.end().rx_bytes == LARGE


def test_a_source_that_hangs_is_left_for_others() -> None:
    """Goal: a link that moves no bytes ends by itself, because no process detects a stopped worker."""
    with half_served(stall=STALL) as (hanging, other, sink):
        assert sink.hear() == StateFetched(1)
        assert same(other, sink)
        assert sink.end().rx_bytes == LARGE
        hanging.end()


def test_a_source_that_the_master_gave_up_is_left_at_once() -> None:
    """Goal: no peer waits for the timeout of a link to a lost peer; it is longer than this test."""
    with half_served(stall=4 * BOUND) as (hanging, other, sink):
        sink.tell(DropSource(1, hanging.peer))
        assert sink.hear() == StateFetched(1)
        assert same(other, sink)


@pytest.mark.parametrize("outside", [set(), {"a", "b"}], ids=["segments", "window"])
def test_a_peer_that_has_fetched_serves_stranded_ones(outside: set[str]) -> None:
    """Goal: the only source dies in the middle; the fetched units stay, and the rest comes from another sink."""
    state = {"a": content_of(1, LARGE), "b": content_of(2, MIB)}
    stale = {name: bytes(len(content)) for name, content in state.items()}
    fault = {3: "state.fetch.unit:5:stop"}  # of seven: fewer than five are left, so no second stop
    with peers_with(state, stale, stale, outside=outside, faults=fault) as (source, heir, sink):
        fetch_all(heir, source)
        sink.fetch(heir.describe().content_digest(), source)
        eventually(lambda: stopped(sink.worker()), "the sink is in the middle")
        source.kill()
        assert isinstance(sink.hear(), StateUnfetched)

        sink.tell(AddSources(1, (heir.source,)))  # may arrive before the heir's order to serve
        heir.tell(ServeFetched(1))

        assert sink.hear() == StateFetched(1)
        assert same(heir, sink)
        sent, received = heir.end().tx_bytes, sink.end().rx_bytes
        assert received == LARGE + MIB > sent > 0
        assert heir.workers() == sink.workers() == []


@pytest.mark.parametrize(
    "fault",
    [
        *("state.serve.answer:1:kill", "state.serve.answer:4:kill", "state.fetch.FetchManifest:1:kill"),
        *("state.fetch.manifest:1:kill", "state.fetch.FetchUnits:1:kill", "state.fetch.unit:3:kill"),
    ],
)
def test_a_worker_that_is_killed_costs_a_link(fault: str) -> None:
    """Goal: the only source is dialled again, and verified units stay."""
    state, stale = {"a": content_of(1, LARGE), "b": content_of(2, MIB)}, {"a": bytes(LARGE), "b": bytes(MIB)}
    faults = {1 if "serve" in fault else 2: fault}
    with peers_with(state, stale, outside={"b"}, faults=faults) as (source, sink):
        source.serve()
        if fault.endswith(("manifest:1:kill", "Manifest:1:kill", "answer:1:kill", "Units:1:kill")):
            # Every worker of this peer dies at its first step: the limit of attempts ends the fetch.
            sink.fetch(source.describe().content_digest(), source)
            failed = sink.hear()
            assert isinstance(failed, StateUnfetched)
            assert "no peer is left to fetch the state from: peer 1: " in failed.reason
        else:
            fetch_all(sink, source)
            assert sink.end().rx_bytes >= LARGE


def test_when_every_source_is_dead_it_is_said() -> None:
    state, stale = {"a": content_of(1, LARGE)}, {"a": bytes(LARGE)}
    with peers_with(state, stale, faults={1: "state.serve.answer:3:stop"}) as (source, sink):
        sink.fetch(source.serve().content_digest(), source)
        eventually(lambda: stopped(source.worker()), "the source hangs")
        source.kill()
        failed = sink.hear()
        assert isinstance(failed, StateUnfetched)
        assert "peer 1: " in failed.reason
        assert sink.end().rx_bytes < LARGE


def test_a_sink_that_dies_leaves_nothing_at_the_source() -> None:
    state, stale = {"a": content_of(1, LARGE)}, {"a": bytes(LARGE)}
    with peers_with(state, stale, faults={2: "state.fetch.unit:2:stop"}) as (source, sink):
        sink.fetch(source.serve().content_digest(), source)
        worker = sink.worker()
        eventually(lambda: stopped(worker), "the sink hangs")
        sink.kill()
        eventually(lambda: has_ended(worker), "its worker dies with it")
        eventually(lambda: not source.workers(), "the worker of the source ends")
        source.end()


def test_an_end_in_the_middle_takes_all_hands_off_the_memory() -> None:
    """Goal: when the end is reported, no worker is left, and what the source still sends is written nowhere."""
    state, stale = {"a": content_of(1, LARGE)}, {"a": bytes(LARGE)}
    fault = {1: "state.serve.answer:3:stop"}
    with peers_with(state, stale, faults=fault, stall=4 * BOUND) as (source, sink):
        sink.fetch(source.serve().content_digest(), source)
        eventually(lambda: sink.tensors["a"][0], "the first bytes are there")
        eventually(lambda: stopped(source.worker()), "the source pauses")
        sink.tell(EndTransfer(1))
        ended = sink.hear()
        assert isinstance(ended, TransferEnded)
        assert sink.workers() == []
        before = sink.tensors["a"].copy()
        source.worker().resume()
        eventually(lambda: not source.workers(), "its worker sends, and ends because nobody reads")
        source.end()
        assert np.array_equal(sink.tensors["a"], before)


def test_a_round_that_never_was_ends_too() -> None:
    with peers_with({"a": b"abc"}) as (peer,):
        assert peer.end(5) == TransferEnded(5, 0, 0)


# ---------------------------------------------------------------------------------------------- what is not believed


def test_bytes_that_changed_are_noticed_and_fetched_elsewhere() -> None:
    state, stale = {"a": content_of(1, LARGE)}, {"a": bytes(LARGE)}
    with peers_with(state, state, stale) as (liar, other, sink):
        content = liar.serve().content_digest()
        other.serve()
        liar.tensors["a"][:: 4 * MIB] ^= 1
        sink.fetch(content, liar, other)
        assert sink.hear() == StateFetched(1)
        assert same(other, sink)
        assert sink.end().rx_bytes == LARGE


@pytest.mark.parametrize("outside", [set(), {"weights"}], ids=["segment", "window"])
def test_if_nobody_has_the_right_bytes_the_reason_names_them(outside: set[str]) -> None:
    state, stale = {"weights": content_of(1, 3 * BLOCK)}, {"weights": bytes(3 * BLOCK)}
    with peers_with(state, stale, outside=outside) as (liar, sink):
        content = liar.serve().content_digest()
        liar.tensors["weights"][BLOCK + 5] ^= 1
        sink.fetch(content, liar)
        failed = sink.hear()
        assert isinstance(failed, StateUnfetched)
        assert "peer 1: 'weights': block " in failed.reason
        assert sink.end().rx_bytes == 0


def test_a_source_with_another_content_or_layout_is_none() -> None:
    state, stale = {"a": content_of(1, MIB)}, {"a": bytes(MIB)}
    with peers_with(state, {"a": content_of(2, MIB)}, {"b": content_of(1, MIB)}, stale) as (right, *wrong, sink):
        content = right.serve().content_digest()
        for source in wrong:
            source.serve()
        sink.fetch(content, *wrong)
        failed = sink.hear()
        assert isinstance(failed, StateUnfetched)
        assert "peer 2: it has another content than the elected one" in failed.reason
        assert "peer 3: its key 'b' is not our 'a'" in failed.reason
        sink.end()
        sink.fetch(content, *wrong, right)
        assert sink.hear() == StateFetched(1)


def test_a_training_process_that_does_not_copy_costs_the_transfer_and_not_more() -> None:
    """Goal: tensors behind a window that no process serves end the link within the bound."""
    state, stale = {"a": content_of(1, MIB)}, {"a": bytes(MIB)}
    with peers_with(state, stale, outside={"a"}) as (source, sink):
        content = source.serve().content_digest()
        sink.stop_pump()
        sink.fetch(content, source)
        failed = sink.hear()
        assert isinstance(failed, StateUnfetched)
        assert "the training process copied nothing for 2 s" in failed.reason
        sink.end()


# ---------------------------------------------------------------------------------------------- timing


def test_a_link_may_come_before_the_order_to_serve() -> None:
    state, stale = {"a": content_of(1, MIB)}, {"a": bytes(MIB)}
    with peers_with(state, stale) as (source, sink):
        content = source.describe().content_digest()
        before = sockets(source.process.pid)
        sink.fetch(content, source)
        eventually(lambda: sockets(source.process.pid) - before, "the sink's call has come")
        source.serve()
        assert sink.hear() == StateFetched(1)


def test_a_round_that_is_not_served_is_refused_in_the_end() -> None:
    state, stale = {"a": content_of(1, MIB)}, {"a": bytes(MIB)}
    with peers_with(state, stale) as (source, sink):
        content = source.serve(3).content_digest()
        sink.fetch(content, source, number=4)
        failed = sink.hear()
        assert isinstance(failed, StateUnfetched)
        assert "round 4 is not served here" in failed.reason

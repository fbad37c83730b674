"""The fetch: every block is fetched once, from all sources that have it, while at least one source is left."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import pytest

from pccl._core.kernels.digest import STATE_BLOCK_BYTES as BLOCK
from pccl._core.peer.events import ProtocolViolationError
from pccl._core.peer.fetch import (
    UNIT_BYTES_MAX,
    AskManifest,
    CloseLink,
    DialSource,
    Done,
    Order,
    StateFetch,
    Stranded,
)
from pccl._core.protocol.state_manifest import StateManifest, check_manifest
from pccl._core.protocol.state_stream import Unit
from pccl._core.records import replace
from pccl.options import FETCH_BYTES_AHEAD, FETCH_UNITS_AHEAD
from tests.unit._core.protocol.manifests import describe, row

SECOND = 1_000_000_000


class Sink:
    """A fetch, and the links that its owner keeps for it."""

    def __init__(
        self, own: StateManifest, manifest: StateManifest, sources: list[int], links: int = 1, **other: Any
    ) -> None:
        self.manifest = manifest
        self.now_ns = 0
        self.links: dict[int, int] = {}  # link -> source, dialled or up
        self.closing: list[int] = []
        self.orders: dict[int, list[Unit]] = {}
        self.asked: list[int] = []
        self.ends: list[Any] = []
        numbers = count(1)
        self.machine = StateFetch(
            own,
            manifest.content_digest(),
            sources,
            whole=other.get("whole", False),
            lanes=links * len(sources),
            new_link=lambda: next(numbers),
            redials=other.get("redials", 2),
        )
        self.take(self.machine.begin())

    def take(self, actions: list[Any]) -> list[Any]:
        for action in actions:
            if isinstance(action, DialSource):
                self.links[action.link] = action.source
            elif isinstance(action, AskManifest):
                self.asked.append(action.link)
            elif isinstance(action, Order):
                self.orders.setdefault(action.link, []).extend(action.units)
            elif isinstance(action, CloseLink):
                self.closing.append(action.link)
            else:
                self.ends.append(action)
        self.machine.check()
        return actions

    def up(self, *links: int) -> list[Any]:
        return [action for link in links for action in self.take(self.machine.link_up(link, self.now_ns))]

    def down(self, link: int, reason: str = "broken", *, lied: bool = False) -> list[Any]:
        self.links.pop(link)
        self.orders.pop(link, None)
        return self.take(self.machine.link_down(link, reason, self.now_ns, lied=lied))

    def tell(self, link: int, manifest: StateManifest | None = None) -> list[Any]:
        self.asked.remove(link)
        return self.take(self.machine.manifest_came(link, manifest or self.manifest, self.now_ns))

    def fetched(self, link: int, units: int = 1) -> list[Any]:
        del self.orders[link][:units]
        return self.take(self.machine.units_fetched(link, units, self.now_ns))


def large(blocks: int, version: int) -> StateManifest:
    return describe(row("large", *[version] * blocks))


def test_one_source_from_dial_to_done() -> None:
    sink = Sink(describe(row("a", 1, 2, 3), row("b", 1)), describe(row("a", 1, 9, 3), row("b", 1)), [7])
    assert sink.links == {1: 7}
    assert sink.up(1) == [AskManifest(1)]
    assert sink.tell(1) == [Order(1, (Unit(0, 1, 1, BLOCK),))]
    assert sink.fetched(1) == [Done()]
    assert sink.machine.fetched_bytes == BLOCK


def test_what_a_link_owes_is_known_until_it_has_come() -> None:
    """Goal: an actor can tell a worker that has nothing to do from one that is stuck."""
    manifest = describe(row("a", 3 * BLOCK, 1))
    sink = Sink(describe(row("a", 3 * BLOCK, 0)), manifest, [7])
    (link,) = sink.links
    assert not sink.machine.awaits(link)

    sink.up(link)
    assert sink.machine.awaits(link)  # the manifest
    sink.machine.manifest_came(link, manifest, 0)
    assert sink.machine.awaits(link)  # blocks
    sink.machine.link_down(link, "gone", 0)
    assert not sink.machine.awaits(link)


def test_nothing_to_do_is_done_at_once() -> None:
    sink = Sink(large(3, 1), large(3, 1), [7])
    sink.up(1)
    assert sink.tell(1) == [Done()]


def test_no_source_is_a_failure() -> None:
    assert Sink(large(1, 1), large(1, 2), []).ends == [Stranded("there is no source")]


@pytest.mark.parametrize(("lanes", "links"), [(1, 1), (3, 1), (6, 2), (8, 2)])
def test_the_links_of_all_sources_are_one_pool(lanes: int, links: int) -> None:
    """Goal: three sources share the lanes of a pool, and each has at least one link."""
    numbers = count(1)
    manifest = large(1, 1)
    digest = manifest.content_digest()
    machine = StateFetch(manifest, digest, [7, 8, 9], whole=False, lanes=lanes, new_link=lambda: next(numbers))

    assert [action.source for action in machine.begin()] == [7, 8, 9] * links


def test_all_links_work_and_each_source_is_asked_once() -> None:
    """Goal: a few units are spread over many links, and the first manifest is enough."""
    sink = Sink(large(64, 1), large(64, 2), [7, 8], links=2)
    sink.up(*sink.links)
    assert sorted(sink.links[link] for link in sink.asked) == [7, 8]
    sink.tell(sink.asked[-1])
    assert [len(units) for units in sink.orders.values()] == [1, 1, 1, 1]
    assert sink.tell(sink.asked[0]) == []


def test_a_link_has_as_much_under_way_as_it_moves_in_a_second() -> None:
    sink = Sink(large(16 * 50, 1), large(16 * 50, 2), [7, 8])
    sink.up(1, 2)
    sink.tell(1)
    assert [len(units) for units in sink.orders.values()] == [2, 2]
    sink.now_ns = SECOND // 100
    sink.fetched(1)
    assert sum(unit.nbytes for unit in sink.orders[1]) == FETCH_BYTES_AHEAD
    sink.now_ns = 100 * SECOND
    assert sink.fetched(2) == []  # it still has as much as it moves in a minute
    assert sum(unit.nbytes for unit in sink.orders[2]) == UNIT_BYTES_MAX


def test_many_small_tensors_are_limited_by_number() -> None:
    names = [f"{index:05}" for index in range(3 * FETCH_UNITS_AHEAD)]
    own, manifest = (describe(*[row(name, version, nbytes=4) for name in names]) for version in (1, 2))
    sink = Sink(own, manifest, [7])
    sink.up(1)
    sink.tell(1)
    assert len(sink.orders[1]) == FETCH_UNITS_AHEAD
    while not sink.ends:
        sink.fetched(1, len(sink.orders[1]))
    assert sink.ends == [Done()]


def test_a_lost_link_gives_back_only_what_it_had_not_finished() -> None:
    sink = Sink(large(64, 1), large(64, 2), [7, 8])
    sink.up(1, 2)
    sink.tell(1)
    finished, _ = sink.orders[1]
    sink.fetched(1)
    assert sink.down(1)[0] == DialSource(3, 7, 1)
    while not sink.ends:
        assert finished not in sink.orders[2]
        sink.fetched(2)
    assert sink.ends == [Done()]
    assert sink.machine.fetched_bytes == 64 * BLOCK


def test_what_a_closing_link_has_under_way_is_nobody_elses_yet() -> None:
    """Goal: two processes never write the same block; the second begins only after the first is gone."""
    sink = Sink(large(32, 1), large(32, 2), [7, 8])
    sink.up(1)
    sink.tell(1)
    assert len(sink.orders[1]) == 2
    sink.up(2)
    assert sink.take(sink.machine.source_gone(7, 0)) == [CloseLink(1)]
    assert 2 not in sink.orders
    sink.down(1)
    assert len(sink.orders[2]) == 2
    assert sink.take(sink.machine.source_gone(7, 0)) == []


def test_a_source_that_cannot_be_reached_is_dialled_a_few_times() -> None:
    sink = Sink(large(1, 1), large(1, 2), [7], redials=2)
    assert sink.down(1, "refused") == [DialSource(2, 7, 1)]
    assert sink.down(2, "refused") == [DialSource(3, 7, 2)]
    (failed,) = sink.down(3, "still refused")
    assert failed == Stranded("no peer is left to fetch the state from: peer 7: still refused")
    assert sink.machine.phase == "stranded"


def test_a_stranded_fetch_goes_on_with_other_sources() -> None:
    """Goal: fetched blocks are not fetched again, and the new source's manifest is requested only if it is needed."""
    sink = Sink(large(16 * 2, 1), large(16 * 2, 2), [7], redials=0)
    sink.up(1)
    sink.tell(1)
    sink.fetched(1)
    (stranded,) = sink.down(1)
    assert isinstance(stranded, Stranded)

    assert sink.take(sink.machine.sources_came([8], 0)) == [DialSource(2, 8, 0)]
    assert sink.up(2) == [Order(2, (Unit(0, 16, 16, 16 * BLOCK),))]
    assert sink.fetched(2) == [Done()]
    assert sink.machine.fetched_bytes == 32 * BLOCK


def test_a_fetch_that_was_stranded_before_it_had_a_table_asks_for_one() -> None:
    sink = Sink(large(1, 1), large(1, 2), [7], redials=0)
    sink.down(1)
    sink.take(sink.machine.sources_came([8], 0))

    assert sink.up(2) == [AskManifest(2)]
    sink.tell(2)
    assert sink.fetched(2) == [Done()]


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_fetched_can_be_served(whole: bool) -> None:
    """Goal: a receiver that becomes a source has the elected manifest; for tensors that may differ it has its own."""
    ours = describe(row("a", 1), row("b", 1), row("own", 1, unequal=True))
    theirs = describe(row("a", 1), row("b", 2), row("own", 2, unequal=True))
    sink = Sink(ours, theirs, [7], whole=whole)
    sink.up(1)
    sink.tell(1)
    sink.fetched(1, 2 if whole else 1)

    held = StateManifest(sink.machine.held())

    assert check_manifest(held, ours, theirs.content_digest()) == ""
    assert held.rows[1].blocks == theirs.rows[1].blocks
    assert held.rows[2].blocks == (theirs if whole else ours).rows[2].blocks


def test_a_source_that_is_of_use_may_break_for_ever() -> None:
    sink = Sink(large(16 * 20, 1), large(16 * 20, 2), [7], redials=1)
    link = 1
    sink.up(link)
    sink.tell(link)
    for _ in range(10):
        sink.fetched(link)
        (dialled,) = [action for action in sink.down(link) if isinstance(action, DialSource)]
        link = dialled.link
        sink.up(link)
    assert not sink.ends


def test_wrong_bytes_are_forgiven_once() -> None:
    sink = Sink(large(64, 1), large(64, 2), [7, 8], links=2)
    sink.up(*sink.links)
    sink.tell(1)
    (first, second) = [link for link, source in sink.links.items() if source == 7]
    assert any(isinstance(action, DialSource) for action in sink.down(first, "wrong", lied=True))
    sink.down(second, "wrong", lied=True)
    assert [sink.links[link] for link in sink.closing] == [7]
    sink.down(sink.closing[0])
    assert set(sink.links.values()) == {8}


def test_a_wrong_table_is_forgiven_once_and_named() -> None:
    sink = Sink(large(2, 1), large(2, 2), [7])
    sink.up(1)
    assert sink.tell(1, large(2, 3)) == [CloseLink(1)]
    assert sink.down(1) == [DialSource(2, 7, 1)]
    sink.up(2)
    sink.tell(2, large(2, 3))
    (failed,) = sink.down(2)
    assert "peer 7: it has another content than the elected one" in failed.reason


def test_wrong_blocks_of_a_tensor_that_is_right_here_are_not_fetched() -> None:
    """Goal: a source that names the right digest of a tensor cannot have wrong blocks written into it."""
    own, elected = describe(row("a", 1), row("b", 1)), describe(row("a", 1), row("b", 2))
    sink = Sink(own, elected, [7])
    sink.up(1)
    assert sink.tell(1, describe(replace(row("a", 1), blocks=row("a", 9).blocks), row("b", 2))) == [CloseLink(1)]
    assert sink.orders == {}
    sink.down(1)
    sink.up(2)
    assert sink.tell(2) == [Order(2, (Unit(1, 0, 1, BLOCK),))]


def test_a_source_that_the_master_gave_up_is_not_dialled_again() -> None:
    sink = Sink(large(2, 1), large(2, 2), [7])
    assert sink.take(sink.machine.source_gone(7, 0)) == [CloseLink(1)]
    assert not sink.machine.expects(1)
    (failed,) = sink.down(1)
    assert "it was lost" in failed.reason


def test_an_event_that_no_table_allows_is_named() -> None:
    """Goal: a wrong order of events is an error that says which, and changes nothing."""
    sink = Sink(large(2, 1), large(2, 2), [7])
    with pytest.raises(ProtocolViolationError, match="AddSources of a fetch while seeking"):
        sink.machine.sources_came([8], 0)
    with pytest.raises(ProtocolViolationError, match="UnitsMoved of a link while dialling"):
        sink.machine.units_fetched(1, 1, 0)
    sink.up(1)
    with pytest.raises(ProtocolViolationError, match="LinkUp of a link while asked"):
        sink.machine.link_up(1, 0)
    assert sink.tell(1) == [Order(1, (Unit(0, 0, 2, 2 * BLOCK),))]
    assert sink.fetched(1) == [Done()]


def test_words_that_come_too_late_change_nothing() -> None:
    """Goal: an actor may report the end of a link twice, and links that are not needed any more still speak."""
    sink = Sink(large(2, 1), large(2, 2), [7, 8], redials=0)
    sink.up(1)
    sink.take(sink.machine.source_gone(7, 0))
    assert sink.tell(1) == []
    sink.down(1)
    assert sink.take(sink.machine.link_down(1, "again", 0)) == []
    (stranded,) = sink.down(2)
    assert isinstance(stranded, Stranded)
    assert sink.take(sink.machine.link_down(2, "again", 0)) == []
    assert sink.take(sink.machine.source_gone(8, 0)) == []
    sink.take(sink.machine.sources_came([9], 0))
    sink.up(3)
    sink.tell(3)
    assert sink.fetched(3) == [Done()]
    assert sink.take(sink.machine.link_down(3, "broken", 0)) == []


# ---------------------------------------------------------------------------------------------- what may differ


OWN = describe(row("equal", 1, 1), row("own", *range(40), unequal=True))
FIRST = describe(row("equal", 1, 1), row("own", *range(100, 140), unequal=True))
SECOND_TABLE = describe(row("equal", 1, 1), row("own", *range(100, 116), *range(216, 240), unequal=True))


def test_what_may_differ_stays_unless_the_state_was_outdated() -> None:
    sink = Sink(OWN, FIRST, [7])
    sink.up(1)
    assert sink.tell(1) == [Done()]


def test_what_may_differ_comes_from_one_source() -> None:
    sink = Sink(OWN, FIRST, [7, 8], whole=True)
    sink.up(1, 2)
    sink.tell(2, SECOND_TABLE)
    assert list(sink.orders) == [2]
    sink.tell(1)
    assert list(sink.orders) == [2]


def test_another_holder_keeps_what_is_the_same() -> None:
    """Goal: a manifest with other digests is followed exactly; blocks that match it are not fetched again."""
    sink = Sink(OWN, FIRST, [7, 8], whole=True, redials=0)
    sink.up(1)
    sink.tell(1)
    sink.fetched(1)  # blocks 0 to 15, which the other source has as well
    sink.fetched(1)  # blocks 16 to 31, which the other source does not have
    sink.up(2)
    assert sink.asked == []
    assert AskManifest(2) in sink.down(1)
    sink.tell(2, SECOND_TABLE)
    assert sink.orders[2] == [Unit(1, 16, 16, 16 * BLOCK), Unit(1, 32, 8, 8 * BLOCK)]
    sink.fetched(2, 2)
    assert sink.ends == [Done()]


def test_a_block_that_may_be_half_written_is_fetched_whatever_the_next_table_says() -> None:
    sink = Sink(OWN, FIRST, [7, 8], whole=True, redials=0)
    sink.up(1)
    sink.tell(1)
    sink.up(2)
    sink.down(1)
    sink.tell(2, OWN)  # the other source has what we had before
    assert [(unit.first, unit.count) for unit in sink.orders[2]] == [(0, 16), (16, 16)]


# ---------------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_each_block_is_fetched_once(seed: int) -> None:
    """Goal: with links that break at random, each block is fetched once if a source stays; one failure is reported."""
    random = Random(seed)
    shape = [random.randrange(60) for _ in range(random.randrange(1, 8))]
    own = describe(*[row(f"{key}", *[random.randrange(3) for _ in range(blocks)]) for key, blocks in enumerate(shape)])
    manifest = describe(
        *[row(f"{key}", *[random.randrange(3) for _ in range(blocks)]) for key, blocks in enumerate(shape)]
    )
    wanted = Counter(
        (key, block)
        for key, blocks in enumerate(shape)
        for block in range(blocks)
        if own.blocks(key)[8 * block : 8 * block + 8] != manifest.blocks(key)[8 * block : 8 * block + 8]
    )
    sink = Sink(own, manifest, [1, 2, 3], links=random.randrange(1, 3), redials=random.choice([0, 2]))
    fetched: Counter[tuple[int, int]] = Counter()
    steady = 1  # the source whose links never break
    for _ in range(3000):
        if sink.ends:
            break
        sink.now_ns += random.randrange(SECOND)
        link = random.choice(list(sink.links))
        chance = random.random()
        if link in sink.closing or (chance < 0.1 and sink.links[link] != steady):
            sink.asked = [asked for asked in sink.asked if asked != link]
            sink.down(link, lied=chance < 0.03)
        elif chance < 0.12 and sink.links[link] != steady:
            sink.take(sink.machine.source_gone(sink.links[link], sink.now_ns))
        elif link in sink.asked:
            sink.tell(link)
        elif sink.orders.get(link):
            (unit,) = sink.orders[link][:1]
            fetched.update((unit.key, block) for block in range(unit.first, unit.first + unit.count))
            sink.fetched(link)
        elif sink.machine._links[link].phase == "dialling":
            sink.up(link)
    assert sink.ends == [Done()]
    assert fetched == wanted

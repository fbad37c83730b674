"""The fetch of a state: which unit is asked for from which source, so that each block is fetched once and soon.

Every source is called over the same number of links. The first manifest that arrives and belongs to the elected state
says what to fetch: *units*, runs of adjacent digest blocks that differ from this peer's. They are handed out to all
links, and each link has about as many bytes under way as it moves in a second: a fast link is never idle, and a slow
one does not delay the end. When a link is lost, its unfinished units go to others, and its source is called again a few
times, as long as that helps. A source that twice sends what does not match the manifest is not called again.

Entries in which peers may differ (`unequal`) are taken from one source alone, the *holder*: the one whose manifest was
adopted. If it is lost before they are complete, another manifest is adopted, and what differs from that is fetched.

    link_up ──▶ AskManifest ──▶ manifest_came ──▶ Order ──▶ units_fetched ──▶ Order ... ──▶ Done
    link_down ──▶ CallSource (again), Order (to others), or Stranded when no source is left ──▶ sources_came

Pure: links are numbers, manifests are records, time is an argument.
"""

from __future__ import annotations

from collections import deque

from pccl._core.kernels.digest import DIGEST_BYTES, STATE_BLOCK_BYTES
from pccl._core.protocol.state_manifest import (
    RUN_BLOCKS_MAX,
    check_manifest,
    differing_runs,
    pack_manifest,
    run_bytes,
)
from pccl._core.protocol.state_stream import Unit
from pccl._core.records import record, replace
from pccl.options import FETCH_BYTES_AHEAD, FETCH_UNITS_AHEAD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pccl._core.protocol.state_manifest import StateManifest

SECOND_NS = 1_000_000_000
UNIT_BYTES_MAX = RUN_BLOCKS_MAX * STATE_BLOCK_BYTES
LIES_MAX = 2  # a bit may flip on the way once; a source that sends wrong bytes again holds wrong bytes


@record
class CallSource:
    """Connect to a source; `attempt` counts the calls to it that failed since it last sent a unit."""

    link: int
    source: int
    attempt: int


@record
class AskManifest:
    """Ask the source for its manifest."""

    link: int


@record
class Order:
    """Ask the source for these units, in this order."""

    link: int
    units: tuple[Unit, ...]


@record
class CloseLink:
    """Close a link that is not needed any more.

    `link_down` answers when no worker writes for it any more; until then no other link is asked for its units.
    """

    link: int


@record
class Done:
    """Every unit is in place and verified."""


@record
class Stranded:
    """No source is left. What was fetched stays; `sources_came` continues the fetch."""

    reason: str


class Link:
    """One connection to a source."""

    __slots__ = ("asked", "began_ns", "closing", "fetched", "room", "source", "under_way", "units", "up", "wrong")

    def __init__(self, source: int) -> None:
        self.source = source
        self.up = False
        self.closing = False  # it is being closed, but a worker may still write for it
        self.wrong = ""  # what was wrong with its manifest
        self.asked = False  # for the manifest, and has not answered
        self.units: deque[Unit] = deque()  # ordered, in the order in which they will come
        self.under_way = 0  # bytes of them
        self.room = 2 * UNIT_BYTES_MAX  # how many bytes may be under way; a guess until the first unit has come
        self.fetched = 0  # bytes
        self.began_ns = 0  # when the first unit was ordered


class StateFetch:
    """The fetch of one state by this peer."""

    def __init__(
        self,
        own: StateManifest,
        content: bytes,
        sources: Sequence[int],
        *,
        whole: bool,
        links: int,
        attempts: int,
        new_link: Callable[[], int],
    ) -> None:
        self._own = own
        self._content = content
        self._whole = whole
        self._attempts = attempts  # calls to a source that may fail in a row, in addition to its first ones
        self._new_link = new_link
        self._links_each = links
        self._failures = dict.fromkeys(sources, 0)  # of the sources that may still be called
        self._lies = dict.fromkeys(sources, 0)
        self._reasons: dict[int, str] = {}  # why a source was lost the last time
        self._links: dict[int, Link] = {}
        self._first_links = [source for _ in range(links) for source in sources]
        self._equal: deque[Unit] = deque()  # to do; from any source
        self._unequal: deque[Unit] = deque()  # to do; from the holder
        # Of entries that may differ: the digests of what is here by now, and the blocks that may be half overwritten.
        self._present: dict[int, bytearray] = {}
        self._torn: set[tuple[int, int]] = set()
        self.manifest: StateManifest | None = None  # adopted
        self.holder: int | None = None  # whose manifest it is; None once it is lost
        self.over = False  # done
        self.stranded = False
        self.fetched_bytes = 0

    # ------------------------------------------------------------------------------------------ events

    def begin(self) -> list[Any]:
        """Call all sources."""
        actions = [self._call(source) for source in self._first_links]
        return actions or self._strand()

    def link_up(self, link: int, now_ns: int) -> list[Any]:
        """A source was reached."""
        if self.expects(link):
            self._links[link].up = True
        return self._go_on(now_ns)

    def expects(self, link: int) -> bool:
        """Whether this link is still needed."""
        return not self.over and link in self._links and not self._links[link].closing

    def awaits(self, link: int) -> bool:
        """Whether this link was asked for something that has not come yet."""
        known = self._links.get(link)
        return known is not None and not known.closing and (known.asked or bool(known.units))

    def link_down(self, link: int, reason: str, now_ns: int, *, lied: bool = False) -> list[Any]:
        """A source was not reached, the connection broke, or it carried what does not match (`lied`).

        No worker writes to this peer's memory for this link any more.
        """
        lost = self._links.pop(link, None)
        if lost is None or self.over:
            return []
        self._take_back(lost)
        source = lost.source
        lied = lied or bool(lost.wrong)
        if not lost.closing or lost.wrong:
            self._reasons[source] = lost.wrong or reason
        actions: list[Any] = []
        if source in self._failures:
            self._failures[source] += 1
            self._lies[source] += lied
            if self._lies[source] >= LIES_MAX:
                actions += self._give_up_on(source)
            elif self._failures[source] <= self._attempts:
                actions.append(self._call(source))
        return actions + self._go_on(now_ns)

    def source_gone(self, source: int, now_ns: int) -> list[Any]:
        """The master says that this source is gone."""
        if source not in self._failures or self.over:
            return []
        self._reasons[source] = "it was lost"
        return self._give_up_on(source) + self._go_on(now_ns)

    def sources_came(self, sources: Sequence[int], now_ns: int) -> list[Any]:
        """These peers have finished and are sources too."""
        if self.over:
            return []
        self.stranded = False
        self._failures.update(dict.fromkeys(sources, 0))
        self._lies.update(dict.fromkeys(sources, 0))
        return [self._call(source) for _ in range(self._links_each) for source in sources] + self._go_on(now_ns)

    def held(self) -> bytes:
        """Return the manifest of the fetched state, with which this peer can be a source itself."""
        assert self.over
        assert self.manifest is not None
        rows = []
        for ours, theirs in zip(self._own.rows, self.manifest.rows, strict=True):
            is_ours = ours.digest == theirs.digest or (ours.unequal and not self._whole)
            rows.append(replace(ours if is_ours else theirs, segment=0, offset=0))
        return pack_manifest(rows)

    def manifest_came(self, link: int, manifest: StateManifest, now_ns: int) -> list[Any]:
        """A source has sent its manifest. Raises nothing, whatever it contains."""
        if not self.expects(link):
            return []
        teller = self._links[link]
        teller.asked = False
        teller.wrong = check_manifest(manifest, self._own, self._content)
        if teller.wrong:
            return [*self._close([link]), *self._go_on(now_ns)]
        if self.holder is None:
            self._adopt(teller.source, manifest)
        return self._go_on(now_ns)

    def units_fetched(self, link: int, count: int, now_ns: int) -> list[Any]:
        """The next `count` units that were ordered on the link are in place and verified."""
        worked = self._links.get(link)
        if worked is None or self.over:
            return []
        for _ in range(count):
            unit = worked.units.popleft()
            worked.under_way -= unit.nbytes
            worked.fetched += unit.nbytes
            self.fetched_bytes += unit.nbytes
            self._note(unit)
        if worked.source in self._failures:
            self._failures[worked.source] = 0
        rate = worked.fetched * SECOND_NS // max(now_ns - worked.began_ns, 1)
        worked.room = min(max(rate, UNIT_BYTES_MAX), FETCH_BYTES_AHEAD)
        return self._go_on(now_ns)

    # ------------------------------------------------------------------------------------------ decisions

    def _call(self, source: int) -> CallSource:
        link = self._new_link()
        self._links[link] = Link(source)
        return CallSource(link, source, self._failures[source])

    def _give_up_on(self, source: int) -> list[Any]:
        """Close the links of this source, and do not call it again."""
        del self._failures[source]
        return self._close([number for number, link in self._links.items() if link.source == source])

    def _close(self, links: list[int]) -> list[Any]:
        actions = []
        for number in links:
            link = self._links[number]
            if not link.closing:
                link.closing, link.up, link.asked = True, False, False
                actions.append(CloseLink(number))
        return actions

    def _take_back(self, link: Link) -> None:
        """Put the unfinished units of a link at the head of their queue, because they were the next to be done."""
        for unit in reversed(link.units):
            queue = self._unequal if self._own.rows[unit.key].unequal else self._equal
            queue.appendleft(unit)
        link.units.clear()

    def _adopt(self, source: int, manifest: StateManifest) -> None:
        """Queue what this manifest says. A later manifest is different only in entries that may differ."""
        first = self.manifest is None
        self.manifest, self.holder = manifest, source
        self._unequal.clear()
        for key, (ours, theirs) in enumerate(zip(self._own.rows, manifest.rows, strict=True)):
            if (ours.unequal and not self._whole) or not (first or ours.unequal):
                continue
            present: bytes | bytearray = self._present.get(key, ours.blocks)
            if ours.unequal:
                present = self._with_torn(key, present, theirs.blocks)
            queue = self._unequal if ours.unequal else self._equal
            for begin, count in differing_runs(present, theirs.blocks):
                queue.append(Unit(key, begin, count, run_bytes(ours.nbytes, begin, count)))

    def _with_torn(self, key: int, present: bytes | bytearray, wanted: bytes) -> bytearray:
        """Return the digests with those of half overwritten blocks changed, so that these blocks are fetched."""
        digests = bytearray(present)
        for _, block in (torn for torn in self._torn if torn[0] == key):
            span = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
            digests[span] = bytes(255 - byte for byte in wanted[span])
        return digests

    def _note(self, unit: Unit) -> None:
        """Note the digests of a fetched unit, if another manifest may be adopted for it."""
        row = self._own.rows[unit.key]
        if row.unequal:
            assert self.manifest is not None
            digests = self._present.setdefault(unit.key, bytearray(row.blocks))
            span = slice(unit.first * DIGEST_BYTES, (unit.first + unit.count) * DIGEST_BYTES)
            digests[span] = self.manifest.blocks(unit.key)[span]
            self._torn -= {(unit.key, block) for block in range(unit.first, unit.first + unit.count)}

    def _go_on(self, now_ns: int) -> list[Any]:
        """Return the actions that follow from a change."""
        if self.over or self.stranded:
            return []
        sources = {link.source for link in self._links.values()}
        if self.holder not in sources and (self._unequal or self.manifest is None):
            self.holder = None
        if self.manifest is not None and not self._equal and not self._unequal and self._is_idle():
            self.over = True
            return [Done()]
        if not sources:
            return self._strand()
        return self._ask_manifests() + self._hand_out(now_ns)

    def _is_idle(self) -> bool:
        return not any(link.units for link in self._links.values())

    def _strand(self) -> list[Any]:
        self.stranded = True
        reasons = "; ".join(f"peer {source}: {reason}" for source, reason in sorted(self._reasons.items()))
        return [Stranded(f"no peer is left to fetch the state from: {reasons}" if reasons else "there is no source")]

    def _ask_manifests(self) -> list[Any]:
        """Ask one link of each source, as long as there is no holder."""
        if self.holder is not None:
            return []
        asked = {link.source for link in self._links.values() if link.asked}
        actions = []
        for number, link in self._links.items():
            if link.up and link.source not in asked:
                link.asked = True
                asked.add(link.source)
                actions.append(AskManifest(number))
        return actions

    def _hand_out(self, now_ns: int) -> list[Any]:
        """Give one unit at a time to each link that has room, so that few units go to many links."""
        orders: dict[int, list[Unit]] = {}
        open_links = {number: link for number, link in self._links.items() if link.up}
        while open_links:
            for number, link in list(open_links.items()):
                queue = self._unequal if self._unequal and link.source == self.holder else self._equal
                if not queue or link.under_way >= link.room or len(link.units) >= FETCH_UNITS_AHEAD:
                    del open_links[number]
                    continue
                unit = queue.popleft()
                link.units.append(unit)
                link.under_way += unit.nbytes
                link.began_ns = link.began_ns or now_ns
                if queue is self._unequal:
                    self._torn |= {(unit.key, block) for block in range(unit.first, unit.first + unit.count)}
                orders.setdefault(number, []).append(unit)
        return [Order(number, tuple(units)) for number, units in orders.items()]

    def check(self) -> None:
        """Invariants: no block is queued twice, the counts are right, and nothing waits that could be under way."""
        units = [*self._equal, *self._unequal, *(unit for link in self._links.values() for unit in link.units)]
        blocks = [(unit.key, block) for unit in units for block in range(unit.first, unit.first + unit.count)]
        assert len(blocks) == len(set(blocks)), "a block is to be fetched twice"
        for number, link in self._links.items():
            assert link.closing or link.source in self._failures, number
            assert link.under_way == sum(unit.nbytes for unit in link.units), number
            assert link.up or link.closing or not link.units, number
            assert len(link.units) <= FETCH_UNITS_AHEAD, number
            assert not (link.up and self._equal and not link.units) or self.over, number
        assert self.over or self.stranded or self._links, "no link is left, and Stranded was not returned"
        assert self.holder is None or self.manifest is not None

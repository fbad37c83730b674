"""The fetch of a state: which unit is asked for from which source, so that each block is fetched once and soon.

Every source is dialled for the same number of links. The first manifest that arrives and belongs to the elected state
says what to fetch: *units*, runs of adjacent digest blocks that differ from this peer's. They are handed out to all
links, and each link has about as many bytes under way as it moves in a second: a fast link is never idle, and a slow
one does not delay the end. When a link is lost, its unfinished units go to others, and its source is dialled again a
few times, as long as that helps. A source that twice sends what does not match the manifest is not dialled again.

Entries in which peers may differ (`unequal`) are taken from one source alone, the *holder*: the one whose manifest was
adopted. If it is lost before they are complete, another manifest is adopted, and what differs from that is fetched.

The tables at the end say what may happen in which phase of the fetch (`TRANSITIONS`) and of one of its links
(`LINK_TRANSITIONS`), and what may follow; docs/architecture.md shows them. An event is named by the record that the
actor performs or receives, and the steps of a link that the fetch takes by itself by the action that they return.

Pure: links are numbers, manifests are records, time is an argument.
"""

from __future__ import annotations

from collections import deque

from pccl._core.kernels.digest import DIGEST_BYTES, STATE_BLOCK_BYTES
from pccl._core.protocol.mailbox import ManifestFetched, UnitsMoved
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

from .events import AddSources, DropSource, FetchState, LinkDown, LinkUp, ProtocolViolationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from pccl._core.protocol.state_manifest import StateManifest

    Table = dict[tuple[str, type[Any]], tuple[Callable[..., str], tuple[str, ...]]]

# The phases of a fetch.
SEEKING = "seeking"  # no manifest is adopted, or its holder was lost too early: all sources are asked for theirs
FETCHING = "fetching"  # the adopted manifest says what is fetched
STRANDED = "stranded"  # no link is left
DONE = "done"  # every unit is in place and verified

# The phases of a link.
DIALLING = "dialling"  # the actor connects, or will
UP = "up"  # units may be ordered
ASKED = "asked"  # the same, and the source owes its manifest
CLOSING = "closing"  # it is not needed any more, but a worker may still write for it
CLOSED = "closed"  # no worker writes for it

SECOND_NS = 1_000_000_000
UNIT_BYTES_MAX = RUN_BLOCKS_MAX * STATE_BLOCK_BYTES
REDIALS_MAX = 3  # how often a source is dialled again in a row before it is given up
LIES_MAX = 2  # a bit may flip on the way once; a source that sends wrong bytes again holds wrong bytes


@record
class DialSource:
    """Connect to a source; `attempt` counts the dials and links that failed since it last sent a unit."""

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

    __slots__ = ("began_ns", "fetched", "number", "phase", "room", "source", "under_way", "units", "wrong")

    def __init__(self, number: int, source: int) -> None:
        self.number = number
        self.source = source
        self.phase = DIALLING
        self.wrong = ""  # what was wrong with its manifest
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
        lanes: int,
        new_link: Callable[[], int],
        redials: int = REDIALS_MAX,
    ) -> None:
        self._own = own
        self._content = content
        self._whole = whole
        self._new_link = new_link
        self._redials = redials
        self._links_each = max(1, lanes // max(len(sources), 1))  # all of them together are one pool
        self._first_sources = sources
        self._failures: dict[int, int] = {}  # of the sources that may still be dialled
        self._lies: dict[int, int] = {}
        self._reasons: dict[int, str] = {}  # why a source was lost the last time
        self._links: dict[int, Link] = {}
        self._actions: list[Any] = []  # of the event that is being handled
        self._equal: deque[Unit] = deque()  # to do; from any source
        self._unequal: deque[Unit] = deque()  # to do; from the holder
        # Of entries that may differ: the digests of what is here by now, and the blocks that may be half overwritten.
        self._present: dict[int, bytearray] = {}
        self._torn: set[tuple[int, int]] = set()
        self.manifest: StateManifest | None = None  # adopted
        self.holder: int | None = None  # whose manifest it is; None once it is lost
        self.phase = SEEKING
        self.fetched_bytes = 0

    def _step(self, subject: type[Any], now_ns: int, *arguments: Any) -> list[Any]:
        """Take the fetch through its table, and return the actions. A handler returns the next phase."""
        handler, next_phases = _entry(TRANSITIONS, "a fetch", self.phase, subject)
        self._actions = []
        phase = handler(self, subject, now_ns, *arguments)
        assert phase in next_phases, f"{subject.__name__} while {self.phase} led to {phase}"
        self.phase = phase
        return self._actions

    def _step_link(self, link: Link, subject: type[Any], *arguments: Any) -> None:
        """Take one link through its table. A handler returns the next phase."""
        handler, next_phases = _entry(LINK_TRANSITIONS, "a link", link.phase, subject)
        phase = handler(self, link, *arguments)
        assert phase in next_phases, f"{subject.__name__} of a link while {link.phase} led to {phase}"
        link.phase = phase

    # ------------------------------------------------------------------------------------------ events

    def begin(self) -> list[Any]:
        """Dial all sources."""
        return self._step(FetchState, 0, self._first_sources)

    def link_up(self, link: int, now_ns: int) -> list[Any]:
        """A source was reached."""
        return self._step(LinkUp, now_ns, link)

    def link_down(self, link: int, reason: str, now_ns: int, *, lied: bool = False) -> list[Any]:
        """A source was not reached, the connection broke, or it carried what does not match (`lied`).

        No worker writes to this peer's memory for this link any more.
        """
        return self._step(LinkDown, now_ns, link, reason, lied)

    def manifest_came(self, link: int, manifest: StateManifest, now_ns: int) -> list[Any]:
        """A source has sent its manifest. Raises nothing, whatever it contains."""
        return self._step(ManifestFetched, now_ns, link, manifest)

    def units_fetched(self, link: int, count: int, now_ns: int) -> list[Any]:
        """The next `count` units that were ordered on the link are in place and verified."""
        return self._step(UnitsMoved, now_ns, link, count, now_ns)

    def source_gone(self, source: int, now_ns: int) -> list[Any]:
        """The master says that this source is gone."""
        return self._step(DropSource, now_ns, source)

    def sources_came(self, sources: Sequence[int], now_ns: int) -> list[Any]:
        """These peers have finished and are sources too."""
        return self._step(AddSources, now_ns, sources)

    # ------------------------------------------------------------------------------------------ what the actor asks

    def expects(self, link: int) -> bool:
        """Whether this link is still needed."""
        return self.phase is not DONE and link in self._links and self._links[link].phase is not CLOSING

    def awaits(self, link: int) -> bool:
        """Whether this link was asked for something that has not come yet."""
        known = self._links.get(link)
        return known is not None and (known.phase is ASKED or (known.phase is UP and bool(known.units)))

    def held(self) -> bytes:
        """Return the manifest of the fetched state, with which this peer can be a source itself."""
        assert self.phase is DONE
        assert self.manifest is not None
        rows = []
        for ours, theirs in zip(self._own.rows, self.manifest.rows, strict=True):
            is_ours = ours.digest == theirs.digest or (ours.unequal and not self._whole)
            rows.append(replace(ours if is_ours else theirs, segment=0, offset=0))
        return pack_manifest(rows)

    # ------------------------------------------------------------------------------------------ steps of the fetch

    def _add_sources(self, _: type[Any], now_ns: int, sources: Sequence[int]) -> str:
        self._failures.update(dict.fromkeys(sources, 0))
        self._lies.update(dict.fromkeys(sources, 0))
        for source in [source for _ in range(self._links_each) for source in sources]:
            self._dial(source)
        return self._go_on(now_ns)

    def _drop_source(self, _: type[Any], now_ns: int, source: int) -> str:
        if source not in self._failures:
            return self.phase
        self._reasons[source] = "it was lost"
        self._give_up_on(source)
        return self._go_on(now_ns)

    def _tell_link(self, subject: type[Any], now_ns: int, number: int, *arguments: Any) -> str:
        """Tell a link what happened to it. One that is unknown has ended: its end may be reported twice."""
        link = self._links.get(number)
        if link is None:
            return self.phase
        self._step_link(link, subject, *arguments)
        return self._go_on(now_ns)

    def _ignore(self, *_: Any) -> str:
        """Nothing to do: the event was on its way while the phase changed."""
        return self.phase

    # ------------------------------------------------------------------------------------------ steps of a link

    def _dial(self, source: int) -> None:
        number = self._new_link()
        self._links[number] = Link(number, source)
        self._actions.append(DialSource(number, source, self._failures[source]))

    def _use_link(self, _: Link) -> str:
        return UP

    def _ask(self, link: Link) -> str:
        self._actions.append(AskManifest(link.number))
        return ASKED

    def _take_manifest(self, link: Link, manifest: StateManifest) -> str:
        link.wrong = check_manifest(manifest, self._own, self._content)
        if link.wrong:
            return self._close(link)
        if self.holder is None:
            self._adopt(link.source, manifest)
        return UP

    def _count_units(self, link: Link, count: int, now_ns: int) -> str:
        for _ in range(count):
            unit = link.units.popleft()
            link.under_way -= unit.nbytes
            link.fetched += unit.nbytes
            self.fetched_bytes += unit.nbytes
            self._note(unit)
        if link.source in self._failures:
            self._failures[link.source] = 0
        rate = link.fetched * SECOND_NS // max(now_ns - link.began_ns, 1)
        link.room = min(max(rate, UNIT_BYTES_MAX), FETCH_BYTES_AHEAD)
        return link.phase

    def _close(self, link: Link) -> str:
        self._actions.append(CloseLink(link.number))
        return CLOSING

    def _stay(self, link: Link, *_: Any) -> str:
        """Nothing to do: the link is being closed."""
        return link.phase

    def _lose(self, link: Link, reason: str, lied: bool) -> str:
        """Take back what the link had under way, and dial its source again if that may help."""
        del self._links[link.number]
        self._take_back(link)
        source = link.source
        if link.phase is not CLOSING or link.wrong:
            self._reasons[source] = link.wrong or reason
        if source in self._failures:
            self._failures[source] += 1
            self._lies[source] += lied or bool(link.wrong)
            if self._lies[source] >= LIES_MAX:
                self._give_up_on(source)
            elif self._failures[source] <= self._redials:
                self._dial(source)
        return CLOSED

    # ------------------------------------------------------------------------------------------ decisions

    def _give_up_on(self, source: int) -> None:
        """Close the links of this source, and do not dial it again."""
        del self._failures[source]
        for link in [link for link in self._links.values() if link.source == source]:
            self._step_link(link, CloseLink)

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

    def _go_on(self, now_ns: int) -> str:
        """Decide what follows from a change; returns the next phase."""
        sources = {link.source for link in self._links.values()}
        if self.holder not in sources and self._unequal:
            self.holder = None
        if self.manifest is not None and not self._equal and not self._unequal and self._is_idle():
            self._actions.append(Done())
            return DONE
        if not sources:
            self._strand()
            return STRANDED
        if self.holder is None:
            self._ask_manifests()
        self._hand_out(now_ns)
        return SEEKING if self.holder is None else FETCHING

    def _is_idle(self) -> bool:
        return not any(link.units for link in self._links.values())

    def _strand(self) -> None:
        reasons = "; ".join(f"peer {source}: {reason}" for source, reason in sorted(self._reasons.items()))
        text = f"no peer is left to fetch the state from: {reasons}" if reasons else "there is no source"
        self._actions.append(Stranded(text))

    def _ask_manifests(self) -> None:
        """Ask one link of each source."""
        asked = {link.source for link in self._links.values() if link.phase is ASKED}
        for link in self._links.values():
            if link.phase is UP and link.source not in asked:
                asked.add(link.source)
                self._step_link(link, AskManifest)

    def _hand_out(self, now_ns: int) -> None:
        """Give one unit at a time to each link that has room, so that few units go to many links."""
        orders: dict[int, list[Unit]] = {}
        open_links = [link for link in self._links.values() if link.phase in OPEN]
        while open_links:
            for link in list(open_links):
                queue = self._unequal if self._unequal and link.source == self.holder else self._equal
                if not queue or link.under_way >= link.room or len(link.units) >= FETCH_UNITS_AHEAD:
                    open_links.remove(link)
                    continue
                unit = queue.popleft()
                link.units.append(unit)
                link.under_way += unit.nbytes
                link.began_ns = link.began_ns or now_ns
                if queue is self._unequal:
                    self._torn |= {(unit.key, block) for block in range(unit.first, unit.first + unit.count)}
                orders.setdefault(link.number, []).append(unit)
        self._actions += [Order(number, tuple(units)) for number, units in orders.items()]

    def check(self) -> None:
        """Invariants: no block is queued twice, the counts are right, and nothing waits that could be under way."""
        units = [*self._equal, *self._unequal, *(unit for link in self._links.values() for unit in link.units)]
        blocks = [(unit.key, block) for unit in units for block in range(unit.first, unit.first + unit.count)]
        assert len(blocks) == len(set(blocks)), "a block is to be fetched twice"
        for number, link in self._links.items():
            assert link.phase is CLOSING or link.source in self._failures, number
            assert link.under_way == sum(unit.nbytes for unit in link.units), number
            assert link.phase is not DIALLING or not link.units, number
            assert len(link.units) <= FETCH_UNITS_AHEAD, number
            assert not (link.phase in OPEN and self._equal and not link.units), number
        assert self._links or self.phase in (STRANDED, DONE), f"no link is left while {self.phase}"
        assert self.holder is None or self.manifest is not None
        assert self.phase is STRANDED or (self.holder is None) == (self.phase is SEEKING), (
            f"{self.phase}: {self.holder}"
        )


def _entry(table: Table, what: str, phase: str, subject: type[Any]) -> tuple[Callable[..., str], tuple[str, ...]]:
    entry = table.get((phase, subject))
    if entry is None:
        raise ProtocolViolationError(f"{subject.__name__} of {what} while {phase}")
    return entry


OPEN = (UP, ASKED)  # the source can be asked for units

# (phase of the fetch, event) -> (handler, phases that may follow). A pair that is not here is an error.
TRANSITIONS: Table = {
    (SEEKING, FetchState): (StateFetch._add_sources, (SEEKING, STRANDED)),
    (SEEKING, LinkUp): (StateFetch._tell_link, (SEEKING,)),
    (SEEKING, ManifestFetched): (StateFetch._tell_link, (SEEKING, FETCHING, DONE)),
    (SEEKING, UnitsMoved): (StateFetch._tell_link, (SEEKING,)),
    (SEEKING, LinkDown): (StateFetch._tell_link, (SEEKING, STRANDED)),
    (SEEKING, DropSource): (StateFetch._drop_source, (SEEKING,)),
    (FETCHING, LinkUp): (StateFetch._tell_link, (FETCHING,)),
    (FETCHING, ManifestFetched): (StateFetch._tell_link, (FETCHING,)),
    (FETCHING, UnitsMoved): (StateFetch._tell_link, (FETCHING, DONE)),
    (FETCHING, LinkDown): (StateFetch._tell_link, (FETCHING, SEEKING, STRANDED)),
    (FETCHING, DropSource): (StateFetch._drop_source, (FETCHING,)),
    (STRANDED, AddSources): (StateFetch._add_sources, (SEEKING, FETCHING, STRANDED)),
    **{(STRANDED, event): (StateFetch._ignore, (STRANDED,)) for event in (LinkDown, DropSource)},
    **{
        (DONE, event): (StateFetch._ignore, (DONE,))
        for event in (LinkUp, ManifestFetched, UnitsMoved, LinkDown, DropSource)
    },
}

# (phase of a link, event or action) -> (handler, phases that may follow). A pair that is not here is an error.
LINK_TRANSITIONS: Table = {
    (DIALLING, LinkUp): (StateFetch._use_link, (UP,)),
    (UP, AskManifest): (StateFetch._ask, (ASKED,)),
    (ASKED, ManifestFetched): (StateFetch._take_manifest, (UP, CLOSING)),
    **{(phase, UnitsMoved): (StateFetch._count_units, (phase,)) for phase in (UP, ASKED, CLOSING)},
    **{(phase, CloseLink): (StateFetch._close, (CLOSING,)) for phase in (DIALLING, UP, ASKED)},
    **{(CLOSING, event): (StateFetch._stay, (CLOSING,)) for event in (ManifestFetched, CloseLink)},
    **{(phase, LinkDown): (StateFetch._lose, (CLOSED,)) for phase in (DIALLING, UP, ASKED, CLOSING)},
}

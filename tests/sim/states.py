"""The shared states of the simulated cluster: a few small values that stand for gigabytes, and how they move.

A state is four values that must be equal on all peers and one that may differ. Each stands for a tensor of one unit.
Training is a function of the values, so peers that were equal stay equal, unless one of them computes something else.

A transfer is driven by the real `StateFetch`; its links and workers are simulated. A source accepts a link in its
actor, so a stopped source accepts none; workers move units also while actors are stopped. A worker that ends in the
middle of a unit leaves a value behind that is neither the old one nor the new. Assertions check the machines: nothing
is served or fetched without a manifest, and no slot completes while workers use the memory.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pccl._core.kernels.digest import DIGEST_BYTES, digest_of_blocks
from pccl._core.peer.events import SendMaster, StateFetched, StateUnfetched, TransferEnded
from pccl._core.peer.fetch import (
    FETCHING,
    SEEKING,
    UNIT_BYTES_MAX,
    AskManifest,
    CloseLink,
    DialSource,
    Done,
    Order,
    StateFetch,
    Stranded,
)
from pccl._core.protocol.messages import Schema
from pccl._core.protocol.state_manifest import Row, StateManifest, block_count, pack_manifest
from pccl._core.protocol.state_schema import SchemaRow, digest_content, pack_schema
from pccl.actors.peer.transfers import HOLD_NS, REDIAL_NS
from pccl.options import nanoseconds

from .clock import MILLISECOND
from .sync_paths import mark_fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl._core.protocol.sources import Source
    from pccl._core.protocol.state_stream import Unit

    from .nodes import PeerShell

VALUES = 4  # that must be equal on all peers
ROWS = [
    SchemaRow("seed", 7, True, 8),
    *(SchemaRow(f"value{index}", 10, False, UNIT_BYTES_MAX) for index in range(VALUES)),
]
COMPARED = [not row.unequal for row in ROWS]
RIGHT = pack_schema(ROWS)
ODD = pack_schema([SchemaRow("value0", 8, False, 2)])
HALF = 1_000_003  # added to a value that is half overwritten: no step of training leads to such a value
PAUSE_NS = 100 * MILLISECOND  # until a worker tries again to reach its source


class State:
    """The shared state of one training process."""

    def __init__(self, seed: int, unequal: int) -> None:
        self.revision = 0
        self.values = [seed] * VALUES
        self.unequal = unequal
        self.torn = b""  # the digest of a mixture that a transfer left behind

    def digest(self) -> bytes:
        """Return the content digest."""
        digests = [row.digest.to_bytes(DIGEST_BYTES, "little") for row in self._rows()]
        return digest_content(b"".join(digests), COMPARED)

    def manifest(self) -> StateManifest:
        """Return the manifest that the training process makes."""
        return StateManifest(pack_manifest(list(self._rows())))

    def train(self) -> None:
        """One step: the same for the same values."""
        self.revision += 1
        self.values = [(value * 31 + self.revision) % 1_000_003 for value in self.values]

    def read(self, key: int) -> int:
        """Return the value of that row."""
        return self.values[key - 1] if key else self.unequal

    def write(self, key: int, value: int) -> None:
        """Overwrite the value of that row."""
        if key:
            self.values[key - 1] = value
        else:
            self.unequal = value

    def _rows(self) -> list[Row]:
        rows = []
        for key, row in enumerate(ROWS):
            blocks = self.read(key).to_bytes(DIGEST_BYTES, "little") * block_count(row.nbytes)
            digest = digest_of_blocks(blocks, row.nbytes)
            rows.append(Row(row.name, row.datatype, row.unequal, row.nbytes, digest, 0, 0, blocks))
        return rows


class Transfer:
    """This peer's part in one transfer."""

    def __init__(self, number: int, own: StateManifest) -> None:
        self.round = number
        self.own = own
        self.manifest = own.without_locations()
        self.fetching: StateFetch | None = None  # None: this peer is a source
        self.content = b""  # that is fetched
        self.sources: dict[int, Source] = {}
        self.lost: set[int] = set()  # sources that a fault has made unreachable
        self.links: dict[int, StateLink] = {}  # to sources, by number
        self.served: list[StateLink] = []  # of peers that fetch from here
        self.ending = False
        self.tx_bytes = self.rx_bytes = 0

    @property
    def fetches(self) -> bool:
        """Whether this peer is not a source."""
        return self.fetching is not None


class StateLink:
    """A connection from a peer that fetches to a source, from the dial on, and the two workers that serve it."""

    def __init__(self, sink: StatePlane, transfer: Transfer, number: int, source: Source) -> None:
        self.number = number
        self.source = source
        self.round = transfer.round
        self._sink = sink
        self._transfer = transfer
        self._server: tuple[StatePlane, Transfer] | None = None  # once the source has accepted it
        self._units: deque[Unit] = deque()  # ordered
        self._is_asked = False  # for the manifest
        self._is_up = self._is_busy = self._is_closing = False
        self.is_over = False  # no worker serves it, and the fetch is told

    # ------------------------------------------------------------------------------------------ the dial

    def dial(self) -> None:
        """Reach the source, or fail; the dial of a source that does not answer times out."""
        shell, world = self._sink.shell, self._sink.world
        if self.is_over or self._is_closing:
            return
        options = world.plan.options
        world.clock.after(
            nanoseconds(options.connect_timeout + options.handshake_timeout), shell.receive, self._time_out
        )
        target = world.listeners.get((self.source.host, self.source.port))
        if self.source.peer in self._transfer.lost and not world.calm:
            self.lose("no route to host")
        elif target is None or not (target.alive or target.vanished):
            self.lose("connection refused")
        elif not target.vanished and not world.is_blocked(shell, target):
            target.receive(target.states.link_came, self)

    def accept(self, server: StatePlane) -> None:
        """The source accepts: its worker serves this link from now on."""
        assert server.transfer is not None
        self._server = server, server.transfer
        server.transfer.served.append(self)
        world = self._sink.world
        world.clock.after(world.delay_ns(), self._sink.shell.receive, self._come_up)

    def _come_up(self) -> None:
        if not self.is_over and not self._is_closing and not self._transfer.ending:
            self._is_up = True
            self._sink.hear(self._transfer, lambda fetch, now_ns: fetch.link_up(self.number, now_ns))

    def _time_out(self) -> None:
        if not self._is_up:
            self.lose("no answer")

    # ------------------------------------------------------------------------------------------ its workers

    def ask(self) -> None:
        """Ask for the manifest of the source."""
        self._is_asked = True
        self._work()

    def order(self, units: tuple[Unit, ...]) -> None:
        """Ask for these units."""
        self._units += units
        self._work()

    def _work(self) -> None:
        if (self._is_asked or self._units) and not self._is_busy:
            self._is_busy = True
            self._sink.later(self._move)

    def _move(self) -> None:
        """Move the manifest or one unit."""
        self._is_busy = False
        sink, world = self._sink, self._sink.world
        if self.is_over or not sink.shell.alive:
            return
        assert self._server is not None, "an order for a link that is not up"
        server, part = self._server
        if server.shell.vanished:
            self._is_busy = True
            world.clock.after(nanoseconds(world.plan.options.stall_timeout), self.lose, "silent for too long")
        elif world.is_blocked(sink.shell, server.shell):
            self._is_busy = True
            if world.chance(0.3):
                self.lose("timed out")
            else:
                world.clock.after(PAUSE_NS, self._move)
        elif not server.shell.alive or server.transfer is not part or part.ending:
            self.lose("connection reset by peer")
        elif world.faults.hits_move():
            self._is_busy = True
            self.lose("a checksum does not match", lied=world.chance(0.3))
        elif self._is_asked:
            self._is_asked = False
            manifest = StateManifest(part.manifest)
            assert manifest.content_digest() == self._transfer.content, "a source serves what was not elected"
            sink.say(self._transfer, lambda fetch, now_ns: fetch.manifest_came(self.number, manifest, now_ns))
            self._work()
        else:
            self._copy(server, part, self._units.popleft())
            self._work()

    def _copy(self, server: StatePlane, part: Transfer, unit: Unit) -> None:
        transfer, value = self._transfer, server.state.read(unit.key)
        assert transfer.fetching is not None
        assert transfer.fetching.manifest is not None
        wanted = transfer.fetching.manifest.blocks(unit.key)[:DIGEST_BYTES]
        assert value.to_bytes(DIGEST_BYTES, "little") == wanted, f"row {unit.key} is not that of the manifest"
        self._sink.state.write(unit.key, value)
        transfer.rx_bytes += unit.nbytes
        part.tx_bytes += unit.nbytes
        self._sink.say(transfer, lambda fetch, now_ns: fetch.units_fetched(self.number, 1, now_ns))

    # ------------------------------------------------------------------------------------------ its end

    def close(self) -> None:
        """Kill the worker. It may move something until it is reaped."""
        self._is_closing = True
        self._sink.later(self.end, "it was not needed any more")

    def lose(self, reason: str, *, lied: bool = False) -> None:
        """Break the connection by a fault."""
        if not self.is_over:
            self._sink.hindered = True
            self.end(reason, lied=lied)

    def end(self, reason: str, *, lied: bool = False) -> None:
        """End the worker, and tell the fetch."""
        if self.is_over:
            return
        self.is_over = True
        world, state = self._sink.world, self._sink.state
        if self._is_busy and self._units and self._sink.shell.alive and world.chance(0.5):
            key = self._units[0].key
            state.write(key, state.read(key) + HALF)
            world.paths.mark("a unit is half overwritten")
        self._sink.say(self._transfer, lambda fetch, now_ns: fetch.link_down(self.number, reason, now_ns, lied=lied))


class StatePlane:
    """The workers of one peer that serve or fetch a state."""

    def __init__(self, shell: PeerShell) -> None:
        self.shell = shell
        self.world = shell.world
        self.transfer: Transfer | None = None
        self._held: list[StateLink] = []  # links of a transfer that is not served yet
        self.heir = False  # the last transfer made a source of this sink
        self.hindered = False  # a fault has disturbed this sink or its way to a source

    @property
    def state(self) -> State:
        """The shared state in the memory of this peer."""
        return self.shell.program.syncing.state

    @property
    def is_fetching(self) -> bool:
        """Whether something is still to come."""
        fetching = None if self.transfer is None else self.transfer.fetching
        return fetching is not None and fetching.phase in (SEEKING, FETCHING)

    def later(self, function: Callable[..., None], *arguments: Any) -> None:
        """Plan a call after the time of some work."""
        self.world.clock.after(
            self.world.random.randint(0, self.world.plan.work_ms * MILLISECOND), function, *arguments
        )

    # ------------------------------------------------------------------------------------------ what the machine asks

    def serve(self, action: Any) -> None:
        """ServeState."""
        self._begin(action)
        self._accept_held()

    def fetch(self, action: Any) -> None:
        """FetchState."""
        transfer = self._begin(action)
        transfer.content = action.content
        transfer.sources = {source.peer: source for source in action.sources}
        transfer.fetching = StateFetch(
            transfer.own,
            action.content,
            list(transfer.sources),
            whole=action.whole,
            lanes=self.shell.lanes,
            new_link=self.shell.state.new_link,
        )
        self.hear(transfer, lambda fetch, _: fetch.begin())

    def _begin(self, action: Any) -> Transfer:
        assert self.transfer is None, "two transfers in one memory"
        assert action.manifest == self.shell.program.syncing.described, "a transfer without a manifest"
        self.transfer = Transfer(action.round, self.state.manifest())
        self.heir = self.hindered = False
        return self.transfer

    def serve_fetched(self, action: Any) -> None:
        """ServeFetched: the sink becomes a source."""
        transfer = self._part(action)
        assert transfer.fetching is not None, "heir of itself"
        transfer.manifest = transfer.fetching.held()
        transfer.fetching = None
        self._end_links(transfer)
        self.heir = True
        self._accept_held()

    def add_sources(self, action: Any) -> None:
        """AddSources."""
        transfer = self._part(action)
        transfer.sources |= {source.peer: source for source in action.sources}
        came = [source.peer for source in action.sources]
        self.hear(transfer, lambda fetch, now_ns: fetch.sources_came(came, now_ns))

    def drop_source(self, action: Any) -> None:
        """DropSource."""
        self.hear(self._part(action), lambda fetch, now_ns: fetch.source_gone(action.peer, now_ns))

    def end_transfer(self, action: Any) -> None:
        """EndTransfer. Workers may still write until they have ended."""
        transfer = self._part(action)
        assert not transfer.ending, "ended twice"
        transfer.ending = True
        self.break_links("the transfer is over")
        self.later(self.shell.receive, self._ended, transfer)

    def _part(self, action: Any) -> Transfer:
        assert self.transfer is not None, f"{action!r} of no transfer"
        assert self.transfer.round == action.round, f"{action!r} in transfer {self.transfer.round}"
        return self.transfer

    def _ended(self, transfer: Transfer) -> None:
        self._end_links(transfer)
        self.transfer = None
        self.world.feed(self.shell, TransferEnded(transfer.round, transfer.tx_bytes, transfer.rx_bytes))

    def send_schema(self, action: Any) -> None:
        """SendSchema: in two pages, as a large schema is sent."""
        assert action.manifest == self.shell.program.syncing.described, "a schema without a manifest"
        packed = self.shell.program.syncing.schema
        for page, rows in enumerate((packed[:7], packed[7:])):
            self.shell.perform(SendMaster(Schema(action.call, page, 2, rows)))

    # ------------------------------------------------------------------------------------------ what the fetch asks

    def say(self, transfer: Transfer, event: Callable[[StateFetch, int], list[Any]]) -> None:
        """Send an event to the fetch, by way of the actor."""
        self.shell.receive(self.hear, transfer, event)

    def hear(self, transfer: Transfer, event: Callable[[StateFetch, int], list[Any]]) -> None:
        """Let the fetch handle an event, and do what it asks."""
        if transfer.fetching is None or transfer.ending:
            return
        self.world.acting = self.shell
        before = transfer.fetching.phase
        actions = event(transfer.fetching, self.world.clock.now_ns)
        transfer.fetching.check()
        mark_fetch(before, transfer.fetching.phase, actions, self.world.paths.mark)
        for action in actions:
            self._perform(transfer, action)
        if before == SEEKING and transfer.fetching.holder is not None:
            holder = transfer.sources[transfer.fetching.holder]
            others = len(transfer.sources) - 1
            self.world.faults.at_adopted(self.shell, self.world.listeners[holder.host, holder.port], others)

    def _perform(self, transfer: Transfer, action: Any) -> None:
        kind, clock = type(action), self.world.clock
        if kind is DialSource:
            link = StateLink(self, transfer, action.link, transfer.sources[action.source])
            transfer.links[action.link] = link
            clock.after(REDIAL_NS * action.attempt + 2 * self.world.delay_ns(), self.shell.receive, link.dial)
        elif kind is AskManifest:
            transfer.links[action.link].ask()
        elif kind is Order:
            transfer.links[action.link].order(action.units)
        elif kind is CloseLink:
            transfer.links[action.link].close()
        elif kind is Done:
            assert transfer.fetching is not None
            assert self.state.digest() == transfer.content, "fetched something else"
            held = self.state.manifest().without_locations()
            assert transfer.fetching.held() == held, "fetched something else than what the fetch says"
            self.world.faults.at_fetched(self.shell)
            self._tell(StateFetched(transfer.round))
        else:
            assert kind is Stranded, f"the fetch asks for {action!r}"
            self._tell(StateUnfetched(transfer.round, action.reason))

    def _tell(self, event: Any) -> None:
        self.world.clock.after(
            self.world.random.randint(0, 20 * MILLISECOND), self.shell.receive, self.world.feed, self.shell, event
        )

    # ------------------------------------------------------------------------------------------ links

    def link_came(self, link: StateLink) -> None:
        """A peer wants to fetch from here; it may come before the order to serve."""
        if link.source.peer != self.shell.state.id:
            link.lose("this is another peer")
            return
        self._held.append(link)
        self.world.clock.after(HOLD_NS, self.shell.receive, self._refuse, link)
        self._accept_held()
        if link in self._held:
            self.world.paths.mark("a link comes before the order to serve")

    def _accept_held(self) -> None:
        transfer = self.transfer
        if transfer is not None and not transfer.fetches and not transfer.ending:
            for link in [link for link in self._held if link.round == transfer.round]:
                self._held.remove(link)
                link.accept(self)

    def _refuse(self, link: StateLink) -> None:
        if link in self._held:
            self._held.remove(link)
            link.lose("this round is not served here")

    def break_links(self, reason: str) -> None:
        """The workers that serve others have ended; the others notice it."""
        for link in self.transfer.served if self.transfer is not None else ():
            self.world.clock.after(self.world.delay_ns(), link.lose, reason)

    def _end_links(self, transfer: Transfer) -> None:
        for link in transfer.links.values():
            link.end("the transfer is over")

    def fumble(self) -> None:
        """Lose all links to the sources by a fault, so that none of them can be reached again."""
        if self.is_fetching and self.transfer is not None:
            self.hindered = True
            self.transfer.lost |= self.transfer.sources.keys()
            for link in list(self.transfer.links.values()):
                link.lose("no route to host")

"""The actor's side of transfers: which peers may fetch from here, what is fetched from which source, and the workers.

A transfer round makes a peer either a source or a target. As a source it accepts links of that round and forks a worker
for each. A link may come a moment before the order to serve: it is held for HOLD_NS, and then refused. As a target it
dials its sources, forks a worker for each link that is up, and lets `StateFetch` decide what the workers ask for.

Workers are disposable: if one dies, only its link is lost. `end` kills the workers of a round. When the last is reaped,
no process can touch the tensors any more, and `TransferEnded` follows.
"""

from __future__ import annotations

import os
import socket
from functools import partial

from pccl._core.peer.events import StateFetched, StateUnfetched, TransferEnded
from pccl._core.peer.fetch import AskManifest, CloseLink, DialSource, Done, Order, StateFetch, Stranded
from pccl._core.peer.progress import Progress
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.events import DEBUG, INFO
from pccl._core.protocol.hellos import JoinState, Refused
from pccl._core.protocol.mailbox import FetchManifest, FetchUnits, ManifestFetched, StateLinkEnded, UnitsMoved
from pccl._core.protocol.messages import Schema
from pccl._core.protocol.outcomes import RANK_CONNECTION_FAILED
from pccl._core.protocol.state_manifest import StateManifest
from pccl._core.protocol.state_schema import split_schema
from pccl._core.protocol.state_stream import pack_orders
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.mapping import Mapping
from pccl.actors.io import fork, tcp
from pccl.actors.io.dialler import Dialler
from pccl.actors.io.fork import MAILBOX_BYTES_MAX, REAP_INTERVAL_NS
from pccl.actors.workers.state_memory import StateMemory
from pccl.actors.workers.state_worker import FetchWorker, ServeWorker
from pccl.memory.segments import Segment
from pccl.memory.window import Window
from pccl.options import STATE_LINKS_MAX, link_silence_ns

from .transfer_part import StateWorkerHandle, TransferPart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pccl._core.peer.events import (
        AddSources,
        DropSource,
        EndTransfer,
        FetchState,
        SendSchema,
        ServeFetched,
        ServeState,
    )
    from pccl._core.protocol.hellos import Welcome
    from pccl._core.protocol.mailbox import CallManifest
    from pccl.actors.io.connection import Connection
    from pccl.actors.io.loop import Loop

    from .identity import Identity

HOLD_NS = 2_000_000_000  # how long a link may come before the order to serve
REDIAL_NS = 50_000_000  # before a source is dialled again; longer after every failure


class Transfers:
    """All rounds that this peer takes part in: the present one, and earlier ones that have not ended."""

    def __init__(
        self,
        loop: Loop,
        life_fd: int,
        *,
        feed: Callable[[Any], None],
        tell: Callable[[int, str], None],
        descriptor: Callable[[int], tuple[int, int] | None],
        identity: Callable[[], Identity],
    ) -> None:
        self._loop = loop
        self._life_fd = life_fd  # every worker holds it open, so the pipe closes when the last has exited
        self._feed = feed
        self._tell = tell
        self._descriptor = descriptor  # of shared memory, by its number
        self._identity = identity
        self._rounds: dict[int, TransferPart] = {}
        self.windows: dict[tuple[int, int], Window] = {}  # (slot, generation) -> the window to ring at the call's end
        self._slow = Progress()
        self._held: dict[int, tuple[Connection, JoinState, Welcome]] = {}  # links of rounds that are not served yet

    # ------------------------------------------------------------------------------------------ orders of the machine

    def serve(self, action: ServeState) -> None:
        """Let other peers fetch. Links that came early are accepted."""
        try:
            self._rounds[action.round] = self._prepare(action)
        except (OSError, ValueError) as error:
            # Peers that want to fetch are refused, and use other sources.
            self._tell(INFO, f"cannot serve the shared state: {error}")
            return
        self._admit_held(action.round)

    def fetch(self, action: FetchState) -> None:
        """Fetch what differs; the answer is an event, later."""
        identity = self._identity()
        try:
            transfer = self._rounds[action.round] = self._prepare(action)
        except (OSError, ValueError) as error:
            self._later(StateUnfetched(action.round, f"this peer cannot take the shared state: {error}"))
            return
        transfer.sources = {source.peer: source for source in action.sources}
        transfer.fetching = StateFetch(
            transfer.own,
            action.content,
            list(transfer.sources),
            whole=action.whole,
            lanes=identity.lanes,
            new_link=identity.new_link,
        )
        self._perform(transfer, transfer.fetching.begin())

    def add_sources(self, action: AddSources) -> None:
        """Fetch also from these sources, which now have the state; the answer is an event, later."""
        transfer = self._rounds.get(action.round)
        if transfer is None or transfer.fetching is None:
            self._later(StateUnfetched(action.round, "this peer cannot take the shared state"))
            return
        transfer.sources |= {source.peer: source for source in action.sources}
        came = [source.peer for source in action.sources]
        self._perform(transfer, transfer.fetching.sources_came(came, monotonic_ns()))

    def serve_fetched(self, action: ServeFetched) -> None:
        """Let other peers fetch what this peer has fetched. Links that came early are accepted."""
        transfer = self._rounds[action.round]
        transfer.become_source()
        for link in [*transfer.diallers, *transfer.workers]:
            self._close(transfer, link, "everything was fetched")
        self._admit_held(action.round)

    def drop_source(self, action: DropSource) -> None:
        """Stop fetching from a source that is lost."""
        transfer = self._rounds.get(action.round)
        if transfer is not None and transfer.fetching is not None:
            self._perform(transfer, transfer.fetching.source_gone(action.peer, monotonic_ns()))

    def end(self, action: EndTransfer) -> None:
        """Stop serving and fetching; `TransferEnded` follows, but never within this call."""
        transfer = self._rounds.get(action.round)
        if transfer is None:  # it could not begin
            self._later(TransferEnded(action.round, 0, 0))
            return
        self._stop(transfer)
        if not transfer.zombies:
            self._loop.after(0, lambda: self._reap(transfer))

    def report(self, now_ns: int) -> None:
        """Tell how far a fetch is that takes long; called at every tick."""
        for transfer in self._rounds.values():
            if transfer.fetching is not None and not transfer.over:
                first_ns = self._identity().report_ns
                report = self._slow.look(transfer.round, transfer.rx_bytes, now_ns, first_ns)
                if report is not None:
                    level, words = report
                    peers = ", ".join(str(peer) for peer in sorted(transfer.sources)[:8])
                    self._tell(level, f"sync_shared_state fetches from peers {peers} for {words}")

    def kill(self) -> None:
        """End all transfers, because this process ends."""
        for transfer in self._rounds.values():
            self._stop(transfer)
            fork.wait_for_exit(set(transfer.zombies))
        for connection, _, _ in self._held.values():
            connection.close()
        self._held.clear()

    # ------------------------------------------------------------------------------------------ training process

    def described(self, call: CallManifest) -> None:
        """Note the window at which the training process waits for orders and for the end of its call."""
        window = self._descriptor(call.window)
        if window is not None:
            self.windows[call.slot, call.generation] = Window(Mapping(*window))

    def schema_pages(self, action: SendSchema) -> list[Schema]:
        """Return the schema of this peer's state as messages to the master."""
        try:
            pages = split_schema(self.read_manifest(action.manifest, action.nbytes).schema())
        except (OSError, ValueError) as error:
            self._tell(INFO, f"cannot read the manifest of the shared state: {error}")
            pages = [b""]  # not a schema, so the master decides what follows
        return [Schema(action.call, index, len(pages), page) for index, page in enumerate(pages)]

    def read_manifest(self, segment: int, nbytes: int) -> StateManifest:
        """Return the manifest that the training process wrote. Raises ValueError or OSError if it cannot be read."""
        fd, size = self._shared(segment)
        if nbytes > size:
            raise ValueError(f"a manifest of {nbytes} bytes in a segment of {size}")
        return StateManifest(Mapping(fd, nbytes))

    # ------------------------------------------------------------------------------------------ links that come

    def link_came(self, connection: Connection, hello: JoinState, _: str, welcome: Welcome) -> None:
        """Answer a peer that has proven itself to the listener and wants to fetch."""
        identity = self._identity()
        link = connection.number
        self._held[link] = connection, hello, welcome
        connection.become(
            {},
            lambda number, _: self._refuse(number, "sent a message too early"),
            lambda number, *_: self._forget(number),
        )
        if hello.run != identity.run or hello.source != identity.peer:
            self._refuse(link, "this is another peer, or another run")
        elif len(self._held) + sum(len(transfer.workers) for transfer in self._rounds.values()) > STATE_LINKS_MAX:
            self._refuse(link, f"more than {STATE_LINKS_MAX} links fetch from this peer")
        elif hello.round in self._rounds and self._rounds[hello.round].fetching is None:
            self._admit(link)
        else:
            self._loop.after(HOLD_NS, lambda: self._refuse(link, f"round {hello.round} is not served here"))

    def _admit_held(self, number: int) -> None:
        for link in [link for link, (_, hello, _) in self._held.items() if hello.round == number]:
            self._admit(link)

    def _admit(self, link: int) -> None:
        connection, hello, welcome = self._held[link]
        transfer = self._rounds[hello.round]
        if transfer.over:
            self._refuse(link, f"round {hello.round} is not served here any more")
            return
        del self._held[link]
        connection.send(welcome)
        sock = _take_socket(connection)
        if sock is not None:
            # If the fork fails, the connection closes, and the other peer tries another source.
            self._fork(transfer, link, sock)

    def _refuse(self, link: int, reason: str) -> None:
        held = self._held.pop(link, None)
        if held is not None:
            connection = held[0]
            connection.send(Refused(RANK_CONNECTION_FAILED, reason))
            connection.finish()
            self._tell(DEBUG, f"refused a link that wants to fetch state: {reason}")

    def _forget(self, link: int) -> None:
        held = self._held.pop(link, None)
        if held is not None:
            held[0].close()

    # ------------------------------------------------------------------------------------------ links to sources

    def _perform(self, transfer: TransferPart, actions: list[Any]) -> None:
        assert transfer.fetching is not None
        if self._identity().check:
            transfer.fetching.check()
        for action in actions:
            kind = type(action)
            if kind is DialSource:
                self._loop.after(REDIAL_NS * action.attempt, partial(self._dial, transfer.round, action))
            elif kind is AskManifest:
                self._order(transfer, action.link, FetchManifest())
            elif kind is Order:
                assert transfer.fetching.manifest is not None
                for blob in pack_orders(action.units, transfer.fetching.manifest):
                    self._order(transfer, action.link, FetchUnits(blob))
            elif kind is CloseLink:
                self._close(transfer, action.link, "it was not needed any more")
            elif kind is Done:
                self._later(StateFetched(transfer.round))
            elif kind is Stranded:
                self._later(StateUnfetched(transfer.round, action.reason))

    def _dial(self, number: int, action: DialSource) -> None:
        transfer = self._rounds.get(number)
        if transfer is None or not transfer.expects(action.link):
            return
        identity = self._identity()
        source = transfer.sources[action.source]
        # The timer of a dialler may outlive the round: the callbacks must not keep the memory of the round.
        transfer.diallers[action.link] = Dialler(
            self._loop,
            [(source.host, source.port)],
            token=identity.token,
            hello=lambda proof: JoinState(proof, identity.run, number, source.peer, identity.peer),
            on_up=lambda connection: self._link_up(self._rounds[number], action.link, connection),
            on_down=lambda reason, _: self._close(self._rounds[number], action.link, reason),
            timeout_ns=identity.dial_ns,
            number=action.link,
        )

    def _link_up(self, transfer: TransferPart, link: int, connection: Connection) -> None:
        assert transfer.fetching is not None
        del transfer.diallers[link]
        sock = _take_socket(connection)
        if sock is None:
            self._close(transfer, link, "an incomplete message was left on the link")
        elif self._fork(transfer, link, sock):
            self._perform(transfer, transfer.fetching.link_up(link, monotonic_ns()))

    # ------------------------------------------------------------------------------------------ workers

    def _fork(self, transfer: TransferPart, link: int, sock: socket.socket) -> bool:
        """Fork a worker for this connection; the copy in this process is closed in any case."""
        identity = self._identity()
        kind = "serve" if transfer.fetching is None else "fetch"
        name = f"pccl-{kind}-{transfer.forked}"
        transfer.forked += 1
        owner = transfer.forked

        def serve(mailbox: socket.socket) -> None:
            transfer.memory.owner = owner
            common = (mailbox, sock, transfer.own, transfer.memory, identity.stall_ns)
            if kind == "serve":
                ServeWorker(*common, manifest=transfer.manifest, lanes=identity.lanes).serve()
            else:
                FetchWorker(*common, manifest_bytes=len(transfer.manifest)).serve()

        try:
            # The kernel ends a link that loses all packets before the stall bound does.
            tcp.limit_silence(sock, link_silence_ns(identity.stall_ns))
            kept = [self._life_fd, sock.fileno(), *transfer.memory.descriptors]
            pid, mailbox = fork.fork(self._loop, name, kept, serve, lambda: self._heard(transfer, worker))
        except OSError as error:
            reason = f"cannot start a worker: {error.strerror}"
            self._close(transfer, link, reason)
            return False
        finally:
            sock.close()
        worker = transfer.workers[link] = StateWorkerHandle(pid, mailbox, link, name, owner)
        if transfer.fetching is not None:
            # By its number, because a timer that refers to the round would keep its memory after the end.
            self._loop.after(identity.stall_ns, partial(self._look_after, transfer.round, worker))
        return True

    def _look_after(self, number: int, worker: StateWorkerHandle) -> None:
        """Kill a worker that was stopped: one that runs gives up a silent source by itself."""
        transfer = self._rounds.get(number)
        if transfer is None or transfer.fetching is None or transfer.workers.get(worker.link) is not worker:
            return
        stall_ns = self._identity().stall_ns
        if transfer.fetching.awaits(worker.link) and monotonic_ns() - worker.heard_ns > stall_ns * 3 // 2:
            self._close(transfer, worker.link, f"{worker.name} does not answer")
        else:
            self._loop.after(stall_ns, partial(self._look_after, number, worker))

    def _order(self, transfer: TransferPart, link: int, message: object) -> None:
        worker = transfer.workers.get(link)
        if worker is not None:
            worker.heard_ns = monotonic_ns()
            try:
                worker.mailbox.send(pack(message))
            except OSError:
                # Its mailbox is full or broken: it is stopped or dead, and would never obey.
                self._close(transfer, link, f"{worker.name} does not read its mailbox")

    def _heard(self, transfer: TransferPart, worker: StateWorkerHandle) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(worker.mailbox, MAILBOX_BYTES_MAX, 1)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._close(transfer, worker.link, f"{worker.name} ended unexpectedly")
        else:
            worker.heard_ns = monotonic_ns()
            self._hear(transfer, worker, unpack(data), fds)

    def _hear(self, transfer: TransferPart, worker: StateWorkerHandle, message: Any, fds: list[int]) -> None:
        if isinstance(message, StateLinkEnded):
            self._close(transfer, worker.link, message.reason, lied=message.lied)
        elif isinstance(message, ManifestFetched):
            self._take_manifest(transfer, worker.link, fds[0], message.nbytes)
        elif isinstance(message, UnitsMoved) and transfer.fetching is None:
            transfer.tx_bytes += message.nbytes
        elif isinstance(message, UnitsMoved):
            assert transfer.fetching is not None
            transfer.rx_bytes += message.nbytes
            now_ns = monotonic_ns()
            self._perform(transfer, transfer.fetching.units_fetched(worker.link, message.units, now_ns))

    def _take_manifest(self, transfer: TransferPart, link: int, fd: int, nbytes: int) -> None:
        assert transfer.fetching is not None
        with Segment.attach(fd, nbytes) as segment:
            try:
                manifest = StateManifest(segment.view)
            except ValueError as error:
                self._close(transfer, link, f"its manifest cannot be read: {error}", lied=True)
                return
        self._perform(transfer, transfer.fetching.manifest_came(link, manifest, monotonic_ns()))

    # ------------------------------------------------------------------------------------------ ends

    def _close(self, transfer: TransferPart, link: int, reason: str, *, lied: bool = False) -> None:
        """End a link: cancel its dialler or kill its worker. The fetch is told when the worker is reaped."""
        if any(zombie.link == link for zombie, _, _ in transfer.zombies.values()):
            return  # it is being ended
        dialler = transfer.diallers.pop(link, None)
        if dialler is not None:
            dialler.cancel()
        worker = transfer.workers.pop(link, None)
        if worker is None:
            self._loop.after(0, lambda: self._link_down(transfer, link, reason, lied))
            return
        self._loop.forget(worker.mailbox.fileno())
        fork.kill(worker.pid)
        if not transfer.zombies:
            self._loop.after(0, lambda: self._reap(transfer))
        transfer.zombies[worker.pid] = worker, reason, lied

    def _reap(self, transfer: TransferPart) -> None:
        """Reap workers that have exited, and read their last messages."""
        left = set(transfer.zombies)
        fork.reap(left)
        for pid in [pid for pid in transfer.zombies if pid not in left]:
            worker, reason, lied = transfer.zombies.pop(pid)
            if transfer.memory.window is not None:
                transfer.memory.window.reclaim(worker.number)
            last_word = self._drain(transfer, worker)
            if last_word is not None and not lied:  # the actor's own finding has priority
                reason, lied = last_word.reason, last_word.lied
            self._link_down(transfer, worker.link, reason, lied)
        if transfer.zombies:
            self._loop.after(REAP_INTERVAL_NS, lambda: self._reap(transfer))
        elif transfer.over and self._rounds.get(transfer.round) is transfer:
            del self._rounds[transfer.round]
            self._feed(TransferEnded(transfer.round, transfer.tx_bytes, transfer.rx_bytes))

    def _drain(self, transfer: TransferPart, worker: StateWorkerHandle) -> StateLinkEnded | None:
        """Read the last messages of a dead worker, so that units it has verified are not fetched again."""
        last_word = None
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(worker.mailbox, MAILBOX_BYTES_MAX, 1)
            except OSError:
                data, fds = b"", []
            if not data:
                break
            message: Any = unpack(data)
            if isinstance(message, UnitsMoved):
                self._hear(transfer, worker, message, fds)
            elif isinstance(message, StateLinkEnded):
                last_word = message
            for fd in fds:
                os.close(fd)
        worker.mailbox.close()
        return last_word

    def _link_down(self, transfer: TransferPart, link: int, reason: str, lied: bool) -> None:
        """Tell the fetch that a link has ended; it continues without the link."""
        if transfer.fetching is not None and not transfer.over:
            self._tell(DEBUG, f"lost a link to a source of the shared state: {reason}")
            self._perform(transfer, transfer.fetching.link_down(link, reason, monotonic_ns(), lied=lied))

    def _stop(self, transfer: TransferPart) -> None:
        """Begin nothing more, and end all links."""
        transfer.over = True
        for link in [*transfer.diallers, *transfer.workers]:
            self._close(transfer, link, "the transfer is over")

    # ------------------------------------------------------------------------------------------ memory

    def _prepare(self, action: ServeState | FetchState) -> TransferPart:
        own = self.read_manifest(action.manifest, action.nbytes)
        segments = {row.segment: self._shared(row.segment) for row in own.rows if row.segment}
        window = self._descriptor(action.window)
        return TransferPart(action.round, own, StateMemory(own, segments, window, self._identity().stall_ns))

    def _shared(self, segment: int) -> tuple[int, int]:
        shared = self._descriptor(segment)
        if shared is None:
            raise ValueError(f"segment {segment} was not shared")
        return shared

    def _later(self, event: Any) -> None:
        self._loop.after(0, lambda: self._feed(event))


def _take_socket(connection: Connection) -> socket.socket | None:
    """Return the socket of a connection that is between two messages; otherwise close it and return None."""
    sock = connection.detach()
    if sock is not None and not connection.is_idle():
        sock.close()
        return None
    return sock

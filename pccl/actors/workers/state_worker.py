"""The workers of a transfer: one process for one connection, which reads or writes the tensors of a state.

A *serving* worker (`pccl-serve-3`) answers the unit requests of the other side, until it is killed or the connection
ends. A *fetching* worker (`pccl-fetch-3`) asks for the units that its actor orders, reads them directly into the
tensor, compares each digest block with its digest while it is still in the cache, and reports. Both serve one
connection, and inherit everything they need by the fork. They do not trust the other side: requests are checked against
the manifest, answers against the request. The first mismatch ends the connection, with the reason. Both own a
`StateLink`, which holds what they have in common.

A system call moves megabytes, so Python is fast enough here.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque

from pccl._core.kernels.digest import DIGEST_BYTES, STATE_BLOCK_BYTES, block_digests
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import FetchManifest, FetchUnits, ManifestFetched, StateLinkEnded, UnitsMoved
from pccl._core.protocol.state_manifest import run_bytes
from pccl._core.protocol.state_stream import (
    ANSWER,
    ASK_MANIFEST,
    REQUEST,
    StateLinkError,
    Wanted,
    check_answer,
    pack_answer,
    pack_request,
    unpack_orders,
    unpack_request,
)
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io.fault_points import planned
from pccl.actors.io.fork import LAST_WORDS_MS, MAILBOX_BYTES_MAX
from pccl.actors.io.ready import wait_writable
from pccl.actors.io.tcp import MORE_FOLLOWS
from pccl.memory.segments import Segment
from pccl.memory.window import WindowError

from .lane_worker import suit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from pccl._core.protocol.state_manifest import StateManifest
    from pccl._core.protocol.state_stream import UnitRequest

    from .state_memory import StateMemory

LOOK_MS = 500  # between two checks of the clock while a connection is silent
REPORT_BYTES = 1 << 20  # moved and not yet reported; small units are reported together
REQUEST_BYTES_MAX = 1 << 14  # read at once: more than the open requests of a correct peer


class StateLink:
    """What both kinds of worker own: the mailbox to the actor, the connection, and the counts to report."""

    def __init__(self, kind: str, mailbox: socket.socket, connection: socket.socket, stall_ns: int) -> None:
        """`kind` is part of the names of fault points; `stall_ns` bounds how long no byte may move."""
        self._kind = kind
        self.mailbox = mailbox
        self.connection = connection
        self._stall_ns = stall_ns
        self._moved_ns = monotonic_ns()  # when the last byte moved
        self._units = 0  # moved, not yet reported
        self.unreported = 0  # bytes of these units
        self._fault = planned()
        mailbox.setblocking(False)
        connection.setblocking(False)

    def run(self, work: Callable[[], None]) -> None:
        """Work until the connection or the actor ends, then tell the actor why the connection ended."""
        try:
            work()
            return
        except StateLinkError as error:
            last_word = StateLinkEnded(True, str(error))
        except (WindowError, EOFError) as error:
            last_word = StateLinkEnded(False, str(error))
        except OSError as error:
            last_word = StateLinkEnded(False, os.strerror(error.errno or 0))
        self.report()
        wait_writable(self.mailbox, LAST_WORDS_MS)
        self.mail(last_word)

    def visit(self, what: str) -> None:
        """Visit a fault point."""
        if self._fault is not None:
            self._fault.visit(f"state.{self._kind}.{what}")

    def has_moved(self) -> None:
        """Restart the stall time, because a byte moved or no answer is open."""
        self._moved_ns = monotonic_ns()

    def check_stall(self) -> None:
        """Raise EOFError if no byte has moved for too long."""
        if monotonic_ns() - self._moved_ns > self._stall_ns:
            raise EOFError(f"no byte moved for {self._stall_ns / 1e9:g} s (stall_timeout)")

    def count(self, nbytes: int) -> None:
        """Count one more unit, of that size, as moved."""
        self._units += 1
        self.unreported += nbytes

    def report(self) -> None:
        """Tell the actor what has moved; if its mailbox is full, the next report includes it."""
        if self._units and self.mail(UnitsMoved(self._units, self.unreported)):
            self._units = self.unreported = 0

    def mail(self, message: object, fds: tuple[int, ...] = ()) -> bool:
        """Send to the actor. False if its mailbox is full, or if the actor is dead, which ends this process anyway."""
        try:
            socket.send_fds(self.mailbox, [pack(message)], list(fds))
        except OSError:
            return False
        return True


class ServeWorker:
    """Answers requests from one peer, in order."""

    def __init__(
        self,
        mailbox: socket.socket,
        connection: socket.socket,
        own: StateManifest,
        memory: StateMemory,
        stall_ns: int,
        *,
        manifest: bytes,
        lanes: int,
    ) -> None:
        self._link = StateLink("serve", mailbox, connection, stall_ns)
        self._own = own
        self._memory = memory
        self._manifest = manifest
        suit(connection, lanes)

    def serve(self) -> None:
        """Work until the connection or the actor ends."""
        self._link.run(self._work)

    def _work(self) -> None:
        unread = b""
        while True:
            whole = len(unread) - len(unread) % REQUEST.size
            for begin in range(0, whole, REQUEST.size):
                is_last = begin + REQUEST.size == whole
                self._answer(unpack_request(unread[begin : begin + REQUEST.size], self._own), is_last=is_last)
            self._link.report()  # what did not fit into the mailbox
            if not self._await_request():
                return
            unread = unread[whole:] + self._read()

    def _await_request(self) -> bool:
        """Sleep until a request comes; False if the actor ended. No timeout here: the round has its own bound."""
        poll = select.poll()
        poll.register(self._link.connection, select.POLLIN)
        poll.register(self._link.mailbox, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        # The actor sends nothing to a serving worker, so a readable mailbox means that the actor has ended.
        return self._link.mailbox.fileno() not in ready

    def _read(self) -> bytes:
        try:
            data = self._link.connection.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return b""
        if not data:
            raise EOFError("closed by the other side")
        return data

    def _answer(self, request: UnitRequest, *, is_last: bool) -> None:
        """Send what is asked for. Count it first: after its last byte the round, and this process, may end."""
        self._link.has_moved()
        self._link.visit("answer")
        if request == ASK_MANIFEST:
            self._send(pack_answer(request, len(self._manifest)), MORE_FOLLOWS)
            self._send(self._manifest)
            return
        nbytes = run_bytes(self._own.rows[request.key].nbytes, request.first, request.count)
        self._link.count(nbytes)
        if is_last or self._link.unreported >= REPORT_BYTES:
            self._link.report()
        self._send(pack_answer(request, nbytes), MORE_FOLLOWS)
        for piece in self._memory.read(request.key, request.first * STATE_BLOCK_BYTES, nbytes):
            self._send(piece)

    def _send(self, data: bytes | memoryview, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = self._link.connection.send(view, flags)
            except BlockingIOError:
                self._link.check_stall()
                wait_writable(self._link.connection, LOOK_MS)
            else:
                view = view[sent:]
                self._link.has_moved()


class FetchWorker:
    """Asks one source for what the actor orders."""

    def __init__(
        self,
        mailbox: socket.socket,
        connection: socket.socket,
        own: StateManifest,
        memory: StateMemory,
        stall_ns: int,
        *,
        manifest_bytes: int,
    ) -> None:
        self._link = StateLink("fetch", mailbox, connection, stall_ns)
        self._own = own
        self._memory = memory
        self._manifest_bytes = manifest_bytes  # of a manifest with our schema: the source's must have the same size
        self._wanted: deque[Wanted] = deque()  # asked for, in the order in which the answers come
        self._unsent = b""  # requests
        self._header = bytearray(ANSWER.size)
        self._manifest: Segment | None = None  # that is being read
        # The memory that is being filled, its address, and how many bytes of it are filled and compared.
        self._spaces: Iterator[tuple[memoryview, int]] | None = None  # None: a header
        self._space = memoryview(self._header)
        self._address = self._filled = self._compared = 0
        self._digests = b""  # of the blocks that are still to come

    def serve(self) -> None:
        """Work until the connection or the actor ends."""
        self._link.run(self._work)

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._link.mailbox, select.POLLIN)
        poll.register(self._link.connection, select.POLLIN)
        while True:
            self._link.report()
            poll.modify(self._link.connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = dict(poll.poll(LOOK_MS))
            if self._link.mailbox.fileno() in ready and not self._read_mailbox():
                return
            if self._unsent:
                self._ask()
            if ready.get(self._link.connection.fileno(), 0) & ~select.POLLOUT:
                self._receive()
            if self._wanted:
                self._link.check_stall()
            else:
                self._link.has_moved()  # no answer is open

    # ------------------------------------------------------------------------------------------ orders

    def _read_mailbox(self) -> bool:
        """Take all orders that have arrived. False if the mailbox is closed."""
        while True:
            try:
                data = self._link.mailbox.recv(MAILBOX_BYTES_MAX)
            except BlockingIOError:
                return True
            if not data:
                return False
            message: Any = unpack(data)
            self._link.visit(type(message).__name__)
            if isinstance(message, FetchManifest):
                self._want(Wanted(ASK_MANIFEST, self._manifest_bytes, b""))
            elif isinstance(message, FetchUnits):
                for wanted in unpack_orders(message.units, self._own):
                    self._want(wanted)

    def _want(self, wanted: Wanted) -> None:
        if not self._wanted:
            self._link.has_moved()  # an answer is open from now on
        self._wanted.append(wanted)
        self._unsent += pack_request(wanted.request)

    def _ask(self) -> None:
        try:
            self._unsent = self._unsent[self._link.connection.send(self._unsent) :]
        except BlockingIOError:
            pass

    # ------------------------------------------------------------------------------------------ answers

    def _receive(self) -> None:
        """Read what has arrived, but return after REPORT_BYTES, so that the mailbox is read too."""
        while True:
            try:
                count = self._link.connection.recv_into(self._space[self._filled :])
            except BlockingIOError:
                return
            if not count:
                raise EOFError("closed by the other side")
            self._link.has_moved()
            self._filled += count
            self._compare()
            if self._filled == len(self._space):
                self._turn_page()
                if self._link.unreported >= REPORT_BYTES:
                    return

    def _turn_page(self) -> None:
        """Go on to the next part of the answer, or to the next answer, because the memory is full."""
        if self._spaces is None:
            self._spaces = self._open_answer()
        space = next(self._spaces, None)
        if space is not None:
            self._space, self._address = space
        else:
            self._close_answer()
            self._space, self._spaces = memoryview(self._header), None
        self._filled = self._compared = 0
        self._link.has_moved()  # the window may have been slow, and the source is not at fault for that

    def _open_answer(self) -> Iterator[tuple[memoryview, int]]:
        if not self._wanted:
            raise StateLinkError("it sent an answer without a request")
        wanted = self._wanted[0]
        check_answer(bytes(self._header), wanted.request, wanted.nbytes)
        self._digests = wanted.digests
        if wanted.request == ASK_MANIFEST:
            self._manifest = Segment.create("pccl-manifest", wanted.nbytes)
            return iter([(self._manifest.view, 0)])
        return self._memory.write(wanted.request.key, wanted.request.first * STATE_BLOCK_BYTES, wanted.nbytes)

    def _close_answer(self) -> None:
        wanted = self._wanted.popleft()
        if self._manifest is not None:
            self._link.visit("manifest")
            if not self._link.mail(ManifestFetched(wanted.nbytes), (self._manifest.fd,)):
                raise EOFError("the peer actor does not read its mailbox")
            self._manifest.close()
            self._manifest = None
            return
        self._link.visit("unit")
        self._link.count(wanted.nbytes)

    def _compare(self) -> None:
        """Compare the complete blocks with their digests. Raises StateLinkError if one differs."""
        if not self._digests:
            return
        whole = self._filled
        if whole < len(self._space):
            whole -= whole % STATE_BLOCK_BYTES
        if whole > self._compared:
            found = block_digests(self._address + self._compared, whole - self._compared, 1)
            if found != self._digests[: len(found)]:
                request = self._wanted[0].request
                where = f"block {request.first + request.count - len(self._digests) // DIGEST_BYTES} or a later one"
                raise StateLinkError(f"{self._own.rows[request.key].name!r}: {where} is not what its manifest says")
            self._digests = self._digests[len(found) :]
            self._compared = whole

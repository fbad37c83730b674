"""A lane's worker process: one mailbox, one connection, one loop.

A sender serves the connection to the next peer, a receiver the one from the previous peer. `sender` and `receiver` have
the loops, which move blocks without the GIL; this module handles the events for which they return. A worker gets its
connection and the segments of tensors as descriptors. It tells the actor when the connection breaks, and closes it on
order. A segment is mapped when the first block needs it, so lanes that never work do not map it.
"""

from __future__ import annotations

import os
import socket

from pccl._core.dataplane.inflight import FAR_ROUND_TRIP_US
from pccl._core.dataplane.lane import LANE_ENDED, LANE_FAULT, LANE_HOST_FRAME, LANE_UNMAPPED
from pccl._core.dataplane.receiver import Receiver
from pccl._core.dataplane.sender import Sender
from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import Attach, Detach, LinkEnded, MapSegment, UnmapSegment
from pccl.actors.io import tcp
from pccl.actors.io.fault_points import planned
from pccl.actors.io.fork import MAILBOX_BYTES_MAX
from pccl.actors.io.ready import wait_readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pccl._core.dataplane.board import Board

MAP_TIMEOUT_MS = 5000  # a segment is announced before any block in it; the message takes less than this
LOCAL_CONGESTION = (b"cubic", b"reno")  # algorithms with pacing halve the throughput of a local link
UNSENT_BYTES_MAX = 1 << 20  # in the kernel and not in flight: no other lane can take what waits there
UNSENT_BYTES_FAR = 1 << 18  # the same for a link of long round trips: one block
LANES_WIDE_MAX = 2  # pools up to this size are limited by the bytes that may be in flight
HOST_BUFFER_BYTES = 1 << 18  # the kernel doubles it: two blocks in flight


class LaneWorker:
    """Serves one connection at a time, and its mailbox."""

    def __init__(
        self,
        board: Board,
        mailbox: socket.socket,
        bell: int,
        sends: bool,
        index: int,
        *,
        segments: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Serve lane `index`; `segments`, by number, are the descriptors inherited from the actor, and their sizes."""
        self._board = board
        self._mailbox = mailbox
        mailbox.setblocking(False)
        self._sends = sends
        self._lane: Sender | Receiver = (Sender if sends else Receiver)(board, index, sends, mailbox.fileno(), bell)
        self._segments = dict(segments or {})  # number -> descriptor and size, whether mapped or not
        self._link = 0
        self._connection: socket.socket | None = None
        self._fault = planned()
        self._point = f"lane.{'send' if sends else 'receive'}.frame"
        if self._fault is not None and self._fault.point == self._point:
            self._lane.frames_until_fault = self._fault.visits_left

    def serve(self) -> None:
        """Serve until the mailbox closes, at the latest when the actor ends."""
        while True:
            code = self._lane.serve()
            if code == LANE_ENDED:
                self._report(self._lane.problem)
            elif code == LANE_UNMAPPED:
                self._map(self._lane.wanted)
            elif code == LANE_HOST_FRAME:
                assert isinstance(self._lane, Receiver)
                self._lane.answer_host_frame()
            elif code == LANE_FAULT:
                assert self._fault is not None
                self._fault.visits_left = 1
                self._fault.visit(self._point)
            elif not self._read_mailbox():
                return

    def _read_mailbox(self) -> bool:
        """Take all messages that have arrived. False if the mailbox is closed.

        The actor calls for each message, but two calls may become one. A message that is left in the mailbox would wait
        until this worker is idle.
        """
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._mailbox, MAILBOX_BYTES_MAX, 1)
            except BlockingIOError:
                return True
            if not data:
                return False
            message = unpack(data)
            if self._fault is not None:
                self._fault.visit(f"lane.{type(message).__name__}")
            self._obey(message, fds)

    def _obey(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, Attach):
            self._close()
            self._link = message.link
            self._connection = socket.socket(fileno=fds[0])
            self._connection.setblocking(False)
            if self._sends:
                suit(self._connection, self._board.lanes)
            known = tcp.whereabouts(self._connection, self._sends)
            self._lane.attach(fds[0], whereabouts=known, host_read=message.host_read)
        elif isinstance(message, Detach):
            if message.link == self._link:
                self._close()
        elif isinstance(message, MapSegment):
            self._segments[message.segment] = fds[0], message.nbytes
        elif isinstance(message, UnmapSegment):
            fd, _ = self._segments.pop(message.segment, (-1, 0))
            if isinstance(self._lane, Sender):
                self._lane.withdraw(message.segment)
            self._lane.segments.remove(message.segment)
            if fd >= 0:
                os.close(fd)

    def _map(self, segment: int) -> None:
        """Map a segment that a block needs. Its announcement may still be in the mailbox."""
        while segment not in self._segments:
            if not wait_readable(self._mailbox, MAP_TIMEOUT_MS) or not self._read_mailbox():
                raise RuntimeError(f"segment {segment} was never announced")
        fd, nbytes = self._segments[segment]
        self._lane.segments.add(segment, fd, nbytes)

    def _report(self, reason: str) -> None:
        link = self._link
        self._close()
        self._mailbox.send(pack(LinkEnded(link, reason)))

    def _close(self) -> None:
        if self._connection is not None:
            self._lane.detach()
            self._connection.close()
            self._connection = None
        self._link = 0


def suit(connection: socket.socket, lanes: int) -> None:
    """Set the options of a socket to suit its link.

    On every link the backlog in the kernel is limited, because other lanes could send those bytes. A local link gets no
    pacing, which costs half of its throughput. Inside one host there is no delay to fill, and with few bytes in flight
    they are still in the cache when they are read: at 256 MB between two peers 3.0 GB/s were measured with this little
    in flight, and 2.4 with as much as the system allows. A far link gets the smallest backlog, because its slowest lane
    takes long to send it, and all peers wait for that at the end. Its throughput depends on the bytes that may be in
    flight: at 1 Gbit/s and 100 ms a pool of 1 reduces 256 MiB in 3.9 s with a wide buffer and in 7.2 s without. Many
    lanes together have enough in flight, and wide buffers only make them lose more packets: a pool of 8 takes 3.0 s
    with them and 2.85 s without.
    """
    far = tcp.round_trip_us(connection) >= FAR_ROUND_TRIP_US
    tcp.limit_unsent(connection, UNSENT_BYTES_FAR if far else UNSENT_BYTES_MAX)
    if tcp.is_within_host(connection):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HOST_BUFFER_BYTES)
    if far and lanes <= LANES_WIDE_MAX:
        tcp.widen_buffer(connection)
    if not far:
        tcp.choose_congestion_control(connection, LOCAL_CONGESTION)

"""A lane worker and its mailbox: it reads commands of the actor however busy the lane is."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import Attach, Detach, LinkEnded, MapSegment, UnmapSegment
from pccl.actors.io import tcp
from pccl.actors.io.listener import bind_peer_port
from pccl.actors.io.tcp import whereabouts
from pccl.actors.workers import lane_worker
from pccl.actors.workers.lane_worker import LaneWorker, suit
from pccl.values import DataType
from tests import has_ipv6
from tests.unit._core.dataplane.loopback import (
    PATIENCE,
    SEND,
    Member,
    connect,
    eventually,
    operation,
    read_frame,
    read_introduction,
)


class Hired:
    """A sender of a member, run in a thread, with the actor's end of its mailbox."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.mailbox, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mailbox.settimeout(PATIENCE)
        self.worker = LaneWorker(member.board, self._theirs, member.sender_bells[0], sends=True, index=0)
        self._thread = threading.Thread(target=self.worker.serve, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, message: object, *fds: int) -> None:
        socket.send_fds(self.mailbox, [pack(message)], list(fds))
        self._member.board.call(True, 0)

    def close(self) -> None:
        self.mailbox.close()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()
        self.worker._close()
        self._theirs.close()
        for fd, _ in self.worker._segments.values():
            os.close(fd)
        del self.worker._lane  # and its epoll with it


@pytest.fixture
def member() -> Iterator[Member]:
    alone = Member()
    alone.memory(SEND, 100)
    yield alone
    alone.close()


@pytest.fixture
def hired(member: Member) -> Iterator[Hired]:
    created = Hired(member)
    yield created
    created.close()


def test_all_mail_is_read_at_once(member: Member, hired: Hired) -> None:
    """Goal: one read takes all messages, because several wake-ups count as one and a busy lane reads only after one."""
    fd, nbytes = member.segments[SEND]
    for segment in (7, 8, 9):
        hired.tell(MapSegment(segment, nbytes), fd)
    hired.tell(UnmapSegment(8))
    assert hired.worker._read_mailbox()
    assert sorted(hired.worker._segments) == [7, 9]
    assert hired.worker._read_mailbox()
    hired.mailbox.close()
    assert not hired.worker._read_mailbox()


def test_a_connection_from_attach_to_detach(member: Member, hired: Hired) -> None:
    hired.start()
    near, far = connect()
    with near, far:
        hired.tell(Attach(5), near.fileno())
        near.close()
        assert read_introduction(far) == whereabouts(far, sends=False)
        # The operation comes first; its memory is announced while the worker waits for it.
        assert member.board.begin(1, operation(4, DataType.UINT8), 0, 2)
        hired.tell(MapSegment(SEND, 100), member.segments[SEND][0])
        assert read_frame(far)[0] == 1
        hired.tell(Detach(4))  # the number of another connection: ignored
        assert member.board.begin(2, operation(4, DataType.UINT8), 0, 2)
        assert read_frame(far)[0] == 2
        hired.tell(Detach(5))
        far.settimeout(PATIENCE)
        assert far.recv(1) == b""


def test_neighbours_know_each_other_by_the_sender_s_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Goal: addresses are not enough: 127.0.0.1 may be a tunnel, and every namespace and machine has its own."""
    (near, tunnel_in), (tunnel_out, far) = connect(), connect()
    (tmp_path / "another").write_text("another machine\n")
    with near, tunnel_in, tunnel_out, far:
        seen = whereabouts(near, sends=True)
        assert seen == whereabouts(tunnel_in, sends=False) != whereabouts(far, sends=False)
        assert whereabouts(tunnel_out, sends=True) == whereabouts(far, sends=False)
        for name in ("MACHINE", "NETWORK"):
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(tcp, name, str(tmp_path / "another"))
                assert len(whereabouts(tunnel_in, sends=False)) == 32
                assert whereabouts(tunnel_in, sends=False) != seen
                elsewhere.setattr(tcp, name, str(tmp_path / "missing"))
                assert whereabouts(tunnel_in, sends=False) == b""
    assert whereabouts(near, sends=True) == b""  # closed


def test_both_ends_see_the_same_whatever_their_sockets_speak() -> None:
    """Goal: a peer listens for IPv4 and IPv6 with one socket, which writes an IPv4 address in another form."""
    for host in ("127.0.0.1", *(["::1"] if has_ipv6() else [])):
        with bind_peer_port(0) as listener:
            near = socket.create_connection((host, listener.getsockname()[1]))
            far, _ = listener.accept()
        with near, far:
            assert whereabouts(near, sends=True) == whereabouts(far, sends=False) != b""
            assert whereabouts(near, sends=False) == whereabouts(far, sends=True) != whereabouts(near, sends=True)


def test_two_addresses_are_two_hosts(member: Member, hired: Hired) -> None:
    """Goal: neither side introduces itself, and a block has its checksum."""
    hired.start()
    with socket.create_server(("127.0.0.2", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
        far, _ = listener.accept()
    with near, far:
        assert whereabouts(near, sends=True) == whereabouts(far, sends=False) == b""
        hired.tell(Attach(5, host_read=True), near.fileno())
        hired.tell(MapSegment(SEND, 100), member.segments[SEND][0])
        assert member.board.begin(1, operation(4, DataType.UINT8), 0, 2)
        assert read_frame(far)[0] == 1  # read_frame checks the checksum
        hired.tell(Detach(5))
        near.close()
        assert far.recv(1) == b""


def test_the_end_of_a_connection_is_reported_with_its_number(hired: Hired) -> None:
    hired.start()
    with ExitStack() as stack:
        for link in (5, 6):
            near, far = (stack.enter_context(end) for end in connect())
            hired.tell(Attach(link), near.fileno())
            near.close()
            eventually(lambda number=link: hired.worker._link == number)
            far.close()
            assert unpack(hired.mailbox.recv(4096)) == LinkEnded(link, "closed by the other side")


def test_a_connection_that_was_reset_before_it_is_served_ends_like_any_other(hired: Hired) -> None:
    """Goal: a neighbour that dies at once ends its connection, not this worker, whose death ends the worker set."""
    hired.start()
    near, far = connect()
    with near:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()  # this resets the connection
        with pytest.raises(OSError, match="not connected"):
            near.getpeername()
        hired.tell(Attach(5, host_read=True), near.fileno())
        ended = unpack(hired.mailbox.recv(4096))
    assert isinstance(ended, LinkEnded)
    assert ended.link == 5


def test_a_local_connection_has_little_in_flight_and_no_pacing() -> None:
    near, far = connect()
    with near, far:
        suit(near, lanes=1)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * lane_worker.HOST_BUFFER_BYTES
        assert near.getsockopt(socket.IPPROTO_TCP, tcp.TCP_NOTSENT_LOWAT) == lane_worker.UNSENT_BYTES_MAX


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_far_connection_has_a_small_backlog(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """Goal: the send buffer is the same for any size of pool, but a small one never gets less than the kernel gives."""
    monkeypatch.setattr(lane_worker, "FAR_ROUND_TRIP_US", 0)  # so that loopback is far
    near, far = connect()
    with near, far:
        suit(near, lanes)
        assert near.getsockopt(socket.IPPROTO_TCP, tcp.TCP_NOTSENT_LOWAT) == lane_worker.UNSENT_BYTES_FAR
        room = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert room == 2 * lane_worker.HOST_BUFFER_BYTES or (lanes == 1 and room > grown_bytes_max())


def grown_bytes_max() -> int:
    """Return the size to which the kernel grows a send buffer by itself."""
    with open("/proc/sys/net/ipv4/tcp_wmem") as file:
        return int(file.read().split()[2])

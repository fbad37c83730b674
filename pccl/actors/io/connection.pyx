# cython: language_level=3, auto_pickle=False
"""A stream socket that carries messages: reads frames, writes frames, and ends exactly once.

The owner gives two callbacks: one for each message, one for the end, with a kind (`closed`, `error`, or what was wrong
with a frame) and a reason for people. A connection that says goodbye (`finish`) sends what is queued, half-closes, and
waits a moment for the other side to close, because closing over unread bytes would destroy the last words on their way.
"""

import errno
import os
import socket
from libc.stdint cimport uint8_t, uint32_t

from pccl._core.protocol.codec cimport decode, encode_behind
from pccl.actors.io.framing cimport FRAME_HEADER_BYTES, FrameReader, FrameWriter, seal
from pccl._core.system cimport posix
from pccl._core.protocol.codec import WIRE_VERSION, WireError
from pccl.actors.io.framing import FrameError
from pccl.options import SEND_QUEUE_BYTES_MAX

from .loop cimport Loop, Watcher

LINGER_NS = 1_000_000_000  # how long last words may take to arrive before the socket is closed over them

cdef uint32_t READABLE = posix.EPOLLIN
cdef uint32_t WRITABLE = posix.EPOLLOUT
cdef uint32_t BROKEN = posix.EPOLLHUP | posix.EPOLLERR


cdef class Connection(Watcher):
    """One socket, its frames, and what happens with them."""

    def __init__(
        self, Loop loop not None, sock, *, number, dict limits, on_message, on_down, bint exact=False,
        bint connecting=False,
    ):
        self.number = number
        self.loop = loop
        self.socket = sock
        self.fd = sock.fileno()
        self.on_message = on_message
        self.on_down = on_down
        self.reader = FrameReader(limits, WIRE_VERSION, exact)
        self.writer = FrameWriter(WIRE_VERSION, SEND_QUEUE_BYTES_MAX)
        self.wants_write = connecting
        loop.watch(self.fd, self, READABLE | WRITABLE if connecting else READABLE)

    @property
    def closed(self):
        """Whether the socket is gone from here."""
        return self.socket is None

    def become(self, dict limits, on_message, on_down):
        """The connection changes its purpose: it has proven itself."""
        self.reader.set_limits(limits)
        self.reader.exact = False
        self.on_message = on_message
        self.on_down = on_down

    cpdef send(self, message):
        """Queue a message and send as much as the socket takes. Failure comes by `on_down`, from the loop."""
        if self.socket is None or self.finishing:
            return
        cdef uint8_t opcode = 0
        cdef bytes built
        try:
            built = encode_behind(message, FRAME_HEADER_BYTES, &opcode)
            seal(built, opcode, self.writer.version)
            self.writer.push_frame(built)
            if not self.wants_write and not self.writer.flush(self.fd):
                self.want_write(True)
        except BufferError:
            self.end_soon(f"{SEND_QUEUE_BYTES_MAX} bytes were sent and not read")
        except OSError as error:
            # The read side of the same socket reports it; what it still has to say is read first.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                self.end_soon(os.strerror(error.errno or 0))

    def end_soon(self, str reason):
        """It ends with an error, but not before the loop has its turn: a sender is not told in the middle of a send."""
        self.loop.after(0, lambda: self.end("error", reason))

    def finish(self, long long linger_ns=LINGER_NS):
        """Send what is queued, say that nothing follows, and close once the other side did, or soon."""
        if self.socket is None or self.finishing:
            return
        self.finishing = True
        self.loop.after(linger_ns, self.close)
        if not self.writer.pending:
            self.half_close()

    cpdef close(self):
        """Close now. No callback follows."""
        sock = self.detach()
        if sock is not None:
            sock.close()

    cpdef detach(self):
        """Give the socket away; nothing is read or written here any more."""
        sock, self.socket = self.socket, None
        if sock is not None:
            self.loop.forget(self.fd)
            self.fd = -1
        return sock

    def is_idle(self):
        """Whether no byte is half read or half written: only then may the socket change hands."""
        return not self.reader.buffered and not self.writer.pending

    cdef int ready(self, uint32_t events) except -1:
        if events & WRITABLE and self.socket is not None:
            self.write()
        if events & (READABLE | BROKEN) and self.socket is not None:
            self.read()
        return 0

    cdef int write(self) except -1:
        try:
            if self.writer.flush(self.fd):
                self.want_write(False)
                if self.finishing:
                    self.half_close()
        except OSError as error:
            self.end("error", os.strerror(error.errno or 0))
        return 0

    cdef int read(self) except -1:
        cdef list messages = self.receive()
        if messages is None or self.finishing:
            return 0
        for message in messages:
            self.on_message(self.number, message)
            if self.socket is None or self.finishing:
                return 0
        if self.reader.fault is not None:
            self.read()  # the frame behind the good ones is bad; the socket itself may never be ready again
        return 0

    cdef list receive(self):
        # What has come, or None if that was the end.
        try:
            return [decode(opcode, body) for opcode, body in self.reader.receive(self.fd)]
        except EOFError as error:
            self.end("closed", str(error))
        except FrameError as error:
            self.end(error.kind, str(error))
        except WireError as error:
            self.end("body", str(error))
        except OSError as error:
            self.end("error", os.strerror(error.errno or 0))
        return None

    cdef int want_write(self, bint wanted) except -1:
        if self.socket is not None and wanted != self.wants_write:
            self.wants_write = wanted
            self.loop.change(self.fd, READABLE | WRITABLE if wanted else READABLE)
        return 0

    cdef int half_close(self) except -1:
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()  # it is already broken: nobody is left to hear the goodbye
        return 0

    cdef int end(self, str kind, str reason) except -1:
        if self.socket is None:
            return 0
        if self.finishing:
            self.close()
        else:
            self.on_down(self.number, kind, reason)
        return 0


def prepare(sock):
    """What every socket of ours has: no waiting in calls, and no Nagle, which costs 40 ms per small message."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_of(address):
    """The address part of a peer name, IPv4 written as such also on a dual-stack socket."""
    host = str(address[0])
    return host[7:] if host.startswith("::ffff:") and "." in host else host.partition("%")[0]

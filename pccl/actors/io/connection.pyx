# cython: language_level=3, auto_pickle=False
"""A stream socket that carries messages: reads frames, writes frames, and ends exactly once.

The owner gives two callbacks: one for each message, one for the end, with a kind (`closed`, `error`, or the field of a
frame that was wrong) and a reason in words. `finish` sends what is queued, half-closes, and waits a moment until the
other side closes, because a close with unread bytes would destroy the last messages on their way.
"""

import errno
import os
import socket
from libc.stdint cimport uint8_t, uint32_t

from pccl._core.protocol.codec cimport decode, encode_behind
from pccl.actors.io.framing cimport FRAME_HEADER_BYTES, FrameReader, FrameWriter, seal
from pccl._core.protocol.codec import PROTOCOL_VERSION, CodecError
from pccl.actors.io.framing import FrameError
from pccl.options import SEND_QUEUE_BYTES_MAX

from .loop cimport BROKEN, READABLE, WRITABLE, Loop, Watcher
from .tcp import MAPPED

LINGER_NS = 1_000_000_000  # how long the last messages may take to arrive before the socket is closed


cdef class Connection(Watcher):
    """One socket, its reader and writer of frames, and the callbacks of its owner."""

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
        self.reader = FrameReader(limits, PROTOCOL_VERSION, exact)
        self.writer = FrameWriter(PROTOCOL_VERSION, SEND_QUEUE_BYTES_MAX)
        self.wants_write = connecting
        loop.watch(self.fd, self, READABLE | WRITABLE if connecting else READABLE)

    @property
    def closed(self):
        """Whether the socket was closed or detached."""
        return self.socket is None

    def become(self, dict limits, on_message, on_down):
        """Change limits and callbacks, because the handshake is finished."""
        self.reader.set_limits(limits)
        self.reader.exact = False
        self.on_message = on_message
        self.on_down = on_down

    cpdef send(self, message):
        """Queue a message and send as much as the socket accepts. A failure is reported later, by `on_down`."""
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
            # The read side of the socket reports it, after the messages that have arrived are read.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                self.end_soon(os.strerror(error.errno or 0))

    def end_soon(self, str reason):
        """Report an error from the loop, so that `on_down` is never called within a `send`."""
        self.loop.after(0, lambda: self.end("error", reason))

    def finish(self, long long linger_ns=LINGER_NS):
        """Send what is queued, half-close, and close when the other side has closed or `linger_ns` have passed."""
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
        """Return the socket; this object does not read or write any more."""
        sock, self.socket = self.socket, None
        if sock is not None:
            self.loop.forget(self.fd)
            self.fd = -1
        return sock

    def is_idle(self):
        """Whether no frame is incomplete in either direction: only then may the socket get another owner."""
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
            self.read()  # the frame after the good ones is bad; the socket itself may never be ready again
        return 0

    cdef list receive(self):
        # The messages that have arrived, or None if the connection has ended.
        try:
            return [decode(opcode, body) for opcode, body in self.reader.receive(self.fd)]
        except EOFError as error:
            self.end("closed", str(error))
        except FrameError as error:
            self.end(error.kind, str(error))
        except CodecError as error:
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
            self.close()  # it is already broken
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
    """Set what every socket needs: non-blocking calls, and no Nagle algorithm, which costs 40 ms per small message."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_of(address):
    """Return the host of a socket address; an IPv4 address has IPv4 form also on a dual-stack socket."""
    host = str(address[0])
    return host.removeprefix(MAPPED) if host.startswith(MAPPED) and "." in host else host.partition("%")[0]

# cython: language_level=3, auto_pickle=False, boundscheck=False, wraparound=False
"""Frames on stream sockets: they separate messages and show that a message arrived undamaged.

This module has the header, the checksum, and the buffers of one connection. `codec` knows what a body means; the
callers decide which message is legal, and what happens after a bad frame.

A frame is a header of 12 bytes, little endian, and a body:

    offset  0       2          3         4              8             12
            magic   version    opcode    body length    checksum      body ...
            u16     u8         u8        u32            u32

The checksum is the CRC-32 of the first 8 header bytes followed by the body. The 16-bit checksum of TCP misses
errors that happen in practice, and all members would act on a flipped bit in a vote.

The reader trusts nothing. Each field is checked as soon as its bytes have arrived, in the order of the stream: magic,
version, opcode, length. The buffer grows only for a header that passed, to exactly the announced frame. So a
pending connection takes 4 KiB, and a member at most the largest frame that is legal for it now. The header is
checked again on every read, so new limits apply to the present frame too. After the first bad frame no later byte
can be trusted, and every further call raises the same error; good frames before it are delivered first.

All socket calls here return at once (MSG_DONTWAIT), so the GIL is kept: to release it and to take it again may cost
far more than the call itself.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from pccl._core.system cimport posix
from pccl._core.system.futex cimport raise_errno

HEADER_BYTES = FRAME_HEADER_BYTES
cdef bytes MAGIC = FRAME_MAGIC.to_bytes(2, "little")

cdef enum:
    ROOM_BYTES = 4096               # the first buffer of a reader: a memory page, some dozens of control messages
    BATCH_FRAMES = 64               # frames that are given to the kernel in one call, at most

cdef uint32_t CRC_POLYNOMIAL = 0xEDB88320   # as in zlib and Ethernet, low bit first


class FrameError(Exception):
    """The other side sent a bad frame. `kind` is the field that was wrong: magic, version, opcode, length, crc."""

    def __init__(self, kind, message):
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self):
        return self.args[1]


# --- checksum -------------------------------------------------------------------------------------------------
#
# Eight bytes per step: table k holds the effect of a byte that is followed by k zero bytes, so the eight
# contributions are independent of each other and only need to be combined.

cdef uint32_t crc_table[8][256]


cdef void fill_crc_table() noexcept nogil:
    cdef uint32_t crc
    cdef int byte, _, table
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (CRC_POLYNOMIAL if crc & 1 else 0)
        crc_table[0][byte] = crc
    for table in range(1, 8):
        for byte in range(256):
            crc = crc_table[table - 1][byte]
            crc_table[table][byte] = (crc >> 8) ^ crc_table[0][crc & 0xFF]


fill_crc_table()


cdef uint32_t crc32(uint32_t crc, const uint8_t *data, size_t length) noexcept nogil:
    cdef uint32_t low, high
    crc = ~crc
    while length >= 8:
        low = load_u32(data) ^ crc
        high = load_u32(data + 4)
        crc = (crc_table[7][low & 0xFF] ^ crc_table[6][(low >> 8) & 0xFF]
               ^ crc_table[5][(low >> 16) & 0xFF] ^ crc_table[4][low >> 24]
               ^ crc_table[3][high & 0xFF] ^ crc_table[2][(high >> 8) & 0xFF]
               ^ crc_table[1][(high >> 16) & 0xFF] ^ crc_table[0][high >> 24])
        data += 8
        length -= 8
    while length > 0:
        crc = (crc >> 8) ^ crc_table[0][(crc ^ data[0]) & 0xFF]
        data += 1
        length -= 1
    return ~crc


# --- header ---------------------------------------------------------------------------------------------------
#
# Written byte by byte, so that it is right for every byte order; compilers make one load or store of it.

cdef inline uint32_t load_u32(const uint8_t *data) noexcept nogil:
    return data[0] | (<uint32_t> data[1] << 8) | (<uint32_t> data[2] << 16) | (<uint32_t> data[3] << 24)


cdef inline void store_u32(uint8_t *data, uint32_t value) noexcept nogil:
    data[0] = value & 0xFF
    data[1] = (value >> 8) & 0xFF
    data[2] = (value >> 16) & 0xFF
    data[3] = value >> 24


cdef inline uint32_t frame_crc(const uint8_t *header, const uint8_t *body, size_t length) noexcept nogil:
    return crc32(crc32(0, header, FRAME_CHECKED_BYTES), body, length)


cpdef bytes frame(uint8_t opcode, bytes body, uint8_t version):
    """Return the bytes of one frame."""
    if body is None:
        raise TypeError("the body of a frame is bytes, not None")
    cdef size_t length = PyBytes_GET_SIZE(body)
    if length > UINT32_MAX:
        raise ValueError(f"a body of {length} bytes does not fit a length field of 32 bits")
    cdef bytes built = PyBytes_FromStringAndSize(NULL, FRAME_HEADER_BYTES + length)
    memcpy(PyBytes_AS_STRING(built) + FRAME_HEADER_BYTES, PyBytes_AS_STRING(body), length)
    seal(built, opcode, version)
    return built


cdef void seal(bytes built, uint8_t opcode, uint8_t version) noexcept:
    cdef uint8_t *data = <uint8_t *> PyBytes_AS_STRING(built)
    cdef size_t length = PyBytes_GET_SIZE(built) - FRAME_HEADER_BYTES
    data[0] = FRAME_MAGIC & 0xFF
    data[1] = FRAME_MAGIC >> 8
    data[2] = version
    data[3] = opcode
    store_u32(data + 4, <uint32_t> length)
    store_u32(data + FRAME_CHECKED_BYTES, frame_crc(data, data + FRAME_HEADER_BYTES, length))


# --- reader ---------------------------------------------------------------------------------------------------

@cython.final
cdef class FrameReader:
    """The receiving half of one connection.

    `limits` maps each opcode that is legal now to its largest body. With `exact`, a read ends at the end of the present
    header or body, so that later bytes stay in the socket for its next owner.
    """

    def __cinit__(self, dict limits not None, uint8_t version, bint exact=False):
        self.version = version
        self.exact = exact
        self.data = <uint8_t *> malloc(ROOM_BYTES)
        if self.data is NULL:
            raise MemoryError()
        self.room = ROOM_BYTES
        self.set_limits(limits)

    def __dealloc__(self):
        free(self.data)

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame that were taken from the socket."""
        return self.held

    @property
    def capacity(self) -> int:
        """Bytes allocated for reading."""
        return self.room

    cpdef set_limits(self, dict limits):
        """Replaces the limits, from the present frame on."""
        cdef int64_t fresh[OPCODES]
        cdef int64_t opcode, length
        for opcode in range(OPCODES):
            fresh[opcode] = -1
        for opcode, length in limits.items():
            if not 0 <= opcode < OPCODES:
                raise ValueError(f"opcode {opcode} does not fit its field of 8 bits")
            if not 0 <= length <= UINT32_MAX:
                raise ValueError(f"the limit {length} of opcode {opcode} does not fit a length field of 32 bits")
            fresh[opcode] = length
        memcpy(self.limits, fresh, sizeof(fresh))

    cpdef list receive(self, int fd):
        """Reads once, without waiting, and returns the frames that are complete now as (opcode, body).

        Raises FrameError for the first bad frame, EOFError when the other side closed, OSError when it was reset.
        """
        cdef list frames = []
        cdef ssize_t count
        self.check_fault()
        count = posix.recv(fd, self.data + self.held, self.appetite(), posix.MSG_DONTWAIT)
        if count > 0:
            self.held += count
            self.parse(frames)
        elif count == 0:
            raise EOFError(f"the other side closed the connection {self.position()}")
        elif posix.errno not in (posix.EAGAIN, posix.EWOULDBLOCK, posix.EINTR):
            raise_errno(posix.errno, f"reading from a peer {self.position()}")
        return frames

    cpdef list feed(self, bytes data):
        """Takes `data` as if it had been read from a socket, in as many reads as necessary."""
        cdef list frames = []
        cdef const uint8_t *source = data
        cdef size_t left = len(data)
        cdef size_t count
        self.check_fault()
        while left > 0 and self.fault is None:
            count = min(left, self.appetite())
            memcpy(self.data + self.held, source, count)
            self.held += count
            source += count
            left -= count
            self.parse(frames)
        return frames

    cdef size_t appetite(self) noexcept nogil:
        # The size of the next read. It is never zero: parse() leaves less than one frame, and room for all of it.
        if not self.exact:
            return self.room - self.held
        if self.held < FRAME_HEADER_BYTES:
            return FRAME_HEADER_BYTES - self.held
        return FRAME_HEADER_BYTES + load_u32(self.data + 4) - self.held

    cdef int parse(self, list frames) except -1:
        # Appends the complete frames, moves the rest to the front, and makes room for the frame that it begins.
        cdef const uint8_t *begin = self.data
        cdef size_t left = self.held
        cdef size_t size = 0
        while True:
            size = self.inspect(begin, left)
            if size == 0 or left < size or not self.intact(begin, size):
                break
            frames.append((begin[3], begin[FRAME_HEADER_BYTES:size]))
            begin += size
            left -= size
        memmove(self.data, begin, left)
        self.held = left
        if self.fault is None:
            if size > self.room:
                self.grow(size)
        elif not frames:
            self.check_fault()
        return 0

    cdef size_t inspect(self, const uint8_t *header, size_t left) except? 0:
        # The size of the frame that begins here; 0 if it is not known yet, or the frame is bad.
        cdef uint32_t length
        if left >= 2 and (header[0] | (<int> header[1] << 8)) != FRAME_MAGIC:
            self.refuse("magic", f"a frame begins with {header[:2]!r} where {MAGIC!r} is expected: "
                                 "the other side does not speak this protocol")
        elif left >= 3 and header[2] != self.version:
            self.refuse("version", f"the other side speaks version {header[2]} of the protocol, "
                                   f"this side version {self.version}: run the same release on both")
        elif left >= 4 and self.limits[header[3]] < 0:
            self.refuse("opcode", f"opcode {header[3]} is not legal here; expected one of {self.legal()}")
        elif left >= 8:
            length = load_u32(header + 4)
            if length > self.limits[header[3]]:
                self.refuse("length", f"opcode {header[3]} announces a body of {length} bytes, "
                                      f"at most {self.limits[header[3]]} are legal here")
            elif left >= FRAME_HEADER_BYTES:
                return FRAME_HEADER_BYTES + <size_t> length
        return 0

    cdef bint intact(self, const uint8_t *header, size_t size) except -1:
        cdef size_t length = size - FRAME_HEADER_BYTES
        cdef uint32_t announced = load_u32(header + FRAME_CHECKED_BYTES)
        cdef uint32_t computed = frame_crc(header, header + FRAME_HEADER_BYTES, length)
        if computed == announced:
            return True
        self.refuse("crc", f"the header of opcode {header[3]} announces checksum {announced:#010x}, but it and its "
                           f"body of {length} bytes give {computed:#010x}: they were damaged on the way")
        return False

    cdef int grow(self, size_t size) except -1:
        cdef uint8_t *grown = <uint8_t *> realloc(self.data, size)
        if grown is NULL:
            raise MemoryError()
        self.data = grown
        self.room = size
        return 0

    cdef int refuse(self, str kind, str message) except -1:
        self.fault = (kind, message)
        return 0

    cdef int check_fault(self) except -1:
        # A new exception each time, because one that is raised again keeps its old tracebacks.
        if self.fault is not None:
            raise FrameError(*self.fault)
        return 0

    cdef list legal(self):
        cdef int opcode
        return [opcode for opcode in range(OPCODES) if self.limits[opcode] >= 0]

    cdef str position(self):
        if self.held == 0:
            return "between two frames"
        if self.held < FRAME_HEADER_BYTES:
            return f"in the middle of a frame, after {self.held} of {HEADER_BYTES} header bytes"
        return (f"in the middle of a frame, after {self.held - FRAME_HEADER_BYTES} of "
                f"{load_u32(self.data + 4)} body bytes of opcode {self.data[3]}")


# --- writer ---------------------------------------------------------------------------------------------------

@cython.final
cdef class FrameWriter:
    """The sending half of one connection: a bounded queue of frames, sent in order as the socket takes them."""

    def __cinit__(self, uint8_t version, size_t queue_bytes_max):
        self.version = version
        self.queue_bytes_max = queue_bytes_max
        self.queue = []

    cpdef push(self, uint8_t opcode, bytes body):
        """Queues one frame. Raises BufferError, and queues nothing, if that would exceed the bound."""
        self.push_frame(frame(opcode, body, self.version))

    cdef int push_frame(self, bytes built) except -1:
        cdef size_t size = PyBytes_GET_SIZE(built)
        if self.pending + size > self.queue_bytes_max:
            raise BufferError(f"a frame of {size} bytes and {self.pending} unsent bytes exceed the bound of "
                              f"{self.queue_bytes_max}: the other side does not read")
        self.queue.append(built)
        self.pending += size
        return 0

    cpdef bint flush(self, int fd) except -1:
        """Sends what the socket accepts without waiting; returns True if nothing is left."""
        cdef ssize_t count
        while self.pending > 0:
            count = self.send_queue(fd)
            if count < 0:
                if -count in (posix.EAGAIN, posix.EWOULDBLOCK, posix.EINTR):
                    return False
                raise_errno(-count, f"sending to a peer, with {self.pending} bytes unsent")
            self.drop(count)
        return True

    cdef ssize_t send_queue(self, int fd) noexcept:
        # One call to the kernel; returns the bytes it took, or minus the error code.
        cdef posix.iovec parts[BATCH_FRAMES]
        cdef posix.msghdr message
        cdef size_t n = min(<size_t> len(self.queue), <size_t> BATCH_FRAMES)
        cdef size_t i
        cdef bytes built
        cdef ssize_t count
        for i in range(n):
            built = <bytes> self.queue[i]
            parts[i].iov_base = PyBytes_AS_STRING(built)
            parts[i].iov_len = PyBytes_GET_SIZE(built)
        parts[0].iov_base = <char *> parts[0].iov_base + self.sent
        parts[0].iov_len -= self.sent
        if n == 1:
            count = posix.send(fd, parts[0].iov_base, parts[0].iov_len, posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT)
        else:
            memset(&message, 0, sizeof(message))
            message.msg_iov = parts
            message.msg_iovlen = n
            count = posix.sendmsg(fd, &message, posix.MSG_NOSIGNAL | posix.MSG_DONTWAIT)
        return count if count >= 0 else -posix.errno

    cdef int drop(self, size_t count) except -1:
        # Removes `count` bytes from the front of the queue.
        cdef Py_ssize_t whole = 0
        cdef size_t size
        self.pending -= count
        count += self.sent
        while whole < len(self.queue):
            size = PyBytes_GET_SIZE(<bytes> self.queue[whole])
            if count < size:
                break
            count -= size
            whole += 1
        del self.queue[:whole]
        self.sent = count
        return 0

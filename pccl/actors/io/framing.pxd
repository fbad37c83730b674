# Contents of `framing`: frames to bytes and back, on descriptors of stream sockets.

from libc.stdint cimport int64_t, uint8_t, uint32_t


cdef enum:
    FRAME_HEADER_BYTES = 12         # magic u16, version u8, opcode u8, length u32, checksum u32
    FRAME_CHECKED_BYTES = 8         # the part of the header that the checksum covers, together with the body
    FRAME_MAGIC = 0x4350            # "PC" in the stream, low byte first
    OPCODES = 256                   # values of one byte


# CRC-32 with the polynomial of zlib; start with 0, and pass the result on to continue.
cdef uint32_t crc32(uint32_t crc, const uint8_t *data, size_t length) noexcept nogil

# Builds one frame in one allocation.
cpdef bytes frame(uint8_t opcode, bytes body, uint8_t version)

# Writes the header of a frame whose body is already there, after room for the header.
cdef void seal(bytes built, uint8_t opcode, uint8_t version) noexcept


cdef class FrameReader:
    # What is legal.
    cdef readonly uint8_t version       # the only version accepted
    cdef public bint exact              # read no byte after the present frame
    cdef int64_t limits[OPCODES]        # largest body per opcode, -1 where the opcode is illegal

    # What was read.
    cdef uint8_t *data                  # begins with the present frame
    cdef size_t held                    # bytes read and not yet delivered
    cdef size_t room                    # bytes allocated
    cdef tuple fault                    # (kind, message) of the bad frame; final once it is set

    cpdef list receive(self, int fd)
    cpdef list feed(self, bytes data)
    cpdef set_limits(self, dict limits)

    # How much a read may take, and how it is parsed.
    cdef size_t appetite(self) noexcept nogil
    cdef int parse(self, list frames) except -1
    cdef size_t inspect(self, const uint8_t *header, size_t left) except? 0
    cdef bint intact(self, const uint8_t *header, size_t size) except -1
    cdef int grow(self, size_t size) except -1

    # What went wrong, and where.
    cdef int refuse(self, str kind, str message) except -1
    cdef int check_fault(self) except -1
    cdef list legal(self)
    cdef str position(self)


cdef class FrameWriter:
    cdef readonly uint8_t version           # written into every header
    cdef readonly size_t queue_bytes_max    # bound for a peer that does not read
    cdef readonly size_t pending            # bytes pushed and not yet sent
    cdef list queue                         # frames that are not completely sent, oldest first
    cdef size_t sent                        # bytes of the oldest one that are sent

    cpdef push(self, uint8_t opcode, bytes body)
    cdef int push_frame(self, bytes built) except -1
    cpdef bint flush(self, int fd) except -1

    cdef ssize_t send_queue(self, int fd) noexcept
    cdef int drop(self, size_t count) except -1

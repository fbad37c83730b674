# Every C function, structure and constant of the operating system that the project calls.
#
# Declarations only, all `nogil`; nothing here raises, allocates or decides. Only this folder and loops over bytes
# use what is specific to Linux, never the machines.

from libc.stdint cimport int64_t, uint32_t, uint64_t


# Atomics on memory that several processes map. Stores release, so that a reader finds the payload that was written
# before. Read-modify-write operations are sequentially consistent, because two processes race for the same word there.
# So are loads. A worker enters and then reads the state; an actor changes the state and then reads the count: at least
# one must see the other's write. An acquire load could be executed before the preceding write (not on x86).
cdef extern from * nogil:
    """
    #include <stdint.h>

    static inline uint32_t pccl_load_u32(const uint32_t *word)
    { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

    static inline void pccl_store_u32(uint32_t *word, uint32_t value)
    { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

    static inline uint32_t pccl_exchange_u32(uint32_t *word, uint32_t value)
    { return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST); }

    static inline int pccl_compare_exchange_u32(uint32_t *word, uint32_t expected, uint32_t desired)
    { return __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }

    static inline uint64_t pccl_load_u64(const uint64_t *word)
    { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

    static inline void pccl_store_u64(uint64_t *word, uint64_t value)
    { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

    static inline int pccl_compare_exchange_u64(uint64_t *word, uint64_t expected, uint64_t desired)
    { return __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }

    static inline uint32_t pccl_add_u32(uint32_t *word, uint32_t amount)
    { return __atomic_add_fetch(word, amount, __ATOMIC_SEQ_CST); }

    static inline uint64_t pccl_add_u64(uint64_t *word, uint64_t amount)
    { return __atomic_add_fetch(word, amount, __ATOMIC_SEQ_CST); }

    static inline void pccl_count_u64(uint64_t *word, uint64_t amount)
    { __atomic_fetch_add(word, amount, __ATOMIC_RELAXED); }

    static inline uint64_t pccl_set_bits_u64(uint64_t *word, uint64_t bits)
    { return __atomic_fetch_or(word, bits, __ATOMIC_SEQ_CST); }

    static inline uint64_t pccl_clear_bits_u64(uint64_t *word, uint64_t bits)
    { return __atomic_fetch_and(word, ~bits, __ATOMIC_SEQ_CST); }

    static inline uint64_t pccl_take_u64(uint64_t *word)
    { return __atomic_exchange_n(word, 0, __ATOMIC_SEQ_CST); }

    static inline void pccl_fence(void)
    { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

    static inline int pccl_lowest_bit_u64(uint64_t word)
    { return __builtin_ctzll(word); }
    """
    uint32_t atomic_load_u32 "pccl_load_u32" (const uint32_t *word)
    void atomic_store_u32 "pccl_store_u32" (uint32_t *word, uint32_t value)
    uint32_t atomic_exchange_u32 "pccl_exchange_u32" (uint32_t *word, uint32_t value)
    bint atomic_compare_exchange_u32 "pccl_compare_exchange_u32" (uint32_t *word, uint32_t expected, uint32_t desired)
    uint64_t atomic_load_u64 "pccl_load_u64" (const uint64_t *word)
    void atomic_store_u64 "pccl_store_u64" (uint64_t *word, uint64_t value)
    bint atomic_compare_exchange_u64 "pccl_compare_exchange_u64" (uint64_t *word, uint64_t expected, uint64_t desired)
    uint32_t atomic_add_u32 "pccl_add_u32" (uint32_t *word, uint32_t amount)           # the new value
    uint64_t atomic_add_u64 "pccl_add_u64" (uint64_t *word, uint64_t amount)           # the new value
    void atomic_count_u64 "pccl_count_u64" (uint64_t *word, uint64_t amount)           # relaxed: statistics
    uint64_t atomic_set_bits_u64 "pccl_set_bits_u64" (uint64_t *word, uint64_t bits)       # the old value
    uint64_t atomic_clear_bits_u64 "pccl_clear_bits_u64" (uint64_t *word, uint64_t bits)   # the old value
    uint64_t atomic_take_u64 "pccl_take_u64" (uint64_t *word)                          # the old value; leaves 0
    void fence "pccl_fence" ()
    int lowest_bit_u64 "pccl_lowest_bit_u64" (uint64_t word)                           # undefined for 0


cdef extern from "<errno.h>" nogil:
    int errno
    int EAGAIN                      # a non-blocking call would block; a futex word has changed already
    int EWOULDBLOCK                 # the same as EAGAIN on Linux, another name in POSIX
    int EINTR                       # a signal arrived
    int ENOMEM                      # no memory left
    int ETIMEDOUT                   # a sleep ended by its timeout


cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    struct timespec:
        time_t tv_sec
        long tv_nsec
    ctypedef int clockid_t
    clockid_t CLOCK_MONOTONIC       # one clock for all processes of a host, never set back
    int clock_gettime(clockid_t clock, timespec *now)


cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)
    int ftruncate(int fd, int64_t size)
    int close(int fd)


# Calls for which older C libraries have no wrapper; they are made through syscall().
cdef extern from "<sys/syscall.h>" nogil:
    long SYS_futex
    long SYS_pidfd_open


# The process-private variants of these would not wake a sleeper in another process.
cdef extern from "<linux/futex.h>" nogil:
    int FUTEX_WAIT
    int FUTEX_WAKE


cdef extern from "<sys/mman.h>" nogil:
    int memfd_create(const char *name, unsigned int flags)
    unsigned int MFD_CLOEXEC        # not inherited by a program that is executed
    unsigned int MFD_ALLOW_SEALING
    void *mmap(void *address, size_t length, int protection, int flags, int fd, int64_t offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    void *MAP_FAILED
    int PROT_NONE
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED                  # every process sees what one of them writes, also after a fork
    int MAP_PRIVATE
    int MAP_ANONYMOUS               # no file: zeros
    int MAP_NORESERVE               # it will not be written
    int MAP_FIXED                   # exactly at that address, replacing what is mapped there
    int MAP_POPULATE                # page tables are filled now, not by faults later


cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    int F_ADD_SEALS
    int F_SEAL_SEAL                 # the set of seals is final
    int F_SEAL_SHRINK               # the file never becomes smaller under a mapping
    int F_SEAL_GROW                 # nor larger


cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    int eventfd_write(int fd, uint64_t value)
    int eventfd_read(int fd, uint64_t *value)
    int EFD_CLOEXEC
    int EFD_NONBLOCK


cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int option, ...)
    int PR_SET_NAME                 # what `ps` and `top` show
    int PR_SET_PDEATHSIG            # the signal that is sent when the parent ends


cdef extern from "<sys/socket.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        void *msg_name
        unsigned int msg_namelen
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    struct cmsghdr:
        int cmsg_level
        int cmsg_type
    cmsghdr *CMSG_FIRSTHDR(msghdr *message)
    unsigned char *CMSG_DATA(cmsghdr *header)
    int SCM_RIGHTS                  # the data are descriptors
    int CLOSED_ON_EXEC "MSG_CMSG_CLOEXEC"   # executed programs do not inherit the descriptors that are received
    int MSG_NOSIGNAL                # a closed peer is an error code, not a SIGPIPE
    int MSG_DONTWAIT                # non-blocking, in any mode of the descriptor
    ssize_t recv(int fd, void *buffer, size_t length, int flags)
    ssize_t send(int fd, const void *buffer, size_t length, int flags)
    ssize_t sendmsg(int fd, const msghdr *message, int flags)
    ssize_t recvmsg(int fd, msghdr *message, int flags)
    int getsockopt(int fd, int level, int name, void *value, unsigned int *length)
    int setsockopt(int fd, int level, int name, const void *value, unsigned int length)
    int SOL_SOCKET
    int SO_RCVLOWAT                 # low-water mark: bytes that wake a reader


cdef extern from "<netinet/in.h>" nogil:
    int IPPROTO_TCP


cdef extern from "<linux/tcp.h>" nogil:
    int TCP_INFO
    struct tcp_info:
        uint32_t tcpi_snd_mss
        uint32_t tcpi_unacked           # packets
        uint32_t tcpi_sacked            # of those, packets that have arrived after a lost one
        uint32_t tcpi_rtt               # microseconds, smoothed
        uint32_t tcpi_total_retrans
        uint32_t tcpi_notsent_bytes
        uint32_t tcpi_min_rtt           # of the last minutes
        uint32_t tcpi_data_segs_out     # retransmissions included
        uint32_t tcpi_delivered         # packets that have arrived, in order or not


cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        uint32_t u32
        uint64_t u64
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int operation, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int count, int timeout_ms)
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_DEL
    int EPOLL_CTL_MOD
    uint32_t EPOLLIN
    uint32_t EPOLLOUT
    uint32_t EPOLLRDHUP             # the other side has closed its sending half
    uint32_t EPOLLHUP
    uint32_t EPOLLERR
    uint32_t EPOLLET                # edge-triggered: report once for every change

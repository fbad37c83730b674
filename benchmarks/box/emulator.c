/* The network of a box: takes packets from the TUN device of each host and gives them to another's when it is time.
 *
 * Between two hosts lies a link in each direction. A packet waits in the link's queue until those before it have left,
 * leaves at the link's rate, and arrives a delay later. What finds the queue full is dropped, and so is every packet
 * that chance picks, from a seed. All of that is arithmetic when the packet comes; then it waits in memory for its time
 * of arrival. A link's packets arrive in order, so each link is a list and there is no heap.
 *
 * The kernel hands over up to 64 KiB of one connection at a time, as to a network card that cuts them into packets
 * itself (TSO), and takes them back like that. This is what makes an emulator at gigabits affordable. Still it is
 * packets that queue, overflow and get lost: a train is cut where one of its packets is missing.
 *
 * Commands come on standard input, one to a read, each answered by a line. The end of the input is the end of us. What
 * sets the devices up, and everything about namespaces, is in namespaces.py.
 *
 *     emulator TUN_DESCRIPTOR...
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <netinet/ip.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum {
    HOSTS_MAX = 32,                 /* as in network.py; a step looks at all links */
    BATCH = 64,                     /* packets read from one device before the others have their turn */
    TRAIN_BYTES_MAX = 65536 + 256,  /* what the kernel hands over at once, with all headers */
    COMMAND_BYTES_MAX = 256,
    SECOND = 1000000000
};

struct packet {
    struct packet *next;
    int64_t arrival_ns;
    size_t length;
    char bytes[];                   /* a virtio_net_hdr, then IP */
};

struct link {
    double bytes_per_ns;            /* 0: there is no link */
    int64_t delay_ns;
    int64_t queue_bytes;            /* that may wait; what is leaving just now does not */
    double loss;                    /* probability that a packet is lost */
    uint64_t chance;                /* state of the random numbers */
    int64_t until_loss;             /* packets that get through before the next is lost */
    int64_t free_ns;                /* when all that wait have left */
    struct packet *first, **end;    /* by arrival */
    uint64_t packets, bytes, overflowed, lost;
};

static int hosts;
static int devices[HOSTS_MAX];
static struct link links[HOSTS_MAX][HOSTS_MAX];
static int64_t late_ns_max;         /* the worst delivery behind its time: what the emulator adds to a delay */

static int64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t) SECOND + now.tv_nsec;
}

/* --- Loss -------------------------------------------------------------- */

static double fraction(uint64_t *chance)  /* splitmix64; in (0, 1] */
{
    uint64_t z = *chance += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return ((z ^ z >> 31) >> 11 | 1) * 0x1p-53;
}

static int64_t draw_until_loss(struct link *link)
{
    if (link->loss <= 0)
        return INT64_MAX;
    if (link->loss >= 1)
        return 0;
    double packets = log(fraction(&link->chance)) / log1p(-link->loss);
    return packets < 1e15 ? (int64_t) packets : INT64_MAX;
}

/* --- Trains ------------------------------------------------------------ */

static size_t header_bytes(const char *ip)
{
    const struct iphdr *header = (const struct iphdr *) ip;
    const struct tcphdr *tcp = (const struct tcphdr *) (ip + header->ihl * 4);
    return header->ihl * 4 + tcp->doff * 4;
}

static uint16_t internet_sum(const void *bytes, size_t length)
{
    const uint16_t *words = bytes;
    uint32_t sum = 0;
    for (size_t word = 0; word < length / 2; word++)
        sum += words[word];
    sum = (sum & 0xffff) + (sum >> 16);
    return ~((sum & 0xffff) + (sum >> 16));
}

/* A copy of the packets from `begin` up to `end` of a train of `count`. The sum of TCP is the receiving kernel's
 * business: the header of the train says that nobody has computed it yet. */
static struct packet *cut(const char *train, size_t length, int64_t begin, int64_t end, int64_t count)
{
    const size_t front = sizeof(struct virtio_net_hdr);
    const struct virtio_net_hdr *offload = (const struct virtio_net_hdr *) train;
    size_t headers = front, from = 0, size = length - front;
    if (end - begin < count) {
        size_t segment = offload->gso_size;
        headers += header_bytes(train + front);
        from = begin * segment;
        size = end < count ? (end - begin) * segment : length - headers - from;
    }
    struct packet *packet = malloc(sizeof *packet + headers + size);
    if (packet == NULL)
        return NULL;
    packet->length = headers + size;
    memcpy(packet->bytes, train, headers);
    memcpy(packet->bytes + headers, train + headers + from, size);
    if (end - begin == count)
        return packet;
    struct virtio_net_hdr *own = (struct virtio_net_hdr *) packet->bytes;
    struct iphdr *ip = (struct iphdr *) (packet->bytes + front);
    struct tcphdr *tcp = (struct tcphdr *) (packet->bytes + front + ip->ihl * 4);
    own->hdr_len = headers - front;
    if (end - begin == 1) {
        own->gso_type = VIRTIO_NET_HDR_GSO_NONE;
        own->gso_size = 0;
    }
    ip->tot_len = htons(packet->length - front);
    ip->id = htons(ntohs(ip->id) + begin);
    ip->check = 0;
    ip->check = internet_sum(ip, ip->ihl * 4);
    tcp->seq = htonl(ntohl(tcp->seq) + from);
    if (begin > 0)
        tcp->cwr = 0;
    if (end < count)
        tcp->fin = tcp->psh = 0;
    return packet;
}

/* --- Links ------------------------------------------------------------- */

static double waiting(const struct link *link, int64_t now)
{
    return link->free_ns > now ? (link->free_ns - now) * link->bytes_per_ns : 0;
}

/* Put packets of a train into the queue, as many as it has room for. `each` is the size of one on the wire. */
static void enqueue(struct link *link, const char *train, size_t length, int64_t begin, int64_t end, int64_t count,
                    size_t each, int64_t now)
{
    double before = waiting(link, now);
    int64_t room = before > 0 ? (int64_t) ((link->queue_bytes - before) / each) : end - begin;
    int64_t fitting = room < 0 ? 0 : room < end - begin ? room : end - begin;
    link->overflowed += end - begin - fitting;
    if (fitting == 0)
        return;
    struct packet *packet = cut(train, length, begin, begin + fitting, count);
    if (packet == NULL) {
        link->overflowed += fitting;
        return;
    }
    /* Every packet of the train has its own headers on the wire. */
    size_t bytes = packet->length - sizeof(struct virtio_net_hdr);
    if (fitting > 1)
        bytes += (fitting - 1) * header_bytes(packet->bytes + sizeof(struct virtio_net_hdr));
    link->free_ns = (link->free_ns > now ? link->free_ns : now) + (int64_t) (bytes / link->bytes_per_ns);
    packet->arrival_ns = link->free_ns + link->delay_ns;
    packet->next = NULL;
    *link->end = packet;
    link->end = &packet->next;
    link->packets += fitting;
    link->bytes += bytes;
}

static void forward(int source, const char *train, size_t length, int64_t now)
{
    const struct virtio_net_hdr *offload = (const struct virtio_net_hdr *) train;
    const char *ip = train + sizeof *offload;
    size_t ip_bytes = length - sizeof *offload;
    if (length < sizeof *offload + sizeof(struct iphdr) || ((const struct iphdr *) ip)->version != 4)
        return;
    unsigned target = (ntohl(((const struct iphdr *) ip)->daddr) & 0xff) - 1;  /* host 0 has the address that ends in 1 */
    if (target >= (unsigned) hosts || links[source][target].bytes_per_ns <= 0)
        return;
    struct link *link = &links[source][target];
    int64_t count = 1, begin = 0;
    size_t each = ip_bytes;
    if (offload->gso_type != VIRTIO_NET_HDR_GSO_NONE) {
        size_t headers = header_bytes(ip);
        count = (ip_bytes - headers + offload->gso_size - 1) / offload->gso_size;
        each = headers + offload->gso_size;
    }
    while (begin < count) {
        int64_t end = count - begin < link->until_loss ? count : begin + link->until_loss;
        if (end > begin)
            enqueue(link, train, length, begin, end, count, each, now);
        link->until_loss -= end - begin;
        begin = end;
        if (begin < count) {
            link->lost++;
            begin++;
            link->until_loss = draw_until_loss(link);
        }
    }
}

/* Hand over what is due. Returns when the next packet is, or -1. */
static int64_t deliver(void)
{
    int64_t next = -1;
    for (int source = 0; source < hosts; source++)
        for (int target = 0; target < hosts; target++) {
            struct link *link = &links[source][target];
            struct packet *packet;
            while ((packet = link->first) != NULL) {
                int64_t late = clock_ns() - packet->arrival_ns;
                if (late < 0) {
                    if (next < 0 || packet->arrival_ns < next)
                        next = packet->arrival_ns;
                    break;
                }
                if (late > late_ns_max)
                    late_ns_max = late;
                if ((link->first = packet->next) == NULL)
                    link->end = &link->first;
                /* A host that does not take it loses it, as any host under pressure does. */
                if (write(devices[target], packet->bytes, packet->length) < 0)
                    link->overflowed++;
                free(packet);
            }
        }
    return next;
}

/* --- Commands ---------------------------------------------------------- */

static void print_counters(void)
{
    int64_t now = clock_ns();
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double seconds = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec
                   + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    printf("{\"processor_s\": %.3f, \"late_s_max\": %.6f, \"links\": [", seconds, late_ns_max / 1e9);
    late_ns_max = 0;
    const char *comma = "";
    for (int source = 0; source < hosts; source++)
        for (int target = 0; target < hosts; target++) {
            const struct link *link = &links[source][target];
            if (link->bytes_per_ns > 0) {
                printf("%s[%d, %d, %llu, %llu, %llu, %llu, %.0f]", comma, source, target,
                       (unsigned long long) link->packets, (unsigned long long) link->bytes,
                       (unsigned long long) link->overflowed, (unsigned long long) link->lost, waiting(link, now));
                comma = ", ";
            }
        }
    printf("]}\n");
}

/* Returns 0 at the end of the input. */
static int obey(void)
{
    char command[COMMAND_BYTES_MAX];
    ssize_t length = read(STDIN_FILENO, command, sizeof command - 1);
    if (length <= 0)
        return length < 0 && errno == EINTR;
    command[length] = 0;
    int source, target;
    long long rate_bits, delay_ns, queue_bytes;
    unsigned long long seed;
    double loss;
    if (strcmp(command, "counters\n") == 0) {
        print_counters();
    } else if (sscanf(command, "link %d %d %lld %lld %lld %lf %llu", &source, &target, &rate_bits, &delay_ns,
                      &queue_bytes, &loss, &seed) == 7
               && 0 <= source && source < hosts && 0 <= target && target < hosts) {
        struct link *link = &links[source][target];
        link->bytes_per_ns = rate_bits / 8e9;
        link->delay_ns = delay_ns;
        link->queue_bytes = queue_bytes;
        link->loss = loss;
        link->chance = seed;
        link->until_loss = draw_until_loss(link);
        printf("ok\n");
    } else {
        printf("not understood: %s\n", command);
    }
    return fflush(stdout) == 0;
}

int main(int count, char **arguments)
{
    static char train[TRAIN_BYTES_MAX];
    struct pollfd polled[HOSTS_MAX + 1];
    hosts = count - 1;
    if (hosts < 1 || hosts > HOSTS_MAX)
        return 2;
    for (int host = 0; host < hosts; host++) {
        devices[host] = atoi(arguments[host + 1]);
        fcntl(devices[host], F_SETFL, O_NONBLOCK);
        polled[host] = (struct pollfd) {.fd = devices[host], .events = POLLIN};
        for (int target = 0; target < hosts; target++)
            links[host][target].end = &links[host][target].first;
    }
    polled[hosts] = (struct pollfd) {.fd = STDIN_FILENO, .events = POLLIN};
    /* A network does not wait for a core, nor does it oversleep to save power. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param) {.sched_priority = 1});
    prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
    prctl(PR_SET_NAME, "pccl-box");  /* for ps; we were started by descriptor */
    for (;;) {
        int64_t next = deliver(), left = next < 0 ? SECOND : next - clock_ns();
        struct timespec timeout = {.tv_sec = left < 0 ? 0 : left / SECOND, .tv_nsec = left < 0 ? 0 : left % SECOND};
        if (ppoll(polled, hosts + 1, &timeout, NULL) <= 0)
            continue;
        for (int host = 0; host < hosts; host++) {
            if (polled[host].revents & (POLLERR | POLLNVAL))
                return 1;  /* its device is gone, and polling it would never wait again */
            for (int turn = 0; (polled[host].revents & POLLIN) && turn < BATCH; turn++) {
                ssize_t length = read(devices[host], train, sizeof train);
                if (length <= 0)
                    break;
                forward(host, train, length, clock_ns());
            }
        }
        if (polled[hosts].revents && !obey())
            return 0;
    }
}

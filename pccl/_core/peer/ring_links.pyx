# cython: language_level=3
"""A peer's two edges, to the next and from the previous peer of its ring, and the connections that become their lanes.

An edge is named by the peer on the other side and by the epoch in which the master ordered it. Both ends hold the same
name, so a connection that arrives late, early or twice is recognised.

An order names both neighbours, each with the epoch of its edge. An edge that already matches stays; any other is
dropped and made anew: the next peer is dialled, the previous one is awaited. A lane that arrives before its order waits
for it; one of an older epoch is refused. When both edges are up, the epoch is reported, once.

An edge breaks as a whole: if one lane is lost or one worker dies, the master is told, and decides what comes next.

The table `TRANSITIONS` at the end says what may happen to a lane in which phase; docs/architecture.md shows it.

Part of the peer's machine, which passes on what concerns the ring; pure, and knows nothing of calls.
"""

from pccl._core.protocol.events import DEBUG, Log, Tick
from pccl._core.protocol.handshake import PROOF_BYTES
from pccl._core.protocol.hellos import JoinLane
from pccl._core.protocol.messages import EdgeLost, RingOrder, WireFailed, Wired
from pccl.options import EARLY_LINKS_MAX, LANES_MAX, nanoseconds

from .outbox cimport Outbox
from .events import (
    AnswerLink, AttachLink, Dial, DropLink, EdgeDropped, KillLanes, LinkCame, LinkDown, LinkUp, ProtocolViolationError,
    SendMaster, SpawnLanes,
)

ABSENT = "absent"  # no connection yet
DIALLING = "dialling"  # the actor connects and does the handshake
PAUSED = "paused"  # a dial failed; the next one is due at the deadline
UP = "up"  # a worker serves it

REDIAL_PAUSE_NS = 100_000_000  # a refused lane is dialled again after this: the other side may be about to listen
NO_PROOF = bytes(PROOF_BYTES)  # the actor fills it in during the handshake


cdef class LaneLink:
    """One connection of an edge, from the first dial until it is handed to a worker."""

    def __init__(self, Edge edge, index):
        self.edge = edge
        self.index = index
        self.link = 0
        self.phase = ABSENT
        self.attempts = 0
        self.deadline_ns = 0


cdef class Edge:
    """The edge to the next peer (`sends`) or from the previous one."""

    def __init__(self, sends, peer, epoch, lanes, host="", port=0):
        self.sends = sends
        self.peer = peer
        self.epoch = epoch
        self.host = host
        self.port = port
        self.lanes = [LaneLink(self, index) for index in range(lanes)]

    def is_up(self):
        """Whether a worker serves every lane."""
        cdef LaneLink lane
        for lane in self.lanes:
            if lane.phase is not UP:
                return False
        return True

    def matches(self, peer, epoch, lanes):
        """Whether this is the edge that an order names."""
        return self.peer == peer and self.epoch == epoch and len(self.lanes) == lanes


cdef class RingLinks:
    """The connections between this peer and its neighbours."""

    def __init__(self, Outbox outbox, options):
        self.outbox = outbox
        self.options = options
        self.lanes = 1
        self.id = self.epoch = self.reported = 0
        self.run = b""
        self.order = None
        self.next_edge = self.previous_edge = None
        self.links = {}
        self.early = {}
        self.spawned = 0
        self.next_link = 1

    cdef int _step(self, LaneLink lane, subject, argument) except -1:
        """Take one lane through the table. A handler returns the next phase."""
        entry = steps.get((lane.phase, subject))
        if entry is None:
            raise ProtocolViolationError(f"{subject.__name__} of lane {lane.index} while {lane.phase}")
        handler, next_phases = <tuple> entry
        phase = handler(self, lane, argument)
        if self.options.check:
            assert phase in next_phases, f"{subject.__name__} while {lane.phase} led to {phase}"
        lane.phase = phase
        return 0

    def new_link(self):
        """Return a number for a connection; dialled and accepted ones share one count."""
        link = self.next_link
        self.next_link += 1
        return link

    def join(self, lanes):
        """A membership begins, with a pool of this size."""
        self.lanes = min(max(lanes, 1), LANES_MAX)

    def name(self, peer_id, run):
        """Take this peer's id and the run's name: lanes that came before can now be checked."""
        self.id = peer_id
        self.run = run
        self._sort_early_links()

    # ------------------------------------------------------------------------------------------ orders

    def follow(self, order):
        """Form the ring as ordered."""
        impossible = order.rank >= order.world or (order.world > 1) != (order.next_peer > 0)
        if impossible or order.epoch <= self.epoch or max(order.next_lanes, order.previous_lanes) > self.lanes:
            raise ProtocolViolationError(f"{order!r} at epoch {self.epoch} with {self.lanes} lanes")
        self.epoch = order.epoch
        self.order = order
        if self.next_edge is not None and not self.next_edge.matches(
            order.next_peer, order.next_epoch, order.next_lanes
        ):
            self._drop_edge(self.next_edge)
        if self.previous_edge is not None and not self.previous_edge.matches(
            order.previous_peer, order.previous_epoch, order.previous_lanes
        ):
            self._drop_edge(self.previous_edge)
        if order.next_peer:
            self._build(order)
        self._sort_early_links()
        self._report_if_wired()

    def _build(self, order):
        """Begin the edges that are missing."""
        needed = max(order.next_lanes, order.previous_lanes)
        if needed > self.spawned:
            self.spawned = needed
            self.outbox.actions.append(SpawnLanes(needed))
        if self.next_edge is None:
            self.next_edge = Edge(
                True, order.next_peer, order.next_epoch, order.next_lanes, order.next_host, order.next_port
            )
            for lane in self.next_edge.lanes:
                self._step(lane, RingOrder, order)
        if self.previous_edge is None:
            self.previous_edge = Edge(False, order.previous_peer, order.previous_epoch, order.previous_lanes)

    def _dial(self, LaneLink lane, order):
        edge = lane.edge
        lane.link = self.new_link()
        lane.deadline_ns = self.outbox.now_ns + nanoseconds(self.options.connect_timeout)
        self.links[lane.link] = lane
        hello = JoinLane(NO_PROOF, self.run, edge.epoch, self.id, edge.peer, lane.index)
        self.outbox.actions.append(Dial(lane.link, edge.host, edge.port, hello))
        return DIALLING

    def _report_if_wired(self):
        if self.reported < self.epoch and self._is_wired():
            self.reported = self.epoch
            self.outbox.actions.append(SendMaster(Wired(self.epoch)))

    def _is_wired(self):
        if not self.order.next_peer:
            return True
        return (
            self.next_edge is not None and self.previous_edge is not None
            and self.next_edge.is_up() and self.previous_edge.is_up()
        )

    cpdef bint is_whole(self):
        """Whether the ring is wired as far as this peer knows: it reported its edges, and none broke since."""
        return self.reported == self.epoch and self.next_edge is not None and self.previous_edge is not None

    # ------------------------------------------------------------------------------------------ connections

    def link_came(self, event):
        """Attach a lane that came, keep it until its order comes, or refuse it: the epoch tells which."""
        link, hello = event.link, event.hello
        reason = self._judge(hello)
        if reason is None:
            self._attach_early(link, hello)
        elif reason:
            self.outbox.actions.append(AnswerLink(link, reason))
        elif len(self.early) >= EARLY_LINKS_MAX:
            self.outbox.actions.append(AnswerLink(link, f"{EARLY_LINKS_MAX} lanes already wait for their order"))
        else:
            self.early[link] = (hello, self.outbox.now_ns + nanoseconds(self.options.wire_timeout))

    def _judge(self, hello):
        """Return None if the lane fits now, the reason if it is refused, an empty text if its order may still come."""
        if not self.id:
            return ""  # a neighbour may learn this peer's id from its order before this peer does
        edge = self.previous_edge
        if hello.run != self.run or hello.target != self.id:
            return f"this port belongs to peer {self.id} now, maybe of another run"
        if edge is not None and hello.source == edge.peer and hello.epoch == edge.epoch:
            if hello.lane >= len(edge.lanes) or edge.lanes[hello.lane].phase is not ABSENT:
                return f"lane {hello.lane} of this edge is not free"
            return None
        if hello.epoch > self.epoch or edge is None and self._is_expected(hello):
            return ""
        return f"epoch {hello.epoch} is over: peer {self.id} is at epoch {self.epoch}"

    def _is_expected(self, hello):
        """Whether the lane belongs to the previous edge as ordered: if that broke, the next order tells both sides."""
        order = self.order
        return order is not None and (hello.source, hello.epoch) == (order.previous_peer, order.previous_epoch)

    def _attach_early(self, link, hello):
        self._step(self.previous_edge.lanes[hello.lane], LinkCame, link)
        self._report_if_wired()

    def _welcome(self, LaneLink lane, link):
        lane.link = link
        self.links[link] = lane
        self.outbox.actions.append(AnswerLink(link))
        self.outbox.actions.append(AttachLink(link, False, lane.index))
        return UP

    def _sort_early_links(self):
        """Attach or refuse the lanes that came before the order that decides about them."""
        for link, (hello, _) in list(self.early.items()):
            reason = self._judge(hello)
            if reason != "":
                del self.early[link]
                if reason is None:
                    self._attach_early(link, hello)
                else:
                    self.outbox.actions.append(AnswerLink(link, reason))

    def link_up(self, event):
        """A lane that this peer dialled was welcomed; ignored if the lane was dropped meanwhile."""
        cdef LaneLink lane = self.links.get(event.link)
        if lane is not None:
            self._step(lane, LinkUp, event)
            self._report_if_wired()

    def _attach(self, LaneLink lane, event):
        self.outbox.actions.append(AttachLink(lane.link, True, lane.index))
        return UP

    def link_down(self, event):
        """A connection failed, was refused, or broke."""
        cdef LaneLink lane
        if self.early.pop(event.link, None) is not None:
            return
        lane = self.links.pop(event.link, None)
        if lane is not None:
            lane.link = 0
            self._step(lane, LinkDown, event.reason)

    def _dial_failed(self, LaneLink lane, str reason):
        lane.attempts += 1
        if lane.attempts < self.options.dial_attempts:
            lane.deadline_ns = self.outbox.now_ns + REDIAL_PAUSE_NS
            return PAUSED
        edge = lane.edge
        self._drop_edge(edge)
        where = f"{edge.host}:{edge.port}"
        self.outbox.actions.append(SendMaster(WireFailed(edge.epoch, edge.peer, f"{where}: {reason}")))
        return ABSENT

    def _lose(self, LaneLink lane, str reason):
        self._lose_edge(lane.edge, reason)
        return ABSENT

    def worker_died(self, reason):
        """Drop both edges and all workers, which are not replaced one by one: the next order builds all lanes anew."""
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._lose_edge(edge, reason)
        self.kill_workers()
        self.outbox.actions.append(Log(DEBUG, f"lanes are rebuilt: {reason}"))

    def kill_workers(self):
        """End all workers: they are not needed any more, or new ones are needed."""
        if self.spawned:
            self.spawned = 0
            self.outbox.actions.append(KillLanes())

    def _lose_edge(self, edge, reason):
        """An edge is broken; the master decides what comes next."""
        self._drop_edge(edge)
        source, target = (self.id, edge.peer) if edge.sends else (edge.peer, self.id)
        self.outbox.actions.append(SendMaster(EdgeLost(edge.epoch, source, target, reason)))

    def _drop_edge(self, edge):
        for lane in edge.lanes:
            self._step(lane, EdgeDropped, None)
        if edge is self.next_edge:
            self.next_edge = None
        else:
            self.previous_edge = None

    def _drop(self, LaneLink lane, argument):
        if lane.link:
            del self.links[lane.link]
            self.outbox.actions.append(DropLink(lane.link))
            lane.link = 0
        return ABSENT

    def forget(self):
        """The membership is over, or never began: no edge, no order, no name. Workers stay for the next attempt."""
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._drop_edge(edge)
        for link in self.early:
            self.outbox.actions.append(DropLink(link))
        self.early.clear()
        self.id = self.epoch = self.reported = 0
        self.order = None

    # ------------------------------------------------------------------------------------------ time

    def watch(self):
        """Give up on early lanes and dials whose time is over; dial again after a pause."""
        cdef LaneLink lane
        for link, (hello, deadline_ns) in list(self.early.items()):
            if self.outbox.now_ns >= deadline_ns:
                del self.early[link]
                self.outbox.actions.append(AnswerLink(link, f"no order for epoch {hello.epoch} came"))
        edge = self.next_edge
        if edge is None:
            return
        for lane in edge.lanes:
            if lane.phase is PAUSED or lane.phase is DIALLING:
                self._step(lane, Tick, None)

    def _watch_dial(self, LaneLink lane, argument):
        if self.outbox.now_ns < lane.deadline_ns:
            return DIALLING
        self.outbox.actions.append(DropLink(lane.link))
        del self.links[lane.link]
        lane.link = 0
        return self._dial_failed(lane, f"no answer within {self.options.connect_timeout:g} s")

    def _redial(self, LaneLink lane, argument):
        return PAUSED if self.outbox.now_ns < lane.deadline_ns else self._dial(lane, argument)

    def forgive(self):
        """Begin every deadline anew: this process did not run for a while, and answers may be unread.

        If this happens again and again, the master's own bound on wiring ends it.
        """
        cdef LaneLink lane
        dialled_ns = self.outbox.now_ns + nanoseconds(self.options.connect_timeout)
        arrived_ns = self.outbox.now_ns + nanoseconds(self.options.wire_timeout)
        self.early = {link: (hello, arrived_ns) for link, (hello, _) in self.early.items()}
        if self.next_edge is not None:
            for lane in self.next_edge.lanes:
                if lane.phase is DIALLING:
                    lane.deadline_ns = dialled_ns

    cdef long long soonest(self, long long soonest):
        """Return the earliest of the given time and all deadlines of lanes."""
        cdef LaneLink lane
        if self.next_edge is not None and self.reported < self.epoch:
            for lane in self.next_edge.lanes:
                if lane.phase is PAUSED or lane.phase is DIALLING:
                    soonest = min(soonest, lane.deadline_ns)
        for _, deadline_ns in self.early.values():
            soonest = min(soonest, deadline_ns)
        return soonest

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events."""
        cdef LaneLink lane
        assert self.reported <= self.epoch, f"reported epoch {self.reported}, the latest is {self.epoch}"
        if self.order is None:
            assert not (self.epoch or self.next_edge or self.previous_edge), "edges without an order"
        held = {}
        for edge in (self.next_edge, self.previous_edge):
            if edge is None:
                continue
            assert edge.epoch <= self.epoch, f"edge of epoch {edge.epoch} at epoch {self.epoch}"
            assert len(edge.lanes) <= self.spawned, f"{len(edge.lanes)} lanes for {self.spawned} workers"
            for lane in edge.lanes:
                assert bool(lane.link) == (lane.phase in (DIALLING, UP)), f"lane {lane.index} is {lane.phase}"
                assert edge.sends or lane.phase in (ABSENT, UP), f"a receiving lane is {lane.phase}"
                if lane.link:
                    held[lane.link] = lane
        assert held == self.links, f"links {sorted(self.links)}, but the edges hold {sorted(held)}"
        assert not set(self.early) & set(self.links), "a link both early and attached"
        assert all(self._judge(hello) == "" for hello, _ in self.early.values()), "an early link waits for no order"


# (phase of a lane, event) -> (handler, phases that may follow). A pair that is not here is an error.
TRANSITIONS = {
    (ABSENT, RingOrder): (RingLinks._dial, (DIALLING,)),
    (ABSENT, LinkCame): (RingLinks._welcome, (UP,)),
    (DIALLING, LinkUp): (RingLinks._attach, (UP,)),
    (DIALLING, LinkDown): (RingLinks._dial_failed, (PAUSED, ABSENT)),
    (DIALLING, Tick): (RingLinks._watch_dial, (DIALLING, PAUSED, ABSENT)),
    (PAUSED, Tick): (RingLinks._redial, (PAUSED, DIALLING)),
    (UP, LinkDown): (RingLinks._lose, (ABSENT,)),
    **{(phase, EdgeDropped): (RingLinks._drop, (ABSENT,)) for phase in (ABSENT, DIALLING, PAUSED, UP)},
}
cdef dict steps = TRANSITIONS  # the same, without a look-up by name

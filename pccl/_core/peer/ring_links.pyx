# cython: language_level=3
"""A peer's two edges, to the next and from the previous peer of its ring, and the connections that become their lanes.

An order names both neighbours, each with the epoch of its edge. An edge that already matches stays; any other is dropped
and made anew: the next peer is dialled, the previous one is awaited. A lane that arrives before its order waits for it;
one that belongs to the past is refused. When both edges are up, the epoch is reported, once.

An edge breaks as a whole: one lost lane, or one dead worker, and the master is told; what comes next is its decision.

Part of the peer's machine, which passes on what concerns the ring; pure, and knows nothing of calls.
"""

from pccl._core.protocol.events import DEBUG, Log
from pccl._core.protocol.messages import EdgeLost, JoinLane, WireFailed, Wired
from pccl.options import EARLY_LINKS_MAX, LANES_MAX, nanoseconds

from .edge cimport Edge, Lane
from .events import AnswerLink, AttachLink, Dial, DropLink, KillLanes, SendMaster, SpawnLanes
from .edge import ABSENT, DIALLING, PAUSED, UP

REDIAL_PAUSE_NS = 100_000_000  # a refused lane is dialled again after this: the other side may be about to listen
NO_PROOF = bytes(32)  # the shell fills it in at the door


cdef class RingLinks:
    """What stands between this peer and its neighbours."""

    def __init__(self, options):
        self.options = options
        self.lanes = 1
        self.id = self.epoch = self.reported = 0
        self.run = b""
        self.wire = None
        self.next_edge = self.previous_edge = None
        self.links = {}
        self.early = {}
        self.spawned = 0
        self.next_link = 1
        self.now_ns = 0
        self.actions = []

    cdef begin(self, list actions, long long now_ns):
        """An event is being handled: where its actions go, and when it happened."""
        self.actions = actions
        self.now_ns = now_ns

    def new_link(self):
        """A number for a connection; dialled and accepted ones share one count."""
        link = self.next_link
        self.next_link += 1
        return link

    def join(self, lanes):
        """A membership begins, with a pool of this size."""
        self.lanes = min(max(lanes, 1), LANES_MAX)

    def name(self, peer_id, run):
        """The master's name for this peer and for the run: lanes that came before it can now be told from strangers."""
        self.id = peer_id
        self.run = run
        self._sort_early_links()

    # ------------------------------------------------------------------------------------------ orders

    def order(self, order):
        """Wire the ring as ordered. Returns what is wrong with an order that no honest master would give."""
        impossible = order.rank >= order.world or (order.world > 1) != (order.next_peer > 0)
        if impossible or order.epoch <= self.epoch or max(order.next_lanes, order.previous_lanes) > self.lanes:
            return f"{order!r} at epoch {self.epoch} with {self.lanes} lanes"
        self.epoch = order.epoch
        self.wire = order
        if self.next_edge is not None and not self.next_edge.matches(order.next_peer, order.next_epoch, order.next_lanes):
            self._drop_edge(self.next_edge)
        if self.previous_edge is not None and not self.previous_edge.matches(
            order.previous_peer, order.previous_epoch, order.previous_lanes
        ):
            self._drop_edge(self.previous_edge)
        if order.next_peer:
            self._build(order)
        self._sort_early_links()
        self._report_if_wired()
        return ""

    def _build(self, order):
        """Begin the edges that are missing."""
        needed = max(order.next_lanes, order.previous_lanes)
        if needed > self.spawned:
            self.spawned = needed
            self.actions.append(SpawnLanes(needed))
        if self.next_edge is None:
            self.next_edge = Edge(True, order.next_peer, order.next_epoch, order.next_lanes, order.next_host, order.next_port)
            for lane in self.next_edge.lanes:
                self._dial_lane(lane)
        if self.previous_edge is None:
            self.previous_edge = Edge(False, order.previous_peer, order.previous_epoch, order.previous_lanes)

    cdef _dial_lane(self, Lane lane):
        edge = lane.edge
        lane.link = self.new_link()
        lane.state = DIALLING
        lane.deadline_ns = self.now_ns + nanoseconds(self.options.connect_timeout)
        self.links[lane.link] = lane
        hello = JoinLane(NO_PROOF, self.run, edge.epoch, self.id, edge.peer, lane.index)
        self.actions.append(Dial(lane.link, edge.host, edge.port, hello))

    def _report_if_wired(self):
        if self.reported < self.epoch and self._is_wired():
            self.reported = self.epoch
            self.actions.append(SendMaster(Wired(self.epoch)))

    def _is_wired(self):
        if not self.wire.next_peer:
            return True
        return (
            self.next_edge is not None and self.previous_edge is not None
            and self.next_edge.is_up() and self.previous_edge.is_up()
        )

    cpdef bint is_whole(self):
        """Whether the ring stands as far as this peer knows: it reported, and nothing broke since."""
        return self.reported == self.epoch and self.next_edge is not None and self.previous_edge is not None

    # ------------------------------------------------------------------------------------------ connections

    def link_came(self, link, hello):
        """Ours, early, or history: the epoch tells which."""
        reason = self._judge(hello)
        if reason is None:
            self._attach(link, hello)
        elif reason:
            self.actions.append(AnswerLink(link, reason))
        elif len(self.early) >= EARLY_LINKS_MAX:
            self.actions.append(AnswerLink(link, f"{EARLY_LINKS_MAX} lanes already wait for their order"))
        else:
            self.early[link] = (hello, self.now_ns + nanoseconds(self.options.wire_timeout))

    def _judge(self, hello):
        """None: it fits the ring now. A text: refused, and why. Empty: it may belong to an order still under way."""
        if not self.id:
            return ""  # a neighbour may learn this peer's name from its order before this peer does
        edge = self.previous_edge
        if hello.run != self.run or hello.target != self.id:
            return f"this is peer {self.id} of another run or a later life of this port"
        if edge is not None and hello.source == edge.peer and hello.epoch == edge.epoch:
            if hello.lane >= len(edge.lanes) or edge.lanes[hello.lane].state is not ABSENT:
                return f"lane {hello.lane} of this edge is not free"
            return None
        if hello.epoch > self.epoch or edge is None and self._is_expected(hello):
            return ""
        return f"epoch {hello.epoch} is over: peer {self.id} is at epoch {self.epoch}"

    def _is_expected(self, hello):
        """Whether the lane belongs to the previous edge as ordered: if that broke, the next order tells both sides."""
        return self.wire is not None and (hello.source, hello.epoch) == (self.wire.previous_peer, self.wire.previous_epoch)

    def _attach(self, link, hello):
        cdef Lane lane = self.previous_edge.lanes[hello.lane]
        lane.link = link
        lane.state = UP
        self.links[link] = lane
        self.actions.append(AnswerLink(link))
        self.actions.append(AttachLink(link, False, lane.index))
        self._report_if_wired()

    def _sort_early_links(self):
        """A new order explains some of the lanes that came before it."""
        for link, (hello, _) in list(self.early.items()):
            reason = self._judge(hello)
            if reason != "":
                del self.early[link]
                if reason is None:
                    self._attach(link, hello)
                else:
                    self.actions.append(AnswerLink(link, reason))

    def link_up(self, link):
        """A lane we dialled was welcomed."""
        cdef Lane lane = self.links.get(link)
        if lane is not None and lane.state is DIALLING:  # else: dropped while the welcome was on its way
            lane.state = UP
            self.actions.append(AttachLink(lane.link, True, lane.index))
            self._report_if_wired()

    def link_down(self, link, reason):
        """A connection failed, was refused, or broke."""
        cdef Lane lane
        if self.early.pop(link, None) is not None:
            return
        lane = self.links.pop(link, None)
        if lane is None:
            return
        lane.link = 0
        if lane.state is DIALLING:
            self._dial_failed(lane, reason)
        else:
            self._lose_edge(lane.edge, reason)

    def _dial_failed(self, Lane lane, str reason):
        lane.attempts += 1
        if lane.attempts < self.options.dial_attempts:
            lane.state = PAUSED
            lane.deadline_ns = self.now_ns + REDIAL_PAUSE_NS
            return
        edge = lane.edge
        self._drop_edge(edge)
        where = f"{edge.host}:{edge.port}"
        self.actions.append(SendMaster(WireFailed(edge.epoch, edge.peer, f"{where}: {reason}")))

    def worker_died(self, reason):
        """Workers are not repaired one by one: both edges go, and the next order builds all lanes anew."""
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._lose_edge(edge, reason)
        self.kill_workers()
        self.actions.append(Log(DEBUG, f"lanes are rebuilt: {reason}"))

    def kill_workers(self):
        """The workers are needed no more, or must be new ones."""
        if self.spawned:
            self.spawned = 0
            self.actions.append(KillLanes())

    def _lose_edge(self, edge, reason):
        """An edge is broken; the master decides what comes next."""
        self._drop_edge(edge)
        source, target = (self.id, edge.peer) if edge.sends else (edge.peer, self.id)
        self.actions.append(SendMaster(EdgeLost(edge.epoch, source, target, reason)))

    def _drop_edge(self, edge):
        cdef Lane lane
        for lane in edge.lanes:
            if lane.link:
                del self.links[lane.link]
                self.actions.append(DropLink(lane.link))
                lane.link = 0
            lane.state = ABSENT
        if edge is self.next_edge:
            self.next_edge = None
        else:
            self.previous_edge = None

    def forget(self):
        """The membership is over, or never began: no edge, no order, no name. Workers stay for the next attempt."""
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._drop_edge(edge)
        for link in self.early:
            self.actions.append(DropLink(link))
        self.early.clear()
        self.id = self.epoch = self.reported = 0
        self.wire = None

    # ------------------------------------------------------------------------------------------ time

    def watch(self):
        """Give up on early lanes and dials whose time is over; dial again what was to be dialled again."""
        cdef Lane lane
        for link, (hello, deadline_ns) in list(self.early.items()):
            if self.now_ns >= deadline_ns:
                del self.early[link]
                self.actions.append(AnswerLink(link, f"no order for epoch {hello.epoch} came"))
        edge = self.next_edge
        if edge is None:
            return
        for lane in edge.lanes:
            if self.now_ns < lane.deadline_ns:
                continue
            if lane.state is PAUSED:
                self._dial_lane(lane)
            elif lane.state is DIALLING:
                self.actions.append(DropLink(lane.link))
                del self.links[lane.link]
                lane.link = 0
                self._dial_failed(lane, f"no answer within {self.options.connect_timeout:g} s")

    def forgive(self):
        """This process did not run for a while: answers may lie unread, so whoever is waited for has its time again.

        The master's own bound on wiring ends what would go on like this for ever.
        """
        cdef Lane lane
        dialled_ns = self.now_ns + nanoseconds(self.options.connect_timeout)
        arrived_ns = self.now_ns + nanoseconds(self.options.wire_timeout)
        self.early = {link: (hello, arrived_ns) for link, (hello, _) in self.early.items()}
        if self.next_edge is not None:
            for lane in self.next_edge.lanes:
                if lane.state is DIALLING:
                    lane.deadline_ns = dialled_ns

    cdef long long soonest(self, long long soonest):
        """The earliest of that time and every deadline in here."""
        cdef Lane lane
        if self.next_edge is not None and self.reported < self.epoch:
            for lane in self.next_edge.lanes:
                if lane.state is PAUSED or lane.state is DIALLING:
                    soonest = min(soonest, lane.deadline_ns)
        for _, deadline_ns in self.early.values():
            soonest = min(soonest, deadline_ns)
        return soonest

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events."""
        cdef Lane lane
        assert self.reported <= self.epoch, f"reported epoch {self.reported} of the future"
        assert self.wire is not None or not (self.epoch or self.next_edge or self.previous_edge), "edges without an order"
        held = {}
        for edge in (self.next_edge, self.previous_edge):
            if edge is None:
                continue
            assert edge.epoch <= self.epoch, f"edge of epoch {edge.epoch} at epoch {self.epoch}"
            assert len(edge.lanes) <= self.spawned, f"{len(edge.lanes)} lanes for {self.spawned} workers"
            for lane in edge.lanes:
                assert bool(lane.link) == (lane.state in (DIALLING, UP)), f"lane {lane.index} is {lane.state}"
                assert edge.sends or lane.state in (ABSENT, UP), f"a receiving lane is {lane.state}"
                if lane.link:
                    held[lane.link] = lane
        assert held == self.links, f"links {sorted(self.links)}, but the edges hold {sorted(held)}"
        assert not set(self.early) & set(self.links), "a link both early and attached"
        assert all(self._judge(hello) == "" for hello, _ in self.early.values()), "an early link has nothing to wait for"

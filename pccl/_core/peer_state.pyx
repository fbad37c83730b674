# cython: language_level=3
"""The peer's machine: one membership, from connect() to the end, and the two edges that wire it into its ring.

    NEW ──connect──▶ DIALLING ──▶ JOINING ──accepted──▶ MEMBER ──▶ GONE
                        ▲  └─ retry ─┘ │                  (left, kicked, master lost, training process gone)
                        └──────────────┘

**Calls** of the training process become votes; each carries a number, and an answer to a number that nobody waits for
any more is dropped: so a call that was given up can never be mistaken for the one that came after it.

**Wiring.** An order names the next and the previous peer, each with the epoch of its edge. An edge that already matches
stays; any other is dropped and made anew: the next peer is dialled, the previous one is awaited. A lane that arrives
before its order waits for it; one that belongs to the past is refused. When both edges are up, the epoch is reported.

**Silence** of the master beyond the agreed time ends the membership. A process that was itself stopped heard nobody,
which says nothing about the master; it notices by the gap in its own time.

No socket, clock, process or random source in here.
"""

from collections import deque

from pccl.options import EARLY_LINKS_MAX, LANES_MAX, STORY_EVENTS_MAX, nanoseconds
from pccl.records import record

from .edge cimport Edge, Lane
from .edge import ABSENT, DIALLING as LANE_DIALLING, PAUSED, UP
from .events import (
    DEBUG, NUMBERS, AnswerLink, AppGone, AttachLink, Called, Complete, Dial, DialMaster, DropLink, HangUp, KillLanes,
    LinkCame, LinkDown, LinkUp, Log, MasterDown, MasterSaid, MasterUp, SendMaster, SpawnLanes, Stop, Tell, Tick,
    WorkerDied,
)
from .messages import (
    Accepted, Beat, CallCancel, CallConnect, CallFailed, CallLeave, CallPending, CallTopology, EdgeLost, JoinLane, Kick,
    Leave, Notice, PendingAnswer, Registered, TopologyDone, VotePending, VoteTopology, Wire, WireFailed, Wired, Withdraw,
)

NEW = "new"
DIALLING = "dialling"
JOINING = "joining"
MEMBER = "member"
GONE = "gone"

TOPOLOGY = "update_topology"
PENDING = "are_peers_pending"

SUCCESS = 0
INVALID_USAGE = 4
MASTER_CONNECTION_FAILED = 6

KIND_PLAIN = 0
KIND_KICKED = 1
KIND_MASTER_LOST = 2
KIND_CANCELLED = 3

REDIAL_PAUSE_NS = 100_000_000  # a refused lane is dialled again after this: the other side may be about to listen
NO_PROOF = bytes(32)  # the shell fills it in at the door


@record
class Call:
    """A call of the training process that is under way."""

    slot: int
    sequence: int
    number: int


cdef class PeerState:
    """`handle(event, now_ns) -> actions`, and nothing else changes it."""

    def __init__(self, options, now_ns=0):
        self.options = options
        self.phase = NEW
        self.id = 0
        self.run = b""
        self.lanes = 1
        self.epoch = self.reported = 0
        self.wire = None
        self.next_edge = self.previous_edge = None
        self.links = {}
        self.early = {}
        self.calls = {}
        self.connecting = None
        self.attempts_left = 0
        self.attempt = -1
        self.ending = (INVALID_USAGE, KIND_PLAIN, "not connected: call connect() first")
        self.spawned = 0
        self.story = deque(maxlen=STORY_EVENTS_MAX)
        self.next_call = self.next_link = 1
        self.heard_ns = self.beat_ns = self.ticked_ns = self.now_ns = now_ns
        self.retry_ns = 0
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.checking = options.check
        self.next_deadline_ns = now_ns + self.interval_ns
        self.actions = []

    def new_link(self):
        """A number for a connection; dialled and accepted ones share one count."""
        link = self.next_link
        self.next_link += 1
        return link

    def handle(self, event, long long now_ns):
        """The one way in."""
        self.now_ns = now_ns
        self.actions = actions = []
        kind = type(event)
        if kind is MasterSaid:
            self.heard_ns = now_ns
            subject, argument = type(event.message), event.message
        elif kind is Called:
            subject, argument = type(event.call), event.call
        else:
            subject, argument = kind, event
        handler = TRANSITIONS.get((self.phase, subject))
        if handler is not None:
            handler(self, argument)
        elif kind is MasterSaid:
            self._lose_master(f"the master broke the protocol: {subject.__name__} while {self.phase}")
        elif kind is Called:
            self._complete(argument, *self.ending)
        elif subject not in IGNORED:
            raise TypeError(f"the peer's machine knows no {event!r} while {self.phase}")
        self._set_deadline()
        self.story.append((now_ns, event, actions))
        if self.checking:
            self.check()
        return actions

    # ------------------------------------------------------------------------------------------ joining

    def _on_connect(self, call):
        self.connecting = Call(call.slot, call.sequence, 0)
        self.attempts_left = call.attempts
        self.lanes = min(max(call.lanes, 1), LANES_MAX)
        self._dial_master()

    def _dial_master(self):
        self.phase = DIALLING
        self.attempts_left -= 1
        self.attempt += 1
        self.retry_ns = 0
        self.actions.append(DialMaster(self.attempt))

    def _on_master_up(self, event):
        self.phase = JOINING
        self.heard_ns = self.beat_ns = self.now_ns

    def _on_master_unreached(self, event):
        """An attempt failed, or the master went away before this peer was a member."""
        self._forget_ring()
        self.id = self.epoch = self.reported = 0
        self.wire = None
        if self.attempts_left > 0 and not event.final:
            self.phase = DIALLING
            self.retry_ns = self.now_ns + nanoseconds(self.options.retry_interval)
        else:
            self._end(MASTER_CONNECTION_FAILED, KIND_PLAIN, event.reason)

    def _on_registered(self, message):
        self.id = message.peer
        self.run = message.run
        self.interval_ns = max(message.beat_ms, 1) * 1_000_000
        self.silence_ns = max(message.silence_ms, 2) * 1_000_000

    def _on_accepted(self, message):
        self.phase = MEMBER
        call, self.connecting = self.connecting, None
        self._complete_numbers(call, message)

    # ------------------------------------------------------------------------------------------ calls

    def _on_call_topology(self, call):
        number = self._begin(TOPOLOGY, call)
        if number:
            self.actions.append(SendMaster(VoteTopology(number, call.wanted)))

    def _on_call_pending(self, call):
        number = self._begin(PENDING, call)
        if number:
            self.actions.append(SendMaster(VotePending(number)))

    def _begin(self, str name, call):
        """The number of the vote, or 0 if another thread of this process is already in the same call."""
        if name in self.calls:
            self._complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is already in {name}")
            return 0
        number = self.next_call
        self.next_call = number % 0xFFFFFFFF + 1
        self.calls[name] = Call(call.slot, call.sequence, number)
        return number

    def _on_topology_done(self, message):
        call = self._take(message.call)
        if call is not None:
            self._complete_numbers(call, message)

    def _on_pending_answer(self, message):
        call = self._take(message.call)
        if call is not None:
            self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, b"\1" if message.pending else b"\0"))

    def _on_call_failed(self, message):
        call = self._take(message.call)
        if call is not None:
            self._complete(call, message.result, KIND_PLAIN, message.reason)

    def _take(self, number):
        """The call with this number, no longer under way; None if it was given up."""
        for name, call in self.calls.items():
            if call.number == number:
                del self.calls[name]
                return call
        return None

    def _on_cancel(self, cancel):
        if self.connecting is not None and self.connecting.slot == cancel.slot and self.connecting.sequence == cancel.sequence:
            self._leave("connect() was given up")
            return
        for name, call in list(self.calls.items()):
            if call.slot == cancel.slot and call.sequence == cancel.sequence:
                del self.calls[name]
                self.actions.append(SendMaster(Withdraw(call.number)))
                self._complete(call, INVALID_USAGE, KIND_CANCELLED, "given up by its caller")

    def _complete_numbers(self, call, numbers):
        payload = NUMBERS.pack(
            self.id, numbers.epoch, numbers.global_world, numbers.group_world, numbers.groups, numbers.largest_group
        )
        self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, payload))

    def _complete(self, call, int result, int kind, str text):
        self.actions.append(Complete(call.slot, call.sequence, result, kind, text.encode()))

    # ------------------------------------------------------------------------------------------ the end

    def _end(self, int result, int kind, str text):
        """The membership is over: whoever waits learns why, and so does everyone who calls later."""
        self.phase = GONE
        self.ending = (result, kind, text)
        self._forget_ring()
        if self.spawned:
            self.spawned = 0
            self.actions.append(KillLanes())
        self.actions.append(HangUp())
        calls = list(self.calls.values())
        self.calls.clear()
        if self.connecting is not None:
            calls.append(self.connecting)
            self.connecting = None
        for call in calls:
            self._complete(call, result, kind, text)

    def _lose_master(self, str reason):
        self._end(MASTER_CONNECTION_FAILED, KIND_MASTER_LOST, reason)

    def _on_master_lost(self, event):
        self._lose_master(f"the master is gone: {event.reason}")

    def _on_kick(self, message):
        self._end(message.result, KIND_KICKED, message.reason)

    def _leave(self, str reason):
        if self.phase in (JOINING, MEMBER):
            self.actions.append(SendMaster(Leave(reason)))
        if self.phase != GONE:
            self._end(INVALID_USAGE, KIND_CANCELLED, "this communicator is closed")

    def _on_leave(self, call):
        self._leave("close")
        self._complete(call, SUCCESS, KIND_PLAIN, "")
        self.actions.append(Stop())

    def _on_app_gone(self, event):
        self._leave(event.reason)
        self.actions.append(Stop())

    def _on_notice(self, message):
        self.actions.append(Tell(message.level, message.line))

    def _on_beat(self, message):
        pass  # hearing of it was the point

    # ------------------------------------------------------------------------------------------ wiring

    def _on_wire(self, order):
        if order.epoch <= self.epoch or order.next_lanes > self.lanes or order.previous_lanes > self.lanes:
            self._lose_master(f"the master broke the protocol: {order!r} at epoch {self.epoch} with {self.lanes} lanes")
            return
        self.epoch = order.epoch
        self.wire = order
        if self.next_edge is not None and not self.next_edge.matches(order.next_peer, order.next_epoch, order.next_lanes):
            self._drop_edge(self.next_edge)
        if self.previous_edge is not None and not self.previous_edge.matches(
            order.previous_peer, order.previous_epoch, order.previous_lanes
        ):
            self._drop_edge(self.previous_edge)
        if order.next_peer:
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
        self._sort_early_links()
        self._report_if_wired()

    cdef _dial_lane(self, Lane lane):
        edge = lane.edge
        lane.link = self.new_link()
        lane.state = LANE_DIALLING
        lane.deadline_ns = self.now_ns + nanoseconds(self.options.connect_timeout)
        self.links[lane.link] = lane
        hello = JoinLane(NO_PROOF, self.run, edge.epoch, self.id, edge.peer, lane.index)
        self.actions.append(Dial(lane.link, edge.host, edge.port, hello))

    def _on_link_up(self, event):
        cdef Lane lane = self.links.get(event.link)
        if lane is not None and lane.state is LANE_DIALLING:  # else: dropped while the welcome was on its way
            lane.state = UP
            self.actions.append(AttachLink(lane.link, True, lane.index))
            self._report_if_wired()

    def _on_link_came(self, event):
        """Ours, early, or history: the epoch tells which."""
        hello = event.hello
        reason = self._judge(hello)
        if reason is None:
            self._attach(event.link, hello)
        elif reason:
            self.actions.append(AnswerLink(event.link, reason))
        elif len(self.early) >= EARLY_LINKS_MAX:
            self.actions.append(AnswerLink(event.link, f"{EARLY_LINKS_MAX} lanes already wait for their order"))
        else:
            self.early[event.link] = (hello, self.now_ns + nanoseconds(self.options.wire_timeout))

    def _judge(self, hello):
        """None: it fits the ring now. A text: refused, and why. Empty: it may belong to an order still under way."""
        edge = self.previous_edge
        if hello.run != self.run or hello.target != self.id:
            return f"this is peer {self.id} of another run or a later life of this port"
        if edge is not None and hello.source == edge.peer and hello.epoch == edge.epoch:
            if hello.lane >= len(edge.lanes) or edge.lanes[hello.lane].state is not ABSENT:
                return f"lane {hello.lane} of this edge is not free"
            return None
        if hello.epoch > self.epoch:
            return ""
        return f"epoch {hello.epoch} is over: peer {self.id} is at epoch {self.epoch}"

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

    def _on_link_down(self, event):
        cdef Lane lane
        if self.early.pop(event.link, None) is not None:
            return
        lane = self.links.get(event.link)
        if lane is None:
            return
        if lane.state is LANE_DIALLING:
            self._dial_failed(lane, event.reason)
        else:
            self._lose_edge(lane.edge, event.reason)

    def _dial_failed(self, Lane lane, str reason):
        del self.links[lane.link]
        lane.link = 0
        lane.attempts += 1
        if lane.attempts < self.options.dial_attempts:
            lane.state = PAUSED
            lane.deadline_ns = self.now_ns + REDIAL_PAUSE_NS
            return
        edge = lane.edge
        self._drop_edge(edge)
        where = f"{edge.host}:{edge.port}"
        self.actions.append(SendMaster(WireFailed(self.epoch, edge.peer, f"{where}: {reason}")))

    def _lose_edge(self, edge, str reason):
        """An edge that stood is broken; the master decides what comes next."""
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

    def _forget_ring(self):
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._drop_edge(edge)
        for link in self.early:
            self.actions.append(DropLink(link))
        self.early.clear()

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

    def _on_worker_died(self, event):
        """Workers are not repaired one by one: both edges go, and the next order builds all lanes anew."""
        for edge in (self.next_edge, self.previous_edge):
            if edge is not None:
                self._lose_edge(edge, event.reason)
        self.spawned = 0
        self.actions.append(KillLanes())
        self.actions.append(Log(DEBUG, f"lanes are rebuilt: {event.reason}"))

    # ------------------------------------------------------------------------------------------ time

    def _on_tick(self, event):
        if self.now_ns - self.ticked_ns > self.interval_ns + self.silence_ns // 2:
            self.heard_ns = self.now_ns  # this process was stopped; give the master time to be heard
        self.ticked_ns = self.now_ns
        if self.phase is DIALLING:
            if self.retry_ns and self.now_ns >= self.retry_ns:
                self._dial_master()
            return
        if self.phase is not JOINING and self.phase is not MEMBER:
            return
        if self.now_ns - self.heard_ns >= self.silence_ns:
            reason = f"nothing heard from the master for {self.silence_ns / 1e9:g} s (heartbeat_timeout)"
            if self.phase is MEMBER:
                self._lose_master(reason)
            else:
                self.actions.append(HangUp())
                self._on_master_unreached(MasterDown(reason))
            return
        if self.now_ns - self.beat_ns >= self.interval_ns and self.id:
            self.beat_ns = self.now_ns
            self.actions.append(SendMaster(Beat(self.now_ns)))
        self._watch_lanes()

    def _watch_lanes(self):
        cdef Lane lane
        for link, (hello, deadline_ns) in list(self.early.items()):
            if self.now_ns >= deadline_ns:
                del self.early[link]
                self.actions.append(AnswerLink(link, f"no order for epoch {hello.epoch} came"))
        if self.next_edge is None:
            return
        for lane in list(self.next_edge.lanes):
            if self.next_edge is None:
                return  # an earlier lane of this edge has just failed for good
            if lane.state is PAUSED and self.now_ns >= lane.deadline_ns:
                self._dial_lane(lane)
            elif lane.state is LANE_DIALLING and self.now_ns >= lane.deadline_ns:
                self.actions.append(DropLink(lane.link))
                self._dial_failed(lane, f"no answer within {self.options.connect_timeout:g} s")

    cdef _set_deadline(self):
        cdef Lane lane
        cdef long long soonest = self.ticked_ns + self.interval_ns
        if self.phase is DIALLING and self.retry_ns:
            soonest = min(soonest, self.retry_ns)
        elif self.phase is MEMBER or self.phase is JOINING:
            soonest = min(soonest, self.beat_ns + self.interval_ns, self.heard_ns + self.silence_ns)
            if self.reported < self.epoch:
                if self.next_edge is not None:
                    for lane in self.next_edge.lanes:
                        if lane.state is PAUSED or lane.state is LANE_DIALLING:
                            soonest = min(soonest, lane.deadline_ns)
            for _, deadline_ns in self.early.values():
                soonest = min(soonest, deadline_ns)
        self.next_deadline_ns = soonest

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events; run after every one in all tests."""
        cdef Lane lane
        member = self.phase in (JOINING, MEMBER)
        assert member or not (self.links or self.early or self.next_edge or self.previous_edge), f"lanes while {self.phase}"
        assert self.phase is not MEMBER or self.id, "a member without a name"
        assert self.phase is MEMBER or not self.calls, f"calls {self.calls} while {self.phase}"
        assert (self.connecting is not None) == (self.phase in (DIALLING, JOINING)), f"connect() lost while {self.phase}"
        assert self.reported <= self.epoch, f"reported epoch {self.reported} of the future"
        held = {}
        for edge in (self.next_edge, self.previous_edge):
            if edge is None:
                continue
            assert edge.epoch <= self.epoch, f"edge of epoch {edge.epoch} at epoch {self.epoch}"
            for lane in edge.lanes:
                assert bool(lane.link) == (lane.state in (LANE_DIALLING, UP)), f"lane {lane.index} is {lane.state}"
                assert edge.sends or lane.state in (ABSENT, UP), f"a receiving lane is {lane.state}"
                if lane.link:
                    held[lane.link] = lane
        assert held == self.links, f"links {sorted(self.links)}, but the edges hold {sorted(held)}"
        assert not set(self.early) & set(self.links), "a link both early and attached"
        assert all(hello.epoch > self.epoch for hello, _ in self.early.values()), "an early link of the past"
        numbers = [call.number for call in self.calls.values()]
        assert len(set(numbers)) == len(numbers), f"two calls with one number: {self.calls}"


# What each phase understands. A mailbox call that is not here gets the reason why there is no membership; a message of
# the master that is not here ends the membership; late echoes of what was dropped are in IGNORED.
TRANSITIONS = {
    (NEW, CallConnect): PeerState._on_connect,
    (NEW, CallLeave): PeerState._on_leave,
    (NEW, AppGone): PeerState._on_app_gone,
    (NEW, Tick): PeerState._on_tick,
    (DIALLING, MasterUp): PeerState._on_master_up,
    (DIALLING, MasterDown): PeerState._on_master_unreached,
    (DIALLING, CallCancel): PeerState._on_cancel,
    (DIALLING, CallLeave): PeerState._on_leave,
    (DIALLING, AppGone): PeerState._on_app_gone,
    (DIALLING, Tick): PeerState._on_tick,
    (JOINING, Registered): PeerState._on_registered,
    (JOINING, Wire): PeerState._on_wire,
    (JOINING, Accepted): PeerState._on_accepted,
    (JOINING, Kick): PeerState._on_kick,
    (JOINING, Notice): PeerState._on_notice,
    (JOINING, Beat): PeerState._on_beat,
    (JOINING, MasterDown): PeerState._on_master_unreached,
    (JOINING, LinkCame): PeerState._on_link_came,
    (JOINING, LinkUp): PeerState._on_link_up,
    (JOINING, LinkDown): PeerState._on_link_down,
    (JOINING, WorkerDied): PeerState._on_worker_died,
    (JOINING, CallCancel): PeerState._on_cancel,
    (JOINING, CallLeave): PeerState._on_leave,
    (JOINING, AppGone): PeerState._on_app_gone,
    (JOINING, Tick): PeerState._on_tick,
    (MEMBER, CallTopology): PeerState._on_call_topology,
    (MEMBER, CallPending): PeerState._on_call_pending,
    (MEMBER, CallCancel): PeerState._on_cancel,
    (MEMBER, CallLeave): PeerState._on_leave,
    (MEMBER, TopologyDone): PeerState._on_topology_done,
    (MEMBER, PendingAnswer): PeerState._on_pending_answer,
    (MEMBER, CallFailed): PeerState._on_call_failed,
    (MEMBER, Wire): PeerState._on_wire,
    (MEMBER, Kick): PeerState._on_kick,
    (MEMBER, Notice): PeerState._on_notice,
    (MEMBER, Beat): PeerState._on_beat,
    (MEMBER, MasterDown): PeerState._on_master_lost,
    (MEMBER, LinkCame): PeerState._on_link_came,
    (MEMBER, LinkUp): PeerState._on_link_up,
    (MEMBER, LinkDown): PeerState._on_link_down,
    (MEMBER, WorkerDied): PeerState._on_worker_died,
    (MEMBER, AppGone): PeerState._on_app_gone,
    (MEMBER, Tick): PeerState._on_tick,
    (GONE, CallLeave): PeerState._on_leave,
    (GONE, AppGone): PeerState._on_app_gone,
    (GONE, Tick): PeerState._on_tick,
}

# Echoes of connections and processes that the machine has already let go of.
IGNORED = frozenset({LinkUp, LinkDown, LinkCame, MasterUp, MasterDown, WorkerDied})

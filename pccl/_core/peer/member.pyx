# cython: language_level=3
"""What a member takes part in: its ring, votes, reduces, the shared state, probes; and the rules between them.

Each of them is a part of its own: `ring_links`, `calls`, `reduces`, `syncs`, `passive_rate`. `Member` passes every
event to the part that it concerns, and holds the rules between them. A training process that votes on the topology,
on its optimisation, or on the end of the run, can neither reduce nor synchronise meanwhile, and the other way round;
one that synchronises has no reduce under way. One edge is probed at a time, whenever the master asks: the next order
ends the last probe.

How a membership begins and ends is decided in `peer_state`, which owns the one `Member` of a peer. A message that no
honest master would send raises ProtocolViolationError, and that ends the membership. Pure.
"""

from pccl._core.protocol.events import FINISH, NUMBERS, OPTIMIZE, PENDING, SYNC, TOPOLOGY
from pccl._core.protocol.messages import Beat, Probed, Tried, VoteFinish, VoteOptimize, VotePending, VoteTopology
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_PLAIN, PENDING_ASYNC_OPS, SUCCESS
from pccl.options import LANES_MAX

from .outbox cimport Outbox
from .reduce_machine cimport ReduceMachine
from .ring_links cimport RingLinks
from .sync_machine cimport SyncMachine
from .calls import Calls
from .events import BeginProbe, BeginTrial, Complete, EndProbe, ProtocolViolationError, SendMaster

BYTES_MIN = 4 << 20  # below it, mostly votes and delays are measured
LIMIT_SHARE = 0.9  # share of the receivers' time in the middle of frames from which the edge was the limit


cdef class PassiveRate:
    """What the edge from the previous peer carried since the last heartbeat, as its target saw it.

    The rate is the bytes received, divided by the time in which at least one reduce ran. The edge was the limit if the
    receivers spent nearly all of that time in the middle of frames: then the source always had something to send. A
    receiver that waits for the next frame to begin waits for peers further back in the ring. An aborted reduce tells
    nothing, and neither does one that is too small to tell a rate from the delay. Nor does one that ran at the same
    time as an aborted one: later reduces then share the edge with it, so their rate is too low, but never too high.
    """

    def __init__(self):
        self.reset(0)

    cpdef reset(self, unsigned long long latest):
        """The ring changed, or a reduce was aborted: begin anew. Reduces up to this sequence do not count any more."""
        self.uncounted = latest
        self.running = 0
        self.since_ns = self.busy_ns = 0
        self.received = self.network_ns = self.spent_ns = 0

    cpdef began(self, long long count, long long now_ns):
        """`count` more reduces run."""
        if count and not self.running:
            self.since_ns = now_ns
        self.running += count

    cpdef ended(self, event, long long now_ns):
        """This peer has received everything of a reduce."""
        cdef long long network_ns
        if not self.running or <unsigned long long> event.sequence <= self.uncounted:
            return  # of the time before the last reset
        network_ns = event.network_ns
        self.running -= 1
        self.received += <long long> event.rx_bytes
        self.network_ns += network_ns
        self.spent_ns += network_ns + <long long> event.neighbour_ns + <long long> event.reduce_ns
        if not self.running:
            self.busy_ns += now_ns - self.since_ns

    def take(self):
        """Return the rate and whether the edge was the limit; (0, False) if too little was seen or reduces run."""
        if self.running or self.received < BYTES_MIN or self.busy_ns <= 0:
            return 0, False
        # Python's integers, because a heartbeat's bytes times a second may be more than 64 bits hold.
        rate = (<object> self.received) * 1_000_000_000 // self.busy_ns
        was_limit = self.network_ns >= LIMIT_SHARE * self.spent_ns
        self.reset(self.uncounted)
        return rate, was_limit

cdef class Member:
    """The parts of one membership, and the rules between them."""

    def __init__(self, Outbox outbox, options):
        self.outbox = outbox
        self.ring_links = RingLinks(outbox, options)
        self.calls = Calls(outbox)
        self.reduces = ReduceMachine(outbox, options)
        self.syncs = SyncMachine(outbox, options)
        self.passive_rate = PassiveRate()
        self.probe = None
        self.tx_bytes = self.rx_bytes = 0

    cpdef bint is_busy(self):
        """Whether the training process is in a call, so that the next event will come soon."""
        return len(self.reduces.tags) > 0 or len(self.calls.open) > 0 or self.syncs.sync is not None

    def owes(self, slot, generation):
        """Whether a caller waits for the end of that call."""
        return (
            self.reduces.owes(slot, generation) or self.syncs.owes(slot, generation)
            or any(call.slot == slot and call.generation == generation for call in self.calls.open.values())
        )

    def end(self, int result, int kind, str text):
        """The membership is over: abort what runs, complete what can be completed, drop every link and worker."""
        self.reduces.end(result, kind, text)
        self.syncs.end(result, kind, text)
        self._end_probe()
        self.ring_links.forget()
        self.ring_links.kill_workers()

    def has_drained(self):
        """Whether no worker holds memory of a call."""
        return not self.reduces.tags and self.syncs.sync is None

    # ------------------------------------------------------------------------------------------ calls

    def on_call_topology(self, call):
        """Vote on the topology."""
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, SYNC, OPTIMIZE, FINISH):
            number = self.calls.enter(TOPOLOGY, call)
            if number:
                self.outbox.actions.append(SendMaster(VoteTopology(number, call.wanted)))

    def on_call_optimize(self, call):
        """Vote on an optimisation of the ring."""
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, SYNC, TOPOLOGY, FINISH):
            number = self.calls.enter(OPTIMIZE, call)
            if number:
                self.outbox.actions.append(SendMaster(VoteOptimize(number)))

    def on_call_finish(self, call):
        """Vote that the run is finished."""
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, SYNC, TOPOLOGY, OPTIMIZE):
            number = self.calls.enter(FINISH, call)
            if number:
                self.outbox.actions.append(SendMaster(VoteFinish(number)))

    def on_call_pending(self, call):
        """Ask whether peers wait to be admitted."""
        number = self.calls.enter(PENDING, call)
        if number:
            self.outbox.actions.append(SendMaster(VotePending(number)))

    def on_call_sync(self, call):
        """Vote on the shared state."""
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, TOPOLOGY, OPTIMIZE, FINISH):
            self.syncs.call(call, self.calls.number())

    def on_call_manifest(self, call):
        """The caller has described its shared state."""
        self.syncs.describe(call)

    def on_cancel(self, call):
        """The caller of that slot gave up."""
        self.reduces.cancel(call)
        self.syncs.cancel(call)
        self.calls.cancel(call)

    def _refuse_with_reduces(self, call):
        """Refuse the call if reduces are under way. Return whether it was refused."""
        if self.reduces.tags:
            reason = f"{len(self.reduces.tags)} reduces of this process are under way: wait for them first"
            self.calls.complete(call, PENDING_ASYNC_OPS, KIND_PLAIN, reason)
        return bool(self.reduces.tags)

    def _refuse_beside(self, call, *names):
        """Refuse the call if another thread is in one of these calls. Return whether it was refused."""
        busy = self._busy_in(*names)
        if busy:
            self.calls.complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is in {busy}")
        return bool(busy)

    def _busy_in(self, *names):
        """Return the first of these calls that is under way, or an empty text."""
        for name in names:
            if name in self.calls.open or (name is SYNC and self.syncs.sync is not None):
                return name
        return ""

    def on_topology_done(self, message):
        """The vote on the topology, or on its optimisation, is over."""
        numbers = self.on_world(message)
        call = self.calls.take(message.call)
        if call is not None:
            self.outbox.actions.append(Complete(call.slot, call.generation, SUCCESS, KIND_PLAIN, numbers))

    def on_run_finished(self, message):
        """The run is finished: that is what the caller of finish waited for, if there is one."""
        call = self.calls.take(message.call)
        if call is not None:
            self.calls.complete(call, SUCCESS, KIND_PLAIN, "")

    def on_pending_answer(self, message):
        """Whether peers wait to be admitted."""
        call = self.calls.take(message.call)
        if call is not None:
            payload = b"\1" if message.pending else b"\0"
            self.outbox.actions.append(Complete(call.slot, call.generation, SUCCESS, KIND_PLAIN, payload))

    def on_call_failed(self, message):
        """A vote cannot succeed."""
        call = self.calls.take(message.call)
        if call is not None:
            self.calls.complete(call, message.result, KIND_PLAIN, message.reason)
        else:
            self.syncs.hear(message)

    def on_world(self, message):
        """Keep the numbers of the world, packed, for the collectives that commence from now on, and return them."""
        numbers = self.reduces.numbers = self.syncs.numbers = NUMBERS.pack(
            self.ring_links.id, message.round, message.epoch,
            message.global_world, message.group_world, message.groups, message.largest_group,
        )
        return numbers

    # ------------------------------------------------------------------------------------------ reduces

    def on_call_reduce(self, call):
        """Begin reduces, unless another thread is in a call that forbids it."""
        busy = ""
        if self.calls.open or self.syncs.sync is not None:
            busy = self._busy_in(TOPOLOGY, OPTIMIZE, SYNC, FINISH)
        if busy:
            reason = f"another thread of this process is in {busy}"
            self.reduces.refuse(call.operations, INVALID_USAGE, KIND_PLAIN, reason)
        else:
            self.reduces.call(call.operations)

    def on_call_await(self, call):
        """The caller of a reduce blocks."""
        self.reduces.awaits(call)

    def on_commence(self, message):
        """All members are ready."""
        cdef RingLinks ring_links = self.ring_links
        cdef Py_ssize_t before = len(self.reduces.sequences)
        order = ring_links.order
        if order is None or message.epoch != order.epoch:
            raise ProtocolViolationError(f"Commence at another epoch than {order!r}")
        if ring_links.is_whole():
            self.reduces.commence(message, order)
            self.passive_rate.began(len(self.reduces.sequences) - before, self.outbox.now_ns)
        else:
            self.reduces.commence(message, None)

    def on_abort_reduce(self, message):
        """Another member failed."""
        self.passive_rate.reset(self.reduces.latest)
        self.reduces.abort(message)

    def on_reduce_done(self, message):
        """The success verdict."""
        self.reduces.done(message)

    def on_reduce_failed(self, message):
        """The failure verdict."""
        self.on_world(message)
        self.reduces.failed(message)

    def on_reduce_ended(self, event):
        """This peer's part in a reduce is done."""
        self.reduces.ended(event)
        self.passive_rate.ended(event, self.outbox.now_ns)

    def on_traffic(self, event):
        """How many bytes all lanes have moved."""
        self.tx_bytes, self.rx_bytes = event.tx_bytes, event.rx_bytes

    def beat(self):
        """Send a heartbeat with the traffic counts and the passive rate of the edge from the previous peer."""
        rate, was_limit = self.passive_rate.take()
        order = self.ring_links.order
        seen = (order.previous_peer, rate, was_limit) if rate and order is not None else ()
        self.outbox.actions.append(SendMaster(Beat(self.outbox.now_ns, self.tx_bytes, self.rx_bytes, *seen)))

    # ------------------------------------------------------------------------------------------ measurements

    def on_probe(self, message):
        """Probe the edge to another peer; the last probe ends."""
        if not 1 <= message.lanes <= LANES_MAX or not message.milliseconds or message.target == self.ring_links.id:
            raise ProtocolViolationError(f"a measurement that cannot be made: {message!r}")
        self._end_probe()
        self.probe = message
        self.outbox.actions.append(BeginProbe(
            message.round, message.target, message.lanes, message.milliseconds, message.host, message.port,
        ))

    def on_probe_done(self, event):
        """Send the master what was measured, unless it has ordered another probe since."""
        if self.probe is not None and self.probe.round == event.round:
            report = Probed(event.round, self.probe.target, event.bytes_per_second, event.reason)
            self.probe = None
            self.outbox.actions.append(SendMaster(report))

    def _end_probe(self):
        if self.probe is not None:
            self.outbox.actions.append(EndProbe(self.probe.round))
            self.probe = None

    # ------------------------------------------------------------------------------------------ trials

    def on_try(self, message):
        """Find out whether this peer reaches another one; both may be newcomers."""
        self.outbox.actions.append(BeginTrial(message.target, message.host, message.port, message.instance))

    def on_trial_ended(self, event):
        """Send the master what a trial has shown."""
        self.outbox.actions.append(SendMaster(Tried(event.target, event.reason)))

    # ------------------------------------------------------------------------------------------ shared state

    def on_sync_message(self, message):
        """A message about the sync under way."""
        self.syncs.hear(message)

    def on_transfer_event(self, event):
        """An event of the transfer under way."""
        self.syncs.report(event)

    # ------------------------------------------------------------------------------------------ ring

    def on_ring_order(self, order):
        """The ring changes: what runs is aborted first."""
        self.reduces.abort_all()
        self.passive_rate.reset(self.reduces.latest)
        self.ring_links.follow(order)

    def on_link_came(self, event):
        """A lane arrived at this peer's port."""
        self.ring_links.link_came(event)

    def on_link_up(self, event):
        """A lane that this peer dialled was welcomed."""
        self.ring_links.link_up(event)

    def on_link_down(self, event):
        """A connection failed, was refused, or broke."""
        self.ring_links.link_down(event)

    def on_worker_died(self, event):
        """A worker process ended."""
        self.ring_links.worker_died(event.reason)

    # ------------------------------------------------------------------------------------------ invariants

    def check(self, bint member):
        """Invariants between two events; `member`: the membership goes on."""
        self.ring_links.check()
        self.calls.check()
        self.reduces.check(member)
        self.syncs.check(member)
        busy = not self.has_drained()
        votes = sum(name in self.calls.open for name in (TOPOLOGY, OPTIMIZE, FINISH))
        assert not votes or not busy, "a vote on the topology with reduces or a sync under way"
        assert votes < 2, f"in two calls of the whole run at once: {set(self.calls.open)}"
        assert not self.reduces.tags or self.syncs.sync is None, "a sync beside reduces"
        assert member or self.probe is None, "measures an edge without a membership"
        assert member or not self.calls.open, f"calls {self.calls.open} without a membership"

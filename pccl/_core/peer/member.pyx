# cython: language_level=3
"""What a member takes part in: its ring, votes, reduces, the shared state, measurements; what each means for the others.

Each of them is a machine of its own: two edges in `wiring`, votes in `calls`, reduces in `reductions`, the shared state in
`syncing`. Here they are told what concerns them. Whoever votes on the topology, or on its optimisation, can neither
reduce nor synchronise meanwhile, and the other way round; whoever synchronises has no reduce under way. One edge is
measured at a time, whenever the master asks for it: the next question ends what is left of the last. What no honest
master would say ends the membership. When there is one, and how it begins and ends, is decided above this, in
`peer_state`.
"""

from pccl._core.protocol.events import NUMBERS, OPTIMIZE, PENDING, SYNC, TOPOLOGY
from pccl._core.protocol.messages import Beat, Probed, VoteOptimize, VotePending, VoteTopology
from pccl._core.protocol.outcomes import INVALID_USAGE, KIND_PLAIN, PENDING_ASYNC_OPS, SUCCESS
from pccl.options import LANES_MAX

from .calls cimport Calls
from .passive_rate cimport PassiveRate
from .reduce_machine cimport ReduceMachine
from .ring_links cimport RingLinks
from .sync_machine cimport SyncMachine
from .events import BeginProbe, Complete, EndProbe, SendMaster


cdef class Participation:
    """The parts of one membership."""

    def __init__(self, options, long long now_ns):
        self.options = options
        self.wiring = RingLinks(options)
        self.calls = Calls()
        self.reductions = ReduceMachine(options)
        self.syncing = SyncMachine()
        self.probe = None
        self.meter = PassiveRate()
        self.tx_bytes = self.rx_bytes = 0
        self.now_ns = self.next_deadline_ns = now_ns
        self.actions = []

    cdef list _begin(self, long long now_ns):
        """An event is being handled: the list that its actions go to."""
        self.now_ns = now_ns
        self.actions = actions = []
        self.wiring.begin(actions, now_ns)
        self.calls.begin(actions)
        self.reductions.begin(actions, now_ns)
        self.syncing.begin(actions)
        return actions

    cpdef bint is_busy(self):
        """Whether the training process is in a call, so that the next word will come soon."""
        return len(self.reductions.tags) > 0 or len(self.calls.open) > 0 or self.syncing.sync is not None

    cdef _lose_master_if(self, str wrong):
        """What no honest master would say ends the membership."""
        if wrong:
            self._lose_master(f"the master broke the protocol: {wrong}")

    # ------------------------------------------------------------------------------------------ calls

    def _on_call_topology(self, call):
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, SYNC, OPTIMIZE):
            number = self.calls.enter(TOPOLOGY, call)
            if number:
                self.actions.append(SendMaster(VoteTopology(number, call.wanted)))

    def _on_call_optimize(self, call):
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, SYNC, TOPOLOGY):
            number = self.calls.enter(OPTIMIZE, call)
            if number:
                self.actions.append(SendMaster(VoteOptimize(number)))

    def _on_call_pending(self, call):
        number = self.calls.enter(PENDING, call)
        if number:
            self.actions.append(SendMaster(VotePending(number)))

    def _on_call_sync(self, call):
        if not self._refuse_with_reduces(call) and not self._refuse_beside(call, TOPOLOGY, OPTIMIZE):
            self.syncing.call(call, self.calls.number())

    def _refuse_with_reduces(self, call):
        """Whether the call is answered because it may not be made while reduces are under way."""
        if self.reductions.tags:
            reason = f"{len(self.reductions.tags)} reduces of this process are under way: wait for them first"
            self._complete(call, PENDING_ASYNC_OPS, KIND_PLAIN, reason)
        return bool(self.reductions.tags)

    def _refuse_beside(self, call, *names):
        """Whether the call is answered because another thread is in one of those that it may not meet."""
        busy = self._busy_in(*names)
        if busy:
            self._complete(call, INVALID_USAGE, KIND_PLAIN, f"another thread of this process is in {busy}")
        return bool(busy)

    def _busy_in(self, *names):
        """The first of these calls that is under way, or nothing."""
        for name in names:
            if name in self.calls.open or (name is SYNC and self.syncing.sync is not None):
                return name
        return ""

    def _on_topology_done(self, message):
        numbers = self._on_world(message)
        call = self.calls.take(message.call)
        if call is not None:
            self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, numbers))

    def _on_pending_answer(self, message):
        call = self.calls.take(message.call)
        if call is not None:
            self.actions.append(Complete(call.slot, call.sequence, SUCCESS, KIND_PLAIN, b"\1" if message.pending else b"\0"))

    def _on_call_failed(self, message):
        call = self.calls.take(message.call)
        if call is not None:
            self._complete(call, message.result, KIND_PLAIN, message.reason)
        else:
            self.syncing.fail(message)

    def _on_world(self, message):
        """Keep the numbers of the world, packed, for the collectives that commence from now on, and return them."""
        numbers = self.reductions.numbers = self.syncing.numbers = NUMBERS.pack(
            self.wiring.id, message.round, message.epoch,
            message.global_world, message.group_world, message.groups, message.largest_group,
        )
        return numbers

    def _complete(self, call, int result, int kind, str text):
        self.calls.complete(call, result, kind, text)

    # ------------------------------------------------------------------------------------------ reduces

    def _on_call_reduce(self, call):
        busy = ""
        if self.calls.open or self.syncing.sync is not None:
            busy = self._busy_in(TOPOLOGY, OPTIMIZE, SYNC)
        if busy:
            reason = f"another thread of this process is in {busy}"
            self.reductions.refuse(call.operations, INVALID_USAGE, KIND_PLAIN, reason)
        else:
            self.reductions.call(call.operations)

    def _on_call_await(self, call):
        self.reductions.awaits(call.slot, call.sequence)

    def _on_commence(self, message):
        cdef Py_ssize_t before = len(self.reductions.sequences)
        cdef bint whole = self.wiring.is_whole()
        self._lose_master_if(self.reductions.commence(message, self.wiring.wire, whole))
        if whole:
            self.meter.began(len(self.reductions.sequences) - before, self.now_ns)

    def _on_abort_reduce(self, message):
        self.meter.reset()
        self._lose_master_if(self.reductions.abort(message.sequence))

    def _on_reduce_done(self, message):
        self._lose_master_if(self.reductions.done(message.sequence))

    def _on_reduce_failed(self, message):
        self._on_world(message)
        self._lose_master_if(self.reductions.failed(message))

    def _on_reduce_ended(self, event):
        self.reductions.ended(event)
        self.meter.ended(event, self.now_ns)

    def _on_reduce_broken(self, event):
        self.reductions.broken(event.sequence, event.reason)

    def _on_reduce_quiet(self, event):
        self.reductions.hushed(event.sequence)
        self._stop_if_left()

    def _on_reduce_progress(self, event):
        self.reductions.progress(event.sequence, event.moved, self.now_ns - self.next_deadline_ns)

    def _on_traffic(self, event):
        self.tx_bytes, self.rx_bytes = event.tx_bytes, event.rx_bytes

    def _beat(self):
        """A heartbeat, with what has moved, and what that has shown of the edge it came over."""
        rate, was_limit = self.meter.take()
        order = self.wiring.wire
        seen = (order.previous_peer, rate, was_limit) if rate and order is not None else ()
        self.actions.append(SendMaster(Beat(self.now_ns, self.tx_bytes, self.rx_bytes, *seen)))

    # ------------------------------------------------------------------------------------------ measurements

    def _on_probe(self, message):
        """Measure the way to another peer; whatever was measured before lasts too long."""
        if not 1 <= message.lanes <= LANES_MAX or not message.milliseconds or message.target == self.wiring.id:
            self._lose_master_if(f"a measurement that cannot be made: {message!r}")
            return
        self._end_probe()
        self.probe = message
        self.actions.append(BeginProbe(
            message.round, message.target, message.lanes, message.milliseconds, message.host, message.port,
        ))

    def _on_probe_done(self, event):
        if self.probe is not None and self.probe.round == event.round:
            report = Probed(event.round, self.probe.target, event.bytes_per_second, event.reason)
            self.probe = None
            self.actions.append(SendMaster(report))

    def _end_probe(self):
        """Nobody waits for what is being measured."""
        if self.probe is not None:
            self.actions.append(EndProbe(self.probe.round))
            self.probe = None

    # ------------------------------------------------------------------------------------------ shared state

    def _on_call_manifest(self, call):
        self.syncing.describe(call)

    def _on_ask_schema(self, message):
        self._lose_master_if(self.syncing.ask_schema(message))

    def _on_transfer_order(self, message):
        self._lose_master_if(self.syncing.order(message))

    def _on_more_sources(self, message):
        self._lose_master_if(self.syncing.more_sources(message))

    def _on_source_gone(self, message):
        self._lose_master_if(self.syncing.drop_source(message))

    def _on_sync_done(self, message):
        self._lose_master_if(self.syncing.done(message))

    def _on_state_fetched(self, event):
        self.syncing.fetched(event.round)

    def _on_state_unfetched(self, event):
        self.syncing.unfetched(event.round, event.reason)

    def _on_transfer_ended(self, event):
        self.syncing.ended(event)
        self._stop_if_left()

    # ------------------------------------------------------------------------------------------ wiring

    def _on_wire(self, order):
        self.reductions.abort_all()
        self.meter.reset()
        self._lose_master_if(self.wiring.order(order))

    def _on_link_came(self, event):
        self.wiring.link_came(event.link, event.hello)

    def _on_link_up(self, event):
        self.wiring.link_up(event.link)

    def _on_link_down(self, event):
        self.wiring.link_down(event.link, event.reason)

    def _on_worker_died(self, event):
        self.wiring.worker_died(event.reason)

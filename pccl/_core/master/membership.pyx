# cython: language_level=3
"""The peers of the run, their phases, and the rings of their groups.

A peer is *registered* after its handshake, *accepted* when a topology round has wired it into its group's ring, and
*gone* as soon as it is lost, leaves, or is kicked. Its group's ring is then ordered anew at once; so is a ring whose
edge broke or whose members cannot reach each other. `topology_round` decides when newcomers are admitted.

Every other part of the master's machine uses this object to send, log, kick, and change rings. The actions of the
event being handled are collected here. Pure; knows nothing of votes, collectives or the shared state.
"""

from pccl._core.protocol.events import INFO, WARNING, Log
from pccl._core.protocol.messages import Kick, Registered
from pccl._core.protocol.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED, RANK_CONNECTION_LOST
from pccl.options import EDGE_LOSSES_MAX, GROUPS_MAX, LANES_MAX, nanoseconds

from .group cimport Group
from .events import Dismiss, Save, SendTo
from .bandwidths import Bandwidths, is_rate
from .election import NEVER

REGISTERED = "registered"  # its handshake succeeded; it waits for a round
ACCEPTED = "accepted"  # a member
GONE = "gone"  # lost, left or kicked

IDS_AT_ONCE = 1024  # peer ids set aside with one write to the state file: a restarted master goes on behind them
COUNTERS = (
    *("admitted", "lost", "left", "kicked", "rewired", "deadlocks", "agreed", "overwritten", "optimized", "finished"),
    "refused",
)

cdef long long RATE_NS_MIN = 50_000_000  # a rate is never computed over a shorter time


cdef class Peer:
    """One control link, and what the master knows of its peer."""

    def __init__(self, peer_id, conn, register, host, now_ns):
        self.id = peer_id
        self.conn = conn
        self.group = register.group
        self.lanes = min(max(register.lanes, 1), LANES_MAX)
        self.host = register.host or host
        self.port = register.port
        self.instance = register.instance
        self.phase = REGISTERED
        self.heard_ns = now_ns
        self.phase_ns = now_ns
        self.overwritten = 0
        self.threads = 1
        self.tx_bytes = self.rx_bytes = 0
        self.tx_rate = self.rx_rate = 0.0
        self.mark = now_ns, 0, 0

    def moved(self, tx_bytes, rx_bytes, long long now_ns):
        """Take the byte counts of a heartbeat, and update the rates."""
        cdef long long mark_ns
        self.tx_bytes, self.rx_bytes = tx_bytes, rx_bytes
        mark_ns, tx_mark, rx_mark = self.mark
        # Delayed heartbeats arrive together: the time between them says nothing about the rate.
        if now_ns - mark_ns >= RATE_NS_MIN:
            self.tx_rate = max(tx_bytes - tx_mark, 0) * 1e9 / (now_ns - mark_ns)
            self.rx_rate = max(rx_bytes - rx_mark, 0) * 1e9 / (now_ns - mark_ns)
            self.mark = now_ns, tx_bytes, rx_bytes


cdef class Membership:
    """Peers, groups, the orders that their rings need, and the actions of the event being handled."""

    def __init__(self, bytes run, options, now_ns):
        self.run, self.run_name = run, ""
        self.options = options
        self.peers, self.conns, self.groups = {}, {}, {}
        self.accepted, self.registered, self.admitting = set(), set(), set()
        self.round = 0
        self.next_id = 1
        self.reserved_id = 1 + IDS_AT_ONCE
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.on_removed = None
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.timing = options.of_master()
        self.now_ns = self.began_ns = now_ns
        self.actions = []
        self.wiring, self.changed, self.unsettled, self.reordered = set(), set(), set(), set()

    # ------------------------------------------------------------------------------------------ one event

    cdef list begin(self, long long now_ns):
        """Begin an event. Return the list that collects its actions."""
        cdef list actions = []
        self.now_ns = now_ns
        self.actions = actions
        return actions

    cdef int send(self, Peer peer, message) except -1:
        self.actions.append(SendTo(peer.conn, message))
        return 0

    cdef int log(self, int level, str line) except -1:
        self.actions.append(Log(level, line))
        return 0

    cdef int act(self, action) except -1:
        """Add any other action."""
        self.actions.append(action)
        return 0

    cdef int count(self, str name, int times=1) except -1:
        self.counters[name] += times
        return 0

    cdef int kick(self, Peer peer, int result, str reason) except -1:
        """Send the reason, close the connection, and remove the peer."""
        self.send(peer, Kick(result, reason))
        self.actions.append(Dismiss(peer.conn))
        self.remove(peer, "kicked", reason)
        return 0

    # ------------------------------------------------------------------------------------------ membership

    cdef Peer register(self, event):
        """Register a peer that has passed the handshake. If there are too many groups, refuse it and return None."""
        cdef Peer peer
        register = event.register
        if register.group not in self.groups and len(self.groups) + len(self.registered) >= GROUPS_MAX:
            self.actions.append(SendTo(event.conn, Kick(INVALID_USAGE, f"there are {GROUPS_MAX} peer groups already")))
            self.actions.append(Dismiss(event.conn))
            return None
        if self.next_id == self.reserved_id:
            self.reserved_id += IDS_AT_ONCE
            self.actions.append(Save())
        peer = Peer(self.next_id, event.conn, register, event.host, self.now_ns)
        self.next_id += 1
        self.peers[peer.id] = self.conns[event.conn] = peer
        self.registered.add(peer.id)
        beat_ms, silence_ms = self.interval_ns // 1_000_000, self.silence_ns // 1_000_000
        self.send(peer, Registered(peer.id, self.run, beat_ms, silence_ms, self.timing))
        self.log(INFO, f"peer={peer.id} registered group={peer.group} lanes={peer.lanes} at={peer.host}:{peer.port}")
        return peer

    cdef int remove(self, Peer peer, str how, str reason) except -1:
        """Remove a peer from the run. `how` is lost, left, kicked or finished: it names a counter."""
        cdef Group group = self._ring_of(peer)
        del self.peers[peer.id], self.conns[peer.conn]
        self.accepted.discard(peer.id)
        self.world_changes += 1
        self.registered.discard(peer.id)
        self.admitting.discard(peer.id)
        peer.phase, peer.phase_ns = GONE, self.now_ns
        if group is not None:
            group.remove(peer.id)
            self.disturb(group, f"peer {peer.id} {'left' if how == 'left' else f'was {how}'}: {reason}")
            self.unsettled.add(group.number)
            if not group.ring:
                self._forget_ring(group)
        self.count(how)
        level = INFO if how in ("left", "finished") else WARNING
        self.log(level, f"peer={peer.id} {how} group={peer.group} reason={reason!r}")
        self.on_removed(peer, group is not None)
        return 0

    def _forget_ring(self, Group group):
        """The last member is gone: keep the agreed state, and delete a group that has none."""
        self.changed.discard(group.number)
        self.wiring.discard(group.number)
        self.reordered.add(group.number)
        if group.consensus.revision == NEVER:
            del self.groups[group.number]

    cdef int admit(self, number, ring, newcomers) except -1:
        """Close a topology round for a group: its ring is this one, with these newcomers."""
        cdef Group group = self.groups.get(number)
        if group is None:
            group = self.new_group(number)
        group.add(ring, newcomers)
        self.admitting.update(newcomers)
        self.registered.difference_update(newcomers)
        self.changed.add(number)
        return 0

    cdef set accept_admitted(self):
        """Complete a topology round: the newcomers are members from now on. Returns their ids."""
        cdef Peer peer
        cdef Group group
        admitted = self.admitting
        self.round += 1
        self.world_changes += 1
        self.accepted |= admitted
        for peer_id in admitted:
            peer = self.peers[peer_id]
            peer.phase, peer.phase_ns = ACCEPTED, self.now_ns
            group = self.groups[peer.group]
            group.accept(peer_id)
            self.unsettled.add(peer.group)
        self.count("admitted", len(admitted))
        self.admitting = set()
        return admitted

    cdef tuple world(self):
        """Return the counts of members, groups with members, and members of the largest group; without newcomers."""
        sizes = [size for size in [group.size() for group in self.groups.values()] if size]
        return len(self.accepted), len(sizes), max(sizes, default=0)

    cdef tuple numbers(self, Group group, tuple world):
        """Return the numbers of the world as the members of a group are told them, without the number of the round.

        `world` is what `world()` returns: it is counted once for all groups.
        """
        members, groups, largest = world
        return group.epoch, members, group.size(), groups, largest

    cdef int resume(self, next_id, round) except -1:
        """Continue with the numbers of a master that has ended."""
        self.next_id = next_id
        self.reserved_id = next_id + IDS_AT_ONCE
        self.round = round
        return 0

    def on_went(self, Peer peer, event):
        """The connection of a peer is gone."""
        self.remove(peer, "lost", event.reason)

    def on_tick(self, Peer peer, event):
        """Kick a peer that has been silent for too long."""
        if self.now_ns - peer.heard_ns >= self.silence_ns:
            reason = f"nothing heard for {self.silence_ns / 1e9:g} s (heartbeat_timeout)"
            self.kick(peer, RANK_CONNECTION_LOST, reason)

    def on_leave(self, Peer peer, message):
        """A peer leaves."""
        self.actions.append(Dismiss(peer.conn))
        self.remove(peer, "left", message.reason or "goodbye")

    def on_threads(self, Peer peer, message):
        """A peer tells how many of its threads make calls at the same time."""
        peer.threads = message.count

    def on_beat(self, Peer peer, message):
        """Take a heartbeat, which may carry a passive rate."""
        peer.moved(message.tx_bytes, message.rx_bytes, self.now_ns)
        if message.previous:
            self._learn_passive_rate(peer, message)

    def _learn_passive_rate(self, Peer peer, message):
        """Keep the rate that its reduces have shown on the edge from its previous peer, if that edge still exists."""
        group = self._ring_of(peer)
        if not message.bytes_per_second or not is_rate(message.bytes_per_second):
            self.kick(peer, INVALID_USAGE, f"saw {message.bytes_per_second} bytes/s on an edge, which is impossible")
        elif group is not None and (message.previous, peer.id) in group.edges:
            rate, was_limit = message.bytes_per_second, message.was_limit
            group.bandwidths.saw(message.previous, peer.id, rate, self.now_ns, was_limit=was_limit)

    # ------------------------------------------------------------------------------------------ rings

    cdef Group new_group(self, number):
        """Add a group without members."""
        fresh_ns, failed_ns = nanoseconds(self.options.rates_expiry), nanoseconds(self.options.unreachable_expiry)
        self.groups[number] = group = Group(number, Bandwidths(fresh_ns, failed_ns))
        return group

    cdef Group group_to_settle(self, Peer peer):
        """The group of a member that said something; it is settled when the event is over."""
        self.unsettled.add(peer.group)
        return self.groups[peer.group]

    cdef Group _ring_of(self, Peer peer):
        """The group whose ring this peer was ordered into, or None: members and peers being admitted are in one."""
        if peer.id in self.accepted or peer.id in self.admitting:
            return self.groups[peer.group]
        return None

    def _ring_reported_by(self, Peer peer):
        """Return the group of a peer that reports on its ring; kick a peer that is in no ring."""
        group = self._ring_of(peer)
        if group is None:
            self.kick(peer, INVALID_USAGE, "reported on a ring that it was never ordered into")
        return group

    def on_wired(self, Peer peer, message):
        """Both edges of a member are up."""
        group = self._ring_reported_by(peer)
        if group is not None and group.reported(peer.id, message.epoch):
            self.wiring.discard(peer.group)
            self.unsettled.add(peer.group)
            if len(group.ring) > 1:
                self._prove(group)

    def _prove(self, Group group):
        """Note that these peers reach each other: their ring is wired."""
        cdef Peer peer
        for peer_id in group.ring:
            peer = self.peers[peer_id]
            peer.is_proven = True

    def on_wire_failed(self, Peer peer, message):
        """A member cannot connect to its next peer."""
        group = self._ring_reported_by(peer)
        if group is not None and group.lose_edge(peer.id, message.target, message.epoch):
            self._avoid(group, peer.id, message.target, message.reason)

    def on_edge_lost(self, Peer peer, message):
        """A connection of the ring broke between two living peers."""
        group = self._ring_reported_by(peer)
        if group is None:
            return
        if peer.id not in (message.source, message.target):
            self.kick(peer, INVALID_USAGE, f"reported an edge {message.source}-{message.target} that is not its own")
            return
        losses = group.lose_edge(message.source, message.target, message.epoch)
        if losses:
            edge = f"{message.source}->{message.target}"
            which = f"from peer {message.source} to peer {message.target}"
            self.disturb(group, f"the connection {which} broke: {message.reason}")
            self.log(WARNING, f"edge={edge} group={peer.group} broken by={peer.id} reason={message.reason!r}")
        if losses >= EDGE_LOSSES_MAX:
            self._avoid(group, message.source, message.target, f"broke {losses} times: {message.reason}")

    def _avoid(self, Group group, source, target, str reason):
        """Keep this pair out of the ring until its mark expires."""
        group.mark(source, target, reason, self.now_ns + nanoseconds(self.options.unreachable_expiry))
        self.disturb(group, f"peer {source} cannot reach peer {target}: {reason}")
        self.log(WARNING, f"peer={source} cannot reach peer={target} reason={reason!r}")

    cdef int disturb(self, Group group, str reason) except -1:
        """Have the ring ordered anew; every collective that runs over it fails."""
        self.changed.add(group.number)
        group.collectives.abort(reason)
        return 0

    cdef bint order_changed_rings(self) except -1:
        """Find a legal order for every changed ring, and send the ring orders. Return True if there was one."""
        cdef Group group
        if not self.changed:
            return False
        for number in sorted(self.changed):
            group = self.groups[number]
            while not group.solve(self.now_ns):
                victim, reason = group.victim(self._suspects(group))
                self.kick(self.peers[victim], RANK_CONNECTION_FAILED, reason)
            for peer_id, order in group.order(self.peers, self.now_ns):
                self.send(self.peers[peer_id], order)
            self.count("rewired")
            self.world_changes += 1
            self.wiring.add(number)
            self.reordered.add(number)
            ring = group.ring if len(group.ring) <= 16 else f"of {len(group.ring)}"
            self.log(INFO, f"group={number} epoch={group.epoch} ring={ring}")
        self.changed.clear()
        return True

    def _suspects(self, Group group):
        """Return the members that have missed two heartbeats: one that also cannot be reached is probably dead."""
        oldest_ns = self.now_ns - 5 * self.interval_ns // 2
        return {peer_id for peer_id in group.ring if self.peers[peer_id].heard_ns < oldest_ns}

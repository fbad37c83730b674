# cython: language_level=3
"""Who is in the run, and in which ring: the part of the master's machine that keeps membership and rings.

A peer is registered when it comes, and out of everything the moment it is lost, leaves, or is kicked. Its group's ring is
then ordered anew, at once; so is a ring whose edge broke or whose members cannot reach each other. Who may come in, and
when, is decided above this, in `master_state`.
"""

from pccl._core.protocol.events import INFO, WARNING, Log
from pccl._core.protocol.messages import Kick, Registered
from pccl._core.protocol.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED
from pccl._core.solver.solver import RATE_MAX
from pccl.options import EDGE_LOSSES_MAX, GROUPS_MAX, nanoseconds

from .roster cimport Peer
from .events import Dismiss, Save, SendTo
from .bandwidths import Bandwidths
from .election import NEVER
from .group import Group

IDS_AT_ONCE = 1024  # peer ids set aside with one write to the state file: a master that starts again goes on behind them


cdef class Membership:
    """Peers, groups, and the orders that their rings need."""

    def __init__(self, bytes run, options, ballots, now_ns):
        self.run = run
        self.options = options
        self.ballots = ballots
        self.votes = ballots.votes
        self.peers = {}
        self.conns = {}
        self.groups = {}
        self.accepted = set()
        self.registered = set()
        self.admitting = set()
        self.admission = False
        self.round = 0
        self.next_id = 1
        self.reserved_id = 1 + IDS_AT_ONCE
        counted = ("admitted", "lost", "left", "kicked", "rewired", "deadlocks", "agreed", "optimized")
        self.counters = dict.fromkeys(counted, 0)
        self.interval_ns = nanoseconds(options.heartbeat_interval)
        self.silence_ns = nanoseconds(options.heartbeat_timeout)
        self.now_ns = self.began_ns = now_ns
        self.actions = []
        self.wiring, self.changed, self.stirred = set(), set(), set()

    # ------------------------------------------------------------------------------------------ membership

    def _register(self, event):
        register = event.register
        if register.group not in self.groups and len(self.groups) + len(self.registered) >= GROUPS_MAX:
            self.actions.append(SendTo(event.conn, Kick(INVALID_USAGE, f"there are {GROUPS_MAX} peer groups already")))
            self.actions.append(Dismiss(event.conn))
            return
        if self.next_id == self.reserved_id:
            self.reserved_id += IDS_AT_ONCE
            self.actions.append(Save())
        peer = Peer(self.next_id, event.conn, register, event.host, self.now_ns)
        self.next_id += 1
        self.peers[peer.id] = self.conns[event.conn] = peer
        self.registered.add(peer.id)
        self._send(peer, Registered(peer.id, self.run, self.interval_ns // 1_000_000, self.silence_ns // 1_000_000))
        self._log(INFO, f"peer={peer.id} registered group={peer.group} lanes={peer.lanes} at={peer.host}:{peer.port}")

    def _remove(self, Peer peer, str how, str reason):
        """Take a peer out of everything. `how` is lost, left or kicked, and one of the counters."""
        group = self._ring_of(peer)
        del self.peers[peer.id], self.conns[peer.conn]
        self.accepted.discard(peer.id)
        self.world_changes += 1
        self.registered.discard(peer.id)
        self.admitting.discard(peer.id)
        self.ballots.drop(peer.id)
        if group is not None:
            group.remove(peer.id)
            self._disturb(group, f"peer {peer.id} {'left' if how == 'left' else f'was {how}'}: {reason}")
            self.stirred.add(group.number)
            if not group.ring:
                self._forget_ring(group)
        self.counters[how] += 1
        self._log(INFO if how == "left" else WARNING, f"peer={peer.id} {how} group={peer.group} reason={reason!r}")

    def _disturb(self, group, str reason):
        """The ring must change, and nothing that runs over it can succeed."""
        self.changed.add(group.number)
        group.collectives.abort(reason)

    def _forget_ring(self, group):
        """The last member is gone. What was agreed stays known; a group that never agreed on anything leaves no trace."""
        self.changed.discard(group.number)
        self.wiring.discard(group.number)
        if group.agreement.revision == NEVER:
            del self.groups[group.number]

    def _kick(self, Peer peer, int result, str reason):
        self._send(peer, Kick(result, reason))
        self.actions.append(Dismiss(peer.conn))
        self._remove(peer, "kicked", reason)

    def _on_leave(self, Peer peer, message):
        self.actions.append(Dismiss(peer.conn))
        self._remove(peer, "left", message.reason or "goodbye")

    def _on_beat(self, Peer peer, message):
        peer.moved(message.tx_bytes, message.rx_bytes, self.now_ns)
        if message.previous:
            self._learn_passive_rate(peer, message)

    def _learn_passive_rate(self, Peer peer, message):
        """What its reduces have shown of the edge from its previous peer; of an edge of the past it is no news."""
        group = self._ring_of(peer)
        if not 1 <= message.bytes_per_second <= RATE_MAX:
            self._kick(peer, INVALID_USAGE, f"saw {message.bytes_per_second} bytes/s on an edge, which is no rate")
        elif group is not None and (message.previous, peer.id) in group.edges:
            rate, was_limit = message.bytes_per_second, message.was_limit
            group.bandwidths.saw(message.previous, peer.id, rate, self.now_ns, was_limit=was_limit)

    def _new_group(self, number):
        """A group without members."""
        fresh_ns, failed_ns = nanoseconds(self.options.rates_expiry), nanoseconds(self.options.unreachable_expiry)
        self.groups[number] = group = Group(number, Bandwidths(fresh_ns, failed_ns))
        return group

    # ------------------------------------------------------------------------------------------ rings

    def _ring_of(self, Peer peer):
        """The ring this peer was ordered into, if any: exactly members and those being admitted are in one."""
        if peer.id in self.accepted or peer.id in self.admitting:
            return self.groups[peer.group]
        return None

    def _ring_reported_by(self, Peer peer):
        """A peer that was ordered into no ring has nothing to report about one."""
        group = self._ring_of(peer)
        if group is None:
            self._kick(peer, INVALID_USAGE, "reported on a ring that it was never ordered into")
        return group

    def _on_wired(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is not None and group.reported(peer.id, message.epoch):
            self.wiring.discard(peer.group)
            self.stirred.add(peer.group)

    def _on_wire_failed(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is not None and group.lose_edge(peer.id, message.target, message.epoch):
            self._avoid(group, peer.id, message.target, message.reason)

    def _on_edge_lost(self, Peer peer, message):
        group = self._ring_reported_by(peer)
        if group is None:
            return
        if peer.id not in (message.source, message.target):
            self._kick(peer, INVALID_USAGE, f"reported an edge {message.source}-{message.target} that is not its own")
            return
        losses = group.lose_edge(message.source, message.target, message.epoch)
        if losses:
            edge = f"{message.source}->{message.target}"
            which = f"from peer {message.source} to peer {message.target}"
            self._disturb(group, f"the connection {which} broke: {message.reason}")
            self._log(WARNING, f"edge={edge} group={peer.group} broken by={peer.id} reason={message.reason!r}")
        if losses >= EDGE_LOSSES_MAX:
            self._avoid(group, message.source, message.target, f"broke {losses} times: {message.reason}")

    def _avoid(self, group, source, target, str reason):
        """Find a ring around this pair, for a while."""
        group.mark(source, target, reason, self.now_ns + nanoseconds(self.options.unreachable_expiry))
        self._disturb(group, f"peer {source} cannot reach peer {target}: {reason}")
        self._log(WARNING, f"peer={source} cannot reach peer={target} reason={reason!r}")

    cdef bint _order_changed_rings(self) except -1:
        """Give every changed ring a legal order and its members their neighbours. True if there was one."""
        if not self.changed:
            return False
        for number in sorted(self.changed):
            group = self.groups[number]
            while not group.solve(self.now_ns):
                victim, reason = group.victim(self._suspects(group))
                self._kick(self.peers[victim], RANK_CONNECTION_FAILED, reason)
            for peer_id, wire in group.order(self.peers, self.now_ns):
                self._send(self.peers[peer_id], wire)
            self.counters["rewired"] += 1
            self.world_changes += 1
            self.wiring.add(number)
            ring = group.ring if len(group.ring) <= 16 else f"of {len(group.ring)}"
            self._log(INFO, f"group={number} epoch={group.epoch} ring={ring}")
        self.changed.clear()
        return True

    def _suspects(self, group):
        """Who has missed two heartbeats: together with a dead pair that is no coincidence."""
        oldest_ns = self.now_ns - 5 * self.interval_ns // 2
        return {peer_id for peer_id in group.ring if self.peers[peer_id].heard_ns < oldest_ns}

    cdef int _send(self, Peer peer, message) except -1:
        self.actions.append(SendTo(peer.conn, message))
        return 0

    cdef int _log(self, int level, str line) except -1:
        self.actions.append(Log(level, line))
        return 0

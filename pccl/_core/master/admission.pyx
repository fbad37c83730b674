# cython: language_level=3
"""Admission: newcomers show that they can be reached, before any member waits for them.

A *trial* is a dial without any other effect: one peer connects to the port of another, both prove that they hold the
token, and the connection is closed. Peers make trials beside their work. While a newcomer is only registered, the
master dials its address itself (the *dial-back*), and orders the trials of the two edges that the newcomer would have
in the ring.

**A gap** lies between two neighbours of the ring. The first choice is behind the newcomer that registered before, or
behind the last member; if a trial fails there, the next gap is between the last two members, and so on. A newcomer
*fits* when both edges of a gap between members are shown. A group without members needs no edge: a newcomer fits there
if the master reached it, or if it and another one reach each other.

**A topology round** admits, in one pass, all newcomers that can be inserted over shown edges (`admit`). The others stay
registered, and no member waits for them. A pair that failed is not tried again before `unreachable_expiry`.

**A peer that cannot be reached is told at once**: with the address, who tried it, what happened, and what to do. It is
kicked if neither the master nor any of WITNESSES_MAX members reaches it, or if no gap is left in a ring whose members
reach each other. A member that did not answer may be dead itself: the newcomer waits until that member is heard again,
or lost. A newcomer of a group without members waits too: peers that come later may reach it. It also waits for the
dial-back of those before it, so that healthy peers come in in the order of their registration.

**The larger set goes on.** A member that is alone, and that was never in a ring with another one, may be the peer that
cannot be reached. If at least two newcomers find no gap beside it, but reach each other, it is kicked.

Part of the master's machine. The trials are in `trial_table`; `topology_round` decides when newcomers are admitted.
"""

from bisect import bisect_left

from pccl._core.protocol.events import INFO, WARNING
from pccl._core.protocol.messages import Notice
from pccl._core.protocol.outcomes import RANK_CONNECTION_FAILED

from .group cimport Group
from .membership cimport Membership, Peer
from .trial_table cimport Trial, TrialTable
from .deadlock import name_peers
from .events import DialBack, Save
from .trial_table import FAILED, OVERDUE, SHOWN, UNKNOWN

cdef str unknown = UNKNOWN, shown = SHOWN, failed = FAILED, overdue = OVERDUE

GAPS_MAX = 4  # gaps between members that a newcomer tries: a peer that no neighbour reaches at four is at fault
WITNESSES_MAX = 3  # members that try a newcomer which the master cannot reach, before it is kicked
RETRY_NS = 5_000_000_000  # from one dial-back that failed to the next: firewalls and addresses are corrected

REMEDY = (
    "Open that port for connections from other machines (firewall), or set Options.advertise (PCCL_ADVERTISE) "
    "to an address that they can dial"
)


cdef class Newcomer:
    """What is known of one registered peer."""

    def __init__(self, Peer peer not None):
        self.peer = peer


cdef class Admission:
    """The newcomers of a run."""

    def __init__(self, Membership members not None):
        self.members = members
        self.table = TrialTable(members)
        self.newcomers, self.queues = {}, {}
        self.fitting = set()
        self.dirty = {}

    # ------------------------------------------------------------------------------------------ input

    cdef int register(self, Peer peer) except -1:
        """A peer has registered."""
        cdef Newcomer newcomer = Newcomer(peer)
        self.newcomers[peer.id] = newcomer
        self.queues.setdefault(peer.group, []).append(peer.id)
        self.dirty[peer.id] = None
        return self._dial_back(newcomer)

    cdef int _dial_back(self, Newcomer newcomer) except -1:
        cdef Peer peer = newcomer.peer
        newcomer.back_ns = self.members.now_ns
        return self.members.act(DialBack(peer.conn, peer.host, peer.port, peer.instance))

    def on_dialled_back(self, event):
        """The master has reached a newcomer, or not. Ignored if it is gone, or a member by now."""
        cdef Newcomer newcomer
        peer = self.members.conns.get(event.conn)
        newcomer = None if peer is None else self.newcomers.get(peer.id)
        if newcomer is None:
            return
        is_news = event.reason and event.reason != newcomer.back and not newcomer.reached
        newcomer.back = event.reason
        newcomer.reached = newcomer.reached or not event.reason
        self.dirty[newcomer.peer.id] = None
        founder = self._founder(self.queues[newcomer.peer.group])
        if founder is not None:
            self.dirty[founder] = None
        if is_news:
            line = f"the master cannot reach peer {newcomer.peer.id} at {address_of(newcomer.peer)}: {event.reason}"
            self.members.log(WARNING, line)
            advice = f"{line}. Other peers try it too. {REMEDY}"
            self.members.send(newcomer.peer, Notice(WARNING, advice))

    def on_tried(self, Peer peer, message):
        """The report of a trial. Ignored if it is not awaited any more."""
        cdef Newcomer target
        cdef Trial trial = self.table.get(peer.id, message.target)
        if not self.table.end(trial, message.reason):
            return
        target = self.newcomers.get(trial.target)
        if target is not None:
            target.reached = target.reached or trial.outcome is shown
        self._look_at_ends(trial)
        if trial.outcome is failed:
            self.members.log(INFO, f"peer={peer.id} tried peer={trial.target} in vain reason={trial.reason!r}")

    cdef int _look_at_ends(self, Trial trial) except -1:
        for peer_id in (trial.source, trial.target):
            if peer_id in self.newcomers:
                self.dirty[peer_id] = None
        return 0

    cdef int remove(self, Peer peer) except -1:
        """A peer is gone."""
        for trial in self.table.of(peer.id):
            self.table.forget(trial)
        if self.newcomers.pop(peer.id, None) is not None:
            self.fitting.discard(peer.id)
            self.dirty.pop(peer.id, None)
            behind = self._leave_queue(peer)
            self.dirty.update(dict.fromkeys(behind[:1] if self._ring_of(peer) else behind))
        return 0

    cdef list _leave_queue(self, Peer peer):
        """Take a newcomer out of its queue. Return those behind it."""
        cdef list queue = self.queues[peer.group]
        index = bisect_left(queue, peer.id)
        del queue[index]
        if not queue:
            del self.queues[peer.group]
        return queue[index:]

    cdef list _ring_of(self, Peer peer):
        """Return the ring of a peer's group; it is empty if the group has no members."""
        cdef Group group = self.members.groups.get(peer.group)
        return [] if group is None else group.ring

    cdef int sweep(self) except -1:
        """Time has passed: look again at what has become too old, and repeat dial-backs that failed."""
        cdef Newcomer newcomer
        for trial in self.table.sweep():
            self._look_at_ends(trial)
        for newcomer in self.newcomers.values():
            if newcomer.is_waiting:
                self.dirty[newcomer.peer.id] = None
            if newcomer.back and self.members.now_ns - newcomer.back_ns >= RETRY_NS:
                self._dial_back(newcomer)
        return 0

    # ------------------------------------------------------------------------------------------ gaps

    cdef bint settle(self) except -1:
        """Look at every newcomer for which something has changed. Return True if a peer was kicked."""
        cdef Newcomer newcomer
        cdef Membership members = self.members
        if members.reordered:
            for number in sorted(members.reordered):
                self.dirty.update(dict.fromkeys(self.queues.get(number, ())))
            members.reordered.clear()
        if not self.dirty:
            return False
        before = len(members.peers)
        while self.dirty:
            peer_id = next(iter(self.dirty))
            del self.dirty[peer_id]
            newcomer = self.newcomers.get(peer_id)
            if newcomer is not None:
                self._look(newcomer)
        return len(members.peers) < before

    cdef int _look(self, Newcomer newcomer) except -1:
        """Find out whether a newcomer fits; order the trials that are missing; tell it if it is stuck."""
        cdef Peer peer = newcomer.peer
        cdef list ring = self._ring_of(peer), queue = self.queues[peer.group]
        cdef bint fits, was_stuck = newcomer.is_stuck
        newcomer.is_stuck = newcomer.is_waiting = False
        fits = self._find_gap(newcomer, ring, queue) if ring else self._find_partner(newcomer, queue)
        if fits:
            self.fitting.add(peer.id)
        else:
            self.fitting.discard(peer.id)
        if newcomer.is_stuck != was_stuck:  # then the next one chooses another gap
            self.dirty.update(dict.fromkeys(queue[bisect_left(queue, peer.id) + 1:][:1]))
        if ring and not fits:
            self._judge(newcomer, self.members.groups[peer.group])
        return 0

    cdef bint _find_partner(self, Newcomer newcomer, list queue) except -1:
        """Order the trials of a ring of these newcomers only. Return whether this one can begin a ring."""
        peer_id, first = newcomer.peer.id, queue[0]
        if peer_id != first:
            self.table.want(queue[bisect_left(queue, peer_id) - 1], peer_id)
            self.table.want(peer_id, first)
            if self.table.is_shown(first, peer_id) and self.table.is_shown(peer_id, first):
                return True
        return newcomer.back == "" and self._founder(queue) == peer_id

    cdef _founder(self, list queue):
        """Return the newcomer that begins the ring: the first that the master has not failed to reach; or None."""
        cdef Newcomer newcomer
        for peer_id in queue:
            newcomer = self.newcomers[peer_id]
            if not newcomer.back:
                return peer_id
        return None

    cdef bint _find_gap(self, Newcomer newcomer, list ring, list queue) except -1:
        """Order the trials of the first gap at which none has failed. Return whether they are shown, among members."""
        cdef str into, out
        peer_id = newcomer.peer.id
        for source, target in self._gaps(newcomer, ring, queue):
            into, out = self._outcome(source, peer_id), self._outcome(peer_id, target)
            if into is overdue or out is overdue or out is failed and self._may_be_dead(target, peer_id):
                newcomer.is_waiting = True
                continue
            if into is failed or out is failed:
                continue
            if into is unknown:
                self.table.want(source, peer_id)
            if out is unknown:
                self.table.want(peer_id, target)
            return into is shown and out is shown and source not in self.newcomers
        newcomer.is_stuck = not newcomer.is_waiting
        return False

    cdef list _gaps(self, Newcomer newcomer, list ring, list queue):
        """Return the gaps that a newcomer may try, as (peer before it, peer behind it)."""
        cdef Newcomer before
        gaps = []
        index = bisect_left(queue, newcomer.peer.id)
        while index > 0 and not gaps:
            index -= 1
            before = self.newcomers[queue[index]]
            if not before.is_stuck:
                gaps.append((before.peer.id, ring[0]))
        for index in range(len(ring), max(len(ring) - GAPS_MAX, 0), -1):
            gaps.append((ring[index - 1], ring[index % len(ring)]))
        return gaps

    cdef str _outcome(self, source, target):
        """What is known of this pair, from its trial or because an edge between the two could not be connected."""
        cdef Trial trial = self.table.get(source, target)
        cdef Peer peer
        if trial is not None and trial.outcome is not unknown:
            return trial.outcome
        peer = self.members.peers[target]
        group = self.members.groups.get(peer.group)
        mark = None if group is None else group.marks.get((source, target))
        return failed if mark is not None and mark[0] > self.members.now_ns else unknown

    cdef bint _may_be_dead(self, target, peer_id) except -1:
        """Whether a member that this newcomer did not reach has not been heard since."""
        cdef Trial trial = self.table.get(peer_id, target)
        cdef Peer peer = self.members.peers[target]
        return trial is not None and peer.heard_ns < trial.ended_ns + self.members.interval_ns // 2

    # ------------------------------------------------------------------------------------------ admission

    cdef set admit(self):
        """Close a topology round: insert all newcomers that can be inserted. Return the numbers of their groups."""
        numbers = set()
        for number in sorted({self.newcomers[peer_id].peer.group for peer_id in self.fitting}):
            group = self.members.groups.get(number)
            ring, inserted = self.insert([] if group is None else group.ring, self.queues[number])
            if inserted:
                numbers.add(number)
                self.members.admit(number, ring, inserted)
                self._forget_inserted(self.members.groups[number], inserted)
        return numbers

    def insert(self, ring, queue):
        """Return this ring with all newcomers of the queue that can be inserted over shown edges, and their ids."""
        begin = list(ring) or self._begin_ring(queue)
        following = dict(zip(begin, begin[1:] + begin[:1]))
        for peer_id in queue:
            source = None if peer_id in following else self._find_source(following, begin, peer_id)
            if source is not None:
                following[peer_id], following[source] = following[source], peer_id
        inserted = [peer_id for peer_id in queue if peer_id in following]
        whole = begin[:1]
        while len(whole) < len(following):
            whole.append(following[whole[-1]])
        return whole, inserted

    cdef list _begin_ring(self, queue):
        """Return the newcomer with which a ring begins, or two that reach each other; or none."""
        founder = self._founder(queue)
        if founder is not None and self.newcomers[founder].back == "":
            return [founder]
        for peer_id in queue[1:]:
            if self.table.is_shown(queue[0], peer_id) and self.table.is_shown(peer_id, queue[0]):
                return [queue[0], peer_id]
        return []

    cdef _find_source(self, dict following, list begin, peer_id):
        """Return the peer behind which this newcomer can be inserted, if possible the last of the ring; or None."""
        cdef Trial trial
        found = None
        for trial in self.table.of(peer_id):
            if trial.target == peer_id and trial.outcome is shown and trial.source in following:
                target = following[trial.source]
                if self.table.is_shown(peer_id, target):
                    found = trial.source
                    if target == begin[0]:
                        return found
        return found

    cdef int _forget_inserted(self, Group group, list inserted) except -1:
        """These newcomers are in a ring: keep which pairs failed, so that rings avoid them, and forget the rest."""
        cdef Trial trial
        ring = set(group.ring)
        for peer_id in inserted:
            del self.newcomers[peer_id]
            self.fitting.discard(peer_id)
        self.queues[group.number] = [peer_id for peer_id in self.queues[group.number] if peer_id in self.newcomers]
        if not self.queues[group.number]:
            del self.queues[group.number]
        for peer_id in inserted:
            for trial in self.table.of(peer_id):
                if trial.outcome is failed and trial.source in ring and trial.target in ring:
                    group.mark(trial.source, trial.target, trial.reason, trial.until_ns)
                if trial.source not in self.newcomers and trial.target not in self.newcomers:
                    self.table.forget(trial)
        return 0

    # ------------------------------------------------------------------------------------------ without a gap

    cdef int _judge(self, Newcomer newcomer, Group group) except -1:
        """Kick a newcomer that nobody reaches, or that found no gap; if the only member may be at fault, tell both."""
        cdef Peer peer = newcomer.peer
        if newcomer.back and not newcomer.reached:
            witnesses = self._witnesses(group.ring)
            for witness in witnesses:
                if self._outcome(witness, peer.id) is unknown:
                    self.table.want(witness, peer.id)
            if all(self._outcome(witness, peer.id) is failed for witness in witnesses):
                return self._refuse(newcomer, f"no peer reaches it at {address_of(peer)}", group)
        if not newcomer.is_stuck:
            return 0
        if not self._is_replaceable(group):
            return self._refuse(newcomer, "the ring has no gap for it", group)
        stuck = [peer_id for peer_id in self.queues[peer.group] if self.newcomers[peer_id].is_stuck]
        self._find_partner(newcomer, stuck)
        rivals, _ = self.insert([], stuck)
        alone = self.members.peers[group.ring[0]]
        if len(rivals) > len(group.ring):
            return self._replace(alone, rivals, group)
        if not newcomer.told:
            newcomer.told = True
            line = f"peers {alone.id} and {peer.id} cannot form a ring: {self._explain(newcomer, group)}"
            self.members.log(WARNING, line)
            for one in (alone, peer):
                advice = f"{line}. This is peer {one.id} at {address_of(one)}. {REMEDY}"
                self.members.send(one, Notice(WARNING, advice))
        return 0

    cdef list _witnesses(self, list ring):
        """Return members that try a newcomer which the master cannot reach."""
        return list(dict.fromkeys([ring[-1], ring[0], ring[len(ring) // 2]]))[:WITNESSES_MAX]

    cdef bint _is_replaceable(self, Group group) except -1:
        """Whether the only member was never in a ring with another one, so that maybe no peer can reach it."""
        return len(group.ring) == 1 and not self.members.peers[group.ring[0]].is_proven

    cdef int _replace(self, Peer alone, list rivals, Group group) except -1:
        """Kick the only member: the newcomers reach each other, but not it, or it does not reach them."""
        reasons = [self._explain(self.newcomers[peer_id], group) for peer_id in rivals]
        if group.consensus.forget_if_only(alone.id):
            self.members.act(Save())
        return self.members.kick(alone, RANK_CONNECTION_FAILED, (
            f"{name_peers(sorted(rivals))} form a ring without peer {alone.id}, which is alone at {address_of(alone)}: "
            f"{'; '.join(reasons[:4])}. {REMEDY}, then connect again"
        ))

    cdef int _refuse(self, Newcomer newcomer, str what, Group group) except -1:
        reason = f"peer {newcomer.peer.id} is not admitted, because {what}: {self._explain(newcomer, group)}. {REMEDY}"
        return self.members.kick(newcomer.peer, RANK_CONNECTION_FAILED, reason)

    cdef str _explain(self, Newcomer newcomer, Group group):
        """Who tried which address, and what happened."""
        cdef Trial trial
        peer_id, reasons = newcomer.peer.id, []
        if newcomer.back:
            reasons.append(f"the master cannot reach {address_of(newcomer.peer)} ({newcomer.back})")
        for trial in self.table.of(peer_id):
            if trial.outcome is failed:
                reasons.append(self._describe(trial.source, trial.target, trial.reason))
        for (source, target), mark in sorted(group.marks.items()):
            if peer_id in (source, target) and self.table.get(source, target) is None:
                reasons.append(self._describe(source, target, mark[1]))
        return "; ".join(reasons[:4])

    cdef str _describe(self, source, target, str reason):
        peer = self.members.peers.get(target)
        where = "" if peer is None else f" at {address_of(peer)}"
        return f"peer {source} cannot reach peer {target}{where} ({reason})"

    cdef bint has_reached(self) except -1:
        """Whether some newcomer was reached."""
        cdef Newcomer newcomer
        for newcomer in self.newcomers.values():
            if newcomer.reached or newcomer.back is None:  # the dial-back may still succeed
                return True
        return False

    def why(self, peer_id):
        """Say what keeps a newcomer from being admitted; an empty text if it only waits for a topology round."""
        cdef Trial trial
        cdef Newcomer newcomer = self.newcomers[peer_id]
        group = self.members.groups.get(newcomer.peer.group)  # None: its last member is gone
        if newcomer.is_stuck and group is not None:
            return self._explain(newcomer, group)
        missing = [
            f"peer {trial.source} has not told yet whether it reaches peer {trial.target}"
            for trial in self.table.of(peer_id)
            if trial.outcome is unknown or trial.outcome is overdue
        ]
        if self._ring_of(newcomer.peer) or newcomer.back == "" or peer_id in self.fitting:
            return "; ".join(missing[:4])
        if newcomer.back is None:
            return f"the master tries to reach it at {address_of(newcomer.peer)}"
        return f"the master cannot reach it at {address_of(newcomer.peer)} ({newcomer.back}), and no other peer has"

    # ------------------------------------------------------------------------------------------ invariants

    def check(self):
        """Invariants between two events."""
        members = self.members
        assert self.newcomers.keys() == members.registered, f"newcomers {sorted(self.newcomers)}"
        assert not self.dirty, f"newcomers {sorted(self.dirty)} were not looked at"
        assert self.fitting <= members.registered, f"fitting {self.fitting}"
        queued = [peer_id for queue in self.queues.values() for peer_id in queue]
        assert sorted(queued) == sorted(self.newcomers), f"queues {self.queues}"
        for number, queue in self.queues.items():
            assert queue == sorted(queue) and queue, f"queue {queue}"
            assert all(self.newcomers[peer_id].peer.group == number for peer_id in queue), f"queue {queue}"
        self.table.check(self.newcomers)
        for number in {self.newcomers[peer_id].peer.group for peer_id in self.fitting}:
            group = members.groups.get(number)
            ring = [] if group is None else group.ring
            assert self.insert(ring, self.queues[number])[1], "a newcomer fits, and cannot be inserted"


cdef str address_of(Peer peer):
    """The address of a peer, as others dial it."""
    return f"[{peer.host}]:{peer.port}" if ":" in peer.host else f"{peer.host}:{peer.port}"

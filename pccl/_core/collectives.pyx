# cython: language_level=3
"""The collectives of one peer group, from the first member that initiates a tag to the one verdict for all.

    open ──all members, one shape──▶ running ──all ok──▶ done
      │                                 └──one failed──▶ aborting ──all restored──▶ failed
      └── shapes differ, given up, alone, never to meet ──▶ failed
    the ring changes: whatever is open or running is aborted ──the new ring is wired──▶ failed

**A tag** belongs to a member from the moment it initiates it until it is sent a verdict; initiating it again before
that breaks the protocol. So a vote that arrives after the ring changed is either of somebody who had not initiated
that tag, or of somebody who was told that it failed: both belong to the new round, and meet there.

**Sequence numbers** name what commenced, grow by one, and are never used again, whatever happens to the ring. All
members are told in the same order, because each hears the master in order.

**A change of the ring** ends everything at once and needs no answer: the order to wire tells the members to give up,
and what they said before they read it is about the past. Who said that it is wired has nothing more to say about it.

Part of the master's machine, which sends what `settle` returns; pure, and knows nothing of rings but who is in.
"""

from pccl.options import TAGS_MAX
from pccl.outcomes import INVALID_ARGUMENT, INVALID_USAGE, RANK_CONNECTION_LOST, TOO_FEW_PEERS
from pccl.records import record

from .ballots import OpenCall
from .deadlock import name_peers
from .messages import AbortReduce, Commence, ReduceDone, ReduceFailed
from .operations import OPERATIONS_MAX, pack_pairs, split_shapes, unpack_shapes

SIDES_MAX = 4  # different shapes that an explanation names; more would not help anybody


@record
class Failure:
    """A verdict that has yet to be told."""

    peers: set  # who initiated it and is still there
    tag: int
    sequence: int  # 0: it never commenced
    result: int
    reason: str


cdef class Tally:
    """A tag that some members have initiated and that has not commenced."""

    def __init__(self, tag, long long now_ns=0):
        self.tag = tag
        self.began_ns = now_ns
        self.shapes = {}
        self.awaiting = {}
        self.warned = False


cdef class Running:
    """What commenced and has no verdict."""

    def __init__(self, tag, sequence, members, long long began_ns=0):
        self.tag = tag
        self.began_ns = began_ns
        self.sequence = sequence
        self.members = set(members)
        self.waiting = set(members)
        self.failed = set()
        self.reason = ""


cdef class Collectives:
    """All that is open, running, or waiting for the ring in one group."""

    def __init__(self, number):
        self.number = number
        self.open = {}
        self.running = {}
        self.aborted = []
        self.held = {}
        self.latest = 0
        self.ripe = {}
        self.failures = []
        self.outbox = []

    # ------------------------------------------------------------------------------------------ what members say

    def initiate(self, peer, bytes shapes, long long now_ns=0):
        """A member's votes. Returns what is wrong with them if an honest peer would not send that."""
        cdef Tally tally
        cdef set held = self.held.setdefault(peer, set())
        try:
            votes = split_shapes(shapes)
        except ValueError as error:
            return f"initiated nonsense: {error}"
        if len(held) + len(votes) > TAGS_MAX:
            return f"initiated more than {TAGS_MAX} tags"
        for tag, shape in votes:
            if tag in held:
                return f"initiated tag {tag} twice"
            held.add(tag)
            tally = self.open.get(tag)
            if tally is None:
                tally = self.open[tag] = Tally(tag, now_ns)
            tally.shapes[peer] = shape
            self.ripe[tag] = None
        return ""

    def finished(self, peer, sequence, bint ok, str reason):
        """A member is through with its part. Returns what is wrong with that, or nothing."""
        cdef Running run = self.running.get(sequence)
        if run is None or peer not in run.members:
            past = any(failure.sequence == sequence and peer in failure.peers for failure in self.aborted)
            return "" if past else f"finished collective {sequence}, which it has no part in"
        if peer in run.failed or ok and peer not in run.waiting:
            return f"finished collective {sequence} twice"
        run.waiting.discard(peer)
        if not ok:
            self._member_failed(run, peer, reason)
        elif not run.waiting and not run.failed:
            done = ReduceDone(sequence)
            for member in run.members:
                self.held[member].discard(run.tag)
                self.outbox.append((member, done))
            del self.running[sequence]
        return ""

    cdef _member_failed(self, Running run, peer, str reason):
        """The first one ends it for all; the verdict waits until the last one has restored its memory."""
        run.failed.add(peer)
        if not run.reason:
            run.reason = f"peer {peer} gave up: {reason}"
            order = AbortReduce(run.sequence, run.reason)
            self.outbox += [(member, order) for member in run.members if member != peer]
        if len(run.failed) == len(run.members):
            self.failures.append(Failure(run.members, run.tag, run.sequence, RANK_CONNECTION_LOST, run.reason))
            del self.running[run.sequence]

    def awaits(self, peer, tag, long long now_ns):
        """A caller blocks on that tag. Once it has commenced nobody needs to know."""
        cdef Tally tally = self.open.get(tag)
        if tally is not None and peer in tally.shapes:
            tally.awaiting.setdefault(peer, now_ns)

    def withdraw(self, peer, tag):
        """A caller gave up. Too late is no error: then a verdict comes or came another way."""
        cdef Tally tally = self.open.get(tag)
        if tally is not None and peer in tally.shapes:
            self.fail(peer, tag, "given up by its caller")

    # ------------------------------------------------------------------------------------------ what the master decides

    def fail(self, peer, tag, str reason):
        """This vote ends without the others."""
        cdef Tally tally = self.open[tag]
        del tally.shapes[peer]
        tally.awaiting.pop(peer, None)
        if not tally.shapes:
            del self.open[tag]
        self.failures.append(Failure({peer}, tag, 0, INVALID_USAGE, reason))

    def remove(self, peer):
        """A member is gone, and its part in everything with it. The ring changes, so `abort` follows."""
        cdef Tally tally
        cdef Running run
        if not self.held.pop(peer, None):
            return
        for tally in list(self.open.values()):
            tally.shapes.pop(peer, None)
            tally.awaiting.pop(peer, None)
            if not tally.shapes:
                del self.open[tally.tag]
        for run in self.running.values():
            run.members.discard(peer)
        for failure in self.aborted + self.failures:
            failure.peers.discard(peer)
        self.aborted = [failure for failure in self.aborted if failure.peers]

    def abort(self, str reason):
        """The ring changes: nothing of what is under way can succeed. The first reason wins."""
        cdef Tally tally
        cdef Running run
        for run in self.running.values():
            if run.members:
                why = run.reason or reason
                self.aborted.append(Failure(run.members, run.tag, run.sequence, RANK_CONNECTION_LOST, why))
        for tally in self.open.values():
            self.aborted.append(Failure(set(tally.shapes), tally.tag, 0, RANK_CONNECTION_LOST, reason))
        self.open.clear()
        self.running.clear()
        self.ripe.clear()

    def settle(self, list ring, epoch, bint wired, bint ready, numbers):
        """What follows, as (peer, message). `ready`: the ring is not only wired, but all in it are members too.

        `numbers` is asked only if somebody must be told of a failure: what the world looks like to this group now.
        """
        commenced = []
        if wired and self.aborted:
            self.failures += self.aborted
            self.aborted = []
        if ready and self.ripe:
            commenced = self._commence(ring)
        if self.failures:
            self._tell_failures(numbers())
        for first in range(0, len(commenced), OPERATIONS_MAX):
            order = Commence(epoch, pack_pairs(commenced[first : first + OPERATIONS_MAX]))
            self.outbox += [(peer, order) for peer in ring]
        told, self.outbox = self.outbox, []
        return told

    cdef list _commence(self, list ring):
        """Close every vote that is unanimous: the (tag, sequence) of those that may begin."""
        cdef Tally tally
        cdef list commenced = []
        for tag in self.ripe:
            tally = self.open.get(tag)
            if tally is None or len(tally.shapes) < len(ring):
                continue
            del self.open[tag]
            if len(ring) < 2:
                reason = "this peer is alone in its group: wait for others, then call again"
                self.failures.append(Failure(set(ring), tag, 0, TOO_FEW_PEERS, reason))
            elif len(set(tally.shapes.values())) > 1:
                self.failures.append(Failure(set(ring), tag, 0, INVALID_ARGUMENT, _explain_difference(tally)))
            else:
                self.latest += 1
                self.running[self.latest] = Running(tag, self.latest, ring, tally.began_ns)
                commenced.append((tag, self.latest))
        self.ripe.clear()
        return commenced

    cdef _tell_failures(self, tuple numbers):
        for failure in self.failures:
            verdict = ReduceFailed(failure.tag, failure.sequence, failure.result, failure.reason, *numbers)
            for peer in sorted(failure.peers):
                self.held[peer].discard(failure.tag)
                self.outbox.append((peer, verdict))
        self.failures = []

    # ------------------------------------------------------------------------------------------ reports

    def holds(self, peer):
        """Whether this member has something without a verdict."""
        return bool(self.held.get(peer))

    def is_idle(self):
        """Whether nobody has."""
        return not any(self.held.values())

    def open_calls(self, list ring):
        """Tags that somebody blocks on, as calls that wait for votes."""
        cdef Tally tally
        return [
            OpenCall(f"all_reduce (tag {tally.tag})", frozenset(ring) - tally.shapes.keys(), tally.awaiting, tally)
            for tally in self.open.values()
            if tally.awaiting
        ]

    def check(self, list ring, bint wired, bint ready):
        """Invariants between two events."""
        cdef Tally tally
        cdef Running run
        where, members = f"group {self.number}", set(ring)
        assert not self.outbox and not self.failures, f"{where}: something was not told"
        assert not (wired and self.aborted or ready and self.ripe), f"{where}: somebody waits for nothing"
        held = {peer: set() for peer in members}
        for tag, tally in self.open.items():
            assert tally.shapes and tally.shapes.keys() <= members, f"{where}: tag {tag} of {set(tally.shapes)}"
            assert tally.awaiting.keys() <= tally.shapes.keys(), f"{where}: somebody awaits tag {tag} without a vote"
            assert not ready or len(tally.shapes) < len(ring), f"{where}: tag {tag} is unanimous and was left open"
            for peer in tally.shapes:
                held[peer].add(tag)
        for sequence, run in self.running.items():
            assert run.members == members, f"{where}: collective {sequence} runs over {run.members}, not {ring}"
            assert run.waiting or run.failed, f"{where}: collective {sequence} has no verdict"
            assert not run.failed or len(run.failed) < len(members), f"{where}: collective {sequence} has no verdict"
            assert bool(run.failed) == bool(run.reason), f"{where}: collective {sequence} failed without a reason"
            assert 0 < sequence <= self.latest, f"{where}: collective {sequence} of the future"
            for peer in members:
                assert run.tag not in held[peer], f"{where}: tag {run.tag} twice"
                held[peer].add(run.tag)
        for failure in self.aborted:
            assert failure.peers, f"{where}: tag {failure.tag} failed for nobody"
            for peer in failure.peers:
                assert failure.tag not in held[peer], f"{where}: tag {failure.tag} twice"
                held[peer].add(failure.tag)
        assert held == {peer: self.held.get(peer, set()) for peer in members}, f"{where}: holds {self.held}, not {held}"
        assert self.held.keys() <= members, f"{where}: holds something of strangers"


cdef str _explain_difference(Tally tally):
    """Who said what, those who agree together."""
    camps = {}
    for peer, shape in tally.shapes.items():
        camps.setdefault(shape, []).append(peer)
    parts = [f"{name_peers(sorted(peers))}: {unpack_shapes(shape)[0]}" for shape, peers in camps.items()]
    more = f"; and {len(parts) - SIDES_MAX} more" if len(parts) > SIDES_MAX else ""
    sides = f"{'; '.join(parts[:SIDES_MAX])}{more}"
    remedy = "Reduce the same count, dtype and op under a tag on every peer"
    return f"the members do not agree on what all_reduce (tag {tally.tag}) is: {sides}. {remedy}"

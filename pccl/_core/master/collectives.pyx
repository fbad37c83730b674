# cython: language_level=3
"""The collectives of one peer group, from the first member that initiates a tag to the one verdict for all.

A tag is *open* until all members have initiated it with one signature, and *running* until its verdict. If a member
fails, it is *aborting* until the memory of all members is drained. `group_phases.COLLECTIVES` says which event may lead
to which phase; docs/architecture.md shows it as a diagram.

**A tag** is held by a member from its vote until the member is sent a verdict; a second vote before that breaks the
protocol. So a vote that arrives after the ring changed comes either from a member that had not initiated that tag, or
from one that was told that it failed: both votes belong to the next reduce of that tag.

**Sequence numbers** name the reduces that commenced. They grow by one and are never used again, also when the ring
changes. All members get them in the same order, because a control link keeps the order of messages.

**Signatures that differ.** If more than half of the ring gave the same signature, the other members are *odd*: the
master kicks them, and so ends all tags of the group; the majority repeats them over the new ring. Only the first such
tag is judged before the ring changes, so a kick never costs more than a minority of a ring. Without a majority the tag
fails for all, with the explanation, and nobody is kicked.

**A change of the ring** ends everything at once and needs no answer: the ring order tells the members to give up. What
a member still says about a reduce that ended this way is ignored. A member that has reported its new edges sends
nothing more about the old ring.

Part of the master's machine, which sends what `tell` returns; pure, and knows nothing of a ring but its members. Every
reduce passes through here four times for each member, so this path is typed and allocates only what is kept.
"""

from pccl._core.protocol.operations cimport pack_pairs, split_signatures
from pccl._core.protocol.messages import AbortReduce, Commence, ReduceDone, ReduceFailed
from pccl._core.protocol.operations import OPERATIONS_MAX, unpack_signatures
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, INVALID_USAGE, RANK_CONNECTION_LOST, TOO_FEW_PEERS
from pccl._core.records import record
from pccl.options import TAGS_MAX

from .ballots import OpenCall
from .deadlock import name_peers

SIDES_MAX = 4  # different signatures that an explanation names; more would not help a reader
REMEDY = "Reduce the same count, dtype and op under a tag on every peer"

cdef Py_ssize_t operations_max = OPERATIONS_MAX


# The life of a tag, as a member that initiated it sees it (see `group_phases`). DONE and FAILED are verdicts: then the
# tag is free again.
FREE = "free"  # not initiated
OPEN = "open"  # initiated; not all members have, or the ring is not wired
RUNNING = "running"  # commenced
ABORTING = "aborting"  # a member gave up; the lanes of the others let go of the memory
INTERRUPTED = "interrupted"  # the ring changed; the verdict is sent when the new ring is wired
DONE = "done"
FAILED = "failed"


@record
class Failure:
    """A verdict that is not sent yet."""

    peers: set  # members that initiated it and are still there
    tag: int
    sequence: int  # 0: it never commenced
    result: int
    reason: str


cdef class OpenReduce:
    """A tag that some members have initiated and that has not commenced."""


cdef OpenReduce _new_open_tag(tag, bytes signature, long long now_ns):
    cdef OpenReduce open_tag = OpenReduce.__new__(OpenReduce)
    open_tag.tag = tag
    open_tag.began_ns = now_ns
    open_tag.first = signature
    open_tag.signatures = {}
    open_tag.awaiting = {}
    return open_tag


cdef class RunningReduce:
    """A collective that commenced and has no verdict."""


cdef RunningReduce _new_running(tag, sequence, list ring, long long began_ns):
    cdef RunningReduce run = RunningReduce.__new__(RunningReduce)
    run.tag = tag
    run.began_ns = began_ns
    run.sequence = sequence
    run.members = set(ring)
    run.waiting = set(run.members)
    run.reason = ""
    return run


cdef class Collectives:
    """All reduces of one group that have no verdict."""

    def __init__(self, number):
        self.number = number
        self.open = {}
        self.running = {}
        self.aborted = []
        self.held = {}
        self.latest = 0
        self.ripe = {}
        self.failures = []
        self.commenced = []
        self.outbox = []
        self.odd = None
        self.is_mixed = False

    # ------------------------------------------------------------------------------------------ what members say

    cpdef str initiate(self, peer, bytes signatures, long long now_ns=0):
        """Take a member's votes. Return an empty text, or what is wrong with votes that no honest peer would send."""
        cdef OpenReduce open_tag
        cdef bytes signature
        cdef list votes
        cdef set held = self.held.get(peer)
        if held is None:
            held = self.held[peer] = set()
        try:
            votes = split_signatures(signatures)
        except ValueError as error:
            return f"initiated nonsense: {error}"
        if len(held) + len(votes) > TAGS_MAX:
            return f"initiated more than {TAGS_MAX} tags"
        for tag, signature in votes:
            if tag in held:
                return f"initiated tag {tag} twice"
            held.add(tag)
            open_tag = self.open.get(tag)
            if open_tag is None:
                open_tag = self.open[tag] = _new_open_tag(tag, signature, now_ns)
            elif signature != open_tag.first:
                open_tag.is_mixed = self.is_mixed = True
            open_tag.signatures[peer] = signature
            self.ripe[tag] = None
        return ""

    cpdef str finished(self, peer, sequence, bint ok, str reason):
        """A member ended its part. Return what is wrong with its message, or an empty text."""
        cdef RunningReduce run = self.running.get(sequence)
        if run is None or peer not in run.members:
            return self._had_no_part(peer, sequence)
        if run.failed is not None and peer in run.failed or ok and peer not in run.waiting:
            return f"finished collective {sequence} twice"
        run.waiting.discard(peer)
        if not ok:
            self._member_failed(run, peer, reason)
        elif not run.waiting and run.failed is None:
            self._succeed(run)
        return ""

    cdef str _had_no_part(self, peer, sequence):
        """Return what is wrong with the end of an unknown reduce: nothing, if a change of the ring ended it."""
        for failure in self.aborted:
            if failure.sequence == sequence and peer in failure.peers:
                return ""
        return f"finished collective {sequence}, which it has no part in"

    cdef int _succeed(self, RunningReduce run) except -1:
        """All members finished: report success."""
        cdef set held
        for member in run.members:
            held = self.held[member]
            held.discard(run.tag)
        self.outbox.append((run.members, ReduceDone(run.sequence)))
        del self.running[run.sequence]
        return 0

    cdef int _member_failed(self, RunningReduce run, peer, str reason) except -1:
        """The first failure aborts the reduce for all; the verdict waits until the memory of all members is drained."""
        if run.failed is None:
            run.failed = set()
            run.reason = f"peer {peer} gave up: {reason}"
            others = [member for member in run.members if member != peer]
            self.outbox.append((others, AbortReduce(run.sequence, run.reason)))
        run.failed.add(peer)
        if len(run.failed) == len(run.members):
            self.failures.append(Failure(run.members, run.tag, run.sequence, RANK_CONNECTION_LOST, run.reason))
            del self.running[run.sequence]
        return 0

    def awaits(self, peer, tag, long long now_ns):
        """A caller blocks on that tag. Changes nothing once the tag has commenced."""
        cdef OpenReduce open_tag = self.open.get(tag)
        if open_tag is not None and peer in open_tag.signatures:
            open_tag.awaiting.setdefault(peer, now_ns)

    def withdraw(self, peer, tag):
        """A caller gave up. Changes nothing once the tag has commenced: it gets its verdict."""
        cdef OpenReduce open_tag = self.open.get(tag)
        if open_tag is not None and peer in open_tag.signatures:
            self.fail(peer, tag, "given up by its caller")

    # ------------------------------------------------------------------------------------------ what the master decides

    def fail(self, peer, tag, str reason):
        """Fail the vote of this member only; the votes of others stay."""
        cdef OpenReduce open_tag = self.open[tag]
        del open_tag.signatures[peer]
        open_tag.awaiting.pop(peer, None)
        if not open_tag.signatures:
            del self.open[tag]
        self.failures.append(Failure({peer}, tag, 0, INVALID_USAGE, reason))

    def remove(self, peer):
        """Remove a member that is gone from all reduces. The ring changes, so `abort` follows."""
        cdef OpenReduce open_tag
        cdef RunningReduce run
        if not self.held.pop(peer, None):
            return
        for open_tag in list(self.open.values()):
            open_tag.signatures.pop(peer, None)
            open_tag.awaiting.pop(peer, None)
            if not open_tag.signatures:
                del self.open[open_tag.tag]
        for run in self.running.values():
            run.members.discard(peer)
        for failure in self.aborted + self.failures:
            failure.peers.discard(peer)
        self.aborted = [failure for failure in self.aborted if failure.peers]

    def abort(self, str reason):
        """Interrupt all reduces, because the ring changes. The first reason is kept."""
        cdef OpenReduce open_tag
        cdef RunningReduce run
        for run in self.running.values():
            if run.members:
                why = run.reason or reason
                self.aborted.append(Failure(run.members, run.tag, run.sequence, RANK_CONNECTION_LOST, why))
        for open_tag in self.open.values():
            self.aborted.append(Failure(set(open_tag.signatures), open_tag.tag, 0, RANK_CONNECTION_LOST, reason))
        self.open.clear()
        self.running.clear()
        self.ripe.clear()
        self.is_mixed = False

    cdef bint decide(self, list ring, bint wired, bint ready) except -1:
        """Decide what can be decided. Return True if there are failures: then `tell` needs the numbers of the world.

        `ready`: the ring is wired, and all peers in it are members.
        """
        if self.is_mixed and ready and self.ripe:
            self.odd = self._find_odd(ring)
            if self.odd is not None:
                # The kicks change the ring and so interrupt every tag: no other verdict can be sent before the wiring.
                self.ripe.clear()
                self.aborted += self.failures
                self.failures = []
                return False
        if wired and self.aborted:
            self.failures += self.aborted
            self.aborted = []
        if ready and self.ripe:
            self._commence(ring)
        return len(self.failures) > 0

    cdef list tell(self, list ring, unsigned int epoch, tuple numbers):
        """Return what to send, as (peers, message). `numbers` of the world go into failures; None if there are none."""
        cdef list told = self.outbox
        cdef list pairs
        if self.failures:
            self._tell_failures(numbers)
        while self.commenced:
            pairs, self.commenced = self.commenced, []
            if len(pairs) > operations_max:
                pairs, self.commenced = pairs[:operations_max], pairs[operations_max:]
            told.append((ring, Commence(epoch, pack_pairs(pairs))))
        if told:
            self.outbox = []
        return told

    cdef dict _find_odd(self, list ring):
        """Return the members that must be kicked, of the first complete tag with a majority; None if there are none."""
        cdef OpenReduce open_tag
        self.is_mixed = any([open_tag.is_mixed for open_tag in self.open.values()])
        for tag in self.ripe:
            open_tag = self.open.get(tag)
            if open_tag is not None and open_tag.is_mixed and len(open_tag.signatures) == len(ring):
                odd = _outvoted(open_tag)
                if odd:
                    return odd
        return None

    cdef int _commence(self, list ring) except -1:
        """Close every vote that is unanimous, and commence what can commence."""
        cdef OpenReduce open_tag
        for tag in self.ripe:
            open_tag = self.open.get(tag)
            if open_tag is None or len(open_tag.signatures) < len(ring):
                continue
            del self.open[tag]
            if len(ring) < 2:
                reason = "this peer is alone in its group: wait for others, then call again"
                self.failures.append(Failure(set(ring), tag, 0, TOO_FEW_PEERS, reason))
            elif open_tag.is_mixed and not _is_one_signature(open_tag):
                self.failures.append(Failure(set(ring), tag, 0, INVALID_ARGUMENT, _explain_difference(open_tag)))
            else:
                self.latest += 1
                self.running[self.latest] = _new_running(tag, self.latest, ring, open_tag.began_ns)
                self.commenced.append((tag, self.latest))
        self.ripe.clear()
        return 0

    cdef dict take_odd(self):
        """Return the members that gave another signature than the majority, and the reason for their kick."""
        cdef dict odd = self.odd
        self.odd = None
        return odd

    cdef int _tell_failures(self, tuple numbers) except -1:
        for failure in self.failures:
            peers = sorted(failure.peers)
            for peer in peers:
                self.held[peer].discard(failure.tag)
            verdict = ReduceFailed(failure.tag, failure.sequence, failure.result, failure.reason, *numbers)
            self.outbox.append((peers, verdict))
        self.failures = []
        return 0

    # ------------------------------------------------------------------------------------------ reports

    cpdef bint holds(self, peer) except -1:
        """Whether this member has a reduce without a verdict."""
        cdef set held = self.held.get(peer)
        return held is not None and len(held) > 0

    def is_idle(self):
        """Whether no member has a reduce without a verdict."""
        return not any(self.held.values())

    def phases(self):
        """Return (member, tag) -> phase, of every tag without a verdict."""
        cdef OpenReduce open_tag
        cdef RunningReduce run
        found = {}
        for open_tag in self.open.values():
            found.update(dict.fromkeys([(peer, open_tag.tag) for peer in open_tag.signatures], OPEN))
        for run in self.running.values():
            phase = RUNNING if run.failed is None else ABORTING
            found.update(dict.fromkeys([(peer, run.tag) for peer in run.members], phase))
        for failure in self.aborted:
            found.update(dict.fromkeys([(peer, failure.tag) for peer in failure.peers], INTERRUPTED))
        return found

    def open_calls(self, list ring):
        """Return the tags on which a caller blocks, as calls that wait for votes."""
        cdef OpenReduce one
        return [
            OpenCall(f"all_reduce (tag {one.tag})", frozenset(ring) - one.signatures.keys(), one.awaiting, one)
            for one in self.open.values()
            if one.awaiting
        ]

    def check(self, list ring, bint wired, bint ready):
        """Invariants between two events."""
        cdef OpenReduce open_tag
        cdef RunningReduce run
        where, members = f"group {self.number}", set(ring)
        assert not self.outbox and not self.failures and not self.commenced, f"{where}: a message was not sent"
        assert self.odd is None, f"{where}: members {self.odd} were not kicked"
        assert not (wired and self.aborted or ready and self.ripe), f"{where}: a verdict or a vote is overdue"
        held = {peer: set() for peer in members}
        for tag, open_tag in self.open.items():
            voters = open_tag.signatures.keys()
            assert voters and voters <= members, f"{where}: tag {tag} of {set(voters)}"
            assert open_tag.awaiting.keys() <= voters, f"{where}: a peer awaits tag {tag} without a vote"
            assert not ready or len(voters) < len(ring), f"{where}: tag {tag} is unanimous and was left open"
            for peer in voters:
                held[peer].add(tag)
        for sequence, run in self.running.items():
            assert run.members == members, f"{where}: collective {sequence} runs over {run.members}, not {ring}"
            assert run.waiting or run.failed, f"{where}: collective {sequence} has no verdict"
            assert not run.failed or len(run.failed) < len(members), f"{where}: collective {sequence} has no verdict"
            assert bool(run.failed) == bool(run.reason), f"{where}: collective {sequence} failed without a reason"
            assert 0 < sequence <= self.latest, f"{where}: collective {sequence}, the latest is {self.latest}"
            for peer in members:
                assert run.tag not in held[peer], f"{where}: tag {run.tag} twice"
                held[peer].add(run.tag)
        for failure in self.aborted:
            assert failure.peers, f"{where}: tag {failure.tag} failed for no member"
            for peer in failure.peers:
                assert failure.tag not in held[peer], f"{where}: tag {failure.tag} twice"
                held[peer].add(failure.tag)
        assert held == {peer: self.held.get(peer, set()) for peer in members}, f"{where}: holds {self.held}, not {held}"
        assert self.held.keys() <= members, f"{where}: holds tags of peers that are no members"


cdef bint _is_one_signature(OpenReduce open_tag) except -1:
    # Whether all members gave the same signature.
    first = None
    for signature in open_tag.signatures.values():
        if first is None:
            first = signature
        elif signature != first:
            return False
    return True


cdef dict _camps(OpenReduce open_tag):
    """Return signature -> the members that gave it."""
    camps = {}
    for peer, signature in open_tag.signatures.items():
        camps.setdefault(signature, []).append(peer)
    return camps


cdef dict _outvoted(OpenReduce open_tag):
    """Return the members outside the majority, each with the reason for its kick; nothing if there is no majority."""
    camps = _camps(open_tag)
    right = max(camps, key=lambda signature: len(camps[signature]))
    if 2 * len(camps[right]) <= len(open_tag.signatures):
        return {}
    said = f"{name_peers(sorted(camps[right]))} gave {unpack_signatures(right)[0]}"
    odd = {}
    for signature, peers in camps.items():
        if signature != right:
            reason = (
                f"it does not agree with the majority on what all_reduce (tag {open_tag.tag}) is: it gave "
                f"{unpack_signatures(signature)[0]}; {said}. {REMEDY}"
            )
            odd.update(dict.fromkeys(peers, reason))
    return odd


cdef str _explain_difference(OpenReduce open_tag):
    """Say which members gave which signature."""
    camps = _camps(open_tag)
    parts = [f"{name_peers(sorted(peers))}: {unpack_signatures(signature)[0]}" for signature, peers in camps.items()]
    more = f"; and {len(parts) - SIDES_MAX} more" if len(parts) > SIDES_MAX else ""
    sides = f"{'; '.join(parts[:SIDES_MAX])}{more}"
    return f"the members do not agree on what all_reduce (tag {open_tag.tag}) is: {sides}. {REMEDY}"

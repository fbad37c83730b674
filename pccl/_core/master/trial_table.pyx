# cython: language_level=3
"""The trials of newcomers: which ordered pairs of peers were tried, and what was shown.

A trial is a dial without any other effect, which the master orders a peer to make. Its outcome is used for
`unreachable_expiry`. After that a failure is forgotten, and a success is tried again; it counts until the next report.
At least one of the two peers is a newcomer: what members know of each other stands in the marks of their group.

Part of the master's machine; `admission` decides which trials are wanted.
"""

from pccl._core.protocol.messages import Try
from pccl.options import nanoseconds

from .membership cimport Membership, Peer

UNKNOWN = "unknown"
SHOWN = "shown"
FAILED = "failed"
OVERDUE = "overdue"  # there is no report, which is the fault of the peer that dials

cdef str unknown = UNKNOWN, shown = SHOWN, failed = FAILED, overdue = OVERDUE

REPORT_NS = 1_000_000_000  # for the messages about a trial, beyond the time that the dial may take


cdef class Trial:
    """One ordered pair of peers, and whether the first has reached the second."""

    def __init__(self, source, target):
        self.source = source
        self.target = target
        self.outcome = UNKNOWN
        self.reason = ""


cdef class TrialTable:
    """All trials, by the pair of peers."""

    def __init__(self, Membership members not None):
        self.members = members
        self.trials, self.touching = {}, {}
        self.patience_ns = nanoseconds(members.options.connect_timeout) + REPORT_NS
        self.expiry_ns = nanoseconds(members.options.unreachable_expiry)

    cdef Trial get(self, source, target):
        """Return the trial of this pair, or None."""
        return self.trials.get((source, target))

    cdef bint is_shown(self, source, target) except -1:
        """Whether the source has reached the target."""
        cdef Trial trial = self.trials.get((source, target))
        return trial is not None and trial.outcome is shown

    cdef list of(self, peer_id):
        """Return the trials in which this peer is the source or the target."""
        return [self.trials[pair] for pair in sorted(self.touching.get(peer_id, ()))]

    cdef int want(self, source, target) except -1:
        """Order a trial of this pair, unless it was ordered before."""
        cdef Trial trial
        pair = source, target
        if pair in self.trials:
            return 0
        trial = self.trials[pair] = Trial(source, target)
        self.touching.setdefault(source, set()).add(pair)
        self.touching.setdefault(target, set()).add(pair)
        return self._begin(trial)

    cdef int _begin(self, Trial trial) except -1:
        cdef Peer target = self.members.peers[trial.target]
        trial.under_way = True
        trial.until_ns = self.members.now_ns + self.patience_ns
        return self.members.send(
            self.members.peers[trial.source], Try(target.id, target.instance, target.port, target.host)
        )

    cdef bint end(self, Trial trial, str reason) except -1:
        """Take a report: the trial succeeded if there is no reason why it failed. Return whether it was awaited."""
        if trial is None or not trial.under_way:
            return False
        trial.under_way = False
        trial.outcome = failed if reason else shown
        trial.reason = reason
        trial.ended_ns = self.members.now_ns
        trial.until_ns = trial.ended_ns + self.expiry_ns
        return True

    cdef int forget(self, Trial trial) except -1:
        """Remove a trial."""
        pair = trial.source, trial.target
        del self.trials[pair]
        for peer_id in pair:
            pairs = self.touching[peer_id]
            pairs.discard(pair)
            if not pairs:
                del self.touching[peer_id]
        return 0

    cdef list sweep(self):
        """Time has passed. Return the trials whose outcome has changed: overdue reports, and old failures."""
        cdef Trial trial
        changed = []
        for trial in list(self.trials.values()):
            if self.members.now_ns < trial.until_ns:
                continue
            if trial.under_way and trial.outcome is not overdue:
                trial.outcome, trial.until_ns = overdue, self.members.now_ns + self.expiry_ns
                changed.append(trial)
            elif trial.outcome is shown:
                self._begin(trial)
            else:
                self.forget(trial)
                changed.append(trial)
        return changed

    def check(self, newcomers):
        """Invariants between two events."""
        cdef Trial trial
        touching = {}
        for pair, trial in self.trials.items():
            assert pair == (trial.source, trial.target) and trial.source != trial.target, f"trial {pair}"
            assert any(peer_id in newcomers for peer_id in pair), f"trial {pair} of no newcomer"
            assert all(peer_id in self.members.peers for peer_id in pair), f"trial {pair} of a peer that is gone"
            assert trial.under_way or trial.outcome is not UNKNOWN, f"trial {pair} was never begun"
            assert trial.reason or trial.outcome is not FAILED, f"trial {pair} failed without a reason"
            for peer_id in pair:
                touching.setdefault(peer_id, set()).add(pair)
        assert touching == self.touching, f"trials {sorted(self.trials)}, but {self.touching}"

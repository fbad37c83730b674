# cython: language_level=3
"""Which run the master serves: its begin, its name, and its end.

**Names.** A peer registers with the name of its run. The first peer of an empty master decides which run is served: the
one of that name which the table remembers, or a new one. While the run has peers, a peer of another name is refused,
with both names. Newcomers that nobody has reached do not count: they make way. The run that is not served any more is
kept in the table, with all that it has agreed on.

**The end.** finish() is a vote of all members of all groups. When it is unanimous, and neither a topology round nor an
optimisation is under way, the run is finished: that is saved before any peer is told. Then all members, newcomers, and
all who register later with this name get RunFinished, and nobody of them is a peer any more.

Part of the master's machine; `run_table` has the remembered runs.
"""

from pccl._core.protocol.events import FINISH, INFO, OPTIMIZE, SYNC, TOPOLOGY, WARNING
from pccl._core.protocol.messages import Kick, RunFinished
from pccl._core.protocol.outcomes import INVALID_USAGE, RANK_CONNECTION_FAILED

from .group cimport Group
from .membership cimport Membership, Peer
from .admission import REMEDY
from .ballots import Vote
from .deadlock import name_peers
from .election import NEVER
from .events import Dismiss, Save, SendTo
from .optimizer import IDLE
from .run_table import AgreedState, RememberedRun, RunTable, find_fault, make_id, name_run, pack_run, unpack_run
from .topology_round import CLOSED

NOTHING_LEFT = (
    "all its members called finish(), so nothing is left to do. To begin another run, set another Options.run "
    "(PCCL_RUN), or start the master with --new-run"
)


cdef class Runs:
    """The present run, and the others that this master remembers."""

    def __init__(
        self, Membership members not None, ballots, Optimizer optimizer not None, TopologyRound topology_round not None
    ):
        self.members = members
        self.admission = topology_round.admission
        self.ballots = ballots
        self.votes = ballots.votes
        self.optimizer = optimizer
        self.topology_round = topology_round
        self.table = RunTable()
        self.finished = self.voting = False
        self.told_ns = members.now_ns

    # ------------------------------------------------------------------------------------------ the begin

    cdef bint admits(self, event) except -1:
        """Whether this newcomer may register; if not, it is told why. The first peer decides which run is served."""
        cdef Membership members = self.members
        cdef str name = event.register.run
        wrong = find_fault(name)
        if wrong:
            self._refuse(event.conn, Kick(INVALID_USAGE, f"{name!r} is no name: {wrong}. Correct Options.run"))
        elif (self.finished and name == members.run_name) or self.table.is_finished(name):
            self.told_ns = members.now_ns
            members.log(INFO, f"a peer at {event.host} comes after the end: {name_run(name)} is finished")
            self._refuse(event.conn, RunFinished(0, f"{name_run(name)} is finished: {NOTHING_LEFT}"))
        elif name == members.run_name:
            return True
        elif members.accepted or members.admitting or self.admission.has_reached():
            reason = self._explain_other(name)
            members.log(WARNING, f"refused a peer at {event.host}: {reason}")
            members.count("refused")
            self._refuse(event.conn, Kick(INVALID_USAGE, reason))
        else:
            for peer in list(members.peers.values()):
                reason = f"{name_run(name)} begins here, and no peer reached this one: {self.admission.why(peer.id)}"
                members.kick(peer, RANK_CONNECTION_FAILED, f"{reason}. {REMEDY}, then connect again")
            self._change(name)
            return True
        return False

    cdef int _refuse(self, conn, message) except -1:
        self.members.act(SendTo(conn, message))
        self.members.act(Dismiss(conn))
        return 0

    def _explain_other(self, name):
        """Why a peer of another run is refused, with both names, and what to do."""
        members = self.members
        present, count = name_run(members.run_name), len(members.peers)
        return (
            f"this peer belongs to {name_run(name)}, but this master serves {present}, which has {count} "
            f"peer{'' if count == 1 else 's'}. Set Options.run or PCCL_RUN to {members.run_name!r} to join them, or "
            f"start another master for {name_run(name)}"
        )

    def _change(self, name):
        """Serve the run of this name: the one that is remembered, or a new one. The present run has no peer."""
        cdef Membership members = self.members
        present = self._present()
        if present.finished or present.groups:
            for forgotten in self.table.keep(members.run_name, present):
                members.log(WARNING, f"forgets {name_run(forgotten)}: too many other runs came after it")
        run = self.table.take(name)
        if run is None:
            run = RememberedRun(make_id(members.run, name, members.next_id), False, {})
            members.log(INFO, f"begins {name_run(name)}")
        else:
            members.log(INFO, f"resumes {name_run(name)}: agreed revisions by group {run.revisions()}")
        self._serve(name, run)
        members.act(Save())

    def _present(self):
        """The present run, as the table remembers it."""
        cdef Group group
        groups = {}
        for number, group in self.members.groups.items():
            consensus = group.consensus
            if consensus.revision != NEVER:
                groups[number] = AgreedState(group.epoch, consensus.revision, consensus.content, consensus.schema)
        return RememberedRun(self.members.run, bool(self.finished), groups)

    cdef int _serve(self, str name, run) except -1:
        """Make this the present run. There is no peer."""
        cdef Membership members = self.members
        cdef Group group
        members.run_name, members.run = name, run.id
        self.finished = run.finished
        members.groups.clear()
        for number, agreed in run.groups.items():
            group = members.new_group(number)
            group.epoch = agreed.epoch
            group.consensus.revision = agreed.revision
            group.consensus.content = agreed.content
            group.consensus.schema = agreed.schema
        return 0

    # ------------------------------------------------------------------------------------------ the end

    def on_vote(self, Peer peer, message):
        """A member calls finish."""
        cdef Group group = self.members.groups[peer.group]
        if group.collectives.holds(peer.id):
            wrong = f"voted in {FINISH} while a reduce of its own has no verdict"
        elif group.consensus.holds(peer.id):
            wrong = f"voted in {FINISH} while it is in {SYNC}"
        elif peer.id in self.votes[TOPOLOGY]:
            wrong = f"voted in {FINISH} while it votes on the topology"
        elif self.optimizer.involves(peer.id):
            wrong = f"voted in {FINISH} while it is in {OPTIMIZE}"
        else:
            self.voting = True
            wrong = self.ballots.cast(FINISH, peer.id, Vote(message.call, 0, self.members.now_ns))
        if wrong:
            self.members.kick(peer, INVALID_USAGE, wrong)

    cdef bint settle(self) except -1:
        """Finish the run if all members have voted for it. Return whether it is finished now."""
        if not self.voting or not self._is_ripe():  # at nearly every event
            return False
        self._finish()
        return True

    cdef bint _is_ripe(self) except -1:
        """Whether all members have voted, and nothing is under way that must be answered first."""
        cdef dict votes = <dict> self.votes[FINISH]
        self.voting = len(votes) > 0
        if not votes or len(votes) < len(self.members.accepted):
            return False
        return self.topology_round.phase is not CLOSED and self.optimizer.phase is IDLE

    def _finish(self):
        """Save that the run is finished, then answer all members and newcomers; none of them is a peer any more."""
        cdef Membership members = self.members
        cdef Peer peer
        self.finished = True
        self.told_ns = members.now_ns
        revisions = self._present().revisions()
        members.act(Save())
        votes = self.ballots.close(FINISH)
        named = name_run(members.run_name)
        members.log(INFO, f"{named} is finished: {name_peers(sorted(votes))} agreed; revisions by group {revisions}")
        reason = f"{named} is finished: {NOTHING_LEFT}"
        for peer_id in sorted(members.peers):
            peer = members.peers[peer_id]
            vote = votes.get(peer_id)
            members.send(peer, RunFinished(0 if vote is None else vote.call, reason))
            members.act(Dismiss(peer.conn))
            members.remove(peer, "finished", f"{named} is finished")

    # ------------------------------------------------------------------------------------------ reports

    def snapshot(self):
        """Return what the state file keeps: the present run, the numbers that go on, and the remembered runs."""
        cdef Membership members = self.members
        others = [pack_run(name, run) for name, run in self.table.runs.items()]
        present = pack_run(members.run_name, self._present())
        return {**present, "next_id": members.reserved_id, "round": members.round, "runs": others}

    def resume(self, snapshot):
        """Continue with what a master that has ended had saved; all former peers are gone."""
        self.members.resume(snapshot["next_id"], snapshot["round"])
        name, run = unpack_run(snapshot)
        self._serve(name, run)
        self.table.runs.update(unpack_run(packed) for packed in snapshot["runs"])

    def check(self):
        """Invariants between two events."""
        members, votes = self.members, self.votes
        assert not self._is_ripe(), "a unanimous finish was left open"
        assert not self.finished or not members.peers, f"a finished run has peers {set(members.peers)}"
        assert members.run_name not in self.table.runs, f"{name_run(members.run_name)} is remembered and served"
        for name in (TOPOLOGY, OPTIMIZE):
            assert not votes[FINISH].keys() & votes[name].keys(), f"a member is in {FINISH} and {name}"
        for peer_id in votes[FINISH]:
            group = members.groups[members.peers[peer_id].group]
            assert not group.collectives.holds(peer_id), f"peer {peer_id} reduces beside {FINISH}"
            assert not group.consensus.holds(peer_id), f"peer {peer_id} is in {SYNC} and {FINISH}"

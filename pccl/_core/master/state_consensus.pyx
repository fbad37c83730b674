# cython: language_level=3
"""The consensus of one peer group: its agreed state, and how it finds the next one.

`group_phases.CONSENSUS` says which event may lead to which phase; docs/architecture.md shows it as a diagram.

**The vote** is complete when every member of the group has one. The rules of the decision are in `election`. The
master never sees content; it sees a schema only when two of them differ, from one holder of each: then it kicks the
peers with another schema than the right one, and decides again.

**A transfer** is among the members that voted. The sources serve, the receivers fetch from all of them at once and
report when they hold the state. A source that is lost is removed. A receiver that finds no source left reports that and
waits: it is *stranded*. When all receivers are stranded and every source is lost, the receivers that have finished
become sources, the *heirs*; without any, all calls fail. A receiver that is stranded while a source is still there
cannot reach it, and is kicked. So a sync succeeds for all members or for none, and all stay at the same revision. When
no receiver fetches any more, every member that is left holds the state, and it is agreed.

**The agreed state** never goes back: its revision grows by one with every sync, except where members repeat the last
one or resume from it, which changes nothing. It is kept when all members are gone, and after a restart of the master if
there is a state file.

**A divergent member** has completed a sync before, did not vote RECEIVE_ONLY, and is overwritten all the same: it
computes something else than the others. That is no error, so the operator is told (`overwritten`).

A change of the ring does not affect any of this. Part of the master's machine, which sends what `settle` returns; pure.
"""

from pccl._core.protocol.events import SYNC
from pccl._core.protocol.messages import AskSchema, CallFailed, Fetch, MoreSources, Serve, SourceGone, SyncDone
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, INVALID_USAGE, RANK_CONNECTION_LOST
from pccl._core.protocol.sources import Source, pack_sources
from pccl._core.protocol.state_schema import PAGES_MAX, digest_schema, unpack_schema
from pccl.options import KEYS_MAX, SCHEMA_BYTES_MAX

from .ballots import OpenCall
from .election import (
    NEVER, RECEIVE_ONLY, STRATEGIES, StateVote, choose_schema, decide, explain_schemas, kick_odd_schemas,
)

# Phases of one group's sync (see `group_phases`). A member that gave up while the others transfer may vote again
# meanwhile; the group is TRANSFERRING until the transfer ends.
IDLE = "idle"  # no member is in sync_shared_state
VOTING = "voting"  # some members have voted, not all
ASKING = "asking"  # schemas differ: one holder of each was asked for it
TRANSFERRING = "transferring"  # the vote is decided, and receivers fetch

CUT_OFF = "it cannot fetch the shared state from any of the peers that have it"
SOURCES_LOST = "every peer that had the state was lost, or gave up, while it was sent: call sync_shared_state again"


cdef class Transfer:
    """The movement of a state from the members that have it to those that lack it."""

    def __init__(self, number, decision, bytes schema, dict votes):
        self.round = number
        self.revision = decision.revision
        self.content = decision.content
        self.schema = schema
        self.votes = votes
        self.sources = set(decision.sources)
        self.fetching = {peer for peer, _ in decision.receivers}
        self.divergent = {}
        self.endpoints = {}
        self.stranded = {}


cdef class StateConsensus:
    """The votes, the transfer and the agreed state of one group."""

    def __init__(self, number):
        self.number = number
        self.revision = NEVER
        self.content = self.schema = b""
        self.author = None
        self.votes = {}
        self.schemas = {}
        self.asked = {}
        self.transfer = None
        self.latest = 0
        self.synced = set()
        self.overwritten = []
        self.outbox = []

    # ------------------------------------------------------------------------------------------ what members say

    def vote(self, peer, message, long long now_ns):
        """A member calls sync_shared_state. Return what is wrong with its vote, or an empty text."""
        if self.holds(peer):
            return f"voted twice in {SYNC}"
        if message.strategy >= len(STRATEGIES) or not 1 <= message.keys <= KEYS_MAX:
            return f"voted nonsense in {SYNC}: strategy {message.strategy}, {message.keys} keys"
        self.votes[peer] = StateVote(
            message.call, message.revision, message.strategy, message.torn, message.schema, message.content, now_ns
        )
        return ""

    def give_schema(self, peer, message):
        """Take a page of the schema that was asked for. Return what is wrong with it, or an empty text."""
        vote = self.votes.get(peer)
        if vote is None or vote.call != message.call or self.asked.get(vote.schema, (0,))[0] != peer:
            return ""  # the vote was decided without it
        pages = self.asked[vote.schema][1]
        if message.page != len(pages) or not message.page < message.pages <= PAGES_MAX:
            return f"sent page {message.page} of {message.pages} of its schema after {len(pages)} of them"
        pages.append(message.rows)
        if len(pages) == message.pages:
            schema = b"".join(pages)
            del self.asked[vote.schema]
            try:
                unpack_schema(schema)
            except ValueError as error:
                return f"sent no schema: {error}"
            if digest_schema(schema) != vote.schema:
                return "sent another schema than the one it voted with"
            self.schemas[vote.schema] = schema
        return ""

    def fetched(self, peer, message):
        """A receiver has the state, or no source left. Return what is wrong with its message, or an empty text."""
        cdef Transfer transfer = self.transfer
        if message.round > self.latest:
            return f"fetched in transfer {message.round}, which has not begun"
        if transfer is None or message.round != transfer.round or peer not in transfer.votes:
            return ""  # answered already: its last source was lost, or its caller gave up
        if peer not in transfer.fetching:
            return f"fetched in transfer {message.round}, in which it has nothing to fetch"
        if peer in transfer.stranded:
            return f"fetched in transfer {message.round}, in which it had no source left"
        if message.ok:
            transfer.fetching.discard(peer)
        else:
            transfer.stranded[peer] = message.reason
        return ""

    def withdraw(self, peer, call):
        """A caller gave up. Changes nothing if the call is already answered."""
        cdef Transfer transfer = self.transfer
        vote = self.votes.get(peer)
        if vote is None and transfer is not None:
            vote = transfer.votes.get(peer)
        if vote is not None and vote.call == call:
            self._lose_part(peer)

    # ------------------------------------------------------------------------------------------ what the master decides

    def fail(self, peer, str reason):
        """Fail the vote of this member only; the votes of others stay."""
        vote = self.votes[peer]
        self._lose_part(peer)
        self.outbox.append((peer, CallFailed(vote.call, INVALID_USAGE, reason)))

    def remove(self, peer):
        """Remove a member that is gone from the vote and the transfer."""
        self._lose_part(peer)
        self.synced.discard(peer)
        self.outbox = [(other, message) for other, message in self.outbox if other != peer]

    cdef _lose_part(self, peer):
        cdef Transfer transfer = self.transfer
        if self.votes.pop(peer, None) is not None:
            wanted = {vote.schema for vote in self.votes.values()}
            self.asked = {schema: asked for schema, asked in self.asked.items() if asked[0] != peer}
            self.schemas = {schema: packed for schema, packed in self.schemas.items() if schema in wanted}
        if transfer is None or transfer.votes.pop(peer, None) is None:
            return
        if not transfer.votes:
            self.transfer = None  # no member takes part any more
            return
        transfer.fetching.discard(peer)
        transfer.stranded.pop(peer, None)
        if peer in transfer.sources:
            transfer.sources.discard(peer)
            for other in sorted(transfer.fetching - transfer.stranded.keys()):
                self.outbox.append((other, SourceGone(transfer.votes[other].call, transfer.round, peer)))

    def settle(self, int members, dict peers, str run=""):
        """Return messages as (peer, message), kicks as {peer: (result, reason)}, and whether a new state is agreed.

        `overwritten` has the divergent members of the syncs that ended.

        A new agreed state must be saved before the messages are sent. If there are kicks, settle again after them.

        `members` is how many must vote, `peers` says where they can be dialled, `run` is the name of the run.
        """
        kicks, agreed = {}, False
        if self.overwritten:
            self.overwritten = []
        if self.transfer is not None:
            agreed = self._complete_transfer(kicks)
        if not kicks and self.votes and len(self.votes) == members and self._know_schemas():
            kicks = self._decide(peers, run)
            if self.transfer is not None:
                agreed = self._complete_transfer(kicks) or agreed
        told, self.outbox = self.outbox, []
        return told, kicks, agreed

    cdef bint _know_schemas(self):
        """Whether all votes have one schema, or every schema is known; if not, ask one holder of each."""
        wanted = {vote.schema for vote in self.votes.values()}
        if len(wanted) == 1:
            return True
        for schema in sorted(wanted - self.schemas.keys() - self.asked.keys()):
            self._ask(schema)
        return len(self.schemas) == len(wanted)

    cdef _ask(self, bytes schema):
        peer = min(peer for peer, vote in self.votes.items() if vote.schema == schema)
        self.asked[schema] = (peer, [])
        self.outbox.append((peer, AskSchema(self.votes[peer].call)))

    cdef dict _decide(self, dict peers, str run):
        """Decide a complete vote. Return the peers that must be kicked first; if there are none, close the vote."""
        right = choose_schema(self.votes, self.schema)
        if right is None:
            self._answer_all(self.votes, INVALID_ARGUMENT, explain_schemas(self.votes, self.schemas))
            self._forget_vote()
            return {}
        kicks = kick_odd_schemas(self.votes, right, self.schemas)
        if kicks:
            return kicks
        decision = decide(self.votes, self.revision, self.content, run)
        if decision.kicks:
            return decision.kicks
        if decision.failure is not None:
            result, reason = decision.failure
            self._answer_all(self.votes, result, reason)
        else:
            self._begin_transfer(decision, right, peers)
        self._forget_vote()
        return {}

    cdef _forget_vote(self):
        """The vote is closed: its members were answered, or are in the transfer."""
        self.votes = {}
        self.schemas = {}
        self.asked = {}

    cdef _begin_transfer(self, decision, bytes schema, dict peers):
        """Tell the sources before the receivers, so that a source usually expects a receiver that dials."""
        if decision.receivers:
            self.latest += 1
        self.transfer = Transfer(self.latest, decision, schema, self.votes)
        if not decision.receivers:
            return
        self.transfer.divergent = {
            peer: self.votes[peer]
            for peer, _ in decision.receivers
            if peer in self.synced and self.votes[peer].strategy != RECEIVE_ONLY
        }
        for peer in decision.sources:
            self.outbox.append((peer, Serve(self.votes[peer].call, self.latest)))
        self.transfer.endpoints = {peer: Source(peer, peers[peer].host, peers[peer].port) for peer in self.votes}
        sources = [self.transfer.endpoints[peer] for peer in decision.sources]
        for turn, (peer, whole) in enumerate(decision.receivers):
            # Every receiver begins with another source, so that no source is asked by all.
            first = turn % len(sources)
            packed = pack_sources(sources[first:] + sources[:first])
            call = self.votes[peer].call
            self.outbox.append((peer, Fetch(call, self.latest, whole, decision.revision, decision.content, packed)))

    cdef _answer_all(self, dict votes, int result, str reason):
        for peer in sorted(votes):
            self.outbox.append((peer, CallFailed(votes[peer].call, result, reason)))

    cdef bint _complete_transfer(self, dict kicks):
        """End the transfer if no receiver fetches or can fetch; kick receivers that cannot reach a source.

        Return True if a new state is agreed.
        """
        cdef Transfer transfer = self.transfer
        if transfer.fetching and len(transfer.stranded) == len(transfer.fetching):
            heirs = transfer.votes.keys() - transfer.fetching
            if transfer.sources:
                for peer, reason in transfer.stranded.items():
                    kicks[peer] = RANK_CONNECTION_LOST, f"{CUT_OFF}: {reason}"
            elif heirs:
                self._appoint(heirs)
            else:
                self._answer_all(transfer.votes, RANK_CONNECTION_LOST, SOURCES_LOST)
                self.transfer = None
                return False
        if transfer.fetching:
            return False
        self.transfer = None
        for peer in sorted(transfer.votes):
            self.outbox.append((peer, SyncDone(transfer.votes[peer].call, transfer.revision)))
        self.synced.update(transfer.votes)
        if transfer.divergent:
            self.overwritten += [
                (peer, vote.revision, transfer.revision)
                for peer, vote in transfer.divergent.items()
                if peer in transfer.votes
            ]
        now = transfer.revision, transfer.content, transfer.schema
        if not transfer.votes or now == (self.revision, self.content, self.schema):
            return False
        self._agree(transfer)
        return True

    cdef _agree(self, Transfer transfer):
        """All members hold the elected state: it is the agreed state."""
        alone = next(iter(transfer.votes)) if len(transfer.votes) == 1 else None
        self.author = alone if self.revision == NEVER or self.author == alone else None
        self.revision, self.content, self.schema = transfer.revision, transfer.content, transfer.schema

    def forget_if_only(self, peer):
        """Forget the agreed state if this peer alone has ever agreed on one. Return whether it is forgotten."""
        if self.author != peer:
            return False
        self.author, self.revision = None, NEVER
        self.content = self.schema = b""
        return True

    cdef _appoint(self, heirs):
        """Let receivers that have finished serve the stranded ones."""
        cdef Transfer transfer = self.transfer
        transfer.sources |= heirs
        for peer in sorted(heirs):
            self.outbox.append((peer, Serve(transfer.votes[peer].call, transfer.round)))
        packed = pack_sources([transfer.endpoints[peer] for peer in sorted(heirs)])
        for peer in sorted(transfer.stranded):
            self.outbox.append((peer, MoreSources(transfer.votes[peer].call, transfer.round, packed)))
        transfer.stranded.clear()

    # ------------------------------------------------------------------------------------------ reports

    cpdef str phase(self):
        """IDLE, VOTING, ASKING or TRANSFERRING."""
        if self.transfer is not None:
            return TRANSFERRING
        if self.asked:
            return ASKING
        return VOTING if self.votes else IDLE

    cpdef bint holds(self, peer) except -1:
        """Whether this member is in sync_shared_state."""
        return peer in self.votes or self.transfer is not None and peer in self.transfer.votes

    cpdef bint is_idle(self) except -1:
        """Whether no member is in sync_shared_state."""
        return self.transfer is None and not self.votes

    def open_calls(self, set members):
        """Return the vote and the transfer, as calls that members wait in."""
        calls = []
        if self.votes:
            missing = members - self.votes.keys() or {peer for peer, _ in self.asked.values()}
            waiting = {peer: vote.since_ns for peer, vote in self.votes.items() if peer not in missing}
            calls.append(OpenCall(SYNC, frozenset(missing), waiting, None, self))
        if self.transfer is not None:
            waiting = {peer: vote.since_ns for peer, vote in self.transfer.votes.items()}
            calls.append(OpenCall(SYNC, frozenset(), waiting, None, self))
        return calls

    def check(self, set members):
        """Invariants between two events."""
        cdef Transfer transfer = self.transfer
        where = f"group {self.number}"
        assert not self.outbox, f"{where}: a message about its state was not sent"
        assert self.votes.keys() <= members, f"{where}: state votes of {set(self.votes)}"
        assert len(self.votes) < len(members) or not members or self.asked, f"{where}: a vote was not decided"
        wanted = {vote.schema for vote in self.votes.values()}
        assert self.schemas.keys() <= wanted, f"{where}: schemas without a vote"
        assert not (self.schemas.keys() & self.asked.keys()), f"{where}: asked for a schema that is known"
        for schema, (peer, pages) in self.asked.items():
            assert self.votes[peer].schema == schema, f"{where}: asked peer {peer} for another schema"
            assert sum(len(page) for page in pages) <= SCHEMA_BYTES_MAX, f"{where}: a schema is too long"
        assert (self.revision == NEVER) == (not self.content) == (not self.schema), f"{where}: agreed state is partial"
        if transfer is not None:
            assert transfer.fetching, f"{where}: a transfer with nothing to do"
            assert transfer.stranded.keys() < transfer.fetching, f"{where}: all are stranded: {transfer.stranded}"
            assert transfer.sources | transfer.fetching <= transfer.votes.keys(), f"{where}: a part without a vote"
            assert not (transfer.sources & transfer.fetching), f"{where}: a peer fetches from itself"
            assert transfer.votes.keys() <= members, f"{where}: a transfer of {set(transfer.votes)}"
            assert not (transfer.votes.keys() & self.votes.keys()), f"{where}: a member is in two calls"
            assert transfer.revision in (self.revision, self.revision + 1) or self.revision == NEVER, (
                f"{where}: the transfer skips a revision"
            )
            assert not self.asked, f"{where}: asks for schemas during a transfer"

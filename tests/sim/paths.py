"""Rare paths that the seeds must have taken: a simulation that never takes a path proves nothing about it.

Each path is recognised by an event, the actions that it led to, and the state of the machine before it. A path that the
seeds of the test suite never take fails a test.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.master.master_state import PENDING, TOPOLOGY
from pccl._core.master.optimizer import IDLE, MEASURING
from pccl._core.master.topology_round import CLOSED, HELD
from pccl._core.peer import events as peer_events
from pccl._core.protocol import events, mailbox, messages
from pccl._core.protocol.operations import unpack_pairs
from pccl._core.protocol.outcomes import INVALID_ARGUMENT, PENDING_ASYNC_OPS, RANK_CONNECTION_LOST, TOO_FEW_PEERS
from pccl.options import nanoseconds

from .actor_paths import ACTOR_PATHS, mark_after, mark_before, mark_loss
from .runs import RUN_PATHS
from .sync_paths import SYNC_PATHS, mark_master, mark_peer, remember

if TYPE_CHECKING:
    from .nodes import MasterShell, PeerShell

PATHS = SYNC_PATHS | ACTOR_PATHS | RUN_PATHS | {
    # membership
    "a member is lost while newcomers are wired",
    "a newcomer is lost while it is admitted",
    "an empty run takes those who wait",
    "a silent peer is kicked",
    "a sweep after the master's own pause kicks no peer",
    "a peer that breaks the protocol is kicked",
    # rings
    "a pair that cannot connect is routed around",
    "a newcomer is refused because there is no ring",
    "a veteran is kicked because there is no ring",
    "a newcomer that finds no gap is refused",
    "a lone member makes way for a larger set",
    "an unreached newcomer makes way for another run",
    "a late report of an unreachable pair is ignored",
    "a broken edge is ordered anew",
    "the second report of a broken edge is ignored",
    "a report of a past epoch is ignored",
    "slow wiring ends a newcomer",
    "slow wiring ends a veteran",
    # votes
    "a withdrawal counts",
    "a withdrawal during an admission",
    "a withdrawal comes too late",
    "a vote is held for a larger group",
    "a held vote is released by a newcomer",
    "calls that never meet are explained",
    "the minority of a deadlock is kicked",
    "a long vote is named",
    "a newcomer is told whom it waits for",
    "a straggler is kicked",
    "newcomers are pending",
    "no peer is pending",
    # optimisations
    "an optimisation takes another ring",
    "an optimisation keeps the ring",
    "an optimisation measures only a part",
    "a member is lost while edges are measured",
    "a member is lost while an optimised ring is wired",
    "an edge cannot be measured",
    "a round of probes ends at its deadline",
    "a lone peer cannot optimise",
    "an optimisation is given up while it runs",
    "no member waits for an optimisation any more",
    "a measurement is ended by the next",
    "a measurement ends with the membership",
    "no optimisation with reduces under way",
    # collectives, at the master
    "a collective succeeds",
    "several collectives commence at once",
    "signatures that differ are named",
    "the odd signature is kicked",
    "a majority loses its reduce to an odd signature",
    "a majority loses its reduce to an odd call",
    "a lone peer cannot reduce",
    "a running collective fails with its ring",
    "an open vote fails with its ring",
    "one member's failure aborts the others",
    "a vote for the new ring waits until it is wired",
    "a vote about the past is ignored",
    "a reduce is given up in time",
    "a reduce is given up too late",
    "a reduce and another call never meet",
    "a long reduce names the missing",
    "a straggler of a reduce is kicked",
    # collectives, at a peer
    "an order aborts what runs",
    "a collective commences over a broken ring",
    "a verdict comes before the drain",
    "the drain comes before the verdict",
    "the end of the local part crosses an abort",
    "a stall costs all lanes",
    "a reduce ends with the membership, once it has drained",
    "close waits for the drain",
    "a tag is in use",
    "no topology vote with reduces under way",
    "no reduce during a topology vote",
    # lanes
    "a lane comes before its order",
    "a lane comes before its peer has a name",
    "a lane comes for an edge that just broke",
    "a lane comes after the end",
    "a lane of the past is refused",
    "a lane is not free",
    "a lane meets a later life of its port",
    "an early lane is explained by its order",
    "an early lane is refused by an order",
    "an early lane goes away",
    "a lane is dialled again",
    "a dial fails for good without an answer",
    "a dial is refused for good",
    "a dead worker costs all lanes",
    # a peer and its master
    "the master is dialled again",
    "a newcomer hears nothing and starts again",
    "a member gives a silent master up",
    "a peer forgives the master what it could not hear itself",
    # calls
    "an answer comes after its call was given up",
    "a cancel comes after the end",
    "a call comes after the end",
    "connect is given up",
    "a second thread makes the same call",
}  # fmt: skip


class Paths:
    """The paths that one run has taken."""

    def __init__(self, *, syncs: bool) -> None:
        self._syncs = syncs
        self.taken: Counter[str] = Counter()

    def mark(self, name: str) -> None:
        assert name in PATHS, f"{name!r} is not in the list"
        self.taken[name] += 1

    # ------------------------------------------------------------------------------------------ the master

    def before_master(self, shell: MasterShell, event: Any, now_ns: int) -> tuple[Any, ...]:
        """Return the part of the master's state that `at_master` needs from before an event."""
        state = shell.state
        late = type(event) is events.Tick and now_ns - state.next_deadline_ns > nanoseconds(
            state.options.heartbeat_interval
        )
        vote = _vote_of(state, event)
        held, sync = _is_held(state), remember(state, event) if self._syncs else None
        optimization = state.optimizer.phase, set(state.optimizer.waiting)
        found = mark_before(state, event, self.mark)
        return (
            state.topology_round.phase == CLOSED,
            set(state.members.admitting),
            set(state.members.accepted),
            late,
            held,
            vote,
            sync,
            optimization,
            found,
        )

    def at_master(self, shell: MasterShell, before: tuple[Any, ...], event: Any, actions: list[Any]) -> None:
        """Mark the paths of an event that the master handled."""
        state = shell.state
        closed, admitting, accepted, late, held, vote, sync, optimization, found = before
        if sync is not None:
            mark_master(state, sync, event, actions, self.mark)
        if closed:
            if accepted - state.members.accepted:
                self.mark("a member is lost while newcomers are wired")
            if admitting - state.members.admitting - state.members.accepted:
                self.mark("a newcomer is lost while it is admitted")
        if accepted and not state.members.accepted and state.topology_round.phase == CLOSED:
            self.mark("an empty run takes those who wait")
        if late:
            self.mark("a sweep after the master's own pause kicks no peer")
        shown = type(event) is master_events.DialledBack or type(getattr(event, "message", None)) is messages.Tried
        if shown and held and state.topology_round.phase == CLOSED:
            self.mark("a held vote is released by a newcomer")
        if type(event) is master_events.PeerSaid:
            self._at_message(state, event.message, actions, closed, vote)
            if event.conn in state.members.conns:
                self._at_collective(state, state.members.conns[event.conn].group, event.message, actions)
        lines = [action.line for action in actions if type(action) is events.Log]
        self._at_optimization(state, optimization, accepted - state.members.accepted, actions, lines)
        mark_after(state, found, event, actions, lines, self.mark)
        for action in actions:
            if type(action) is master_events.SendTo:
                self._at_send(action.message, admitting)

    def _at_optimization(
        self, state: Any, before: tuple[Any, ...], lost: set[int], actions: list[Any], lines: list[str]
    ) -> None:
        phase, optimizers = before
        optimizing = phase != IDLE
        if optimizing and lost:
            measuring = phase == MEASURING
            self.mark(f"a member is lost while {'edges are measured' if measuring else 'an optimised ring is wired'}")
        waiting = state.optimizer.waiting.keys()
        if optimizing and optimizers - lost - waiting and not _sends(actions, messages.OptimizeDone):
            left = state.optimizer.phase != IDLE
            self.mark(
                "an optimisation is given up while it runs" if left else "no member waits for an optimisation any more"
            )
        if (
            optimizing
            and _sends(actions, messages.OptimizeDone)
            and not all(not group.bandwidths.missing(group.ring, 0) for group in state.members.groups.values())
        ):
            self.mark("an optimisation measures only a part")
        for line in lines:
            if "takes another ring" in line:
                self.mark("an optimisation takes another ring")
            elif "keeps its ring" in line:
                self.mark("an optimisation keeps the ring")
            elif "not measured" in line:
                late = "no report in time" in line
                self.mark("a round of probes ends at its deadline" if late else "an edge cannot be measured")

    def _at_message(self, state: Any, message: Any, actions: list[Any], admission: bool, vote: Any) -> None:
        kind = type(message)
        if kind is messages.WireFailed and not actions:
            self.mark("a late report of an unreachable pair is ignored")
        elif kind is messages.WireFailed and not _sends(actions, messages.Kick):
            self.mark("a pair that cannot connect is routed around")
        elif kind is messages.EdgeLost and not actions:
            self.mark("the second report of a broken edge is ignored")
        elif kind is messages.EdgeLost and _sends(actions, messages.RingOrder):
            self.mark("a broken edge is ordered anew")
        elif (
            kind is messages.Wired
            and not actions
            and all(message.epoch < group.epoch for group in state.members.groups.values())
        ):
            self.mark("a report of a past epoch is ignored")
        elif kind is messages.Withdraw:
            during = "a withdrawal during an admission" if admission else "a withdrawal counts"
            self.mark("a withdrawal comes too late" if vote is None or vote.call != message.call else during)
        elif kind is messages.VoteTopology and not actions and _is_held(state):
            self.mark("a vote is held for a larger group")

    def _at_collective(self, state: Any, number: int, message: Any, actions: list[Any]) -> None:
        kind = type(message)
        if kind is messages.Initiate and number in state.members.wiring:
            self.mark("a vote for the new ring waits until it is wired")
        elif kind is messages.Finished and message.sequence not in state.members.groups[number].collectives.running:
            if not actions:
                self.mark("a vote about the past is ignored")
        elif kind is messages.WithdrawReduce:
            self.mark("a reduce is given up in time" if actions else "a reduce is given up too late")

    def _at_verdict(self, failure: Any) -> None:
        if failure.result == RANK_CONNECTION_LOST:
            what = "a running collective" if failure.sequence else "an open vote"
            self.mark(f"{what} fails with its ring")
            if " was kicked: it does not agree with the majority" in failure.reason:
                self.mark("a majority loses its reduce to an odd signature")
            elif " was kicked: it waits in " in failure.reason:
                self.mark("a majority loses its reduce to an odd call")
        elif failure.result == INVALID_ARGUMENT:
            self.mark("signatures that differ are named")
        elif failure.result == TOO_FEW_PEERS:
            self.mark("a lone peer cannot reduce")
        elif "never meet" in failure.reason:
            self.mark("a reduce and another call never meet")

    def _at_send(self, message: Any, admitting: set[int]) -> None:
        kind = type(message)
        if kind is messages.Kick:
            self._at_kick(message.reason, admitting)
        elif kind is messages.CallFailed and "never meet" in message.reason:
            self.mark("calls that never meet are explained")
        elif kind is messages.CallFailed and message.reason.startswith("optimize_topology needs"):
            self.mark("a lone peer cannot optimise")
        elif kind is messages.Notice:
            waits = message.line.startswith("not admitted")
            vote = (
                "a long reduce names the missing" if message.line.startswith("all_reduce") else "a long vote is named"
            )
            self.mark("a newcomer is told whom it waits for" if waits else vote)
        elif kind is messages.ReduceDone:
            self.mark("a collective succeeds")
        elif kind is messages.AbortReduce:
            self.mark("one member's failure aborts the others")
        elif kind is messages.ReduceFailed:
            self._at_verdict(message)
        elif kind is messages.Commence and len(unpack_pairs(message.pairs)) > 1:
            self.mark("several collectives commence at once")
        elif kind is messages.PendingAnswer:
            self.mark("newcomers are pending" if message.pending else "no peer is pending")

    def _at_kick(self, reason: str, admitting: set[int]) -> None:
        if reason.startswith("no ring is possible with peer "):
            newcomer = int(reason.split()[6].rstrip(":")) in admitting
            who = "a newcomer is refused" if newcomer else "a veteran is kicked"
            self.mark(f"{who} because there is no ring")
        elif reason.startswith("its lanes were not up"):
            self.mark("slow wiring ends a newcomer" if admitting else "slow wiring ends a veteran")
        elif reason.startswith("nothing heard"):
            self.mark("a silent peer is kicked")
        elif reason.startswith("it does not agree with the majority"):
            self.mark("the odd signature is kicked")
        elif reason.startswith("it waits in "):
            self.mark("the minority of a deadlock is kicked")
        elif reason.startswith("straggler"):
            self.mark("a straggler of a reduce is kicked" if "all_reduce" in reason else "a straggler is kicked")
        elif "shared state" in reason or "sync_shared_state" in reason:
            pass  # see `sync_paths`
        else:
            self.mark("a peer that breaks the protocol is kicked")

    # ------------------------------------------------------------------------------------------ a peer

    def before_peer(self, shell: PeerShell, event: Any, now_ns: int) -> tuple[Any, ...]:
        """Return the part of a peer's state that `at_peer` needs from before an event."""
        state = shell.state
        late_ns = now_ns - state.next_deadline_ns if type(event) is events.Tick else 0
        early = type(event) is peer_events.LinkDown and event.link in state.ring_links.early
        return (
            state.phase,
            early,
            late_ns > nanoseconds(state.options.heartbeat_timeout),
            state.ring_links.previous_edge,
        )

    def at_peer(self, shell: PeerShell, before: tuple[Any, ...], event: Any, actions: list[Any]) -> None:
        """Mark the paths of an event that a peer handled."""
        state = shell.state
        phase, early, late, previous_edge = before
        kind = type(event)
        if self._syncs:
            mark_peer(phase, event, actions, self.mark)
        if kind is peer_events.LinkCame:
            self._at_lane(state, phase, event.hello, actions, previous_edge)
        elif kind is peer_events.LinkDown:
            if early:
                self.mark("an early lane goes away")
            elif _tells(actions, messages.WireFailed):
                self.mark("a dial is refused for good")
        elif kind is events.Tick:
            self._at_tick(state, phase, late, actions)
        elif kind is peer_events.MasterSaid:
            self._at_master_word(event.message, actions)
        elif kind is peer_events.Called:
            self._at_call(phase, event.call, actions)
        elif kind is peer_events.WorkerDied and actions:
            self.mark("a dead worker costs all lanes")
        elif kind is peer_events.MasterDown:
            mark_loss(phase, state.phase, event, self.mark)
        elif kind in (peer_events.ReduceDrained, peer_events.ReduceEnded):
            self._at_operation(phase, kind, actions)
        self._at_probe(state, actions)

    def _at_probe(self, state: Any, actions: list[Any]) -> None:
        if actions and _has(actions, peer_events.EndProbe):
            over = state.phase == "gone"
            self.mark("a measurement ends with the membership" if over else "a measurement is ended by the next")

    def _at_operation(self, phase: str, kind: type[Any], actions: list[Any]) -> None:
        if kind is peer_events.ReduceDrained and phase == "gone":
            self.mark("a reduce ends with the membership, once it has drained")
            if _has(actions, peer_events.Stop):
                self.mark("close waits for the drain")
        elif kind is peer_events.ReduceEnded and not actions:
            self.mark("the end of the local part crosses an abort")

    def _at_lane(self, state: Any, phase: str, hello: Any, actions: list[Any], previous_edge: Any) -> None:
        if not actions:
            if not state.id:
                self.mark("a lane comes before its peer has a name")
            elif hello.epoch > state.ring_links.epoch:
                self.mark("a lane comes before its order")
            else:
                assert previous_edge is None, "a lane waits though its edge stands"
                self.mark("a lane comes for an edge that just broke")
            return
        reason = actions[0].reason
        if phase == "gone":
            self.mark("a lane comes after the end")
        elif "is over" in reason:
            self.mark("a lane of the past is refused")
        elif "not free" in reason:
            self.mark("a lane is not free")
        elif "maybe of another run" in reason:
            self.mark("a lane meets a later life of its port")

    def _at_tick(self, state: Any, phase: str, late: bool, actions: list[Any]) -> None:
        if phase == "member" and state.phase == "gone":
            self.mark("a member gives a silent master up")
        elif phase == "joining" and state.phase != "joining":
            self.mark("a newcomer hears nothing and starts again")
        elif phase == "member" and late:
            self.mark("a peer forgives the master what it could not hear itself")
        for action in actions:
            kind = type(action)
            if kind is peer_events.Dial:
                self.mark("a lane is dialled again")
            elif kind is peer_events.DialMaster:
                self.mark("the master is dialled again")
            elif kind is peer_events.AbortOperation and state.phase == "member":
                self.mark("a stall costs all lanes")
            elif kind is peer_events.SendMaster and type(action.message) is messages.WireFailed:
                self.mark("a dial fails for good without an answer")

    def _at_master_word(self, message: Any, actions: list[Any]) -> None:
        kind = type(message)
        if kind is messages.Commence and not actions:
            self.mark("a collective commences over a broken ring")
        elif kind is messages.ReduceFailed and message.sequence:
            self.mark("the drain comes before the verdict" if actions else "a verdict comes before the drain")
        if kind is messages.RingOrder:
            if _has(actions, peer_events.AbortOperation):
                self.mark("an order aborts what runs")
            for action in actions:
                if type(action) is peer_events.AnswerLink:
                    explained = "an early lane is explained by its order"
                    self.mark("an early lane is refused by an order" if action.reason else explained)
        elif kind in (messages.TopologyDone, messages.PendingAnswer) and not actions:
            self.mark("an answer comes after its call was given up")

    def _at_call(self, phase: str, call: Any, actions: list[Any]) -> None:
        kind = type(call)
        if kind is mailbox.CallCancel and phase == "gone":
            self.mark("a cancel comes after the end")
        elif kind is mailbox.CallCancel and phase in ("dialling", "joining") and actions:
            self.mark("connect is given up")
        elif kind is mailbox.CallTopology and phase == "gone":
            self.mark("a call comes after the end")
        elif kind is mailbox.CallTopology and _has(actions, peer_events.Complete):
            busy = actions[0].result == PENDING_ASYNC_OPS
            self.mark("no topology vote with reduces under way" if busy else "a second thread makes the same call")
        elif kind is mailbox.CallOptimize and _has(actions, peer_events.Complete) and phase == "member":
            if actions[0].result == PENDING_ASYNC_OPS:
                self.mark("no optimisation with reduces under way")
        elif kind is mailbox.CallReduce and phase == "member" and _has(actions, peer_events.Complete):
            used = actions[0].result == INVALID_ARGUMENT
            self.mark("a tag is in use" if used else "no reduce during a topology vote")


def _is_held(state: Any) -> bool:
    """Whether the topology vote is unanimous but stays open, though nothing else is missing."""
    return state.topology_round.phase == HELD and not state.members.wiring


def _vote_of(state: Any, event: Any) -> Any:
    """Return the vote that a withdrawal may take back."""
    if (
        type(event) is not master_events.PeerSaid
        or type(event.message) is not messages.Withdraw
        or event.conn not in state.members.conns
    ):
        return None
    peer = state.members.conns[event.conn].id
    votes = [state.votes[name].get(peer) for name in (TOPOLOGY, PENDING)]
    return next((vote for vote in votes if vote is not None and vote.call == event.message.call), None)


def _has(actions: list[Any], kind: type[Any]) -> bool:
    return any(type(action) is kind for action in actions)


def _sends(actions: list[Any], kind: type[Any]) -> bool:
    return any(type(action) is master_events.SendTo and type(action.message) is kind for action in actions)


def _tells(actions: list[Any], kind: type[Any]) -> bool:
    return any(type(action) is peer_events.SendMaster and type(action.message) is kind for action in actions)

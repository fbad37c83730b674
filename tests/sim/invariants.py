"""Invariants between machines, after every event and at the end. A machine checks its own invariants itself.

Each function raises an AssertionError that says what was expected; the world adds seed, plan and story.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pccl._core.master import events as master_events
from pccl._core.master.bandwidths import PROBE
from pccl._core.master.election import NEVER
from pccl._core.master.events import PeerSaid, SendTo
from pccl._core.master.topology_round import CLOSED
from pccl._core.peer import events as peer_events
from pccl._core.peer.events import MasterSaid
from pccl._core.protocol import events
from pccl._core.protocol.messages import (
    Accepted,
    Commence,
    Kick,
    OptimizeDone,
    ReduceFailed,
    Registered,
    RunFinished,
    SyncDone,
    TopologyDone,
    WireFailed,
)
from pccl._core.protocol.operations import unpack_pairs
from pccl._core.protocol.outcomes import KIND_MASTER_LOST, RANK_CONNECTION_LOST
from pccl._core.solver.solver import EXACT_MAX, evaluate, solve
from pccl.options import nanoseconds

from .dataplane import Run
from .probes import rate
from .runs import REFUSED

if TYPE_CHECKING:
    from .nodes import PeerShell
    from .world import World


def check_master(world: World, event: Any, actions: list[Any]) -> None:
    """All members get the same numbers, and no peer is kicked or avoided without a cause."""
    state = world.master.state
    if actions and type(event) is PeerSaid and type(event.message) is WireFailed:
        _check_mark(world, world.master.links[event.conn].peer, event.message)
    _check_consensus(world, actions)
    world.run_rules.check(event, actions)
    common: set[tuple[int, int, int]] = set()
    per_group: dict[int, tuple[int, int]] = {}
    for action in actions:
        if type(action) is not SendTo:
            continue
        message = action.message
        kind = type(message)
        if kind in (Accepted, TopologyDone, OptimizeDone):
            common.add((message.global_world, message.groups, message.largest_group))
            group = state.members.conns[action.conn].group
            told = message.epoch, message.group_world
            assert per_group.setdefault(group, told) == told, f"group {group} was told {told} and {per_group[group]}"
            assert told == (state.members.groups[group].epoch, len(state.members.groups[group].ring)), (
                f"group {group} was told {told}"
            )
        elif kind is Registered:
            assert message.peer > world.peer_id, f"peer id {message.peer} after {world.peer_id}"
            world.peer_id = message.peer
        elif kind is Kick:
            _check_kick(world, action.conn, message.reason)
        elif kind is Commence:
            _note_commenced(world, state.members.conns[action.conn], message)
        elif kind is ReduceFailed:
            _check_failure(world, state.members.groups[state.members.conns[action.conn].group], message)
    _check_minorities(world, actions)
    assert len(common) <= 1, f"one round with different numbers: {common}"


def _check_consensus(world: World, actions: list[Any]) -> None:
    """The agreed state never goes back, never splits, was whole at some peer, and is saved before a caller is told."""
    if not any(type(action) is SendTo and type(action.message) is SyncDone for action in actions):
        return
    run = world.master.state.members.run
    for number, group in world.master.state.members.groups.items():
        revision, content = group.consensus.revision, group.consensus.content
        agreed = world.agreed_states.setdefault((run, number), {})
        if revision < 0 or agreed.get(revision) == content:
            continue
        assert revision not in agreed, f"group {number} agreed twice on revision {revision}"
        assert not agreed or revision == max(agreed) + 1, f"group {number}: {revision} after {max(agreed)}"
        told = [type(action) is master_events.Save or type(getattr(action, "message", None)) for action in actions]
        assert True in told, "an agreed state was not saved"
        assert told.index(True) < told.index(SyncDone), "an agreed state was told before it was saved"
        agreed[revision] = content
        assert content in world.contents, f"group {number} agreed on a state without a vote, or on a torn state"
        if revision - 1 in agreed and world.master.life:
            world.paths.mark("a restored run agrees on its next state")


def check_restored(world: World) -> None:
    """A restarted master knows every agreed state that a caller was told of, and uses no peer id twice."""
    state, run = world.master.state, world.master.state.members.run
    if not world.plan.durable:
        world.peer_id = 0
        world.paths.mark("a master without a state file begins another run")
    world.run_rules.check_restored()
    for key in [key for key in world.agreed_states if key[0] == run]:
        group = state.members.groups.get(key[1])
        revision = group.consensus.revision if group is not None else NEVER
        told = world.told.get(key, NEVER)
        assert told <= revision, f"group {key[1]} is back at revision {revision}, and {told} was told"
        agreed = world.agreed_states[key]
        assert revision < 0 or agreed[revision] == group.consensus.content, f"group {key[1]} holds another content"
        unknown = [number for number in agreed if number > revision]
        world.paths.mark("an unannounced state is agreed again" if unknown else "a master goes on with what was agreed")
        for number in unknown:
            del agreed[number]


def _check_failure(world: World, group: Any, failure: ReduceFailed) -> None:
    """A failure carries the present numbers; if a peer was lost, the survivors are wired by then."""
    state = world.master.state
    told = failure.epoch, failure.global_world, failure.group_world, failure.round
    assert told == (group.epoch, len(state.members.accepted), group.size(), state.members.round), (
        f"a failure in another world: {failure}"
    )
    assert not group.waiting or failure.result != RANK_CONNECTION_LOST, f"{failure!r} before the ring is wired"


def _note_commenced(world: World, peer: Any, order: Commence) -> None:
    """All members of the ring get the same collectives; note each of them with its members."""
    name = world.master.state.members.run
    ring = frozenset(world.master.state.members.groups[peer.group].ring)
    for tag, sequence in unpack_pairs(order.pairs):
        key = name, peer.id, sequence
        assert key not in world.runs, f"collective {sequence} (tag {tag}) commences twice for {peer.id}"
        known = [world.runs[name, member, sequence] for member in ring if (name, member, sequence) in world.runs]
        run = known[0] if known else Run(sequence, ring, _numbers(world, peer.group))
        assert run.members == ring, f"collective {sequence} over {sorted(run.members)} and {sorted(ring)}"
        world.runs[key] = run


def _numbers(world: World, number: int) -> tuple[int, ...]:
    """Return the numbers that all members of this group must get now: round, epoch, and four sizes."""
    state = world.master.state
    sizes = [group.size() for group in state.members.groups.values() if group.size()]
    group = state.members.groups[number]
    return state.members.round, group.epoch, len(state.members.accepted), group.size(), len(sizes), max(sizes)


def _check_mark(world: World, source: PeerShell, failure: WireFailed) -> None:
    """A pair counts as unreachable only after a fault: a partition, a broken lane, or a fault of the target."""
    living = [shell for shell in world.shells if shell.alive and shell.is_served_by(world.master)]
    target = next((shell for shell in living if shell.state.id == failure.target), None)
    if target is None or target.frozen:
        return
    options = world.plan.options
    dialled_ns = nanoseconds(options.dial_attempts * (options.connect_timeout + 0.1) + 1) + 8 * world.delay_ns_max
    if world.master.troubled_ns >= world.clock.now_ns - dialled_ns:
        return  # the message was unread while the master was stopped: it is about a time long past
    broken_ns = max(source.severed_ns, target.severed_ns, world.blocked.get((source, target), 0))
    caused_ns = max(broken_ns, target.troubled_ns, target.cut_until_ns)
    assert caused_ns >= world.clock.now_ns - dialled_ns, (
        f"{source.name} cannot reach {target.name} without a cause: {failure.reason}"
    )


# Reasons that speak of a majority.
MAJORITY = ("it does not agree with the majority", "it waits in ")
ODD_SIGNATURE = re.compile(
    r"it does not agree .* \(tag (\d+)\) is: it gave (\S+) x (\S+).*; peers? .* gave (\S+) x \3, SUM\. Reduce"
)
NAMES = re.compile(r"peers ([\d, ]+?)(?: and (\d+) more)?(?:\)| gave)")


def _check_minorities(world: World, actions: list[Any]) -> None:
    """A majority stays, and costs fewer peers than it has."""
    kicks = [action.message.reason for action in actions if type(action) is SendTo and type(action.message) is Kick]
    majorities: dict[str, list[str]] = {}
    for reason in kicks:
        if reason.startswith(MAJORITY):
            names = NAMES.search(reason)
            assert names is not None, f"no majority of two or more is named: {reason}"
            majorities.setdefault(names[0], []).append(reason)
            if len(kicks) == len(majorities[names[0]]):  # nobody was kicked for another reason
                stay = {int(name) for name in names[1].split(", ")}
                finished = any(type(action) is SendTo and type(action.message) is RunFinished for action in actions)
                assert finished or stay <= world.master.state.members.accepted, f"a majority was kicked: {reason}"
    for majority, reasons in majorities.items():
        names = NAMES.match(majority)
        assert names is not None
        count = len(names[1].split(", ")) + int(names[2] or 0)
        assert len(reasons) < count, f"{len(reasons)} peers were kicked for {majority}"


def _check_kick(world: World, conn: int, reason: str) -> None:
    shell = world.master.links[conn].peer
    if shell.program.syncing.is_odd(reason) or reason.startswith(REFUSED):
        return
    if odd := ODD_SIGNATURE.match(reason):
        tag, count = int(odd[1]), int(odd[2])
        assert odd[2] != odd[4], f"{shell.name} kicked, though it agrees: {reason}"
        assert (tag, count) in shell.program.reducing.given or shell.intruded, f"{shell.name} gave no {count}: {reason}"
    if world.calm:
        # A deadlock may begin with the last call that returns because of a kick, and is broken a while later.
        options = world.plan.options
        grace_ns = nanoseconds(options.deadlock_timeout + 2 * options.heartbeat_interval)
        end_ns = world.kicks_end_ns + (grace_ns if reason.startswith("it waits in ") else 0)
        assert world.clock.now_ns <= end_ns, f"{shell.name} kicked long after the calm: {reason}"
    if reason.startswith("nothing heard"):
        assert _is_troubled(world, shell), f"{shell.name} kicked for a silence that had no cause"
    elif reason.startswith("it cannot fetch the shared state"):
        assert shell.states.hindered, f"{shell.name} kicked, though it could fetch: {reason}"
    elif any(words in reason for words in UNREACHED):
        assert _is_hard_to_reach(world, shell), f"{shell.name} kicked, though it can be reached: {reason}"
        if "form a ring without" in reason:
            _note_replaced(world, shell)
        elif "no peer reached this one" in reason:
            world.paths.mark("an unreached newcomer makes way for another run")
        else:
            world.paths.mark("a newcomer that finds no gap is refused")
    elif not reason.startswith((*MAJORITY, "straggler", "no ring is possible", "its lanes were not up")):
        assert shell.intruded, f"{shell.name} kicked without a forged message: {reason}"


def _note_replaced(world: World, shell: PeerShell) -> None:
    """A lone member makes way for a larger set; what it agreed on alone is forgotten with it."""
    members = world.master.state.members
    group = members.groups.get(shell.group)
    world.paths.mark("a lone member makes way for a larger set")
    if group is None or group.consensus.revision == NEVER:
        world.agreed_states.pop((members.run, shell.group), None)
        world.told.pop((members.run, shell.group), None)


def _is_hard_to_reach(world: World, shell: PeerShell) -> bool:
    """Whether a fault explains why this peer was not reached, or did not reach others."""
    options = world.plan.options
    window_ns = nanoseconds(options.unreachable_expiry + 2 * options.connect_timeout + 3) + 10 * world.delay_ns_max
    since_ns = world.clock.now_ns - window_ns
    cut_ns = [until_ns for pair, until_ns in world.blocked.items() if shell in pair]
    ends_ns = shell.troubled_ns, shell.cut_until_ns, world.master.troubled_ns, *cut_ns
    return not shell.alive or shell.frozen or max(ends_ns) >= since_ns


def _is_troubled(world: World, shell: PeerShell) -> bool:
    """Whether a fault, and not the master's own pause, explains the timeout of this peer."""
    options = world.plan.options
    window_ns = nanoseconds(options.heartbeat_timeout + 2 * options.heartbeat_interval)
    since_ns = world.clock.now_ns - window_ns
    return not shell.alive or shell.frozen or shell.troubled_ns >= since_ns or shell.cut_until_ns >= since_ns


def check_peer(world: World, shell: PeerShell, event: Any, actions: list[Any]) -> None:
    """The shell and its machine hold the same connections; numbers come with a ring that was wired for them."""
    state, links = shell.state, shell.state.ring_links
    if shell.alive:
        assert shell.links.keys() == links.links.keys() | links.early.keys(), (
            f"{shell.name} holds {sorted(shell.links)}, its machine {sorted(links.links)} and {sorted(links.early)}"
        )
        assert shell.workers == links.spawned, f"{shell.workers} workers run, the machine counts {links.spawned}"
    if (
        type(event) is MasterSaid
        and type(event.message) in (Accepted, TopologyDone, OptimizeDone)
        and state.phase == "member"
    ):
        assert links.epoch == event.message.epoch, f"numbers of epoch {event.message.epoch} at epoch {links.epoch}"
        assert links.reported == links.epoch, f"numbers for a ring that {shell.name} never reported"
    assert shell.intruded or "broke the protocol" not in state.ending[2], f"{shell.name}: {state.ending[2]}"
    if actions:
        _check_order(actions)
    # The end itself, not a later call that fails because of it.
    if type(event) is events.Tick and state.ending[1] == KIND_MASTER_LOST and peer_events.HangUp() in actions:
        assert _is_master_troubled(world, shell), f"{shell.name} gave the master up without a cause"
    if state.phase == "member" and shell.is_served_by(world.master) and state.id in world.master.state.members.peers:
        assert links.epoch <= world.master.state.members.groups[shell.group].epoch, f"{shell.name} is ahead"


def check_optimal(world: World) -> None:
    """After an optimisation without faults: the measured rates are right, and no ring is clearly faster."""
    state = world.master.state
    numbers = {shell.state.id: shell.number for shell in world.shells if shell.alive and shell.state.id}
    for group in state.members.groups.values():
        rates = group.bandwidths.matrix(group.ring)
        for edge in group.bandwidths.report(world.clock.now_ns)["edges"]:
            carried = rate(world.plan, numbers[edge["source"]], numbers[edge["target"]])
            if edge["origin"] == PROBE:
                assert edge["bytes_per_second"] in (0, carried), f"measured {edge}"
            else:
                assert 0 < edge["bytes_per_second"] <= carried, f"measured {edge}, but it carries only {carried}"
        count = len(group.ring)
        if not 3 <= count <= EXACT_MAX:
            continue  # beyond it the best ring is not known
        best, present = solve(rates, count), evaluate(rates, range(count))
        if best is not None:
            assert present is not None, f"a ring {group.ring} over unmeasured edges"
            assert best.bottleneck < 1.05 * present[0], f"ring {group.ring}: {present[0]}, best {best.bottleneck}"


# What a kick says of a peer that was not reached, or does not reach others.
UNREACHED = ("is not admitted, because", "form a ring without", "no peer reached this one")

LANE_ACTIONS = (
    peer_events.Dial,
    peer_events.DropLink,
    peer_events.AttachLink,
    peer_events.SpawnLanes,
    peer_events.KillLanes,
)


def _check_order(actions: list[Any]) -> None:
    """Operations are aborted before any change of their lanes."""
    touched = False
    for action in actions:
        touched |= type(action) in LANE_ACTIONS
        assert not (touched and type(action) is peer_events.AbortOperation), "an abort after its lanes were touched"


def _is_master_troubled(world: World, shell: PeerShell) -> bool:
    options, master = world.plan.options, world.master
    since_ns = world.clock.now_ns - nanoseconds(options.heartbeat_timeout + 2 * options.heartbeat_interval)
    return not master.alive or master.frozen or master.troubled_ns >= since_ns or shell.cut_until_ns >= since_ns


def is_agreed(world: World) -> bool:
    """Whether all living peers are members and have the world size of all living peers."""
    living = [shell for shell in world.shells if shell.alive and not shell.program.ending]
    if any(shell.state.phase != "member" or shell.program.counted_ns < world.calm_ns for shell in living):
        return False
    sizes: dict[int, int] = {}
    for shell in living:
        sizes[shell.group] = sizes.get(shell.group, 0) + 1
    for shell in living:
        assert shell.program.numbers is not None
        if shell.program.numbers[3:] != (len(living), sizes[shell.group], len(sizes), max(sizes.values())):
            return False
    return bool(living)


def check_rings(world: World) -> None:
    """Every ring is wired: both ends of every edge hold the same connections, and no connection is left over."""
    master = world.master.state
    assert not master.members.wiring, f"groups {master.members.wiring} are still being wired"
    # A peer that was kicked for a forged message, just before the last fault, is no member any more.
    by_id = {shell.state.id: shell for shell in world.shells if shell.alive and shell.state.phase == "member"}
    assert by_id.keys() == master.members.accepted, f"alive {sorted(by_id)}, accepted {sorted(master.members.accepted)}"
    for group in master.members.groups.values():
        for (source_id, target_id), epoch in group.edges.items():
            source, target = by_id[source_id], by_id[target_id]
            forth, back = source.state.ring_links.next_edge, target.state.ring_links.previous_edge
            assert forth is not None, f"edge {source_id}->{target_id} is not there at its source"
            assert back is not None, f"edge {source_id}->{target_id} is not there at its target"
            assert (forth.peer, back.peer) == (target_id, source_id), f"edge {source_id}->{target_id} leads elsewhere"
            assert forth.epoch == back.epoch == epoch, (
                f"edge {source_id}->{target_id}: {forth.epoch}, {back.epoch}, {epoch}"
            )
            assert forth.is_up(), f"edge {source_id}->{target_id} is not up at its source"
            assert back.is_up(), f"edge {source_id}->{target_id} is not up at its target"
            assert len(forth.lanes) == len(back.lanes) == min(source.lanes, target.lanes), "the pools differ"
            for here, there in zip(forth.lanes, back.lanes, strict=True):
                near, far = source.links[here.link], target.links[there.link]
                assert near.lane is far.lane, f"lane {here.index} joins two connections"
                assert near.attached, f"lane {here.index} is not served at its source"
                assert far.attached, f"lane {here.index} is not served at its target"
    for shell in by_id.values():
        assert not shell.state.ring_links.early, f"{shell.name} still keeps early lanes"
        assert shell.state.ring_links.epoch == master.members.groups[shell.group].epoch, (
            f"{shell.name} is at another epoch"
        )


def check_empty(world: World) -> None:
    """All peers have left, and the master holds nothing of them."""
    master = world.master.state
    assert not world.master.links, "control connections remain"
    remembered = [group for group in master.members.groups.values() if group.consensus.revision >= 0]
    assert all(group.consensus.is_idle() for group in remembered), "a sync without members is under way"
    assert not any(group.ring for group in remembered), "a ring without members"
    left = (
        master.members.peers,
        master.members.conns,
        master.members.accepted,
        master.members.registered,
        master.members.admitting,
        master.members.wiring,
        len(master.members.groups) - len(remembered),
    )
    assert not any(left), f"the master still holds {left}"
    assert not any(shell.plane.parts for shell in world.shells if shell.program.closed), "memory was not given back"
    assert not any(shell.states.transfer for shell in world.shells if shell.program.closed), "a transfer goes on"
    assert not any(master.votes.values()), f"votes without voters: {master.votes}"
    assert master.topology_round.phase != CLOSED, "a round without members is open"

"""A harness for the master's machine: it plays the peers and lets time pass in sweeps. No test in here.

Connections have the numbers of their peers, so that a scenario can be read.
"""

from __future__ import annotations

from typing import Any

from pccl._core.master.events import DialBack, DialledBack, PeerCame, PeerSaid, PeerWent, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.protocol import hellos
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import Tick
from pccl._core.protocol.operations import ReduceSignature, pack_signatures, unpack_pairs
from pccl._core.protocol.state_schema import SchemaRow, digest_schema, pack_schema
from pccl.options import Options

SECOND = 1_000_000_000
RUN = bytes(range(16))
INVALID_ARGUMENT, INVALID_USAGE, TOO_FEW, UNREACHABLE, LOST, NO_STATE = 3, 4, 5, 7, 8, 9
POPULAR, RECEIVE, SEND = 0, 1, 2

SCHEMA = pack_schema(
    [SchemaRow("bias", 10, False, 16), SchemaRow("seed", 7, True, 8), SchemaRow("weight", 10, False, 64)]
)


class MasterHarness:
    """A master's machine, and the messages of its peers."""

    def __init__(self, **options: Any) -> None:
        self.state = MasterState(RUN, Options(**{"check": True, **options}))
        self.now_ns = 0
        self.calls = 100  # of sync_shared_state, counted over all peers

    def feed(self, event: Any) -> list[Any]:
        return self.state.handle(event, self.now_ns)

    def register(self, peer: int, group: int = 0, lanes: int = 1, run: str = "") -> list[Any]:
        """A peer registers; nobody has tried it yet."""
        hello = hellos.Register(bytes(32), group, lanes, "", 1000 + peer, instance(peer), run)
        return self.feed(PeerCame(peer, hello, f"host{peer}"))

    def come(self, peer: int, group: int = 0, lanes: int = 1, run: str = "") -> list[Any]:
        """A peer registers, and all trials show at once that it can be reached."""
        return self.show(self.register(peer, group, lanes, run))

    def show(self, actions: list[Any]) -> list[Any]:
        """Let all trials among these actions, and those that follow, succeed; return the other actions."""
        others = []
        while actions:
            following = []
            for action in actions:
                if isinstance(action, DialBack):
                    following += self.feed(DialledBack(action.conn, ""))
                elif is_sent(action, m.Try):
                    following += self.say(action.conn, m.Tried(action.message.target, ""))
                else:
                    others.append(action)
            actions = following
        return others

    def say(self, peer: int, message: Any) -> list[Any]:
        return self.feed(PeerSaid(peer, message))

    def reduce(self, peer: int, *tags: int, count: int = 1024) -> list[Any]:
        """A peer initiates a sum of `count` floats for each tag."""
        return self.say(peer, m.Initiate(pack_signatures([ReduceSignature(tag, count, 10, 0, 0, 0) for tag in tags])))

    def sync(self, peer: int, revision: int, content: str, strategy: int = POPULAR, **more: Any) -> list[Any]:
        """A peer synchronises a state; contents that differ have different letters."""
        self.calls += 1
        fields = {"torn": False, "keys": 3, "schema": digest_schema(more.pop("packed", SCHEMA)), **more}
        return self.say(
            peer, m.VoteSync(call=self.calls, revision=revision, strategy=strategy, content=digest(content), **fields)
        )

    def wire(self, actions: list[Any]) -> list[Any]:
        """Every peer that got a ring order reports it as wired; return the actions that follow. All trials succeed."""
        orders = [(action.conn, action.message) for action in self.show(actions) if is_sent(action, m.RingOrder)]
        return self.show([after for peer, order in orders for after in self.say(peer, m.Wired(order.epoch))])

    def wire_only(self, actions: list[Any]) -> list[Any]:
        """Every peer that got a ring order reports it as wired; trials stay open."""
        orders = [(action.conn, action.message) for action in actions if is_sent(action, m.RingOrder)]
        return [after for peer, order in orders for after in self.say(peer, m.Wired(order.epoch))]

    def admit(self, *peers: int, group: int = 0, lanes: int = 1, run: str = "") -> None:
        """Let these peers join: all members vote for a topology round."""
        actions = [action for peer in peers for action in self.come(peer, group, lanes, run)]
        for voter in sorted(self.state.members.accepted):
            actions += self.say(voter, m.VoteTopology(99, 0))
        while actions := self.wire(actions):
            if any(is_sent(action, m.Accepted) for action in actions) and self.state.members.registered:
                actions += [
                    a for voter in sorted(self.state.members.accepted) for a in self.say(voter, m.VoteTopology(99, 0))
                ]
        assert set(peers) <= self.state.members.accepted

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> list[Any]:
        """Let time pass in sweeps; all peers but the silent ones send heartbeats. Return all actions but heartbeats."""
        actions = []
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns = min(self.state.next_deadline_ns, end_ns)
            for peer in list(self.state.members.peers):
                if peer not in silent:
                    self.say(peer, m.Beat(self.now_ns))
            actions += self.feed(Tick())
        return [action for action in actions if not is_sent(action, m.Beat)]


def instance(peer: int) -> bytes:
    return b"instance" + peer.to_bytes(8, "big")


def digest(content: str) -> bytes:
    return content.encode().ljust(16, b".")


def is_sent(action: Any, kind: type[Any]) -> bool:
    return isinstance(action, SendTo) and isinstance(action.message, kind)


def sent(actions: list[Any], kind: type[Any]) -> dict[int, Any]:
    """Return the messages of that kind by the peer they were sent to."""
    return {action.conn: action.message for action in actions if is_sent(action, kind)}


def done(actions: list[Any]) -> dict[int, int]:
    """Return the peers whose sync succeeded, with the revision that each was told."""
    return {peer: message.revision for peer, message in sent(actions, m.SyncDone).items()}


def failed(actions: list[Any]) -> dict[int, m.CallFailed]:
    """Return the peers whose call failed, with the message."""
    return sent(actions, m.CallFailed)


def of(*peers: int, run: str = "", **options: Any) -> MasterHarness:
    harness = MasterHarness(**options)
    harness.admit(*peers, run=run)
    return harness


def agree(harness: MasterHarness, revision: int, content: str, **more: Any) -> MasterHarness:
    """Let all members of group 0 sync this state, so that it is the agreed state."""
    members = list(harness.state.members.groups[0].ring)
    actions = [action for peer in members for action in harness.sync(peer, revision, content, **more)]
    assert done(actions) == dict.fromkeys(members, revision)
    return harness


def agreed(harness: MasterHarness, group: int = 0) -> tuple[int, str] | None:
    """Return the agreed state of a group as (revision, content), or None."""
    consensus = harness.state.members.groups[group].consensus
    return (consensus.revision, consensus.content.decode().strip(".")) if consensus.content else None


def running(*peers: int, tags: tuple[int, ...] = (5,), **options: Any) -> MasterHarness:
    """Return a harness with these peers as members, in which these tags have commenced as sequences 1, 2, ..."""
    harness = of(*peers, **options)
    for peer in peers:
        harness.reduce(peer, *tags)
    assert list(harness.state.members.groups[0].collectives.running) == list(range(1, len(tags) + 1))
    return harness


def pairs(actions: list[Any]) -> list[list[tuple[int, int]]]:
    """Return the (tag, sequence) pairs that commenced, for each message to the first member."""
    orders = [(action.conn, action.message) for action in actions if is_sent(action, m.Commence)]
    return [unpack_pairs(order.pairs) for conn, order in orders if conn == orders[0][0]]


def failures(actions: list[Any]) -> list[tuple[int, int, int, int]]:
    """Return (peer, tag, sequence, result) of every failure verdict."""
    found = [(action.conn, action.message) for action in actions if is_sent(action, m.ReduceFailed)]
    return [(conn, verdict.tag, verdict.sequence, verdict.result) for conn, verdict in found]


def lose(harness: MasterHarness, peer: int) -> list[Any]:
    """Close the connection of a peer and wire the survivors; return what follows from the last report."""
    return harness.wire(harness.feed(PeerWent(peer, "connection reset")))

"""A harness for the peer's machine: it takes the machine to the phase that a test is about. No test in here."""

from __future__ import annotations

from typing import Any

from pccl._core.peer.events import Called, Complete, LinkCame, LinkUp, MasterSaid, MasterUp, ReduceEnded, SendMaster
from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol import hellos, mailbox
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import NUMBERS, Tick
from pccl._core.protocol.operations import Operation, pack_operations, pack_pairs
from pccl._core.protocol.sources import Source, pack_sources
from pccl.options import Options

SECOND = 1_000_000_000
RUN = bytes(range(16))
ALONE = m.RingOrder(1, 0, 1, 0, 0, 0, 0, 0, 0, 0, "")
SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, MASTER_FAILED, LOST, PENDING_ASYNC_OPS = 0, 3, 4, 6, 8, 10
PLAIN, KICKED, MASTER_LOST, CANCELLED, COLLECTIVE, DESCRIBE = 0, 1, 2, 3, 4, 5


def wire(
    epoch: int, to: int, since: int, back: int, back_since: int, lanes: int = 1, back_lanes: int = 1
) -> m.RingOrder:
    """A ring order for rank 1 of 3: dial `to`, wait for `back`; `since` values are the epochs of those edges."""
    return m.RingOrder(epoch, 1, 3, to, since, lanes, back, back_since, back_lanes, 1000 + to, f"host{to}")


def connect(attempts: int = 3, lanes: int = 2) -> mailbox.CallConnect:
    return mailbox.CallConnect(0, 1, attempts, 0, lanes, b"host 7", "", 0, b"")


def lane(source: int, target: int, epoch: int, index: int = 0) -> hellos.JoinLane:
    return hellos.JoinLane(bytes(32), RUN, epoch, source, target, index)


def operation(slot: int, tag: int, count: int = 1024) -> Operation:
    """An in-place sum of floats; the slot's generation is ten times its number."""
    return Operation(slot, 10 * slot, tag, count, 10, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0)


def reduce(*operations: Operation) -> mailbox.CallReduce:
    return mailbox.CallReduce(pack_operations(operations))


def commence(*pairs: tuple[int, int], epoch: int = 2) -> m.Commence:
    """An order that these (tag, sequence) pairs commence."""
    return m.Commence(epoch, pack_pairs(pairs))


def verdict(tag: int, sequence: int, result: int = 8, reason: str = "peer 3 was lost") -> m.ReduceFailed:
    """A failure verdict, in a world of 5 peers in 2 groups, 2 of them in this group."""
    return m.ReduceFailed(tag, sequence, result, reason, 3, 5, 2, 2, 3, 9)


def sync(slot: int = 5, revision: int = 4, strategy: int = 0, *, torn: bool = False) -> mailbox.CallSync:
    """The command of a sync_shared_state call; the slot's generation is ten times its number."""
    return mailbox.CallSync(slot, 10 * slot, revision, strategy, 3, b"schema digest...", b"content digest..", torn)


def describe(slot: int = 6) -> mailbox.CallManifest:
    """The command that says: the manifest is in segment 8, and the window is segment 9."""
    return mailbox.CallManifest(slot, 10 * slot, 8, 500, 9)


SOURCES = (Source(3, "host3", 1003), Source(1, "host1", 1001))


def fetch(call: int = 1, *, whole: bool = False) -> m.Fetch:
    """The order to fetch revision 4 from peers 3 and 1, in transfer 1."""
    return m.Fetch(call, 1, whole, 4, b"elected digest..", pack_sources(SOURCES))


FAILED = NUMBERS.pack(2, 9, 3, 5, 2, 2, 3) + b"peer 3 was lost"  # the payload of that verdict at peer 2
WORLD = NUMBERS.pack(2, 1, 2, 4, 3, 2, 3)  # the world's numbers that a wired peer 2 was told
NEXT_ORDER = wire(3, 3, 3, 1, 3)  # the same neighbours, both edges with a new epoch


class PeerHarness:
    """A peer's machine, with the calls, messages and links that it is given."""

    def __init__(self, **options: Any) -> None:
        self.state = PeerState(Options(**{"check": True, "vote_warning": 0.0, **options}))
        self.now_ns = 0

    def feed(self, event: Any) -> list[Any]:
        return self.state.handle(event, self.now_ns)

    def call(self, call: Any) -> list[Any]:
        return self.feed(Called(call))

    def hear(self, message: Any) -> list[Any]:
        return self.feed(MasterSaid(message))

    def come(self, hello: hellos.JoinLane) -> tuple[int, list[Any]]:
        """A lane connects; return its link number and the actions."""
        link = self.state.new_link()
        return link, self.feed(LinkCame(link, hello))

    def pass_time(self, seconds: float, *, master_beats: bool = True) -> list[Any]:
        """Let time pass; return all actions but heartbeats."""
        actions = []
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns = min(self.state.next_deadline_ns, end_ns)
            if master_beats:
                self.hear(m.Beat(1))
            actions += self.feed(Tick())
        return [action for action in actions if not is_told(action, m.Beat)]


def is_told(action: Any, kind: type[Any]) -> bool:
    return isinstance(action, SendMaster) and isinstance(action.message, kind)


def told(actions: list[Any], kind: type[Any]) -> list[Any]:
    """Return the messages of that kind to the master."""
    return [action.message for action in actions if is_told(action, kind)]


def ends(actions: list[Any]) -> list[tuple[int, int, int]]:
    """Return (slot, result, kind) of the calls that ended."""
    return [(action.slot, action.result, action.kind) for action in actions if isinstance(action, Complete)]


def dialling(**options: Any) -> PeerHarness:
    peer = PeerHarness(**options)
    peer.call(connect())
    return peer


def joining(lanes: int = 2, **options: Any) -> PeerHarness:
    """A harness that is registered as peer 2."""
    peer = PeerHarness(**options)
    peer.call(connect(lanes=lanes))
    peer.feed(MasterUp())
    peer.hear(m.Registered(2, RUN, 1000, 10000))
    return peer


def member(**options: Any) -> PeerHarness:
    """A harness that is member 2, alone in its ring."""
    peer = joining(**options)
    peer.hear(ALONE)
    peer.hear(m.Accepted(1, 1, 1, 1, 1, 1))
    return peer


def wired(lanes: int = 1, **options: Any) -> PeerHarness:
    """Peer 2 at epoch 2 between peers 1 and 3, with every lane up: links 1.. to peer 3, then those from peer 1."""
    peer = member(lanes=lanes, **options)
    peer.hear(wire(2, 3, 2, 1, 2, lanes, lanes))
    for link in range(1, lanes + 1):
        peer.feed(LinkUp(link))
    for index in range(lanes):
        peer.come(lane(1, 2, 2, index))
    assert peer.state.ring_links.reported == 2
    peer.hear(m.World(2, 4, 3, 2, 3, 1))
    return peer


def reducing(**options: Any) -> PeerHarness:
    """Like `wired`, with three reduces: tag 3 runs as sequence 1, tag 4 is voted as sequence 2, tag 7 is initiated."""
    peer = wired(**options)
    peer.call(reduce(operation(3, 3), operation(4, 4), operation(7, 7)))
    peer.hear(commence((3, 1), (4, 2)))
    peer.feed(ReduceEnded(2, 10, 20, 30, 40, 50))
    return peer


def initiated(*tags: int) -> PeerHarness:
    """Like `wired`, with these tags initiated; the slot of each is its tag."""
    peer = wired()
    peer.call(reduce(*[operation(tag, tag) for tag in tags]))
    return peer


def running(*tags: int, **options: Any) -> PeerHarness:
    """Like `wired`, with these tags running as sequences 1, 2, ..."""
    peer = wired(**options)
    peer.call(reduce(*[operation(tag, tag) for tag in tags]))
    peer.hear(commence(*[(tag, sequence) for sequence, tag in enumerate(tags, 1)]))
    return peer


def phases(peer: PeerHarness) -> dict[int, str]:
    return {tag: reduction.phase for tag, reduction in peer.state.member.reduces.tags.items()}

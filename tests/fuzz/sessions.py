"""Sessions: what one connection sends, from a client that knows nothing to a member that sends false messages.

A session is a generator. It yields the frames to send and is given the next message that arrives; it ends when it
returns, or when the other side closes. It does not use sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from pccl._core.protocol.handshake import Caller
from pccl._core.protocol.hellos import AskStatus, ClientHello, JoinLane, Register
from pccl._core.protocol.messages import (
    Accepted,
    Awaiting,
    Beat,
    EdgeLost,
    Fetched,
    Finished,
    Initiate,
    Leave,
    Registered,
    RingOrder,
    Schema,
    VotePending,
    VoteSync,
    VoteTopology,
    Wired,
    WireFailed,
    Withdraw,
    WithdrawReduce,
)
from pccl._core.protocol.operations import ReduceSignature, pack_signatures
from pccl._core.records import replace

from .random_messages import Drawing

Session = Generator[list[bytes], Any, None]

GROUPS = (101, 102, 103)  # groups of lying members, separate so that they form rings with each other
HEALTHY_GROUP = 0  # sometimes a liar joins the group of the healthy members
STATES = (bytes(16), bytes(range(16)))  # digests that lying members vote with
BURST = 16  # frames that are sent at once, at most


def blind(draw: Drawing, hello: type[Any]) -> Session:
    """Send random frames without a handshake."""
    frames = [draw.any_frame() for _ in range(draw.chance.randint(1, 4))]
    yield [draw.spoil(data) if draw.chance.random() < 0.7 else data for data in frames]


def careless(draw: Drawing, hello: type[Any]) -> Session:
    """Send messages of a handshake twice, in the wrong order, and with one of them corrupted."""
    words = [draw.framed(draw.message(ClientHello)), draw.framed(draw.message(hello)), draw.framed(draw.message(hello))]
    draw.chance.shuffle(words)
    index = draw.chance.randrange(len(words))
    words[index] = draw.spoil(words[index])
    yield words[:1]
    yield words[1:]


def forger(draw: Drawing, hello: type[Any]) -> Session:
    """Send a correct client hello, then a hello without a valid proof, or one that was corrupted."""
    caller = Caller(b"", draw.chance.randbytes(32), lambda proof: draw_hello(draw, hello, proof))
    challenge = yield [draw.framed(caller.opening())]
    try:
        answer = caller.received(challenge)
    except PermissionError:
        return
    yield [draw.spoil(draw.framed(answer))]


def trespasser(draw: Drawing, hello: type[Any]) -> Session:
    """Complete the handshake with a random hello that claims what this peer was never given."""
    claim = draw.message(hello)
    caller = Caller(b"", draw.chance.randbytes(32), lambda proof: replace(claim, proof=proof))
    challenge = yield [draw.framed(caller.opening())]
    try:
        answer = caller.received(challenge)
    except PermissionError:
        return
    yield [draw.framed(answer)]
    yield [draw.any_frame()]


def newcomer(draw: Drawing, hello: type[Any]) -> Session:
    """Complete the handshake and register, then send messages instead of waiting."""
    yield from enter(draw, hello, draw.chance.choice(GROUPS))
    yield babble(draw, (*[Beat] * 12, Wired, WireFailed, EdgeLost, Leave))
    yield babble(draw, None)


def liar(draw: Drawing, hello: type[Any]) -> Session:
    """Become a member, claim to be wired, vote, and report events that never happened."""
    group = HEALTHY_GROUP if draw.chance.random() < 0.02 else draw.chance.choice(GROUPS)
    heard = yield from enter(draw, hello, group)
    me = 0
    for _ in range(8):
        if isinstance(heard, Registered):
            me = heard.peer
            draw.learn(me)
        if isinstance(heard, RingOrder):
            draw.learn(heard.epoch, heard.next_peer, heard.previous_peer, heard.next_epoch)
            heard = yield [draw.framed(Wired(heard.epoch))]
        elif isinstance(heard, Accepted):
            break
        else:
            heard = yield []
    if draw.chance.random() < 0.5:
        yield collective(draw) if draw.chance.random() < 0.5 else synchronisation(draw)
    for _ in range(draw.chance.randint(1, 5)):
        yield babble(draw, (Beat, Withdraw, Wired, EdgeLost, WireFailed, VoteTopology, VotePending), me)
    yield babble(draw, None)


def collective(draw: Drawing) -> list[bytes]:
    """Initiate a few tags that others of the group may use too, then send messages that may or may not be legal."""
    tags = draw.chance.sample(range(4), draw.chance.randint(1, 3))
    signatures = [ReduceSignature(tag, draw.chance.choice((1, 1, 1, 2)), 10, 0, 0, 0) for tag in tags]
    later = (Beat, Awaiting, Awaiting, WithdrawReduce, Finished)
    words = [Initiate(pack_signatures(signatures)), *[draw.message(draw.chance.choice(later)) for _ in range(4)]]
    return [draw.framed(word) for word in words]


def synchronisation(draw: Drawing) -> list[bytes]:
    """Vote for a state that others of the group hold too, or almost, then report events that never happened."""
    alike = {"keys": 1, "strategy": draw.chance.choice((0, 0, 0, 1, 2, 9)), "schema": bytes(16), "torn": False}
    vote = draw.message(
        VoteSync, revision=draw.chance.choice((0, 0, 1, 1 << 63)), content=draw.chance.choice(STATES), **alike
    )
    if draw.chance.random() < 0.2:
        vote = replace(vote, schema=draw.chance.randbytes(16))
    later = (Beat, Fetched, Schema, Withdraw)
    words = [vote, *[draw.message(draw.chance.choice(later)) for _ in range(4)]]
    return [draw.framed(word) for word in words]


# The sessions of each kind of hello, with weights. Members are rare, because a topology round waits for each of them.
STORIES: dict[type[Any], list[tuple[Callable[[Drawing, type[Any]], Session], float]]] = {
    Register: [(blind, 4), (careless, 2), (forger, 2), (trespasser, 1), (newcomer, 4), (liar, 4)],
    JoinLane: [(blind, 2), (careless, 1), (forger, 1), (trespasser, 2)],
    AskStatus: [(careless, 1), (forger, 1), (trespasser, 2)],
}


def draw_session(draw: Drawing, hello: type[Any]) -> Session:
    """Draw a session for a port that answers this kind of hello."""
    stories, weights = zip(*STORIES[hello], strict=True)
    story: Callable[[Drawing, type[Any]], Session] = draw.chance.choices(stories, weights)[0]
    return story(draw, hello)


def draw_hello(draw: Drawing, hello: type[Any], proof: bytes) -> Any:
    """Return a hello with this proof; the other fields are always the same, because the proof covers them."""
    if hello is Register:
        return Register(proof, GROUPS[0], 1, "", 1, bytes(16))
    if hello is AskStatus:
        return AskStatus(proof)
    return JoinLane(proof, bytes(16), 1, 1, 2, 0)


def enter(draw: Drawing, hello: type[Any], group: int) -> Generator[list[bytes], Any, Any]:
    """Do the whole handshake correctly; return the first message after it, or None if it failed."""
    lanes = draw.chance.choice((1, 2, 0, 256, 65535))
    caller = Caller(b"", draw.chance.randbytes(32), lambda proof: Register(proof, group, lanes, "", 1, bytes(16)))
    reply: Any = caller.opening()
    while reply is not None:
        heard = yield [draw.framed(reply)]
        try:
            reply = caller.received(heard)
        except PermissionError:
            return None
    return (yield [])


def babble(draw: Drawing, kinds: tuple[type[Any], ...] | None, me: int = 0) -> list[bytes]:
    """Return several messages, mostly legal in form; with None, messages of any kind, some of them corrupted."""
    count = draw.chance.randint(1, BURST)
    if kinds is None:
        return [draw.spoil(draw.any_frame()) if draw.chance.random() < 0.5 else draw.any_frame() for _ in range(count)]
    # At most one vote: the master would end the session at a second one, before it reads the rest.
    votes = [kind for kind in kinds if kind in (VoteTopology, VotePending)]
    others = [kind for kind in kinds if kind not in votes]
    chosen = [draw.chance.choice(others) for _ in range(count)]
    if votes and draw.chance.random() < 0.5:
        chosen.insert(draw.chance.randrange(count), draw.chance.choice(votes))
    return [draw.framed(draw.message(kind, **about(draw, kind, me))) for kind in chosen]


def about(draw: Drawing, kind: type[Any], me: int) -> dict[str, int]:
    """Return the fields of a lost edge: nearly always one of this peer, because the master refuses others at once."""
    if kind is not EdgeLost or not me or draw.chance.random() < 0.05:
        return {}
    return {draw.chance.choice(("source", "target")): me, "epoch": draw.chance.choice(draw.known) & 0xFFFFFFFF}

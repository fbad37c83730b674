"""The handshake: a caller with the token is admitted, one without learns why, and both sides prove theirs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pccl._core.protocol.handshake import Admit, Caller, PendingConnections, Refuse, Say
from pccl._core.protocol.hellos import (
    AskStatus,
    Challenge,
    ClientHello,
    JoinLane,
    JoinState,
    Refused,
    Register,
    Welcome,
)
from pccl._core.protocol.messages import Beat
from pccl._core.records import replace

TOKEN = b"the secret"
SECOND = 1_000_000_000
HELLO = Register(bytes(32), 3, 2, "host", 48149, bytes(16))


def make_pending(most: int = 8, token: bytes = TOKEN) -> PendingConnections:
    random = Random(1)
    return PendingConnections(token, Register, lambda: random.randbytes(32), 5 * SECOND, most)


def make_caller(token: bytes = TOKEN, nonce: bytes = bytes(32)) -> Caller:
    return Caller(token, nonce, lambda proof: replace(HELLO, proof=proof))


def hello_of(pending: PendingConnections, caller: Caller, conn: int = 1) -> Register:
    """Go as far as the caller's hello."""
    pending.arrived(conn, "somewhere", 0)
    (say,) = pending.received(conn, caller.opening())
    hello: Register = caller.received(say.message)
    return hello


@pytest.mark.parametrize("token", [TOKEN, b""], ids=["with a token", "without one"])
def test_who_holds_the_token_comes_in(token: bytes) -> None:
    """Goal: after two round trips both sides have proven that they hold the same token; the empty token works too."""
    pending, caller = make_pending(token=token), make_caller(token)

    hello = hello_of(pending, caller)
    (admit,) = pending.received(1, hello)

    assert isinstance(admit, Admit)
    assert replace(admit.hello, proof=bytes(32)) == HELLO
    assert caller.received(admit.welcome) is None
    assert caller.done
    assert len(pending) == 0
    assert pending.counts == {}


def test_the_token_never_travels() -> None:
    """Goal: a listener on the network learns nothing that it can use later."""
    pending, caller = make_pending(), make_caller()
    hello = hello_of(pending, caller)
    (admit,) = pending.received(1, hello)

    for message in (caller.opening(), hello, admit.welcome):
        assert TOKEN not in b"".join(value for value in vars_of(message) if isinstance(value, bytes))


def vars_of(message: Any) -> list[Any]:
    return [getattr(message, name) for name in message.__match_args__]


def test_a_wrong_token_is_refused_with_the_remedy() -> None:
    """Goal: a peer with another token is told so first; then the connection ends and is counted."""
    pending, caller = make_pending(), make_caller(b"another")

    refused, turned = pending.received(1, hello_of(pending, caller))

    assert isinstance(refused, Say)
    assert isinstance(refused.message, Refused)
    assert turned == Refuse(1, "token", "somewhere: wrong token", True, 1)
    with pytest.raises(PermissionError, match="PCCL_TOKEN"):
        caller.received(refused.message)
    assert pending.counts == {"token": 1}
    assert 1 not in pending


def test_a_peer_that_dials_a_peer_is_told_so() -> None:
    """Goal: the port of a peer instead of the master's, or the other way round, is named."""
    state = JoinState(bytes(32), bytes(16), 1, 2, 3)
    for kinds, hello, text in (
        ((JoinLane, JoinState), HELLO, "this is the port of a peer, not of a master"),
        ((JoinLane, JoinState), AskStatus(bytes(32)), "a master listens on 48148 by default"),
        ((Register, AskStatus), state, "this is the port of a master, not of a peer"),
    ):
        pending = PendingConnections(TOKEN, kinds, lambda: bytes(32), 5 * SECOND, 8)
        pending.arrived(1, "somewhere", 0)
        pending.received(1, ClientHello(bytes(32)))

        say, refuse = pending.received(1, hello)

        assert text in say.message.reason
        assert (refuse.kind, refuse.total) == ("port", 1)
        assert 1 not in pending


def test_a_replayed_hello_is_refused() -> None:
    """Goal: a recorded hello is worth nothing, because the challenge is new each time."""
    pending = make_pending()
    recorded = hello_of(pending, make_caller())
    pending.received(1, recorded)

    pending.arrived(2, "elsewhere", 0)
    pending.received(2, ClientHello(bytes(32)))
    actions = pending.received(2, recorded)

    assert [type(action) for action in actions] == [Say, Refuse]


@pytest.mark.parametrize("change", [{"group": 4}, {"lanes": 9}, {"host": "evil"}, {"port": 1}])
def test_an_altered_hello_is_refused(change: dict[str, Any]) -> None:
    """Goal: a hello cannot be changed on its way; the proof covers every field."""
    pending = make_pending()

    actions = pending.received(1, replace(hello_of(pending, make_caller()), **change))

    assert [type(action) for action in actions] == [Say, Refuse]


def test_a_proof_for_one_kind_of_hello_is_none_for_another() -> None:
    """Goal: a lane's proof cannot be turned into a registration's."""
    pending = make_pending()
    hello = hello_of(pending, make_caller())

    _, turned = pending.received(1, JoinLane(hello.proof, bytes(16), 1, 1, 2, 0))

    assert turned.kind == "port"


def test_a_port_may_answer_several_kinds_of_hello() -> None:
    """Goal: one port serves lanes and states, and no other kind of hello."""
    random = Random(1)
    kinds = {JoinLane(bytes(32), bytes(16), 1, 1, 2, 0): Admit, JoinState(bytes(32), bytes(16), 1, 1, 2): Admit}
    for wanted, outcome in {**kinds, HELLO: Refuse}.items():
        pending = PendingConnections(TOKEN, (JoinLane, JoinState), lambda: random.randbytes(32), 5 * SECOND, 8)
        caller = Caller(TOKEN, bytes(32), lambda proof, wanted=wanted: replace(wanted, proof=proof))

        actions = pending.received(1, hello_of(pending, caller))

        assert type(actions[-1]) is outcome


@pytest.mark.parametrize(
    "words",
    [
        [HELLO],
        [ClientHello(bytes(32)), ClientHello(bytes(32))],
        [Beat(1)],
        [ClientHello(bytes(32)), Challenge(bytes(32))],
    ],
    ids=["hello first", "two client hellos", "a member's word", "an answerer's word"],
)
def test_out_of_turn_is_turned_away(words: list[Any]) -> None:
    """Goal: a handshake has one order of messages, and any other is refused."""
    pending = make_pending()
    pending.arrived(1, "somewhere", 0)

    actions = [action for word in words for action in pending.received(1, word)]

    assert isinstance(actions[-1], Refuse)
    assert actions[-1].kind == "order"
    assert 1 not in pending


def test_a_crowd_evicts_the_oldest() -> None:
    """Goal: connections that send nothing cannot block others."""
    pending = make_pending(most=2)
    assert pending.arrived(1, "a", 0) == []
    assert pending.arrived(2, "b", 1) == []

    (turned,) = pending.arrived(3, "c", 2)

    assert (turned.conn, turned.kind) == (1, "crowd")
    assert [conn in pending for conn in (1, 2, 3)] == [False, True, True]
    pending.check()


def test_silence_has_a_deadline() -> None:
    """Goal: a pending connection has five seconds, whether it sent nothing or stopped half way."""
    pending = make_pending()
    pending.arrived(1, "a", 0)
    pending.arrived(2, "b", SECOND)
    pending.received(2, ClientHello(bytes(32)))
    assert pending.next_deadline_ns == 5 * SECOND

    assert pending.tick(5 * SECOND - 1) == []
    assert pending.tick(5 * SECOND) == [Refuse(1, "silence", "a: silent for 5 s", True, 1)]
    assert pending.tick(6 * SECOND) == [Refuse(2, "silence", "b: no hello after its ClientHello for 5 s", True, 2)]
    assert pending.next_deadline_ns is None
    assert pending.counts == {"silence": 2}


def test_only_the_first_of_a_kind_is_worth_a_line() -> None:
    """Goal: a port scan raises counters and does not fill the log; another host or another error is logged again."""
    pending = make_pending()
    firsts = []
    for conn, (host, kind) in enumerate([("a", "frame"), ("a", "frame"), ("b", "frame"), ("a", "closed")]):
        pending.arrived(conn, host, 0)
        firsts += [action.first for action in pending.refuse(conn, kind, "why")]

    assert firsts == [True, False, True, True]
    assert pending.counts == {"frame": 3, "closed": 1}


def test_the_memory_of_what_was_logged_is_bounded() -> None:
    """Goal: a scan from many hosts may cause a second log line, but never unbounded memory."""
    pending = make_pending(most=1)
    for conn in range(1000):
        pending.arrived(conn, f"host{conn}", 0)

    assert len(pending._logged) <= 64


def test_a_connection_that_is_gone_is_refused_once() -> None:
    """Goal: a late report about a connection that was already refused does not count again."""
    pending = make_pending()
    pending.arrived(1, "a", 0)
    pending.refuse(1, "closed", "gone")

    assert pending.refuse(1, "closed", "gone") == []
    assert pending.counts == {"closed": 1}


def test_the_answerer_proves_itself_too() -> None:
    """Goal: a peer does not join a false master that only claims to accept its proof."""
    caller = make_caller()
    hello_of(make_pending(), caller)

    with pytest.raises(PermissionError, match="does not hold this run's token"):
        caller.received(Welcome(bytes(32)))
    assert not caller.done


@pytest.mark.parametrize("word", [Welcome(bytes(32)), Beat(1)])
def test_a_caller_expects_its_turn(word: Any) -> None:
    """Goal: a welcome without a challenge, or anything else, is no handshake."""
    with pytest.raises(PermissionError, match="out of turn"):
        make_caller().received(word)


def test_a_caller_answers_one_challenge() -> None:
    """Goal: an answerer cannot collect proofs."""
    pending, caller = make_pending(), make_caller()
    hello_of(pending, caller)

    with pytest.raises(PermissionError, match="out of turn"):
        caller.received(Challenge(bytes(32)))


def test_a_proof_is_good_for_one_kind_of_hello() -> None:
    """Goal: the proof of a status query does not register a peer."""
    random = Random(1)
    pending = PendingConnections(TOKEN, (Register, AskStatus), lambda: random.randbytes(32), 5 * SECOND, 8)
    caller = Caller(TOKEN, bytes(32), AskStatus)
    pending.arrived(1, "somewhere", 0)
    (say,) = pending.received(1, caller.opening())
    inquiry = caller.received(say.message)

    refused, turned = pending.received(1, replace(HELLO, proof=inquiry.proof))
    assert isinstance(refused.message, Refused)
    assert turned.kind == "token"

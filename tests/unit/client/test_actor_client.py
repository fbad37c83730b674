"""The client of the actor, with a mailbox whose other end is in the test."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pccl._core.protocol.codec import unpack
from pccl._core.protocol.mailbox import CallShare, CallUnshare
from pccl.client import actor_client
from pccl.client.actor_client import ActorClient
from pccl.options import Options

MANY = 1000  # more messages than a mailbox takes before it is read, which is about 278


class SilentActor:
    """Takes the place of the actor's process: it keeps its end of the mailbox, and reads when the test says so."""

    pid = 1

    def __init__(self, module: str, arguments: tuple[int, ...], fds: tuple[int, ...]) -> None:
        self.mailbox = socket.socket(fileno=os.dup(fds[0]))
        self.mailbox.setblocking(False)

    def read(self) -> list[Any]:
        """Return all messages that are in the mailbox now."""
        found: list[Any] = []
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.mailbox, 4096, 1)
            except BlockingIOError:
                return found
            for fd in fds:
                os.close(fd)
            found.append(unpack(data))

    def wait(self, timeout: float | None) -> bool:
        return True

    def kill(self) -> None:
        self.mailbox.close()

    def describe_end(self) -> str:
        return "was never there"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorClient]:
    monkeypatch.setattr(actor_client, "ActorProcess", SilentActor)
    made = ActorClient(Options(slots=2))
    yield made
    made.close()


def share(client: ActorClient, segments: range) -> None:
    """Share segments, all of which are the same file here, and read each message."""
    actor: Any = client.process
    for segment in segments:
        client.share("test", [segment], lambda _: (0, 4096))
        assert actor.read()[-1] == CallShare(segment, 4096)


def share_and_free(client: ActorClient, segments: range) -> None:
    """Share segments and free all of them before the actor reads a message of it."""
    share(client, segments)
    for segment in segments:
        client.unshare(segment)


def check(client: ActorClient) -> None:
    """Check the actor, as every call does that sleeps."""
    slot = client.calls.acquire("test")
    assert not client.calls.wait("test", slot, 0)
    client.put_back(slot)


def test_segments_that_are_freed_at_once_are_all_unshared(client: ActorClient) -> None:
    """Goal: a full mailbox delays the news that a segment was freed, but does not lose it."""
    actor: Any = client.process
    share_and_free(client, range(1, MANY + 1))
    heard = actor.read()
    assert len(heard) < MANY  # the mailbox had no room for all messages
    for _ in range(MANY):
        check(client)
        heard += actor.read()

    assert sorted(message.segment for message in heard) == list(range(1, MANY + 1))
    assert {type(message) for message in heard} == {CallUnshare}


def test_the_next_segment_that_is_freed_brings_those_that_had_no_room(client: ActorClient) -> None:
    actor: Any = client.process
    share(client, range(MANY + 1, MANY + 2))
    share_and_free(client, range(1, MANY + 1))
    assert len(actor.read()) < MANY
    client.unshare(MANY + 1)

    assert len(actor.read()) > 1


def test_a_segment_is_shared_after_all_that_were_freed_before(
    client: ActorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: the actor never holds more segments than the client has shared at the same time."""
    actor: Any = client.process
    heard: list[Any] = []
    share_and_free(client, range(1, MANY + 1))
    with monkeypatch.context() as patched:
        patched.setattr(actor_client, "_poll", lambda *_: heard.extend(actor.read()))  # room comes while it waits
        client.share("test", [1], lambda _: (0, 4096))
    heard += actor.read()

    assert heard[-1] == CallShare(1, 4096)
    assert sorted(message.segment for message in heard[:-1]) == list(range(1, MANY + 1))


def test_nothing_is_kept_for_an_actor_that_is_gone(client: ActorClient) -> None:
    actor: Any = client.process
    share(client, range(1, 3))
    actor.mailbox.close()
    client.unshare(1)
    client.unshare(2)

    assert not client.calls.shared

"""Forking a worker: what the actor gets of it, and what is left if its mailbox cannot be watched."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, cast

import pytest

from pccl.actors.io import fork
from pccl.actors.io.loop import Loop
from tests.leaks import Footprint

FOREVER_NS = 1 << 62


def test_mail_of_a_child_arrives() -> None:
    """Goal: the loop calls when the child has written, and again when the child is gone."""
    mail = []
    loop = Loop()

    def on_mail() -> None:
        mail.append(ours.recv(fork.MAILBOX_BYTES_MAX))
        if mail[-1] == b"":
            loop.stop()

    pid, ours = fork.fork(loop, "pccl-test", [], lambda mailbox: mailbox.sendall(b"hello"), on_mail)
    with ours:
        loop.run(lambda: FOREVER_NS, lambda _: None)
        fork.wait_for_exit({pid})

    assert mail == [b"hello", b""]


def test_a_child_that_cannot_be_watched_does_not_stay() -> None:
    """Goal: if the kernel watches no more descriptors, the caller gets the error; no child and no mailbox is left."""

    class FullLoop:
        def watch(self, fd: int, handler: Any) -> None:
            raise OSError(errno.ENOSPC, "no more watches")

    def serve(mailbox: socket.socket) -> None:
        mailbox.recv(1)  # for ever: the actor never writes

    with Footprint.watch() as footprint:
        with pytest.raises(OSError, match="no more watches"):
            fork.fork(cast(Loop, FullLoop()), "pccl-test", [], serve, lambda: None)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        assert not footprint.leaks()

"""An internal error of the peer's machine shows its story, and never the token."""

from __future__ import annotations

import traceback

import pytest

from pccl._core.peer.events import Called
from pccl._core.peer.peer_state import PeerState
from pccl._core.protocol import mailbox
from pccl.options import Options

TOKEN = "secret-that-no-log-may-show"


def test_an_error_of_the_machine_does_not_show_the_token() -> None:
    """Goal: the peer actor prints such an error with its story on standard error, where others may read it."""
    options = Options(token=TOKEN)
    state = PeerState(options)
    call = mailbox.CallConnect(0, 1, 3, 0, 2, b"127.0.0.1 1", "", 0, options.encode().encode())
    state.handle(Called(call), 0)

    with pytest.raises(TypeError) as caught:
        state.handle(object(), 1)

    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(state) + repr(call)
    assert "CallConnect" in shown, "the story is told"
    assert TOKEN not in shown

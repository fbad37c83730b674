"""The story of a machine's internal error: complete enough to find the bug, and without secrets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pccl._core.master.events import Dismiss, PeerCame, PeerSaid, SendTo
from pccl._core.master.master_state import MasterState
from pccl._core.protocol import hellos
from pccl._core.protocol import messages as m
from pccl._core.protocol.mailbox import CallConnect
from pccl._core.records import record, replace
from pccl._core.story import SHOWN_MAX, attach, show, tell
from pccl.options import Options

PROOF = b"the-proof-that-nobody-may-ever-see"[:32]
TOKEN = "the-token-that-nobody-may-ever-see"


@record
class Holder:
    """A record with a secret of its own, and others inside."""

    token: str
    secret: bytes
    parts: Any


@pytest.mark.parametrize(
    "value",
    [
        PeerCame(1, hellos.Register(bytes(32), 0, 1, "host", 7, bytes(16)), "host"),
        [SendTo(1, m.Kick(4, "a reason")), Dismiss(1)],
        ((1,), (), {"a": [None, True]}, b"bytes", 1.5),
    ],
)
def test_values_without_secrets_are_shown_as_they_print(value: Any) -> None:
    """Goal: a story is as readable as `repr`, except where a secret is."""
    assert show(value).replace("proof=***", f"proof={bytes(32)!r}") == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        hellos.Register(PROOF, 0, 1, "host", 7, bytes(16)),
        hellos.Welcome(PROOF),
        Holder(TOKEN, PROOF, [hellos.Welcome(PROOF), {"inside": (Holder(TOKEN, PROOF, None),)}]),
        Options(token=TOKEN),
        [PeerSaid(1, hellos.Welcome(PROOF))],
    ],
)
def test_no_secret_field_is_shown_at_any_depth(value: Any) -> None:
    """Goal: a token or a proof never reaches a log or a bug report."""
    shown = show(value)

    assert TOKEN not in shown
    assert repr(PROOF) not in shown
    assert "***" in shown


def test_encoded_options_are_not_shown() -> None:
    """Goal: the options that a training process gives its actor hold the token as plain bytes."""
    names = CallConnect.__match_args__  # type: ignore[attr-defined]
    values: dict[str, Any] = {
        name: Options(token=TOKEN).encode().encode() if name == "options" else 0 for name in names
    }

    assert "options" in names
    assert TOKEN not in show(CallConnect(**values))


def test_an_error_of_the_master_shows_no_secret() -> None:
    """Goal: the note of an error that the master's machine raises has the whole story, and neither token nor proof."""
    state = MasterState(bytes(16), Options(token=TOKEN, check=True))
    state.handle(PeerCame(1, hellos.Register(PROOF, 0, 1, "", 7, bytes(16)), "host"), 0)

    with pytest.raises(TypeError) as caught:
        state.handle(replace(hellos.Register(PROOF, 0, 1, "", 7, bytes(16)), port=8), 0)

    note = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "registered group=0" in note
    assert "port=8" in note
    assert TOKEN not in note
    assert repr(PROOF) not in note


def test_the_masters_actions_hold_no_secret() -> None:
    """Goal: nothing that the master logs or sends on repeats the token or a proof."""
    state = MasterState(bytes(16), Options(token=TOKEN, check=True))

    actions = state.handle(PeerCame(1, hellos.Register(PROOF, 0, 1, "", 7, bytes(16)), "host"), 0)

    assert actions
    assert TOKEN not in repr((state, actions))
    assert repr(PROOF) not in repr((state, actions))


def test_a_story_is_cut_at_its_latest_events() -> None:
    """Goal: a note stays readable: the last events, each with its time and its actions."""
    story = [(number * 1_000_000_000, number, [f"action {number}"]) for number in range(SHOWN_MAX + 5)]
    error = ValueError("a bug")

    attach(error, SimpleNamespace(story=story), 99)
    lines = tell(story).split("\n")

    assert error.__notes__ == ["while handling 99; before that:\n" + "\n".join(lines)]
    assert len(lines) == 2 * SHOWN_MAX
    assert lines[:2] == ["5.000000 5", "    'action 5'"]

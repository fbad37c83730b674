"""What a member is told when a sync overwrites it: when, which tensors, how often, and what to look for."""

from __future__ import annotations

from pathlib import Path

from pccl._core.kernels.digest import DIGEST_BYTES
from pccl.client.divergence import NAMES_MAX, PAGE, Divergence, Overwrite, changed_names, explain
from tests import ROOT

NAMES = ("bias", "seed", "weight")


def digests(*letters: str) -> bytes:
    return b"".join(letter.encode() * DIGEST_BYTES for letter in letters)


def overwrite(*names: str, revision: int = 7, agreed: int = 7) -> Overwrite:
    return Overwrite(names, 9, 4096, revision, agreed)


def test_only_compared_tensors_that_changed_are_named() -> None:
    """Goal: the order is that of the schema, and a tensor in which peers may differ is never named."""
    compared = (True, False, True)

    assert changed_names(NAMES, compared, digests("a", "b", "c"), digests("a", "b", "c")) == ()
    assert changed_names(NAMES, compared, digests("a", "b", "c"), digests("x", "y", "z")) == ("bias", "weight")
    assert changed_names(NAMES, compared, digests("a", "b", "c"), digests("a", "y", "z")) == ("weight",)


def test_the_first_sync_is_that_of_a_newcomer() -> None:
    """Goal: a peer is a member from its second sync on."""
    divergence = Divergence()

    assert [divergence.ended() for _ in range(4)] == [False, True, True, True]
    assert divergence.times == 0


def test_the_warning_comes_ever_more_rarely() -> None:
    """Goal: a peer that diverges in every step is told the 1st, 2nd, 4th, 8th ... time, and counted every time."""
    divergence = Divergence()
    divergence.ended()
    told = []
    for time in range(1, 101):
        divergence.ended()
        if divergence.overwritten(overwrite("bias")):
            told.append(time)

    assert told == [1, 2, 4, 8, 16, 32, 64]
    assert divergence.times == 100


def test_it_says_in_how_many_syncs() -> None:
    """Goal: the first sync does not count, and syncs that changed nothing do."""
    divergence = Divergence()
    for _ in range(5):
        divergence.ended()

    assert "in 1 of 4 syncs since it joined" in divergence.overwritten(overwrite("bias"))


def test_what_the_warning_says() -> None:
    """Goal: one line with the tensors, the bytes, and what to look for."""
    text = explain(overwrite("bias", "weight"), 3, 3)

    assert text.startswith(
        "sync_shared_state overwrote 2 of this peer's 9 tensors ('bias', 'weight', 4096 bytes), in 3 of 3 syncs "
        "since it joined: it differed from the elected revision 7."
    )
    assert "zero_grad()" in text
    assert "\n" not in text


def test_many_tensors_are_cut() -> None:
    """Goal: a state of a thousand tensors does not make a line of a thousand names."""
    names = [f"layer{index}" for index in range(NAMES_MAX + 3)]

    text = explain(overwrite(*names), 1, 1)

    assert f"'layer{NAMES_MAX - 1}', and 3 more, 4096 bytes)" in text
    assert f"'layer{NAMES_MAX}'" not in text


def test_a_member_that_is_outdated_hears_of_the_revision() -> None:
    """Goal: a forgotten push_revision has another remedy than a different step, also if nothing else differs."""
    text = explain(overwrite(revision=3, agreed=4), 1, 1)

    assert "0 of this peer's 9 tensors (4096 bytes)" in text
    assert "it was at revision 3, and the group at 4. Call push_revision once per step" in text
    assert "zero_grad" not in text


def test_the_page_that_it_names_exists() -> None:
    """Goal: users find the page, and in it the warning."""
    assert "sync_shared_state overwrote" in Path(ROOT, PAGE).read_text()

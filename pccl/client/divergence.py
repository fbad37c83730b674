"""What a member is told when a sync overwrites it: the tensors, how often, and what to look for.

A newcomer is overwritten by its first sync, which is how it receives the state. Later syncs of the same membership find
a peer with the elected state already, if it computes what the others compute. A member that a sync overwrites all the
same is *divergent*: its step contributed to the reduces, but its result was thrown away. Nothing fails, so it is told
in a warning: the first time, then the 2nd, 4th, 8th time and so on, because many divergent members diverge in every
step. A member that allowed it with RECEIVE_ONLY is not divergent.

Pure: digests and numbers in, names and text out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccl._core.kernels.digest import DIGEST_BYTES
from pccl._core.records import record

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES_MAX = 4  # names in one warning; the sync info has all

PAGE = "docs/determinism.md"
CAUSES = (
    "Look for optimizer state outside of the SharedState, gradients that zero_grad() set to None, other data types, "
    f"non-deterministic operations: {PAGE}"
)
OUTDATED = f"Call push_revision once per step, and let no peer skip a step that others made: {PAGE}"


@record
class Overwrite:
    """What one sync did to a divergent member."""

    names: tuple[str, ...]  # of tensors that peers compare and that have another content now
    tensors: int  # how many there are
    nbytes: int  # received
    revision: int  # of this peer before the sync
    agreed: int


class Divergence:
    """The syncs of one membership, and how many of them overwrote this peer as a member."""

    __slots__ = ("_syncs", "times")

    def __init__(self) -> None:
        self._syncs = -1  # completed ones after the first, in which this peer was a newcomer
        self.times = 0  # of them, those that overwrote it

    def ended(self) -> bool:
        """Count a sync that succeeded; return whether this peer came to it as a member."""
        self._syncs += 1
        return self._syncs > 0

    def overwritten(self, what: Overwrite) -> str:
        """Count a sync that overwrote this member; return the warning, or an empty text if it is not its turn."""
        self.times += 1
        if self.times & (self.times - 1):
            return ""
        return explain(what, self.times, self._syncs)


def changed_names(names: Sequence[str], compared: Sequence[bool], before: bytes, after: bytes) -> tuple[str, ...]:
    """The names of compared tensors whose digest changed. The digests are in the order of the names."""
    return tuple(
        name
        for index, (name, is_compared) in enumerate(zip(names, compared, strict=True))
        if is_compared and _digest_at(before, index) != _digest_at(after, index)
    )


def explain(what: Overwrite, times: int, syncs: int) -> str:
    """The warning."""
    shown = [repr(name) for name in what.names[:NAMES_MAX]]
    if len(what.names) > NAMES_MAX:
        shown.append(f"and {len(what.names) - NAMES_MAX} more")
    which = f"{len(what.names)} of this peer's {what.tensors} tensors ({', '.join([*shown, f'{what.nbytes} bytes'])})"
    why = f"it differed from the elected revision {what.agreed}. {CAUSES}"
    if what.revision < what.agreed:
        why = f"it was at revision {what.revision}, and the group at {what.agreed}. {OUTDATED}"
    return f"sync_shared_state overwrote {which}, in {times} of {syncs} syncs since it joined: {why}"


def _digest_at(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

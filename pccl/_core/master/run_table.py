"""The names of runs, and the runs that a master remembers while it serves another one.

A master serves one run at a time. What another run has agreed on is kept here under the name of that run, with the mark
that it is finished, so that its peers continue where they ended, or hear that nothing is left to do. The table is
bounded: the run that was served longest ago is forgotten first. `runs` decides which run is served. Part of the
master's machine; pure.
"""

from __future__ import annotations

import hashlib

from pccl._core.records import record
from pccl.options import GROUPS_MAX, RUN_NAME_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUNS_MAX = 16  # that a master knows, with the one that it serves: a machine serves a few projects, not dozens
RUN_ID_BYTES = 16


@record
class AgreedState:
    """What one group of a run has agreed on."""

    epoch: int  # of its ring: the next one is higher
    revision: int
    content: bytes
    schema: bytes


@record
class RememberedRun:
    """One run: its id, whether it is finished, and the agreed states of its groups."""

    id: bytes
    finished: bool
    groups: dict[int, AgreedState]

    def revisions(self) -> dict[int, int]:
        """Group -> agreed revision."""
        return {number: group.revision for number, group in sorted(self.groups.items())}


class RunTable:
    """The runs that are not served at present, by name; the one that was served longest ago is the first."""

    def __init__(self) -> None:
        self.runs: dict[str, RememberedRun] = {}

    def keep(self, name: str, run: RememberedRun) -> list[str]:
        """Remember a run. Return the names of the runs that are forgotten for it."""
        self.runs[name] = run
        forgotten = []
        while len(self.runs) >= RUNS_MAX or sum(len(one.groups) for one in self.runs.values()) > GROUPS_MAX:
            oldest = next(iter(self.runs))
            if oldest == name:
                break  # it is the only one left
            del self.runs[oldest]
            forgotten.append(oldest)
        return forgotten

    def take(self, name: str) -> RememberedRun | None:
        """Remove and return the run of this name; None if there is none."""
        return self.runs.pop(name, None)

    def is_finished(self, name: str) -> bool:
        """Whether the run of this name is known to be finished."""
        return name in self.runs and self.runs[name].finished


def name_run(name: str) -> str:
    """`run 'llama'`, or words for the run that has no name."""
    return f"run {name!r}" if name else "the run without a name"


def find_fault(name: str) -> str:
    """Return what is wrong with the name of a run, or an empty text. Log lines and messages show names."""
    if len(name.encode("utf-8", "surrogatepass")) > RUN_NAME_BYTES_MAX:
        return f"the name of a run has at most {RUN_NAME_BYTES_MAX} bytes in UTF-8"
    return "" if not name or name.isprintable() else "the name of a run is one line of printable characters"


def make_id(previous: bytes, name: str, first_peer: int) -> bytes:
    """Return an id for a new run. `first_peer` is the id of its first peer, which no other run of this master had."""
    text = previous + first_peer.to_bytes(8, "little") + name.encode()
    return hashlib.blake2b(text, digest_size=RUN_ID_BYTES).digest()


# ---------------------------------------------------------------------------------------------- in the state file


def pack_run(name: str, run: RememberedRun) -> dict[str, Any]:
    """Return a run as plain values, as the state file keeps it."""
    groups = {
        number: {
            "epoch": group.epoch,
            "revision": group.revision,
            "content": group.content.hex(),
            "schema": group.schema.hex(),
        }
        for number, group in sorted(run.groups.items())
    }
    return {"name": name, "run": run.id.hex(), "finished": run.finished, "groups": groups}


def unpack_run(packed: dict[str, Any]) -> tuple[str, RememberedRun]:
    """The inverse of `pack_run`; numbers of groups may be texts, as JSON has them."""
    groups = {
        int(number): AgreedState(
            group["epoch"], group["revision"], bytes.fromhex(group["content"]), bytes.fromhex(group["schema"])
        )
        for number, group in packed["groups"].items()
    }
    return packed["name"], RememberedRun(bytes.fromhex(packed["run"]), packed["finished"], groups)

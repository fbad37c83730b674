"""Rare paths: what a long run must have met at least once to say something about it.

They are recognised from the reports of peers and from the committed faults. `pccl stress --all-paths` fails a run in
which one of them never happened; paths of faults that were switched off are not required.
"""

from __future__ import annotations

from enum import StrEnum

from .faults import FaultKind


class Path(StrEnum):
    """The rare paths; the values are shown in reports."""

    MADE_AGAIN = "a reduce was undone, and made again by the survivors"
    UNDONE_QUANTIZED = "a quantized reduce was undone"
    FAILED_TWICE = "a reduce failed twice in a row"
    UNDONE_SPREADING = "a reduce was undone while its result was spreading"
    UNDONE_COMPLETE = "a reduce was undone at a peer that had all of its result"
    TWO_LOST = "two peers were lost in one round"
    DIED_AFTER_VOTE = "a peer died after it had voted that its part was complete"
    GREW_AGAIN = "a group fell to one and grew again"
    RECEIVED = "a newcomer received the state"
    SOURCE_LOST = "a member died while state was on its way"
    SINK_LOST = "a newcomer died before it had the state"
    RESUMED = "a group that had lost its state resumed from a checkpoint"
    JOINED_OPTIMIZING = "a newcomer asked to join while the rings were optimised"
    DIED_OPTIMIZING = "a member died while the rings were optimised"
    SAT_OUT = "a stopped peer went on, and was a member all the time"
    GIVEN_UP = "a stopped peer was given up, and came back"
    HOLE_SAT_OUT = "a link was silent for a short time, and no membership was lost"
    HOLE_NOTICED = "a silent link cost a membership"
    FLIPPED = "a flipped bit broke a link, and nothing else"
    REPLACED = "a worker was killed and replaced, and its peer stayed a member"
    MASS_DEATH = "all but one died at once"
    REFUSED_DEAF = "a newcomer was refused at whose address nothing listens"
    REFUSED_SILENT = "a newcomer was refused at whose address nobody answers"
    REFUSED_STRANGER = "a newcomer of another run was refused"
    REFUSED_STATE = "a newcomer with a state of another shape was refused"
    REFUSED_SHAPE = "a newcomer that reduced something else was refused"
    REFUSED_CALL = "a newcomer that made another call was refused"


NEEDS: dict[Path, frozenset[FaultKind]] = {
    Path.RESUMED: frozenset({FaultKind.MASS_DEATH}),
    Path.FAILED_TWICE: frozenset({FaultKind.KILL_TWO}),
    Path.TWO_LOST: frozenset({FaultKind.KILL_TWO}),
    Path.MASS_DEATH: frozenset({FaultKind.MASS_DEATH}),
    Path.SAT_OUT: frozenset({FaultKind.STOP_PEER}),
    Path.GIVEN_UP: frozenset({FaultKind.STOP_PEER}),
    Path.HOLE_SAT_OUT: frozenset({FaultKind.BLACK_HOLE}),
    Path.HOLE_NOTICED: frozenset({FaultKind.BLACK_HOLE}),
    Path.FLIPPED: frozenset({FaultKind.FLIP_RING}),
    Path.REPLACED: frozenset({FaultKind.KILL_SENDER}),
    Path.GREW_AGAIN: frozenset({FaultKind.MASS_DEATH}),
    Path.REFUSED_DEAF: frozenset({FaultKind.NEWCOMER_DEAF}),
    Path.REFUSED_SILENT: frozenset({FaultKind.NEWCOMER_SILENT}),
    Path.REFUSED_STRANGER: frozenset({FaultKind.NEWCOMER_STRANGER}),
    Path.REFUSED_STATE: frozenset({FaultKind.NEWCOMER_STATE}),
    Path.REFUSED_SHAPE: frozenset({FaultKind.NEWCOMER_SHAPE}),
    Path.REFUSED_CALL: frozenset({FaultKind.NEWCOMER_CALL}),
}


def missing(taken: dict[str, int], kinds: set[FaultKind], groups: int) -> list[Path]:
    """The paths that these kinds of faults should have caused and did not."""
    asked = [path for path in Path if NEEDS.get(path, frozenset()) <= kinds]
    if groups < 2:
        asked = [path for path in asked if path is not Path.RESUMED]  # the elder always keeps the only state
    return [path for path in asked if not taken.get(path)]

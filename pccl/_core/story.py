"""The story of a machine: its latest events and actions, told when something goes wrong.

A machine keeps the last few hundred of them. An error inside it is a bug of ours, and what led to it is worth more than
the line it happened in: so the error carries the story along, wherever it is shown. Pure.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

SHOWN_MAX = 40  # events; enough for a round with its wiring, and still readable


def tell(story: Iterable[tuple[int, Any, list[Any]]]) -> str:
    """One line per event, with its time in seconds, and one per action below it."""
    lines = []
    for now_ns, event, actions in list(story)[-SHOWN_MAX:]:
        lines.append(f"{now_ns / 1e9:.6f} {event!r}")
        lines += [f"    {action!r}" for action in actions]
    return "\n".join(lines)


def attach(error: BaseException, state: Any, event: Any) -> None:
    """Make the error carry what its machine went through, and what it was handling."""
    error.add_note(f"while handling {event!r}; before that:\n{tell(state.story)}")

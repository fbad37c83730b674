"""The story of a machine: its latest events and actions, shown when something goes wrong.

A machine keeps the last few hundred. An error inside a machine is a defect of the library, and the events that led to
it say more than the line where it happened, so the error carries the story. A story goes to logs and bug reports;
therefore it never contains the value of a field that is named like a secret. Pure.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

SHOWN_MAX = 40  # events; enough for a topology round with its ring orders, and still readable
SECRET_FIELDS = frozenset(("token", "proof", "secret", "options"))  # of any record; encoded options contain the token
HIDDEN = "***"  # shown instead


def show(value: Any) -> str:
    """What `repr` prints, without the values of secret fields."""
    if isinstance(value, list | tuple):
        inside = ", ".join(show(item) for item in value)
        comma = "," if len(value) == 1 and isinstance(value, tuple) else ""
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{comma})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{show(key)}: {show(item)}' for key, item in value.items())}}}"
    names = getattr(type(value), "__match_args__", None)
    if names is None:
        return repr(value)
    parts = (f"{name}={HIDDEN if name in SECRET_FIELDS else show(getattr(value, name))}" for name in names)
    return f"{type(value).__name__}({', '.join(parts)})"


def tell(story: Iterable[tuple[int, Any, list[Any]]]) -> str:
    """One line per event, with its time in seconds, and one per action below it."""
    lines = []
    for now_ns, event, actions in list(story)[-SHOWN_MAX:]:
        lines.append(f"{now_ns / 1e9:.6f} {show(event)}")
        lines += [f"    {show(action)}" for action in actions]
    return "\n".join(lines)


def attach(error: BaseException, state: Any, event: Any) -> None:
    """Add the story of the machine and the event that it was handling to an error."""
    error.add_note(f"while handling {show(event)}; before that:\n{tell(state.story)}")

"""Fault points: places with a name at which a test may make a process die, stop or dawdle.

`PCCL_FAULT=point:count:action` is read once, when an actor starts. The point is where: `peer.AttachLink` is just
before the peer actor performs that action, `peer.send.Wired` just before it sends that message, `lane.Attach` just
before a worker follows that command, `state.serve.answer` just before a state's worker answers, `state.fetch.unit`
when one has come, `probe.send` and `probe.count` when a probe's worker writes or reads. So every action and message is
a point, and none can be forgotten. The count says at which visit (1: the first), the action what happens: `kill` and
`stop` send the process that signal, `delay` holds it up for `DELAY` seconds. Without the variable a point costs one
comparison.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "PCCL_FAULT"
DELAY = 0.5  # seconds; longer than anything on loopback takes, shorter than any timeout

_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "delay": None}


class Fault:
    """One planned mishap."""

    def __init__(self, text: str) -> None:
        try:
            self.point, count, self.action = text.rsplit(":", 2)
            self.visits_left = int(count)
            if self.action not in _ACTIONS:
                raise ValueError
        except ValueError:
            choices = ", ".join(_ACTIONS)
            raise ValueError(f"{VARIABLE}={text!r} must be point:count:action, with an action of {choices}") from None

    def visit(self, point: str) -> None:
        """A point was reached; act if it is the planned one, the planned number of times."""
        if point != self.point:
            return
        self.visits_left -= 1
        if self.visits_left:
            return
        number = _ACTIONS[self.action]
        if number is None:
            time.sleep(DELAY)
        else:
            os.kill(os.getpid(), number)


def planned() -> Fault | None:
    """The mishap that the environment asks for; normally none."""
    text = os.environ.get(VARIABLE)
    return Fault(text) if text else None

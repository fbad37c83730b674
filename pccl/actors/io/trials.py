"""Trials: dials without any other effect, which show whether this process reaches a peer, and the answer to them.

The master and the peers make them beside their work. A trial connects, does the handshake, and closes the connection;
the peer that is dialled confirms that it is the one that was meant: after a restart, or behind a wrong address, another
process may have its port. A trial that fails while this process was stopped is made once more: the answer may have been
unread.
"""

from __future__ import annotations

from collections import deque

from pccl._core.protocol.hellos import JoinTrial, Refused
from pccl._core.protocol.outcomes import RANK_CONNECTION_FAILED
from pccl._core.system.futex import monotonic_ns

from .dialler import Dialler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl._core.protocol.hellos import Welcome

    from .connection import Connection
    from .loop import Loop

LATE_NS = 500_000_000  # an end that is later than this after its time: this process was stopped
TRIALS_MAX = 256  # at the same time; a crowd of newcomers takes its turns


class Trials:
    """The trials that this process makes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._diallers: dict[object, Dialler] = {}  # by an object of their own

    def begin(
        self,
        where: tuple[str, int],
        instance: bytes,
        token: bytes,
        timeout_ns: int,
        on_ended: Callable[[str], None],
        *,
        again: bool = True,
    ) -> None:
        """Dial a peer. `on_ended` is called with the reason why it is not reached, or with an empty text."""
        if len(self._diallers) >= TRIALS_MAX:
            self._waiting.append(lambda: self.begin(where, instance, token, timeout_ns, on_ended))
            return
        key, late_ns = object(), monotonic_ns() + timeout_ns + LATE_NS

        def ended(reason: str) -> None:
            del self._diallers[key]
            if self._waiting:
                self._loop.after(0, self._waiting.popleft())
            if reason and again and monotonic_ns() > late_ns:
                self.begin(where, instance, token, timeout_ns, on_ended, again=False)
            else:
                on_ended(reason)

        def up(connection: Connection) -> None:
            connection.close()
            ended("")

        self._diallers[key] = Dialler(
            self._loop,
            [where],
            token=token,
            hello=lambda proof: JoinTrial(proof, instance),
            on_up=up,
            on_down=lambda reason, _: ended(reason),
            timeout_ns=timeout_ns,
        )

    def cancel(self) -> None:
        """End all trials. No callback follows."""
        self._waiting.clear()
        for dialler in self._diallers.values():
            dialler.cancel()
        self._diallers.clear()


def answer_trial(connection: Connection, hello: JoinTrial, welcome: Welcome, instance: bytes) -> None:
    """Tell a caller whether this process is the one that it wants to reach."""
    if hello.instance == instance:
        connection.send(welcome)
    else:
        reason = "another peer listens there: maybe that address leads to another machine, or its port was taken over"
        connection.send(Refused(RANK_CONNECTION_FAILED, reason))
    connection.finish()

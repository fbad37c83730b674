"""The links of the ring's lanes, from the dial or the arrival until a worker serves them.

The machine decides which links are dialled, answered, attached and dropped (`ring_links`). A link that is up belongs to
its worker; the pool of lanes reports its end.
"""

from __future__ import annotations

from pccl._core.peer.events import LinkCame, LinkDown, LinkUp
from pccl._core.protocol.events import DEBUG
from pccl._core.protocol.hellos import Refused
from pccl._core.protocol.outcomes import RANK_CONNECTION_FAILED
from pccl._core.records import replace
from pccl.actors.io.dialler import Dialler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pccl._core.peer.events import AnswerLink, AttachLink, Dial, DropLink
    from pccl._core.protocol.hellos import JoinLane, Welcome
    from pccl.actors.io.connection import Connection
    from pccl.actors.io.loop import Loop

    from .lane_pool import LanePool


class LaneLinks:
    """The connections that no worker has yet."""

    def __init__(
        self, loop: Loop, lanes: LanePool, *, feed: Callable[[Any], None], tell: Callable[[int, str], None]
    ) -> None:
        self.token = b""  # of the run; known with the first call
        self._loop = loop
        self._lanes = lanes
        self._feed = feed
        self._tell = tell
        self._diallers: dict[int, Dialler] = {}  # link -> the running attempt
        self._held: dict[int, tuple[Connection, Welcome | None]] = {}  # link -> connection that waits for the machine

    def dial(self, action: Dial) -> None:
        """Connect to the next peer; LinkUp or LinkDown follows."""
        link, hello = action.link, action.hello
        self._diallers[link] = Dialler(
            self._loop,
            [(action.host, action.port)],
            token=self.token,
            hello=lambda proof: replace(hello, proof=proof),
            on_up=lambda connection: self._up(link, connection),
            on_down=lambda reason, _: self._down(link, reason),
            number=link,
        )

    def came(self, connection: Connection, hello: JoinLane, _: str, welcome: Welcome) -> None:
        """The previous peer has connected and proved itself."""
        self._hold(connection.number, connection, welcome)
        self._feed(LinkCame(connection.number, hello))

    def answer(self, action: AnswerLink) -> None:
        """Welcome or refuse a link that came."""
        held = self._held.get(action.link)
        if held is None:
            return
        connection, welcome = held
        if action.reason:
            del self._held[action.link]
            connection.send(Refused(RANK_CONNECTION_FAILED, action.reason))
            connection.finish()
            self._tell(DEBUG, f"refused a lane: {action.reason}")
        else:
            assert welcome is not None
            connection.send(welcome)

    def attach(self, action: AttachLink) -> None:
        """Give a link to the worker of its lane."""
        connection, _ = self._held.pop(action.link)
        sock = connection.detach()
        if sock is None or not connection.is_idle():
            if sock is not None:
                sock.close()
            reason = "an incomplete message was left on the lane"
            self._loop.after(0, lambda: self._feed(LinkDown(action.link, reason)))
            return
        self._lanes.attach(action.link, sock, action.sends, action.lane)

    def drop(self, action: DropLink) -> None:
        """Close a link, in whatever state it is."""
        link = action.link
        dialler = self._diallers.pop(link, None)
        if dialler is not None:
            dialler.cancel()
        held = self._held.pop(link, None)
        if held is not None:
            held[0].close()
        self._lanes.drop(link)

    def _up(self, link: int, connection: Connection) -> None:
        del self._diallers[link]
        self._hold(link, connection, None)
        self._feed(LinkUp(link))

    def _down(self, link: int, reason: str) -> None:
        self._diallers.pop(link, None)
        held = self._held.pop(link, None)
        if held is not None:
            held[0].close()
        self._feed(LinkDown(link, reason))

    def _hold(self, link: int, connection: Connection, welcome: Welcome | None) -> None:
        """Keep a connection until the machine decides. A connection that sends or ends meanwhile is dropped."""
        self._held[link] = (connection, welcome)
        connection.become(
            {},
            lambda number, _: self._down(number, "sent a message too early"),
            lambda number, _, reason: self._down(number, reason),
        )

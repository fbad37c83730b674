"""Simulated trials: dials of newcomers, by the master and by peers, that have no other effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pccl._core.master.events import DialledBack
from pccl._core.peer.events import TrialEnded
from pccl.options import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from .nodes import MasterShell, Node, PeerShell
    from .world import World

ANOTHER = "another peer listens there"


class Trial:
    """One dial, from the order to the event that ends it."""

    def __init__(
        self, world: World, source: Node, where: tuple[str, int], instance: bytes, ended: Callable[[str], None]
    ) -> None:
        self._world = world
        self._source = source
        self._where = where
        self._instance = instance
        self._ended = ended
        self._over = False
        patience_ns = nanoseconds(world.plan.options.connect_timeout)
        world.clock.after(patience_ns, self._end, f"no answer within {patience_ns / 1e9:g} s")
        world.clock.after(2 * world.delay_ns(), self._reach)

    def _reach(self) -> None:
        """Let the dial arrive at its target, or fail."""
        world, target = self._world, self._world.listeners.get(self._where)
        if target is not None and (target.vanished or self._is_blocked(target)):
            return  # no answer: only the timeout ends the dial
        if target is None or not target.alive:
            world.clock.after(world.delay_ns(), self._end, "nothing listens there")
        else:
            target.receive(self._answer, target)

    def _is_blocked(self, target: PeerShell) -> bool:
        """Whether the way to this peer is cut at present."""
        world = self._world
        if self._source is world.master:
            return world.clock.now_ns < target.cut_until_ns
        return world.is_blocked(self._source, target)  # type: ignore[arg-type]

    def _answer(self, target: PeerShell) -> None:
        reason = "" if target.instance == self._instance else ANOTHER
        self._world.clock.after(3 * self._world.delay_ns(), self._end, reason)

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._source.receive(self._ended, reason)


def dial_back(master: MasterShell, action: Any) -> None:
    """Let the master dial a newcomer."""
    world = master.world
    Trial(
        world,
        master,
        (action.host, action.port),
        action.instance,
        lambda reason: world.feed(master, DialledBack(action.conn, reason)),
    )


def try_peer(shell: PeerShell, action: Any) -> None:
    """Let a peer dial another one. An end of the membership cancels the dial."""
    world, control = shell.world, shell.control

    def ended(reason: str) -> None:
        if shell.control is control:
            world.feed(shell, TrialEnded(action.target, reason))

    Trial(world, shell, (action.host, action.port), action.instance, ended)

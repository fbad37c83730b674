"""One peer's part in a transfer: its memory, its links, and the workers that serve them.

Data only; `transfers` has the code that uses it.
"""

from __future__ import annotations

from pccl._core.system.futex import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from pccl._core.peer.fetch import StateFetch
    from pccl._core.protocol.sources import Source
    from pccl._core.protocol.state_manifest import StateManifest
    from pccl.actors.io.dialler import Dialler
    from pccl.actors.workers.state_memory import StateMemory


class StateWorkerHandle:
    """What the actor knows of one state worker: its process, its mailbox, and the link that it serves."""

    __slots__ = ("heard_ns", "link", "mailbox", "name", "number", "pid")

    def __init__(self, pid: int, mailbox: socket.socket, link: int, name: str, number: int) -> None:
        self.pid = pid
        self.mailbox = mailbox
        self.link = link
        self.name = name
        self.number = number  # its owner number in the window
        self.heard_ns = monotonic_ns()  # when its last message came, or its last order was sent


class TransferPart:
    """This peer's part in one transfer round, from the master's order until the last worker is reaped."""

    def __init__(self, number: int, own: StateManifest, memory: StateMemory) -> None:
        self.round = number
        self.own = own
        self.memory = memory
        self.manifest = own.without_locations()
        self.fetching: StateFetch | None = None  # None: this peer is a source
        self.sources: dict[int, Source] = {}
        self.workers: dict[int, StateWorkerHandle] = {}  # by link
        self.diallers: dict[int, Dialler] = {}  # by link
        # By pid: killed and not yet reaped, with the reason, and whether the source lied.
        self.zombies: dict[int, tuple[StateWorkerHandle, str, bool]] = {}
        self.forked = 0
        self.tx_bytes = self.rx_bytes = 0
        self.over = False  # it is ending: no link and no worker may begin

    def become_source(self) -> None:
        """Become a source, because this peer has the whole state: other peers may fetch it from now on."""
        assert self.fetching is not None
        self.manifest = self.fetching.held()
        self.fetching = None

    def expects(self, link: int) -> bool:
        """Whether a link to a source is still needed."""
        return not self.over and self.fetching is not None and self.fetching.expects(link)

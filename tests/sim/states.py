"""The shared states of the simulated cluster: a few small values that stand for gigabytes, and how they move.

A state is four values that must be equal on all peers and one that may differ. Training is a function of the values, so
peers that were equal stay equal, unless one of them computes something else. A transfer copies one value at a time from
its sources, also while actors are stopped; values that were copied before an early end stay. Assertions check the
machines: nothing is served or fetched without a manifest, and no slot completes while workers use the memory.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pccl._core.peer.events import SendMaster, StateFetched, StateUnfetched, TransferEnded
from pccl._core.protocol.messages import Schema
from pccl._core.protocol.state_schema import SchemaRow, pack_schema

from .clock import MILLISECOND

if TYPE_CHECKING:
    from .nodes import PeerShell

VALUES = 4  # that must be equal on all peers
RIGHT = pack_schema(
    [SchemaRow(f"value{index}", 10, False, 4) for index in range(VALUES)] + [SchemaRow("seed", 7, True, 8)]
)
ODD = pack_schema([SchemaRow("value0", 8, False, 2)])
PATIENCE = 15  # how often a source that does not serve yet is asked
PAUSE_NS = 100 * MILLISECOND  # before it is asked again


class State:
    """The shared state of one training process."""

    def __init__(self, seed: int) -> None:
        self.revision = 0
        self.values = [seed] * VALUES
        self.unequal = seed
        self.torn = b""  # the digest of a mixture that a transfer left behind

    def digest(self) -> bytes:
        """Return the digest of the values that must be equal."""
        return digest(self.values)

    def train(self) -> None:
        """One step: the same for the same values."""
        self.revision += 1
        self.values = [(value * 31 + self.revision) % 1_000_003 for value in self.values]


def digest(values: list[int]) -> bytes:
    """Return the content digest of the values."""
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


class Transfer:
    """This peer's part in one transfer."""

    def __init__(self, action: Any, *, fetches: bool) -> None:
        self.round = action.round
        self.fetches = fetches
        self.sources: list[Any] = list(action.sources) if fetches else []
        self.whole = fetches and action.whole
        self.content = action.content if fetches else b""
        self.misses: dict[int, int] = {}  # source -> how often it did not answer
        self.over = False  # nothing more will be fetched
        self.ending = False
        self.tx_bytes = self.rx_bytes = 0


class StatePlane:
    """The workers of one peer that serve or fetch a state."""

    def __init__(self, shell: PeerShell) -> None:
        self._shell = shell
        self._world = shell.world
        self.transfer: Transfer | None = None
        self.heir = False  # the last transfer made a source of this sink
        self.hindered = False  # a fault has disturbed this sink or its way to a source

    @property
    def state(self) -> State:
        """The shared state in the memory of this peer."""
        return self._shell.program.syncing.state

    @property
    def is_fetching(self) -> bool:
        """Whether something is still to come."""
        return self.transfer is not None and self.transfer.fetches and not self.transfer.over

    def _later(self, function: Any, *arguments: Any) -> None:
        self._world.clock.after(
            self._world.random.randint(0, self._world.plan.work_ms * MILLISECOND), function, *arguments
        )

    # ------------------------------------------------------------------------------------------ what the machine asks

    def serve(self, action: Any) -> None:
        """ServeState."""
        self._begin(Transfer(action, fetches=False), action.manifest)

    def fetch(self, action: Any) -> None:
        """FetchState."""
        transfer = Transfer(action, fetches=True)
        self._begin(transfer, action.manifest)
        self._later(self._step, transfer)

    def _begin(self, transfer: Transfer, description: int) -> None:
        assert self.transfer is None, "two transfers in one memory"
        assert description == self._shell.program.syncing.described, "a transfer without a manifest"
        self.transfer = transfer
        self.heir = self.hindered = False

    def serve_fetched(self, action: Any) -> None:
        """ServeFetched: the sink becomes a source."""
        transfer = self.transfer
        assert transfer is not None, "heir of no transfer"
        assert transfer.round == action.round, "heir of another transfer"
        assert transfer.fetches, "heir of itself"
        assert self.state.digest() == transfer.content, "heir of what it does not have"
        transfer.fetches = False
        self.heir = True

    def add_sources(self, action: Any) -> None:
        """AddSources."""
        transfer = self.transfer
        assert transfer is not None, "sources for no transfer"
        assert transfer.round == action.round, "sources for another transfer"
        assert transfer.over, "sources for a sink that has some"
        transfer.sources = list(action.sources)
        transfer.over = False
        self._later(self._step, transfer)

    def drop_source(self, action: Any) -> None:
        """DropSource."""
        assert self.transfer is not None, "a source of no transfer"
        assert self.transfer.round == action.round, f"a source of transfer {action.round}, not {self.transfer.round}"
        self.transfer.sources = [source for source in self.transfer.sources if source.peer != action.peer]

    def end_transfer(self, action: Any) -> None:
        """EndTransfer. Workers may still write until they have ended."""
        transfer = self.transfer
        assert transfer is not None, "the end of no transfer"
        assert transfer.round == action.round, "the end of another transfer"
        assert not transfer.ending, "ended twice"
        transfer.ending = True
        self._later(self._shell.receive, self._ended, transfer)

    def _ended(self, transfer: Transfer) -> None:
        self.transfer = None
        self._world.feed(self._shell, TransferEnded(transfer.round, transfer.tx_bytes, transfer.rx_bytes))

    def send_schema(self, action: Any) -> None:
        """SendSchema: in two pages, as a large schema is sent."""
        assert action.manifest == self._shell.program.syncing.described, "a schema without a manifest"
        packed = self._shell.program.syncing.schema
        for page, rows in enumerate((packed[:7], packed[7:])):
            self._shell.perform(SendMaster(Schema(action.call, page, 2, rows)))

    # ------------------------------------------------------------------------------------------ what happens by itself

    def _step(self, transfer: Transfer) -> None:
        """Fetch one more value, from any source that serves."""
        if self.transfer is not transfer or transfer.over or not self._shell.alive:
            return
        state = self.state
        if not transfer.sources:
            self._tell(transfer, StateUnfetched(transfer.round, "no source is left"))
            return
        source = self._world.random.choice(transfer.sources)
        served = self._served(source, transfer.round)
        if served is None:
            self.hindered = True
            transfer.misses[source.peer] = transfer.misses.get(source.peer, 0) + 1
            if transfer.misses[source.peer] >= PATIENCE:
                transfer.sources.remove(source)
            self._world.clock.after(PAUSE_NS, self._step, transfer)
            return
        assert digest(served.state.values) == transfer.content, "a source serves what was not elected"
        wrong = [index for index in range(VALUES) if state.values[index] != served.state.values[index]]
        if wrong:
            state.values[wrong[0]] = served.state.values[wrong[0]]
            transfer.rx_bytes += 4
            assert served.transfer is not None
            served.transfer.tx_bytes += 4
        if len(wrong) <= 1:
            state.unequal = served.state.unequal if transfer.whole else state.unequal
            assert state.digest() == transfer.content, "fetched something else"
            self._world.faults.at_fetched(self._shell)
            self._tell(transfer, StateFetched(transfer.round))
            return
        self._later(self._step, transfer)

    def _served(self, source: Any, number: int) -> StatePlane | None:
        """Return the source if it serves that round and can be reached. Its workers run while its actor is stopped."""
        shell = self._world.listeners.get((source.host, source.port))
        if shell is None or not shell.alive or self._world.is_blocked(self._shell, shell):
            return None
        transfer = shell.states.transfer
        serves = transfer is not None and not transfer.fetches and transfer.round == number
        return shell.states if serves and shell.state.id == source.peer else None

    def _tell(self, transfer: Transfer, event: Any) -> None:
        transfer.over = True
        self._world.clock.after(
            self._world.random.randint(0, 20 * MILLISECOND), self._shell.receive, self._world.feed, self._shell, event
        )

    def fumble(self) -> None:
        """End the transfer by a fault: no memory, or every link is dead."""
        if self.transfer is not None and self.transfer.fetches and not self.transfer.over:
            self.hindered = True
            self._tell(self.transfer, StateUnfetched(self.transfer.round, "no memory"))

"""Every message between the processes of one peer, in one table: they never leave the host.

Two conversations share it. The first is between a training process and its own peer actor, the second between a peer
actor and its worker processes. Descriptors come along where a message says so. The other half of the vocabulary is in
`messages`. Declarations only; `codec` gives them bytes, the machines give them meaning.
"""

from __future__ import annotations

from .codec import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .codec import blob, bytes16, flag, text, u8, u16, u32, u64

# ---------------------------------------------------------------------------------------------- of the peer actor


@message(0x50, "training process to peer actor")
class CallConnect:
    """Join the run. The addresses are numeric, `host port` pairs, so that the actor never waits for a resolver."""

    slot: u32
    generation: u32
    attempts: u32
    group: u32
    lanes: u16
    addresses: blob
    advertise_host: text
    advertise_port: u16
    options: blob

    def __repr__(self) -> str:
        """Without the options, which hold the run's token: a machine that fails prints the calls it was given."""
        shown = [f"{name}={getattr(self, name)!r}" for name in self.__match_args__ if name != "options"]
        return f"CallConnect({', '.join(shown)}, options=<{len(self.options)} bytes>)"


@message(0x51, "training process to peer actor")
class CallTopology:
    """update_topology, or one round of wait_for_world_size."""

    slot: u32
    generation: u32
    wanted: u32


@message(0x52, "training process to peer actor")
class CallPending:
    """are_peers_pending."""

    slot: u32
    generation: u32


@message(0x53, "training process to peer actor")
class CallCancel:
    """The caller of that slot gave up: Ctrl-C or a timeout."""

    slot: u32
    generation: u32


@message(0x54, "training process to peer actor")
class CallLeave:
    """close(): say goodbye, then end."""

    slot: u32
    generation: u32


@message(0x55, "training process to peer actor")
class CallReduce:
    """all_reduce, or several of them; each operation has a slot of its own (see `operations`)."""

    operations: blob


@message(0x56, "training process to peer actor")
class CallAwait:
    """A thread has been blocking on that slot for a while, without a time limit of its own."""

    slot: u32
    generation: u32


@message(0x57, "training process to peer actor")
class CallShare:
    """Memory that operations will refer to by this number; the descriptor comes along."""

    segment: u32
    nbytes: u64


@message(0x58, "training process to peer actor")
class CallUnshare:
    """No operation will refer to that memory any more."""

    segment: u32


@message(0x59, "training process to peer actor")
class CallSync:
    """sync_shared_state. If that takes more than a comparison, the slot completes with KIND_DESCRIBE."""

    slot: u32
    generation: u32
    revision: u64
    strategy: u8
    keys: u32
    schema: bytes16
    content: bytes16
    torn: flag = False  # an earlier transfer ended in the middle of this state, and nothing has mended it


@message(0x5A, "training process to peer actor")
class CallManifest:
    """The rest of a sync_shared_state: where its manifest and its window are. Both segments were shared before."""

    slot: u32
    generation: u32
    manifest: u32
    nbytes: u64  # of the manifest
    window: u32


@message(0x5C, "training process to peer actor")
class CallOptimize:
    """optimize_topology."""

    slot: u32
    generation: u32


# ---------------------------------------------------------------------------------------------- of a worker


@message(0x60, "peer actor to worker")
class Attach:
    """Serve this connection; the descriptor comes along."""

    link: u64
    host_read: flag = False  # the other end may read blocks from our memory, if it is on this host


@message(0x61, "peer actor to worker")
class Detach:
    """Close the connection, if it is still this one."""

    link: u64


@message(0x62, "worker to peer actor")
class LinkEnded:
    """The connection broke or the other side closed it."""

    link: u64
    reason: text


@message(0x63, "peer actor to worker")
class MapSegment:
    """Memory that blocks will lie in; the descriptor comes along."""

    segment: u32
    nbytes: u64


@message(0x64, "peer actor to worker")
class UnmapSegment:
    """Let go of that memory."""

    segment: u32


# ---------------------------------------------------------------------------------------------- of a state's worker


@message(0x65, "peer actor to fetching worker")
class FetchManifest:
    """Ask the source for its manifest."""


@message(0x66, "peer actor to fetching worker")
class FetchUnits:
    """Fetch these units, in this order (see `state_link`)."""

    units: blob


@message(0x67, "fetching worker to peer actor")
class ManifestFetched:
    """The source's manifest, not checked in any way; the descriptor comes along."""

    nbytes: u64


@message(0x68, "worker to peer actor")
class UnitsMoved:
    """So many more units were fetched and verified, or sent."""

    units: u32
    nbytes: u64


@message(0x69, "worker to peer actor")
class StateLinkEnded:
    """The connection is over, and so is this worker; `lied` if the other side sent what does not match."""

    lied: flag
    reason: text


# ---------------------------------------------------------------------------------------------- of a probe's worker


@message(0x6A, "worker to peer actor")
class ProbeEnded:
    """The measurement is over, and so is this worker."""

    bytes_per_second: u64  # 0: it failed
    reason: text  # empty unless it failed

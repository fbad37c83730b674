"""Every message between the processes of one peer, in one table. These messages never leave the host.

The first part is between a training process and its own peer actor, the second between a peer actor and its workers. A
message carries a file descriptor if its docstring says so. The messages between hosts are in `messages`. Declarations
only: `codec` encodes them, the machines handle them.
"""

from __future__ import annotations

from .codec import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .codec import blob, bytes16, flag, text, u8, u16, u32, u64

# ---------------------------------------------------------------------------------------------- to the peer actor


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
    level: u8 = 30  # the lowest level of the user's log that is shown

    def __repr__(self) -> str:
        """Without the options, which hold the run's token: a machine that fails prints the commands it was given."""
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
    """close(): send Leave to the master, then end."""

    slot: u32
    generation: u32


@message(0x55, "training process to peer actor")
class CallReduce:
    """all_reduce, or several of them; each operation has a slot of its own (see `operations`)."""

    operations: blob


@message(0x56, "training process to peer actor")
class CallAwait:
    """A thread has waited for this slot for a while, without a timeout of its own."""

    slot: u32
    generation: u32


@message(0x57, "training process to peer actor")
class CallShare:
    """Share a segment that operations will refer to by this number. Carries its file descriptor."""

    segment: u32
    nbytes: u64


@message(0x58, "training process to peer actor")
class CallUnshare:
    """No operation will refer to this segment any more."""

    segment: u32


@message(0x59, "training process to peer actor")
class CallSync:
    """sync_shared_state. If the manifest is needed, the slot completes with KIND_DESCRIBE."""

    slot: u32
    generation: u32
    revision: u64
    strategy: u8
    keys: u32
    schema: bytes16
    content: bytes16
    torn: flag = False  # an earlier transfer ended in the middle of this state, and no later one has repaired it


@message(0x5A, "training process to peer actor")
class CallManifest:
    """The second part of sync_shared_state: where its manifest and its window are. Both segments are shared before."""

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


@message(0x5D, "training process to peer actor")
class CallFinish:
    """finish."""

    slot: u32
    generation: u32


@message(0x5F, "training process to peer actor")
class CallThreads:
    """So many threads of this process were in calls at the same time: more than ever before."""

    count: u32


@message(0x5E, "peer actor to training process")
class FollowMaster:
    """The heartbeat timeout of the master: a peer actor that has not run for this time counts as stopped."""

    silence_ns: u64


# ---------------------------------------------------------------------------------------------- workers


@message(0x60, "peer actor to worker")
class Attach:
    """Serve this connection. Carries its file descriptor."""

    link: u64
    host_read: flag = False  # the other end may read blocks from our memory, if it is on this host


@message(0x61, "peer actor to worker")
class Detach:
    """Close this connection, if the worker still serves it."""

    link: u64


@message(0x62, "worker to peer actor")
class LinkEnded:
    """The connection broke or the other side closed it."""

    link: u64
    reason: text


@message(0x63, "peer actor to worker")
class MapSegment:
    """Map a segment that will contain blocks. Carries its file descriptor."""

    segment: u32
    nbytes: u64


@message(0x64, "peer actor to worker")
class UnmapSegment:
    """Unmap this segment."""

    segment: u32


# ---------------------------------------------------------------------------------------------- state workers


@message(0x65, "peer actor to fetching worker")
class FetchManifest:
    """Ask the source for its manifest."""


@message(0x66, "peer actor to fetching worker")
class FetchUnits:
    """Fetch these units, in this order (see `state_stream`)."""

    units: blob


@message(0x67, "fetching worker to peer actor")
class ManifestFetched:
    """The source's manifest, unchecked. Carries the file descriptor of its memory."""

    nbytes: u64


@message(0x68, "worker to peer actor")
class UnitsMoved:
    """The worker has fetched and verified, or sent, this many more units."""

    units: u32
    nbytes: u64


@message(0x69, "worker to peer actor")
class StateLinkEnded:
    """The connection ended, and this worker ends; `lied`: the other side sent bytes that do not match."""

    lied: flag
    reason: text


# ---------------------------------------------------------------------------------------------- probe workers


@message(0x6A, "worker to peer actor")
class ProbeEnded:
    """The probe ended, and this worker ends."""

    bytes_per_second: u64  # 0: it failed
    reason: text  # empty unless it failed

"""One `sync_shared_state` in the training process: compute digests, vote, and help with the transfer if states differ.

In a healthy run all peers hold the same bits. Then a sync is: digests of all tensors, computed where they are; one
message to the actor; one answer. If peers differ, the actor asks for a *manifest*, which has the location of each
tensor and the digests of its blocks, so that workers can serve or overwrite them. This process copies tensors that the
workers cannot map, in ordinary memory or on a GPU, piece by piece through the *window*, while it waits in the call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pccl._core.kernels.digest import DIGEST_BYTES, block_digests, digest_many, digest_of_blocks
from pccl._core.kernels.tensor_copy import copy_from, copy_into
from pccl._core.protocol.events import NUMBERS, SYNCED
from pccl._core.protocol.mailbox import CallManifest, CallSync
from pccl._core.protocol.outcomes import KIND_COLLECTIVE, KIND_DESCRIBE, KIND_PLAIN, split
from pccl._core.protocol.state_manifest import Row, pack_manifest
from pccl._core.protocol.state_schema import digest_content
from pccl._core.system.futex import monotonic_ns
from pccl.errors import PCCLError, error_from_outcome
from pccl.memory.arena import LARGE_BYTES, default
from pccl.memory.window import HEADER_BYTES, WINDOW_BYTES, Window
from pccl.values import DeviceType, SharedStateSyncInfo, SharedStateSyncStrategy

from .divergence import Divergence, Overwrite, changed_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from pccl.memory.arena import Piece
    from pccl.memory.completion_slots import Slot
    from pccl.shared_state import SharedState, TensorInfo

    from .actor_client import ActorClient
    from .call_slots import CallSlots

NAME = "sync_shared_state"
_log = logging.getLogger("pccl.peer")
GIVE_UP_NS = 2_000_000_000  # an actor ends its workers in milliseconds; an actor that takes this long is stopped


class Syncs:
    """The syncs of one membership, one after the other."""

    def __init__(self, actor: ActorClient, learn: Callable[[bytes], None], threads: int) -> None:
        self._actor = actor
        self._learn = learn  # takes the numbers of the world in which a sync ended
        self._threads = threads
        self._divergence = Divergence()
        self._held: list[object] = []  # memory that a worker might still use, after a call that could not be ended

    def run(self, state: SharedState, strategy: SharedStateSyncStrategy) -> SharedStateSyncInfo:
        """Make this peer's state the agreed state of its group, and take over the agreed revision."""
        infos = state.ordered
        if strategy is not SharedStateSyncStrategy.SEND_ONLY:
            for info in infos:
                if not info.memory.writable:
                    raise AssertionError(f"{info.name!r} is read-only; a peer that only sends uses SEND_ONLY")
        digests = hash_tensors(infos, self._threads)
        content = digest_content(digests, state.compared)
        slot, kind, payload = self._ask(
            lambda slot: CallSync(
                *(slot.index, slot.generation, state.revision, strategy.value, len(infos)),
                *(state.schema_digest, content, content == state.torn),
            ),
            self._actor.calls.wait,
            (),
        )
        if kind == KIND_DESCRIBE:
            try:
                payload = self._send_manifest(infos)
            except BaseException:
                self._actor.cancel(slot)  # the actor may still wait for the manifest
                self._note_torn_state(state, content)
                raise
        state.torn = None
        revision = state.revision
        state.revision, sent, received = SYNCED.unpack_from(payload)
        self._learn(payload[SYNCED.size :])
        names: tuple[str, ...] = ()
        is_member = self._divergence.ended()
        if kind == KIND_DESCRIBE and is_member and strategy is not SharedStateSyncStrategy.RECEIVE_ONLY:
            names = self._note_overwrite(state, digests, revision, received)
        return SharedStateSyncInfo(sent, received, names, self._divergence.times)

    def _note_overwrite(self, state: SharedState, before: bytes, revision: int, received: int) -> tuple[str, ...]:
        """Find out whether a sync overwrote this member, and warn; returns the names of the tensors that it changed."""
        if not received and revision >= state.revision:
            return ()  # others fetched from here
        infos = state.ordered
        after = hash_tensors(infos, self._threads)
        names = changed_names([info.name for info in infos], state.compared, before, after)
        warning = self._divergence.overwritten(Overwrite(names, len(infos), received, revision, state.revision))
        if warning:
            _log.warning("%s", warning)
        return names

    def _note_torn_state(self, state: SharedState, before: bytes) -> None:
        """Note a state that a transfer has overwritten in part: no group agreed on it, so it must not be elected."""
        after = digest_content(hash_tensors(state.ordered, self._threads), state.compared)
        if after != before:
            state.torn = after

    def _send_manifest(self, infos: tuple[TensorInfo, ...]) -> bytes:
        """Send the manifest, and copy for the workers what they cannot map until the call has ended."""
        rows = [_row(*pair) for pair in zip(infos, hash_blocks(infos, self._threads), strict=True)]
        packed = pack_manifest(rows)
        arena = default()
        # Of a size that has a segment of its own: the message names a segment without an offset.
        manifest = arena.allocate(max(len(packed), LARGE_BYTES))
        room = arena.allocate(max(WINDOW_BYTES, LARGE_BYTES))
        manifest.view[: len(packed)] = packed
        room.view[:HEADER_BYTES] = bytes(HEADER_BYTES)
        pump = Pump(infos, room)
        segments = {row.segment for row in rows} | {manifest.segment, room.segment}
        self._actor.share(NAME, sorted(segments), arena.descriptor)
        _, _, payload = self._ask(
            lambda slot: CallManifest(slot.index, slot.generation, manifest.segment, len(packed), room.segment),
            lambda name, slot, slice_ns: pump.wait(self._actor.calls, name, slot, slice_ns),
            (infos, manifest, room),
        )
        return payload

    def _ask(
        self, build: Callable[[Slot], object], wait: Callable[[str, Slot, int], bool], memory: tuple[object, ...]
    ) -> tuple[Slot, int, bytes]:
        """Post a call and wait for its end. Returns its slot, kind and payload, or raises what it ended with."""
        actor, calls = self._actor, self._actor.calls
        slot = calls.acquire(NAME)
        try:
            calls.post(NAME, build(slot))
            while not wait(NAME, slot, actor.slice(None)):
                pass
        except PCCLError:
            actor.give_up(slot)
            actor.wait_for_exit()  # the actor is dead, and its workers end with it
            raise
        except BaseException:
            if not self._give_up(slot):
                self._held.append(memory)
            raise
        outcome, payload = calls.take(slot)
        result, kind = split(outcome)
        if result == 0 and kind in (KIND_PLAIN, KIND_DESCRIBE):
            return slot, kind, payload
        if kind == KIND_COLLECTIVE:
            numbers, payload = payload[: NUMBERS.size], payload[NUMBERS.size :]
            self._learn(numbers)
        raise error_from_outcome(result, kind, NAME, payload.decode("utf-8", "replace"))

    def _give_up(self, slot: Slot) -> bool:
        """The caller was interrupted: cancel the call. Returns whether it has ended, and no worker uses its memory."""
        self._actor.cancel(slot)
        deadline_ns = monotonic_ns() + GIVE_UP_NS
        while not slot.wait(self._actor.slice(deadline_ns)) and monotonic_ns() < deadline_ns:
            pass
        ended = slot.done
        slot.abandon()
        return ended


def hash_tensors(infos: tuple[TensorInfo, ...], threads: int) -> bytes:
    """The digests of these tensors, DIGEST_BYTES each."""
    if all(info.device_type is DeviceType.CPU for info in infos):
        return digest_many([info.address for info in infos], [info.nbytes for info in infos], threads)
    hashed = zip(infos, hash_blocks(infos, threads), strict=True)
    return b"".join(digest_of_blocks(blocks, info.nbytes).to_bytes(DIGEST_BYTES, "little") for info, blocks in hashed)


def hash_blocks(infos: tuple[TensorInfo, ...], threads: int) -> list[bytes]:
    """The digests of all blocks of each tensor, computed where it lies."""
    found: dict[str, bytes] = {}
    on_device: dict[str, Any] = {info.name: info.memory.owner for info in infos if info.device_type is DeviceType.CUDA}
    if on_device:
        from pccl.torch.device_digest import block_digests_many

        found = dict(zip(on_device, block_digests_many(list(on_device.values())), strict=True))
    for info in infos:
        if info.name not in found:
            found[info.name] = block_digests(info.address, info.nbytes, threads)
    return [found[info.name] for info in infos]


def _row(info: TensorInfo, blocks: bytes) -> Row:
    found = default().find(info.address, info.nbytes) if info.nbytes and info.device_type is DeviceType.CPU else None
    segment, offset = found or (0, 0)
    digest = digest_of_blocks(blocks, info.nbytes)
    return Row(info.name, info.dtype.value, info.allow_content_inequality, info.nbytes, digest, segment, offset, blocks)


class Pump:
    """Copies between tensors and the window, for workers that cannot map the tensors."""

    def __init__(self, infos: tuple[TensorInfo, ...], room: Piece) -> None:
        self._infos = infos
        self._room = room  # held, because the window has only a view of it
        self._window = Window(room.view)

    def wait(self, calls: CallSlots, name: str, slot: Slot, slice_ns: int) -> bool:
        """Perform the orders of workers for a while; returns whether the call has ended."""
        while not slot.done and self._window.serve(self._copy_in, self._copy_out, slice_ns):
            pass
        return calls.wait(name, slot, 0)

    def _copy_in(self, key: int, begin: int, piece: memoryview) -> None:
        """Copy bytes of the window into the tensor."""
        info = self._infos[key]
        if info.device_type is DeviceType.CUDA:
            from pccl.torch.cuda_staging import write_bytes

            write_bytes(info.memory.owner, begin, piece)
        else:
            copy_from(info.address + begin, piece)

    def _copy_out(self, key: int, begin: int, piece: memoryview) -> None:
        """Copy bytes of the tensor into the window."""
        info = self._infos[key]
        if info.device_type is DeviceType.CUDA:
            from pccl.torch.cuda_staging import read_bytes

            read_bytes(piece, info.memory.owner, begin)
        else:
            copy_into(piece, info.address + begin)

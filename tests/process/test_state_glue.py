"""A whole sync from mailbox to mailbox: real actors, a real master, and simulated training processes."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from pccl import Communicator
from pccl._core.kernels.digest import block_digests, digest_of_blocks
from pccl._core.protocol.events import SYNCED
from pccl._core.protocol.mailbox import CallManifest, CallSync
from pccl._core.protocol.outcomes import KIND_DESCRIBE, SUCCESS, split
from pccl._core.protocol.state_manifest import Row, StateManifest, pack_manifest
from pccl.memory.segments import Segment
from pccl.memory.window import Window

from .helpers import BOUND, peers_of, running_master, together

MIB = 1 << 20
MANIFEST, WINDOW, TENSOR = 1 << 20, (1 << 20) + 1, (1 << 20) + 2  # segment numbers that no arena uses here


class Trainee:
    """A training process that syncs two tensors: one in a segment, one in memory that only it can access."""

    def __init__(self, communicator: Communicator, fill: int) -> None:
        self._communicator = communicator
        self._segment = Segment.create("pccl-tensor", 5 * MIB)
        self.shared = np.frombuffer(self._segment.view, np.uint8)
        self.private = np.zeros(3 * MIB + 7, np.uint8)
        self.shared[:] = fill
        self.private[:] = fill
        self.window = Window.create()

    def _describe(self) -> bytes:
        rows = []
        for name, tensor, segment in (("private", self.private, 0), ("shared", self.shared, TENSOR)):
            blocks = block_digests(tensor.ctypes.data, tensor.nbytes, 1)
            rows.append(Row(name, 0, False, tensor.nbytes, digest_of_blocks(blocks, tensor.nbytes), segment, 0, blocks))
        return pack_manifest(rows)

    def sync(self, revision: int) -> tuple[int, int, int]:
        """Sync at this revision; return the agreed revision and the bytes sent and received."""
        actor: Any = self._communicator._actor
        data = self._describe()
        own = StateManifest(data)
        slot = actor.calls.acquire("sync")
        schema, content = own.schema_digest(), own.content_digest()
        actor.calls.post("sync", CallSync(slot.index, slot.generation, revision, 0, 2, schema, content))
        outcome, payload = self._wait(actor, slot)
        if split(outcome)[1] == KIND_DESCRIBE:
            with Segment.create("pccl-manifest", len(data)) as description:
                description.view[:] = data
                assert self.window.segment is not None
                numbered = {MANIFEST: description, WINDOW: self.window.segment, TENSOR: self._segment}
                actor.share("sync", numbered, lambda number: (numbered[number].fd, numbered[number].size))
                slot = actor.calls.acquire("sync")
                call = CallManifest(slot.index, slot.generation, MANIFEST, len(data), WINDOW)
                actor.calls.post("sync", call)
                outcome, payload = self._wait(actor, slot)
                actor.unshare(MANIFEST)
        assert split(outcome)[0] == SUCCESS, payload
        return SYNCED.unpack_from(payload)

    def _wait(self, actor: Any, slot: Any) -> tuple[int, bytes]:
        deadline = threading.Event()
        timer = threading.Timer(BOUND, deadline.set)
        timer.start()
        try:
            while not slot.done:
                assert not deadline.is_set(), "the call does not end"
                self.window.serve(self._copy_in, self._copy_out, 10_000_000)
            return actor.calls.take(slot)
        finally:
            timer.cancel()

    def _copy_in(self, key: int, begin: int, view: memoryview) -> None:
        assert key == 0
        self.private[begin : begin + len(view)] = view

    def _copy_out(self, key: int, begin: int, view: memoryview) -> None:
        assert key == 0
        view[:] = memoryview(self.private)[begin : begin + len(view)]

    def close(self) -> None:
        del self.shared
        self._segment.close()
        self.window.close()


def test_states_meet_over_a_real_run() -> None:
    """Goal: three members with equal states win over a newcomer, which receives both tensors; then nothing moves."""
    nbytes = 8 * MIB + 7
    with running_master() as master, peers_of(master.address) as peers:
        for _ in range(3):
            peers.newcomer(lanes=2)
        peers.admit(*peers)
        trainees = [Trainee(member, fill) for member, fill in zip(peers, (5, 5, 9), strict=True)]
        try:
            results = together(*(partial(trainee.sync, 4 - (trainee is trainees[2])) for trainee in trainees))
            assert [result[0] for result in results] == [4, 4, 4]
            assert results[2][2] == nbytes
            assert results[0][1] + results[1][1] == nbytes
            for trainee in trainees:
                assert (trainee.shared == 5).all()
                assert (trainee.private == 5).all()
            assert together(*(partial(trainee.sync, 5) for trainee in trainees)) == [(5, 0, 0)] * 3
        finally:
            for trainee in trainees:
                trainee.close()

"""Training processes that reduce all the time and print their events; forked from one process with all imports.

A program of its own, started by tests: `python -m tests.process.trainee ADDRESS OPTIONS`. For each number that it reads
it forks a trainee, which runs until it is killed or its parent's standard input ends. Each prints its events as lines:

    number event time_ns epoch world bytes_in_use descriptors

The events are `born` (its pid in place of the epoch), `in`, `ok` (a reduce succeeded), `lost` (it failed, and the
tensor was as before), `again` (its actor was killed, and the tensor was as before), and `wrong` with a text.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

import pccl
from pccl import Communicator, Options, QuantizationOptions, ReduceOp
from pccl._core.records import replace
from pccl.errors import MasterLostError, PeerLostError, TooFewPeersError
from pccl.memory.arena import default

LANES = 2
COUNT = 1 << 20  # elements: a few milliseconds, so that most kills meet a reduce
REDUCES = 5  # between two topology rounds; the first two are quantized, and need most memory
QUANTIZATION = QuantizationOptions()
STEP_MAX = 1020 / 255 * 1.01  # of one contribution


class Living(Protocol):
    """The interface of a forked training process."""

    def live(self) -> None:
        """Take part until it is killed."""


class Trainee:
    """One training process, over several memberships."""

    def __init__(self, number: int, address: str, options: Options) -> None:
        self._number = number
        # A trainee without host reads receives all blocks over TCP, so rings of trainees have edges of both kinds.
        self._peer = Communicator(address, 0, LANES, options=replace(options, host_memory=number % 3 > 0))
        self._pattern = (np.arange(COUNT) % 1021 + 1).astype(np.float32)
        self._tensors = [pccl.empty(COUNT), np.empty(COUNT, np.float32)]  # reduced in shared memory, and staged

    def tell(self, event: str, *words: object) -> None:
        numbers = self._peer._numbers()
        epoch, world = (numbers.epoch, numbers.group_world) if numbers else (0, 0)
        used, held = default().statistics().bytes_in_use, len(os.listdir("/proc/self/fd"))
        line = " ".join(map(str, (self._number, event, time.monotonic_ns(), epoch, world, used, held, *words)))
        os.write(1, line.encode() + b"\n")

    def live(self) -> None:
        while True:
            try:
                self._peer.connect()
                self.tell("in")
                while True:
                    self._work()
            except MasterLostError:
                self.tell("again")
                self._peer.close()

    def _work(self) -> None:
        """Reduce several times, then hold a topology round. If this member is alone, wait for others."""
        with contextlib.suppress(TooFewPeersError):
            for step in range(REDUCES):
                self._reduce(self._tensors[step % 2], QUANTIZATION if step < 2 else None)
        self._peer.update_topology()

    def _reduce(self, tensor: np.ndarray, how: QuantizationOptions | None) -> None:
        tensor[:] = self._pattern
        while True:
            try:
                world = self._peer.all_reduce(
                    tensor, tensor, op=ReduceOp.SUM, quantization_options=how
                ).local_world_size
            except (PeerLostError, MasterLostError) as error:
                if not np.array_equal(tensor, self._pattern):
                    self.tell("wrong", "the tensor is not what it was before")
                if isinstance(error, MasterLostError):
                    raise
                self.tell("lost")
            else:
                # Each quantization has an error of half a step at most, and no step is larger than the last.
                slack = world * STEP_MAX * world / 2 if how else 0
                if np.abs(tensor - self._pattern * np.float32(world)).max() > slack:
                    self.tell("wrong", "the sum is wrong")
                self.tell("ok")
                return


def run(make: Callable[[int], Living]) -> None:
    """Fork a process for each number on standard input."""
    parent = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            # The parent ends with its standard input; so do all of its trainees.
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            make(int(line)).live()
        os.write(1, f"{int(line)} born {time.monotonic_ns()} {pid} 0 0 0\n".encode())
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.05)  # between two checks for the end
    os._exit(0)


def main(address: str, options: str) -> None:
    """Fork trainees of the run at this address."""
    run(lambda number: Trainee(number, address, Options.decode(options)))


if __name__ == "__main__":
    main(*sys.argv[1:])

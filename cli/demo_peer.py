"""One training process of `pccl demo`: async DiLoCo on a small network, with numpy only.

The algorithm is that of examples/async_diloco.py, which explains it. The example uses torch; here the network, its
gradient and both optimizers are written out, because the demo must not need torch. Run as

    python -m pccl.cli.demo_peer HOST:PORT

it reports to the demo by lines of JSON on standard output. SIGTERM asks it to end: the request is one more number in
the all-reduce of the delta, so all peers receive it in the same step and end together.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl import (
    Communicator,
    ReduceInfo,
    ReduceOp,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)
from pccl.errors import PeerLostError, TooFewPeersError, UsageError

if TYPE_CHECKING:
    from pccl import AsyncReduceHandle

    Array = np.ndarray[Any, np.dtype[np.float32]]

FEATURES, HIDDEN, TARGETS, TEACHER = 16, 8192, 4, 8  # wide, so that the all-reduce has a visible size
SIZE = FEATURES * HIDDEN + HIDDEN + HIDDEN * TARGETS
BATCH, INNER_STEPS, INNER_RATE = 32, 10, 0.0006
OUTER_RATE, OUTER_MOMENTUM = 0.3, 0.5
NOISE = 0.1
STEP_SECONDS = 0.4  # the shortest outer step, so that people can follow the output
PEERS_MIN = 2


def unpack(flat: Array) -> tuple[Array, Array, Array]:
    """The weights of a network with one hidden layer of any width, as views of one vector."""
    hidden = flat.size // (FEATURES + 1 + TARGETS)
    first, bias, second = np.split(flat, [FEATURES * hidden, FEATURES * hidden + hidden])
    return first.reshape(FEATURES, hidden), bias, second.reshape(hidden, TARGETS)


def first_weights(generator: np.random.Generator, hidden: int) -> Array:
    """Small random weights, the same for the same seed."""
    flat = np.zeros(hidden * (FEATURES + 1 + TARGETS), np.float32)
    first, _, second = unpack(flat)
    first[:] = generator.standard_normal(first.shape) / FEATURES**0.5
    second[:] = generator.standard_normal(second.shape) / hidden**0.5
    return flat


def samples(generator: np.random.Generator, teacher: Array, count: int) -> tuple[Array, Array]:
    """Random inputs, and the outputs of a smaller network for them, with noise."""
    first, bias, second = unpack(teacher)
    inputs = generator.standard_normal((count, FEATURES), np.float32)
    outputs = np.tanh(inputs @ first + bias) @ second
    return inputs, outputs + np.float32(NOISE) * generator.standard_normal(outputs.shape, np.float32)


def loss_and_gradient(flat: Array, gradient: Array, batch: tuple[Array, Array]) -> float:
    """The mean squared error of the network; writes its gradient to `gradient`."""
    inputs, targets = batch
    first, bias, second = unpack(flat)
    hidden = np.tanh(inputs @ first + bias)
    error = hidden @ second - targets
    slope = (2 / error.size) * error
    inner = (slope @ second.T) * (1 - hidden * hidden)
    to_first, to_bias, to_second = unpack(gradient)
    to_first[:], to_bias[:], to_second[:] = inputs.T @ inner, inner.sum(0), hidden.T @ slope
    return float(np.mean(error * error))


class Inner:
    """The local network and its optimizer, Adam; they differ between peers."""

    def __init__(self) -> None:
        self.weights, self._gradient = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self._mean, self._square = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self._steps = 0

    def train(self, generator: np.random.Generator, teacher: Array) -> float:
        """Make the inner steps, without communication. Returns their mean loss."""
        losses = []
        for _ in range(INNER_STEPS):
            losses.append(loss_and_gradient(self.weights, self._gradient, samples(generator, teacher, BATCH)))
            self._steps += 1
            self._mean += 0.1 * (self._gradient - self._mean)
            self._square += 0.01 * (self._gradient**2 - self._square)
            rate = INNER_RATE * (1 - 0.99**self._steps) ** 0.5 / (1 - 0.9**self._steps)
            self.weights -= rate * self._mean / (np.sqrt(self._square) + 1e-8)
        return sum(losses) / len(losses)


class Outer:
    """The shared state of the run, and two deltas: one in the running reduce, one being computed.

    The last element of a delta is not a weight: it is positive if a peer asks to end.
    """

    def __init__(self, weights: Array) -> None:
        self.weights, self._momentum = pccl.empty(SIZE), pccl.zeros(SIZE)
        self.weights[:] = weights
        self.count = np.zeros(2, np.int64)  # reduces that were launched, and reduces that carried a request to end
        self._measured, self._sent = pccl.zeros(SIZE + 1), pccl.zeros(SIZE + 1)
        self.world = 1  # members in the last reduce or topology round; the same number on all of them
        self._handle: AsyncReduceHandle | None = None
        self._is_pending = False
        tensors = {"weights": self.weights, "momentum": self._momentum, "count": self.count}
        self.state = SharedState([TensorInfo.from_numpy(tensor, name) for name, tensor in tensors.items()])

    @property
    def steps(self) -> int:
        """The number of deltas that were reduced since the run began."""
        return int(self.count[0])

    @property
    def ends(self) -> bool:
        """Whether a peer asked to end; a newcomer receives this with the state."""
        return bool(self.count[1])

    def measure(self, weights: Array, asks_to_end: bool) -> None:
        """Compute the delta: the change of the weights by the inner steps."""
        np.subtract(self.weights, weights, out=self._measured[:-1])
        self._measured[-1] = asks_to_end

    def launch(self, comm: Communicator) -> None:
        """Launch the reduce of the computed delta."""
        self._measured, self._sent = self._sent, self._measured
        self._is_pending = True
        self.count[0] += 1
        try:
            self._handle = comm.all_reduce_async(self._sent, self._sent, op=ReduceOp.AVG)
        except TooFewPeersError:
            self._handle, self.world = None, 1

    def finish(self, comm: Communicator) -> int:
        """Wait for the running reduce, if any; repeat it if a peer was lost. Returns the bytes that it moved."""
        handle, self._handle = self._handle, None
        if handle is None:
            return 0
        ok, _, info = handle.wait()
        while not ok:
            try:
                info, ok = comm.all_reduce(self._sent, self._sent, op=ReduceOp.AVG), True
            except PeerLostError:
                report(state="retries without the lost peer")
            except TooFewPeersError:
                info, ok = ReduceInfo(1, 0, 0), True
        self.world = info.world_size
        return info.tx_bytes + info.rx_bytes

    def apply(self) -> None:
        """Update the weights with the average delta, and note requests to end."""
        if not self._is_pending:
            return
        self._is_pending = False
        gradient = self._sent[:-1]
        self._momentum *= np.float32(OUTER_MOMENTUM)
        self._momentum += gradient
        self.weights -= np.float32(OUTER_RATE) * (gradient + np.float32(OUTER_MOMENTUM) * self._momentum)
        self.count[1] += bool(self._sent[-1] > 0)

    def digest(self) -> str:
        """A digest of the whole state."""
        hasher = hashlib.blake2b(digest_size=8)
        for info in self.state.tensor_infos:
            hasher.update(np.asarray(info.memory.owner).tobytes())
        return hasher.hexdigest()


class Peer:
    """One member of the demo's run."""

    def __init__(self, comm: Communicator) -> None:
        generator = np.random.default_rng(0)
        self._comm = comm
        self._teacher = first_weights(generator, TEACHER)
        self._held_out = samples(generator, self._teacher, 1024)
        self._outer, self._inner = Outer(first_weights(generator, HIDDEN)), Inner()
        self._is_newcomer = True
        self.asks_to_end = False

    def run(self) -> None:
        """Train until a peer asks to end, then report the digest of the state."""
        generator = np.random.default_rng(self._comm.peer_id)
        outer = self._outer
        while not outer.ends:
            joined, began = self._meet(), time.monotonic()
            report(state="trains")
            self._inner.weights[:] = outer.weights
            loss = self._inner.train(generator, self._teacher)
            time.sleep(max(began + STEP_SECONDS - time.monotonic(), 0))
            moved = outer.finish(self._comm)
            outer.measure(self._inner.weights, self.asks_to_end)
            outer.apply()
            if joined and outer.steps:
                self._sync_again()
            self._is_newcomer = False
            if not outer.ends:
                outer.launch(self._comm)
            rate = moved / (time.monotonic() - began)
            report(step=outer.steps, loss=loss, rate=rate, world=outer.world)
        self._sync()
        loss = loss_and_gradient(outer.weights, self._inner.weights, self._held_out)
        report(state="done", digest=outer.digest(), held_out=loss)

    def _meet(self) -> bool:
        """Admit waiting peers, between two reduces. Returns whether a peer may have joined."""
        if not self._is_newcomer:
            if not self._comm.are_peers_pending() and self._outer.world >= PEERS_MIN:
                return False
            report(state="admits peers")
            self._outer.finish(self._comm)
            self._comm.update_topology()
        self._outer.world = self._comm.wait_for_world_size(PEERS_MIN)
        self._sync()
        return True

    def _sync(self) -> None:
        if not self._is_newcomer:
            self._outer.state.push_revision()
        else:
            report(state="receives the state")
        self._comm.sync_shared_state(self._outer.state)

    def _sync_again(self) -> None:
        """The second sync: newcomers receive the result of the reduce that was running when they joined."""
        state = self._outer.state
        if not self._is_newcomer:
            state.push_revision()
            self._comm.sync_shared_state(state, SharedStateSyncStrategy.SEND_ONLY)
            return
        try:
            self._comm.sync_shared_state(state, SharedStateSyncStrategy.RECEIVE_ONLY)
        except UsageError:  # no older member is left, so the result of that reduce is lost
            self._comm.sync_shared_state(state)


def report(**what: object) -> None:
    """Write one line of JSON for the demo."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(address: str) -> None:
    """Train as a member of the run of this master."""
    with Communicator(address) as comm:
        peer = Peer(comm)
        signal.signal(signal.SIGTERM, lambda *_: setattr(peer, "asks_to_end", True))
        report(state="waits to join")
        comm.connect()
        report(id=comm.peer_id)
        peer.run()


if __name__ == "__main__":
    main(sys.argv[1])

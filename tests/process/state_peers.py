"""Peers that only transfer state: a real port and real workers; the test replaces the machine and the training process.

A test uses `StatePeer`: tensors in segments or in ordinary memory, and orders to the process that replaces the peer
actor. That process runs `main` below: a loop, a listening port and `Transfers`, as in the peer actor itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pccl._core.kernels.digest import block_digests, digest_of_blocks
from pccl._core.peer.events import EndTransfer, FetchState, ServeState, TransferEnded
from pccl._core.protocol.hellos import HANDSHAKE_TO_PEER, JoinState
from pccl._core.protocol.sources import Source
from pccl._core.protocol.state_manifest import Row, StateManifest, pack_manifest
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.process import die_with_parent, set_process_name
from pccl.actors.io.listener import Listener, bind
from pccl.actors.io.loop import IDLE_NS, Loop
from pccl.actors.peer.identity import Identity
from pccl.actors.peer.transfers import Transfers
from pccl.memory.segments import Segment
from pccl.memory.window import Window
from pccl.options import Options
from tests.leaks import has_ended

from .helpers import BOUND, ROOT, eventually

RUN = bytes(range(16))
TOKEN = b"a secret of transfers"
STALL = 2.0  # seconds
UINT8 = 0
WINDOW, MANIFEST = 1, 2  # numbers of segments; those of tensors follow
MAIL_BYTES_MAX = 1 << 16

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class StatePeer:
    """One peer with some tensors, and the process that transfers them."""

    def __init__(self, peer: int, tensors: dict[str, bytes], *, outside: Set[str] = frozenset(), **other: Any) -> None:
        """`outside` names tensors in ordinary memory; `unequal` (in `other`) those that may differ.

        `stall` (in `other`) is the stall limit in seconds, `lanes` the size of the pool.
        """
        self.peer = peer
        self.tensors: dict[str, Bytes] = {}
        self._unequal: set[str] = other.get("unequal", set())
        self._segments: dict[int, Segment] = {}
        self._segment_numbers: dict[str, int] = {}
        self.window = Window.create()
        assert self.window.segment is not None
        for name, content in tensors.items():
            if name in outside or not content:
                self.tensors[name] = np.frombuffer(bytearray(content), np.uint8)
                self._segment_numbers[name] = 0
            else:
                number = self._segment_numbers[name] = 3 + len(self._segments)
                segment = self._segments[number] = Segment.create("pccl-tensor", len(content) + 64)
                self.tensors[name] = np.frombuffer(segment.view, np.uint8)[64:]
                self.tensors[name][:] = np.frombuffer(content, np.uint8)
        self._manifest: Segment | None = None
        self._over = False
        self._pump = threading.Thread(target=self._serve_window, daemon=True)
        self._pump.start()
        self._mailbox, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mailbox.settimeout(BOUND)
        command = [sys.executable, "-m", "tests.process.state_peers"]
        command += [str(part) for part in (theirs.fileno(), peer, other.get("lanes", 1), os.getpid())]
        command.append(str(other.get("stall", STALL)))
        environment = {**os.environ, **other.get("environment", {})}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=environment)
        theirs.close()
        self.port: int = self.hear()
        self._tell(("share", WINDOW, self.window.segment.size), self.window.segment.fd)
        for number, segment in self._segments.items():
            self._tell(("share", number, segment.size), segment.fd)

    @property
    def source(self) -> Source:
        return Source(self.peer, "127.0.0.1", self.port)

    # ------------------------------------------------------------------------------------------ the training process

    def describe(self) -> StateManifest:
        """Write the manifest of the tensors as they are now into its segment, and return it."""
        data = pack_manifest([self._row(name) for name in sorted(self.tensors)])
        if self._manifest is not None:
            self._manifest.close()
        self._manifest = Segment.create("pccl-manifest", len(data))
        self._manifest.view[:] = data
        self._tell(("share", MANIFEST, len(data)), self._manifest.fd)
        return StateManifest(data)

    def _row(self, name: str) -> Row:
        tensor = self.tensors[name]
        blocks = block_digests(tensor.ctypes.data, tensor.nbytes, 1)
        number = self._segment_numbers[name]
        digest = digest_of_blocks(blocks, tensor.nbytes)
        unequal = name in self._unequal
        return Row(name, UINT8, unequal, tensor.nbytes, digest, number, 64 if number else 0, blocks)

    def _serve_window(self) -> None:
        names = sorted(self.tensors)

        def copy_in(key: int, begin: int, view: memoryview) -> None:
            self.tensors[names[key]][begin : begin + len(view)] = view

        def copy_out(key: int, begin: int, view: memoryview) -> None:
            view[:] = memoryview(self.tensors[names[key]])[begin : begin + len(view)]

        while not self._over:
            self.window.serve(copy_in, copy_out, 50_000_000)

    # ------------------------------------------------------------------------------------------ the machine

    def serve(self, number: int = 1) -> StateManifest:
        """Become a source of that round and return the manifest."""
        description = self.describe()
        assert self._manifest is not None
        self._tell(ServeState(number, MANIFEST, self._manifest.size, WINDOW))
        return description

    def fetch(
        self,
        content: bytes,
        *peers: StatePeer,
        sources: tuple[Source, ...] = (),
        number: int = 1,
        whole: bool = False,
    ) -> None:
        """Become a sink of that round; sources are peers, or records that a test made."""
        self.describe()
        assert self._manifest is not None
        named = (*sources, *(peer.source for peer in peers))
        self._tell(FetchState(number, MANIFEST, self._manifest.size, WINDOW, whole, content, named))

    def end(self, number: int = 1) -> TransferEnded:
        """End the part in that round and return its byte counts."""
        self._tell(EndTransfer(number))
        event = self.hear()
        assert isinstance(event, TransferEnded)
        assert event.round == number
        return event

    def tell(self, order: Any) -> None:
        """Send an action, as the machine would return it."""
        self._tell(order)

    def hear(self) -> Any:
        """Return the next event."""
        data = self._mailbox.recv(MAIL_BYTES_MAX)
        assert data, "the process ended"
        return pickle.loads(data)

    def _tell(self, message: Any, *fds: int) -> None:
        socket.send_fds(self._mailbox, [pickle.dumps(message)], list(fds))

    # ------------------------------------------------------------------------------------------ processes

    def workers(self) -> list[psutil.Process]:
        """The worker processes, by name."""
        children = psutil.Process(self.process.pid).children()
        return sorted((child for child in children if not has_ended(child)), key=lambda child: child.name())

    def worker(self, index: int = 0) -> psutil.Process:
        """Wait for a worker and return it."""
        return eventually(lambda: self.workers()[index : index + 1], "a worker was forked")[0]

    def kill(self) -> None:
        """Kill the process; the kernel ends its workers with it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(BOUND)

    def stop_pump(self) -> None:
        """Stop serving the window."""
        self._over = True
        self.window.ring()
        self._pump.join(BOUND)

    def close(self) -> None:
        self.stop_pump()
        if self.process.poll() is None:
            self._mailbox.close()
            try:
                assert self.process.wait(BOUND) == 0
            finally:
                self.process.kill()
        self._mailbox.close()
        self.tensors.clear()
        for segment in (*self._segments.values(), *([self._manifest] if self._manifest else [])):
            segment.close()
        self.window.close()


@contextlib.contextmanager
def peers_with(
    *states: dict[str, bytes], faults: dict[int, str] | None = None, **other: Any
) -> Iterator[list[StatePeer]]:
    """Yield a peer for each of these states; `faults` holds the planned faults by peer."""
    with contextlib.ExitStack() as stack:
        peers = []
        for number, state in enumerate(states, 1):
            environment = {"PCCL_FAULT": faults[number]} if faults and number in faults else {}
            peers.append(StatePeer(number, state, environment=environment, **other))
            stack.callback(peers[-1].close)
        yield peers


# ---------------------------------------------------------------------------------------------- the process


def main() -> None:
    mailbox_fd, peer, lanes, parent = (int(argument) for argument in sys.argv[1:5])
    die_with_parent(signal.SIGKILL)
    assert os.getppid() == parent
    set_process_name("pccl-peer")
    mailbox = socket.socket(fileno=mailbox_fd)
    loop = Loop()
    shared: dict[int, tuple[int, int]] = {}
    links = iter(range(1, 1 << 30))
    options = Options(stall_timeout=float(sys.argv[5]))

    def say(event: Any) -> None:
        mailbox.send(pickle.dumps(event))

    def identity() -> Identity:
        stall_ns = int(options.stall_timeout * 1e9)
        return Identity(RUN, peer, lanes, TOKEN, stall_ns, 5 * 10**9, 5 * 10**9, lambda: next(links), check=True)

    life, _ = os.pipe()
    log = Path(os.environ.get("PCCL_TEST_LOG", os.devnull))

    def tell(level: int, line: str) -> None:
        with log.open("a") as file:
            file.write(f"peer {peer} {level} {line}\n")

    transfers = Transfers(loop, life, feed=say, tell=tell, descriptor=shared.get, identity=identity)
    listening = Listener(
        loop,
        bind("127.0.0.1", 0),
        token=TOKEN,
        hellos={JoinState: transfers.link_came},
        limits=HANDSHAKE_TO_PEER,
        new_number=lambda: next(links),
        log=tell,
        timeout_ns=10**9,
    )
    perform: dict[str, Any] = {"ServeState": transfers.serve, "FetchState": transfers.fetch}
    perform |= {"ServeFetched": transfers.serve_fetched, "AddSources": transfers.add_sources}
    perform |= {"DropSource": transfers.drop_source, "EndTransfer": transfers.end}

    def read(_: int) -> None:
        data, fds, _, _ = socket.recv_fds(mailbox, MAIL_BYTES_MAX, 1)
        if not data:
            loop.stop()
            return
        order = pickle.loads(data)
        if isinstance(order, tuple):
            _, number, nbytes = order
            if number in shared:
                os.close(shared[number][0])
            shared[number] = fds[0], nbytes
        else:
            perform[type(order).__name__](order)

    loop.watch(mailbox.fileno(), read)
    say(listening.port)
    loop.run(lambda: monotonic_ns() + IDLE_NS, listening.tick)
    transfers.kill()


if __name__ == "__main__":
    main()

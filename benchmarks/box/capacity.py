"""The capacity of the emulator: links without a practical limit, and programs that only send and receive.

A measurement through a box is valid only while its links are well below this capacity. It is measured with one stream
in each direction, so that four busy processes and the emulator share the cores, as the ranks of a measurement do.

    python -m benchmarks.box.capacity
"""

from __future__ import annotations

import subprocess
import sys

from .network import Box, Link, mesh, reason_against

UNLIMITED = Link(rate_bits=100e9)
SECONDS = 2.0
PORT = 5000

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print(flush=True)
    connection, _ = server.accept()
buffer = bytearray(1 << 20)
while connection.recv_into(buffer):
    pass
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
end, piece = time.monotonic() + float(sys.argv[3]), bytes(1 << 18)
while time.monotonic() < end:
    connection.sendall(piece)
"""


def capacity_bits(seconds: float = SECONDS) -> float:
    """Bits per second through a box, both directions together."""
    with Box(mesh(2, UNLIMITED)) as box:
        senders = []
        for host in (0, 1):
            target = [box.address(host), str(PORT)]
            receiver = box.spawn(host, [sys.executable, "-I", "-c", RECEIVE, *target], stdout=subprocess.PIPE)
            assert receiver.stdout is not None
            receiver.stdout.readline()  # it listens
            receiver.stdout.close()
            senders.append(box.spawn(1 - host, [sys.executable, "-I", "-c", SEND, *target, str(seconds)]))
        for sender in senders:
            sender.wait()
        return sum(link.wire_bytes for link in box.counters().links.values()) * 8 / seconds


if __name__ == "__main__":
    if reason := reason_against():
        print(reason, file=sys.stderr)
        sys.exit(2)
    print(f"the emulator carries {capacity_bits() / 1e9:.1f} Gbit/s here, both directions together")

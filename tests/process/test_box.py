"""The network in a box: links have their rate, delay, queue and loss, and the box ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.box import Box, Link, mesh, reason_against

from .helpers import BOUND, ROOT, comm, eventually, gone

# Namespaces and TUN devices need root. Without them these tests are skipped, and the reason says what is missing.
pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "there is a box")

# Accepts one connection; prints the rate in bit/s between the first and the last byte of what it reads.
RECEIVER = """
    import socket, sys, time
    server = socket.create_server((sys.argv[1], 5000))
    print("listening", flush=True)
    connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    received = len(connection.recv(1))
    begun = time.monotonic()
    while size := connection.recv_into(buffer):
        received += size
    print(received * 8 / (time.monotonic() - begun))
"""
SENDER = """
    import socket, sys
    connection = socket.create_connection((sys.argv[1], 5000))
    connection.sendall(bytes(int(sys.argv[2])))
"""
# Prints how long it takes to connect, which is one round trip.
CONNECTOR = """
    import socket, sys, time
    held = []
    for _ in range(5):
        begun = time.monotonic()
        held.append(socket.create_connection((sys.argv[1], 5000)))
        print(time.monotonic() - begun)
"""


def python(source: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-c", textwrap.dedent(source), *map(str, arguments)]


def transfer(box: Box, nbytes: int) -> float:
    """Send this many bytes from host 1 to host 0; return the rate in bit/s."""
    receiver = box.spawn(0, python(RECEIVER, box.address(0)), stdout=subprocess.PIPE, text=True)
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        sender = box.spawn(1, python(SENDER, box.address(0), nbytes))
        assert sender.wait(BOUND) == 0
        return float(receiver.stdout.readline())


def test_a_link_has_its_rate() -> None:
    """Goal: what TCP reaches is the rate less the headers of its packets, 52 of 1,500 bytes."""
    with Box(mesh(2, Link(rate_bits=200e6, delay_s=0.001, queue_bytes=1 << 20))) as box:
        rate_bits = transfer(box, 25_000_000)
        counted = box.counters().links[1, 0]

    # Never more than the link carries; it may be much less on a busy machine.
    assert 0.4 < rate_bits / (200e6 * 1448 / 1500) < 1.05
    assert 25_000_000 < counted.wire_bytes < 1.1 * 25_000_000
    assert counted.packets >= 25_000_000 / 1448


def test_a_link_has_its_delay() -> None:
    """Goal: a round trip takes the delays of both directions, which may differ."""
    with Box({(0, 1): Link(1e9, delay_s=0.030), (1, 0): Link(1e9, delay_s=0.010)}) as box:
        # It accepts only one connection, but the kernel answers the others.
        with box.spawn(0, python(RECEIVER, box.address(0)), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            connector = box.spawn(1, python(CONNECTOR, box.address(0)), stdout=subprocess.PIPE, text=True)
            times = [float(line) for line in connector.communicate(timeout=BOUND)[0].split()]

    assert len(times) == 5
    assert 0.040 <= min(times) < 0.120  # never less; it may be more on a busy machine


def test_a_link_loses_what_it_should() -> None:
    """Goal: one packet in a hundred is lost, also single ones of a long train; TCP resends, and every byte arrives."""
    with Box(mesh(2, Link(rate_bits=1e9, delay_s=0.0005, loss=0.01)), seed=7) as box:
        transfer(box, 10_000_000)
        counted = box.counters().links[1, 0]

    assert counted.lost / (counted.packets + counted.lost) == pytest.approx(0.01, rel=0.4)
    assert counted.wire_bytes >= 10_000_000


def test_a_full_queue_drops() -> None:
    """Goal: what the queue has no room for is dropped, and the link still works."""
    with Box(mesh(2, Link(rate_bits=50e6, delay_s=0.005, queue_bytes=30_000))) as box:
        transfer(box, 3_000_000)

        assert box.counters().links[1, 0].overflowed > 0


def test_links_are_cut_and_changed_under_way() -> None:
    """Goal: a cut link drops all packets without an error to either side, and works again when changed back."""
    with Box(mesh(2, Link(rate_bits=1e9))) as box:
        box.cut(1, 0)
        listener = box.spawn(0, python(RECEIVER, box.address(0)), stdout=subprocess.PIPE, text=True)
        with listener:
            assert listener.stdout is not None
            listener.stdout.readline()
            sender = box.spawn(1, python(SENDER, box.address(0), 1000))
            eventually(lambda: box.counters().links[1, 0].lost, "the first packet is lost")
            assert sender.poll() is None
            box.change(1, 0, Link(rate_bits=1e9))
            assert sender.wait(BOUND) == 0


def test_hosts_without_a_link_cannot_reach_each_other() -> None:
    """Goal: a host without a link reaches no other; each host has its own address and loopback."""
    with Box({(0, 1): Link(1e9), (1, 0): Link(1e9)}, hosts=3) as box:
        connect = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=0.2)"
        command = python(connect, box.address(0))
        callers = [box.spawn(host, command, stderr=subprocess.PIPE, text=True) for host in (2, 1)]
        alone, refused = (caller.communicate(timeout=BOUND)[1] for caller in callers)

    assert "TimeoutError" in alone
    assert "ConnectionRefusedError" in refused


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    """Goal: after SIGKILL of the owner its emulator, programs, namespaces and temporary files are gone."""
    script = """
        import tempfile, time
        from benchmarks.box import *
        with Box(mesh(2, Link(1e9))) as box:
            program = box.spawn(1, ["sleep", "1000"])
            print(program.pid, box._emulator.pid, tempfile.gettempdir(), flush=True)
            time.sleep(1000)  # it is killed in here
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as owner:
        assert owner.stdout is not None
        *pids, folder = owner.stdout.readline().split()
        program, emulator = (int(pid) for pid in pids)
        eventually(lambda: comm(program) == "sleep", "the program runs")
        assert comm(emulator) == "pccl-box"
        # Of this box only: other tests may have theirs.
        names = {os.readlink(f"/proc/{pid}/ns/net") for pid in (program, emulator)} - {os.readlink("/proc/self/ns/net")}
        assert names
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: gone(program) and gone(emulator), "both end")

    assert not inhabited() & names
    assert folder == str(tmp_path)
    assert not list(tmp_path.iterdir())


def inhabited() -> set[str]:
    """Return the network namespaces that have a process."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue  # it has ended
    return found


def test_what_is_no_box_says_so() -> None:
    """Goal: wrong links are refused before anything is started."""
    with pytest.raises(ValueError, match="is no link"):
        Link(rate_bits=0)
    with pytest.raises(ValueError, match="joins two hosts"):
        Box({(0, 0): Link(1e9)})
    with pytest.raises(ValueError, match="hosts"):
        Box(mesh(33, Link(1e9)))

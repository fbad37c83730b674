"""The interface of a box: links, hosts, programs on them. The implementation is in `namespaces.py` and `emulator.c`.

One child is the emulator; it holds namespaces and devices. It is compiled when a box is opened, into memory, so no
stale one can be run and none is left behind. Closing the box, or the death of its owner, ends emulator and programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

HERE = Path(__file__).parent
HOSTS_MAX = 32  # as in emulator.c
MTU = 1500  # of the internet
DEVICE = "pcclbox"  # the name of the device of every host
NETWORK = "10.83.0"  # addresses exist only inside, so they can clash with nothing outside
END_SECONDS = 5  # for the emulator to end by itself after the end of its input
QUEUE_BYTES_MIN = 64 * MTU  # room for a train of packets as the kernel sends it, also without a delay


@dataclass(frozen=True)
class Link:
    """One direction between two hosts."""

    rate_bits: float  # per second, of IP packets
    delay_s: float = 0.0  # one way
    queue_bytes: int = 0  # that may wait; 0: as many as the link carries in a round trip of both directions alike
    loss: float = 0.0  # probability that a packet is lost

    def __post_init__(self) -> None:
        if not self.rate_bits >= 1 or self.delay_s < 0 or self.queue_bytes < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"{self} is no link: a rate of at least 1 bit/s, nothing negative, a loss of 0 to 1")

    @property
    def queue_bytes_used(self) -> int:
        """The limit of the queue, chosen or given."""
        return self.queue_bytes or max(QUEUE_BYTES_MIN, round(self.rate_bits / 8 * 2 * self.delay_s))


class LinkCounters(NamedTuple):
    """What a link has done since the box was opened."""

    source: int
    target: int
    packets: int  # that found room in the queue
    wire_bytes: int  # of those, with the headers of IP and TCP
    overflowed: int  # packets that found the queue full
    lost: int  # packets lost by chance
    waiting_bytes: int  # in the queue just now


class Counters(NamedTuple):
    """What the emulator has done."""

    processor_s: float  # time on a core since the box was opened
    late_s_max: float  # the latest delivery since the last call, in seconds behind its time
    links: dict[tuple[int, int], LinkCounters]


def mesh(hosts: int, link: Link) -> dict[tuple[int, int], Link]:
    """Return the same link between all pairs of hosts."""
    return {(source, target): link for source in range(hosts) for target in range(hosts) if source != target}


def reason_against() -> str:
    """Why there can be no box here; empty if there can."""
    if os.geteuid() != 0:
        return "a box needs root, for namespaces and devices in them"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "a box needs /dev/net/tun, which is not there"
    if missing := [tool for tool in ("gcc", "ip") if shutil.which(tool) is None]:
        return f"a box needs {' and '.join(missing)}, not installed here"
    return ""


class Box:
    """Hosts 0 to n-1 and the links between them; hosts without a link cannot reach each other. Use it in a `with`.

    `settings` are kernel settings for all hosts, such as {"net.ipv4.tcp_congestion_control": "reno"}; others are as
    outside. The seed decides which packets are lost. Open it, and spawn, in a thread that lives as long as the box: the
    kernel ties the life of a child to the thread that started it.
    """

    def __init__(
        self,
        links: Mapping[tuple[int, int], Link],
        hosts: int = 0,
        *,
        seed: int = 1,
        mtu: int = MTU,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.links = dict(links)
        self.hosts = hosts or 1 + max(max(pair) for pair in links)
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise ValueError(f"a box has 1 to {HOSTS_MAX} hosts, not {self.hosts}")
        if odd := [pair for pair in links if pair[0] == pair[1] or not all(0 <= end < self.hosts for end in pair)]:
            raise ValueError(f"a link joins two hosts below {self.hosts}, unlike {odd}")
        self._seed = seed
        self._plan = {
            "device": DEVICE,
            "mtu": mtu,
            "addresses": [self.address(host) for host in range(self.hosts)],
            "settings": dict(settings or {}),
        }
        self._emulator: subprocess.Popen[str] | None = None
        self._namespaces: list[int] = []
        self._programs: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Box:
        if reason := reason_against():
            raise PermissionError(reason)
        binary = _compile()
        try:
            command = _command("make", binary, json.dumps(self._plan))
            # A session of its own: Ctrl-C is for the owner and its programs, which still need their network to end.
            self._emulator = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[binary],
                start_new_session=True,
            )
        finally:
            os.close(binary)
        try:
            self._namespaces = json.loads(self._read())
            for (source, target), link in self.links.items():
                self.change(source, target, link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End programs and network, in this order. Wait before for programs that should end by themselves."""
        for program in self._programs:
            if program.poll() is None:
                program.kill()
                program.wait()
        self._programs.clear()
        if self._emulator is not None:
            emulator, self._emulator = self._emulator, None
            with emulator:  # closes its input, which ends it, and waits
                if emulator.stdin is not None:
                    emulator.stdin.close()
                try:
                    emulator.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    emulator.kill()

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host for other hosts."""
        return f"{NETWORK}.{host + 1}"

    def spawn(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host. Options are those of Popen. It is killed with the box if it has not ended."""
        assert self._emulator is not None, "a box is open inside its `with`"
        namespace = f"/proc/{self._emulator.pid}/fd/{self._namespaces[host]}"
        program: subprocess.Popen[Any] = subprocess.Popen(_command("enter", namespace, *command), **options)
        self._programs.append(program)
        return program

    def change(self, source: int, target: int, link: Link) -> None:
        """Change or add a link; packets under way arrive in order. A loss of 1 cuts it."""
        self.links[source, target] = link
        seed = (self._seed << 16) + (source << 8) + target
        numbers = f"{round(link.rate_bits)} {round(link.delay_s * 1e9)} {link.queue_bytes_used} {link.loss} {seed}"
        answer = self._ask(f"link {source} {target} {numbers}")
        assert answer == "ok", answer

    def cut(self, source: int, target: int) -> None:
        """Drop all packets in this direction from now on, without an error to either side."""
        self.change(source, target, replace(self.links[source, target], loss=1.0))

    def counters(self) -> Counters:
        """What links and emulator have done so far."""
        found = json.loads(self._ask("counters"))
        links = [LinkCounters(*numbers) for numbers in found["links"]]
        return Counters(found["processor_s"], found["late_s_max"], {(row.source, row.target): row for row in links})

    def _ask(self, command: str) -> str:
        self._pipe("stdin").write(command + "\n")
        self._pipe("stdin").flush()
        return self._read()

    def _read(self) -> str:
        line: str = self._pipe("stdout").readline()
        if not line:
            raise RuntimeError("the emulator of the box has ended; what it said is above")
        return line.strip()

    def _pipe(self, name: str) -> IO[str]:
        assert self._emulator is not None, "a box is open inside its `with`"
        pipe: IO[str] = getattr(self._emulator, name)
        return pipe


def _command(verb: str, *arguments: object) -> list[str]:
    """Return the command of an isolated Python without `site`, which starts in milliseconds."""
    return [sys.executable, "-I", "-S", str(HERE / "namespaces.py"), verb, str(os.getpid()), *map(str, arguments)]


def _compile() -> int:
    """Compile the emulator; return the file descriptor of its memory."""
    with tempfile.TemporaryDirectory(prefix="pccl-box-") as folder:
        target = Path(folder) / "emulator"
        subprocess.run(["gcc", "-O2", "-o", str(target), str(HERE / "emulator.c"), "-lm"], check=True)
        binary = os.memfd_create("pccl-box", 0)
        try:
            with os.fdopen(os.dup(binary), "wb") as file:
                file.write(target.read_bytes())
        except BaseException:
            os.close(binary)
            raise
        return binary

"""The trial: a master and two healthy members at work, an assault, and what must be true afterwards.

The master runs in a process of its own and checks its invariants after every event. Afterwards it must serve its
members as before, hold no more descriptors than before, and not have grown since its memory settled.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from pccl import Attribute, Communicator
from pccl._core.protocol.messages import AskStatus, JoinLane, Register
from pccl.errors import UsageError
from tests.process.helpers import Background, Script, background, crew_of, eventually, free_port, quick

from .assault import assault

GROWTH_BYTES_MAX = 4 << 20  # what an allocator may keep between the end of the warm-up and the end of the trial
STEP = 0.005  # seconds of training between two rounds of a healthy member
WARM_UP = 5  # one frame in so many is sent before the master's memory is looked at for the first time
ENVIRONMENT = {
    "PCCL_LOG_LEVEL": "ERR",
    "PCCL_CHECK": "1",
    "PCCL_WIRE_TIMEOUT": "2",
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Outcome:
    """What the trial saw."""

    frames: int
    connections: int
    seconds: float
    rounds: int  # that the healthy members completed meanwhile
    bytes_before: int  # resident memory of the master after the warm-up
    bytes_after: int
    descriptors_before: int
    descriptors_after: int

    def __str__(self) -> str:
        rate = self.frames / self.seconds
        return (
            f"{self.frames} frames over {self.connections} connections in {self.seconds:.1f} s, {rate:.0f} a second; "
            f"{self.rounds} healthy rounds; master {self.bytes_before >> 10} -> {self.bytes_after >> 10} KiB, "
            f"{self.descriptors_before} -> {self.descriptors_after} descriptors"
        )


class Members:
    """Two peers that hold topology rounds until they are told to leave."""

    def __init__(self, peers: list[Communicator]) -> None:
        self.rounds = [0] * len(peers)
        self._peers = peers
        self._over = False
        self._calls: list[Background[None]] = [background(lambda i=i: self._train(i)) for i in range(len(peers))]

    def _train(self, index: int) -> None:
        while not self._over:
            try:
                self._peers[index].update_topology()
            except UsageError:
                if self._over:
                    return
                raise
            self.rounds[index] += 1
            time.sleep(STEP)

    def go_on(self) -> None:
        """Fails unless both complete further rounds, in a world of two."""
        wanted = max(self.rounds) + 3
        eventually(lambda: min(self.rounds) >= wanted or self._failed(), "the healthy members go on", timeout=30)
        self.raise_failure()
        worlds = [peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) for peer in self._peers]
        assert worlds == [2, 2], worlds

    def raise_failure(self) -> None:
        """What ended a member, if something did."""
        for call in self._failed():
            call.result()

    def _failed(self) -> list[Background[None]]:
        return [call for call in self._calls if call.ended.is_set()]

    def leave(self) -> None:
        """Stop training."""
        self._over = True
        for peer in self._peers:
            peer.close()
        for call in self._calls:
            call.result()


def hold_trial(frames: int, seed: int, show: Callable[[str], None]) -> Outcome:
    """The whole of it; an AssertionError or an exception of a member if something was wrong."""
    command = [sys.executable, "-m", "pccl.master", "--listen-address"]
    port = free_port()
    address = f"127.0.0.1:{port}"
    with Script.command(*command, address, **ENVIRONMENT) as script:
        process = psutil.Process(script.pid)
        peer_port = free_port()
        with crew_of(address, options=quick(heartbeat_timeout=10.0)) as crew:
            crew.newcomer(options=quick(heartbeat_timeout=10.0, port=peer_port))
            crew.newcomer(options=quick(heartbeat_timeout=10.0))
            crew.admit(*crew)
            members = Members(list(crew))
            try:
                targets = [(address, Register)] * 6 + [(address, AskStatus), (f"127.0.0.1:{peer_port}", JoinLane)]
                outcome = _assail(targets, frames, seed, show, process, members)
                members.go_on()
            finally:
                members.leave()
        errors = script.errors()
        assert script.process.poll() is None, f"the master ended:\n{errors}"
        assert not re.search("Traceback|Error", errors), errors
        return outcome


def _assail(
    targets: list[tuple[str, type[object]]],
    frames: int,
    seed: int,
    show: Callable[[str], None],
    process: psutil.Process,
    members: Members,
) -> Outcome:
    descriptors = process.num_fds()
    first = frames // WARM_UP
    begin = time.monotonic()

    def progress(sent: int, connections: int) -> None:
        members.raise_failure()
        rate = sent / max(time.monotonic() - begin, 0.001)
        show(f"{sent} of {frames} frames, {connections} connections, {rate:.0f} frames a second")

    warm = assault(targets, first, seed, progress)
    members.go_on()
    resident = process.memory_info().rss
    main = assault(targets, frames - warm[0], seed + 1, lambda sent, more: progress(warm[0] + sent, warm[1] + more))
    seconds = time.monotonic() - begin
    members.go_on()
    # Last words linger for a second before their sockets are closed over them.
    eventually(lambda: process.num_fds() <= descriptors, "the master has closed every stranger's connection")
    outcome = Outcome(
        frames=warm[0] + main[0],
        connections=warm[1] + main[1],
        seconds=seconds,
        rounds=min(members.rounds),
        bytes_before=resident,
        bytes_after=process.memory_info().rss,
        descriptors_before=descriptors,
        descriptors_after=process.num_fds(),
    )
    assert outcome.bytes_after - outcome.bytes_before < GROWTH_BYTES_MAX, f"the master grew: {outcome}"
    return outcome

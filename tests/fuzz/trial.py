"""The trial: run a master and two healthy members, start an assault, and check the master afterwards.

The master is a process of its own and checks its invariants after every event. Afterwards it must serve its members as
before, hold no more descriptors than before, and use no more memory than after the warm-up.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from pccl import Attribute, Communicator
from pccl._core.protocol.hellos import AskStatus, JoinLane, Register
from pccl.errors import UsageError
from tests.process.helpers import Background, Script, background, eventually, free_port, peers_of, quick

from .assault import assault

GROWTH_BYTES_MAX = 4 << 20  # memory that the allocator may add between the end of the warm-up and the end of the trial
STEP = 0.005  # seconds of training between two rounds of a healthy member
WARM_UP = 5  # one frame in five is sent before the master's memory is measured for the first time
ENVIRONMENT = {
    "PCCL_LOG_LEVEL": "ERR",
    "PCCL_CHECK": "1",
    "PCCL_WIRE_TIMEOUT": "2",
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Outcome:
    """Counts and measurements of one trial."""

    frames: int
    connections: int
    seconds: float
    rounds: int  # topology rounds that the healthy members completed during the assault
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
    """Two peers that repeat topology rounds until they are told to leave."""

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
        """Fail unless both members complete further rounds and the world size is two."""
        wanted = max(self.rounds) + 3
        eventually(lambda: min(self.rounds) >= wanted or self._failed(), "the healthy members go on", timeout=30)
        self.raise_failure()
        worlds = [peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) for peer in self._peers]
        assert worlds == [2, 2], worlds

    def raise_failure(self) -> None:
        """Raise the exception that ended a member, if there is one."""
        for call in self._failed():
            call.result()

    def _failed(self) -> list[Background[None]]:
        return [call for call in self._calls if call.ended.is_set()]

    def leave(self) -> None:
        """Stop the rounds and close both members."""
        self._over = True
        for peer in self._peers:
            peer.close()
        for call in self._calls:
            call.result()


def hold_trial(frames: int, seed: int, show: Callable[[str], None]) -> Outcome:
    """Run one trial; raise AssertionError, or the exception of a member, if a check fails."""
    command = [sys.executable, "-m", "pccl.master", "--listen-address"]
    port = free_port()
    address = f"127.0.0.1:{port}"
    with Script.command(*command, address, **ENVIRONMENT) as script:
        process = psutil.Process(script.pid)
        peer_port = free_port()
        with peers_of(address, options=quick(heartbeat_timeout=10.0)) as peers:
            peers.newcomer(options=quick(heartbeat_timeout=10.0, port=peer_port))
            peers.newcomer(options=quick(heartbeat_timeout=10.0))
            peers.admit(*peers)
            members = Members(list(peers))
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
    # The master keeps a refused connection open for a second, so that its last message can be read.
    eventually(lambda: process.num_fds() <= descriptors, "the master has closed every connection of the assault")
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

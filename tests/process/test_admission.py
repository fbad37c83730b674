"""Admission without risk: whoever comes with a mistake is told so, and nobody else notices.

Hosts are network namespaces, so these tests need root. Members train as the README shows and note when each step ended;
a test compares their steps with and without newcomers. A member waits for a newcomer's dial only while its ring is
wired, and for nobody if its ring stays: that is what is asserted; times are printed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pccl import MasterNode
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.options import PEER_PORT_FIRST, Options

from .helpers import BOUND, Script, eventually, running_master
from .namespaces import HostNetwork

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

DIAL = 2.0  # seconds that one dial to a silent host takes here (connect_timeout)
QUIET = 2.0  # seconds of training without newcomers, before and after those with newcomers
STARTS = 2  # newcomers of one period
SPACING = 2.0  # seconds between their starts, as with a script that starts a failed peer again
RUN = "voyage"  # the name of the run

# The loop of the README, which also notes when each step ended and which errors it met, until a line of input comes.
# The last argument says whether the members sync a state.
TRAIN = """
    import json
    import numpy as np
    import pccl

    elements, syncs = int(sys.argv[2]), sys.argv[3] == "syncs"
    weights, gradient = pccl.zeros(elements), pccl.empty(elements)
    state = SharedState([TensorInfo.from_numpy(weights, "weights")])
    steps, errors, world = [], [], 0

    def tell():
        sys.stdin.readline()
        say("story", json.dumps([steps, errors]))
        os._exit(0)

    threading.Thread(target=tell, daemon=True).start()
    try:
        with Communicator(sys.argv[1]) as comm:
            comm.connect()
            say("in", comm.peer_id)
            while True:
                comm.wait_for_world_size(2)
                try:
                    if syncs:
                        comm.sync_shared_state(state)
                    gradient[:] = weights - np.random.rand(elements)
                    info = comm.all_reduce(gradient, gradient, op=ReduceOp.AVG)
                    weights -= 0.1 * gradient
                    if syncs:
                        state.push_revision()
                    steps.append(time.monotonic())
                    if world != info.world_size:
                        world = info.world_size
                        say("world", world)
                except (PeerLostError, TooFewPeersError) as error:
                    errors.append((time.monotonic(), str(error)))
                time.sleep(0.05)
                comm.update_topology()
    except PCCLError as error:
        say("ended", type(error).__name__, error)
        sys.exit(3)
"""

# A newcomer that cannot be accepted, and so needs no more than this. It starts as fast as an interpreter can.
KNOCK = """
import sys
from pccl import Communicator, PCCLError

try:
    with Communicator(sys.argv[1]) as comm:
        comm.connect()
        print("in", comm.peer_id, flush=True)
except PCCLError as error:
    print("ended", type(error).__name__, error, flush=True)
    sys.exit(3)
"""


@dataclass(frozen=True)
class Story:
    """What a member tells at the end: when each of its steps ended, and the errors that its loop met."""

    steps: list[float]
    errors: list[tuple[float, str]]

    def count(self, begin: float, end: float) -> int:
        """Return how many steps ended in this time."""
        return sum(begin < step <= end for step in self.steps)

    def longest(self, begin: float, end: float) -> float:
        """Return the longest time without the end of a step."""
        marks = [begin, *(step for step in self.steps if begin < step < end), end]
        return max(after - before for before, after in pairwise(marks))


class Training:
    """Members that train, one on each of the first hosts of a network; the others are for newcomers."""

    def __init__(self, network: HostNetwork, address: str, members: int, *arguments: object) -> None:
        self._network = network
        self._address = address
        self._plan = members, arguments
        self._stack = ExitStack()
        self.members: list[Script] = []

    def start(self, host: int, *arguments: object, **environment: str) -> Script:
        """Start the loop on a host."""
        return self._keep(self._network.start(host, TRAIN, self._address, *arguments, **environment))

    def command(self, host: int, *command: object, **environment: str) -> Script:
        """Start any other program on a host."""
        return self._keep(self._network.command(host, *command, **environment))

    def _keep(self, script: Script) -> Script:
        return self._stack.enter_context(script)

    def stories(self) -> list[Story]:
        """End the members, and return what each of them tells."""
        for member in self.members:
            member.say()
        return [Story(*json.loads(member.expect("story"))) for member in self.members]

    def __enter__(self) -> Training:
        count, arguments = self._plan
        try:
            self.members += [self.start(host, *arguments) for host in range(count)]
            for member in self.members:
                member.expect(f"world {count}")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostNetwork]:
    """Yield seven hosts. Everything that is started meanwhile belongs to one named run, and dials for a short time."""
    monkeypatch.setenv("PCCL_CONNECT_TIMEOUT", str(DIAL))
    monkeypatch.setenv("PCCL_DEADLOCK_TIMEOUT", "0.5")  # so that calls that can never meet end before a dial would
    monkeypatch.setenv("PCCL_HEARTBEAT_INTERVAL", "0.2")  # how often the master looks for those
    monkeypatch.setenv("PCCL_RUN", RUN)
    with HostNetwork(hosts=7) as hosts:
        yield hosts


@pytest.fixture
def master(network: HostNetwork) -> Iterator[MasterNode]:
    """Yield a master for all hosts, which this host reaches at 127.0.0.1 too."""
    with running_master(Options(), host="0.0.0.0") as node:
        yield node


@pytest.fixture
def address(network: HostNetwork, master: MasterNode) -> str:
    """The address of the master for other hosts."""
    return f"{network.gateway}:{parse_address(master.address)[1]}"


def last_words(script: Script) -> str:
    """Return the error with which a script ended, and check that it was a kick with a reason."""
    said = script.expect("ended", timeout=2 * BOUND)
    assert script.end() == 3
    assert said.startswith("KickedError"), said
    return said


# ---------------------------------------------------------------------------------------------- who cannot be reached


def test_a_host_with_a_firewall_is_silent(network: HostNetwork) -> None:
    """Goal: what these tests build on: its peers' ports answer nobody, not even with a refusal, and it can dial."""
    network.firewall(0)
    code = """
    import socket
    with socket.create_server(("", int(sys.argv[3]))):
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5):
            say("dialled")
            sys.stdin.readline()
    """
    with socket.create_server((network.gateway, 0)) as server:
        port = server.getsockname()[1]
        with network.start(0, code, network.gateway, port, PEER_PORT_FIRST) as host:
            host.expect("dialled")
            with pytest.raises(TimeoutError):
                socket.create_connection((network.address(0), PEER_PORT_FIRST), 0.5)
            host.say()
            assert host.end() == 0


def test_an_unreachable_newcomer_costs_members_nothing(network: HostNetwork, address: str) -> None:
    """Goal: a peer behind a firewall that is started every two seconds is told why; the ring of six members stays."""
    network.firewall(6)
    quiet, disturbed, told = [], [], []
    with Training(network, address, 6, 1000, "syncs") as training:
        before = rings(address)
        mark = time.monotonic()
        for period in range(3):
            time.sleep(QUIET)
            quiet.append((mark, mark := time.monotonic()))
            if period == 2:
                break
            newcomers = []
            for _ in range(STARTS):
                newcomers.append(training.command(6, sys.executable, "-c", KNOCK, address))
                time.sleep(SPACING)
            told += [last_words(newcomer) for newcomer in newcomers]
            disturbed.append((mark, mark := time.monotonic()))
        after = rings(address)
        stories = training.stories()

    rates = [steps_per_second(stories, periods) for periods in (quiet, disturbed)]
    longest = max(story.longest(quiet[0][0], mark) for story in stories)
    print(f"steps per second: {rates[0]:.2f} alone, {rates[1]:.2f} with newcomers ({rates[1] / rates[0]:.1%}); ")
    print(f"longest time without a step: {longest:.2f} s; a newcomer is told: {told[0]}")
    assert after == before
    assert [story.errors for story in stories] == [[]] * 6
    for words in told:
        assert re.search(rf"\b{re.escape(network.address(6))}:481\d\d\b", words), "which address"
        assert re.search(r"\b(master|peer \d+)\b", words), "who tried"
        assert "firewall" in words


def status(address: str) -> dict[str, Any]:
    """Return the master's status report."""
    return query_status(*parse_address(address), Options())


def rings(address: str) -> tuple[int, list[list[int]]]:
    """Return how often rings were ordered, and the rings."""
    report = status(address)
    return report["counters"]["rewired"], [group["ring"] for group in report["groups"]]


def steps_per_second(stories: list[Story], periods: list[tuple[float, float]]) -> float:
    """Return the mean over all members and periods."""
    steps = sum(story.count(*period) for story in stories for period in periods)
    return steps / len(stories) / sum(end - begin for begin, end in periods)


@pytest.mark.parametrize("mistake", ["firewall", "advertise"])
def test_a_first_peer_that_the_master_cannot_reach_is_replaced(
    network: HostNetwork, address: str, mistake: str
) -> None:
    """Goal: it is warned at once, and told why it must go when two healthy peers come; those train."""
    environment, wrong = {}, f"{network.address(0)}:{PEER_PORT_FIRST}"
    if mistake == "firewall":
        network.firewall(0)
    else:
        wrong = f"{network.address(99)}:4711"
        environment["PCCL_ADVERTISE"] = wrong
    with network.start(0, TRAIN, address, 1000, "syncs", **environment) as culprit:
        eventually(lambda: wrong in culprit.errors(), "the first peer is warned")
        with ExitStack() as stack:
            healthy = [stack.enter_context(network.start(host, TRAIN, address, 1000, "syncs")) for host in (1, 2)]
            for peer in healthy:
                peer.expect("world 2", timeout=2 * BOUND)
            words = last_words(culprit)
    assert wrong in words
    assert "firewall" in words
    assert "advertise" in words.lower()


def test_a_first_peer_that_only_its_own_host_can_reach_is_replaced(
    network: HostNetwork, master: MasterNode, address: str
) -> None:
    """Goal: a peer beside the master that gave 127.0.0.1 goes, and is told what to set; two on other hosts train."""
    here = f"127.0.0.1:{parse_address(master.address)[1]}"
    with Script(TRAIN, here, 1000, "syncs") as culprit:
        culprit.expect("in")
        with ExitStack() as stack:
            healthy = [stack.enter_context(network.start(host, TRAIN, address, 1000, "syncs")) for host in (0, 1)]
            for peer in healthy:
                peer.expect("world 2", timeout=2 * BOUND)
            words = last_words(culprit)
    assert "127.0.0.1:" in words
    assert "advertise" in words.lower()


# ---------------------------------------------------------------------------------------------- who does other things


def check_unharmed(training: Training, began: float) -> None:
    """Check that since then members went on, and repeated at most the one step that the newcomer was in."""
    ended = time.monotonic()
    for story in training.stories():
        assert len(story.errors) <= 1, story.errors
        assert story.longest(began, ended) < BOUND


def go_on(training: Training, address: str) -> None:
    """Let the members train on for some steps, each of which ends with a round, so that later effects are seen too."""
    begin = status(address)["round"]

    def has_gone_on() -> bool:
        assert [member.process.poll() for member in training.members] == [None] * len(training.members)
        return bool(status(address)["round"] >= begin + 10)

    eventually(has_gone_on, "the members make ten more steps")


@pytest.mark.parametrize(("loop", "sizes"), [("syncs", (4000, 4004)), ("reduces", (1000, 1001))])
def test_a_newcomer_of_another_shape_is_refused_alone(
    network: HostNetwork, address: str, loop: str, sizes: tuple[int, int]
) -> None:
    """Goal: 1,001 elements among three with 1,000, in a state or in a reduce: it alone goes, and is told both."""
    with Training(network, address, 3, 1000, loop) as training:
        began = time.monotonic()
        words = last_words(training.start(3, 1001, loop)).replace(",", "")
        go_on(training, address)
        check_unharmed(training, began)
    for size in sizes:  # of a state in bytes, of a reduce in elements
        assert re.search(rf"\b{size}\b", words)


def test_a_newcomer_that_runs_another_program_is_refused_alone(network: HostNetwork, address: str) -> None:
    """Goal: one that reduces where three others sync: it alone goes, and is told both calls."""
    with Training(network, address, 3, 1000, "syncs") as training:
        began = time.monotonic()
        words = last_words(training.start(3, 1000, "reduces"))
        go_on(training, address)
        check_unharmed(training, began)
    assert "all_reduce" in words
    assert "sync_shared_state" in words


def test_a_bench_is_refused_by_the_master_of_a_training(
    network: HostNetwork, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: `pccl bench` at the wrong address ends with code 1 and one line with the names of both runs."""
    with Training(network, address, 3, 1000, "syncs") as training:
        began = time.monotonic()
        monkeypatch.delenv("PCCL_RUN")  # its own name is what it has without one
        bench = training.command(3, Path(sys.executable).with_name("pccl"), "bench", address, "--peers", "2")
        assert bench.end() == 1
        (line,) = bench.errors().splitlines()
        go_on(training, address)
        check_unharmed(training, began)
    assert RUN in line
    assert "bench" in line

"""A peer that dies, stops or dawdles at every single thing its actor and workers do, and the others that go on.

The points are not listed here: they follow from the actions that the actor can perform and the messages it can send,
so a new one is covered the day it is added.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pccl import Attribute, Communicator, MasterNode
from pccl._core import messages
from pccl.actors import peer_actor
from pccl.actors.faults import VARIABLE, Fault

from .helpers import ROOT
from .taking_part import OPTIONS, reduce, take_part

COMMON = """
import sys
from pccl import Communicator, PCCLError
from tests.process.taking_part import OPTIONS, reduce, take_part
communicator = Communicator(sys.argv[1], 0, 2, options=OPTIONS)
"""

# A victim that takes part for a while, then leaves; whatever happens to it must not disturb the others. Every worker
# that it starts meets the fault again, so it gives up soon.
VICTIM = f"""{COMMON}
try:
    communicator.connect(n_attempts=1)
    reduce(communicator, attempts=2)
    for _ in range(3):
        take_part(communicator, attempts=2)
    communicator.close()
except PCCLError as error:
    print(type(error).__name__)
"""

# A second veteran.
SECOND = f"""{COMMON}
with communicator:
    communicator.connect()
    reduce(communicator)
    while True:
        take_part(communicator)
"""

ACTIONS = sorted(f"peer.{action.__name__}" for action in peer_actor._PERFORM)
SENT = sorted(f"peer.send.{name}" for name in ("VoteTopology", "VotePending", "Wired", "Leave", "Initiate", "Finished"))
LANE = ["lane.Attach", "lane.Detach", "lane.MapSegment", "lane.send.frame", "lane.receive.frame"]
# What this victim's life never comes to: failures of others, and what only its own end brings.
UNREACHED = {"peer.KillLanes", "peer.Log", "peer.Tell", "peer.Stop", "peer.DropLink", "peer.AbortOperation"}
UNREACHED |= {"peer.BeginProbe", "peer.EndProbe"}  # test_optimize has a victim for these
POINTS = [point for point in (*ACTIONS, *SENT, *LANE) if point not in UNREACHED]


@pytest.fixture(scope="module")
def master():
    """One master for all points: it must survive every one of them."""
    with MasterNode("127.0.0.1:0", options=OPTIONS) as node:
        yield node


@pytest.mark.parametrize("action", ["kill", "stop", "delay"])
def test_others_go_on_whatever_happens_to_a_peer(master: MasterNode, action: str) -> None:
    """Two veterans keep calling while a victim meets its fault; their calls stay bounded and end in a world of two."""
    bound = {"kill": 1.0, "stop": 3.0, "delay": 3.0}[action]
    slowest = 0.0
    with Communicator(master.address, 0, 2, options=OPTIONS) as first:
        first.connect()
        helper = subprocess.Popen([sys.executable, "-c", SECOND, master.address], stdout=subprocess.PIPE, cwd=ROOT)
        try:
            first.wait_for_world_size(2, timeout=20)
            reduce(first)
            for point in POINTS:
                slowest = max(slowest, _meet(first, master.address, point, action, bound))
        finally:
            helper.kill()
            helper.communicate()
    assert slowest < bound, f"a call of a bystander took {slowest:.2f} s"


def _meet(first: Communicator, address: str, point: str, action: str, bound: float) -> float:
    """Run one victim to its end; the longest call of a bystander meanwhile."""
    environment = {**os.environ, VARIABLE: f"{point}:1:{action}"}
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, address], env=environment, stdout=subprocess.PIPE, cwd=ROOT
    )
    slowest = 0.0
    deadline = time.monotonic() + 30
    try:
        while victim.poll() is None or first.get_attribute(Attribute.LOCAL_WORLD_SIZE) != 2:
            assert time.monotonic() < deadline, f"{point} {action}: the victim or its place in the ring never went"
            begin = time.monotonic()
            take_part(first)
            slowest = max(slowest, time.monotonic() - begin)
            assert slowest < bound, f"{point} {action}: a bystander waited {slowest:.2f} s"
    finally:
        victim.kill()
        output = victim.communicate()[0]
    # A fault that was never met would make this test a walk in the park. Only close() keeps the end to itself.
    if action == "kill" and point.startswith("peer.") and point not in {"peer.send.Leave", "peer.HangUp"}:
        assert b"MasterLostError" in output, f"{point} was never reached"
    return slowest


def test_every_message_a_peer_sends_is_a_point() -> None:
    """The list above misses no message that a healthy peer sends to the master."""
    failures = {"Withdraw", "WireFailed", "EdgeLost", "Beat", "Awaiting", "WithdrawReduce"}
    sent = {layout.cls.__name__ for layout in messages_to_master()}

    assert {point.rsplit(".", 1)[1] for point in SENT} == sent - failures


def messages_to_master() -> list:
    """Layouts of what may be said to the master by a member."""
    from pccl._core.wire import BY_OPCODE

    return [BY_OPCODE[opcode] for opcode in messages.TO_MASTER]


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    """A typing error in the variable must not run a test without its fault."""
    with pytest.raises(ValueError, match="point:count:action"):
        Fault("peer.Dial:once:kill")
    with pytest.raises(ValueError, match="kill, stop, delay"):
        Fault("peer.Dial:1:explode")

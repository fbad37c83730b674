"""The matrix of fault points: a peer meets each kind of fault at every action of its processes; the others continue.

The points are not listed here: they follow from the calls of a training process, the actions that its actor can
perform, the messages it can send, and the commands of its workers, so a new one is covered when it is added. A process
dies, stops, slows down, or has all of its connections closed, reset, half-closed or garbled. Connections of an actor
lead to the master and to peers in the handshake; those of a worker are links of the ring or of a transfer.

The suite takes each point once, with changing faults; `PCCL_TEST_MATRIX=all` takes all combinations, with tight bounds,
and expects that nothing else runs on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pccl import Attribute, Communicator, MasterNode
from pccl._core.protocol import mailbox, messages
from pccl._core.system.process import is_stopped
from pccl.actors.io.fault_points import ACTIONS, VARIABLE, Fault
from pccl.actors.peer import peer_actor, peer_fastpath

from .helpers import ROOT
from .take_part import OPTIONS, TIGHT, Member

COMMON = """
import sys
from pccl import Communicator, PCCLError
from tests.process.take_part import OPTIONS, Member
communicator = Communicator(sys.argv[1], int(sys.argv[2]), 2, options=OPTIONS)
member = Member(communicator)
"""

# A victim that takes part for a while, then leaves; its faults must not disturb the others. Every worker that it
# starts meets the fault again, so it gives up soon.
VICTIM = f"""{COMMON}
try:
    communicator.connect(n_attempts=1)
    for _ in range(4):
        member.take_part(attempts=2)
    communicator.close()
except PCCLError as error:
    print(type(error).__name__)
"""

# A second veteran.
SECOND = f"""{COMMON}
with communicator:
    communicator.connect()
    while True:
        member.take_part()
"""

CALLED = sorted(f"training.{name}" for name in vars(mailbox) if name.startswith("Call"))
PERFORMED = sorted(f"peer.{action.__name__}" for action in (*peer_fastpath.PERFORMED_HERE, *peer_actor._PERFORM))
SENT_NAMES = {"VoteTopology", "VotePending", "Wired", "Leave", "Initiate", "Finished", "VoteSync", "Fetched", "Tried"}
SENT = [f"peer.send.{name}" for name in sorted(SENT_NAMES)]
LANE = ["lane.Attach", "lane.Detach", "lane.MapSegment", "lane.send.frame", "lane.receive.frame"]
STATE = ["state.serve.answer", "state.fetch.FetchManifest", "state.fetch.FetchUnits", "state.fetch.manifest"]
STATE += ["state.fetch.unit"]
# Points that this victim never reaches: calls that end early, failures of others, and actions of its own end.
UNREACHED = {
    *("training.CallCancel", "training.CallAwait", "training.CallUnshare"),
    *("peer.KillLanes", "peer.Log", "peer.Tell", "peer.Stop", "peer.DropLink", "peer.AbortOperation"),
    *("peer.DropSource", "peer.AddSources", "peer.ServeFetched", "peer.SendSchema"),
    *("training.CallOptimize", "peer.BeginProbe", "peer.EndProbe"),  # test_optimize has a victim for these
    "training.CallThreads",  # it has one thread
    "training.CallFinish",  # test_finish has a victim for this one
}
POINTS = [point for point in (*CALLED, *PERFORMED, *SENT, *LANE, *STATE) if point not in UNREACHED]
ON_CONNECTIONS = ("close", "half-close", "reset", "garble")
# Seconds of a bystander's step; a stopped peer is lost after the heartbeat timeout. A worker that fetches is replaced
# three times, and every one of them meets the fault. In the suite they only say that no step waits for ever.
BOUND, KILL_BOUND, STATE_BOUND, VICTIM_BOUND = (3.0, 1.5, 8.0, 30.0) if TIGHT else (15.0, 10.0, 30.0, 60.0)


def matrix() -> dict[str, list[str]]:
    """Return the fault points by action. A training process has no connection to others."""
    whole = os.environ.get("PCCL_TEST_MATRIX") == "all"
    chosen: dict[str, list[str]] = {action: [] for action in ACTIONS}
    for row, point in enumerate(POINTS):
        possible = [action for action in ACTIONS if action not in ON_CONNECTIONS or not point.startswith("training.")]
        for action in possible if whole else [possible[row % len(possible)]]:
            chosen[action].append(point)
    return chosen


@pytest.fixture(scope="module")
def master():
    """Yield one master for all points; it must survive every one of them."""
    with MasterNode("127.0.0.1:0", options=OPTIONS) as node:
        yield node


@pytest.mark.timeout(1800 if TIGHT else 300)
@pytest.mark.parametrize("action", list(ACTIONS))
def test_others_go_on_whatever_happens_to_a_peer(master: MasterNode, action: str) -> None:
    """Two veterans keep calling while a victim meets its fault; their calls stay bounded and end in a world of two."""
    group = list(ACTIONS).index(action)  # a group of its own, because the state of the last one is gone
    with Communicator(master.address, group, 2, options=OPTIONS) as first:
        first.connect()
        member = Member(first, odd=True)
        command = [sys.executable, "-c", SECOND, master.address, str(group)]
        helper = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        try:
            first.wait_for_world_size(2, timeout=20)
            for point in matrix()[action]:
                _meet(first, member, [master.address, str(group)], point, action)
        finally:
            helper.kill()
            helper.communicate()


def _meet(first: Communicator, member: Member, where: list[str], point: str, action: str) -> None:
    """Run one victim to its end while the bystanders continue."""
    environment = {**os.environ, VARIABLE: f"{point}:1:{action}"}
    print(f"{time.monotonic():.3f} {point} {action}", file=sys.stderr, flush=True)  # where a call that hangs began
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, *where], env=environment, stdout=subprocess.PIPE, cwd=ROOT)
    bound = KILL_BOUND if action == "kill" else STATE_BOUND if point.startswith("state.") else BOUND
    deadline = time.monotonic() + VICTIM_BOUND
    stopped = action == "stop" and point.startswith("training.")
    try:
        while victim.poll() is None or first.get_attribute(Attribute.LOCAL_WORLD_SIZE) != 2:
            assert time.monotonic() < deadline, f"{point} {action}: the victim is still in the ring"
            begin = time.monotonic()
            member.take_part()
            waited = time.monotonic() - begin
            assert waited < bound, f"{point} {action}: a bystander waited {waited:.2f} s"
            if stopped and is_stopped(victim.pid) and first.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 2:
                break  # it stays stopped; it is enough that the others do not wait for it
    finally:
        victim.kill()
        output = victim.communicate()[0]
    # Without its fault this test would prove nothing. Only close() does not show that its actor died.
    if action == "kill" and point.startswith("peer.") and point not in {"peer.send.Leave", "peer.HangUp"}:
        assert b"MasterLostError" in output, f"{point} was never reached"
    if action == "kill" and point.startswith("training."):
        assert victim.returncode == -9, f"{point} was never reached"


def test_every_message_a_peer_sends_is_a_point() -> None:
    """The list above misses no message that a healthy peer sends to the master."""
    failures = {"Withdraw", "WireFailed", "EdgeLost", "Beat", "Awaiting", "WithdrawReduce", "Schema"}
    failures |= {"Threads"}  # the victim has one thread
    # No failures either, but test_optimize and test_finish have victims for these.
    failures |= {"VoteOptimize", "Probed", "VoteFinish"}
    sent = {message.cls.__name__ for message in messages_to_master()}

    assert {point.rsplit(".", 1)[1] for point in SENT} == sent - failures


def test_the_suite_takes_every_point_and_every_mishap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has every point and every fault, though not every combination; `all` has every combination."""
    sample = matrix()
    assert {point for points in sample.values() for point in points} == set(POINTS)
    assert all(sample.values())

    monkeypatch.setenv("PCCL_TEST_MATRIX", "all")
    assert matrix()["kill"] == POINTS
    assert sum(map(len, matrix().values())) > 200


def messages_to_master() -> list:
    """Return the message types that a member may send to the master."""
    from pccl._core.protocol.codec import BY_OPCODE

    return [BY_OPCODE[opcode] for opcode in messages.TO_MASTER]


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    """A misspelt fault in the variable must not run a test without its fault."""
    with pytest.raises(ValueError, match="point:count:action"):
        Fault("peer.Dial:once:kill")
    with pytest.raises(ValueError, match="kill, stop, delay"):
        Fault("peer.Dial:1:explode")

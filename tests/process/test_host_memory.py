"""Host reads: when peers on one host read each other's memory, what they map, and when they unmap it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pccl
from pccl import Communicator, MasterNode, ReduceOp
from pccl.memory.arena import default

from .helpers import (
    PREAMBLE,
    Peers,
    Script,
    actor_pid,
    children,
    eventually,
    everybody,
    peers_of,
    quick,
    running_master,
)

COUNT = 1 << 20  # float32: blocks of some hundred KB

# A member that reduces, and prints the result.
REDUCING = """
import numpy as np
import pccl
peer = join()
peer.wait_for_world_size(2, timeout=10)
tensor = pccl.empty(1 << 20)
for step in range(3):
    tensor[:] = peer.peer_id
    peer.all_reduce(tensor, tensor, op=ReduceOp.SUM)
    assert (tensor == tensor[0]).all()
say("sum", int(tensor[0]))
sys.stdin.readline()
"""


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


def borrowed(pid: int) -> set[str]:
    """Return the tensors of other peers that a process has mapped, by inode: shared memory that it may not write."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {fields[4] for fields in lines if fields[1] == "r--s" and "memfd:pccl" in fields[5]}


def receivers(peer: Communicator) -> list[int]:
    """The receiving workers of a member."""
    return list(children(actor_pid(peer), "pccl-recv").values())


def reduce_once(peers: Peers) -> None:
    """Reduce tensors in shared memory once, without staging, and check the sum on all members."""

    def reduce(member: Communicator, rank: int) -> np.ndarray:
        tensor = pccl.empty(COUNT)
        tensor[:] = rank + 1
        member.all_reduce(tensor, tensor, op=ReduceOp.SUM)
        return tensor

    for tensor in everybody(peers, reduce):
        assert (tensor == sum(range(1, len(peers) + 1))).all()


def test_neighbours_map_each_other_for_reading_only(master: MasterNode) -> None:
    with peers_of(master.address, 0, 0, 0) as peers:
        reduce_once(peers)
        for member in peers:
            (receiver,) = receivers(member)
            assert borrowed(receiver)
            assert not borrowed(actor_pid(member))


def test_whoever_does_not_want_it_neither_lends_nor_borrows(master: MasterNode) -> None:
    """Goal: one of three refuses host reads; its two edges use TCP, the third edge does not."""
    with peers_of(master.address, 0, 0) as peers:
        unwilling = peers.newcomer(options=quick(host_memory=False))
        peers.admit(unwilling)
        reduce_once(peers)
        reading = [member for member in peers if any(borrowed(pid) for pid in receivers(member))]
        assert len(reading) == 1
        assert unwilling not in reading


def test_memory_that_its_owner_gives_up_is_let_go(master: MasterNode) -> None:
    """Goal: a neighbour that never reduces again does not keep the memory of a tensor that its owner has freed."""
    with peers_of(master.address, 0, 0) as peers:
        reduce_once(peers)
        watched = [pid for member in peers for pid in receivers(member)]
        assert all(borrowed(pid) for pid in watched)
        default().trim()
        eventually(lambda: not any(borrowed(pid) for pid in watched), "neighbours unmap what was given up")
        reduce_once(peers)


def test_a_new_neighbour_is_borrowed_from_as_well(master: MasterNode) -> None:
    """Goal: after a member left, host reads work with the member that follows it in the ring."""
    with peers_of(master.address, 0, 0, 0) as peers:
        reduce_once(peers)
        peers.dismiss(peers[0])
        peers.update()
        reduce_once(peers)
        assert all(borrowed(pid) for member in peers for pid in receivers(member))


def reason_against() -> str:
    """Return why this user can make no process namespace; empty if it can. Only root may, as for `benchmarks.box`."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    outcome = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return outcome.stderr.strip() or "unshare fails" if outcome.returncode else ""


REASON = reason_against()


@pytest.mark.skipif(bool(REASON), reason=REASON or "there are process namespaces")
def test_peers_in_two_process_namespaces_use_tcp(master: MasterNode) -> None:
    """Goal: two containers with one network, as in a pod: a process id means another process in each."""
    inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c")
    code = PREAMBLE + textwrap.dedent(REDUCING)
    with Script(REDUCING, master.address) as outer, Script.command(*inside, code, master.address) as inner:
        assert outer.expect("sum") == inner.expect("sum")
        (receiver,) = children(children(outer.pid)["pccl-peer"], "pccl-recv").values()
        assert not borrowed(receiver)
        for script in (inner, outer):
            script.say()
        for script in (inner, outer):
            assert script.end() == 0

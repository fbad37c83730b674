"""Peers of one host read each other's memory, if they can and may; what that holds, and when it lets go."""

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

from .helpers import PREAMBLE, Crew, Script, actor_pid, children, crew_of, eventually, everybody, quick, running_master

COUNT = 1 << 20  # float32: blocks of some hundred KB

# A member that reduces, and says what it has got.
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
    """Tensors of others that a process has mapped: shared memory that it may not write, by inode."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {fields[4] for fields in lines if fields[1] == "r--s" and "memfd:pccl" in fields[5]}


def receivers(peer: Communicator) -> list[int]:
    """The receiving workers of a member."""
    return list(children(actor_pid(peer), "pccl-recv").values())


def reduce_once(crew: Crew) -> None:
    """One sum of tensors in shared memory, staged on nobody, that all agree on."""

    def reduce(member: Communicator, rank: int) -> np.ndarray:
        tensor = pccl.empty(COUNT)
        tensor[:] = rank + 1
        member.all_reduce(tensor, tensor, op=ReduceOp.SUM)
        return tensor

    for tensor in everybody(crew, reduce):
        assert (tensor == sum(range(1, len(crew) + 1))).all()


def test_neighbours_map_each_other_for_reading_only(master: MasterNode) -> None:
    with crew_of(master.address, 0, 0, 0) as crew:
        reduce_once(crew)
        for member in crew:
            (receiver,) = receivers(member)
            assert borrowed(receiver)
            assert not borrowed(actor_pid(member))


def test_whoever_does_not_want_it_neither_lends_nor_borrows(master: MasterNode) -> None:
    """Goal: one of three says no; the two edges that it has use TCP, the third does not."""
    with crew_of(master.address, 0, 0) as crew:
        unwilling = crew.newcomer(options=quick(host_memory=False))
        crew.admit(unwilling)
        reduce_once(crew)
        reading = [member for member in crew if any(borrowed(pid) for pid in receivers(member))]
        assert len(reading) == 1
        assert unwilling not in reading


def test_memory_that_its_owner_gives_up_is_let_go(master: MasterNode) -> None:
    """Goal: a neighbour that never reduces again does not keep gigabytes of a tensor that is gone."""
    with crew_of(master.address, 0, 0) as crew:
        reduce_once(crew)
        watched = [pid for member in crew for pid in receivers(member)]
        assert all(borrowed(pid) for pid in watched)
        default().trim()
        eventually(lambda: not any(borrowed(pid) for pid in watched), "neighbours unmap what was given up")
        reduce_once(crew)


def test_a_new_neighbour_is_borrowed_from_as_well(master: MasterNode) -> None:
    """Goal: what the one that left had mapped says nothing about the one that follows it in the ring."""
    with crew_of(master.address, 0, 0, 0) as crew:
        reduce_once(crew)
        crew.dismiss(crew[0])
        crew.update()
        reduce_once(crew)
        assert all(borrowed(pid) for member in crew for pid in receivers(member))


def reason_against() -> str:
    """Why this user can make no process namespace here; empty if it can. Only root may, as with networks in a box."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    outcome = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False
    )
    return outcome.stderr.strip() or "unshare fails" if outcome.returncode else ""


REASON = reason_against()


@pytest.mark.skipif(bool(REASON), reason=REASON or "there are process namespaces")
def test_peers_in_two_process_namespaces_use_tcp(master: MasterNode) -> None:
    """Goal: two containers with one network, as in a pod: numbers of processes mean something else in each."""
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

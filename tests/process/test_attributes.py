"""`get_attribute` after a collective: the numbers are those of that collective, also after a loss that nobody noticed.

A peer is killed while nobody calls. The master closes the ring by itself, so the next collective succeeds over fewer
peers; a program that sums and divides by LOCAL_WORLD_SIZE is right only if that number is the collective's own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from pccl import Attribute, Communicator, MasterNode, ReduceOp, SharedState, TensorInfo
from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status

from .helpers import QUICK, Crew, actor_pid, crew_of, eventually, running_master, together

ATTRIBUTES = (
    Attribute.GLOBAL_WORLD_SIZE,
    Attribute.LOCAL_WORLD_SIZE,
    Attribute.NUM_DISTINCT_PEER_GROUPS,
    Attribute.LARGEST_PEER_GROUP_WORLD_SIZE,
)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as running:
        yield running


def attributes(peer: Communicator) -> tuple[int, ...]:
    return tuple(peer.get_attribute(attribute) for attribute in ATTRIBUTES)


def lose(crew: Crew, master: MasterNode, victim: Communicator) -> None:
    """Kill a member's actor, and wait until the master has closed the rings without it. Nobody calls meanwhile."""
    group, members = victim._group, sum(peer._group == victim._group for peer in crew) - 1
    os.kill(actor_pid(victim), signal.SIGKILL)
    crew.remove(victim)
    victim.close()

    def closed() -> bool:
        groups = {one["group"]: one for one in query_status(*parse_address(master.address), QUICK)["groups"]}
        ring = groups.get(group, {"ring": [], "wiring": []})
        return len(ring["ring"]) == members and not ring["wiring"]

    eventually(closed, f"group {group} has a ring of {members}")


def reduce(peer: Communicator) -> int:
    """An all_reduce of ones: the sum is the world of that collective."""
    tensor = np.ones(1, np.float32)
    peer.all_reduce(tensor, tensor, op=ReduceOp.SUM)
    return int(tensor[0])


def test_a_reduce_after_a_loss_that_nobody_noticed_brings_its_own_numbers(master: MasterNode) -> None:
    """Goal: all four attributes are those of the collective that succeeded, on every member."""
    with crew_of(master.address, 0, 0, 0, 7) as crew:
        first, second, third, other = crew
        together(*(lambda peer=peer: reduce(peer) for peer in (first, second, third)))
        assert attributes(first) == (4, 3, 2, 3)

        lose(crew, master, third)
        assert attributes(first) == (4, 3, 2, 3), "nobody called, so nobody was told"
        sums = together(lambda: reduce(first), lambda: reduce(second))
        assert sums == [2, 2]
        assert [attributes(first), attributes(second)] == [(3, 2, 2, 2)] * 2

        # A loss in another group changes no ring of this one, but three of its numbers.
        lose(crew, master, other)
        together(lambda: reduce(first), lambda: reduce(second))
        assert [attributes(first), attributes(second)] == [(2, 2, 1, 2)] * 2


def test_a_sync_after_a_loss_that_nobody_noticed_brings_its_own_numbers(master: MasterNode) -> None:
    """Goal: sync_shared_state is a collective too; a world of one is counted by it as well."""

    def sync(peer: Communicator) -> None:
        peer.sync_shared_state(SharedState([TensorInfo.from_numpy(np.ones(8, np.float32), "weights")]))

    with crew_of(master.address, 0, 0, 0) as crew:
        first, second, third = crew
        lose(crew, master, third)
        together(lambda: sync(first), lambda: sync(second))
        assert [attributes(first), attributes(second)] == [(2, 2, 1, 2)] * 2
        lose(crew, master, second)
        sync(first)
        assert attributes(first) == (1, 1, 1, 1)

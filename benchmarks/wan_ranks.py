"""The work of a rank of `wan`: it reduces over links with a delay, after an idle time and at once.

Every contender reduces twice in a round. The first reduce follows an idle time, as in training, where computing lies
between two reduces: after a round trip and 200 ms a kernel may reset a window, and a window grows by round trips. The
second reduce follows at once and finds the connections warm. Contenders take turns, so all of them see the same
machine.

Rank 0 also runs the masters, one for each size of pool, so its votes have a short delay and those of others a long one.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import pccl
from pccl import Communicator, MasterNode, ReduceOp

from .ranks import Meeting, fill, say, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]
    Times = dict[str, list[tuple[int, int]]]

STRIPED = "striped"  # one reduce over all connections of the pool
AT_ONCE = "at once"  # the same bytes as many reduces, one for each connection
GLOO = "gloo"

CONNECT_ATTEMPTS = 30  # a second apart: the other rank may still import torch
CONNECT_SECONDS = 60


class Contender(NamedTuple):
    """A way to reduce a tensor in place."""

    name: str
    tensor: Array
    call: Callable[[], object]


def be_rank(plan: dict[str, Any]) -> None:
    """Run one rank; print the starts and ends of every contender, first those after idleness, then the warm ones."""
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with ExitStack() as stack:
        pools = _pools(plan, stack)
        contenders = _contenders(plan, pools)
        idle: Times = {contender.name: [] for contender in contenders}
        warm: Times = {contender.name: [] for contender in contenders}
        for number in range(-plan["warm_ups"], plan["rounds"]):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                times = _round(meeting, contender, number, plan["idle_seconds"])
                if number >= 0:
                    idle[contender.name].append(times[0])
                    warm[contender.name].append(times[1])
        say({"idle": idle, "warm": warm})
        meeting.meet()  # no rank leaves while another still reduces


def _pools(plan: dict[str, Any], stack: ExitStack) -> dict[int, Communicator]:
    """Return a communicator for each size of pool that a contender needs."""
    found = {}
    sizes = sorted({lanes for _, kind, lanes in plan["contenders"] if kind != GLOO})
    for port, lanes in enumerate(sizes, plan["port"] + 1):
        address = f"{plan['master_host']}:{port}"
        if plan["rank"] == 0:
            stack.enter_context(MasterNode(address))
        communicator = stack.enter_context(Communicator(address, 0, lanes))
        communicator.connect(CONNECT_ATTEMPTS)
        communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        found[lanes] = communicator
    return found


def _contenders(plan: dict[str, Any], pools: dict[int, Communicator]) -> list[Contender]:
    shared = pccl.zeros(plan["bytes"] // 4)
    found = []
    for name, kind, lanes in plan["contenders"]:
        if kind == GLOO:
            found.append(_gloo(name, plan))
        else:
            reduce = _striped if kind == STRIPED else _at_once
            found.append(Contender(name, shared, reduce(pools[lanes], shared, lanes)))
    return found


def _striped(pool: Communicator, tensor: Array, _lanes: int) -> Callable[[], object]:
    return lambda: pool.all_reduce(tensor, tensor, op=ReduceOp.SUM)


def _at_once(pool: Communicator, tensor: Array, lanes: int) -> Callable[[], object]:
    parts = np.array_split(tensor, lanes)

    def reduce() -> None:
        handles = [pool.all_reduce_async(part, part, op=ReduceOp.SUM, tag=tag) for tag, part in enumerate(parts)]
        assert all(handle.wait()[0] for handle in handles)

    return reduce


def _gloo(name: str, plan: dict[str, Any]) -> Contender:
    """Return Gloo with its defaults: one connection to each other rank, the congestion control of the system."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)  # threads that spin after their work would take cores from the next contender
    store = f"tcp://{plan['master_host']}:{plan['port']}"
    distributed.init_process_group("gloo", init_method=store, rank=plan["rank"], world_size=plan["world"])
    tensor = torch.zeros(plan["bytes"] // 4)
    return Contender(name, tensor.numpy(), lambda: distributed.all_reduce(tensor))


def _round(
    meeting: Meeting, contender: Contender, number: int, idle_seconds: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Make both reduces and check the result; return their starts and ends."""
    fill(contender.tensor, meeting.rank, number)
    meeting.meet()
    time.sleep(idle_seconds)
    idle = meeting.timed(contender.call)
    warm = meeting.timed(contender.call)
    # All ranks gave the first sum to the second reduce. Dividing by a small number of ranks is exact where the sum is.
    np.divide(contender.tensor, np.float32(meeting.world), out=contender.tensor)
    verify(contender.tensor, meeting.world, number, contender.name)
    return idle, warm

"""The contenders of `all_reduce`, and the work of a rank: one process holds the groups of Gloo and our communicator.

Gloo takes part twice. Its first group is Gloo with its defaults: its sockets have the system's congestion control. Our
sockets choose their own, and a pacing default such as bbr costs half the throughput of loopback, so a part of any lead
is that choice. The second group shows the rest: after it has connected, its sockets get the congestion control that
ours chose. That needs neither root nor a network namespace (in which only unprivileged congestion controls can be the
default), and both groups run in the same rounds.

pccl takes part three times. Ranks of one host read blocks from each other's memory, as peers of one host do in a run;
users see this, but it is not a network. The contenders called TCP have it switched off, so that every byte goes through
the sockets, as with Gloo. Between hosts pccl also sends a checksum with every block, which Gloo does not, and leaves
the size of buffers to the system; the checked contender does this, because its ranks have addresses that make them
treat each other as different hosts.

The order of contenders is random in every round. In a fixed order a contender would always follow the same one, and the
first one whose processes wake up pays for it: a fifth at 400 KiB between two ranks.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

import pccl.torch
from pccl import Communicator, Options, ReduceOp
from pccl.actors.workers.lane_worker import LOCAL_CONGESTION

from .ranks import Meeting, fill, say, verify, verify_untouched

if TYPE_CHECKING:
    from collections.abc import Callable

GLOO = "gloo"
GLOO_ALIKE = "gloo alike"  # with the congestion control of our sockets
ZERO_COPY = "zero-copy"
STAGED = "staged"
OUT_OF_PLACE = "out of place"
TCP_ZERO_COPY = "tcp zero-copy"
TCP_STAGED = "tcp staged"
TCP_CHECKED = "tcp checked"  # zero-copy, with checksums

# Default, through TCP, and through TCP with checksums.
WAYS = (Options(), Options(host_memory=False), Options(advertise="127.0.0.2"))

WARM_UPS = 3  # rounds before those that count: pages, buffers, congestion windows
ROUNDS_MIN = 11  # medians of five differed by a fifth from run to run
ROUNDS_MAX = 300  # enough for any quartile; bounds the time of small sizes
CONNECT_SECONDS = 120  # for the slowest of many ranks to import torch on few cores


class Contender(NamedTuple):
    """A way to reduce, and the tensors that it reads and writes: the same tensor if in place."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    call: Callable[[], object]


def be_rank(plan: dict[str, Any]) -> None:
    """Run one rank: print how it is connected, then for each size the starts and ends of every contender."""
    # Threads of torch that spin after filling a tensor would take cores from the next contender.
    torch.set_num_threads(1)
    meeting = Meeting(plan["page"], plan["rank"], plan["world"])
    with ExitStack() as stack:
        communicators: list[Communicator] = []
        for address, options in zip(plan["addresses"], WAYS, strict=True):
            communicator = Communicator(address, 0, plan["pool"], options=options)
            communicators.append(stack.enter_context(communicator))
            communicator.connect()
            communicator.wait_for_world_size(plan["world"], timeout=CONNECT_SECONDS)
        store = f"tcp://127.0.0.1:{plan['port']}"
        distributed.init_process_group("gloo", init_method=store, rank=plan["rank"], world_size=plan["world"])
        distributed.all_reduce(torch.ones(1))
        alike, control = _group_alike()
        say({"control": control})
        for nbytes in plan["sizes"]:
            contenders = _contenders(communicators, alike, nbytes // 4)
            say(_measure(meeting, contenders, plan["rounds"], plan["seconds"]))
            del contenders  # before the next size takes memory
        meeting.meet()  # no rank leaves while another still reduces
        distributed.destroy_process_group()


def _contenders(
    communicators: list[Communicator], alike: distributed.ProcessGroup | None, count: int
) -> list[Contender]:
    ours, tcp, checked = communicators
    ordinary = torch.zeros(count)
    shared = pccl.torch.zeros(count)
    target = pccl.torch.zeros(count)

    def reduce(communicator: Communicator, send: torch.Tensor, recv: torch.Tensor) -> Callable[[], object]:
        return lambda: communicator.all_reduce(send, recv, op=ReduceOp.SUM)

    contenders = [
        Contender(GLOO, ordinary, ordinary, lambda: distributed.all_reduce(ordinary)),
        Contender(GLOO_ALIKE, ordinary, ordinary, lambda: distributed.all_reduce(ordinary, group=alike)),
        Contender(ZERO_COPY, shared, shared, reduce(ours, shared, shared)),
        Contender(STAGED, ordinary, ordinary, reduce(ours, ordinary, ordinary)),
        Contender(OUT_OF_PLACE, shared, target, reduce(ours, shared, target)),
        Contender(TCP_ZERO_COPY, shared, shared, reduce(tcp, shared, shared)),
        Contender(TCP_STAGED, ordinary, ordinary, reduce(tcp, ordinary, ordinary)),
        Contender(TCP_CHECKED, shared, shared, reduce(checked, shared, shared)),
    ]
    return [contender for contender in contenders if alike is not None or contender.name != GLOO_ALIKE]


def _measure(
    meeting: Meeting, contenders: list[Contender], rounds: int, seconds: float
) -> dict[str, list[tuple[int, int]]]:
    """Starts and ends of all rounds that count; 0 rounds means as many as fit into the seconds."""
    spent_ns = 0
    for salt in range(WARM_UPS):
        times = [_round(meeting, contender, salt) for contender in contenders]
        spent_ns = sum(end - start for start, end in times)
    if not rounds:
        fitting = int(seconds * 1e9 * len(contenders) / spent_ns)
        rounds = meeting.agree(min(max(fitting, ROUNDS_MIN), ROUNDS_MAX))
    report: dict[str, list[tuple[int, int]]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        order = Random(number).sample(contenders, len(contenders))  # the same on all ranks
        for contender in order:
            report[contender.name].append(_round(meeting, contender, WARM_UPS + number))
    return report


def _round(meeting: Meeting, contender: Contender, salt: int) -> tuple[int, int]:
    """Fill, reduce together, check; only the reduce is timed."""
    fill(contender.source.numpy(), meeting.rank, salt)
    times = meeting.timed(contender.call)
    verify(contender.target.numpy(), meeting.world, salt, contender.name)
    if contender.source is not contender.target:
        verify_untouched(contender.source.numpy(), meeting.rank, salt, contender.name)
    return times


# --- One congestion control -------------------------------------------------


def _group_alike() -> tuple[distributed.ProcessGroup | None, str]:
    """A second group whose sockets have the control that ours choose, and its name; no group if none is allowed."""
    before = _sockets()
    group = distributed.new_group(backend="gloo")
    distributed.all_reduce(torch.ones(1), group=group)  # connects what is connected on first use
    fresh = _sockets() - before
    for name in LOCAL_CONGESTION:
        if all(_set_control(fd, name) for fd in fresh):
            return group, name.decode()
    return None, ""


def _sockets() -> set[int]:
    """Descriptors of this process that are TCP sockets."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(int(entry)).st_mode):
                found.add(int(entry))
        except OSError:
            continue  # the descriptor by which we read the directory
    return {fd for fd in found if _family(fd) in (socket.AF_INET, socket.AF_INET6)}


def _family(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as copy:
        return copy.family


def _set_control(fd: int, name: bytes) -> bool:
    with socket.socket(fileno=os.dup(fd)) as copy:
        try:
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            return False
    return True

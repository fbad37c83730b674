"""A bad newcomer: a process that asks to join the run with one mistake, and ends when it is refused.

It does what users do by mistake: it shows an address that nobody can dial, belongs to another run, makes another call
than the members, or reduces another number of elements. Its exit status says how that ended; its log says why.

A peer that makes another call is the odd one out only among several: in a small group a newcomer leaves instead. It
reports no steps, so the laws of members do not hold for it, and it takes part in no reduce that succeeds.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

import pccl
from pccl import (
    Attribute,
    Communicator,
    KickedError,
    MasterConnectionError,
    Options,
    PCCLError,
    PeerLostError,
    Result,
    TooFewPeersError,
    UsageError,
)
from pccl._core.records import replace

from .arithmetic import draw_operations
from .faults import FaultKind
from .records import REFUSED, SPARED, UNTOLD
from .state_loop import StateLoop
from .step_log import CONNECT_ATTEMPTS, StepLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .records import Task

# Members of its group that must be there: if one has just been stopped and one dies meanwhile, two are a majority.
OTHERS_MIN = 4
OTHER_RUN = "another-run"  # its PCCL_RUN
FILLERS = 3  # connections that fill the queue of a port on which nobody accepts, so that it ignores the next ones
LINGER = 3.0  # seconds that an accepted newcomer waits for its refusal


def be(task: Task) -> int:
    """Make the mistake of the task. Returns the exit status."""
    kind = FaultKind(task.mistake)
    options = Options.decode(task.options)
    with wrong_way(kind, options) as wrong:
        peer = Communicator(task.address, task.group, task.lanes, options=wrong)
        try:
            status = _join(peer, kind, task)
        finally:
            peer.close()
    return status


def _join(peer: Communicator, kind: FaultKind, task: Task) -> int:
    act = ACTS.get(kind)
    try:
        peer.connect(CONNECT_ATTEMPTS)
        if act is None:
            time.sleep(LINGER)
            print(f"{kind}: was accepted", flush=True)
            return UNTOLD
        if peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) <= OTHERS_MIN:
            return SPARED
        act(peer, task)
    except PCCLError as error:
        if isinstance(error, (PeerLostError, TooFewPeersError)) or error.result is Result.NO_SHARED_STATE_AVAILABLE:
            print(f"{kind}: came to nothing: {error}", flush=True)
            return SPARED
        print(f"{kind}: {type(error).__name__}: {error}", flush=True)
        return REFUSED if is_refusal(kind, error) else UNTOLD
    print(f"{kind}: was accepted", flush=True)
    return UNTOLD


def is_refusal(kind: FaultKind, error: PCCLError) -> bool:
    """Whether this error is meant for a newcomer with this mistake."""
    if kind is FaultKind.NEWCOMER_STRANGER:  # it never registers, so it may be refused without a kick
        return isinstance(error, (KickedError, MasterConnectionError, UsageError))
    return isinstance(error, KickedError)


@contextmanager
def wrong_way(kind: FaultKind, options: Options) -> Iterator[Options]:
    """The options of a newcomer, with an address that cannot be dialled or the name of another run if so planned."""
    with socket.socket() as port:
        if kind in ADDRESSES:
            port.bind(("127.0.0.1", 0))
            options = replace(options, advertise=f"127.0.0.1:{port.getsockname()[1]}")
        if kind is FaultKind.NEWCOMER_SILENT:
            port.listen(0)
        elif kind is FaultKind.NEWCOMER_STRANGER:
            os.environ["PCCL_RUN"] = OTHER_RUN
        fillers = [_filler(port) for _ in range(FILLERS if kind is FaultKind.NEWCOMER_SILENT else 0)]
        yield options
        for filler in fillers:
            filler.close()


def _filler(port: socket.socket) -> socket.socket:
    filler = socket.socket()
    filler.setblocking(False)
    filler.connect_ex(port.getsockname())
    return filler


def _sync_another(peer: Communicator, task: Task) -> None:
    """Sync a state of another shape."""
    tensor = np.zeros(task.places + 1, np.int64)
    peer.sync_shared_state(pccl.SharedState([pccl.TensorInfo.from_numpy(tensor, "weights")]))


def _reduce_another(peer: Communicator, task: Task) -> None:
    """Sync as all do, and then reduce one element more than the members do."""
    number = peer.topology_round
    with open(os.devnull, "wb") as nowhere:
        StateLoop(task, StepLog(nowhere.fileno(), task)).sync(peer, number)
    operation = draw_operations(task.run_seed, task.group, number, task.places)[0]
    tensor = np.zeros(operation.count + 1, operation.dtype)
    peer.all_reduce(tensor, tensor, op=pccl.ReduceOp.SUM, tag=operation.tag)


def _call_another(peer: Communicator, task: Task) -> None:
    """Reduce where the members sync."""
    tensor = np.zeros(task.places, np.float32)
    peer.all_reduce(tensor, tensor, op=pccl.ReduceOp.SUM, tag=1)


ADDRESSES = frozenset({FaultKind.NEWCOMER_DEAF, FaultKind.NEWCOMER_SILENT})
ACTS: dict[FaultKind, Callable[[Communicator, Task], None]] = {
    FaultKind.NEWCOMER_STATE: _sync_another,
    FaultKind.NEWCOMER_SHAPE: _reduce_another,
    FaultKind.NEWCOMER_CALL: _call_another,
}

"""What the examples share and what belongs to none of their algorithms: arguments, a task, checkpoints, digests.

The examples decide what is reduced and when; this file only repeats a reduce or a membership that was disturbed. The
task is made from a seed, so there is nothing to download. The batch of a step depends only on the step and on the peer,
so a resumed run continues as if it had not ended.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pccl import Attribute, Communicator, ReduceInfo, ReduceOp, SharedState, SharedStateSyncInfo, TensorInfo
from pccl.errors import MasterLostError, PeerLostError, RunFinishedError, TooFewPeersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor

REJOINS_MAX = 10  # memberships that may end without a fault of this process before it gives up
FEATURES, HIDDEN, NOISE = 8, 32, 0.1


# ---------------------------------------------------------------------------------------------- the command line


def parser(description: str | None, *, steps: int) -> argparse.ArgumentParser:
    """The flags that all examples have; the first paragraph of a file's docstring is its help."""
    flags = argparse.ArgumentParser(
        description=(description or "").split("\n\n")[0],
        epilog="Start `pccl run-master` in one terminal and this in two or more others. Kill any of them, start more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("address", nargs="?", default="127.0.0.1:48148", metavar="HOST:PORT", help="of the master")
    for name, kind, default, unit, text in (
        ("--steps", int, steps, "N", "(outer) steps that the whole run makes"),
        ("--min-peers", int, 2, "N", "pause while there are fewer peers"),
        ("--wait", float, 300.0, "SECONDS", "how long such a pause may last"),
        ("--pool", int, 1, "N", "connections to each neighbour"),
        ("--optimize-every", int, 0, "N", "steps between two searches for a better ring; 0: never"),
        ("--seed", int, 0, "N", "of the task and of the first parameters; the same everywhere"),
        ("--checkpoint", Path, None, "FILE", "resume from this file, and keep it up to date; one for each peer"),
        ("--pace", float, 0.0, "SECONDS", "sleep so long in each step, to have time for killing peers"),
    ):
        flags.add_argument(name, type=kind, default=default, metavar=unit, help=text)
    alone = "train in this process only, with the samples of --min-peers peers, to compare with"
    flags.add_argument("--alone", action="store_true", help=alone)
    return flags


def batch_size(arguments: argparse.Namespace, one: int = 32) -> int:
    """The number of samples of a peer in a step; a process that trains alone uses those of all peers."""
    return one * (arguments.min_peers if arguments.alone else 1)


def say(*words: object) -> None:
    """Print a line at once, also into a pipe."""
    print(*words, flush=True)


# ---------------------------------------------------------------------------------------------- taking part


class Alone:
    """Replaces a communicator in a run of one process."""

    peer_id = 0

    def wait_for_world_size(self, *_: object, **__: object) -> int:
        """One peer is enough."""
        return 1

    def get_attribute(self, _: Attribute) -> int:
        """One peer, in one group."""
        return 1

    def update_topology(self) -> None:
        """No peer waits."""

    def finish(self) -> None:
        """No peer waits, and none will come."""

    def are_peers_pending(self) -> bool:
        """No peer waits."""
        return False

    def sync_shared_state(self, *_: object) -> SharedStateSyncInfo:
        """No peer differs."""
        return SharedStateSyncInfo(0, 0)

    def all_reduce(self, *_: object, **__: object) -> ReduceInfo:
        """The average of one."""
        return ReduceInfo(1, 0, 0)

    def all_reduce_multiple_with_retry(self, *_: object, **__: object) -> ReduceInfo:
        """The average of one."""
        return ReduceInfo(1, 0, 0)

    def all_reduce_async(self, *_: object, **__: object) -> Alone:
        """The average of one, at once."""
        return self

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """The end of that reduce."""
        return True, 0, ReduceInfo(1, 0, 0)


def take_part(arguments: argparse.Namespace, train: Callable[[Any], None]) -> None:
    """Train as a member of the run; join again as a newcomer if the membership ends without a fault of this process.

    That happens when the master was restarted, and when every peer that had the state died while it sent the state. (In
    the second case a sync may also be called again; a new membership handles both cases alike.)

    In the end all members finish the run. A peer that is started again after that hears so when it connects, and ends
    with success, instead of waiting for peers that never come.
    """
    trained = False
    for attempt in range(REJOINS_MAX):
        try:
            with _membership(arguments) as comm:
                if not arguments.alone:
                    say("waiting to join")
                    comm.connect(n_attempts=30)
                train(comm)
                trained = True
                comm.finish()
                return
        except RunFinishedError as error:
            if trained:
                return  # the master was lost while it answered
            say(f"too late: {error.message}")
            raise SystemExit(0) from None
        except (MasterLostError, PeerLostError) as error:
            if attempt + 1 == REJOINS_MAX:
                raise
            say(f"out of the run, joining again: {error}")


def _membership(arguments: argparse.Namespace) -> AbstractContextManager[Any]:
    if arguments.alone:
        return nullcontext(Alone())
    return Communicator(arguments.address, p2p_connection_pool_size=arguments.pool)


def average(comm: Any, tensor: Tensor) -> ReduceInfo | None:
    """Average this tensor over the peers, in place. Returns None if no other peer is left."""
    while True:
        try:
            info: ReduceInfo = comm.all_reduce(tensor, tensor, op=ReduceOp.AVG)
            return info
        except PeerLostError as error:
            say(f"retry: {error.message}")  # the tensor is as it was, and the ring is closed again
        except TooFewPeersError:
            return None


def after_sync(arguments: argparse.Namespace, comm: Any, state: SharedState, tensors: dict[str, Tensor]) -> None:
    """After a sync, when all peers hold the same state: write a checkpoint, and sometimes look for a better ring."""
    if arguments.checkpoint:
        save(arguments.checkpoint, state.revision, tensors)
    if arguments.optimize_every and state.revision and state.revision % arguments.optimize_every == 0:
        comm.optimize_topology()


# ---------------------------------------------------------------------------------------------- state


def named(prefix: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Names for tensors that have none, in their order."""
    return {f"{prefix}.{index}": tensor for index, tensor in enumerate(tensors)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The state of an optimizer that has not made a step yet, all zero.

    torch creates it in the first step, which is too late for a newcomer that is to receive it. So this makes a step
    that changes nothing: with gradients and a learning rate of zero.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [value.zero_() for value in found if isinstance(value, torch.Tensor)]


def shared_state(tensors: dict[str, Tensor], checkpoint: Path | None) -> SharedState:
    """A shared state of these tensors, with the content and revision of a checkpoint if there is one."""
    state = SharedState([TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()])
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved["tensors"][name])
        state.revision = saved["revision"]
        say(f"resumed revision {state.revision} from {checkpoint}")
    return state


def save(checkpoint: Path, revision: int, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint atomically: a process that is killed here keeps the previous one."""
    draft = checkpoint.with_suffix(f".{os.getpid()}")
    torch.save({"revision": revision, "tensors": {name: tensor.detach() for name, tensor in tensors.items()}}, draft)
    draft.replace(checkpoint)


def digest(tensors: Iterable[Tensor]) -> str:
    """A digest of these tensors: peers that print the same digest hold the same bits."""
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


# ---------------------------------------------------------------------------------------------- the task


class Regression:
    """Learn a function from noisy samples: every peer draws its own, from the same population."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(arguments.seed)
        self._seed = arguments.seed
        self._batch_size = batch_size(arguments)
        self._first = torch.randn(FEATURES, HIDDEN, generator=generator) / FEATURES**0.5
        self._second = torch.randn(HIDDEN, 1, generator=generator) / HIDDEN**0.5
        self._held_out = self._draw(generator, 1024)

    def batch(self, step: int, peer: int) -> tuple[Tensor, Tensor]:
        """The samples of this peer in this step; they differ from those of every other peer and step."""
        return self._draw(generator_of(self._seed, step, peer), self._batch_size)

    def held_out_loss(self, model: nn.Module) -> float:
        """The loss of a model on samples that no peer trains with."""
        with torch.no_grad():
            return float(loss_of(model, self._held_out))

    def _draw(self, generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, FEATURES, generator=generator)
        noise = NOISE * torch.randn(size, 1, generator=generator)
        return inputs, torch.tanh(inputs @ self._first) @ self._second + noise


def generator_of(seed: int, step: int, peer: int) -> torch.Generator:
    """A random generator for one step of one peer."""
    name = hashlib.blake2b(f"{seed} {step} {peer}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(name, "little"))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error; no less than the noise in the samples, squared."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def small_model(seed: int) -> nn.Module:
    """Two layers, the same on every peer that has this seed."""
    torch.set_num_threads(1)  # peers of one machine share its cores, and the model is too small for two
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

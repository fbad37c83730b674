"""The check of an installed pccl in an environment that has only pccl, its dependencies and numpy.

Run as a file by the interpreter of that environment: `python -I tests/process/installed_package.py`. It imports every
module of the package, and two peers reduce a tensor over a master on loopback. The distribution test runs it, and so
does the release workflow for each wheel; hence it imports nothing from this repository.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import pccl

# Packages that some modules need and the environment lacks on purpose.
ABSENT = {"matplotlib", "torch"}
# Modules that are programs: importing them would run them.
PROGRAMS = "__main__"

NUMEL = 100_000
TIMEOUT_SECONDS = 60.0


def import_everything() -> int:
    """Import each module of the package from the environment and return how many there are."""
    home = Path(sys.prefix).resolve()
    count = 0
    for found in pkgutil.walk_packages(pccl.__path__, "pccl."):
        if found.name.endswith(PROGRAMS):
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ABSENT:
                raise
            continue
        origin = Path(str(module.__file__)).resolve()
        assert origin.is_relative_to(home), f"{found.name} comes from {origin}, not from {home}"
        count += 1
    return count


def reduce_as(number: int, address: str) -> None:
    """Take part as one of two peers and check the sum."""
    tensor = np.full(NUMEL, float(number), np.float32)
    with pccl.Communicator(address) as communicator:
        communicator.connect()
        communicator.wait_for_world_size(2, timeout=TIMEOUT_SECONDS)
        communicator.all_reduce(tensor, tensor, op=pccl.ReduceOp.SUM)
    assert (tensor == 3.0).all(), tensor


def reduce_with_two_peers() -> None:
    """Start a master and two peers, each a process of its own, and wait for both."""
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    peers: list[subprocess.Popen[bytes]] = []
    try:
        peers.extend(subprocess.Popen([sys.executable, "-I", __file__, n, master.address]) for n in ("1", "2"))
        codes = [peer.wait(TIMEOUT_SECONDS) for peer in peers]
        assert codes == [0, 0], f"the peers ended with {codes}"
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
        master.interrupt()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        reduce_as(int(sys.argv[1]), sys.argv[2])
    else:
        modules = import_everything()
        reduce_with_two_peers()
        print(f"pccl {pccl.__version__}: {modules} modules imported, two peers reduced {NUMEL} numbers")

"""Links with long round trips: an operation that the in-flight budget holds back does not delay other operations."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from benchmarks.box import Box, Link, mesh, reason_against

from .helpers import BOUND, ROOT

# Namespaces and TUN devices need root. Without them these tests are skipped, and the reason says what is missing.
pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "there is a box")

# 20 Mbit/s and 40 ms carry 100 KB in a round trip. 12 MB take five seconds; every socket would accept more of it.
LINK = Link(rate_bits=20e6, delay_s=0.020)
LANES = 4

PEER = """
    import sys
    import numpy as np
    import pccl
    from pccl import Communicator, MasterNode, ReduceOp

    rank, address, lanes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    master = MasterNode(address) if rank == 0 else None
    if master is not None:
        master.run()
    with Communicator(address, 0, lanes) as communicator:
        communicator.connect(30)
        communicator.wait_for_world_size(2, timeout=30)
        large = pccl.zeros(3_000_000)
        large[:] = rank + 1
        communicator.all_reduce(large[:500_000], large[:500_000], op=ReduceOp.SUM)  # so that the link is known
        assert np.all(large[:500_000] == 3)
        large[:] = rank + 1
        handle = communicator.all_reduce_async(large, large, op=ReduceOp.SUM, tag=1)
        for number in range(10):
            small = np.full(1, rank + number, np.float32)
            communicator.all_reduce(small, small, op=ReduceOp.SUM, tag=2)
            assert small[0] == 2 * number + 1
        print("large is done" if handle.done() else "small went ahead", flush=True)
        assert handle.wait()[0]
        assert np.all(large == 3)
        print("all is right", flush=True)
    if master is not None:
        master.interrupt()
"""


def test_small_operations_do_not_wait_behind_a_large_one_that_is_held_back() -> None:
    """Goal: ten small reduces, of two round trips each, finish before the large one, and all sums are right."""
    with Box(mesh(2, LINK)) as box:
        address = f"{box.address(0)}:47100"
        peers = [
            box.spawn(
                rank,
                [sys.executable, "-c", textwrap.dedent(PEER), str(rank), address, str(LANES)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(2)
        ]
        said = [peer.communicate(timeout=BOUND)[0].splitlines() for peer in peers]

    assert said == [["small went ahead", "all is right"]] * 2

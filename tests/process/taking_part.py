"""What a member does over and over in tests of mishaps: ask for newcomers, hold a round, reduce.

Newcomers begin with the reduce, because that is what members do after the round that admitted them. Imported by scripts
that are started by the dozen, so it needs little.
"""

from __future__ import annotations

import pccl
from pccl import Communicator, Options, ReduceOp
from pccl.errors import PeerLostError

OPTIONS = Options(heartbeat_interval=0.1, heartbeat_timeout=1.0, stall_timeout=0.5, check=True)
COUNT = 1 << 18  # elements: several blocks for each of two lanes


def reduce(communicator: Communicator, attempts: int = 1 << 30) -> None:
    """One reduce of all members, in place, with the survivors if one is lost."""
    array = pccl.empty(COUNT)
    array[:] = 1.0
    while True:
        try:
            world = communicator.all_reduce(array, array, op=ReduceOp.SUM).local_world_size
        except PeerLostError:
            assert array.min() == array.max() == 1.0, "not restored"
            attempts -= 1
            if attempts == 0:
                raise
        else:
            assert array.min() == array.max() == world, "not the sum"
            return


def take_part(communicator: Communicator, attempts: int = 1 << 30) -> None:
    """One step."""
    communicator.are_peers_pending()
    communicator.update_topology()
    reduce(communicator, attempts)

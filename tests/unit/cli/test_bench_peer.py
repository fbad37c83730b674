"""The measurement of `pccl bench`: what it says when the world changes."""

from __future__ import annotations

from typing import Any, cast

from pccl.cli.bench_peer import Bench, BenchPlan

from pccl import Attribute, Communicator, ReduceInfo


class ShrinkingRun:
    """Stands in for a communicator: a peer dies before the reduce with this number, while no call is under way."""

    def __init__(self, death: int) -> None:
        self.world = 3
        self.reduces = 0
        self.death = death

    def all_reduce(self, send: Any, recv: Any, **_: Any) -> ReduceInfo:
        self.reduces += 1
        if self.reduces == self.death:
            self.world = 2
        if self.reduces == self.death + 5 and send.size == 5:
            recv[2] = 1e9  # all members agree that the time is over
        return ReduceInfo(self.world, 1, 1)

    def update_topology(self) -> None:
        pass

    def get_attribute(self, attribute: Attribute) -> int:
        assert attribute is Attribute.LOCAL_WORLD_SIZE
        return self.world


def test_a_peer_that_is_lost_between_two_reduces_is_reported_once() -> None:
    """Goal: the next reduce succeeds with the others and raises nothing, and still a line says that a peer is gone."""
    for death in (2, 3, 4, 5, 6, 7):
        lines: list[str] = []
        run = ShrinkingRun(death)
        plan = BenchPlan(peers=3, nbytes=4, seconds=0.2, dtype="float32", patience=1.0)
        Bench(cast(Communicator, run), plan, lambda *_: None, lines.append).run()

        assert lines == ["1 peer was lost between two reduces; 2 peers continue"], death

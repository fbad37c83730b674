"""The world's numbers that members are told: once after a change, before the next collective."""

from __future__ import annotations

from pccl._core.master.events import SendTo
from pccl._core.protocol import messages as m
from pccl._core.protocol.operations import pack_pairs

from .master_harness import LOST, failures, lose, of, sent


def test_a_changed_world_is_told_ahead_of_the_next_collective() -> None:
    """Goal: after a loss outside any call, every survivor gets the new numbers once, before the next collective."""
    harness = of(1, 2, 3)
    lose(harness, 3)
    epoch = harness.state.members.groups[0].epoch
    world = m.World(epoch, 2, 2, 1, 2, harness.state.members.round)

    harness.reduce(1, 5)
    order = m.Commence(epoch, pack_pairs([(5, 1)]))
    assert harness.reduce(2, 5) == [SendTo(peer, message) for peer in (1, 2) for message in (world, order)]
    for peer in (1, 2):
        harness.say(peer, m.Finished(1, True, ""))
    harness.reduce(1, 5)
    assert not sent(harness.reduce(2, 5), m.World)


def test_a_loss_in_another_group_changes_the_numbers_of_this_one() -> None:
    """Goal: the ring does not change, but world size, number of groups and largest group do."""
    harness = of(1, 2)
    harness.admit(3, 4, 5, group=1)
    lose(harness, 4)
    group = harness.state.members.groups[0]

    harness.reduce(1, 5)
    world = m.World(group.epoch, 4, 2, 2, 2, harness.state.members.round)
    assert sent(harness.reduce(2, 5), m.World) == {1: world, 2: world}


def test_whoever_heard_a_failure_knows_its_numbers() -> None:
    """Goal: a failure verdict carries the numbers; only a member that was in no call gets them with the retry."""
    harness = of(1, 2, 3)
    harness.reduce(1, 5)
    assert failures(lose(harness, 3)) == [(1, 5, 0, LOST)]

    harness.reduce(1, 5)
    assert list(sent(harness.reduce(2, 5), m.World)) == [2]


def test_a_changed_world_is_told_ahead_of_a_sync() -> None:
    """Goal: sync_shared_state is a collective too."""
    harness = of(1, 2)
    lose(harness, 2)

    told = [action.message for action in harness.sync(1, 0, "x") if isinstance(action, SendTo)]
    world = m.World(harness.state.members.groups[0].epoch, 1, 1, 1, 1, harness.state.members.round)
    assert told == [world, m.SyncDone(harness.calls, 0)]

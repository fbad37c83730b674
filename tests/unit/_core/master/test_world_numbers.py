"""Which numbers of the world members are told, and when: ahead of the next collective after a change, and once."""

from __future__ import annotations

from pccl._core.master.events import SendTo
from pccl._core.protocol import messages as m
from pccl._core.protocol.operations import pack_pairs

from .master_harness import LOST, failures, lose, of, sent


def test_a_changed_world_is_told_ahead_of_the_next_collective() -> None:
    """Goal: after a loss that nobody was in a call for, every survivor hears the new numbers once, before it begins."""
    scene = of(1, 2, 3)
    lose(scene, 3)
    epoch = scene.state.members.groups[0].epoch
    world = m.World(epoch, 2, 2, 1, 2, scene.state.members.round)

    scene.reduce(1, 5)
    order = m.Commence(epoch, pack_pairs([(5, 1)]))
    assert scene.reduce(2, 5) == [SendTo(peer, message) for peer in (1, 2) for message in (world, order)]
    for peer in (1, 2):
        scene.say(peer, m.Finished(1, True, ""))
    scene.reduce(1, 5)
    assert not sent(scene.reduce(2, 5), m.World)


def test_a_loss_in_another_group_changes_the_numbers_of_this_one() -> None:
    """Goal: the ring stays as it is, but the world, the groups and the largest one are counted anew."""
    scene = of(1, 2)
    scene.admit(3, 4, 5, group=1)
    lose(scene, 4)
    group = scene.state.members.groups[0]

    scene.reduce(1, 5)
    world = m.World(group.epoch, 4, 2, 2, 2, scene.state.members.round)
    assert sent(scene.reduce(2, 5), m.World) == {1: world, 2: world}


def test_whoever_heard_a_failure_knows_its_numbers() -> None:
    """Goal: a failure verdict carries them; only a member that was in no call hears them with the retry."""
    scene = of(1, 2, 3)
    scene.reduce(1, 5)
    assert failures(lose(scene, 3)) == [(1, 5, 0, LOST)]

    scene.reduce(1, 5)
    assert list(sent(scene.reduce(2, 5), m.World)) == [2]


def test_a_changed_world_is_told_ahead_of_a_sync() -> None:
    """Goal: sync_shared_state is a collective too."""
    scene = of(1, 2)
    lose(scene, 2)

    told = [action.message for action in scene.sync(1, 0, "x") if isinstance(action, SendTo)]
    world = m.World(scene.state.members.groups[0].epoch, 1, 1, 1, 1, scene.state.members.round)
    assert told == [world, m.SyncDone(scene.calls, 0)]

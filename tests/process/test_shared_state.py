"""Shared state with real processes: every rule of the election, each with members that sync at the same time.

A member's state is a few arrays, some in shared memory and some not, filled with one number; that number shows which
state a sync has chosen. The rules are tested in full on the machines alone; here tests show that digests, votes and
transfers together keep them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import pccl
from pccl import (
    Communicator,
    MasterNode,
    PCCLError,
    ReduceOp,
    Result,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
)
from pccl.client.state_sync import Syncs
from pccl.errors import KickedError, MasterLostError, UsageError

from .helpers import (
    QUICK,
    Peers,
    actor_pid,
    background,
    eventually,
    everybody,
    peers_of,
    ring_order,
    running_master,
    stopped_fetchers,
)

ENFORCE, RECEIVE, SEND = (
    SharedStateSyncStrategy.ENFORCE_POPULAR,
    SharedStateSyncStrategy.RECEIVE_ONLY,
    SharedStateSyncStrategy.SEND_ONLY,
)
COUNT = 100_003  # elements of an array: two blocks, the second of them odd


class Model:
    """A state of four tensors: in shared memory, in ordinary memory, of torch, and one that peers may differ in."""

    def __init__(self, value: float, revision: int = 0, *, names: str = "abcd", count: int = COUNT) -> None:
        self.arrays: dict[str, Any] = {
            names[0]: pccl.empty(count),
            names[1]: np.empty(count, np.int16),
            names[2]: torch.empty(()),
            names[3]: np.empty(3, np.float64),
        }
        self.unequal = names[3]
        self.fill(value)
        make = {name: TensorInfo.from_torch if name == names[2] else TensorInfo.from_numpy for name in names}
        infos = [
            make[name](array, name, allow_content_inequality=name == self.unequal)
            for name, array in self.arrays.items()
        ]
        self.state = SharedState(infos)
        self.state.revision = revision

    def fill(self, value: float) -> None:
        """Fill all tensors with this number."""
        for array in self.arrays.values():
            array[...] = value

    @property
    def values(self) -> set[float]:
        """The numbers in the tensors that all peers must hold identically."""
        return {
            float(number)
            for name, array in self.arrays.items()
            if name != self.unequal
            for number in np.unique(np.asarray(array))
        }

    @property
    def own(self) -> float:
        """The number in the tensor that may differ."""
        return float(self.arrays[self.unequal][0])

    def sync(self, peer: Communicator, strategy: SharedStateSyncStrategy = ENFORCE) -> SharedStateSyncInfo:
        """One sync of this state."""
        return peer.sync_shared_state(self.state, strategy)


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture
def trio(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0, 0, lanes=2) as peers:
        yield peers


def sync_all(
    peers: list[Communicator], models: list[Model], *strategies: SharedStateSyncStrategy
) -> list[SharedStateSyncInfo | PCCLError]:
    """Sync all members at once; return the outcome of each, in the order of their ids."""
    chosen = strategies or (ENFORCE,) * len(models)

    def act(peer: Communicator, rank: int) -> SharedStateSyncInfo | PCCLError:
        try:
            return models[rank].sync(peer, chosen[rank])
        except PCCLError as error:
            return error

    return everybody(peers, act)


def agreed(models: list[Model]) -> tuple[set[float], set[int]]:
    """The numbers and the revisions that these models hold, each once."""
    return set().union(*(model.values for model in models)), {model.state.revision for model in models}


def nothing_moved(infos: list[Any]) -> bool:
    """Whether all syncs succeeded without a byte of payload."""
    return infos == [SharedStateSyncInfo(0, 0)] * len(infos)


# ---------------------------------------------------------------------------------------------- revisions


def test_equal_states_move_nothing(trio: Peers) -> None:
    """Goal: in steady state a sync is a comparison, and every revision that grows by one is legal."""
    models = [Model(5.0) for _ in trio]
    for revision in range(4):
        assert nothing_moved(sync_all(trio, models))
        assert agreed(models) == ({5.0}, {revision})
        for model in models:
            model.state.push_revision()


def test_the_highest_revision_of_the_first_sync_wins(trio: Peers) -> None:
    """Goal: a peer that resumes at revision 13 gives its state to peers at revision 0, in any order of votes."""
    models = [Model(1.0, 0), Model(2.0, 13), Model(1.0, 0)]
    infos = sync_all(trio, models)

    payload = sum(array.nbytes if isinstance(array, np.ndarray) else 4 for array in models[0].arrays.values())
    assert agreed(models) == ({2.0}, {13})
    assert [info.rx_bytes for info in infos if isinstance(info, SharedStateSyncInfo)] == [payload, 0, payload]
    assert infos[1].tx_bytes == 2 * payload  # type: ignore[union-attr]
    assert [model.own for model in models] == [2.0, 2.0, 2.0], "outdated peers also receive the tensor that may differ"


def test_one_dirty_key_of_many_is_healed(trio: Peers) -> None:
    """Goal: the minority is overwritten, but only where it differs."""
    models = [Model(7.0) for _ in trio]
    sync_all(trio, models)
    for model in models:
        model.state.push_revision()
    models[2].arrays["a"][70_000:70_005] = -1.0  # in its second block
    models[2].arrays["d"][:] = 8.0
    infos = sync_all(trio, models)

    assert agreed(models) == ({7.0}, {1})
    assert infos[2].rx_bytes == 4 * COUNT - (256 << 10)  # type: ignore[union-attr]
    assert models[2].own == 8.0, "an up-to-date peer keeps its tensor that may differ"


def test_a_peer_that_forgot_to_push_is_dragged_along(trio: Peers) -> None:
    """Goal: a lower revision is outdated, whatever it holds."""
    models = [Model(1.0) for _ in trio]
    sync_all(trio, models)
    for model in models[:2]:
        model.fill(2.0)
        model.state.push_revision()
    sync_all(trio, models)

    assert agreed(models) == ({2.0}, {1})


def test_a_jump_by_two_is_kicked(trio: Peers) -> None:
    """Goal: a revision beyond the next one is refused by a kick; the others continue."""
    models = [Model(1.0) for _ in trio]
    sync_all(trio, models)
    for model, steps in zip(models, (1, 2, 1), strict=True):
        model.state.revision += steps
    infos = sync_all(trio, models)

    assert isinstance(infos[1], KickedError)
    assert "revision 2" in infos[1].reason
    assert "agreed on 0" in infos[1].reason
    assert agreed([models[0], models[2]]) == ({1.0}, {1})


def test_everyone_may_repeat_a_revision(trio: Peers) -> None:
    """Goal: a second sync without a push is a no-op that succeeds, and the run goes on."""
    models = [Model(3.0) for _ in trio]
    assert nothing_moved(sync_all(trio, models))
    assert nothing_moved(sync_all(trio, models))
    for model in models:
        model.state.push_revision()
    assert nothing_moved(sync_all(trio, models))
    assert agreed(models) == ({3.0}, {1})


# ---------------------------------------------------------------------------------------------- elections


def test_most_votes_win_and_a_tie_goes_to_the_eldest(master: MasterNode) -> None:
    """Goal: identical lists add up; two against two is decided by the lowest peer id."""
    with peers_of(master.address, 0, 0, 0, 0) as peers:
        models = [Model(1.0), Model(2.0), Model(2.0), Model(2.0)]
        sync_all(peers, models)
        assert agreed(models) == ({2.0}, {0})

        for model, value in zip(models, (6.0, 9.0, 9.0, 6.0), strict=True):
            model.fill(value)
            model.state.push_revision()
        sync_all(peers, models)
        assert agreed(models) == ({6.0}, {1})


def test_one_veteran_beats_any_number_of_newcomers(master: MasterNode) -> None:
    """Goal: the agreed state survives in the last peer that holds it."""
    with peers_of(master.address, 0) as peers:
        veteran = Model(4.0)
        for _ in range(3):
            sync_all(peers, [veteran])
            veteran.state.push_revision()
        peers.admit(*[peers.newcomer() for _ in range(3)])
        models = [veteran, *(Model(0.0) for _ in range(3))]
        sync_all(peers, models)

        assert agreed(models) == ({4.0}, {3})


def test_a_different_schema_is_kicked_by_name(trio: Peers) -> None:
    """Goal: with a wrong name or size, the kick names the key, and the others succeed."""
    models = [Model(1.0), Model(1.0), Model(1.0, names="abed")]
    infos = sync_all(trio, models)
    assert isinstance(infos[2], KickedError)
    assert "'c'" in infos[2].reason

    odd = ring_order(trio)[2]
    trio.dismiss(odd)
    trio.admit(trio.newcomer())
    models = [models[0], models[1], Model(1.0, count=COUNT + 1)]
    for model in models[:2]:
        model.state.push_revision()
    infos = sync_all(trio, models)
    assert isinstance(infos[2], KickedError)
    assert "'a'" in infos[2].reason
    assert agreed(models[:2]) == ({1.0}, {1})


# ---------------------------------------------------------------------------------------------- strategies


def test_receivers_take_what_senders_have(trio: Peers) -> None:
    """Goal: RECEIVE_ONLY is never elected, SEND_ONLY is never overwritten."""
    models = [Model(1.0), Model(1.0), Model(2.0)]
    sync_all(trio, models, RECEIVE, RECEIVE, SEND)

    assert agreed(models) == ({2.0}, {0})


def test_senders_must_be_identical(trio: Peers) -> None:
    """Goal: a sender that loses is kicked, because it may not be overwritten."""
    models = [Model(1.0), Model(2.0), Model(3.0)]
    infos = sync_all(trio, models, SEND, SEND, RECEIVE)

    assert isinstance(infos[1], KickedError)
    assert agreed([models[0], models[2]]) == ({1.0}, {0})
    assert models[1].values == {2.0}


def test_only_receivers_is_an_error_for_all(trio: Peers) -> None:
    """Goal: no peer may send its state; every call fails with this reason, and no peer is kicked."""
    models = [Model(1.0) for _ in trio]
    infos = sync_all(trio, models, RECEIVE, RECEIVE, RECEIVE)

    assert all(isinstance(info, UsageError) and info.result is Result.INVALID_USAGE for info in infos)
    assert nothing_moved(sync_all(trio, models))


def test_mixing_popular_with_another_strategy_kicks_the_other(trio: Peers) -> None:
    """Goal: ENFORCE_POPULAR cannot be mixed with other strategies."""
    models = [Model(1.0) for _ in trio]
    infos = sync_all(trio, models, ENFORCE, ENFORCE, RECEIVE)

    assert isinstance(infos[2], KickedError)
    assert infos[:2] == [SharedStateSyncInfo(0, 0)] * 2


# ---------------------------------------------------------------------------------------------- losses and groups


def test_a_lost_state_is_resumed_from_its_digest_only(master: MasterNode) -> None:
    """Goal: with no up-to-date peer left, only the agreed content can be elected, whatever its revision."""
    with peers_of(master.address, 0, 0) as peers:
        models = [Model(1.0, 4), Model(1.0, 4)]
        sync_all(peers, models)
        for model in models:
            model.fill(2.0)
            model.state.push_revision()
        sync_all(peers, models)

        outdated = [Model(0.0, 0), Model(0.0, 0)]
        for error in sync_all(peers, outdated):
            assert isinstance(error, PCCLError)
            assert error.result is Result.NO_SHARED_STATE_AVAILABLE
            assert "revision 5" in str(error)
        checkpoint = Model(2.0, 0)
        sync_all(peers, [outdated[0], checkpoint])
        assert agreed([outdated[0], checkpoint]) == ({2.0}, {5})


def test_groups_sync_by_themselves(master: MasterNode) -> None:
    """Goal: a group does not wait for other groups, and has its own state and revision."""
    with peers_of(master.address, 0, 0, 1, 1) as peers:
        first, second = [peers[0], peers[1]], [peers[2], peers[3]]
        waiting = background(lambda: peers[0].sync_shared_state(Model(1.0, 3).state))
        models = [Model(8.0), Model(8.0)]
        for revision in range(3):
            assert nothing_moved(sync_all(second, models))
            assert agreed(models) == ({8.0}, {revision})
            for model in models:
                model.state.push_revision()
        other = Model(2.0)
        other.sync(first[1])
        waiting.result()
        assert agreed([other]) == ({1.0}, {3})


def test_a_world_of_one_syncs(master: MasterNode) -> None:
    """Goal: the sync of a lone member only increments the agreed revision."""
    with peers_of(master.address, 0) as peers:
        model = Model(1.0, 2)
        assert nothing_moved(sync_all(peers, [model]))
        model.fill(3.0)
        model.state.push_revision()
        assert nothing_moved(sync_all(peers, [model]))
        assert agreed([model]) == ({3.0}, {3})


def test_a_member_that_leaves_does_not_hold_a_sync_up(trio: Peers) -> None:
    """Goal: the sync does not wait for the vote of a lost member."""
    models = [Model(1.0) for _ in trio]
    waiting = [background(lambda i=i: models[i].sync(ring_order(trio)[i])) for i in (0, 1)]
    ring_order(trio)[2].close()
    assert [call.result() for call in waiting] == [SharedStateSyncInfo(0, 0)] * 2


# ---------------------------------------------------------------------------------------------- calls


def test_a_reduce_under_way_forbids_a_sync(trio: Peers) -> None:
    """Goal: a reduce in flight forbids a sync, because the content could change while it is hashed."""
    peer = ring_order(trio)[0]
    array = pccl.zeros(8)

    def act(member: Communicator, rank: int) -> None:
        mine = array if rank == 0 else pccl.zeros(8)
        handle = member.all_reduce_async(mine, mine, op=ReduceOp.SUM)
        if member is peer:
            with pytest.raises(UsageError) as caught:
                member.sync_shared_state(Model(1.0).state)
            assert caught.value.result is Result.PENDING_ASYNC_OPS
        assert handle.wait()[0]

    everybody(trio, act)


def test_a_sync_needs_a_membership() -> None:
    """Goal: the same message as for other calls before connect()."""
    with pytest.raises(UsageError, match="connect"):
        Communicator("127.0.0.1:1", options=QUICK).sync_shared_state(Model(1.0).state)


def test_read_only_memory_cannot_receive(trio: Peers) -> None:
    """Goal: refused before any message is sent."""
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    state = SharedState([TensorInfo.from_numpy(array, "frozen")])
    with pytest.raises(AssertionError, match="'frozen' is read-only"):
        ring_order(trio)[0].sync_shared_state(state)


def test_thousands_of_keys(trio: Peers) -> None:
    """Goal: many small tensors are one vote, and those that differ are healed one by one."""
    states, arrays = [], []
    for rank in range(3):
        mine = [np.full(5, i + 100 * (rank == 2 and i % 300 == 0), np.float32) for i in range(3000)]
        arrays.append(mine)
        states.append(SharedState([TensorInfo.from_numpy(array, f"layer.{i}") for i, array in enumerate(mine)]))
    infos = everybody(trio, lambda peer, rank: peer.sync_shared_state(states[rank]))

    assert infos[2].rx_bytes == 10 * 20
    assert all(np.array_equal(arrays[0][i], arrays[2][i]) for i in range(3000))


def test_a_torn_state_is_never_elected(trio: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a peer whose transfer ended in the middle marks its state as torn in its vote."""
    models = [Model(1.0, 5), Model(1.0, 5), Model(0.0)]
    torn, described = models[2], Syncs._send_manifest

    def break_down(self: Syncs, infos: tuple[TensorInfo, ...]) -> bytes:
        if infos is torn.state.ordered:
            torn.arrays["a"][:10] = 1.0  # as if the first block had arrived
            raise KeyboardInterrupt
        return described(self, infos)

    def act(peer: Communicator, rank: int) -> None:
        try:
            models[rank].sync(peer)
        except KeyboardInterrupt:
            assert models[rank] is torn

    monkeypatch.setattr(Syncs, "_send_manifest", break_down)
    everybody(trio, act)
    monkeypatch.undo()
    assert torn.state.torn is not None
    for peer in ring_order(trio)[:2]:
        trio.dismiss(peer)
    trio.update()

    with pytest.raises(PCCLError) as caught:
        torn.sync(trio[0])
    assert caught.value.result is Result.NO_SHARED_STATE_AVAILABLE
    torn.fill(1.0)
    torn.sync(trio[0])
    assert agreed([torn]) == ({1.0}, {5})
    assert torn.state.torn is None


def test_the_only_source_is_lost_and_a_sink_takes_its_place(
    master: MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: one newcomer has received the state, the other is in the middle: both get it, at the same revision."""
    models = [Model(1.0, 5), Model(0.0), Model(0.0)]
    with peers_of(master.address, 0, lanes=2) as peers:
        models[0].sync(peers[0])
        veteran, quick = peers[0], peers.newcomer(lanes=2)
        peers.admit(quick)
        monkeypatch.setenv("PCCL_FAULT", "state.fetch.manifest:1:stop")
        slow = peers.newcomer(lanes=2)
        peers.admit(slow)
        monkeypatch.undo()

        lost, *calls = (background(lambda m=m, p=p: m.sync(p)) for m, p in zip(models, peers, strict=True))
        (first,) = eventually(lambda: stopped_fetchers(slow), "the slow one is in the middle")
        eventually(lambda: models[1].values == {1.0}, "the quick one has everything")
        os.kill(actor_pid(veteran), signal.SIGKILL)
        with pytest.raises(MasterLostError):
            lost.result(10)
        (second,) = eventually(lambda: stopped_fetchers(slow) - {first}, "it asks the heir")
        os.kill(second, signal.SIGCONT)

        heir, last = (call.result(10) for call in calls)
        assert agreed(models[1:]) == ({1.0}, {5})
        assert heir.tx_bytes == last.rx_bytes > 0

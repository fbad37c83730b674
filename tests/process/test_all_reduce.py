"""Sums over rings of real processes, compared bit for bit with the sums in the order of the ring.

Rings are made once for each size and pool and used by many tests. A test launches all its reduces at once, so each is
also checked while a hundred others are in flight.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import psutil
import pytest
import torch

import pccl
import pccl.torch
from pccl import Communicator, DataType, MasterNode, ReduceInfo, ReduceOp
from pccl._core.dataplane.plan import Cut
from pccl._core.records import replace

from .helpers import BOUND, QUICK, Peers, Script, bytes_in_use, everybody, peers_of, running_master
from .reference import Array, contribution, reduced

# How blocks travel: by host reads; through TCP; or through TCP with checksums, as between two hosts, because neighbours
# recognise another host by its address only.
HOST_READ, SAME_HOST, OTHER_HOST = "host read", "same host", "other host"
WAYS = {
    HOST_READ: QUICK,
    SAME_HOST: replace(QUICK, host_memory=False),
    OTHER_HOST: replace(QUICK, advertise="127.0.0.2"),
}

# Members, connections to each neighbour, and how blocks travel.
RINGS = [
    (2, 1, HOST_READ),
    (2, 1, OTHER_HOST),
    (2, 8, HOST_READ),
    (3, 3, SAME_HOST),
    (5, 1, HOST_READ),
    (8, 1, HOST_READ),
]
if os.environ.get("PCCL_TEST_RINGS") == "all":
    RINGS = [(world, lanes, way) for world in range(2, 9) for lanes in (1, 3, 8) for way in WAYS]
COUNTS = [0, 1, 7, 1009, 40_009]  # none, fewer than there are peers, primes, and more than a block
HUGE = int(os.environ.get("PCCL_TEST_HUGE_BYTES", "100_000_007"))  # of one tensor; above 4 GiB for the long run
HUGE_MEMORY = HUGE * 9 // 2  # of the machine; two such tensors and their backups took 4.4 times one tensor


@pytest.fixture(scope="module")
def master() -> Iterator[MasterNode]:
    with running_master() as node:
        yield node


@pytest.fixture(scope="module", params=RINGS, ids=[f"{world}x{lanes}-{way}" for world, lanes, way in RINGS])
def ring(request: pytest.FixtureRequest) -> Iterator[Peers]:
    world, lanes, way = request.param
    options = WAYS[way]
    with running_master() as node, peers_of(node.address, *[0] * world, lanes=lanes, options=options) as peers:
        yield peers


@pytest.fixture(scope="module")
def trio(master: MasterNode) -> Iterator[Peers]:
    with peers_of(master.address, 0, 0, 0, lanes=2) as peers:
        yield peers


# ---------------------------------------------------------------------------------------------- bits


def as_torch(array: Array, datatype: DataType, *, shared: bool) -> torch.Tensor:
    """Return a tensor with these bits."""
    dtype = datatype.to_torch_dtype()
    made = pccl.torch.empty(array.size, dtype=dtype) if shared else torch.empty(array.size, dtype=dtype)
    bits_of(made)[:] = array.view(np.uint8)
    return made


def as_numpy(array: Array, *, shared: bool, offset: int = 0) -> Array:
    """Return an array with these elements that starts `offset` bytes after an aligned address."""
    room = pccl.empty(array.nbytes + offset, np.uint8) if shared else np.empty(array.nbytes + offset, np.uint8)
    made = room[offset:].view(array.dtype)
    made[:] = array
    return made


def bits_of(tensor: torch.Tensor | Array) -> Array:
    """Return a view of the bytes of a tensor."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(np.uint8)
    found: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


@dataclass(frozen=True)
class Case:
    """One reduce that all members make."""

    datatype: DataType
    op: ReduceOp
    count: int
    kind: str  # numpy or torch
    shared: bool
    in_place: bool
    offset: int

    def tensor(self, array: Array) -> torch.Tensor | Array:
        if self.kind == "torch":
            return as_torch(array, self.datatype, shared=self.shared)
        return as_numpy(array, shared=self.shared, offset=self.offset)


def cases(datatype: DataType) -> list[Case]:
    """Return cases of every operation, count and kind of memory; the library of the tensor alternates."""
    found: list[Case] = []
    for op in ReduceOp:
        for count in COUNTS:
            for shared in (False, True):
                for in_place in (False, True):
                    is_torch = datatype is DataType.BFLOAT16 or len(found) % 3 == 0
                    offset = len(found) % 5
                    found.append(Case(datatype, op, count, "torch" if is_torch else "numpy", shared, in_place, offset))
    return found


def test_every_peer_has_the_sum_in_the_order_of_the_ring(ring: Peers) -> None:
    """Goal: all types, operations and counts; shared or staged, in place or not, aligned or not: the same bits."""
    for datatype in DataType:
        compare_all(ring, datatype)


def compare_all(ring: Peers, datatype: DataType) -> None:
    chosen = cases(datatype)
    given = [
        [contribution(datatype, case.op, case.count, 1000 * number + rank) for number, case in enumerate(chosen)]
        for rank in range(len(ring))
    ]

    def act(peer: Communicator, rank: int) -> list[tuple[Array, Array, tuple[bool, int, ReduceInfo]]]:
        flights = []
        for tag, (case, array) in enumerate(zip(chosen, given[rank], strict=True)):
            send = case.tensor(array)
            recv = send if case.in_place else case.tensor(np.zeros_like(array))
            flights.append((send, recv, peer.all_reduce_async(send, recv, op=case.op, tag=tag)))
        return [(bits_of(send), bits_of(recv), handle.wait()) for send, recv, handle in flights]

    results = everybody(ring, act, timeout=60)

    for number, case in enumerate(chosen):
        expected = reduced([peer[number] for peer in given], datatype, case.op).view(np.uint8)
        for rank, (send, recv, (ok, status, info)) in enumerate(peer[number] for peer in results):
            assert (ok, status, info.local_world_size) == (True, 0, len(ring)), f"{case} at rank {rank}"
            assert np.array_equal(recv, expected), f"{case} at rank {rank}"
            if not case.in_place:
                assert np.array_equal(send, given[rank][number].view(np.uint8)), f"{case}: send was written"


def test_bytes_are_counted(trio: Peers) -> None:
    """Goal: each peer sends its chunks once around the ring, and ReduceInfo counts these bytes."""
    count, world = 30_011, 3
    infos = everybody(trio, lambda peer, _: peer.all_reduce(np.ones(count), np.empty(count), op=ReduceOp.SUM))

    cut = Cut(count, 8, world)
    for rank, info in enumerate(infos):
        sent = sum(end - begin for hop in range(4) for begin, end in [cut.chunk(cut.sent(rank, hop))])
        received = sum(end - begin for hop in range(4) for begin, end in [cut.chunk(cut.received(rank, hop))])
        assert (info.world_size, info.tx_bytes, info.rx_bytes) == (world, 8 * sent, 8 * received)
        assert min(info.network_seconds, info.neighbour_seconds, info.reduce_seconds) >= 0


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 5, 7), (0, 4)])
def test_shapes_do_not_matter(trio: Peers, shape: tuple[int, ...]) -> None:
    """Goal: a scalar, a matrix and an empty tensor are reduced by their number of elements; both libraries."""

    def act(peer: Communicator, rank: int) -> tuple[Array, torch.Tensor]:
        array, tensor = np.full(shape, rank + 1.0), torch.full(shape, rank + 1.0)
        peer.all_reduce(array, array, op=ReduceOp.SUM)
        peer.all_reduce(tensor, tensor, op=ReduceOp.PROD)
        return array, tensor

    for array, tensor in everybody(trio, act):
        assert array.shape == tuple(tensor.shape) == shape
        assert np.array_equal(array, np.full(shape, 6.0))
        assert torch.equal(tensor, torch.full(shape, 6.0))


def test_parameters_and_their_gradients(trio: Peers) -> None:
    """Goal: parameters that require gradients can be reduced, moved to shared memory or not."""

    def act(peer: Communicator, rank: int) -> list[torch.Tensor]:
        model = torch.nn.Linear(17, 5)
        if rank == 1:
            pccl.torch.share_(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank)
        for tag, parameter in enumerate(model.parameters()):
            peer.all_reduce(parameter.grad, parameter.grad, op=ReduceOp.AVG, tag=tag)
            peer.all_reduce(parameter, parameter, op=ReduceOp.MAX, tag=tag)
        assert all(parameter.requires_grad for parameter in model.parameters())
        return [*model.parameters(), *(parameter.grad for parameter in model.parameters())]

    first, *others = everybody(trio, act)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    assert torch.equal(first[2], torch.full_like(first[2], 1.0))


def test_overlapping_tensors(trio: Peers) -> None:
    """Goal: send and recv that share half their memory, of either kind: the sum of what was there at the call."""

    def act(peer: Communicator, rank: int) -> tuple[Array, Array]:
        rooms = [pccl.empty(3000), np.empty(3000, np.float32)]
        for tag, room in enumerate(rooms):
            room[:] = np.arange(3000) + rank
            peer.all_reduce(room[:2000], room[1000:], op=ReduceOp.SUM, tag=tag)
        return rooms[0], rooms[1]

    for rank, rooms in enumerate(everybody(trio, act)):
        for room in rooms:
            assert np.array_equal(room[:1000], np.arange(1000) + rank)
            assert np.array_equal(room[1000:], 3 * np.arange(2000) + 3)


def test_part_of_a_tensor(trio: Peers) -> None:
    """Goal: a descriptor may count fewer elements than there are; the rest is not touched."""
    operand = pccl.ReduceOperandDescriptor(DataType.INT32)

    def act(peer: Communicator, rank: int) -> list[Array]:
        arrays = [np.full(100, rank + 1, np.int32), pccl.empty(100, np.int32)]
        arrays[1][:] = rank + 1
        descriptors = [
            pccl.ReduceOpDescriptor.from_numpy(
                array, array, pccl.ReduceDescriptor(60, ReduceOp.SUM, tag, operand, None)
            )
            for tag, array in enumerate(arrays)
        ]
        peer.all_reduce_multiple_with_retry(descriptors)
        return arrays

    for rank, arrays in enumerate(everybody(trio, act)):
        for array in arrays:
            assert array.tolist() == [6] * 60 + [rank + 1] * 40


def test_nothing_stays_in_use(trio: Peers) -> None:
    """Goal: staging and backups go back to the arena with the outcome."""
    before = bytes_in_use()

    def act(peer: Communicator, _: int) -> None:
        shared = pccl.zeros(100_000)
        for array in (shared, np.zeros(100_000, np.float32)):
            peer.all_reduce(array, array, op=ReduceOp.SUM)

    everybody(trio, act)
    assert bytes_in_use() == before


# ---------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize("shared", [False, True], ids=["staged", "shared"])
def test_a_large_tensor(master: MasterNode, trio: Peers, shared: bool) -> None:
    """Goal: twenty megabytes over two lanes, a prime number of elements."""
    count = 5_000_011
    given = [contribution(DataType.FLOAT, ReduceOp.SUM, count, seed) for seed in range(3)]
    arrays = [as_numpy(array, shared=shared) for array in given]
    everybody(trio, lambda peer, rank: peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM), timeout=60)

    expected = reduced(given, DataType.FLOAT, ReduceOp.SUM)
    assert all(np.array_equal(array, expected) for array in arrays)


@pytest.mark.skipif(
    psutil.virtual_memory().available < HUGE_MEMORY, reason=f"it takes {HUGE_MEMORY >> 20} MiB of memory"
)
@pytest.mark.timeout(1800)
def test_a_huge_tensor(master: MasterNode) -> None:
    """Goal: no offset, length or count is cut off: `make stress` takes more bytes than 32 bits can count."""
    with running_master() as node, peers_of(node.address, 0, 0, lanes=2) as peers:
        arrays = [pccl.empty(HUGE, np.uint8) for _ in peers]
        for array in arrays:
            array[:] = 1
            array[-3:] = 7

        everybody(peers, lambda peer, rank: peer.all_reduce(arrays[rank], arrays[rank], op=ReduceOp.SUM), timeout=1800)

        for array in arrays:
            assert array[-3:].tolist() == [14] * 3
            assert int(array.min()) == int(array[:-3].max()) == 2


# ---------------------------------------------------------------------------------------------- processes

# Reduces tensors of several sizes over and over, and prints a digest of all results.
MEMBER = """
    from hashlib import sha256
    import numpy as np, pccl
    from tests.process.reference import contribution
    rank, world = int(sys.argv[2]), int(sys.argv[3])
    peer = Communicator(sys.argv[1], 0, 2, options=QUICK)
    peer.connect()
    say("in")
    peer.wait_for_world_size(world)
    digest = sha256()
    for step in range(20):
        count = 3 ** (step % 10)
        array = contribution(DataType.FLOAT, ReduceOp.SUM, count, 100 * step + rank)
        if step % 2:
            shared = pccl.empty(count)
            shared[:] = array
            array = shared
        peer.all_reduce(array, array, op=ReduceOp.SUM)
        digest.update(array.tobytes())
    say("digest", digest.hexdigest())
    peer.close()
"""


def test_separate_processes_agree(master: MasterNode) -> None:
    """Goal: the same over training processes of their own, in the order of joining."""
    world = 3
    with running_master() as node:
        scripts = []
        try:
            for rank in range(world):
                scripts.append(Script(MEMBER, node.address, rank, world))
                scripts[rank].expect("in")
            digests = [script.expect("digest", timeout=2 * BOUND) for script in scripts]
            assert [script.end() for script in scripts] == [0] * world
        finally:
            for script in scripts:
                script.__exit__()
    expected = sha256()
    for step in range(20):
        given = [
            contribution(DataType.FLOAT, ReduceOp.SUM, 3 ** (step % 10), 100 * step + rank) for rank in range(world)
        ]
        expected.update(reduced(given, DataType.FLOAT, ReduceOp.SUM).tobytes())
    assert digests == [expected.hexdigest()] * world

"""torch tensors in shared memory: created there, or moved there with no visible change."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pccl
from pccl.memory.arena import default
from pccl.torch import share_
from tests import ROOT
from tests.leaks import Footprint


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Disable garbage collection, so that garbage of earlier tests does not return to the arena while a test counts."""
    gc.disable()
    yield
    gc.enable()


def segment_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the segment that holds the whole tensor, or None."""
    found = default().find(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return found[0] if found else None


def bytes_in_use() -> int:
    return default().statistics().bytes_in_use


# --- New tensors ------------------------------------------------------------


@pytest.mark.parametrize("make", [pccl.torch.empty, pccl.torch.zeros])
@pytest.mark.parametrize("size", [((),), (0,), (3, 0, 2), (1,), (3, 4), ((2, 3),), ([4],), (torch.Size([5, 6]),)])
def test_every_size_is_a_plain_tensor_in_shared_memory(make: Any, size: Any) -> None:
    tensor = make(*size)

    assert tensor.shape == torch.empty(*size).shape
    assert tensor.dtype is torch.get_default_dtype()
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert tensor.numel() == 0 or (segment_of(tensor) is not None and tensor.data_ptr() % 64 == 0)


@pytest.mark.parametrize("datatype", pccl.DataType)
@pytest.mark.parametrize("count", [0, 1, 1000, 3 << 20])
def test_memory_returns_with_the_last_view(datatype: pccl.DataType, count: int) -> None:
    """Goal: for every dtype, also for empty tensors, which torch creates differently."""
    before = bytes_in_use()
    tensor = pccl.torch.zeros(count, dtype=datatype.to_torch_dtype())
    assert tensor.numel() == 0 or not tensor.view(torch.uint8).any()
    view = tensor[: count // 2]
    del tensor
    assert bytes_in_use() > before
    del view

    assert bytes_in_use() == before


def test_the_default_dtype_is_torchs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert pccl.torch.empty(3).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_does_not_matter() -> None:
    """Goal: shared memory is on the CPU, also inside a context with another default device."""
    with torch.device("meta"):
        tensor = pccl.torch.zeros(3)

    assert tensor.tolist() == [0, 0, 0]


@pytest.mark.parametrize("make", [pccl.torch.empty, pccl.torch.zeros])
def test_gradients_are_wanted_if_asked_for(make: Any) -> None:
    tensor = make(3, requires_grad=True)
    tensor.sum().backward()

    assert tensor.is_leaf
    assert tensor.grad.tolist() == [1, 1, 1]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pccl.torch.empty(3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="sizes are at least 0"):
        pccl.torch.empty(3, -1)
    with pytest.raises(TypeError):
        pccl.torch.empty(1.5)  # type: ignore[arg-type]


def test_saving_writes_only_the_tensor() -> None:
    """Goal: torch writes whole storages; the rest of a tensor's segment must not be written."""
    tensors = [pccl.torch.zeros(65_000, dtype=torch.uint8), share_(torch.nn.Linear(200, 200)).bias.detach()]
    for tensor in tensors:
        file = io.BytesIO()
        torch.save(tensor, file)

        assert file.tell() < tensor.nbytes + 4096
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)


# --- Sharing ----------------------------------------------------------------


class Net(torch.nn.Module):
    """A module with tied and transposed parameters, buffers of several kinds, and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(30, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.outer = torch.nn.Linear(40, 30)
        self.tied = torch.nn.Linear(30, 40, bias=False)
        self.tied.weight = self.inner.weight
        self.outer.weight.data = self.inner.weight.data.t()
        self.scale = torch.nn.Parameter(torch.randn(7).bfloat16())
        self.frozen = torch.nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x) + self.tied(x))) * self.scale.sum()


def everything(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and gradients by name, aliases included."""
    found = dict(module.state_dict(keep_vars=True))
    found |= {f"{name}.grad": tensor.grad for name, tensor in found.items() if tensor.grad is not None}
    return found


def test_a_module_moves_as_a_whole_and_nobody_notices() -> None:
    """Goal: same objects, same bits, same flags, same ties, one segment; also for gradients."""
    net = Net()
    net(torch.randn(8, 30)).sum().backward()
    before = everything(net)
    contents = {name: tensor.detach().clone() for name, tensor in before.items()}
    facts = {name: (t.requires_grad, t.stride(), t.dtype, t.is_leaf) for name, t in before.items()}
    assert share_(net) is net
    after = everything(net)

    assert "inner.weight.grad" in after
    for name, tensor in after.items():
        assert tensor is before[name]
        assert torch.equal(tensor.detach(), contents[name]), name
        assert (tensor.requires_grad, tensor.stride(), tensor.dtype, tensor.is_leaf) == facts[name]
    assert len({segment_of(tensor) for name, tensor in after.items() if tensor.is_contiguous() and len(name) > 7}) == 1
    assert net.tied.weight is net.inner.weight
    assert net.outer.weight.data_ptr() == net.inner.weight.data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in after.values() if tensor.numel())


def test_training_goes_on_in_shared_memory() -> None:
    """Goal: an earlier optimizer, its state, and a backward pass that had begun all use the moved tensors."""
    torch.manual_seed(1)
    moved = Net()
    # Not a deep copy, because it unties parameters that overlap.
    torch.manual_seed(1)
    twin = Net()
    data = torch.randn(3, 8, 30)

    def train(net: torch.nn.Module, *, share: bool) -> None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step, batch in enumerate(data):
            loss = net(batch).square().mean()
            if share and step == 1:
                share_(net)
            optimizer.zero_grad(set_to_none=step == 2)
            loss.backward()
            optimizer.step()

    train(moved, share=True)
    train(twin, share=False)

    assert segment_of(moved.inner.weight) is not None
    for (name, one), other in zip(moved.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_bits_survive_that_no_arithmetic_would_keep() -> None:
    """Goal: NaNs with a payload, negative zeros, denormals: bytes are moved, not numbers."""
    bits = torch.tensor([0x7FC12345, -0x80000000, 1, -1, 0x7F800000], dtype=torch.int32)
    tensor = bits.clone().view(torch.float32)
    share_(tensor)

    assert torch.equal(tensor.view(torch.int32), bits)
    assert segment_of(tensor) is not None


@pytest.mark.parametrize("order", [1, -1])
def test_tensors_that_overlap_stay_entangled(order: int) -> None:
    """Goal: views, slices, other dtypes and strides of one memory still share it, in whichever order they are given."""
    base = torch.arange(24, dtype=torch.float32)
    tensors = [base, base[4:8], base.view(4, 6).t(), base[6:].view(torch.int32), base[::5]]
    contents = [tensor.clone() for tensor in tensors]
    share_(tensors[::order])

    assert all(torch.equal(tensor, content) for tensor, content in zip(tensors, contents, strict=True))
    base.fill_(2)
    assert all(
        torch.equal(tensor.float(), torch.full_like(tensor, 2).float())
        for tensor in tensors
        if tensor.is_floating_point()
    )
    assert tensors[3].tolist() == [0x40000000] * 18
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_two_storages_over_one_memory_stay_entangled() -> None:
    """Goal: overlaps are found by addresses; torch itself does not know that these two overlap."""
    memory = bytearray(40)
    low = torch.frombuffer(memory, dtype=torch.float32, count=6)
    high = torch.frombuffer(memory, dtype=torch.float32, offset=8)
    low.copy_(torch.arange(6))
    high[4:] = 9
    share_([high, low])

    assert low.tolist() == [0, 1, 2, 3, 4, 5]
    assert high.tolist() == [2, 3, 4, 5, 9, 9, 9, 9]
    low[5] = 7
    assert high[3] == 7


def test_an_overlap_that_no_storage_can_express_is_refused() -> None:
    memory = torch.zeros(40, dtype=torch.uint8)
    with pytest.raises(ValueError, match="overlaps another one 1 bytes"):
        share_([memory[3:], memory[4:12].view(torch.float32)])

    assert segment_of(memory) is None


def test_only_the_part_that_is_meant_moves() -> None:
    """Goal: moving one row of a huge table copies one row."""
    table = torch.zeros(1 << 20)
    before = bytes_in_use()
    row = table[5000:6000]
    share_(row)

    assert bytes_in_use() - before < 5000
    assert segment_of(table) is None


def test_what_is_shared_already_stays_where_it_is() -> None:
    tensor, fresh = share_(torch.ones(100)), torch.ones(5)
    place, in_use = tensor.data_ptr(), bytes_in_use()
    share_(tensor)
    share_(tensor[20:30])
    assert (tensor.data_ptr(), bytes_in_use()) == (place, in_use)
    share_([tensor, fresh, fresh])

    assert tensor.data_ptr() == place
    assert segment_of(fresh) is not None
    assert bytes_in_use() - in_use == 64


@pytest.mark.parametrize("count", [0, 3])
def test_iterables_of_tensors_and_modules_move(count: int) -> None:
    tensors = [torch.full((index + 1,), index) for index in range(count)]
    modules = [torch.nn.Linear(2, 2) for _ in range(count)]
    for group in (tensors, tuple(modules), iter([*tensors, *modules])):
        assert share_(group) is group

    assert all(segment_of(tensor) is not None for tensor in tensors)
    assert all(segment_of(parameter) is not None for module in modules for parameter in module.parameters())


def test_a_tensor_inside_a_graph_moves() -> None:
    """Goal: intermediate results move too, without torch's warning about reading their gradient."""
    leaf = torch.ones(3, requires_grad=True)
    middle = leaf * 2
    share_(middle)
    middle.sum().backward()

    assert segment_of(middle) is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_sparse_gradients_stay_as_they_are() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    share_(table)

    assert segment_of(table.weight) is not None
    assert table.weight.grad.is_sparse


class Elsewhere(torch.Tensor):
    """Claims to be on a GPU, which this machine may not have."""

    is_cuda = True


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3).as_subclass(Elsewhere), "CUDA tensor, and it is not needed: pccl stages it"),
        (lambda: torch.ones(3, device="meta"), "meta tensor"),
        (lambda: torch.ones(3).to_sparse(), "make it dense first"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "int_repr"),
        (lambda: torch.nn.LazyLinear(3).weight, "before its first forward"),
        (inference, "inference mode"),
    ],
    ids=["cuda", "meta", "sparse", "conjugated", "quantized", "lazy", "inference"],
)
def test_tensors_without_plain_memory_are_refused_and_nothing_moves(make: Any, reason: str) -> None:
    fine = torch.ones(3)
    before = bytes_in_use()
    with pytest.raises(ValueError, match=reason):
        share_([fine, make()])

    assert segment_of(fine) is None
    assert bytes_in_use() == before


@pytest.mark.parametrize("thing", [3, "text", None, {"a": torch.ones(1)}, [torch.ones(1), 3], [[torch.ones(1)]]])
def test_other_things_are_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="cannot share"):
        share_(thing)


def test_memory_returns_when_the_last_tensor_of_a_module_is_gone() -> None:
    gc.collect()
    before = bytes_in_use()
    net = share_(Net())
    alive = weakref.ref(net)
    survivor = net.scale
    del net
    gc.collect()
    assert alive() is None
    assert bytes_in_use() > before
    del survivor

    assert bytes_in_use() == before


def test_a_large_module_costs_one_descriptor() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(600)))
    default().trim()
    before = len(os.listdir("/proc/self/fd"))
    share_(net)

    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert len({segment_of(parameter) for parameter in net.parameters()}) == 1


def test_a_copy_is_ordinary_memory() -> None:
    net = share_(Net())

    assert all(segment_of(parameter) is None for parameter in copy.deepcopy(net).parameters())


def test_tensors_leave_nothing_behind() -> None:
    default().trim()
    with Footprint.watch() as footprint:
        kept = [pccl.torch.empty(5), share_(torch.ones(5 << 20)), share_(Net())]
        assert footprint.leaks(0) != []
        kept.clear()
        gc.collect()
        default().trim()

        assert footprint.leaks() == []


def test_a_forked_child_shares_the_parameters_and_harms_nobody() -> None:
    """Goal: the child writes what the parent reads, and the child's end releases nothing in the parent's arena."""
    code = """
import os, torch, pccl
from pccl.torch import share_
module = share_(torch.nn.Linear(3, 3))
pid = os.fork()
if pid == 0:
    module.bias.data.fill_(7)
    own = pccl.torch.zeros(3)
    del module
    os._exit(0 if own.tolist() == [0, 0, 0] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert module.bias.tolist() == [7, 7, 7]
other = pccl.torch.zeros(12)
assert module.bias.tolist() == [7, 7, 7]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")

# cython: language_level=3, auto_pickle=False
"""One reduce in the training process: its checked arguments and its memory, from launch to outcome.

Tensors in shared segments are reduced where they are. If reduced in place, they need a *backup* until the verdict:
workers fill it, and after a failure the old bytes are restored from it. Any other tensor is *staged*: copied into a
piece of the arena at launch and copied back on success, so the original is its own backup. Tensors and pieces are held
until no worker can use them any more. A quantized reduce also has an *area* for encoded blocks.

The training process waits during a launch, and the launch runs with caches that training has filled with other data:
its cost is the amount of code and the number of objects it touches. So plain tensors of a class and dtype that were
seen before are read in C, all others through `TensorMemory`. One function, `validate`, checks both.
"""

import sys
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy
from operator import index

from pccl._core.dataplane.backup cimport backup_bytes, clear
from pccl._core.dataplane.board cimport BACKED_UP
from pccl._core.protocol.operations cimport PackedNumbers, PackedOperation, PackedReduced
from pccl._core.records cimport blank, offset_of, put
from pccl.memory.arena cimport Arena, Piece, default
from pccl.memory.completion_slots cimport Slot
from pccl._core.dataplane.backup import restore
from pccl._core.dataplane.quantization import area_bytes
from pccl._core.kernels.tensor_copy import copy
from pccl._core.protocol.codec import pack
from pccl._core.protocol.events import NUMBERS, REDUCED
from pccl._core.protocol.mailbox import CallReduce
from pccl._core.protocol.operations import DATATYPES
from pccl._core.protocol.outcomes import KIND_COLLECTIVE, split
from pccl.values import (
    DataType,
    DeviceType,
    QuantizationAlgorithm,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
)

from .call_slots cimport CallSlots
from .tensors import TensorMemory, check_quantization

NOTHING = ReduceInfo(0, 0, 0)

# A message with one operation, all zero. Its first bytes are the header that the mailbox puts before any operation.
cdef bytes EMPTY_MESSAGE = pack(CallReduce(bytes(sizeof(PackedOperation))))

cdef enum:
    MESSAGE_BYTES_MAX = 128         # an operation with the header of its message

if not sizeof(PackedOperation) < len(EMPTY_MESSAGE) <= MESSAGE_BYTES_MAX:
    raise ImportError(f"a message of {len(EMPTY_MESSAGE)} bytes has no room for an operation, or is too long")
if sizeof(PackedNumbers) != NUMBERS.size or sizeof(PackedReduced) != REDUCED.size + NUMBERS.size:
    raise ImportError("the packed numbers of a reduce differ between C and Python: compile pccl again")


# --- The request ---------------------------------------------------------------------------------------------------


# One tensor as the checks see it.
cdef struct TensorView:
    uintptr_t address
    uint64_t elements
    uint32_t itemsize               # bytes of an element
    uint8_t datatype
    bint on_device                  # in the memory of a GPU
    int device_index                # which one
    bint writable


@cython.final
@cython.freelist(8)
cdef class ReduceRequest:
    """A valid reduce: its arguments are checked, and its two tensors are held."""


def request(send, recv, op, tag, operand, quantization) -> ReduceRequest:
    """Check the arguments of `all_reduce`. Raises AssertionError or ValueError, which say what is wrong."""
    cdef TensorView sent, received
    read_tensor(send, &sent)
    received = sent
    if recv is not send:
        read_tensor(recv, &received)
        if type(recv) is not type(send) and library_of(recv) != library_of(send):
            libraries = f"send is a {library_of(send)} tensor but recv is a {library_of(recv)} one"
            raise ValueError(f"{libraries}; pass two tensors of one library")
    cdef object datatype = datatype_of(operand)
    validate(&sent, &received, datatype, sent.elements, quantization)
    return make_request(send, recv, &sent, &received, sent.elements, op, tag, quantization)


def request_of(descriptor) -> ReduceRequest:
    """The request of a `ReduceOpDescriptor`, which was checked when it was made."""
    cdef TensorView sent, received
    reduce = getattr(descriptor, "reduce_descriptor", None)
    if reduce is None:
        raise ValueError(f"expected a ReduceOpDescriptor, got {descriptor!r}")
    read_memory(descriptor.send, &sent)
    read_memory(descriptor.recv, &received)
    return make_request(
        descriptor.send.owner, descriptor.recv.owner, &sent, &received,
        reduce.count, reduce.op, reduce.tag, reduce.quantization_options,
    )


def validate_descriptor(send, recv, reduce) -> None:
    """Check a `ReduceDescriptor` of two `TensorMemory`. Raises AssertionError or ValueError; both say what is wrong."""
    cdef TensorView sent, received
    if not isinstance(reduce, ReduceDescriptor):
        raise ValueError(f"expected a ReduceDescriptor, got {reduce!r}")
    for memory in (send, recv):
        if not isinstance(memory, TensorMemory):
            raise ValueError(f"expected a TensorMemory, got {memory!r}; ReduceOpDescriptor.from_torch makes it")
    if reduce.operand_descriptor is None:
        raise ValueError("a ReduceDescriptor needs an operand_descriptor: ReduceOperandDescriptor(DataType.FLOAT)")
    if not hasattr(reduce.count, "__index__") or reduce.count < 0:
        raise ValueError(f"count must be an integer that is not negative, not {reduce.count!r}")
    read_memory(send, &sent)
    read_memory(recv, &received)
    # A count above 64 bits is above that of any tensor too.
    cdef uint64_t count = min(index(reduce.count), (1 << 64) - 1)
    validate(&sent, &received, datatype_of(reduce.operand_descriptor), count, reduce.quantization_options)
    make_request(send, recv, &sent, &received, count, reduce.op, reduce.tag, reduce.quantization_options)


cdef ReduceRequest make_request(
    send, recv, const TensorView *sent, const TensorView *received, uint64_t elements, op, tag, quantization
):
    cdef ReduceRequest made = ReduceRequest.__new__(ReduceRequest)
    if type(op) is not ReduceOp:
        raise ValueError(f"op must be a ReduceOp such as ReduceOp.AVG, not {op!r}")
    try:
        made.tag = index(tag)
    except TypeError:
        raise ValueError(f"tag must be an integer, not {tag!r}") from None
    try:
        <uint64_t> made.tag
    except OverflowError:
        raise ValueError(f"a tag is 0 to {(1 << 64) - 1}, not {tag}") from None
    made.elements = elements
    made.sent = send
    made.received = recv
    made.source = sent.address
    made.target = received.address
    made.itemsize = sent.itemsize
    made.on_device = sent.on_device
    made.datatype = sent.datatype
    made.op = op._value_  # `value` is a property, and a slow one
    if quantization is not None and quantization.algorithm is not QuantizationAlgorithm.NONE:
        made.algorithm = quantization.algorithm.value
        made.quantized = quantization.quantized_datatype.value
    return made


# --- Validation ---------------------------------------------------------------------------------------------------


cdef object datatype_of(operand):
    """The data type that an operand descriptor names; None without one."""
    if operand is None:
        return None
    if not isinstance(operand, ReduceOperandDescriptor):
        raise ValueError(f"operand_descriptor must be a ReduceOperandDescriptor or None, not {operand!r}")
    if type(operand.datatype) is not DataType:
        raise ValueError(f"the datatype of an operand_descriptor must be a DataType, not {operand.datatype!r}")
    return operand.datatype


cdef int validate(
    const TensorView *send, const TensorView *recv, datatype, uint64_t count, quantization
) except -1:
    """Check whether two tensors can be reduced as `count` elements of a datatype (None: their own)."""
    if send.datatype != recv.datatype:
        raise AssertionError(
            f"send is {DATATYPES[send.datatype]} but recv is {DATATYPES[recv.datatype]}; pass two tensors of one dtype"
        )
    if send.elements != recv.elements:
        raise AssertionError(
            f"send has {send.elements} elements but recv has {recv.elements}; pass two tensors of one size"
        )
    if send.on_device != recv.on_device or send.device_index != recv.device_index:
        raise AssertionError("send and recv are on different devices; move one to the device of the other")
    if not recv.writable:
        raise AssertionError("recv is read-only; pass a tensor or array that can be written")
    if datatype is not None and <uint8_t> datatype._value_ != send.datatype:
        raise AssertionError(
            f"the descriptor says {datatype.name} but the tensors are {DATATYPES[send.datatype]}; make them the same"
        )
    if count > send.elements:
        raise AssertionError(
            f"the descriptor counts {count} elements but the tensors have {send.elements}; count at most those"
        )
    if quantization is not None:
        check_quantization(DataType(send.datatype), quantization)
    return 0


# --- Tensors ------------------------------------------------------------------------------------------------------

# The data type of a dtype that was seen before.
@cython.final
cdef class Kind:
    cdef uint8_t number
    cdef uint32_t itemsize


cdef dict kinds = {}                # dtype, of numpy or torch, to Kind
# The classes of plain tensors; None until a tensor of that library was reduced.
cdef object array_class = None
cdef object tensor_class = None
cdef object parameter_class = None
cdef object strided = None          # the layout of dense tensors, as torch calls it


cdef int read_tensor(tensor, TensorView *view) except -1:
    """Read the address, size and type of a tensor. Raises ValueError or AssertionError if it cannot be reduced."""
    if not read_plain(tensor, view):
        memory = TensorMemory.of(tensor)
        read_memory(memory, view)
        remember(tensor, memory.datatype)
    return 0


cdef int read_memory(memory, TensorView *view) except -1:
    view.address = memory.data_ptr
    view.elements = memory.numel
    view.itemsize = memory.datatype.itemsize
    view.datatype = memory.datatype.value
    view.on_device = memory.device_type is DeviceType.CUDA
    view.device_index = memory.device_index
    view.writable = memory.writable
    return 0


cdef bint read_plain(tensor, TensorView *view) except -1:
    """The same in C, for a contiguous tensor on the host whose class and dtype were seen before; else False."""
    cdef Py_buffer buffer
    cdef Kind kind
    cdef object cls = type(tensor)
    if cls is array_class:
        kind = <Kind> kinds.get(tensor.dtype)
        if kind is None:
            return False
        try:
            PyObject_GetBuffer(tensor, &buffer, PyBUF_SIMPLE)
        except (ValueError, BufferError):
            return False  # it is not contiguous
        view.address = <uintptr_t> buffer.buf
        view.elements = buffer.len // kind.itemsize
        view.writable = not buffer.readonly
        PyBuffer_Release(&buffer)
    elif cls is tensor_class or cls is parameter_class:
        kind = <Kind> kinds.get(tensor.dtype)
        if kind is None or tensor.layout is not strided or not tensor.is_cpu or not tensor.is_contiguous():
            return False
        view.address = tensor.data_ptr()
        view.elements = tensor.numel()
        view.writable = True
    else:
        return False
    view.itemsize = kind.itemsize
    view.datatype = kind.number
    view.on_device = False
    view.device_index = 0
    return True


cdef int remember(tensor, datatype) except -1:
    """Remember the class and dtype, so that later tensors of both are read in C."""
    global array_class, tensor_class, parameter_class, strided
    cdef Kind kind = Kind()
    cdef object numpy = sys.modules.get("numpy"), torch = sys.modules.get("torch")
    if numpy is not None and type(tensor) is numpy.ndarray:
        array_class = numpy.ndarray
    elif torch is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        tensor_class, parameter_class, strided = torch.Tensor, torch.nn.Parameter, torch.strided
    else:
        return 0
    kind.number = datatype.value
    kind.itemsize = datatype.itemsize
    kinds[tensor.dtype] = kind
    return 0


cdef str library_of(tensor):
    return type(tensor).__module__.partition(".")[0]


# --- From launch to outcome --------------------------------------------------------------------------------------


@cython.final
@cython.freelist(8)
cdef class PendingReduce:
    """A reduce between its launch and its outcome."""

    def __init__(self, Slot slot not None, ReduceRequest request not None, uint32_t world):
        self.prepare(slot, request, world)

    cdef int prepare(self, Slot slot, ReduceRequest request, uint32_t world) except -1:
        self.slot = slot
        self.tag = request.tag
        self.request = request
        self.nbytes = request.elements * request.itemsize
        try:
            self.find_memory(world)
            if request.algorithm:
                how = request.datatype, request.algorithm, request.quantized
                self.area = default().take(area_bytes(request.elements, *how, world))
        except BaseException:
            self.release()
            raise
        return 0

    cdef int find_memory(self, uint32_t world) except -1:
        """Find the segments and offsets of both tensors; stage the tensor or take a backup if necessary."""
        cdef ReduceRequest asked = self.request
        cdef Arena arena = default()
        cdef uint64_t distance = max(asked.source, asked.target) - min(asked.source, asked.target)
        if self.nbytes and not asked.on_device and (distance == 0 or distance >= self.nbytes):
            self.send_segment = arena.locate(asked.source, self.nbytes, &self.send_offset)
            self.recv_segment = arena.locate(asked.target, self.nbytes, &self.recv_offset)
        if self.send_segment == 0 or self.recv_segment == 0:
            self._staging = arena.take(self.nbytes)
            self.send_segment = self.recv_segment = self._staging.region.number
            self.send_offset = self.recv_offset = self._staging.offset
            self.copy_in()
        elif distance == 0:
            self.backup = arena.take(backup_bytes(asked.elements, asked.itemsize, world))
            clear(<uintptr_t> self.backup.start, asked.elements, asked.itemsize, world)
        return 0

    @property
    def segments(self) -> tuple:
        """The segments that the workers must map; 0 means no segment."""
        return self.send_segment, self.recv_segment, number_of(self.backup), number_of(self.area)

    cdef int share(self, CallSlots calls, str name) except -1:
        """Make the segments known to the actor."""
        cdef Arena arena = default()
        calls.make_known(name, self.send_segment, arena)
        if self.recv_segment != self.send_segment:
            calls.make_known(name, self.recv_segment, arena)
        calls.make_known(name, number_of(self.backup), arena)
        calls.make_known(name, number_of(self.area), arena)
        return 0

    def operation(self) -> bytes:
        """The packed `Operation` for the actor."""
        cdef PackedOperation packed
        self.fill(&packed)
        return (<char *> &packed)[:sizeof(PackedOperation)]

    def message(self) -> bytes:
        """The message that `post` sends: `CallReduce` with this operation."""
        cdef char room[MESSAGE_BYTES_MAX]
        return room[:self.write(room)]

    cdef int fill(self, PackedOperation *packed) except -1:
        cdef ReduceRequest asked = self.request
        packed.slot = self.slot.index
        packed.generation = self.slot.generation
        packed.tag = asked.tag
        packed.count = asked.elements
        packed.datatype = asked.datatype
        packed.op = asked.op
        packed.algorithm = asked.algorithm
        packed.quantized = asked.quantized
        packed.flags = 0 if self.backup is None else BACKED_UP
        packed.send_segment = self.send_segment
        packed.send_offset = self.send_offset
        packed.recv_segment = self.recv_segment
        packed.recv_offset = self.recv_offset
        packed.backup_segment = number_of(self.backup)
        packed.backup_offset = 0 if self.backup is None else self.backup.offset
        packed.area_segment = number_of(self.area)
        packed.area_offset = 0 if self.area is None else self.area.offset
        return 0

    cdef Py_ssize_t write(self, char *room) except -1:
        cdef Py_ssize_t length = PyBytes_GET_SIZE(EMPTY_MESSAGE)
        cdef Py_ssize_t ahead = length - <Py_ssize_t> sizeof(PackedOperation)
        memcpy(room, PyBytes_AS_STRING(EMPTY_MESSAGE), ahead)
        self.fill(<PackedOperation *> (room + ahead))
        return length

    cdef int post(self, CallSlots calls, str name) except -1:
        """Send the operation to the actor, which starts it."""
        cdef char room[MESSAGE_BYTES_MAX]
        cdef Py_ssize_t length = self.write(room)
        calls.visit("training.CallReduce")
        return calls.send(name, room, length)

    def succeed(self, bytes payload not None):
        """End with success: return what the reduce did."""
        cdef PackedNumbers numbers
        return self.hand_over(payload, &numbers)

    cdef hand_over(self, bytes payload, PackedNumbers *numbers):
        self.over = True
        if self._staging is not None:
            self.copy_out()
        self.release()
        return info_of(payload, numbers)

    cpdef fail(self):
        """End with failure: restore a tensor that was reduced in place. No worker uses its memory any more."""
        self.over = True
        if self.backup is not None:
            saved = <uintptr_t> self.backup.start
            restore(self.request.target, saved, self.request.elements, self.request.itemsize)
        self.release()

    cpdef release(self):
        """Return the pieces to the arena."""
        if self._staging is not None:
            self._staging.release()
        if self.backup is not None:
            self.backup.release()
        if self.area is not None:
            self.area.release()
        self._staging = self.backup = self.area = None

    cdef int copy_in(self) except -1:
        if self.request.on_device:
            from pccl.torch.cuda_staging import copy_to_host

            copy_to_host(self._staging, self.request.sent, self.nbytes)
        else:
            copy(<uintptr_t> self._staging.start, self.request.source, self.nbytes)
        return 0

    cdef int copy_out(self) except -1:
        if self.request.on_device:
            from pccl.torch.cuda_staging import copy_to_device

            copy_to_device(self.request.received, self._staging, self.nbytes)
        else:
            copy(self.request.target, <uintptr_t> self._staging.start, self.nbytes)
        return 0


cdef inline uint32_t number_of(Piece piece) noexcept:
    return 0 if piece is None else piece.region.number


# --- The outcome ----------------------------------------------------------------------------------------------------


# The offsets of the fields of a ReduceInfo. It is frozen, so its slots are filled directly; six calls of
# `object.__setattr__` would take longer than the rest of an outcome.
cdef Py_ssize_t[6] offsets
for _position, _name in enumerate(ReduceInfo.__match_args__):
    offsets[_position] = offset_of(ReduceInfo, _name)


cdef info_of(bytes payload, PackedNumbers *numbers):
    """The ReduceInfo of a successful reduce; `numbers` becomes those of the world in which it ran."""
    cdef PackedReduced said
    if PyBytes_GET_SIZE(payload) != sizeof(PackedReduced):
        raise ValueError(f"a reduce was answered with {PyBytes_GET_SIZE(payload)} bytes, not {sizeof(PackedReduced)}")
    memcpy(&said, PyBytes_AS_STRING(payload), sizeof(PackedReduced))
    numbers[0] = said.numbers
    info = blank(ReduceInfo)
    put(info, offsets[0], said.world)
    put(info, offsets[1], said.sent)
    put(info, offsets[2], said.received)
    put(info, offsets[3], said.network_ns / 1e9)
    put(info, offsets[4], said.neighbour_ns / 1e9)
    put(info, offsets[5], said.reduce_ns / 1e9)
    return info


def read_failure(int outcome, bytes payload not None) -> tuple:
    """Split a failure into result, kind, the numbers of the world if the master sent them, and the reason."""
    result, kind = split(outcome)
    numbers = b""
    if kind == KIND_COLLECTIVE:
        numbers, payload = payload[: NUMBERS.size], payload[NUMBERS.size :]
    return result, kind, numbers, payload.decode("utf-8", "replace")

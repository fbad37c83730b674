"""The blocking user API of one peer: validate, post to the peer actor, wait, return or raise.

The library runs no thread in the training process. `client.actor_client` sends a call to the peer actor and returns
its result; `client.reduce_request` checks a reduce and prepares its memory. Nothing here decides about the run.

A reduce is *un-awaited* from its launch until `wait()` has returned its outcome. A reduce whose caller was interrupted
is *abandoned*: no caller will wait for it, but its memory is held until no worker can use it.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pccl._core.protocol.events import NUMBERS
from pccl._core.protocol.mailbox import CallConnect, CallFinish, CallOptimize, CallPending, CallTopology
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.process import usable_cores
from pccl.actors.io.addresses import format_address, parse_address, resolve
from pccl.actors.io.logs import configure_from_environment
from pccl.client.actor_client import ActorClient
from pccl.client.handle import AsyncReduceHandle
from pccl.client.pending_reduces import NOT_A_MEMBER, PendingReduces
from pccl.client.reduce_request import request, request_of
from pccl.client.state_sync import Syncs

from .errors import MasterConnectionError, RunFinishedError, TooFewPeersError, UsageError
from .options import LANES_MAX, Options, nanoseconds
from .shared_state import SharedState
from .values import Attribute, ReduceInfo, ReduceOp, Result, SharedStateSyncInfo, SharedStateSyncStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pccl.client.reduce_descriptor import ReduceOpDescriptor

    from .values import QuantizationOptions, ReduceOperandDescriptor

_log = logging.getLogger("pccl.peer")

DIGEST_THREADS_MAX = 8  # more do not read memory faster
FINISHED = "the run is finished: this peer and all other members have called finish()"
DEL_WAIT = 0.5  # a communicator that is garbage-collected, not closed, delays its process no longer than this


class Numbers(NamedTuple):
    """What a topology round or a collective tells a member: its own id, then numbers of its group and of the run."""

    peer: int
    round: int
    epoch: int
    global_world: int
    group_world: int
    groups: int
    largest_group: int


class Communicator:
    """One membership in one run: `connect`, take part, `close`.

    `address` is the master's `host:port`. Peers of one `peer_group` share a ring and a shared state.
    `p2p_connection_pool_size` is the number of connections to each neighbour; 0 means 1.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        options: Options | None = None,
    ) -> None:
        self._actor: ActorClient | None = None  # first, so that __del__ works after any error below
        self._process = os.getpid()
        self._host, self._port = parse_address(address)
        if not _is_integer(peer_group) or not 0 <= peer_group < 1 << 32:
            raise ValueError(f"peer_group must be 0 to {(1 << 32) - 1}, not {peer_group!r}")
        pool_size = p2p_connection_pool_size
        if not _is_integer(pool_size) or not 0 <= pool_size <= LANES_MAX:
            raise ValueError(f"p2p_connection_pool_size must be 0 to {LANES_MAX}, not {pool_size!r}")
        if options is not None and not isinstance(options, Options):
            raise ValueError(f"options must be a pccl.Options, not {options!r}")
        self._group = peer_group
        self._lanes = pool_size or 1
        self._options = (options or Options()).overridden()
        self._reduces: PendingReduces | None = None  # of this membership
        self._syncs: Syncs | None = None  # of this membership
        self._unpacked: tuple[bytes, Numbers | None] = b"", None  # the numbers that were read last: packed, unpacked
        self._closed = False
        self._finished = False  # finish() has returned
        configure_from_environment()

    # ------------------------------------------------------------------------------------------ membership

    def connect(self, n_attempts: int = 5) -> None:
        """Register with the master and wait to be admitted.

        The first peer of a run is admitted at once, a later peer when all members call `update_topology`. Raises
        `MasterConnectionError` after the last failed attempt, `UsageError` if this communicator is connected,
        `RunFinishedError` if the run is finished, and `KickedError` if the master serves a run of another name
        (`Options.run`).
        """
        self._check_process("connect")
        self._check_unfinished("connect")
        if not _is_integer(n_attempts) or n_attempts < 1:
            raise ValueError(f"n_attempts must be at least 1, not {n_attempts!r}")
        if self._actor is not None and not self._actor.calls.over:
            raise UsageError(Result.INVALID_USAGE, "connect", "already connected; close() this communicator first")
        self._drop_actor()
        addresses, attempts_left = self._resolve(n_attempts)
        advertise_host, advertise_port = self._advertised()
        self._closed = False
        self._actor = ActorClient(self._options)
        self._reduces = PendingReduces(self._actor)
        self._syncs = Syncs(self._actor, self._reduces.learn, self._options.digest_threads or _cores())
        try:
            text = "\n".join(f"{host} {port}" for host, port in addresses)
            payload = self._actor.call(
                "connect",
                lambda slot: CallConnect(
                    slot.index,
                    slot.generation,
                    attempts_left,
                    self._group,
                    self._lanes,
                    text.encode(),
                    advertise_host,
                    advertise_port,
                    self._options.encode().encode(),
                    min(_log.getEffectiveLevel(), 255),
                ),
            )
        except MasterConnectionError as error:
            self._drop_actor()
            where = format_address(self._host, self._port)
            message = f"no connection to the master at {where} within {n_attempts} attempts: {error.message}"
            raise MasterConnectionError(error.result, "connect", message) from None
        except BaseException:
            self._drop_actor()
            raise
        self._reduces.learn(payload)
        self._actor.catch_up()  # what it has to say about the options

    def update_topology(self) -> None:
        """Admit waiting peers into the rings of their groups; blocks until all members of all groups call it.

        Lost peers are removed at once, without this call. Raises `UsageError` while a reduce of this peer is
        un-awaited.
        """
        self._update_topology("update_topology", 0, None)

    def optimize_topology(self) -> None:
        """Measure unknown edges and adopt faster rings; blocks until all members of all groups call it.

        An edge is an ordered pair of peers. A ring is as fast as its slowest edge; a ring whose slowest edge is clearly
        faster replaces the present one. The first call takes about `Options.probe_time` for each peer that a group has
        beyond the first; edges that were measured recently are not measured again. A peer that is lost meanwhile does
        not fail the call. Raises `UsageError` if this peer is alone in the run.
        """
        name = "optimize_topology"
        link = self._member(name)
        reduces = self._reducing(name)
        reduces.require_none(name)
        reduces.learn(link.call(name, lambda slot: CallOptimize(slot.index, slot.generation)))

    def finish(self) -> None:
        """End the run; blocks until all members of all groups call it.

        After that nobody is a member any more: every later call on this communicator, and every peer that connects to
        this run later, gets `RunFinishedError` instead of waiting. Numbers such as `get_attribute` can still be read.
        Another run begins with another name (`Options.run`) or a master that is started with `--new-run`. A peer that
        is lost meanwhile does not fail the call. If the master is lost, `connect()` says whether the run was finished.
        Raises `UsageError` while a reduce of this peer is un-awaited.
        """
        name = "finish"
        link = self._member(name)
        reduces = self._reducing(name)
        reduces.require_none(name)
        link.call(name, lambda slot: CallFinish(slot.index, slot.generation))
        self._finished = True
        reduces.run_finished(FINISHED)

    def wait_for_world_size(self, n: int, timeout: float | None = None) -> int:
        """Take part in topology rounds until this peer's group has `n` members; return how many it has.

        Returns at once if the last round left the group with `n` members: the peer that completes a group learns
        this from `connect`, and the other members may have left this call already. Raises `TooFewPeersError` after
        `timeout` seconds.
        """
        if not _is_integer(n) or n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}: a group has at least 1 member")
        self._check_unfinished("wait_for_world_size")
        deadline_ns = None if timeout is None else monotonic_ns() + nanoseconds(timeout)
        while (size := self._last_round("wait_for_world_size").group_world) < n:
            try:
                self._update_topology("wait_for_world_size", n, deadline_ns)
            except TooFewPeersError as error:
                message = (
                    f"{size} of {n} peers are in group {self._group} after {timeout} s: start more, or wait longer"
                )
                raise TooFewPeersError(error.result, error.func_name, message) from None
        return size

    def are_peers_pending(self) -> bool:
        """Return whether peers wait to be admitted: the same answer for all members, once all of them have asked.

        May be called while collectives run, from another thread too.
        """
        payload = self._member("are_peers_pending").call(
            "are_peers_pending", lambda slot: CallPending(slot.index, slot.generation)
        )
        return payload != b"\0"

    def get_attribute(self, attribute: Attribute) -> int:
        """Return a number about the run, as of this peer's last topology round or collective, failed or not.

        Peers that wait to be admitted are never counted. Raises `UsageError` before `connect`.
        """
        numbers = self._last_round("get_attribute")
        if attribute is Attribute.GLOBAL_WORLD_SIZE:
            return numbers.global_world
        if attribute is Attribute.LOCAL_WORLD_SIZE:
            return numbers.group_world
        if attribute is Attribute.NUM_DISTINCT_PEER_GROUPS:
            return numbers.groups
        if attribute is Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
            return numbers.largest_group
        raise ValueError(f"attribute must be an Attribute such as Attribute.LOCAL_WORLD_SIZE, not {attribute!r}")

    # ------------------------------------------------------------------------------------------ collectives

    def all_reduce(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> ReduceInfo:
        """Reduce `send` over all members of the group into `recv`, which may be the same tensor.

        Raises `PeerLostError` if a peer was lost: a tensor that is reduced in place has its old content, the survivors
        are rewired, and the call can be repeated at once. Raises `TooFewPeersError` if this peer is alone in its group.
        """
        asked = request(send, recv, op, tag, operand_descriptor, quantization_options)
        outcome = self._reducing("all_reduce").run("all_reduce", asked)
        if outcome.result:
            raise outcome.error("all_reduce")
        return outcome.info

    def all_reduce_async(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> AsyncReduceHandle:
        """Launch a reduce and return at once; `wait()` on the handle returns its result.

        Neither tensor may be touched until then. Up to `Options.slots` reduces may be in flight, each with its own tag.
        """
        asked = request(send, recv, op, tag, operand_descriptor, quantization_options)
        reduces = self._reducing("all_reduce_async")
        return AsyncReduceHandle(reduces, reduces.launch("all_reduce_async", asked))

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Run several reduces, `max_in_flight` at a time, and repeat those that fail because a peer was lost.

        Returns the bytes of all reduces summed. Raises `TooFewPeersError` if this peer is left alone in its group.
        """
        if not _is_integer(max_in_flight) or max_in_flight < 1:
            raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight!r}")
        name = "all_reduce_multiple_with_retry"
        return self._reducing(name).run_all(name, [request_of(descriptor) for descriptor in descriptors], max_in_flight)

    # ------------------------------------------------------------------------------------------ shared state

    def sync_shared_state(
        self, shared_state: SharedState, strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR
    ) -> SharedStateSyncInfo:
        """Make the state of all members of the group the same, bit for bit; only what differs is sent.

        The members agree on the content held by most up-to-date peers. Peers that differ are overwritten; peers that
        are outdated also take over the revision. The application adds one to the revision between two syncs.

        Raises `PeerLostError` if the peers that hold the elected content were lost. The call may be repeated at once
        with the same state: it failed on all remaining members, and no revision changed. Tensors that a transfer had
        begun to overwrite keep that mix of old and new bytes; the next sync overwrites it and never elects it.
        """
        if not isinstance(shared_state, SharedState):
            raise ValueError(f"expected a SharedState, got {type(shared_state).__qualname__}")
        try:
            chosen = SharedStateSyncStrategy(strategy)
        except ValueError:
            usual = SharedStateSyncStrategy.ENFORCE_POPULAR
            raise ValueError(f"strategy must be a SharedStateSyncStrategy such as {usual}, not {strategy!r}") from None
        name = "sync_shared_state"
        self._reducing(name).require_none(name)
        if (syncs := self._syncs) is None:  # another thread closed this communicator meanwhile
            raise UsageError(Result.INVALID_USAGE, name, NOT_A_MEMBER)
        return syncs.run(shared_state, chosen)

    # ------------------------------------------------------------------------------------------ names and numbers

    @property
    def peer_id(self) -> int:
        """The number that names this peer in the master's log and status."""
        return self._last_round("peer_id").peer

    @property
    def topology_round(self) -> int:
        """How many topology rounds the run has completed: the same number on all members after the same round."""
        return self._last_round("topology_round").round

    def close(self) -> None:
        """Leave the run; the other members are told at once. A second call does nothing."""
        self._check_process("close")
        self._closed = True
        if self._actor is not None:
            self._actor.leave(self._options.close_timeout)
            self._drop_actor()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        if self._process == os.getpid():
            actor.leave(DEL_WAIT)
            actor.close()
            if self._reduces is not None:
                self._reduces.close()
        else:
            actor.disown()

    def __repr__(self) -> str:
        where = format_address(self._host, self._port)
        numbers = self._numbers()
        state = "closed" if self._closed else f"peer {numbers.peer}" if numbers else "not connected"
        return f"<Communicator {where} group={self._group} lanes={self._lanes} {state}>"

    # ------------------------------------------------------------------------------------------ details

    def _update_topology(self, name: str, wanted: int, deadline_ns: int | None) -> None:
        link = self._member(name)
        reduces = self._reducing(name)
        reduces.require_none(name)
        payload = link.call(
            name, lambda slot: CallTopology(slot.index, slot.generation, wanted), deadline_ns=deadline_ns
        )
        reduces.learn(payload)

    def _member(self, name: str) -> ActorClient:
        """The actor of this membership. Raises UsageError, which says why there is none."""
        if self._actor is None or self._process != os.getpid():
            self._check_process(name)
            closed = "this communicator is closed: connect() joins the run anew"
            what = closed if self._closed else "not connected: call connect() first"
            raise UsageError(Result.INVALID_USAGE, name, what)
        return self._actor

    def _reducing(self, name: str) -> PendingReduces:
        """The reduces of this membership."""
        self._member(name)
        if (reduces := self._reduces) is None:  # another thread closed this communicator meanwhile
            raise UsageError(Result.INVALID_USAGE, name, NOT_A_MEMBER)
        return reduces

    def _last_round(self, name: str) -> Numbers:
        """The numbers of the last round or collective. Raises UsageError, which says why there are none."""
        self._member(name)
        numbers = self._numbers()
        if numbers is None:
            raise UsageError(Result.INVALID_USAGE, name, NOT_A_MEMBER)
        return numbers

    def _numbers(self) -> Numbers | None:
        reduces = self._reduces  # read once: another thread may be closing or connecting
        packed = None if reduces is None else reduces.numbers
        if packed is None:
            return None
        known = self._unpacked
        if known[0] != packed:
            known = self._unpacked = packed, Numbers._make(NUMBERS.unpack(packed))
        return known[1]

    def _check_unfinished(self, name: str) -> None:
        if self._finished:
            raise RunFinishedError(Result.INVALID_USAGE, name, FINISHED)

    def _check_process(self, name: str) -> None:
        if self._process != os.getpid():
            raise UsageError(
                Result.INVALID_USAGE,
                name,
                f"this communicator belongs to process {self._process}; a forked child must make its own",
            )

    def _resolve(self, attempts: int) -> tuple[list[tuple[str, int]], int]:
        """The master's numeric addresses, and the attempts that are left; a name that does not resolve costs one."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(self._options.retry_interval)
            try:
                return resolve(self._host, self._port), attempts - attempt
            except OSError as error:
                reason = error.strerror or str(error)
            if attempt + 1 < attempts:
                _log.warning(
                    "attempt %d of %d to resolve the master's name %r failed: %s. The next one is in %g s",
                    *(attempt + 1, attempts, self._host, reason, self._options.retry_interval),
                )
        message = f"cannot resolve the master's name {self._host!r} within {attempts} attempts: {reason}"
        raise MasterConnectionError(Result.MASTER_CONNECTION_FAILED, "connect", message)

    def _advertised(self) -> tuple[str, int]:
        if not self._options.advertise:
            return "", 0
        host, port = parse_address(self._options.advertise, 0)
        try:
            return resolve(host, port)[0]
        except OSError as error:
            raise ValueError(f"Options.advertise: cannot resolve {host!r}: {error.strerror or error}") from None

    def _drop_actor(self) -> None:
        actor, self._actor = self._actor, None
        reduces, self._reduces = self._reduces, None
        syncs, self._syncs = self._syncs, None  # memory that it holds is released after the actor has ended
        if actor is not None:
            actor.close()
        if reduces is not None:
            reduces.close()
        del syncs


def _is_integer(value: object) -> bool:
    """Whether a caller passed a whole number, also one of numpy."""
    return hasattr(value, "__index__")


def _cores() -> int:
    """How many threads compute digests: a few of them use the whole memory bandwidth."""
    return min(usable_cores(), DIGEST_THREADS_MAX)

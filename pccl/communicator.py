"""The blocking user API of one peer: validate, post to the peer actor, wait, return or raise.

The training process runs no thread of ours. A call goes down the actor's mailbox; its end is a slot in shared memory
that the caller sleeps on, without the GIL, in short stretches: between two of them Ctrl-C is raised, log lines of the
actor are passed on, and a dead or stopped actor is noticed. Nothing here decides anything about the run.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ._core.events import NUMBERS
from ._core.messages import CallCancel, CallConnect, CallLeave, CallPending, CallTopology, Notice
from ._core.park import monotonic_ns
from ._core.wire import pack, unpack
from .actors.spawning import ActorProcess
from .addresses import format_address, parse_address, resolve
from .errors import (
    MasterConnectionError,
    MasterLostError,
    PCCLError,
    TooFewPeersError,
    UsageError,
    error_from_outcome,
)
from .logs import configure_from_environment
from .memory.slots import SlotsExhaustedError, SlotTable
from .options import LANES_MAX, Options, nanoseconds
from .outcomes import KIND_KICKED, KIND_MASTER_LOST, split
from .values import Attribute, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory.slots import Slot

WAIT_SLICE_NS = 50_000_000  # how long a caller sleeps between looks at the actor: a dead one is noticed within this
NOTICE_INTERVAL_NS = 1_000_000_000  # log lines of the actor are collected this often by calls that never sleep
NOTICE_BYTES_MAX = 4096  # larger than any message from the actor
DEL_WAIT = 0.5  # a communicator that is collected, not closed, does not keep its process waiting

_log = logging.getLogger("pccl.peer")


class Numbers(NamedTuple):
    """What a round tells a member: its own name, then what is the same for its group or for all."""

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
        self._actor: _Actor | None = None  # first, so that __del__ works after any error below
        self._process = os.getpid()
        self._host, self._port = parse_address(address)
        if not 0 <= peer_group < 1 << 32:
            raise ValueError(f"peer_group must be 0 to {(1 << 32) - 1}, not {peer_group}")
        if not 0 <= p2p_connection_pool_size <= LANES_MAX:
            raise ValueError(f"p2p_connection_pool_size must be 0 to {LANES_MAX}, not {p2p_connection_pool_size}")
        self._group = peer_group
        self._lanes = p2p_connection_pool_size or 1
        self._options = (options or Options()).overridden()
        self._numbers: Numbers | None = None  # what the last round said
        self._closed = False
        configure_from_environment()

    # ------------------------------------------------------------------------------------------ membership

    def connect(self, n_attempts: int = 5) -> None:
        """Register with the master and wait to be admitted.

        The first peer of a run is admitted at once, a later one when all members call `update_topology`. Raises
        `MasterConnectionError` after the last failed attempt.
        """
        self._check_process("connect")
        if n_attempts < 1:
            raise ValueError(f"n_attempts must be at least 1, not {n_attempts}")
        if self._actor is not None and not self._actor.over:
            raise UsageError(Result.INVALID_USAGE, "connect", "already connected; close() this communicator first")
        self._drop_actor()
        addresses, attempts_left = self._resolve(n_attempts)
        advertise_host, advertise_port = self._advertised()
        self._closed = False
        self._actor = _Actor(self._options)
        try:
            text = "\n".join(f"{host} {port}" for host, port in addresses)
            payload = self._actor.call(
                "connect",
                lambda slot: CallConnect(
                    slot.index,
                    slot.sequence,
                    attempts_left,
                    self._group,
                    self._lanes,
                    text.encode(),
                    advertise_host,
                    advertise_port,
                    self._options.encode().encode(),
                ),
            )
        except MasterConnectionError as error:
            self._drop_actor()
            where = format_address(self._host, self._port)
            message = f"no connection to the master at {where} in {n_attempts} attempts: {error.message}"
            raise MasterConnectionError(error.result, "connect", message) from None
        except BaseException:
            self._drop_actor()
            raise
        self._numbers = Numbers._make(NUMBERS.unpack(payload))

    def update_topology(self) -> None:
        """Agree with all members of all groups on who is in: admits newcomers, drops the dead, rewires rings."""
        self._update_topology("update_topology", 0, None)

    def wait_for_world_size(self, n: int, timeout: float | None = None) -> int:
        """Take part in topology rounds until this peer's group has `n` members; returns how many it has.

        Returns at once if the last round left it with that many: the peer that completes a group learns so from
        `connect`, and the others, who learn it from this call, may be elsewhere already. Raises `TooFewPeersError`
        after `timeout` seconds.
        """
        if n < 1:
            raise ValueError(f"a group has at least 1 member, {n} cannot be waited for")
        deadline_ns = None if timeout is None else monotonic_ns() + nanoseconds(timeout)
        while (size := self._last_round("wait_for_world_size").group_world) < n:
            self._update_topology("wait_for_world_size", n, deadline_ns)
        return size

    def are_peers_pending(self) -> bool:
        """Whether newcomers wait to be admitted: the same answer for all members. May overlap anything."""
        payload = self._member("are_peers_pending").call(
            "are_peers_pending", lambda slot: CallPending(slot.index, slot.sequence)
        )
        return payload != b"\0"

    def get_attribute(self, attribute: Attribute) -> int:
        """A number of the world as the last round left it. Peers that wait to be admitted are never counted."""
        numbers = self._last_round("get_attribute")
        if attribute is Attribute.GLOBAL_WORLD_SIZE:
            return numbers.global_world
        if attribute is Attribute.LOCAL_WORLD_SIZE:
            return numbers.group_world
        if attribute is Attribute.NUM_DISTINCT_PEER_GROUPS:
            return numbers.groups
        if attribute is Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
            return numbers.largest_group
        raise ValueError(f"{attribute!r} is no Attribute")

    @property
    def peer_id(self) -> int:
        """The number by which the master and its log know this peer."""
        return self._last_round("peer_id").peer

    @property
    def topology_round(self) -> int:
        """How many rounds the run has made: the same number on all members after the same round."""
        return self._last_round("topology_round").round

    def close(self) -> None:
        """Leave the run and tell everybody at once. Harmless when done before."""
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
        else:
            actor.disown()

    def __repr__(self) -> str:
        where = format_address(self._host, self._port)
        state = "closed" if self._closed else f"peer {self._numbers.peer}" if self._numbers else "not connected"
        return f"<Communicator {where} group={self._group} lanes={self._lanes} {state}>"

    # ------------------------------------------------------------------------------------------ details

    def _update_topology(self, name: str, wanted: int, deadline_ns: int | None) -> None:
        payload = self._member(name).call(
            name, lambda slot: CallTopology(slot.index, slot.sequence, wanted), deadline_ns=deadline_ns
        )
        self._numbers = Numbers._make(NUMBERS.unpack(payload))

    def _member(self, name: str) -> _Actor:
        """The actor of a membership, or the error that says why there is none."""
        if self._actor is None or self._process != os.getpid():
            self._check_process(name)
            what = "this communicator is closed" if self._closed else "not connected: call connect() first"
            raise UsageError(Result.INVALID_USAGE, name, what)
        return self._actor

    def _last_round(self, name: str) -> Numbers:
        """What the last round said; read once, because another thread may be closing or connecting."""
        self._member(name)
        numbers = self._numbers
        if numbers is None:
            raise UsageError(Result.INVALID_USAGE, name, "not a member yet, or no longer: connect() has not returned")
        return numbers

    def _check_process(self, name: str) -> None:
        if self._process != os.getpid():
            raise UsageError(
                Result.INVALID_USAGE,
                name,
                f"this communicator belongs to process {self._process}; a forked child must make its own",
            )

    def _resolve(self, attempts: int) -> tuple[list[tuple[str, int]], int]:
        """The master's numeric addresses, and the attempts that are left. A name may not be known yet: that is one."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(self._options.retry_interval)
            try:
                return resolve(self._host, self._port), attempts - attempt
            except OSError as error:
                reason = error.strerror or str(error)
        message = f"cannot resolve the master's name {self._host!r} in {attempts} attempts: {reason}"
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
        self._numbers = None
        if actor is not None:
            actor.close()


class _Actor:
    """The peer actor's process, its mailbox and its slots, as the training process holds them."""

    def __init__(self, options: Options) -> None:
        self._silence_ns = nanoseconds(options.heartbeat_timeout)
        self._start_ns = nanoseconds(options.start_timeout)  # counts until the actor's first beat
        self._noticed_ns = monotonic_ns()
        self._awake_ns = self._looked_ns = self._noticed_ns
        self._left = False  # close() was called, maybe by another thread than the one that waits
        self.over = False  # the membership ended; every further call would only say so again
        self.slots = SlotTable.create(options.slots)
        self.mailbox, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mailbox.setblocking(False)
        try:
            fds = (theirs.fileno(), self.slots.segment.fd)
            self.process = ActorProcess("pccl.actors.peer_actor", fds, fds)
        except BaseException:
            self.mailbox.close()
            self.slots.close()
            raise
        finally:
            theirs.close()

    def call(self, name: str, build: Callable[[Slot], Any], *, deadline_ns: int | None = None) -> bytes:
        """Post a call and wait for its end: its payload, or the exception it ended with."""
        try:
            slot = self.slots.acquire()
        except SlotsExhaustedError as error:
            raise UsageError(Result.INVALID_USAGE, name, str(error)) from None
        except ValueError:
            raise self._dead(name) from None
        try:
            self._looked_ns = monotonic_ns()
            self._post(name, build(slot))
            while not slot.wait(WAIT_SLICE_NS if deadline_ns is None else self._slice(deadline_ns)):
                self._look_around(name, slot)
                if deadline_ns is not None and monotonic_ns() >= deadline_ns and not slot.done:
                    raise TooFewPeersError(Result.TOO_FEW_PEERS, name, "the time to wait for more peers is over")
        except BaseException:
            self._give_up(slot)
            raise
        outcome, payload = slot.result, slot.payload
        slot.release()
        if monotonic_ns() - self._noticed_ns > NOTICE_INTERVAL_NS:
            self._read_notices()
        if outcome == 0:
            return payload
        result, kind = split(outcome)
        self.over = kind in (KIND_KICKED, KIND_MASTER_LOST)
        raise error_from_outcome(result, kind, name, payload.decode("utf-8", "replace"))

    def leave(self, timeout: float) -> None:
        """Say goodbye and give the actor a moment to pass it on."""
        self._left = True
        try:
            slot = self.slots.acquire()
            self._post("close", CallLeave(slot.index, slot.sequence))
        except (PCCLError, OSError, RuntimeError):
            return  # the actor is gone, or everything is in use: closing the mailbox says the same
        self.process.wait(timeout)

    def close(self) -> None:
        """End the process, if it has not ended by itself, and give everything back."""
        self.mailbox.close()
        self.process.kill()
        self.slots.close()

    def disown(self) -> None:
        """Let go of copies that a fork made, without a word to anybody."""
        self.process.disown()
        self.mailbox.close()
        self.slots.close()

    def _post(self, name: str, message: Any) -> None:
        try:
            self.mailbox.send(pack(message))
        except OSError:
            raise self._dead(name) from None

    def _give_up(self, slot: Slot) -> None:
        """The caller was interrupted: withdraw what it asked for. The slot comes back once the actor let go of it."""
        try:
            self._post("cancel", CallCancel(slot.index, slot.sequence))
        except PCCLError:
            pass
        slot.abandon()

    @staticmethod
    def _slice(deadline_ns: int) -> int:
        return max(min(WAIT_SLICE_NS, deadline_ns - monotonic_ns()), 0)

    def _look_around(self, name: str, slot: Slot) -> None:
        """Between two stretches of sleep: pass on log lines, and notice an actor that is dead or stopped."""
        # The actor's last deed may have been to complete this call; so its end is looked at first, the slot after.
        if not self._read_notices():
            if slot.done:
                return
            raise self._dead(name)
        now_ns = monotonic_ns()
        # If this process was itself stopped, the actor may have been too; it gets its time from now on.
        if now_ns - self._looked_ns > self._silence_ns // 2:
            self._awake_ns = now_ns
        self._looked_ns = now_ns
        beat_ns = self.slots.last_beat_ns
        silent_ns = now_ns - max(beat_ns, self._awake_ns)
        if silent_ns > (self._silence_ns if beat_ns else self._start_ns):
            self.over = True
            self.process.kill()  # or it might go on one day, as a member that nobody speaks for
            message = (
                f"the peer actor (pid {self.process.pid}) had not run for {silent_ns / 1e9:.0f} s; it was stopped or "
                "starved, and is ended. connect() starts a new one"
            )
            raise MasterLostError(Result.INTERNAL_ERROR, name, message)

    def _read_notices(self) -> bool:
        """Pass the actor's log lines to the user's log. False if the mailbox is closed."""
        self._noticed_ns = monotonic_ns()
        while True:
            try:
                data = self.mailbox.recv(NOTICE_BYTES_MAX)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            message = unpack(data)
            if isinstance(message, Notice):
                _log.log(message.level, "%s", message.line)

    def _dead(self, name: str) -> PCCLError:
        self.over = True
        if self._left:
            return UsageError(Result.INVALID_USAGE, name, "this communicator was closed by another thread")
        self.process.wait(0.1)
        message = f"the peer actor (pid {self.process.pid}) {self.process.describe_end()}; connect() starts a new one"
        return MasterLostError(Result.INTERNAL_ERROR, name, message)

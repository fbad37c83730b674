"""The training process's side of its peer actor: the process, the mailbox, the completion slots.

A call is a message in the mailbox; its result comes in a slot in shared memory. The caller sleeps on the slot without
the GIL, in short slices. Between two slices Ctrl-C is raised, log lines of the actor are passed on, and a dead or
stopped actor is detected. Descriptors of memory are sent through the mailbox too, each once. Nothing here knows what a
call means. `call_slots` has the fast path; this module has the rare cases.

A pipe tells when the last process of the peer has ended: only the actor and its workers hold its other end. Memory that
they could write to is not reused before that.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import TYPE_CHECKING, Any

from pccl._core.protocol.codec import pack, unpack
from pccl._core.protocol.mailbox import CallCancel, CallLeave, CallShare, CallUnshare, FollowMaster
from pccl._core.protocol.messages import Notice
from pccl._core.protocol.outcomes import split
from pccl._core.system.futex import monotonic_ns
from pccl._core.system.process import is_stopped
from pccl.actors.io.fault_points import planned
from pccl.actors.io.fork import mailbox_pair
from pccl.actors.io.spawn import ActorProcess
from pccl.errors import MasterLostError, PCCLError, TooFewPeersError, UsageError, error_from_outcome
from pccl.memory.completion_slots import SlotTable
from pccl.options import Options, nanoseconds
from pccl.values import Result

from .call_slots import WAIT_SLICE_NS, Callbacks, CallSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pccl.memory.completion_slots import Slot

NOTICE_INTERVAL_NS = 1_000_000_000  # log lines of the actor are collected this often by calls that never sleep
NOTICE_BYTES_MAX = 4096  # larger than any message from the actor
EXIT_WAIT = 5.0  # seconds; killed processes exit at once, unless the kernel is stuck; then we do not wait

_log = logging.getLogger("pccl.peer")


class ActorClient:
    """The peer actor's process, its mailbox and its slots, as the training process holds them."""

    def __init__(self, options: Options) -> None:
        callbacks = Callbacks(
            gone=self._gone,
            full=self._wait_for_room,
            check=self._check_actor,
            catch_up=self.catch_up,
            send_descriptors=self._send_descriptors,
            share=self.share,
        )
        look_ns = nanoseconds(options.look_time)
        # A debug log is collected after every call, while the lines of the master and of the peer are of the same time.
        notice_ns = 0 if _log.isEnabledFor(logging.DEBUG) else NOTICE_INTERVAL_NS
        table = SlotTable.create(options.slots)
        self.calls = CallSlots(table, planned(), callbacks, look_ns=look_ns, notice_ns=notice_ns)
        self._silence_ns = nanoseconds(options.heartbeat_timeout)
        self._start_ns = nanoseconds(options.start_timeout)  # counts until the actor's first beat
        self._awake_ns = self.calls.noticed_ns
        self._freed: set[int] = set()  # segments that the actor still holds: the mailbox had no room to say it
        self._left = False  # close() was called, perhaps by another thread than the one that waits
        self.mailbox, theirs = mailbox_pair()
        self.mailbox.setblocking(False)
        self.calls.fd = self.mailbox.fileno()
        self._life, held = os.pipe()
        try:
            fds = (theirs.fileno(), table.segment.fd, held)
            self.process = ActorProcess("pccl.actors.peer.peer_actor", fds, fds)
        except BaseException:
            self._hang_up()
            table.close()
            os.close(self._life)
            raise
        finally:
            theirs.close()
            os.close(held)

    # ------------------------------------------------------------------------------------------ calls

    def call(self, name: str, build: Callable[[Slot], Any], *, deadline_ns: int | None = None) -> bytes:
        """Post a call and wait for its end. Returns its payload, or raises the exception of its outcome."""
        slot = self.calls.acquire(name)
        try:
            self.calls.post(name, build(slot))
            while not self.calls.wait(name, slot, self.slice(deadline_ns)):
                if deadline_ns is not None and monotonic_ns() >= deadline_ns and not slot.done:
                    raise TooFewPeersError(Result.TOO_FEW_PEERS, name, "the time to wait for more peers is over")
        except BaseException:
            self.give_up(slot)
            raise
        outcome, payload = self.calls.take(slot)
        if outcome == 0:
            return payload
        raise error_from_outcome(*split(outcome), name, payload.decode("utf-8", "replace"))

    def put_back(self, slot: Slot) -> None:
        """Return a slot that was never posted to the actor."""
        self.calls.table.complete(slot.index, slot.generation, 0)
        slot.release()

    def _send_descriptors(self, name: str, data: bytes, fds: tuple[int, ...]) -> None:
        """Put a message with descriptors into the mailbox."""
        self.calls.looked_ns = monotonic_ns()
        while True:
            try:
                socket.send_fds(self.mailbox, [data], list(fds))
            except BlockingIOError:
                self._wait_for_room(name)
            except OSError:
                raise self._gone(name) from None
            else:
                return

    def _wait_for_room(self, name: str) -> None:
        """The mailbox is full: wait until it may have room."""
        _poll(self.mailbox.fileno(), select.POLLOUT, WAIT_SLICE_NS / 1e9)
        self._check_actor(name, None)

    def share(self, name: str, segments: Iterable[int], descriptor: Callable[[int], tuple[int, int]]) -> None:
        """Make segments known to the actor, unless they are known; 0 means no segment.

        It waits for room in the mailbox. Freed segments come first, so the actor holds none of them for long.
        """
        for segment in segments:
            if segment and segment not in self.calls.shared:
                self._send_freed()
                while self._freed:
                    self._wait_for_room(name)
                fd, nbytes = descriptor(segment)
                self.calls.post(name, CallShare(segment, nbytes), (fd,))
                self.calls.shared.add(segment)

    def unshare(self, segment: int) -> None:
        """Tell the actor that a segment was freed. Any thread may call it; it does nothing if the actor is gone.

        It never waits: if the mailbox is full, the next share, unshare or check of the actor sends the number.
        """
        if segment in self.calls.shared:
            self._freed.add(segment)
            self.calls.shared.discard(segment)
            self._send_freed()

    def _send_freed(self) -> None:
        """Tell the actor which segments were freed, as far as the mailbox has room."""
        while self._freed:
            try:
                segment = self._freed.pop()
            except KeyError:
                return  # another thread, or a finaliser, was faster
            try:
                self.mailbox.send(pack(CallUnshare(segment)))
            except BlockingIOError:
                self._freed.add(segment)
                return
            except OSError:
                self._freed.clear()  # the actor is gone, and its memory with it
                return

    def give_up(self, slot: Slot) -> None:
        """The caller was interrupted: cancel its call. The slot is free again once the actor has completed it."""
        self.cancel(slot)
        slot.abandon()

    def cancel(self, slot: Slot) -> None:
        """Ask the actor to end a call early; the slot says how it ended."""
        try:
            self.calls.post("cancel", CallCancel(slot.index, slot.generation))
        except PCCLError:
            pass

    # ------------------------------------------------------------------------------------------ the end

    def leave(self, timeout: float) -> None:
        """Tell the actor to leave the run, and wait until it has told the master, at most `timeout` seconds."""
        self._left = True
        fault = self.calls.fault
        if fault is not None:
            fault.visit("training.CallLeave")
        try:
            slot = self.calls.table.acquire()
            self.mailbox.send(pack(CallLeave(slot.index, slot.generation)))
        except (PCCLError, OSError, RuntimeError):
            return  # the actor is gone, or all slots are in use: closing the mailbox has the same effect
        self.process.wait(timeout)
        self.catch_up()  # its last lines

    def close(self) -> None:
        """End the process, if it has not ended, and release all resources."""
        self._hang_up()
        self.process.kill()
        self.calls.table.close()
        if self._life >= 0:
            self.wait_for_exit()
            os.close(self._life)
            self._life = -1

    def disown(self) -> None:
        """Close the copies of descriptors that a fork made, and send nothing."""
        self.process.disown()
        self._hang_up()
        self.calls.table.close()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def _hang_up(self) -> None:
        self.calls.fd = -1
        self.mailbox.close()

    def wait_for_exit(self) -> None:
        """Return when no process of this peer is left that could write to shared memory. The actor has ended."""
        life = self._life  # another thread may have closed it, and has waited then
        if life >= 0:
            _poll(life, select.POLLIN, EXIT_WAIT)

    # ------------------------------------------------------------------------------------------ between two sleeps

    @staticmethod
    def slice(deadline_ns: int | None) -> int:
        """How long to sleep before the next check of the actor."""
        return WAIT_SLICE_NS if deadline_ns is None else max(min(WAIT_SLICE_NS, deadline_ns - monotonic_ns()), 0)

    def _check_actor(self, name: str, slot: Slot | None) -> None:
        """Between two sleeps: catch up with the actor, and raise if it is dead or stopped."""
        # The actor may have completed this call before it ended, so check the mailbox first and the slot afterwards.
        if not self.catch_up():
            if slot is not None and slot.done:
                return
            raise self._gone(name)
        now_ns = monotonic_ns()
        # If this process was stopped, the actor may have been stopped too; its time counts from now on.
        if now_ns - self.calls.looked_ns > self._silence_ns // 2:
            self._awake_ns = now_ns
        self.calls.looked_ns = now_ns
        beat_ns = self.calls.table.last_beat_ns
        silent_ns = now_ns - max(beat_ns, self._awake_ns)
        if silent_ns > (self._silence_ns if beat_ns else self._start_ns):
            self.calls.over = True
            why = "a signal or a debugger stopped it" if is_stopped(self.process.pid) else "this machine is overloaded"
            self.process.kill()  # otherwise it might continue later, as a member without a training process
            message = (
                f"the peer actor (pid {self.process.pid}) had not run for {silent_ns / 1e9:.0f} s: {why}. "
                "It was ended; connect() starts a new one"
            )
            raise MasterLostError(Result.INTERNAL_ERROR, name, message)

    def catch_up(self) -> bool:
        """Send what had no room, and pass the actor's log lines to the user's log. False if the mailbox is closed."""
        self.calls.noticed_ns = monotonic_ns()
        self._send_freed()
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
            elif isinstance(message, FollowMaster):
                self._silence_ns = message.silence_ns

    def _gone(self, name: str) -> PCCLError:
        """The exception that says why the actor cannot be called any more."""
        self.calls.over = True
        if self._left:
            return UsageError(Result.INVALID_USAGE, name, "this communicator was closed by another thread")
        self.process.wait(0.1)
        message = f"the peer actor (pid {self.process.pid}) {self.process.describe_end()}; connect() starts a new one"
        return MasterLostError(Result.INTERNAL_ERROR, name, message)


def _poll(fd: int, event: int, timeout: float) -> None:
    """Wait for one descriptor. Unlike select(), poll() allows descriptors from 1024 on."""
    poll = select.poll()
    poll.register(fd, event)
    poll.poll(timeout * 1000)

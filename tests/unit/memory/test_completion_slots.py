"""Completion slots: each completion reaches its waiter once, and never a later user of an abandoned slot."""

import os
import signal
import struct
import threading
import time

import pytest

from pccl._core.system.futex import Word, monotonic_ns
from pccl.memory.completion_slots import (
    AWAITED,
    DONE,
    FREE,
    PAYLOAD_BYTES_MAX,
    PENDING,
    SLOT_BYTES,
    Slot,
    SlotsExhaustedError,
    SlotTable,
)
from pccl.memory.segments import Segment
from pccl.options import Options

SECOND_NS = 1_000_000_000


@pytest.fixture
def table():
    with SlotTable.create(4) as created:
        yield created


@pytest.fixture
def actor(table):
    """The same table through a mapping of its own, as in the actor."""
    with SlotTable.attach(os.dup(table.segment.fd)) as attached:
        yield attached


def state(table, slot):
    return Word(table.segment.view, 4096 + SLOT_BYTES * slot.index).load()


def test_life_of_a_slot(table, actor):
    slot = table.acquire()
    assert (slot.index, slot.generation, slot.done) == (0, 1, False)
    assert state(table, slot) == PENDING
    assert not slot.wait(0)
    assert state(table, slot) == AWAITED

    assert actor.complete(slot.index, slot.generation, -5, b"why")
    assert state(table, slot) == DONE
    assert slot.done
    assert slot.wait(0)
    assert (slot.result, slot.payload) == (-5, b"why")

    slot.release()
    assert state(table, slot) == FREE
    again = table.acquire()
    assert (again.index, again.generation) == (0, 2)
    again.abandon()


def test_layout_is_as_documented(table, actor):
    slot = table.acquire()
    actor.complete(slot.index, slot.generation, -2, b"payload")
    actor.beat(0x1122334455667788)
    actor.actor.store(3)
    view = table.segment.view

    assert len(view) == 4096 + 4 * 1024
    assert bytes(view[:8]) == b"pcclSLOT"
    assert view[8:16].cast("I").tolist() == [4, 1024]
    assert view[64:72].cast("Q")[0] == 0x1122334455667788
    assert view[128:132].cast("I")[0] == 3
    assert view[4096:4112].cast("i").tolist() == [DONE, 1, -2, 7]
    assert bytes(view[4112:4119]) == b"payload"


def test_default_table_is_touched_lazily():
    with SlotTable.create(Options().slots) as table:
        table.acquire().abandon()
        assert os.fstat(table.segment.fd).st_blocks * 512 <= 2 * os.sysconf("SC_PAGE_SIZE")


def test_stale_completions_are_ignored(table, actor):
    """A completion that is sent twice, for an earlier generation or for a free slot changes nothing."""
    slot = table.acquire()
    assert not actor.complete(slot.index, slot.generation - 1, 9, b"stale")
    assert not slot.done
    assert actor.complete(slot.index, slot.generation, 1, b"good")
    assert not actor.complete(slot.index, slot.generation, 9, b"twice")
    assert (slot.result, slot.payload) == (1, b"good")
    slot.release()
    assert not actor.complete(slot.index, slot.generation, 9, b"late")
    second = table.acquire()
    assert second.index == slot.index
    assert not actor.complete(slot.index, slot.generation, 9, b"late")
    assert not second.done
    for index in (-1, 4):
        with pytest.raises(ValueError, match=f"slot {index} is not in a table of 4"):
            actor.complete(index, 1, 0)


def test_sequence_wraps(table, actor):
    table.segment.view[4096:4112].cast("I")[1] = 0xFFFFFFFF
    slot = table.acquire()

    assert slot.generation == 0
    assert actor.complete(slot.index, 0, 0)


def test_exhaustion_is_a_clear_error(table):
    held = [table.acquire() for _ in range(3)]
    table.acquire().abandon()
    with pytest.raises(SlotsExhaustedError, match="all 4 .* 3 operations .* 1 were given up"):
        table.acquire()
    assert [slot.index for slot in held] == [0, 1, 2]


def test_abandoned_slots_return_after_their_completion(table, actor):
    slots = [table.acquire() for _ in range(4)]
    for slot in slots:
        slot.abandon()
    with pytest.raises(SlotsExhaustedError):
        table.acquire()
    assert actor.complete(slots[2].index, slots[2].generation, 0)
    again = table.acquire()
    assert (again.index, again.generation) == (2, 2)
    with pytest.raises(SlotsExhaustedError):
        table.acquire()


def test_abandoning_what_is_done_gives_it_back_at_once(table, actor):
    slot = table.acquire()
    actor.complete(slot.index, slot.generation, 0)
    slot.abandon()

    assert state(table, slot) == FREE


def test_a_slot_is_used_once(table, actor):
    slot = table.acquire()
    with pytest.raises(ValueError, match="not done: wait for it or abandon it"):
        slot.release()
    with pytest.raises(ValueError, match="not done"):
        _ = slot.result
    actor.complete(slot.index, slot.generation, 0)
    slot.release()
    table.acquire()
    for use in (slot.release, slot.abandon, lambda: slot.wait(0), lambda: slot.payload):
        with pytest.raises(ValueError, match="was released or abandoned"):
            use()
    assert not slot.done
    assert repr(slot) == "<Slot 0 generation=1 given back>"


@pytest.mark.parametrize("character", ["a", "é", "€", "😀"])
@pytest.mark.parametrize("shift", range(4))
def test_long_text_is_cut_between_characters(table, actor, character, shift):
    text = "x" * shift + character * (PAYLOAD_BYTES_MAX + 1)
    slot = table.acquire()
    actor.complete(slot.index, slot.generation, 0, text.encode())
    cut = slot.payload.decode()

    assert cut[-1] == "…"
    assert text.startswith(cut[:-1])
    assert PAYLOAD_BYTES_MAX - 4 < len(slot.payload) <= PAYLOAD_BYTES_MAX


def test_payload_that_just_fits_is_kept(table, actor):
    payload = bytes(range(256)) * 4
    slot = table.acquire()
    actor.complete(slot.index, slot.generation, 0, payload[:PAYLOAD_BYTES_MAX])

    assert slot.payload == payload[:PAYLOAD_BYTES_MAX]


def test_beat(table, actor):
    assert table.last_beat_ns == 0
    now_ns = monotonic_ns()
    actor.beat(now_ns)

    assert table.last_beat_ns == now_ns


def test_attach_refuses_what_is_no_table():
    with Segment.create("pccl-test", 100) as segment:
        with pytest.raises(ValueError, match="no table of completion slots"):
            SlotTable.attach(segment.fd)
    with SlotTable.create(1) as table:
        table.segment.view[12:16].cast("I")[0] = 512
        with pytest.raises(ValueError, match="have 512 bytes, ours 1024"):
            SlotTable.attach(table.segment.fd)


def test_only_the_creator_acquires(actor):
    with pytest.raises(SlotsExhaustedError):
        actor.acquire()


def test_closed_table():
    table = SlotTable.create(2)
    slot = table.acquire()
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.acquire()
    # A thread that still waits reads memory that still exists.
    assert not slot.wait(0)
    # A slot that is released now is not used again.
    table.complete(slot.index, slot.generation, 0)
    slot.release()
    with pytest.raises(ValueError, match="closed"):
        table.acquire()


def test_slots_are_made_by_their_table_only():
    with pytest.raises(TypeError, match="comes from SlotTable.acquire"):
        Slot()


def test_signal_ends_a_wait_early(table):
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        # Again and again: one signal could come before the wait has begun.
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        begin_ns = monotonic_ns()

        assert not table.acquire().wait(60 * SECOND_NS)
        assert monotonic_ns() - begin_ns < 30 * SECOND_NS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_completions_from_another_process():
    """A forked actor completes slots by order of a pipe; in thousands of rounds no wait reaches its bound."""
    rounds = 3000
    with SlotTable.create(8) as table:
        source, target = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(target)
                actor = SlotTable.attach(os.dup(table.segment.fd))
                while command := os.read(source, 8):
                    index, generation = struct.unpack("II", command)
                    assert actor.complete(index, generation, generation & 0xFFFF, b"%d" % index)
                status = 0
            finally:
                os._exit(status)
        os.close(source)
        try:
            for _ in range(rounds):
                slot = table.acquire()
                os.write(target, struct.pack("II", slot.index, slot.generation))
                assert slot.wait(10 * SECOND_NS)
                assert (slot.result, slot.payload) == (slot.generation & 0xFFFF, b"%d" % slot.index)
                slot.release()
        finally:
            os.close(target)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        assert code == 0


def test_threads_share_a_table():
    """Four threads, fewer slots than they could use, and one completing thread: each call gets its own result."""
    rounds = 500
    failures = []
    posted = []
    available = threading.Semaphore(0)
    with SlotTable.create(6) as table:

        def caller():
            try:
                for turn in range(rounds):
                    slot = table.acquire()
                    posted.append((slot.index, slot.generation))
                    available.release()
                    if turn % 7 == 0:
                        while not slot.done:
                            slot.wait(1000)
                        slot.abandon()
                        continue
                    assert slot.wait(10 * SECOND_NS)
                    assert slot.payload == b"%d-%d" % (slot.index, slot.generation)
                    slot.release()
            except BaseException as error:
                failures.append(error)
                raise

        def completer():
            for _ in range(4 * rounds):
                assert available.acquire(timeout=10)
                index, generation = posted.pop(0)
                table.complete(index, generation, 0, b"%d-%d" % (index, generation))

        threads = [threading.Thread(target=caller) for _ in range(4)] + [threading.Thread(target=completer)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    assert failures == []


def test_everybody_who_waits_for_a_slot_is_woken(table, actor):
    slot = table.acquire()
    woken = []
    threads = [threading.Thread(target=lambda: woken.append(slot.wait(10 * SECOND_NS))) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline_ns = monotonic_ns() + 10 * SECOND_NS
    while state(table, slot) != AWAITED and monotonic_ns() < deadline_ns:
        time.sleep(0.001)
    actor.complete(slot.index, slot.generation, 0)
    for thread in threads:
        thread.join(20)

    assert woken == [True] * 3


def test_who_looks_first_costs_the_actor_no_wake_up(table, actor):
    """Goal: a call that ends while its caller polls is found without a sleep or a wake-up."""
    slot = table.acquire()
    states = []

    def complete():
        time.sleep(0.02)  # so that it ends while its caller polls
        states.append(state(table, slot))
        actor.complete(slot.index, slot.generation, 3)

    thread = threading.Thread(target=complete)
    thread.start()
    assert slot.wait(SECOND_NS, 5 * SECOND_NS)
    thread.join()
    assert states == [PENDING]
    assert slot.result == 3

    late = table.acquire()
    assert not late.wait(0, 1)
    assert state(table, late) == AWAITED
    actor.complete(late.index, late.generation, 0)

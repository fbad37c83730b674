"""The runs that a master remembers: the oldest is forgotten first, and nothing changes on the way to a file."""

from __future__ import annotations

import pytest

from pccl._core.master import run_table
from pccl._core.master.run_table import (
    RUNS_MAX,
    AgreedState,
    RememberedRun,
    RunTable,
    find_fault,
    make_id,
    name_run,
    pack_run,
    unpack_run,
)

ID = bytes(range(16))
STATE = AgreedState(3, 7, b"c" * 16, b"s" * 16)


def run(*groups: int, finished: bool = False) -> RememberedRun:
    return RememberedRun(ID, finished, dict.fromkeys(groups, STATE))


def test_a_run_is_taken_as_it_was_kept() -> None:
    """Goal: a run comes back once, under its name, with its mark."""
    table = RunTable()
    assert table.keep("a", run(0, 4)) == []
    assert table.keep("", run(finished=True)) == []

    assert table.is_finished("")
    assert not table.is_finished("a")
    assert not table.is_finished("never heard of")
    assert table.take("a") == run(0, 4)
    assert table.take("a") is None


def test_the_oldest_is_forgotten_first() -> None:
    """Goal: the table is bounded; a run that was served again is not old."""
    table = RunTable()
    names = [f"run {number}" for number in range(RUNS_MAX - 1)]
    for name in names:
        assert table.keep(name, run(0)) == []
    table.keep(names[0], table.take(names[0]) or run())

    assert table.keep("one more", run(0)) == [names[1]]
    assert len(table.runs) == RUNS_MAX - 1, "with the present run, the master knows that many"


def test_many_groups_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the state file stays small enough to be read; the run that was just kept is never dropped for that."""
    monkeypatch.setattr(run_table, "GROUPS_MAX", 5)
    table = RunTable()
    table.keep("a", run(0, 1))
    table.keep("b", run(0, 1, 2))

    assert table.keep("c", run(0, 1)) == ["a"]
    assert table.keep("d", run(0, 1, 2, 3, 4)) == ["b", "c"]


def test_packing_changes_nothing() -> None:
    """Goal: what a state file holds is what was remembered."""
    kept = run(0, 4, finished=True)

    packed = pack_run("llama", kept)

    assert unpack_run({**packed, "groups": {str(key): value for key, value in packed["groups"].items()}}) == (
        "llama",
        kept,
    )


def test_names_are_short_and_printable() -> None:
    """Goal: a name can be shown in a log line; the error says what a name is."""
    assert not find_fault("")
    assert not find_fault("Qwen 3, Größe 7b")
    assert "printable" in find_fault("a\nb")
    assert "at most 128 bytes" in find_fault("é" * 65)
    assert name_run("") == "the run without a name"
    assert name_run("a") == "run 'a'"


def test_ids_differ() -> None:
    """Goal: two runs of one master never have the same id, whatever their names are."""
    ids = {make_id(ID, "a", 1), make_id(ID, "a", 2), make_id(ID, "b", 1), make_id(bytes(16), "a", 1)}

    assert len(ids) == 4
    assert {len(one) for one in ids} == {16}

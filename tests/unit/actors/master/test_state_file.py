"""The state file: it is loaded whole or refused, whatever damaged it, and two masters never use it at once."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pccl._core.master.events import DialledBack, PeerCame, PeerSaid, PeerWent
from pccl._core.protocol import hellos
from pccl._core.protocol import messages as m
from pccl._core.protocol.events import ERROR, INFO
from pccl.actors.io.connection import Connection
from pccl.actors.io.listener import bind
from pccl.actors.master import state_file
from pccl.actors.master.master_actor import MasterActor, open_state_file
from pccl.actors.master.state_file import StateFile, StateFileError
from pccl.options import Options

DIGEST, OTHER = "0123456789abcdef" * 2, "f" * 32
GROUPS = {number: {"epoch": 3, "revision": 13, "content": DIGEST, "schema": OTHER} for number in (0, 2, 10)}
RUN = {"name": "llama", "run": DIGEST, "finished": False, "groups": GROUPS}
FINISHED = {"name": "", "run": OTHER, "finished": True, "groups": {}}
SNAPSHOT = {**RUN, "next_id": 1025, "round": 7, "runs": [FINISHED]}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "master.json")


def saved(path: str) -> dict[str, Any]:
    """Save the snapshot above; return what the file holds."""
    file = StateFile(path)
    assert file.load() is None
    file.save(SNAPSHOT)
    file.close()
    return json.loads(Path(path).read_text())


def test_what_was_saved_is_loaded(path: str) -> None:
    """Goal: the same content is loaded, with keys as JSON has them; the folder holds no other file."""
    saved(path)
    file = StateFile(path)

    loaded = file.load()

    assert loaded == {**SNAPSHOT, "groups": {str(number): group for number, group in GROUPS.items()}}
    file.save({**SNAPSHOT, "round": 8})
    file.close()
    assert StateFile(path).load()["round"] == 8  # type: ignore[index]
    assert os.listdir(os.path.dirname(path)) == ["master.json"]


@pytest.mark.parametrize("keep", [0, 1, 10, 200, -2])
def test_a_cut_file_is_refused(path: str, keep: int) -> None:
    """Goal: the master never silently starts a new run: the error names the file, the damage and the remedy."""
    saved(path)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:keep])

    with pytest.raises(StateFileError, match=rf"state file {path} is (empty|damaged or cut off).*move the file away"):
        StateFile(path).load()
    assert Path(path).read_bytes() == whole[:keep], "nothing was changed"


def test_every_flipped_bit_is_found(path: str) -> None:
    """Goal: a file that differs in any one bit is found to be damaged."""
    saved(path)
    whole = Path(path).read_bytes()
    for place in range(0, len(whole) - 1, 3):
        Path(path).write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        with pytest.raises(StateFileError):
            StateFile(path).load()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2]", "was not written by a pccl master"),
        ('{"format": "something else", "version": 1}', "was not written by a pccl master"),
        ("#!/bin/sh\n", "does not parse as JSON"),
        ("[" * 100_000, "does not parse as JSON"),
    ],
)
def test_a_foreign_file_is_refused_and_not_touched(path: str, content: str, reason: str) -> None:
    """Goal: `--state ~/.bashrc` does not change that file."""
    Path(path).write_text(content)

    with pytest.raises(StateFileError, match=reason):
        StateFile(path).load()
    assert Path(path).read_text() == content


def test_another_version_is_named(path: str) -> None:
    """Goal: a user who goes back to an older pccl reads why it does not start."""
    Path(path).write_text(json.dumps({**saved(path), "version": 3}))

    with pytest.raises(StateFileError, match="has version 3, this pccl reads versions 1 and 2"):
        StateFile(path).load()


def test_version_1_is_read(path: str) -> None:
    """Goal: a master of this version continues a run of the one before, which had no name."""
    old = {number: {**group, "layout": group["schema"]} for number, group in GROUPS.items()}
    for group in old.values():
        del group["schema"]
    state = json.loads(json.dumps({"run": DIGEST, "next_id": 1025, "round": 7, "groups": old}))
    whole = {"format": "pccl master state", "version": 1, "checksum": state_file._checksum(state), "state": state}
    Path(path).write_text(json.dumps(whole))
    file = StateFile(path)

    loaded = file.load()

    groups = {str(number): group for number, group in GROUPS.items()}
    assert loaded == {**SNAPSHOT, "name": "", "groups": groups, "runs": []}
    file.close()
    whole["state"] = {**state, "groups": []}
    whole["checksum"] = state_file._checksum(whole["state"])
    Path(path).write_text(json.dumps(whole))
    with pytest.raises(StateFileError, match="a part is missing or out of range"):
        StateFile(path).load()


@pytest.mark.parametrize(
    "change",
    [
        {"run": "zz" * 16},
        {"run": "ab"},
        {"next_id": 0},
        {"next_id": "1"},
        {"next_id": True},
        {"round": -1},
        {"groups": []},
        {"groups": {"x": GROUPS[0]}},
        {"groups": {str(1 << 32): GROUPS[0]}},
        {"groups": {"0": {**GROUPS[0], "revision": -1}}},
        {"groups": {"0": {**GROUPS[0], "revision": 1 << 64}}},
        {"groups": {"0": {**GROUPS[0], "content": ""}}},
        {"groups": {"0": {"epoch": 1}}},
        {"name": 5},
        {"finished": 1},
        {"runs": {}},
        {"runs": ["x"]},
        {"runs": [{"name": "x"}]},
        {"runs": [{**FINISHED, "run": ""}]},
        {"more": 1},
    ],
)
def test_a_part_that_is_out_of_range_is_refused(path: str, change: dict[str, Any]) -> None:
    """Goal: values are checked too: a checksum shows only that we wrote the file, not that its values make sense."""
    file = StateFile(path)
    file.load()
    file.save({**SNAPSHOT, **change})
    file.close()

    with pytest.raises(StateFileError, match="a part is missing or out of range"):
        StateFile(path).load()


def test_a_file_of_any_size_is_not_read_into_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: limits come before allocations."""
    monkeypatch.setattr(state_file, "FILE_BYTES_MAX", 100)
    saved(path)

    with pytest.raises(StateFileError, match="more than 100 bytes"):
        StateFile(path).load()


def test_a_second_master_cannot_use_the_file(path: str) -> None:
    """Goal: not even after the first master has rewritten the file; it can when the first master has ended."""
    saved(path)
    first = StateFile(path)
    first.load()
    with pytest.raises(StateFileError, match="in use by another master"):
        StateFile(path).load()
    first.save(SNAPSHOT)
    with pytest.raises(StateFileError, match="in use by another master"):
        StateFile(path).load()

    first.close()
    assert StateFile(path).load()


def test_two_masters_that_begin_at_the_same_moment_do_not_both_begin(path: str) -> None:
    """Goal: neither finds a file; only one of them creates it."""
    first, second = StateFile(path), StateFile(path)
    assert first.load() is second.load() is None
    first.save(SNAPSHOT)

    with pytest.raises(OSError, match="File exists"):
        second.save(SNAPSHOT)
    first.close()


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failed_write_leaves_the_old_version(path: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: if the disk is full, at any step, the file keeps its last good version, and the next attempt works."""
    saved(path)
    file = StateFile(path)
    before = file.load()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            file.save({**SNAPSHOT, "round": 8})
    assert os.listdir(os.path.dirname(path)) == ["master.json"]
    file.close()
    assert file.load() == before
    file.save({**SNAPSHOT, "round": 8})
    file.close()


def test_what_a_killed_writer_left_is_cleared_away(path: str) -> None:
    """Goal: an incomplete new version beside the old one is removed."""
    saved(path)
    Path(f"{path}.new").write_text("half of")
    file = StateFile(path)
    file.load()

    file.save(SNAPSHOT)

    assert os.listdir(os.path.dirname(path)) == ["master.json"]
    file.close()


def test_a_link_stays_a_link(path: str, tmp_path: Path) -> None:
    """Goal: the path may be a symbolic link to a file in another folder."""
    link = tmp_path / "link"
    link.symlink_to(path)
    saved(str(link))

    assert link.is_symlink()
    assert Path(path).is_file()


# --- The master with its file -----------------------------------------------


class Shell:
    """A master actor without a loop: a test feeds it events and reads its log."""

    def __init__(self, path: str, **how: Any) -> None:
        self.lines: list[tuple[int, str]] = []
        listener = bind("127.0.0.1", 0)
        try:
            file = open_state_file(path)
            self.actor = MasterActor(
                listener, b"", Options(check=True), lambda *line: self.lines.append(line), state_file=file, **how
            )
        except BaseException:
            listener.close()
            raise

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self.actor.loop.after(0, self.actor.stop)
        self.actor.run()

    def sync(self, revision: int, content: bytes, run: str = "") -> None:
        """A peer joins, is alone in the run, and synchronises."""
        feed = self.actor._feed
        feed(PeerCame(1, hellos.Register(bytes(32), 0, 1, "", 1, bytes(16), run), "127.0.0.1"))
        feed(DialledBack(1, ""))
        feed(PeerSaid(1, m.Wired(self.actor.state.members.groups[0].epoch)))
        self.vote(revision, content)

    def vote(self, revision: int, content: bytes) -> None:
        self.actor._feed(PeerSaid(1, m.VoteSync(1, revision, 0, False, 1, bytes(16), content)))

    def agreed(self) -> tuple[int, bytes]:
        consensus = self.actor.state.members.groups[0].consensus
        return consensus.revision, consensus.content


def test_the_file_is_written_before_the_answer_leaves(path: str) -> None:
    """Goal: a peer that is told about an agreed state can rely on a restarted master to know it."""
    with Shell(path) as shell:
        seen = []
        shell.sync(12, b"z" * 16)

        class Peer(Connection):
            def __init__(self) -> None:
                pass  # there is no socket

            def send(self, message: Any) -> None:
                seen.append((type(message), json.loads(Path(path).read_text())["state"]["groups"]["0"]["revision"]))

            def close(self) -> None:
                pass

        shell.actor._connections[1] = Peer()
        shell.vote(13, b"a" * 16)

        assert seen == [(m.SyncDone, 13)]


def test_a_master_that_starts_again_goes_on_with_its_run(path: str) -> None:
    """Goal: run and agreed state are those of the file, peer ids are new, and only the agreed digest resumes."""
    with Shell(path) as before:
        before.sync(13, b"a" * 16)
        run = before.actor.state.members.run
    with Shell(path) as after:
        assert after.actor.state.members.run == run
        assert after.actor.state.members.next_id == 1025
        assert (
            INFO,
            f"goes on with the run without a name in {path}: agreed revisions by group {{0: 13}}",
        ) in after.lines
        after.sync(0, b"x" * 16)
        assert after.agreed() == (13, b"a" * 16)
        after.vote(14, b"b" * 16)
        assert after.agreed() == (14, b"b" * 16)


def test_a_new_run_drops_what_the_file_remembers(path: str) -> None:
    """Goal: --new-run forgets the runs of all names and says so; peer ids go on, and the next run has another id."""
    with Shell(path) as first:
        first.sync(13, b"a" * 16, "old")
        first.actor._feed(PeerWent(1, "closed"))
        first.sync(5, b"b" * 16, "later")
        run, next_id = first.actor.state.members.run, first.actor.state.members.reserved_id
    with Shell(path, new_run=True) as second:
        assert "drops what" in second.lines[0][1]
        assert "{'later': {0: 5}, 'old': {0: 13}}" in second.lines[0][1]
        second.sync(0, b"x" * 16, "old")
        assert second.agreed() == (0, b"x" * 16)
        assert second.actor.state.members.run != run
        assert second.actor.state.members.next_id == next_id + 1
        assert second.actor.state.runs.table.runs == {}


def test_a_finished_run_stays_finished(path: str) -> None:
    """Goal: the end is on the disk before a peer is told, and a restarted master still says so."""
    with Shell(path) as first:
        first.sync(13, b"a" * 16, "old")
        seen = []

        class Peer(Connection):
            def __init__(self) -> None:
                pass  # there is no socket

            def send(self, message: Any) -> None:
                seen.append((type(message), json.loads(Path(path).read_text())["state"]["finished"]))

            def finish(self, linger_ns: int = 0) -> None:
                pass

            def close(self) -> None:
                pass

        first.actor._connections[1] = Peer()
        first.actor._feed(PeerSaid(1, m.VoteFinish(1)))
        assert seen == [(m.RunFinished, True)]
    with Shell(path) as second:
        assert "goes on with run 'old', which is finished" in second.lines[0][1]
        assert second.actor.state.runs.finished


def test_a_new_run_has_its_name_in_the_file_from_the_start(path: str) -> None:
    """Goal: a master that is killed before the first agreed state still continues the same run."""
    with Shell(path) as shell:
        assert json.loads(Path(path).read_text())["state"]["run"] == shell.actor.state.members.run.hex()


@pytest.mark.parametrize("reason", ["nowhere", "a folder", "damaged"])
def test_a_master_that_cannot_use_its_file_does_not_start(path: str, reason: str) -> None:
    """Goal: the error names the file; no run begins that could not be saved."""
    wrong = f"{path}/no/such/folder" if reason == "nowhere" else path
    if reason == "a folder":
        os.mkdir(path)
    elif reason == "damaged":
        Path(path).write_text("{")

    with pytest.raises(ValueError, match=f"state file {wrong}"):
        Shell(wrong)


def test_a_full_disk_does_not_end_the_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a change that cannot be saved is an error in the log; the file keeps its last good version; peers go on."""
    with Shell(path) as shell:
        shell.sync(12, b"z" * 16)
        whole = Path(path).read_bytes()

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            shell.vote(13, b"a" * 16)
            shell.vote(14, b"b" * 16)
        errors = [line for level, line in shell.lines if level == ERROR]
        assert len(errors) == 2
        assert f"state file {path} cannot be written" in errors[0]
        assert "The run goes on" in errors[0]
        assert shell.agreed() == (14, b"b" * 16)
        assert Path(path).read_bytes() == whole

        shell.vote(15, b"c" * 16)
        assert (INFO, f"state file {path} is written again") in shell.lines
        assert json.loads(Path(path).read_text())["state"]["groups"]["0"]["revision"] == 15


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: without the option, the master writes no file."""
    monkeypatch.chdir(tmp_path)
    with Shell("") as shell:
        shell.sync(13, b"a" * 16)
        assert isinstance(shell.actor.port, int)

    assert os.listdir(tmp_path) == []

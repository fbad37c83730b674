"""The file from which a restarted master continues: names and agreed states of its runs, and the next peer id.

It is one JSON object with a checksum over its body. A new version is written to a second file, flushed to the disk, and
then renamed over the old one: after any failure the file is one complete version. The master that uses a file holds a
lock on it, so that no second master overwrites it.

A damaged file is an error, never "no file": a new run could go back to any earlier state. A person must decide that, by
moving the file away. This module decides nothing about the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FORMAT = "pccl master state"
VERSION = 2
FILE_BYTES_MAX = 64 << 20  # several times what 65,536 groups of one run and as many of the others take
LOCK_ATTEMPTS_MAX = 8  # the file may be replaced while it is being locked, but hardly this often
_RUN_FIELDS = {"name", "run", "finished", "groups"}
_GROUP_FIELDS = {"epoch", "revision", "content", "schema"}


class StateFileError(ValueError):
    """The file cannot be used; the text names the file, the reason and what to do."""


class StateFile:
    """One master's file, locked from `load` to `close`."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)  # a symbolic link stays; its target is replaced
        self._lock: int | None = None  # the descriptor of the current version

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last; None if there is no file yet. Raises StateFileError if it cannot be used."""
        data = b""
        try:
            self._lock = self._open_locked()
            while len(data) <= FILE_BYTES_MAX and (part := os.read(self._lock, 1 << 20)):
                data += part
        except FileNotFoundError:
            return None
        except OSError as error:
            self.close()
            raise StateFileError(f"state file {self.path}: {error.strerror}") from None
        try:
            return _parse(data)
        except ValueError as error:
            self.close()
            raise StateFileError(
                f"state file {self.path} {error}. Nothing was changed. Put back a copy that is whole, or, to start a "
                "run that knows nothing of the old one, move the file away"
            ) from None

    def save(self, snapshot: dict[str, Any]) -> None:
        """Replace the file by a new version. Raises OSError if that is impossible; then the old version stays."""
        fresh = f"{self.path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)  # left by a master that was killed while it wrote
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._lock_or_fail(fd)
            data = memoryview(_render(snapshot))
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
            if self._lock is None:
                os.link(fresh, self.path)  # fails if another master has created the file meanwhile
                os.unlink(fresh)
            else:
                os.rename(fresh, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise
        self.close()
        self._lock = fd
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Release the file; does nothing if it was released before."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _open_locked(self) -> int:
        """Open and lock the current version. A writer may replace it before the lock, so this is checked afterwards."""
        for _ in range(LOCK_ATTEMPTS_MAX):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._lock_or_fail(fd)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise StateFileError(f"state file {self.path} changes all the time: another master writes it")

    def _lock_or_fail(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise StateFileError(
                f"state file {self.path} is in use by another master: stop that one, or give each run a file of its own"
            ) from None


def _render(snapshot: dict[str, Any]) -> bytes:
    state = json.loads(json.dumps(snapshot))  # as it will be read: every key becomes a string
    whole = {"format": FORMAT, "version": VERSION, "checksum": _checksum(state), "state": state}
    return (json.dumps(whole, sort_keys=True) + "\n").encode()


def _checksum(state: Any) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _parse(data: bytes) -> dict[str, Any]:
    """Return the snapshot in these bytes. Raises ValueError, whose text is the end of a sentence."""
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"has more than {FILE_BYTES_MAX} bytes, more than a pccl master writes")
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is empty" if not data else "is damaged or cut off: it does not parse as JSON") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError("was not written by a pccl master")
    if whole.get("version") not in (1, VERSION):
        raise ValueError(f"has version {whole.get('version')!r}, this pccl reads versions 1 and {VERSION}")
    snapshot: Any = whole.get("state")
    if whole.get("checksum") != _checksum(snapshot):
        raise ValueError("is damaged: its checksum does not match")
    if whole["version"] == 1:
        snapshot = _upgrade(snapshot)
    if not _is_snapshot(snapshot):
        raise ValueError("is damaged: a part is missing or out of range")
    return snapshot  # type: ignore[no-any-return]


def _upgrade(snapshot: Any) -> Any:
    """Return a snapshot of version 1 as one of version 2: it had one run without a name. Wrong parts stay wrong."""
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("groups"), dict):
        return snapshot
    groups = {
        number: {("schema" if field == "layout" else field): value for field, value in group.items()}
        for number, group in snapshot["groups"].items()
        if isinstance(group, dict)
    }
    return {**snapshot, "name": "", "finished": False, "groups": groups, "runs": []}


def _is_snapshot(value: Any) -> bool:
    """Whether this has everything that `MasterState.restore` needs."""
    return (
        isinstance(value, dict)
        and value.keys() == {*_RUN_FIELDS, "next_id", "round", "runs"}
        and _is_number(value["next_id"], 1, 1 << 63)
        and _is_number(value["round"], 0, 1 << 63)
        and _is_run(value)
        and isinstance(value["runs"], list)
        and all(isinstance(run, dict) and run.keys() == _RUN_FIELDS and _is_run(run) for run in value["runs"])
    )


def _is_run(value: dict[str, Any]) -> bool:
    return (
        isinstance(value["name"], str)
        and _is_hex(value["run"])
        and isinstance(value["finished"], bool)
        and isinstance(value["groups"], dict)
        and all(number.isdecimal() and _is_number(int(number), 0, 1 << 32) for number in value["groups"])
        and all(_is_group(group) for group in value["groups"].values())
    )


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _GROUP_FIELDS
        and _is_number(value["epoch"], 0, 1 << 32)
        and _is_number(value["revision"], 0, 1 << 64)
        and _is_hex(value["content"])
        and _is_hex(value["schema"])
    )


def _is_number(value: Any, low: int, end: int) -> bool:
    return type(value) is int and low <= value < end


def _is_hex(value: Any) -> bool:
    """Whether this is a name or a digest: sixteen bytes in hexadecimal."""
    return isinstance(value, str) and len(value) == 32 and all(letter in "0123456789abcdef" for letter in value)

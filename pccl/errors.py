"""The exceptions, one class for each thing that a caller can do about a failure.

Every failure of a call is a `PCCLError` with a `Result`, the name of the function, and a message that says which peer
or process did what, and what to do. The peer actor reports an outcome as two small numbers and a text;
`error_from_outcome` turns them into an exception. A leaf: imports only `outcomes` and `values`.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pccl._core.protocol.outcomes import KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST

from .values import Result

# An error as it prints itself.
_PRINTED = re.compile(
    r"(?:(?P<func_name>[A-Za-z_][\w.]*): )?(?:(?P<message>.+) \[(?P<result>[A-Z_]+)\]|(?P<bare>[A-Z_]+))", re.DOTALL
)


class PCCLError(Exception):
    """A call failed: `.result` says how, `.func_name` says in which function, the text says why and what to do.

    Also made from a text alone, because others rebuild an exception as `type(error)(text)`: torch does it with those of
    a DataLoader's worker, and puts a traceback before the text. The parts are read from the text where it has them.
    """

    #: The result of an error that is made from a text without one. (Not `message`: torch looks for that in the class.)
    usual_result: ClassVar[Result] = Result.INTERNAL_ERROR

    def __init__(self, result: Result | str, func_name: str = "", message: str = "") -> None:
        self._text: str | None = None
        if isinstance(result, Result):
            super().__init__(result, func_name, message)
        else:
            self._text = str(result)
            super().__init__(self._text)
            result, func_name, message = _read(self._text, type(self))
        self.result = result
        self.func_name = func_name
        self.message = message

    def __str__(self) -> str:
        if self._text is not None:
            return self._text
        where = f"{self.func_name}: " if self.func_name else ""
        return f"{where}{self.message} [{self.result.name}]" if self.message else f"{where}{self.result.name}"


def _read(text: str, cls: type[PCCLError]) -> tuple[Result, str, str]:
    """The parts of an error of this class in a text that it printed, alone or at the end of a traceback."""
    heads = list(re.finditer(rf"^(?:[\w.]+\.)?{cls.__name__}: ", text, re.MULTILINE))
    printed = text[heads[-1].end() :].rstrip() if heads else text
    found = _PRINTED.fullmatch(printed)
    name = (found["result"] or found["bare"]) if found else ""
    if found is None or name not in Result.__members__:
        return cls.usual_result, "", printed
    return Result[name], found["func_name"] or "", found["message"] or ""


class TooFewPeersError(PCCLError):
    """The group is too small for this call: wait for peers, then call again."""

    usual_result = Result.TOO_FEW_PEERS


class PeerLostError(PCCLError):
    """A peer was lost during the call: the other members have a new ring, so retry the call."""

    usual_result = Result.RANK_CONNECTION_LOST


class KickedError(PCCLError):
    """The master ended this peer's membership: correct what `.reason` says, then connect again."""

    usual_result = Result.INVALID_USAGE

    @property
    def reason(self) -> str:
        """Why the master ended the membership, as the master says it."""
        return self.message


class RunFinishedError(PCCLError):
    """The run is finished: all members called `finish()`, and nothing is left to do."""

    usual_result = Result.INVALID_USAGE


class MasterLostError(PCCLError):
    """The master, or this peer's actor, is gone or silent: connect again once the master is back."""

    usual_result = Result.MASTER_CONNECTION_FAILED


class MasterConnectionError(PCCLError):
    """No attempt to register with the master succeeded: check the address, the token and the firewall."""

    usual_result = Result.MASTER_CONNECTION_FAILED


class UsageError(PCCLError):
    """The call is wrong, or wrong at this moment: correct the program."""

    usual_result = Result.INVALID_USAGE


_CLASS_BY_RESULT: dict[Result, type[PCCLError]] = {
    Result.TOO_FEW_PEERS: TooFewPeersError,
    Result.RANK_CONNECTION_LOST: PeerLostError,
    Result.INVALID_USAGE: UsageError,
    Result.INVALID_ARGUMENT: UsageError,
    Result.NOT_INITIALIZED: UsageError,
    Result.PENDING_ASYNC_OPS: UsageError,
    Result.MASTER_CONNECTION_FAILED: MasterConnectionError,
}

_CLASS_BY_KIND: dict[int, type[PCCLError]] = {
    KIND_KICKED: KickedError,
    KIND_MASTER_LOST: MasterLostError,
    KIND_FINISHED: RunFinishedError,
}


def error_from_outcome(result: int, kind: int, func_name: str, message: str) -> PCCLError:
    """The exception for an outcome that the peer actor reported."""
    value = Result(result)
    cls = _CLASS_BY_KIND.get(kind) or _CLASS_BY_RESULT.get(value, PCCLError)
    return cls(value, func_name, message)

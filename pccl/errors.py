"""The exceptions, one class for each thing that a caller can do about a failure.

Every failure of a call is a `PCCLError` with a `Result`, the name of the function, and a message that says which peer
or process did what, and what to do. The peer actor reports an outcome as two small numbers and a text;
`error_from_outcome` turns them into an exception. A leaf: imports only `outcomes` and `values`.
"""

from __future__ import annotations

from pccl._core.protocol.outcomes import KIND_FINISHED, KIND_KICKED, KIND_MASTER_LOST

from .values import Result


class PCCLError(Exception):
    """A call failed: `.result` says how, `.func_name` says in which function, the text says why and what to do."""

    def __init__(self, result: Result, func_name: str = "", message: str = "") -> None:
        self.result = result
        self.func_name = func_name
        self.message = message
        super().__init__(result, func_name, message)

    def __str__(self) -> str:
        where = f"{self.func_name}: " if self.func_name else ""
        return f"{where}{self.message} [{self.result.name}]" if self.message else f"{where}{self.result.name}"

    def __reduce__(self) -> tuple[type[PCCLError], tuple[Result, str, str]]:
        return type(self), (self.result, self.func_name, self.message)


class TooFewPeersError(PCCLError):
    """The group is too small for this call: wait for peers, then call again."""


class PeerLostError(PCCLError):
    """A peer was lost during the call: the other members have a new ring, so retry the call."""


class KickedError(PCCLError):
    """The master ended this peer's membership: correct what `.reason` says, then connect again."""

    @property
    def reason(self) -> str:
        """Why the master ended the membership, as the master says it."""
        return self.message


class RunFinishedError(PCCLError):
    """The run is finished: all members called `finish()`, and nothing is left to do."""


class MasterLostError(PCCLError):
    """The master, or this peer's actor, is gone or silent: connect again once the master is back."""


class MasterConnectionError(PCCLError):
    """No attempt to register with the master succeeded: check the address, the token and the firewall."""


class UsageError(PCCLError):
    """The call is wrong, or wrong at this moment: correct the program."""


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

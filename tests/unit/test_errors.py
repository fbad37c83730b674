"""The exceptions: the class says what a caller should do next, and pickling keeps every part."""

from __future__ import annotations

import pickle

import pytest

from pccl import errors
from pccl._core.protocol import outcomes
from pccl._core.protocol.outcomes import (
    KIND_CANCELLED,
    KIND_COLLECTIVE,
    KIND_FINISHED,
    KIND_KICKED,
    KIND_MASTER_LOST,
    KIND_PLAIN,
    join,
    split,
)
from pccl.errors import (
    KickedError,
    MasterConnectionError,
    MasterLostError,
    PCCLError,
    PeerLostError,
    RunFinishedError,
    TooFewPeersError,
    UsageError,
    error_from_outcome,
)
from pccl.values import Result

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PCCLError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_they_pickle_with_all_their_parts(cls: type[PCCLError]) -> None:
    """Goal: an error is equal after a trip to another process."""
    error = cls(Result.INVALID_USAGE, "update_topology", "who, what, what to do")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is cls
    assert (copy.result, copy.func_name, copy.message) == (error.result, error.func_name, error.message)
    assert str(copy) == str(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_says_what_to_do(cls: type[PCCLError]) -> None:
    """Goal: every class is a PCCLError, so that one `except` catches all, and its docstring says what to do."""
    assert issubclass(cls, PCCLError)
    assert cls.__doc__
    assert cls.__doc__.endswith(".")


def test_the_text_names_the_call_and_the_result() -> None:
    """Goal: the traceback shows the call, the reason and the result."""
    assert str(PCCLError(Result.INVALID_USAGE, "connect", "call it once")) == "connect: call it once [INVALID_USAGE]"
    assert str(PCCLError(Result.INTERNAL_ERROR, "connect")) == "connect: INTERNAL_ERROR"
    assert str(PCCLError(Result.INTERNAL_ERROR)) == "INTERNAL_ERROR"


@pytest.mark.parametrize(
    ("result", "kind", "cls"),
    [
        (Result.TOO_FEW_PEERS, KIND_PLAIN, TooFewPeersError),
        (Result.RANK_CONNECTION_LOST, KIND_PLAIN, PeerLostError),
        (Result.INVALID_USAGE, KIND_PLAIN, UsageError),
        (Result.INVALID_ARGUMENT, KIND_PLAIN, UsageError),
        (Result.NOT_INITIALIZED, KIND_PLAIN, UsageError),
        (Result.PENDING_ASYNC_OPS, KIND_PLAIN, UsageError),
        (Result.MASTER_CONNECTION_FAILED, KIND_PLAIN, MasterConnectionError),
        (Result.INTERNAL_ERROR, KIND_PLAIN, PCCLError),
        (Result.INVALID_USAGE, KIND_CANCELLED, UsageError),
        (Result.RANK_CONNECTION_LOST, KIND_COLLECTIVE, PeerLostError),
        (Result.TOO_FEW_PEERS, KIND_COLLECTIVE, TooFewPeersError),
        (Result.INVALID_ARGUMENT, KIND_COLLECTIVE, UsageError),
        # The kind has precedence: a kick for a lost connection is a kick.
        (Result.RANK_CONNECTION_LOST, KIND_KICKED, KickedError),
        (Result.INVALID_USAGE, KIND_FINISHED, RunFinishedError),
        (Result.MASTER_CONNECTION_FAILED, KIND_MASTER_LOST, MasterLostError),
    ],
)
def test_an_outcome_becomes_the_class_of_its_remedy(result: Result, kind: int, cls: type[PCCLError]) -> None:
    """Goal: two numbers and a text from the actor become the exception that tells the caller what to do."""
    error = error_from_outcome(result.value, kind, "update_topology", "because")

    assert type(error) is cls
    assert (error.result, error.func_name, error.message) == (result, "update_topology", "because")


def test_every_result_can_be_raised() -> None:
    """Goal: every outcome has an exception, and its first two parts are those of the contract."""
    for result in Result:
        error = error_from_outcome(result.value, KIND_PLAIN, "f", "m")
        assert error.args[:2] == (result, "f")


def test_a_kick_gives_its_reason() -> None:
    """Goal: `.reason` is the text of the master."""
    assert KickedError(Result.INVALID_USAGE, "f", "straggler").reason == "straggler"


def test_the_actors_numbers_are_the_results() -> None:
    """Goal: the machines' numbers are those of the public enum."""
    numbers = {name: value for name, value in vars(outcomes).items() if name.isupper() and not name.startswith("KIND_")}

    assert numbers
    assert all(Result[name].value == value for name, value in numbers.items())


@pytest.mark.parametrize(
    "kind", [KIND_PLAIN, KIND_KICKED, KIND_MASTER_LOST, KIND_CANCELLED, KIND_COLLECTIVE, KIND_FINISHED]
)
def test_an_outcome_fits_into_one_number(kind: int) -> None:
    """Goal: a slot has room for one number, from which both parts can be read."""
    for result in Result:
        assert split(join(result.value, kind)) == (result.value, kind)

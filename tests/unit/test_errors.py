"""The exceptions: the class says what a caller should do next, and no way to another process loses a part."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

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


every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def parts(error: PCCLError) -> tuple[object, ...]:
    """All that a caller reads of an error."""
    reason = error.reason if isinstance(error, KickedError) else None
    return type(error), str(error), error.result, error.func_name, error.message, reason


def fail(error: PCCLError) -> None:
    """Raise it, in another process."""
    raise error


# Both fork: a process that is spawned leaves a tracker of resources behind, which lives as long as pytest.
def by_executor(error: PCCLError) -> PCCLError:
    """The error as concurrent.futures brings it back."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        raised = executor.submit(fail, error).exception()
    assert isinstance(raised, PCCLError)
    return raised


def by_pool(error: PCCLError) -> PCCLError:
    """The error as multiprocessing brings it back."""
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(PCCLError) as caught:
        pool.apply(fail, (error,))
    return caught.value


COPIES: dict[str, Callable[[PCCLError], PCCLError]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),  # type: ignore[no-any-return]
    "oldest pickle": lambda error: pickle.loads(pickle.dumps(error, 0)),  # type: ignore[no-any-return]
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "text": lambda error: type(error)(str(error)),  # type: ignore[arg-type]
    "args": lambda error: type(error)(*error.args),
}


@every_class
@pytest.mark.parametrize("way", COPIES)
def test_no_copy_loses_a_part(cls: type[PCCLError], way: str) -> None:
    """Goal: however an error is copied, all that it says stays; also that of a copy of a copy."""
    error = cls(Result.INVALID_ARGUMENT, "update_topology", "peer 3: who, what [see above],\nwhat to do")

    copied = COPIES[way](error)

    assert parts(copied) == parts(error)
    for again in COPIES.values():
        assert parts(again(copied)) == parts(error)


@pytest.mark.parametrize("bring", [by_executor, by_pool])
def test_another_process_can_raise_it(bring: Callable[[PCCLError], PCCLError]) -> None:
    """Goal: concurrent.futures and multiprocessing bring an error back whole, also one that is only a text."""
    error = KickedError(Result.INVALID_USAGE, "all_reduce", "straggler")

    assert parts(bring(error)) == parts(error)
    assert parts(bring(KickedError("straggler"))) == parts(KickedError("straggler"))


@every_class
def test_a_text_alone_makes_one(cls: type[PCCLError]) -> None:
    """Goal: a text that no error printed stays as it is, and the result is the usual one of the class."""
    error = cls("it rained")

    assert str(error) == error.message == "it rained"
    assert repr(error) == f"{cls.__name__}('it rained')"
    assert (error.result, error.func_name) == (cls.usual_result, "")
    assert type(error_from_outcome(cls.usual_result.value, KIND_PLAIN, "", "")) is cls or cls in {
        *(PCCLError, KickedError, MasterLostError, RunFinishedError)
    }
    assert parts(COPIES["pickle"](error)) == parts(COPIES["text"](error)) == parts(error)


@pytest.mark.parametrize(
    "text", ["", "rain [OR_SHINE]", "SHINE", "connect: SHINE", ": [INVALID_USAGE]", "x [SUCCESS] y"]
)
def test_what_only_looks_like_an_error_is_a_text(text: str) -> None:
    """Goal: the parts are read only from what an error prints."""
    error = UsageError(text)

    assert str(error) == text
    assert error.result is Result.INVALID_USAGE


@every_class
def test_the_parts_are_found_behind_a_traceback(cls: type[PCCLError]) -> None:
    """Goal: torch puts a heading and a traceback before the text of an error: the parts are still found."""
    error = cls(Result.INVALID_ARGUMENT, "all_reduce", "this is wrong\nin two lines")
    heading = f"Caught {cls.__name__} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    text = f'{heading}  File "a.py", line 1, in f\n    raise x [SUCCESS]\npccl.errors.{cls.__name__}: {error}\n'

    told = cls(text)

    assert str(told) == text
    assert (told.result, told.func_name, told.message) == (error.result, error.func_name, error.message)


class Failing:
    """A data set whose every item fails."""

    def __init__(self, error: PCCLError) -> None:
        self.error = error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        UsageError(Result.INVALID_USAGE, "all_reduce", "this communicator belongs to process 7"),
        KickedError(Result.INVALID_ARGUMENT, "update_topology", "straggler"),
        KickedError("straggler"),
    ],
    ids=repr,
)
def test_a_worker_of_a_data_loader_can_raise_it(error: PCCLError) -> None:
    """Goal: torch rebuilds the exception of a forked worker from its text: the user reads it, with all its parts."""
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Failing(error), num_workers=1, multiprocessing_context="fork")

    with pytest.raises(type(error)) as caught:
        next(iter(loader))

    told = caught.value
    assert str(error) in str(told)
    assert "Caught" in str(told)
    assert (told.result, told.func_name, told.message) == (error.result, error.func_name, error.message)


def test_notes_travel_too() -> None:
    """Goal: what a program added to the error is still there in another process."""
    error = PeerLostError(Result.RANK_CONNECTION_LOST, "all_reduce", "peer 3 was lost")
    error.add_note("in step 7")

    assert COPIES["pickle"](error).__notes__ == ["in step 7"]


@every_class
def test_each_says_what_to_do(cls: type[PCCLError]) -> None:
    """Goal: every class is a PCCLError, so that one `except` catches all, and its docstring says what to do."""
    assert issubclass(cls, PCCLError)
    assert cls.__doc__
    assert cls.__doc__.rstrip().endswith(".")


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

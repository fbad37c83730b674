"""What the library logs by default, and what PCCL_LOG_LEVEL changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pccl.actors.io.logs import LEVELS, configure_from_environment, level_of, show


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The library's logger as an application finds it; restored after the test."""
    logger = logging.getLogger("pccl")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.mark.parametrize(
    ("name", "level"),
    [("TRACE", 5), ("DEBUG", 10), ("INFO", 20), ("WARN", 30), ("ERR", 40), ("FATAL", 50), ("NONE", 60), (" info ", 20)],
)
def test_levels_have_the_names_of_the_contract(name: str, level: int) -> None:
    """Goal: the seven names are known, in upper or lower case, and NONE is above every level that is used."""
    assert level_of(name) == level
    assert level_of(name.lower()) == level


def test_an_unknown_level_lists_the_known_ones() -> None:
    """Goal: a user who writes WARNING reads that the name is WARN."""
    with pytest.raises(ValueError, match="'LOUD' is none of TRACE, DEBUG, INFO, WARN, ERR, FATAL, NONE"):
        level_of("LOUD")
    assert list(LEVELS.values()) == sorted(LEVELS.values())


def test_nothing_is_configured_unless_asked_for(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: without the variable the application's own logging stays in charge."""
    monkeypatch.delenv("PCCL_LOG_LEVEL", raising=False)
    configure_from_environment()

    assert logger.handlers == []
    assert logger.propagate


def test_the_environment_asks_for_more(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: the library adds one handler on standard error, from that level up, for any number of communicators."""
    monkeypatch.setenv("PCCL_LOG_LEVEL", "DEBUG")
    configure_from_environment()
    configure_from_environment()
    logging.getLogger("pccl.peer").debug("one line")
    logging.getLogger("pccl.peer").log(LEVELS["TRACE"], "too much")

    assert len(logger.handlers) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("one line") == 1
    assert "DEBUG pccl.peer one line" in shown.err
    assert "too much" not in shown.err


def test_a_wrong_level_is_a_warning_and_no_crash(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: a wrong value in the environment does not end a training run."""
    monkeypatch.setenv("PCCL_LOG_LEVEL", "LOUD")
    configure_from_environment()

    assert "PCCL_LOG_LEVEL: log level 'LOUD' is none of" in caplog.text
    assert logger.handlers == []


def test_an_application_that_set_a_handler_is_left_alone(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: an application that already handles the library's log does not get every line twice."""
    monkeypatch.setenv("PCCL_LOG_LEVEL", "DEBUG")
    own = logging.NullHandler()
    logger.addHandler(own)
    configure_from_environment()

    assert logger.handlers == [own]


def test_none_silences_everything(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: NONE also suppresses critical messages."""
    show(level_of("NONE"))
    logger.critical("the sky falls")

    assert capsys.readouterr().err == ""

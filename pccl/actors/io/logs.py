"""The library's loggers, and what `PCCL_LOG_LEVEL` means.

All log lines go through `logging.getLogger("pccl")` and its children, so an application configures them as for any
other library. Without any configuration Python shows warnings on standard error. This is intended: a call that waits
for a missing peer should say so. `PCCL_LOG_LEVEL` changes the level without a change of code; only then a handler of
this library is added. Actors learn the level when they start (see `trace`). This module imports nothing of the package.
"""

from __future__ import annotations

import logging
import os

LEVELS = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "NONE": logging.CRITICAL + 10,
}

logging.addLevelName(LEVELS["TRACE"], "TRACE")

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def level_of(name: str) -> int:
    """Return the number of a level by its name. Raises ValueError, which lists the names."""
    try:
        return LEVELS[name.strip().upper()]
    except KeyError:
        raise ValueError(f"log level {name!r} is none of {', '.join(LEVELS)}") from None


def configure_from_environment() -> None:
    """Apply `PCCL_LOG_LEVEL` if it is set; called once, when the first communicator is created."""
    name = os.environ.get("PCCL_LOG_LEVEL")
    logger = logging.getLogger("pccl")
    if not name or logger.handlers:
        return
    try:
        level = level_of(name)
    except ValueError as error:
        logger.warning("PCCL_LOG_LEVEL: %s", error)
        return
    show(level)


def show(level: int) -> None:
    """Write the library's log, from this level on, to standard error."""
    logger = logging.getLogger("pccl")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False

"""The library's loggers, and what `PCCL_LOG_LEVEL` means.

Everything is said through `logging.getLogger("pccl")` and its children, so an application directs it like any other
library's. Without any configuration Python shows warnings on standard error, which is what we want: a call that waits
for a missing peer should not do so in silence. Setting `PCCL_LOG_LEVEL` asks for more (or less) without touching code:
then, and only then, a handler of our own is added. A leaf.
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

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def level_of(name: str) -> int:
    """The number of a level by its name; ValueError lists the names."""
    try:
        return LEVELS[name.strip().upper()]
    except KeyError:
        raise ValueError(f"log level {name!r} is none of {', '.join(LEVELS)}") from None


def configure_from_environment() -> None:
    """Follow `PCCL_LOG_LEVEL` if it is set; called once, when the first communicator is made."""
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
    """Write the library's log to standard error from this level up."""
    logger = logging.getLogger("pccl")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False

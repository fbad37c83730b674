"""The quotes of `docs/troubleshooting.md`, for the tests that compare them with what a user reads. No test in here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from .helpers import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Title of each entry to the message that it quotes.
QUOTES: dict[str, str] = dict(re.findall(r"^### (.+?)\n\n```text\n(.+?)\n```$", PAGE, re.MULTILINE))
TITLES = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
TESTED: set[str] = set()

F = TypeVar("F", bound=Callable[..., Any])


def explains(title: str) -> Callable[[F], F]:
    """Name the entry of the page that a test belongs to."""
    TESTED.add(title)
    return lambda function: function


def is_quoted(title: str, message: object) -> bool:
    """Whether the message is what the page quotes; words in angle brackets match anything."""
    pattern = re.sub(r"<[^<>]+>", ".+", re.escape(QUOTES[title]).replace(r"\ ", " "))
    return re.fullmatch(pattern, str(message)) is not None


def check(title: str, message: object) -> None:
    """Check that the message is what the page quotes."""
    assert is_quoted(title, message), f"the page says:\n{QUOTES[title]}\nusers read:\n{message}"

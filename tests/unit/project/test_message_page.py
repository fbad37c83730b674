"""`docs/troubleshooting.md` explains every message that the code can print, and nothing else.

An entry with a title quotes a whole message, which tests/process/test_beginners.py compares with the real one. A row
of a table has phrases in backticks; `<words>` in them vary. A phrase covers every message that contains it.

A new message fails the first test, with its text: add a row, or its phrase to a row with the same remedy. A text that
no user reads belongs into `NO_MESSAGES`, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import pytest

from tests import ROOT

from .test_tidy import expect_none
from .user_messages import HOLE, SILENT, Message, is_sentence, messages, statements

PAGE = ROOT / "docs" / "troubleshooting.md"
CONSTANT_MIN = 10  # characters of a phrase that do not vary: fewer would cover too much

# Files whose texts are the output of a command, or reasons that are only logged as information.
NO_MESSAGES_OF = {
    "cli/status_view.py": "the report of `pccl status`",
    "cli/demo.py": "the story of `pccl demo`; its errors are covered below, by phrases of the page",
    "cli/demo_peer.py": "the story of `pccl demo`",
    "cli/demo_view.py": "the story of `pccl demo`",
    "pccl/_core/master/status_report.py": "the report of `pccl status`",
    "pccl/_core/master/ring_choice.py": "why a ring was chosen, logged as information",
    "pccl/_core/master/master_check.py": "the master's invariants",
}
# Phrases of other texts that no user reads, and why.
NO_MESSAGES = {
    "these are formats, programs and names": [
        *("import sys; sys.path", "%(asctime)s", "pccl master state", "Exit codes: 0 success"),
        *(
            "File with the run's token",
            "effective  median",
            "lost between two reduces",
            "edge=<...> group=<...> broken",
        ),
        *("seed <...>: <...> peers in", "from peer <...> to peer", "<...> (in no call)", ", quantized to"),
        *("sent a status report to an operator"),
    ],
    "these end what nobody waits for": [
        *("everything was fetched", "it was not needed any more", "the ring was optimised"),
    ],
    "only a defect of this package makes arguments of inner functions wrong": [
        *(
            "a board needs",
            "a pool has 1 to",
            "datatype <...> at rank",
            "cannot be quantized so",
            "a board of <...> lanes",
        ),
        *("a ring of <...> peers cannot reduce", "cannot be quantized to datatype", "or cannot be divided by"),
        *("is 0, which no segment has", "host reads are off", "a peer has no edge to itself", "the rate from peer"),
        *("fields, a message may have", "it cannot be <...> too", "the message takes"),
        *("more than <...> holds", "a message is bytes, not None", "an Operation has"),
        *("the body of a frame is bytes", "does not fit a length field", "does not fit its field of 8 bits"),
        *("does not say what it is woken for", "was started without a pipe", "the numbers of the world have"),
        *("has no room for an operation", "a reduce was answered with", "a piece cannot have", "a finaliser that"),
        *("a slot comes from", "was released or abandoned", "is not done: wait for it", "slots do not fit into"),
        *("a table has at least one slot", "is no table of completion slots", "the slots behind descriptor"),
        *("is not in a table of", "the table of completion slots is closed", "a segment has at least one byte"),
        *("but a segment of <...> was announced", "sealed against shrinking", "the segment is closed"),
        *("bytes was not closed", "a window has", "a buffer of the window has"),
        *("is not UTF-8", "has a step that"),
    ],
}


@cache
def phrases() -> list[str]:
    """The phrases of all rows; words in angle brackets stand for what varies."""
    rows = [line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row)]


@cache
def quotes() -> list[str]:
    """The messages that entries with a title quote."""
    return re.findall(r"^### .+?\n\n```text\n(.+?)\n```$", PAGE.read_text(), re.MULTILINE)


def contains(phrase: str, text: str) -> bool:
    """Whether the text has the phrase, with anything for words in angle brackets."""
    return pattern(re.split(r"<[^<>]*>", phrase)).search(text) is not None


def is_quoted(text: str) -> bool:
    """Whether a quoted message has all constant parts of this text, in their order."""
    return any(pattern(text.split(HOLE)).search(quote) for quote in quotes())


@cache
def _compiled(parts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)


def pattern(parts: Iterable[str]) -> re.Pattern[str]:
    """The parts in their order."""
    return _compiled(tuple(parts))


def is_no_message(message: Message) -> bool:
    """Whether the text is one of those that no user reads."""
    return any(contains(phrase, message.text) for group in NO_MESSAGES.values() for phrase in group)


def is_explained(message: Message) -> bool:
    """Whether the page has an entry for the message."""
    return is_quoted(message.text) or any(contains(phrase, message.text) for phrase in phrases())


def test_every_message_is_explained() -> None:
    """Goal: a user who reads a message finds it on the page."""
    expect_none(
        f"{message.place}: {message.shown!r} is not in docs/troubleshooting.md: add a row to one of its tables, or a "
        "phrase to a row"
        for message in messages()
        if message.place.partition(":")[0] not in NO_MESSAGES_OF
        and not is_explained(message)
        and not is_no_message(message)
    )


def test_every_phrase_is_of_a_message() -> None:
    """Goal: the page and the list of exceptions lose their entries together with the messages."""
    texts = [message.text for message in messages()]
    listed = [phrase for group in NO_MESSAGES.values() for phrase in group]

    expect_none(
        f"{phrase!r} is in no message of the sources any more: remove it from {where}"
        for where, found in (("docs/troubleshooting.md", phrases()), ("NO_MESSAGES", listed))
        for phrase in found
        if not any(contains(phrase, text) for text in texts)
    )


def test_phrases_are_distinctive() -> None:
    """Goal: no phrase covers half of all messages, and none is there twice."""
    known = phrases()

    expect_none(
        f"{phrase!r} is too short"
        for phrase in known
        if len(re.sub(r"<[^<>]*>", "", phrase).strip()) < CONSTANT_MIN - 1
    )
    expect_none(f"{phrase!r} is there twice" for phrase in set(known) if known.count(phrase) > 1)


# --- The scanner itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise ValueError("all of it is wrong")\n', ["all of it is wrong"]),
        ("x = f'peer {peer!r} said {d[{}]} to us'\n", [f"peer {HOLE} said {HOLE} to us"]),
        ('f(\n    "two parts of "\n    f"one text {x}"  # a comment\n    "and a third",\n    "and another text",\n)\n',
         [f"two parts of one text {HOLE}and a third", "and another text"]),
        ('raise ValueError("too bad")\nx = "too bad"\n', ["too bad"]),
        ('log("%s waits for %d peers", a, b)\n', [f"{HOLE} waits for {HOLE} peers"]),
        ('"""A docstring is no message."""\nx = 1  # nor is "a text of comments"\n', []),
        ('assert a, "this does not hold"\ncheck(a, "this does not hold")\n', []),
        ('cdef int f() except -1:\n    return end(0, b"closed by the other side")\n', ["closed by the other side"]),
        ('self.actions.append(Log(DEBUG, "this is for developers"))\n', []),
        ('x = {"key": "an-option", "other_key": "of_one_word"}\n', []),
    ],
)  # fmt: skip
def test_texts_are_found_in_both_languages(source: str, expected: list[str]) -> None:
    """Goal: every form of a text in a statement is found, joined with its other parts."""
    found = [Message("", text) for text in texts_of(source)]

    assert [message.text for message in found] == expected


def texts_of(source: str) -> list[str]:
    """The messages of one source."""
    return [
        text
        for _, code, texts in statements(source)
        if code and not SILENT.search(code)
        for text in texts
        if is_sentence(text, code)
    ]


def test_a_message_is_covered_by_what_it_contains() -> None:
    """Goal: a phrase covers texts that contain it, in the order of its parts."""
    assert contains("no ring is possible with peer", f"no ring is possible with peer {HOLE}: {HOLE}. Check")
    assert contains("had not run for <t> s; it was", f"the actor (pid {HOLE}) had not run for {HOLE} s; it was stopped")
    assert not contains("s; it was <t> had not run", f"the actor (pid {HOLE}) had not run for {HOLE} s; it was stopped")
    assert not contains("no ring is possible", "no ring was possible")

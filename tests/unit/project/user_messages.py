"""Finds the texts in the sources that a user may read: errors, reasons, warnings.

One scanner for Python and Cython: it reads statements and the texts in them, and needs no grammar. A text is a
*message* if it is a sentence, of at least three words, in a room whose texts reach users. Nothing is imported or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .test_tidy import installed, room

# Rooms whose texts reach users: as exceptions, as reasons of the master or of other peers, as warnings. The others
# raise only what a defect of this package causes.
SPEAKING_ROOMS = {
    *("pccl", "pccl/client", "pccl/memory", "pccl/torch", "cli"),
    *("pccl/_core/master", "pccl/_core/peer", "pccl/_core/protocol", "pccl/_core/dataplane"),
    *("pccl/actors/io", "pccl/actors/master", "pccl/actors/peer", "pccl/actors/workers"),
}
HOLE = "\0"  # stands for what varies in a text
WORDS_MIN = 3

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<prefix>(?:\b[rbfRBF]{1,2})?)(?P<text>\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<newline>\n)|(?P<space>[^\S\n]+|\\\n)|(?P<code>\w+|.)""",
    re.DOTALL | re.VERBOSE,
)
_HOLES = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}|%[sdrgx]")

# Statements whose texts no user reads, or reads as the output of a command, not as a message.
SILENT = re.compile(
    r"^(?:assert\b|check\(|raise_errno\(|@|[A-Z_]+ ?= ?re\.compile|return fprintf)"
    r"|\bLog\((?:DEBUG|INFO)|\blog\((?:logging\.)?(?:DEBUG|INFO)|\.(?:debug|info)\(|\bre\.(?:compile|fullmatch|search)\("
    r"|\.say\(|\breport\(|add_argument\(|ArgumentParser\(|TypeVar\("
)
_REPRESENTATION = re.compile(r"^<|^[A-Z]\w*\(|^\0?\.\w+\(")


@dataclass(frozen=True)
class Message:
    """One text in a source, with `HOLE` for each part that varies."""

    place: str  # file:line
    text: str

    @property
    def shown(self) -> str:
        """The text as a reader writes it into the page."""
        return self.text.replace(HOLE, "<...>").replace("\n", "\\n")


def statements(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line, code without texts, and texts of each statement; texts that follow each other are one."""
    line, depth, glued = 1, 0, False
    first, code = 1, ""
    texts: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["text"] is not None:
            plain = _plain(token["prefix"], token["text"])
            if glued:
                texts[-1] += plain
            else:
                first = first if code or texts else line
                texts.append(plain)
            glued = True
        elif token["newline"] and depth == 0:
            if code or texts:
                yield first, code.strip(), texts
            code, texts, glued = "", [], False
        elif token["open"] or token["close"] or token["code"]:
            first = first if code or texts else line
            depth += bool(token["open"]) - bool(token["close"])
            code, glued = code + token[0], False
        elif token["space"] and code:
            code += " "
        line += token[0].count("\n")
    if code or texts:
        yield first, code.strip(), texts


def _plain(prefix: str, quoted: str) -> str:
    marks = 3 if quoted[:3] in ('"' * 3, "'" * 3) else 1
    text = quoted[marks:-marks]
    if "r" not in prefix.lower():
        text = re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text)
    if "f" in prefix.lower():
        return _HOLES.sub(HOLE, text.replace("{{", "{").replace("}}", "}")) if "{{" not in text else text
    return re.sub(r"%[sdrgx]", HOLE, text)


def is_sentence(text: str, code: str = "") -> bool:
    """Whether a text is something to read, rather than a key, a pattern or a format; what is raised is, if possible."""
    words = re.findall(r"(?<![\w-])[A-Za-z][A-Za-z']*(?![\w-])", text.replace(HOLE, " "))
    return (
        len(words) >= (2 if code.startswith("raise") else WORDS_MIN)
        and " " in text.strip()
        and _REPRESENTATION.search(text) is None
    )


def messages() -> Iterator[Message]:
    """Every message of the sources."""
    for source in installed(".py", ".pyx", ".pxd"):
        if room(source.module or "") not in SPEAKING_ROOMS:
            continue
        for line, code, texts in statements(source.text):
            if not code or SILENT.search(code):
                continue  # a text alone is a docstring
            yield from (Message(f"{source.name}:{line}", text) for text in texts if is_sentence(text, code))

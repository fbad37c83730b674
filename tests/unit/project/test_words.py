"""Compares file names with the glossary: only known nouns, one meaning each, and no gerunds.

Reads names, code without its comments, and the glossary. A module name consists of nouns of the glossary and of
ordinary words of the field, which are listed here because they have their usual meaning in this project.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import pccl
from tests import ROOT

from .test_tidy import OTHER_FOLDERS, expect_none, installed, sources

GLOSSARY = ROOT / "docs" / "glossary.md"

# Nouns that end like a gerund, and gerunds that are established nouns of the field.
REAL_NOUNS = {"framing", "mapping", "packaging", "ring", "staging", "throttling"}

ORDINARY = {
    *("address", "arithmetic", "array", "bandwidth", "bench", "builder", "check", "checker", "choice", "copy"),
    *("cuda", "demo", "device", "dispatch", "error", "exact", "fastpath", "fork", "framing", "futex", "headroom"),
    *("identity", "inflight", "ledger", "local", "log", "memory", "op", "optimizer", "option", "path"),
    *("procfs", "proxy", "query", "runner", "search", "share", "spawn", "status", "step", "stream"),
    *("stress", "supervisor", "table", "tcp", "tensor", "timed", "tournament", "view", "watch", "workload", "zygote"),
}

# Words of public names that the contract with users fixed.
CONTRACT = {"algorithm", "async", "data", "distribution", "hint", "info", "node", "operand", "pccl", "type"}

# The same class name in two files, each with its reason.
SHARED_CLASSES = {
    "Fault": "a failure on purpose, at a fault point and in the plan of a stress run",
    "Numbers": "the numbers of the world, as the communicator keeps them and as a stress run reports them",
    "Peer": "a peer, as the master, the supervisor of a stress run and the demo see it",
    "View": "what a terminal shows of a demo and of a stress run",
}

# The same name in two rooms, each with its reason.
SHARED_NAMES = {
    "arithmetic": "what the kernels compute, and what the stress harness expects of them",
    "events": "each machine has its own, and the protocol those that both know",
    "options": "the options, and the flags of the command line that set them",
    "records": "the records that everything is made of, and those of the stress harness",
}


def stems() -> list[str]:
    """The name of every module that is installed, without its folder."""
    return [source.path.stem for source in installed(".py", ".pyx") if not source.path.stem.startswith("__")]


@cache
def nouns() -> tuple[str, ...]:
    """The first column of the glossary's first table."""
    table = GLOSSARY.read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)
    assert rows[0] == "noun"
    return tuple(rows[1:])


def is_known(word: str) -> bool:
    """Whether a word, or its singular, is in the glossary or ordinary."""
    known = {part for noun in nouns() for part in re.split("[ -]", noun)} | ORDINARY
    singular = [word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)]
    return any(form in known for form in singular)


def test_module_names_are_made_of_known_words() -> None:
    """Goal: a reader who knows the glossary knows from its name what a file is about."""
    expect_none(
        f"{stem}: {word} is not in docs/glossary.md, nor an ordinary word"
        for stem in stems()
        for word in stem.split("_")
        if not is_known(word)
    )


def test_a_name_stands_in_one_room() -> None:
    """Goal: a file can be named without its folder; every exception has a reason, and no reason is left over."""
    twice = {stem for stem, count in Counter(stems()).items() if count > 1}

    expect_none(twice ^ SHARED_NAMES.keys())


def test_a_class_name_means_one_thing() -> None:
    """Goal: a class can be named without its file; every exception has a reason, and no reason is left over."""
    classes = re.compile(r"^(?:cdef |cdef packed )?(?:class|struct) (\w+)", re.MULTILINE)
    homes = {
        (name, source.path.with_suffix(""))
        for source in installed(".py", ".pyx", ".pxd")
        for name in classes.findall(source.text)
    }
    twice = {name for name, count in Counter(name for name, _ in homes).items() if count > 1}

    expect_none(twice ^ SHARED_CLASSES.keys())


def test_public_names_are_made_of_known_words() -> None:
    """Goal: a public class is named by nouns of the glossary, or as the contract says; errors say what happened."""
    public = [name for name in pccl.__all__ if name[0].isupper() and not name.endswith("Error")]
    expect_none(
        f"{name}: {word} is not in docs/glossary.md, nor in the contract"
        for name in public
        for word in re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]+", name)
        if not is_known(word.lower()) and word.lower() not in CONTRACT
    )
    assert len(public) > 15


def test_files_are_not_named_by_gerunds() -> None:
    """Goal: files are named by nouns: `ring_links`, not `wiring`. Also tests and benchmarks."""
    files = [source.path for source in installed(".py", ".pyx")]
    files += [path for folder in (*OTHER_FOLDERS, "docs") for path in (ROOT / folder).rglob("*.py")]

    expect_none(str(path.relative_to(ROOT)) for path in files if is_gerund(path))


def is_gerund(path: Path) -> bool:
    """Whether the last word of a file's name is a gerund, which names an activity and not a thing."""
    word = path.stem.rpartition("_")[2]
    return word.endswith("ing") and word not in REAL_NOUNS


def identifiers(page: str) -> set[str]:
    """The names in code font on a page that are written like code: with capitals, underscores, dots or brackets."""
    spans = re.findall("`([^`]+)`", page)
    return {
        name for span in spans if re.search("[A-Z_.(]", span) and "/" not in span for name in re.findall(r"\w+", span)
    }


@cache
def names_in_code() -> frozenset[str]:
    """Every name that the code of the packages and benchmarks uses; comments, docstrings and texts do not count."""
    files = [source for source in sources() if source.module is not None or source.name.startswith("benchmarks/")]
    code = (re.sub(r'"""[\s\S]*?"""|"[^"\n]*"|#.*', "", source.text) for source in files)
    return frozenset(name for text in code for name in re.findall(r"\w+", text))


def test_names_in_the_glossary_exist() -> None:
    """Goal: every class, function and page that the glossary names exists."""
    page = GLOSSARY.read_text()
    paths = [span for span in re.findall("`([^`]+)`", page) if "/" in span]

    expect_none(identifiers(page) - names_in_code())
    expect_none(path for path in paths if not (ROOT / path).exists())
    assert len(identifiers(page)) > 20
    assert paths


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("a `worker set` and its `ballot`", set()),
        ("`LaneEnd`, `has_crc` or `check()`", {"LaneEnd", "has_crc", "check"}),
        ("`Result.SUCCESS` in `docs/glossary.md`", {"Result", "SUCCESS"}),
    ],
)
def test_names_are_told_from_nouns(page: str, expected: set[str]) -> None:
    """Goal: test the rule itself. A noun in code font is a word to use, and need not be a name in the code."""
    assert identifiers(page) == expected


@pytest.mark.parametrize(("name", "expected"), [("wiring", True), ("test_launching", True), ("exact_ring", False)])
def test_gerunds_are_told_from_nouns(name: str, *, expected: bool) -> None:
    """Goal: the rule itself."""
    assert is_gerund(Path(f"{name}.py")) is expected


@pytest.mark.parametrize(("word", "expected"), [("lanes", True), ("addresses", True), ("gizmo", False)])
def test_plurals_are_known_with_their_nouns(word: str, *, expected: bool) -> None:
    """Goal: the rule itself."""
    assert is_known(word) is expected

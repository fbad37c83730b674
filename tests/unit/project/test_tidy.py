"""Rules of style that a test can check, so that reviews need not discuss them.

Each rule only reads sources; nothing of the library is imported or run. A rule
that turns out wrong is changed here, with its reason.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests import ROOT

# Folder on disk -> package it is installed as.
PACKAGES = {"pccl": "pccl", "cli": "pccl.cli", "stress": "pccl.stress"}
OTHER_FOLDERS = ("tests", "benchmarks", "examples")
SUFFIXES = {".py", ".pyx", ".pxd", ".pyi", ".h", ".cu"}

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

# The rooms, and the rooms that each may import besides itself. A name of a module means only that module: options,
# errors and values are the leaves of the public API, which every room may import.
BASE = ("pccl/_core", "pccl.options")
ROOMS = {
    "pccl/_core": (),
    "pccl/_core/system": ("pccl/_core",),
    "pccl/_core/kernels": ("pccl/_core",),
    "pccl/_core/solver": ("pccl/_core", "pccl/_core/system"),
    "pccl/_core/protocol": (*BASE, "pccl/_core/kernels"),
    "pccl/_core/master": (*BASE, "pccl/_core/protocol", "pccl/_core/solver"),
    "pccl/_core/peer": (*BASE, "pccl/_core/protocol", "pccl/_core/kernels"),
    "pccl/_core/dataplane": ("pccl/_core", "pccl/_core/protocol", "pccl/_core/kernels", "pccl/_core/system"),
    "pccl/memory": ("pccl/_core", "pccl/_core/system", "pccl.values"),
    "pccl/torch": ("pccl/_core/kernels", "pccl/_core/system", "pccl/memory", "pccl.values"),
    "pccl/actors": (),
    "pccl/actors/io": (*BASE, "pccl/_core/protocol", "pccl/_core/system"),
    "pccl/actors/workers": (
        *("pccl/_core", "pccl/_core/protocol", "pccl/_core/dataplane", "pccl/_core/kernels", "pccl/_core/system"),
        *("pccl/actors/io", "pccl/memory"),
    ),
    "pccl/actors/master": (
        *BASE,
        "pccl/_core/master",
        "pccl/_core/protocol",
        "pccl/_core/solver",
        "pccl/_core/system",
        "pccl/actors/io",
    ),
    "pccl/actors/peer": (
        *(*BASE, "pccl/_core/peer", "pccl/_core/protocol", "pccl/_core/dataplane", "pccl/_core/system"),
        *("pccl/actors/io", "pccl/actors/workers", "pccl/memory"),
    ),
    "pccl/client": (
        *("pccl/_core", "pccl/_core/protocol", "pccl/_core/dataplane", "pccl/_core/kernels", "pccl/_core/system"),
        *("pccl/actors/io", "pccl/memory", "pccl/torch"),
        *("pccl.errors", "pccl.options", "pccl.shared_state", "pccl.values"),
    ),
    "pccl": ("pccl/_core*", "pccl/actors*", "pccl/client", "pccl/memory", "pccl/torch"),
    "cli": ("pccl*", "stress"),
    "stress": ("pccl*",),
}
# The leaves: they import only each other and the modules that all rooms import.
LEAVES = {"pccl.errors": ("pccl.values", "pccl/_core/protocol"), "pccl.options": ("pccl/_core",), "pccl.values": ()}

# Rooms whose code depends on its arguments only: no socket, clock, thread, file or global random source.
PURE = {"pccl/_core", "pccl/_core/master", "pccl/_core/peer", "pccl/_core/protocol"}
IMPURE = {
    *("asyncio", "fcntl", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "posix", "random", "secrets"),
    *("select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time"),
}

LEFTOVERS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|WIP)\b|\bbreakpoint\(|\bpdb\b|\b(?:issue|ticket|PR) ?#?\d+|(?<!\w)#\d+\b"
)
BANNED_WORDS = {
    "slave": "peer",
    "whitelist": "list of what is allowed",
    "blacklist": "list of what is refused",
    "coordinator": "master",
    "sanity": "say what is checked",
    "obviously": "nothing: leave it out",
    "basically": "nothing: leave it out",
    "utils": "a name that says what for",
}


@dataclass(frozen=True)
class Source:
    """One source file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        """The path relative to the root, as error messages show it."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text()

    @property
    def module(self) -> str | None:
        """Dotted name as installed; None outside the installed packages."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in PACKAGES:
            return None
        names = [PACKAGES[parts[0]], *parts[1:]]
        return ".".join(names[:-1] if names[-1] == "__init__" else names)

    @property
    def is_package(self) -> bool:
        """Whether relative imports start in this module itself."""
        return self.path.stem == "__init__"


@cache
def sources() -> list[Source]:
    """Every source file, installed or not."""
    folders = [ROOT / folder for folder in (*PACKAGES, *OTHER_FOLDERS)]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    return [Source(path) for path in files]


def installed(*suffixes: str) -> list[Source]:
    """The files of the installed packages, with these suffixes or all."""
    return [s for s in sources() if s.module is not None and (not suffixes or s.path.suffix in suffixes)]


def expect_none(found: Iterable[str]) -> None:
    """Fail with all findings, one per line; pytest would shorten the list."""
    lines = sorted(found)
    assert not lines, "\n" + "\n".join(lines)


@cache
def modules() -> set[str]:
    """The names of all importable modules of the repository."""
    return {s.module for s in installed(".py", ".pyx", ".pxd") if s.module is not None}


# --- Imports ----------------------------------------------------------------

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[.\w]+)[ \t]+(?P<from>c?)import[ \t]+(?P<names>\([^)]*\)|[^\n#]+)"
    r"|(?P<whole>c?)import[ \t]+(?P<plain>[^\n#]+))",
    re.MULTILINE,
)


parsed = cache(ast.parse)  # several rules read the tree of the same file


def raw_imports(text: str, suffix: str, *, cimported: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Pairs of (base as written, with leading dots; names taken from it); all imports, or cimports only."""
    if suffix in {".py", ".pyi"}:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield "." * node.level + (node.module or ""), [alias.name for alias in node.names]
        return
    for match in CYTHON_IMPORT.finditer(text):
        if cimported and not (match["from"] or match["whole"]):
            continue
        if match["plain"]:
            yield from ((part.split()[0], []) for part in match["plain"].split(",") if part.strip())
        else:
            yield match["base"], [part.split()[0] for part in match["names"].strip("()\n ").split(",") if part.strip()]


def resolve(base: str, module: str, *, is_package: bool) -> str:
    """The absolute name of an import as written in a module."""
    level = len(base) - len(base.lstrip("."))
    if level == 0:
        return base
    parts = module.split(".")
    anchor = parts[: len(parts) - level + is_package]
    return ".".join([*anchor, *filter(None, [base.lstrip(".")])])


@cache
def imports(source: Source, *, cimported: bool = False) -> set[str]:
    """The modules that a file imports, or cimports only; imported names that are our modules count as modules."""
    found = set()
    for base, names in raw_imports(source.text, source.path.suffix, cimported=cimported):
        absolute = resolve(base, source.module or "", is_package=source.is_package)
        inner = {f"{absolute}.{name}" for name in names} & modules()
        found |= inner
        # `from pccl import cuda` imports the submodule, not the package.
        if len(inner) < len(names) or not names:
            found.add(absolute)
    return found


def room(module: str) -> str:
    """The room (folder) of one of our modules."""
    name = re.sub(r"^pccl\.(?=(?:cli|stress)\b)", "", module)
    parts = name.split(".")
    return "/".join(parts if (ROOT / Path(*parts)).is_dir() else parts[:-1])


def may_import(module: str, target: str) -> bool:
    """Whether the rules allow this module to import the target, one of our modules."""
    here, there = room(module), room(target)
    if module in LEAVES:
        return target in LEAVES or there in LEAVES[module]
    if here == there:
        return True
    return any(
        target == rule or (there == rule and target not in LEAVES) or (rule[-1] == "*" and there.startswith(rule[:-1]))
        for rule in ROOMS[here]
    )


def test_every_folder_is_a_room() -> None:
    """Goal: a new folder comes with its rules."""
    folders = {str(s.path.parent.relative_to(ROOT)) for s in installed()}

    expect_none(folders ^ ROOMS.keys())


def test_unit_tests_mirror_the_rooms() -> None:
    """Goal: the tests of a module are found without a search; tests of the repository itself are in `project`."""
    unit = ROOT / "tests" / "unit"
    folders = {str(s.path.parent.relative_to(unit)) for s in sources() if s.path.is_relative_to(unit)} - {"."}
    folders |= {str(parent) for folder in folders for parent in Path(folder).parents} - {"."}
    rooms = {name.removeprefix("pccl/") for name in ROOMS} - {"pccl"}

    expect_none(folders ^ (rooms | {"project", "benchmarks"}))


def test_imports_follow_the_rooms() -> None:
    """Goal: cli, stress -> public -> client -> actors -> memory -> _core; machines know neither each other nor I/O."""
    wrong = [
        f"{source.name} imports {target}"
        for source in installed()
        if source.module is not None and source.path.suffix not in {".h", ".cu"}
        for target in imports(source)
        if target.split(".")[0] == "pccl" and not may_import(source.module, target)
    ]

    expect_none(wrong)


def test_pure_rooms_do_no_io() -> None:
    """Goal: rooms that decide import no socket, clock, thread, file or global random source."""
    wrong = [
        f"{source.name} imports {target}"
        for source in installed(".py", ".pyx", ".pxd", ".pyi")
        if room(source.module or "") in PURE
        for target in imports(source)
        if target.split(".")[0] in IMPURE or target == "libc.time"
    ]

    expect_none(wrong)


# Names that only Linux has. `posix.pxd` declares them; these rooms wrap them in names that another system can have.
LINUX_ROOMS = {"pccl/_core/system", "pccl/actors/io"}
LINUX_ONLY = re.compile(
    r"\bepoll_|\beventfd\w*\(|\bmemfd_create|\bpidfd_send_signal|\bprctl\(|\bsyscall\(|\bMADV_|\bF_(?:ADD|GET)_SEALS"
    r"|\bTCP_(?:INFO|USER_TIMEOUT|CONGESTION|NOTSENT_LOWAT)|[\"']/(?:proc|sys)/"
    r"|\bAF_UNIX|\bSOCK_(?:SEQPACKET|CLOEXEC|NONBLOCK)|\bMSG_(?:MORE|TRUNC|CMSG_CLOEXEC|ZEROCOPY)|\bpipe2\("
    r"|\bsched_[gs]etaffinity|\b(?:posix_)?fallocate|\bepoll\("
)


def test_linux_has_its_rooms() -> None:
    """Goal: a port to another system changes two folders; no other file uses what only Linux has."""
    wrong = [
        f"{source.name}:{number}: {match[0]}"
        for source in installed(".py", ".pyx", ".pxd", ".h")
        if source.path.is_relative_to(ROOT / "pccl") and room(source.module or "") not in LINUX_ROOMS
        for number, line in enumerate(source.text.splitlines(), 1)
        for match in LINUX_ONLY.finditer(line)
    ]

    expect_none(wrong)


def entry_points() -> set[str]:
    """The modules that are started from outside: the package itself, console scripts, `python -m`, commands."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    # Commands are loaded by name when they are used: the table in cli/__init__.py names the module of each.
    commands = re.findall(r': \("(\w+)", "\w+"\)', (ROOT / "cli" / "__init__.py").read_text())
    mains = {module for module in modules() if module.endswith(".__main__")}
    return {"pccl", *(script.split(":")[0] for script in scripts), *(f"pccl.cli.{name}" for name in commands), *mains}


def test_no_file_is_dead() -> None:
    """Goal: each module is imported by another, named in a string that starts it, or an entry point."""
    reached = entry_points()
    expect_none(f"{module} is an entry point, but there is no such module" for module in reached - modules())
    for source in installed(".py", ".pyx", ".pxd"):
        strings = set(re.findall(r"[\"'](pccl(?:\.\w+)+)[\"']", source.text))
        # A module that imports itself is still dead, and so is a .pyx that only its .pxd names.
        for target in (imports(source) | strings) - {source.module}:
            parts = target.split(".")
            reached |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}

    expect_none(modules() - reached)


def python_imports() -> set[str]:
    """The modules that Python files import, those of tests and benchmarks included."""
    return {target for source in sources() if source.path.suffix in {".py", ".pyi"} for target in imports(source)}


def cimports() -> set[str]:
    """The modules whose declarations another Cython file cimports; a .pyx uses its own .pxd without a cimport."""
    return {
        target
        for source in installed(".pyx", ".pxd")
        for target in imports(source, cimported=True)
        if target != source.module
    }


def test_stubs_are_where_python_imports() -> None:
    """Goal: every compiled module that Python code imports has a stub, and no other module has one."""
    extensions = {s.module for s in installed(".pyx")}
    stubs = {s.module for s in installed(".pyi")}

    expect_none(f"{module} needs a stub" for module in (extensions & python_imports()) - stubs if module)
    expect_none(f"the stub of {module} has no reader" for module in stubs - (extensions & python_imports()) if module)


def test_declaration_files_are_where_cython_cimports() -> None:
    """Goal: a .pxd says what other modules may use; what only one module uses is declared in its .pyx."""
    declared = {s.module for s in installed(".pxd")}

    expect_none(f"{module}.pxd has no reader: move it into the .pyx" for module in declared - cimports() if module)


# --- Sizes ------------------------------------------------------------------


def test_files_are_short() -> None:
    """Goal: one concept per file."""
    lengths = {s.name: s.text.count("\n") for s in sources()}

    expect_none(f"{name} has {lines} lines" for name, lines in lengths.items() if lines > FILE_LINES_MAX)


CYTHON_FUNCTION = re.compile(r"^(\s*)(?:async )?(?:def|cdef(?! class)|cpdef)\b[^=\n]*\(")


def functions(text: str, suffix: str) -> Iterator[tuple[str, int]]:
    """Pairs of (function, its number of lines)."""
    if suffix == ".py":
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        return
    # Cython: a function lasts until a line that is indented no deeper, where
    # the bracket that closes a long signature does not count.
    lines = text.splitlines()
    for start, line in enumerate(lines):
        match = CYTHON_FUNCTION.match(line)
        if match is None:
            continue
        end = last = start
        for end in range(start + 1, len(lines)):
            body = lines[end]
            if not body.strip():
                continue
            if len(body) - len(body.lstrip()) <= len(match[1]) and not body.lstrip().startswith(")"):
                break
            last = end
        yield line.strip(), last - start + 1


def test_functions_fit_a_screen() -> None:
    """Goal: a reader sees a whole function at once."""
    long = [
        f"{source.name}: {name} has {lines} lines"
        for source in sources()
        if source.path.suffix in {".py", ".pyx"}
        for name, lines in functions(source.text, source.path.suffix)
        if lines > FUNCTION_LINES_MAX
    ]

    expect_none(long)


# --- Words ------------------------------------------------------------------


def opens_with_law(text: str, suffix: str) -> bool:
    """Whether a file begins with its purpose; only compiler directives and shebangs may come before."""
    if suffix in {".h", ".cu"}:
        return text.lstrip().startswith(("/*", "//"))
    if suffix == ".py":
        return ast.get_docstring(parsed(text)) is not None
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("# cython:")), "")
    return first.startswith(('"""', "#"))


def test_files_open_with_their_law() -> None:
    """Goal: a file first says what it contains and what it never contains; stubs rely on their sources."""
    lawful = [s for s in sources() if s.path.suffix != ".pyi"]

    expect_none(s.name for s in lawful if not opens_with_law(s.text, s.path.suffix))


def written(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """Every match of the pattern with its file and line; this file is left out, because it names what it bans."""
    for source in sources():
        if source.path == Path(__file__) or pattern.search(source.text) is None:
            continue
        for number, line in enumerate(source.text.splitlines(), 1):
            if match := pattern.search(line):
                yield f"{source.name}:{number}", match


def test_nothing_is_left_over() -> None:
    """Goal: no reminder, no debugger call, no number of a tracker that readers cannot see."""
    expect_none(f"{place}: {match.string.strip()}" for place, match in written(LEFTOVERS))


def test_banned_words_are_replaced() -> None:
    """Goal: all texts use the glossary's words; the message names the word to use. torch's own words are allowed."""
    pattern = re.compile(rf"(?<!torch\.)(?<!torch\.nn\.)\b({'|'.join(BANNED_WORDS)})\b", re.IGNORECASE)

    expect_none(
        f"{place}: {match[0]} is banned, use {BANNED_WORDS[match[0].lower()]}" for place, match in written(pattern)
    )


def test_the_library_does_not_print() -> None:
    """Goal: standard output belongs to the application; the library logs, and only cli and stress print."""
    printing = re.compile(r"(?<![\w.])print\(")

    expect_none(f"{place}: {match.string.strip()}" for place, match in written(printing) if place.startswith("pccl/"))


# --- The rules themselves ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        ("import os, time\n", ".py", {"os", "time"}),
        ("def f():\n    from .story import attach\n", ".py", {"pccl._core.story"}),
        ("from ..errors import (\n    A,\n    B,\n)\n", ".pyx", {"pccl.errors"}),
        ("cimport cython\nfrom libc.time cimport time\n", ".pyx", {"cython", "libc.time"}),
        ("    from . cimport posix, futex as f\n", ".pyx", {"pccl._core"}),
    ],
)
def test_imports_are_read_from_both_languages(text: str, suffix: str, expected: set[str]) -> None:
    """Goal: the rules above see every form that an import can take."""
    found = {resolve(base, "pccl._core.probe", is_package=False) for base, _ in raw_imports(text, suffix)}

    assert found == expected


def test_lengths_are_measured_in_both_languages() -> None:
    """Goal: the body counts, with blank lines and long signatures; lines after it do not."""
    cython = "cdef int f(\n    int a,\n) except -1 nogil:\n    x = 1\n\n    return x\n\n\ncdef int y = 3\n"
    python = "def f(\n    a,\n):\n    x = 1\n\n    return x\n\n\ny = 3\n"

    assert [lines for _, lines in functions(cython, ".pyx")] == [6]
    assert not list(functions("cdef class Derived(Base):\n    x = 1\n", ".pyx"))
    assert [lines for _, lines in functions(python, ".py")] == [6]


@pytest.mark.parametrize(
    ("module", "target", "expected"),
    [
        ("pccl._core.master.group", "pccl._core.protocol.messages", True),
        ("pccl._core.master.group", "pccl._core.peer.calls", False),
        ("pccl._core.protocol.codec", "pccl.actors.io.loop", False),
        ("pccl.actors.peer.peer_actor", "pccl.client.handle", False),
        ("pccl.actors.workers.lane_worker", "pccl._core.dataplane.sender", True),
        ("pccl.actors.workers.lane_worker", "pccl._core.peer.calls", False),
        ("pccl.errors", "pccl.communicator", False),
        ("pccl.memory.arena", "pccl.communicator", False),
        ("pccl.cli.demo", "pccl.communicator", True),
    ],
)
def test_rooms_allow_what_they_say(module: str, target: str, *, expected: bool) -> None:
    """Goal: test the rule itself, with allowed and forbidden imports."""
    assert may_import(module, target) is expected

"""`python -O` removes assertions; the checks of arguments are none, so they stay."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

from .test_tidy import PACKAGES, expect_none, installed, room

# Rooms whose code receives what users pass, and single files of others. There, an invariant is an `if` and a `raise`
# too: whether a condition depends on an argument is nothing that a test can see.
CHECKING_ROOMS = {"pccl", "pccl/client", "pccl/memory", "pccl/torch", "cli"}
CHECKING_MODULES = {"pccl.actors.io.addresses", "pccl._core.kernels.tensor_copy", "pccl._core.dataplane.quantization"}

# The tests that pass wrong arguments.
FILES = [
    *("tests/unit/test_argument_checks.py", "tests/unit/test_shared_state_values.py", "tests/unit/test_values.py"),
    *("tests/unit/test_options.py", "tests/unit/client/test_reduce_request.py"),
]

TEXT_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)
REMOVED = re.compile(r"\b(?:assert|__debug__)\b")


def removed(text: str) -> Iterator[int]:
    """The lines of what -O removes. Both languages reserve these words, so they are found wherever they stand."""
    code = TEXT_OR_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(code.split("\n"), 1):
        if REMOVED.search(line):
            yield number


def test_no_check_of_arguments_is_an_assertion() -> None:
    """Goal: code that receives what users pass has no assertion, in Python and in Cython."""
    checking = [
        source
        for source in installed(".py", ".pyx", ".pxd")
        if room(source.module or "") in CHECKING_ROOMS or source.module in CHECKING_MODULES
    ]

    assert {source.path.parent.name for source in checking} >= {"client", "memory", "torch", *PACKAGES} - {"stress"}
    expect_none(
        f"{source.name}:{number}: -O removes this; write `if not ...: raise AssertionError(...)`"
        for source in checking
        for number in removed(source.text)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("assert x\n", [1]),
        ("if x: assert(y)\nz = 1; assert z\n", [1, 2]),
        ('"""We assert\nthat."""\nassert x, "assert"\n', [3]),
        ('# assert\nx = \'assert\'\nraise AssertionError("assert\\" it")\n', []),
        ("if __debug__:\n    check()\n", [1]),
        ("cdef int f() except -1:\n    assert 1 <= <int> x\n", [2]),
    ],
)
def test_assertions_are_found_in_both_languages(text: str, expected: list[int]) -> None:
    """Goal: every form of what -O removes is found, and no word of a text or comment."""
    assert list(removed(text)) == expected


def run_optimised(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_arguments_are_checked_without_assertions() -> None:
    """Goal: `python -O -m pytest` passes the tests of arguments; pytest keeps the assertions of test modules."""
    ended = run_optimised(*FILES)

    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "skipped" not in ended.stdout


PLUGIN = '''
"""Makes an assertion of every check in `pccl.client.tensors`, as a careless change would."""
import ast
import pccl.client.tensors as module

class ToAssertion(ast.NodeTransformer):
    def visit_If(self, node):
        self.generic_visit(node)
        raised = node.body[0]
        if node.orelse or not isinstance(raised, ast.Raise) or "AssertionError" not in ast.unparse(raised):
            return node
        return ast.parse("if False: pass\\nassert not (" + ast.unparse(node.test) + "), 'wrong'").body

with open(module.__file__) as file:
    tree = ToAssertion().visit(ast.parse(file.read()))
exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), module.__dict__)
'''


def test_an_assertion_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the run above fails if a check becomes an assertion."""
    (tmp_path / "careless.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    ended = run_optimised("-p", "careless", "-k", "contiguous", FILES[0])

    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert len(re.findall("^FAILED .*contiguous", ended.stdout, re.MULTILINE)) > 10, ended.stdout

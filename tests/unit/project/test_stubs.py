"""Stubs and their compiled modules have the same public names.

mypy checks types, and `mypy.stubtest` compares signatures on request; that takes half a minute. Comparing names takes a
millisecond, and finds the most frequent mistake: a missing name after a change of a machine.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

STUBS = sorted(ROOT.glob("pccl/**/*.pyi"))


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def described(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return a dict from each name to the statement that declares it."""
    found: dict[str, ast.stmt] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = statement
    return found


def described_by(path: Path) -> Any:
    """Import the module that a stub describes."""
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_names_what_is_there(path: Path) -> None:
    """Goal: every name that a stub gives to editors and mypy exists in the compiled module."""
    module = described_by(path)
    stub = described(ast.parse(path.read_text()).body)

    assert public(stub) <= public(dir(module))
    for name, statement in stub.items():
        if isinstance(statement, ast.ClassDef):
            actual = getattr(module, name)
            inherited = {attribute for base in actual.__mro__[1:] for attribute in dir(base)}
            claimed, found = public(described(statement.body)) - inherited, public(dir(actual)) - inherited
            assert found <= claimed, name
            # Attributes in the dictionary of an instance are not visible on its class.
            assert actual.__dictoffset__ or claimed <= found, name


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_leaves_no_class_out(path: Path) -> None:
    """Goal: every class that a compiled module defines itself is described."""
    module = described_by(path)
    stub = described(ast.parse(path.read_text()).body)
    own = {
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    }

    assert public(own) <= set(stub)

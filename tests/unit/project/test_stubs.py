"""Stubs leave nothing out that a compiled module has.

`make lint` runs `mypy.stubtest`, which checks that everything in a stub is in the module, with the same signature. It
does not check the other direction (`--ignore-missing-stub`), because a compiled module also has names that it imported
or that are private. These tests check that direction: public classes, and their public attributes.
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
def test_a_stub_leaves_no_attribute_out(path: Path) -> None:
    """Goal: every public attribute of a class that a stub describes is in the stub."""
    module = described_by(path)
    for name, statement in described(ast.parse(path.read_text()).body).items():
        if isinstance(statement, ast.ClassDef):
            actual = getattr(module, name)
            inherited = {attribute for base in actual.__mro__[1:] for attribute in dir(base)}

            assert public(dir(actual)) - inherited <= public(described(statement.body)), name


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_leaves_no_class_out(path: Path) -> None:
    """Goal: every class that a compiled module defines itself is described."""
    module = described_by(path)
    stub = described(ast.parse(path.read_text()).body)
    own = {
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    }

    assert public(own) <= set(stub)

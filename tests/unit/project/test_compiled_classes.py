"""What the sources say about compiled classes is true of the compiled classes."""

from __future__ import annotations

import importlib
import re

import pytest

from tests import ROOT

HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC
OPTED_OUT = [
    (".".join(path.relative_to(ROOT).with_suffix("").parts), name)
    for path in sorted(ROOT.glob("pccl/**/*.p[yx][xd]"))
    for name in re.findall(r"@cython\.no_gc\n(?:@.*\n)*cdef class (\w+)", path.read_text())
]


@pytest.mark.parametrize(("module", "name"), OPTED_OUT, ids=lambda part: part.rpartition(".")[2])
def test_a_class_without_garbage_collection_is_not_collected(module: str, name: str) -> None:
    """Goal: Cython ignores `no_gc` silently if it takes a base class for collectable; then objects can be cleared."""
    assert not getattr(importlib.import_module(module), name).__flags__ & HAS_GC

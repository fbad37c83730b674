"""The table of executed lines: sums, rounding, and modules that no test imported."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_table import never_loaded, table


def counted(lines: int, executed: int) -> dict[str, dict[str, int]]:
    return {"summary": {"num_statements": lines, "covered_lines": executed}}


def test_lines_are_summed_per_folder_and_kind() -> None:
    """Goal: Python and Cython are counted separately; a folder without code has no row; 99.9 % is not 100."""
    files = {
        "pccl/__init__.py": counted(10, 10),
        "pccl/_core/__init__.py": counted(0, 0),
        "pccl/_core/peer/calls.py": counted(3, 1),
        "pccl/_core/peer/member.pyx": counted(1000, 999),
        "pccl/_core/peer/member.pxd": counted(500, 500),
    }

    assert table(files).splitlines()[2:] == [
        "| `pccl/` | 10 | 100 % | 0 | - |",
        "| `pccl/_core/peer/` | 3 | 33 % | 1,500 | 99 % |",
        "| **total** | 13 | 84 % | 1,500 | 99 % |",
    ]


def test_a_compiled_module_that_nobody_imports_is_named(tmp_path: Path) -> None:
    """Goal: a module that was never loaded is not in the report; leaving it out must not improve the figure."""
    for name in ("one.pyx", "two.pyx", "two.pxd", "three.py"):
        (tmp_path / name).touch()

    assert never_loaded({str(tmp_path / "one.pyx"): {}}, tmp_path) == [str(tmp_path / "two.pyx")]

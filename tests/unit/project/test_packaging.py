"""The package as Python and tools see it: what imports load and need, where pccl refuses to run, pinned versions.

Imports are tried in fresh interpreters, because this one has loaded everything. What is in the sdist and the wheel is
tested by tests/process/test_distribution.py.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

# Simulates an interpreter in which some packages are not installed.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""

# Modules that an import of pccl must never load.
HEAVY = {"numpy", "torch", "logging", "asyncio", "multiprocessing", "concurrent", "matplotlib", "click", "psutil"}


def run(code: str, *, cwd: Path = ROOT, blocked: set[str] | None = None) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    program = (BLOCKER.format(blocked=blocked) if blocked else "") + code
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement adds to a fresh interpreter."""
    code = f"import sys, json; before = set(sys.modules)\n{statement}\n"
    return set(json.loads(run(code + "print(json.dumps(sorted(set(sys.modules) - before)))")))


# --- Importing --------------------------------------------------------------


def test_import_pccl_loads_nothing_else() -> None:
    """Goal: importing pccl is cheap, as actors start with it. Counts modules, because milliseconds are noisy."""
    assert loaded_by("import pccl") == {"pccl"}


def test_the_values_load_nothing_heavy() -> None:
    """Goal: using an enum does not pull in an array library."""
    loaded = {name.partition(".")[0] for name in loaded_by("from pccl import DataType, SharedState, cuda")}

    assert loaded & HEAVY == set()


def test_everything_public_loads_without_array_libraries() -> None:
    """Goal: not even the star import loads numpy or torch."""
    loaded = {name.partition(".")[0] for name in loaded_by("from pccl import *")}

    assert loaded & {"numpy", "torch"} == set()


BLOCKED = [{"numpy"}, {"torch"}, {"numpy", "torch"}]


@pytest.mark.parametrize("blocked", BLOCKED, ids=lambda blocked: "without-" + "-".join(sorted(blocked)))
def test_values_work_without_array_libraries(blocked: set[str]) -> None:
    """Goal: with only numpy, only torch, or neither, the values do everything that does not need the missing one."""
    code = """
import pccl
from pccl.client.tensors import TensorMemory
assert pccl.DataType.FLOAT.itemsize == 4
try:
    TensorMemory.of([1.0])
except ValueError:
    print("refused")
"""
    if "numpy" not in blocked:
        code += "import numpy; print(pccl.TensorInfo.from_numpy(numpy.zeros(3), 'w').nbytes)\n"
    if "torch" not in blocked:
        code += "import torch; print(pccl.TensorInfo.from_torch(torch.zeros(3), 'w').nbytes)\n"
    expected = {"numpy": "24", "torch": "12"}

    assert run(code, blocked=blocked).split() == [
        "refused",
        *(expected[name] for name in sorted(expected.keys() - blocked)),
    ]


@pytest.mark.parametrize("blocked", BLOCKED, ids=lambda blocked: "without-" + "-".join(sorted(blocked)))
def test_all_public_names_load_without_array_libraries(blocked: set[str]) -> None:
    """Goal: the star import of a program written for the reference works with any of these packages missing."""
    code = (
        "import pccl\nfrom pccl import *\nassert all(name in globals() for name in pccl.__all__)\nprint(Result.SUCCESS)"
    )

    assert run(code, blocked=blocked) == "Result.SUCCESS\n"


def test_public_names_hold_the_contract() -> None:
    """Goal: the names that reference programs use are listed, found by dir(), and others are an AttributeError."""
    import pccl

    contract = (
        "Communicator MasterNode ReduceOp Attribute SharedStateSyncStrategy DataType DistributionHint"
        " QuantizationAlgorithm ReduceOperandDescriptor QuantizationOptions ReduceDescriptor TensorInfo SharedState"
        " SharedStateSyncInfo ReduceInfo ReduceOpDescriptor AsyncReduceHandle PCCLError cuda"
    )

    assert set(contract.split()) <= set(pccl.__all__)
    assert set(pccl.__all__) | {"__version__"} <= set(dir(pccl))
    assert len(pccl.__all__) == len(set(pccl.__all__))
    assert pccl.__version__
    with pytest.raises(AttributeError, match="nonsense"):
        pccl.nonsense  # noqa: B018  The access itself is the test.


def test_cuda_answers_without_torch() -> None:
    """Goal: without torch the answer is False, not an exception."""
    assert run("import pccl; print(pccl.cuda.is_available())", blocked={"torch"}) == "False\n"


# --- Where it cannot run ----------------------------------------------------


@pytest.mark.parametrize(
    ("pretence", "named"),
    [
        ("sys.platform = 'darwin'", "this is darwin on"),
        ("sys.platform = 'win32'; del os.uname", "this is win32 on"),
        ("os.uname = lambda: types.SimpleNamespace(machine='riscv64')", "this is linux on"),
        ("sys.version_info = (3, 10, 14)", "this is linux on"),
    ],
    ids=["macos", "windows", "riscv", "old-python"],
)
def test_elsewhere_one_sentence_says_what_is_supported(pretence: str, named: str) -> None:
    """Goal: on an unsupported system the import fails at once and names the supported ones, not a missing symbol."""
    code = f"""
import os, sys, types
import platform
platform.machine = lambda: "some machine"
{pretence}
try:
    import pccl
except ImportError as error:
    print(error)
"""
    (sentence,) = run(code).splitlines()

    assert sentence.startswith("pccl supports Linux on x86-64 or aarch64 with Python 3.11 or newer, and ")
    assert named in sentence
    assert sentence.endswith("see https://github.com/pccl-project/pccl#readme")


def test_elsewhere_nothing_is_compiled() -> None:
    """Goal: an installation from the sdist on macOS fails with one sentence, not with pages about missing headers."""
    code = """
import sys, setuptools.command.build_ext, Cython.Build
sys.platform, sys.argv = "darwin", ["setup.py", "--quiet", "build_ext"]
try:
    exec(open("setup.py").read())
except SystemExit as end:
    print(end)
"""

    assert run(code) == (
        "error: pccl can be compiled on Linux only, and this is darwin; see https://github.com/pccl-project/pccl#readme\n"
    )


def test_no_header_has_the_name_of_one_of_the_system() -> None:
    """Goal: whatever folders a cross-compiler searches first, it finds ours. glibc has a values.h."""
    system = {path.name for path in Path("/usr/include").glob("*.h")}
    assert {path.name for path in ROOT.glob("pccl/**/*.h")} & system == set()


def test_a_source_tree_that_was_not_built_says_make_build(tmp_path: Path) -> None:
    """Goal: where compiled modules are missing, every import of one names the command that builds them."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "pccl", tmp_path / "pccl", ignore=ignored)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import pccl
assert pccl.__file__ == {str(tmp_path / "pccl" / "__init__.py")!r}, pccl.__file__
for statement in ("pccl.Communicator", "import pccl.master", "from pccl.actors.peer import peer_actor"):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""
    sentences = run(code, cwd=tmp_path).splitlines()

    assert len(sentences) == 3
    for sentence in sentences:
        assert re.fullmatch(
            rf"pccl\S+ is not compiled: run `make build` in {tmp_path}, or install pccl by pip", sentence
        )


def test_a_module_that_does_not_exist_is_just_not_found() -> None:
    """Goal: only modules that could be built get this explanation; for a wrong name Python's own error stays."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'pccl\.nonsense'"):
        importlib.import_module("pccl.nonsense")


# --- Pins -------------------------------------------------------------------


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    """Goal: each linter has one exact version, the same before a commit as in `make lint`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = set(project["dependency-groups"]["lint"])
    hooks = set(re.findall(r'"([\w-]+==[^"]+)"', (ROOT / ".pre-commit-config.yaml").read_text()))

    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pinned)
    assert hooks == pinned
    (commands,) = re.findall(r"^lint: build\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for pin in pinned:
        assert pin.partition("==")[0] in commands

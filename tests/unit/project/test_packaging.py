"""What users install: what importing costs, what it needs, and what is in the wheel.

Imports are tried in fresh interpreters, because this one has loaded everything.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests import ROOT

# Stands in for an interpreter in which some packages are not installed.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""

# What an import may never load behind the caller's back.
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
    """Goal: the package is free to import; actors start with it. Counted in modules, not in noisy milliseconds."""
    assert loaded_by("import pccl") == {"pccl"}


def test_the_values_load_nothing_heavy() -> None:
    """Goal: using an enum does not pull in an array library."""
    loaded = {name.partition(".")[0] for name in loaded_by("from pccl import DataType, SharedState, cuda")}

    assert loaded & HEAVY == set()


def test_everything_public_loads_without_array_libraries() -> None:
    """Goal: also the star import leaves numpy and torch to the caller."""
    loaded = {name.partition(".")[0] for name in loaded_by("from pccl import *")}

    assert loaded & {"numpy", "torch"} == set()


BLOCKED = [{"numpy"}, {"torch"}, {"numpy", "torch"}]


@pytest.mark.parametrize("blocked", BLOCKED, ids=lambda blocked: "without-" + "-".join(sorted(blocked)))
def test_values_work_without_array_libraries(blocked: set[str]) -> None:
    """Goal: with only numpy, only torch, or neither, the values do what does not need the missing one."""
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
    """Goal: the star import of a program written for the reference works in each of these worlds."""
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
    """Goal: where torch is missing the answer is no, not an exception."""
    assert run("import pccl; print(pccl.cuda.is_available())", blocked={"torch"}) == "False\n"


# --- The wheel --------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, with one more data file of a kind that may not exist yet."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "*.c", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    (tree / "pccl/_core/probe.cu").write_text("// Ships with the wheel.\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = folder.glob("pccl-*.whl")
    return built


def compiled() -> list[str]:
    """Every module that comes from a .pyx, as a path without its suffix."""
    return sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("pccl/**/*.pyx"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """The names of all files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


# The first of these compiles every extension from nothing.
@pytest.mark.timeout(600)
def test_the_wheel_holds_every_extension_and_its_stub(contents: set[str]) -> None:
    """Goal: each .pyx arrives compiled, with its stub; generated C stays at home."""
    suffix = EXTENSION_SUFFIXES[0]
    stems = compiled()

    assert {f"{stem}{suffix}" for stem in stems} <= contents
    assert {f"{stem}.pyi" for stem in stems} <= contents
    assert not [name for name in contents if name.endswith((".c", ".pyx", ".pyc"))]


@pytest.mark.timeout(600)
def test_the_wheel_holds_data_and_sources(contents: set[str]) -> None:
    """Goal: nothing that is needed at run time is only in the repository, CUDA sources included."""
    expected = {"pccl/py.typed", "pccl/_core/probe.cu"}
    for folder, package in {"pccl": "pccl", "cli": "pccl/cli", "stress": "pccl/stress"}.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".pyi", ".pxd", ".h", ".cu"}:
                expected.add(f"{package}/{path.relative_to(ROOT / folder)}")

    assert expected - contents == set()


@pytest.mark.timeout(600)
def test_the_wheel_claims_one_name_only(contents: set[str]) -> None:
    """Goal: no bare `cli`, `stress` or `tests` lands in anybody's site-packages."""
    tops = {name.partition("/")[0] for name in contents}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"pccl"}


@pytest.mark.timeout(600)
def test_the_wheel_installs_its_commands(wheel: Path, contents: set[str]) -> None:
    """Goal: both console scripts point where the contract says."""
    (name,) = (name for name in contents if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(name).decode().split("\n")

    assert {"pccl = pccl.cli:main", "pccl_master = pccl.master:main"} <= set(scripts)


@pytest.mark.timeout(600)
def test_the_wheel_imports_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Goal: what was built is complete: every extension and both folders import from the unpacked wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    modules = [stem.replace("/", ".") for stem in compiled()]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in ["pccl", "pccl.values", "pccl.cli", "pccl.stress", *{modules!r}]:
    found = importlib.import_module(name).__file__
    assert found.startswith({str(tmp_path)!r}), found
"""
    run(code, cwd=tmp_path)

"""What users install: an sdist that is complete, a wheel made of that sdist, and what both do in an empty environment.

Cython translates every module of the sdist. A module whose C code, headers and flags are those of this tree is not
compiled again but copied from it (`PCCL_BUILT_TREE`). Nothing is downloaded: the environments are empty but for the
packages that pyproject.toml names, copied from the one that runs the tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The first test of each run waits for the wheel, on a busy machine for minutes if all has to be compiled.
pytestmark = pytest.mark.timeout(600)

# Not yet in any folder, but of a kind that a later change may add.
LATER = "pccl/_core/kernels/probe.cu"
# What a used tree holds beside its sources.
LITTER = ("pccl/left.so", "pccl/_core/left.c", "pccl/_core/left.html", "tests/__pycache__/left.pyc", "cli/left.pyo")


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command that knows nothing of the interpreter we are in, and return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=inherited | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip(python: Path, *arguments: object, cwd: Path, **environment: str) -> None:
    """Run pip for another interpreter, without an index."""
    options = ("--quiet", "--disable-pip-version-check", "--python", python)
    command, *rest = arguments
    # Other tests that run at the same time measure time, so the compiler gets a low priority.
    run("nice", sys.executable, "-m", "pip", *options, command, "--no-index", *rest, cwd=cwd, **environment)


def empty_environment(folder: Path, requirements: list[str]) -> Path:
    """The interpreter of a new environment that holds these requirements and nothing else, not even pip."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement)[0]
        for file in distribution(name).files or []:
            # Commands are outside of site-packages, and are not needed.
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), target)
    return folder / "bin" / "python"


# --- What is built ----------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything below is built."""
    return tmp_path_factory.mktemp("distribution")


@pytest.fixture(scope="module")
def tree(folder: Path) -> Path:
    """Return a copy of the repository without generated files, like a fresh clone."""
    copy = folder / "tree"
    patterns = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", *patterns))
    if (ROOT / ".git").exists():  # at the top level only tracked files, because people keep notes there
        kept = {name.partition("/")[0] for name in run("git", "ls-files", cwd=ROOT).splitlines()}
        for path in copy.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copy / LATER).write_text("// Ships with the wheel.\n")
    return copy


@pytest.fixture(scope="module")
def builder(folder: Path) -> Path:
    """An interpreter with what [build-system] requires, and nothing else."""
    return empty_environment(folder / "builder", PROJECT["build-system"]["requires"])


@pytest.fixture(scope="module")
def sources(tree: Path) -> set[str]:
    """Every file of the repository."""
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def sdist(folder: Path, tree: Path, builder: Path, sources: set[str]) -> Path:
    """Return the sdist of a used tree: its sources were listed before, and generated files lie in it."""
    assert LATER in sources
    for name in LITTER:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(b"")
    run(builder, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})", cwd=tree)
    (built,) = folder.glob("pccl-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(folder: Path, builder: Path, sdist: Path) -> Path:
    """Return the wheel that is built from the sdist with only the build requirements installed."""
    options = ("--no-build-isolation", "--check-build-dependencies", "--no-deps", "--wheel-dir", folder)
    pip(builder, "wheel", *options, sdist, cwd=folder, PCCL_BUILT_TREE=str(ROOT))
    (built,) = folder.glob("pccl-*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """The names of all files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


# --- The sdist --------------------------------------------------------------


def test_the_sdist_holds_the_whole_repository_and_no_litter(sdist: Path, sources: set[str]) -> None:
    """Goal: the sdist has all files of a clone, and no file that a build has left."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    written = {name for name in names if name.partition("/")[0] in {"PKG-INFO", "setup.cfg", "pccl.egg-info"}}

    assert sources - names == set()
    assert names - sources - written == set()


@pytest.mark.parametrize("count", [1, None], ids=["one", "all"])
def test_an_incomplete_tree_is_not_built(tree: Path, builder: Path, tmp_path: Path, count: int | None) -> None:
    """Goal: a tree without one or all of its extensions gives a clear error, not a package that cannot run."""
    broken = tmp_path / "tree"
    missing = sorted(path.name for path in tree.glob("pccl/**/*.pyx"))[:count]
    shutil.copytree(tree, broken, ignore=shutil.ignore_patterns(*missing))
    command = [builder, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')"]
    done = subprocess.run(command, cwd=broken, capture_output=True, text=True, check=False)  # type: ignore[arg-type]

    assert done.returncode != 0
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.search(rf"pccl/.*{missing[0] if count else 'pyx'}.* is missing", sentence)
    assert "pip install pccl" in sentence


# --- The wheel --------------------------------------------------------------


def test_the_wheel_holds_every_extension_and_every_stub(contents: set[str]) -> None:
    """Goal: the wheel has each .pyx compiled and each stub, and no generated C."""
    stems = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("pccl/**/*.pyx"))

    assert {f"{stem}{EXTENSION_SUFFIXES[0]}" for stem in stems} <= contents
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("pccl/**/*.pyi")} <= contents
    assert not [name for name in contents if name.endswith((".c", ".pyx", ".pyc"))]


def test_the_wheel_holds_data_and_sources(contents: set[str]) -> None:
    """Goal: nothing that is needed at run time is only in the repository, CUDA sources included."""
    expected = {"pccl/py.typed", LATER}
    for folder, package in {"pccl": "pccl", "cli": "pccl/cli", "stress": "pccl/stress"}.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".pyi", ".pxd", ".h", ".cu"}:
                expected.add(f"{package}/{path.relative_to(ROOT / folder)}")

    assert expected - contents == set()


def test_the_wheel_claims_one_name_only(contents: set[str]) -> None:
    """Goal: the wheel installs no top-level `cli`, `stress` or `tests` package."""
    tops = {name.partition("/")[0] for name in contents}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"pccl"}


def test_the_wheel_installs_its_commands(wheel: Path, contents: set[str]) -> None:
    """Goal: both console scripts point where the contract says."""
    (name,) = (name for name in contents if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(name).decode().split("\n")

    assert {"pccl = pccl.cli:main", "pccl_master = pccl.master:main"} <= set(scripts)


# --- Installed --------------------------------------------------------------


def test_an_installed_wheel_imports_and_reduces(folder: Path, wheel: Path, tmp_path: Path) -> None:
    """Goal: in an empty environment every module imports, two peers reduce, and the commands start."""
    # pip refuses the wheel if a dependency that it declares is absent or too old.
    python = empty_environment(folder / "user", [*PROJECT["project"]["dependencies"], "numpy"])
    pip(python, "install", wheel, cwd=tmp_path)
    program = shutil.copy(ROOT / "tests/process/installed_package.py", tmp_path)

    assert "two peers reduced" in run(python, "-I", program, cwd=tmp_path)
    for command in ("pccl", "pccl_master"):
        assert "--help" in run(python.with_name(command), "--help", cwd=tmp_path)

"""The package for aarch64: a copy of the source tree in build/arm64/tree, installed there as an editable package.

The emulated Python runs the same command as `make build`, so names, flags and folders are those of the target; the
compiler that it calls, aarch64-linux-gnu-gcc, is a native program. C sources that Cython wrote for the host are copied,
because they are the same for every architecture and emulated Cython is slow. The source tree is only read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests import ROOT

from .emulator import emulated, environment
from .places import PYTHON, TREE, WORK, Stamp, fail, run_logged, say

NATIVE = {".pyx", ".pxd", ".h"}
DESCRIPTIONS = {"setup.py", "pyproject.toml"}
# Results of builds and tests in the copy that a second run uses again.
KEPT = {"build", "__pycache__", ".hypothesis", "pccl.egg-info"}


def copy_tree() -> None:
    """Make the copy equal to the source tree: copy changed files with their times, remove files that are gone."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        fail(f"git cannot list the sources: {listed.stderr.strip()}")
    wanted = {Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for path in sorted(_files(TREE) - wanted):
        if not (path.suffix == ".so" and path.with_name(path.name.split(".")[0] + ".pyx") in wanted):
            (TREE / path).unlink()
    written = {Path("build", "cython") / path for path in _files(ROOT / "build" / "cython")}
    for path in sorted(wanted | written):
        _copy(ROOT / path, TREE / path)


def build_package() -> None:
    """Compile what has changed, and install the copy as an editable package."""
    sources = sorted(path for path in _files(TREE) if path.suffix in NATIVE or path.name in DESCRIPTIONS)
    ingredients = [part for path in sources for part in (str(path), (TREE / path).read_bytes())]
    stamp = Stamp("built", str(TREE), (WORK / ".wheels").read_bytes(), *ingredients)
    if stamp.is_current:
        say("the extensions are up to date")
        return
    say("compiling the extensions for aarch64 (minutes, the first time)")
    begin = time.monotonic()
    install = ("-m", "pip", "install", "--verbose", "--no-build-isolation", "--no-deps", "--editable", ".")
    run_logged(
        "build",
        emulated(PYTHON, *install),
        cwd=TREE,
        env=environment(),
    )
    _check_extensions()
    stamp.set()
    say(f"compiled in {time.monotonic() - begin:.0f} s")


def _check_extensions() -> None:
    """Check that each .pyx has only aarch64 libraries; one of the host would never be imported and hide an error."""
    for source in sorted((TREE / "pccl").rglob("*.pyx")):
        libraries = list(source.parent.glob(f"{source.stem}.*.so"))
        if not libraries:
            fail(f"{source.relative_to(TREE)} was not compiled")
        if not all("aarch64" in library.name for library in libraries):
            fail(f"{source.relative_to(TREE)} was compiled for another machine: {libraries}")


def _files(folder: Path) -> set[Path]:
    """Return the relative paths of all files below a folder, without the folders in KEPT."""
    found = set()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in KEPT]
        found |= {Path(parent, name).relative_to(folder) for name in names}
    return found


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its times, because build tools compare times to find what is newer."""
    if target.exists():
        old, new = target.stat(), source.stat()
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)

"""Find the Cython extensions; everything else about the build is in pyproject.toml.

This file exists because there are many extensions and all are made the same way: every ``pccl/X.pyx``, also in the
folders below, is the module ``pccl.X``. A list in pyproject.toml would have to be updated by hand.
"""

import filecmp
import os
import re
import shutil
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# -O2: the code that moves messages runs with cold caches, so small code is fast code.
# -g0: without debug information, which is of no use in generated C, the build takes two thirds of the time and the
# package a sixth of the space.
# -ffp-contract=off: results must not depend on the instruction set, so no operations are fused.
# -fno-trapping-math: floating-point exceptions are not used, so vector code may compute both sides of a choice.
# The two warnings are off because Cython keeps texts of assertions that only a debug build has, and counts with signed
# numbers.
WARNINGS = ["-Wno-unused-const-variable", "-Wno-sign-compare"]
COMPILE_ARGS = ["-O2", "-g0", "-ffp-contract=off", "-fno-trapping-math", *WARNINGS]

# Flags of the user come last and override the others. `PCCL_CFLAGS=-O0` compiles in a quarter of the time.
EXTRA_ARGS = os.environ.get("PCCL_CFLAGS", "").split()

# `make debug` compiles the code that works on raw memory with assertions (pccl/_core/system/check.pxd); `make sanitize`
# adds the sanitizers for accesses out of bounds and undefined behaviour. Both compile copies of the tree.
CHECKED_ROOMS = {"dataplane", "io", "kernels", "memory", "protocol", "system"}
CHECKED_ARGS = ["-DPCCL_DEBUG=1"] if os.environ.get("PCCL_DEBUG") == "1" else []
SANITIZERS: list[str] = []
if os.environ.get("PCCL_SANITIZE") == "1":
    SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    CHECKED_ARGS += [*SANITIZERS, "-O1", "-g1", "-fno-omit-frame-pointer"]

# `make coverage` counts the lines that tests execute: compiled code reports each line to Python's tracer, also without
# the GIL. The plugin of coverage.py reads the generated C, and looks for it beside the .pyx.
COVERAGE = os.environ.get("PCCL_COVERAGE") == "1"
TRACE_ARGS = ["-DCYTHON_TRACE=1", "-DCYTHON_TRACE_NOGIL=1", "-O0"] if COVERAGE else []
TRANSLATION_DIR = None if COVERAGE else "build/cython"

# These modules have loops over numbers, which need the vectoriser of -O3.
NUMERIC = {"arithmetic", "digest", "quantization", "exact_ring", "local_search", "solver", "path_builder"}

KERNELS = Path("pccl/_core/kernels")

# The only header of the kernels that their .pxd files show to modules of other folders.
SHOWN_HEADER = KERNELS / "kernel_values.h"

# Plain C semantics: the inner loops check their bounds once, outside.
DIRECTIVES = {"language_level": 3, "embedsignature": True, "linetrace": COVERAGE}

# Matches what a .pxd declares and its .pyx defines: a class, or a function without a body.
DECLARES = re.compile(r"^(?:cdef class |cp?def .*\)[^:\n]*$)", re.MULTILINE)

# Another tree in which pccl is built in place: a module is copied from there if its C code, in which Cython notes the
# flags, and its headers are the same. The test of the wheel uses it, so that nothing is compiled twice.
BUILT_TREE = os.environ.get("PCCL_BUILT_TREE")

JOBS = os.cpu_count() or 1

HOME_PAGE = "https://github.com/pccl-project/pccl"


def headers_of(path: Path) -> list[str]:
    """Return the C headers that a module may include: those of its own folder, and `SHOWN_HEADER`."""
    # cythonize() follows cimports from .pxd to .pxd, but does not notice a changed header.
    return sorted(map(str, {*path.parent.glob("*.h"), SHOWN_HEADER}))


def compile_args(path: Path) -> list[str]:
    """Return the compiler flags of a module; later flags override earlier ones."""
    numeric = ["-O3"] if path.stem in NUMERIC else []
    checked = CHECKED_ARGS if path.parent.name in CHECKED_ROOMS else []
    return [*COMPILE_ARGS, *numeric, *checked, *TRACE_ARGS, *EXTRA_ARGS]


def extensions() -> list[Extension]:
    """Return one extension for each .pyx file, in a fixed order."""
    return [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path)],
            depends=headers_of(path),
            include_dirs=[str(KERNELS)],
            extra_link_args=SANITIZERS if path.parent.name in CHECKED_ROOMS else [],
            extra_compile_args=compile_args(path),
        )
        for path in sorted(Path("pccl").rglob("*.pyx"))
    ]


def needs_source(declared: Path) -> bool:
    """Return whether a .pyi or .pxd needs a .pyx or .py beside it; some .pxd files hold all their code."""
    return declared.suffix == ".pyi" or DECLARES.search(declared.read_text()) is not None


def complain_if_incomplete() -> None:
    """End the build if sources are missing: otherwise it would install a package that cannot run."""
    declared = [*Path("pccl").rglob("*.pyi"), *Path("pccl").rglob("*.pxd")]
    present = {path.with_suffix("") for suffix in ("pyx", "py") for path in Path("pccl").rglob(f"*.{suffix}")}
    absent = [path for path in declared if path.with_suffix("") not in present and needs_source(path)]
    missing = sorted({str(path.with_suffix(".pyx")) for path in absent})
    if missing or not any(Path("pccl").rglob("*.pyx")):
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "") if missing else "every .pyx below pccl/"
        sys.exit(
            f"error: this source tree of pccl is incomplete, {named} is missing, and without it pccl cannot run: "
            f"install a release (`pip install pccl`), or clone {HOME_PAGE} and `pip install .` there"
        )


def remove_orphans() -> None:
    """Remove compiled modules whose source is gone: they would hide a Python module that has taken their name."""
    for built in Path("pccl").rglob("*.so"):
        if not built.with_name(built.name.partition(".")[0] + ".pyx").exists():
            built.unlink()


class BuildExtensions(build_ext):
    """Translate to C only when something is compiled: metadata and sdists need no C."""

    def run(self) -> None:
        """Translate all extensions, then compile them."""
        if sys.platform != "linux":
            sys.exit(f"error: pccl can be compiled on Linux only, and this is {sys.platform}; see {HOME_PAGE}#readme")
        if self.editable_mode or self.inplace:
            remove_orphans()
        translated = cythonize(
            self.extensions,
            nthreads=JOBS,
            compiler_directives=DIRECTIVES,
            build_dir=TRANSLATION_DIR,
            quiet=not self.distribution.verbose,
        )
        for extension, translation in zip(self.extensions, translated, strict=True):
            extension.sources, extension.depends = translation.sources, [*translation.depends, "setup.py"]
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension, or copy the module that was built of the same code."""
        built = self.module_built_before(ext)
        if built is None:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)

    def module_built_before(self, ext: Extension) -> Path | None:
        """Return a compiled module of this code: of this tree for an editable installation, or of `BUILT_TREE`."""
        # An editable installation builds in a temporary folder and copies into the tree. setuptools looks for the last
        # build in that folder, finds nothing, and would compile everything each time.
        inputs = [*ext.sources, *ext.depends]
        if self.editable_mode:
            tree = Path()
        elif BUILT_TREE:
            tree = Path(BUILT_TREE)
            if not all((tree / name).exists() and filecmp.cmp(name, tree / name, shallow=False) for name in inputs):
                return None
        else:
            return None
        built = tree / self.get_ext_filename(ext.name)
        return None if newer_group([tree / name for name in inputs], built, "newer") else built


complain_if_incomplete()
setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions},
    options={"build_ext": {"parallel": JOBS}},
)

"""Finds the Cython extensions; everything else about the build is in pyproject.toml.

This file exists because the extensions are many and each is made the same way:
every ``pccl/X.pyx`` is the module ``pccl.X``, and so in the folders below.  A list in
pyproject.toml would have to be kept in step by hand.
"""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

# What moves messages runs with cold caches, so small code is quick code; without debug information, which nobody reads
# in generated C, the build takes two thirds of the time and the package a sixth of the space.
# Results must not depend on the instruction set, so nothing is fused; and nobody reads floating-point
# exceptions, so both sides of a choice may be computed side by side.
COMPILE_ARGS = ["-O2", "-g0", "-ffp-contract=off", "-fno-trapping-math"]

# -O3 turns on the vectoriser, which loops over numbers live from.
NUMERIC = {"arithmetic", "digest", "quantization", "exact_ring", "local_search", "solver", "path_builder"}

KERNELS = Path("pccl/_core/kernels")

# Plain C semantics: the inner loops check their bounds once, outside.
DIRECTIVES = {"language_level": 3, "embedsignature": True}


def headers_of(path: Path) -> list[str]:
    """The C headers that a module may include: those of its own room, and those of the kernels."""
    # cythonize() follows cimports from .pxd to .pxd, but does not notice a changed header.
    return sorted(str(header) for room in {path.parent, KERNELS} for header in room.glob("*.h"))


def extensions() -> list[Extension]:
    """One extension for each .pyx file, in a fixed order."""
    return [
        Extension(
            ".".join(path.with_suffix("").parts),
            [str(path)],
            depends=headers_of(path),
            include_dirs=[str(KERNELS)],
            extra_compile_args=[*COMPILE_ARGS, "-O3"] if path.stem in NUMERIC else COMPILE_ARGS,
        )
        for path in sorted(Path("pccl").rglob("*.pyx"))
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        nthreads=2,
        compiler_directives=DIRECTIVES,
        build_dir="build/cython",
    ),
    options={"build_ext": {"parallel": 2}},
)

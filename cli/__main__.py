"""`python -m pccl.cli` is the same as `pccl`, for systems where the script is not on the path."""

from . import main

main(prog_name="pccl")

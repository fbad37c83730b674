"""`python -m pccl.cli` is `pccl`, for where the script is not on the path."""

from . import main

main(prog_name="pccl")

"""The command line, installed as pccl.cli: flags in, one call, exit code out; no logic of the library."""

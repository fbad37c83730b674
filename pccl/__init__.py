"""The public names of pccl, each loaded at its first use.

This file imports no other module of pccl, because the peer actor imports this file too and must start in tens of
milliseconds. The module of a name is imported when a program first uses the name.
"""

# The interpreter has always loaded these two modules before.
import os as _os
import sys as _sys

# pip checks the version of Python too, but an import from a source tree does not use pip.
if _sys.platform != "linux" or _os.uname().machine not in ("x86_64", "aarch64") or _sys.version_info < (3, 11):
    from platform import machine, python_version

    raise ImportError(
        "pccl supports Linux on x86-64 or aarch64 with Python 3.11 or newer, and this is "
        f"{_sys.platform} on {machine()} with Python {python_version()}; see https://github.com/pccl-project/pccl#readme"
    )

# Type checkers take this name as true; its import from typing would take longer than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from pccl.client.handle import AsyncReduceHandle
    from pccl.client.reduce_descriptor import ReduceOpDescriptor
    from pccl.memory.arrays import empty as empty
    from pccl.memory.arrays import zeros as zeros

    from . import cuda
    from . import torch as torch
    from .communicator import Communicator
    from .errors import (
        KickedError,
        MasterConnectionError,
        MasterLostError,
        PCCLError,
        PeerLostError,
        RunFinishedError,
        TooFewPeersError,
        UsageError,
    )
    from .master import MasterNode
    from .options import Options
    from .shared_state import SharedState, TensorInfo
    from .values import (
        Attribute,
        DataType,
        DeviceType,
        DistributionHint,
        QuantizationAlgorithm,
        QuantizationOptions,
        ReduceDescriptor,
        ReduceInfo,
        ReduceOp,
        ReduceOperandDescriptor,
        Result,
        SharedStateSyncInfo,
        SharedStateSyncStrategy,
    )

    __version__: str

__all__ = [
    # Taking part in a run.
    "Communicator",
    "AsyncReduceHandle",
    "MasterNode",
    "Options",
    # Reduces.
    "ReduceOp",
    "DataType",
    "DistributionHint",
    "QuantizationAlgorithm",
    "ReduceOperandDescriptor",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceOpDescriptor",
    "ReduceInfo",
    # Shared state.
    "TensorInfo",
    "SharedState",
    "SharedStateSyncStrategy",
    "SharedStateSyncInfo",
    # Numbers about the run, and devices.
    "Attribute",
    "DeviceType",
    "cuda",
    # Results and errors.
    "Result",
    "PCCLError",
    "TooFewPeersError",
    "PeerLostError",
    "KickedError",
    "MasterLostError",
    "MasterConnectionError",
    "RunFinishedError",
    "UsageError",
]

# Available as `pccl.empty` and so on, but not by `from pccl import *`: a program that does this has a `torch` of its
# own, and often a `zeros`.
_UNSTARRED = ("empty", "zeros", "torch")

_HOMES = {
    "memory.arrays": ("empty", "zeros"),
    "communicator": ("Communicator",),
    "errors": (
        "KickedError",
        "MasterConnectionError",
        "MasterLostError",
        "PCCLError",
        "PeerLostError",
        "RunFinishedError",
        "TooFewPeersError",
        "UsageError",
    ),
    "client.handle": ("AsyncReduceHandle",),
    "master": ("MasterNode",),
    "options": ("Options",),
    "shared_state": ("SharedState", "TensorInfo"),
    "client.reduce_descriptor": ("ReduceOpDescriptor",),
    "values": (
        "Attribute",
        "DataType",
        "DeviceType",
        "DistributionHint",
        "QuantizationAlgorithm",
        "QuantizationOptions",
        "ReduceDescriptor",
        "ReduceInfo",
        "ReduceOp",
        "ReduceOperandDescriptor",
        "Result",
        "SharedStateSyncInfo",
        "SharedStateSyncStrategy",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("pccl")
    elif name in ("cuda", "torch"):
        from importlib import import_module

        return import_module(f".{name}", __name__)
    elif name in _HOME_OF:
        from importlib import import_module

        value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The next lookup finds the name in the module and does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_UNSTARRED, "__version__"})


class _Unbuilt:
    """An importer that finds no module; it explains the error for a module of pccl that was never compiled."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004  Python's signature.
        """Raise ImportError if the module has a source here and is not compiled; else Python reports its absence."""
        package, _, rest = name.partition(".")
        if package == "pccl" and _os.path.exists(_os.path.join(__path__[0], *rest.split(".")) + ".pyx"):
            tree = _os.path.dirname(__path__[0])
            raise ImportError(f"{name} is not compiled: run `make build` in {tree}, or install pccl by pip", name=name)


# The last importer of the list: Python asks it only about modules that no other importer has found.
_sys.meta_path.append(_Unbuilt)

"""The public names of pccl, each loaded when it is first asked for.

This file imports nothing of its own accord, because the peer actor imports it
too, and an actor must start in tens of milliseconds.  What a name needs is
paid for by whoever uses that name.
"""

# Every interpreter has loaded these two before it comes here.
import os as _os
import sys as _sys

# pip checks the version of Python too, but anybody can import from a source tree.
if _sys.platform != "linux" or _os.uname().machine not in ("x86_64", "aarch64") or _sys.version_info < (3, 11):
    from platform import machine, python_version

    raise ImportError(
        "pccl supports Linux on x86-64 or aarch64 with Python 3.11 or newer, and this is "
        f"{_sys.platform} on {machine()} with Python {python_version()}; see https://github.com/pccl-project/pccl#readme"
    )

# Type checkers take this name to be true; importing it from typing would cost
# more than all the rest of this file.
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
    # OpRunner.
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
    # What the run looks like, and what the machine can do.
    "Attribute",
    "DeviceType",
    "cuda",
    # What can go wrong.
    "Result",
    "PCCLError",
    "TooFewPeersError",
    "PeerLostError",
    "KickedError",
    "MasterLostError",
    "MasterConnectionError",
    "UsageError",
]

# Reached as `pccl.empty` and so on, but not by the star: programs that say `from pccl import *` have a `torch` of
# their own, and many a `zeros`.
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
    # The next lookup finds it in the module and does not come here again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_UNSTARRED, "__version__"})


class _Unbuilt:
    """Finds no module. Says what to do about one of ours that has a source but was never compiled."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:  # noqa: ARG004  Python's signature.
        """Raise ImportError if the module lies here uncompiled; else leave it to Python to say that there is none."""
        package, _, rest = name.partition(".")
        if package == "pccl" and _os.path.exists(_os.path.join(__path__[0], *rest.split(".")) + ".pyx"):
            tree = _os.path.dirname(__path__[0])
            raise ImportError(f"{name} is not compiled: run `make build` in {tree}, or install pccl by pip", name=name)


# Asked after everybody else, that is, only about modules that do not exist.
_sys.meta_path.append(_Unbuilt)

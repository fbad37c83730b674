"""Print `docs/reference.md` from the docstrings and signatures of the public names.

    python docs/make_reference.py > docs/reference.md

A test compares the page with what this prints, so it fails if a changed signature or docstring is not in the page. This
script fails for a public name without a docstring.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from typing import Any

import pccl
import pccl.torch
from pccl.options import BOTH, MASTER, PEER, READ_BY, VARIABLES

HEAD = """# API reference

Printed from the docstrings by `docs/make_reference.py`. [The programming model](programming-model.md) explains how the
parts work together; [troubleshooting](troubleshooting.md) explains errors.

"""

# Sections in the order in which a new user needs them; `render` checks that they are complete.
SECTIONS = {
    "Membership": ["Communicator", "AsyncReduceHandle", "MasterNode", "Options"],
    "Tensors in shared memory": ["empty", "zeros", *(f"torch.{name}" for name in pccl.torch.__all__)],
    "Reduces": [
        *("ReduceOp", "ReduceInfo", "DataType", "DistributionHint", "QuantizationAlgorithm", "QuantizationOptions"),
        *("ReduceOperandDescriptor", "ReduceDescriptor", "ReduceOpDescriptor"),
    ],
    "Shared state": ["SharedState", "TensorInfo", "SharedStateSyncStrategy", "SharedStateSyncInfo"],
    "The run and the machine": ["Attribute", "DeviceType", "cuda"],
    "Errors": [
        *("PCCLError", "TooFewPeersError", "PeerLostError", "KickedError", "MasterLostError"),
        *("MasterConnectionError", "RunFinishedError", "UsageError", "Result"),
    ],
}

READERS = {MASTER: "master", PEER: "peer", BOTH: "master, peer"}

WHO_READS = """The column *read by* says where a field has an effect. Set the fields of the master where the master
runs: peers get them when they register, and follow them. A peer where such a field has another value than the default
and than the master's logs a warning. Fields that both read should be the same everywhere.

"""
OTHER_VARIABLES = """The other environment variables that begin with `PCCL_`. Any name that is in neither table is
refused, so that a misspelt one is noticed.

"""

# Classes whose constructor is not shown: the library creates handles, and options have a table.
MADE_OTHERWISE = (pccl.AsyncReduceHandle, pccl.Options)


def render() -> str:
    """Return the whole page."""
    listed = [name for names in SECTIONS.values() for name in names]
    missing = set(pccl.__all__) - set(listed)
    assert not missing, f"public names without a section: {sorted(missing)}"
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n\n")
        parts += [entry(name) for name in names]
    return "".join(parts).rstrip() + "\n"


def entry(name: str) -> str:
    """Return the entry of one public name."""
    thing: Any = pccl
    for part in name.split("."):
        thing = getattr(thing, part)
    if inspect.ismodule(thing):
        return "".join(_function(f"pccl.{name}.{function}", getattr(thing, function)) for function in _names(thing))
    if not inspect.isclass(thing):
        return _function(f"pccl.{name}", thing)
    if issubclass(thing, enum.Enum):
        return _enum(name, thing)
    return _class(name, thing)


def _names(module: Any) -> list[str]:
    own = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in own if function.__module__ == module.__name__ and not name.startswith("_")]


def _function(name: str, function: Any) -> str:
    return f"### `{name}`\n\n`{name.rpartition('.')[2]}{_signature(function)}`\n\n{_text(function, name)}\n\n"


def _enum(name: str, members: type[enum.Enum]) -> str:
    rows = "".join(f"| `{member}` | {value.value} |\n" for member, value in members.__members__.items())
    methods = "".join(_members(members))
    return f"### `pccl.{name}`\n\n{_text(members, name)}\n\n| member | value |\n|---|---|\n{rows}\n{methods}"


def _class(name: str, cls: type) -> str:
    base = cls.__bases__[0]
    parent = f"A `{base.__name__}`. " if issubclass(base, pccl.PCCLError) else ""
    made = "" if cls in MADE_OTHERWISE or parent else f"`{name}{_signature(cls)}`\n\n"
    head = f"### `pccl.{name}`\n\n{made}{parent}{_text(cls, name)}\n\n"
    return head + _fields(cls) + "".join(_members(cls))


def _fields(cls: type) -> str:
    """Return the table of the fields of `Options`, with who reads them and why; an empty text for other classes."""
    if cls is not pccl.Options:
        return ""
    rows = re.findall(r"^    (\w+): \w+ = (\S+)  # (.*)$", inspect.getsource(cls), re.MULTILINE)
    lines = "".join(
        f"| `{name}` | `{value}` | `PCCL_{name.upper()}` | {READERS[READ_BY[name]]} | {why} |\n"
        for name, value, why in rows
    )
    others = "".join(f"| `{name}` | {what} |\n" for name, what in VARIABLES.items())
    return (
        f"{WHO_READS}| field | default | environment | read by | why |\n|---|---|---|---|---|\n{lines}\n"
        f"{OTHER_VARIABLES}| environment | what it does |\n|---|---|\n{others}\n"
    )


def _members(cls: type) -> list[str]:
    """Return the public methods and properties that the class itself defines."""
    found = []
    for name, member in vars(cls).items():
        if name.startswith("_") or (isinstance(member, enum.Enum)):
            continue
        if isinstance(member, property):
            found.append(f"- **`.{name}`**: {_text(member, f'{cls.__name__}.{name}')}\n")
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            function = getattr(cls, name)
            text = _text(function, f"{cls.__name__}.{name}").replace("\n\n", "\n\n  ")
            found.append(f"- **`.{name}{_signature(function)}`**: {text}\n")
    return [*found, "\n"] if found else []


def _signature(function: Any) -> str:
    """Return the signature as a caller sees it: without self, and with short names of types."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ""
    shown = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=shown))
    # Types are strings and come in quotes; enum members come with their long repr.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)
    return re.sub(r"\b(?:pccl\.\w+|typing|collections\.abc)\.(?=\w)", "", text).replace(" -> None", "")


def _text(thing: Any, name: str) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    return re.sub(r"(?<=[^\n])\n(?=[^\n|])", " ", text)


if __name__ == "__main__":
    sys.stdout.write(render())

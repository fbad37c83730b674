"""Prints `docs/architecture.md`: the prose from here, the diagrams from the transition tables and the imports.

    python docs/make_architecture.py > docs/architecture.md

A test compares the page with what this prints. The tables say which event is understood in which phase and by which
handler; where a handler leads is read from its source: the phases that it, or a method that it calls, sets.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pccl._core.master import master_state
from pccl._core.peer import peer_state
from pccl._core.protocol.events import Tick

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]
MACHINES = ("peer_state", "member")  # the sources of the peer's machine
# A method lasts until the next one, or until something that is not indented.
METHOD = re.compile(
    r"^    (?:def|cdef|cpdef) (?:\w+ )*(\w+)\(.*?(?=^    (?:def|cdef|cpdef) |^\S|\Z)", re.MULTILINE | re.DOTALL
)

HEAD = """# Architecture, for contributors

Printed by `docs/make_architecture.py`, which draws the diagrams from the code.

Three ideas carry the design. **Pure machines decide**: events in, actions out, time as an argument. **Thin actors do**:
each is one process, one loop, one machine. **Workers move bytes**: processes that know nothing but their blocks and can
be killed at any instruction.

```text
 training process          peer actor (1 process)                 master (1 process)
 Communicator ──commands──▶ PeerActor ─ PeerState (pure) ◀──TCP──▶ MasterActor ─ MasterState (pure)
      ▲  completion slots   │ forks, passes sockets
      └──── shared memory ──┤
                            ▼
   lane 0: receiver process ─┐ blocks that are ready    lane 1: …
           sender process  ◀─┘ in shared memory
             │ ▲
     to next ▼ │ from previous peer of the ring (one TCP connection per lane and direction)
```

- The training process runs no thread of ours. A call posts a command and waits on a slot in shared memory.
- The peer actor is a fresh process, not a fork of the training process, because that may hold CUDA and threads. It
  imports neither numpy nor torch. It forks the workers: a sender and a receiver for each lane, others for state
  transfers.
- Nothing outlives the training process: memory is anonymous and passed by descriptor, and every process ends with its
  parent.

## Where things are

| folder | what is in it |
|---|---|
| `pccl/` | the public API: `Communicator`, `MasterNode`, `Options`, errors, values |
| `pccl/_core/` | the machines; messages and wire; plan, board, lanes and kernels of the ring; digests |
| `pccl/actors/` | processes and sockets: loop, connections, the two actors, workers |
| `pccl/memory/` | shared memory: segments, arena, completion slots |
| `pccl/torch/` | what needs torch: tensors in shared memory, staging and digests of CUDA tensors |
| `cli/`, `stress/` | the commands; churn for hours |
| `tests/` | unit, simulation, process, fuzz: see `CONTRIBUTING.md` |
| `benchmarks/`, `examples/`, `docs/` | what it costs, how it is used, what you read |

Imports point one way, and a test holds them to it. Modules per layer, and who imports whom:

"""

PEER = """
## The life of a peer

The peer's machine is in one of these phases. An arrow is an event that may end a phase: a message of the master, for
instance, does so if it breaks the protocol. A deadline that is over acts like the loss of what was waited for.
Everything else that a phase understands leaves it where it is, and is listed in [the protocol](protocol.md).

"""

MASTER = """
## What the master hears

It keeps a phase for every peer. From *registered* to *accepted* no message leads: a peer is accepted when a topology
round closes, which takes the votes of all accepted peers and the report of all changed rings.

"""

TAIL = """
## One all-reduce

```mermaid
sequenceDiagram
    participant T as training process
    participant P as peer actor
    participant M as master
    participant L as lanes
    T->>P: CallReduce (memory by segment and offset)
    P->>M: Initiate (tag, count, dtype, operation)
    Note over M: all members initiated, and agree on what
    M->>P: Commence (sequence, epoch)
    P->>L: launch: own blocks become ready
    Note over L: blocks go round the ring, 2 (N - 1) hops each
    L->>P: ReduceEnded (all blocks here, none to send)
    P->>M: Finished (ok)
    Note over M: everybody finished, nobody was lost: success
    M->>P: ReduceDone
    P->>T: completion slot
```

Each of these processes wakes up with cold caches, so a small reduce costs what code and objects lie on its way, not how
often they are used. That way is compiled, typed and short, and apart from everything rare: `reduce_request.pyx`,
`pending_reduces.pyx` and `call_slots.pyx` in the training process, `peer_fastpath.pyx` in the peer actor,
`master_fastpath.pyx` and `group_dispatch.pyx` in the master. Records are made in C, by one function for all of them
(`records.pyx`).

If a member is lost before the last `Finished`, the master says `AbortReduce` to the others instead, orders a new
ring, and the call fails on all of them once that ring is wired. The tensor in place gets its old bytes from a backup
that was written in the same pass that added.

Between hosts a block travels as a frame over TCP, with a checksum. Between peers of one host only its header does: the
receiver has mapped the sender's memory, for reading, and adds the block from where it lies. It gives the block back
when it is done, and only then has the sender sent it; so nobody votes, and no tensor is its user's again, while
somebody else still reads in it. `host_read.pyx` has the rules. Where the memory cannot be had (another user,
another process namespace) and with `Options.host_memory` off, peers of one host use TCP like all others; only the
checksums are left out, once both ends have found that there is nothing between them (`_core/dataplane/lane.pyx`).

## One sync of shared state

Digests are computed in the training process, where the tensors are. If all votes are equal, that is all. Otherwise
the master elects a content (`election.py` has the rules), tells those who have it to serve, and those who lack
it whom to fetch from. Transfers run peer to peer, by blocks whose digests differ, from all sources at once.

## How it is tested

Machines and wire do no I/O, so the simulation in `tests/sim` runs the real ones: thousands of clusters with seeded
delays, losses and deaths in a minute. A failing seed tells its story again. Above that are real processes on
loopback, killed at every fault point there is, and above that hours of churn. A bug found anywhere becomes a named
case in the lowest tier that shows it.
"""

LAYERS = ("cli", "stress", "pccl", "actors", "memory", "_core")


def render() -> str:
    """The whole page."""
    parts = [HEAD, _layers(), PEER, _phases(), MASTER, _understood(master_state.TRANSITIONS), TAIL]
    return "".join(parts)


def _mermaid(*lines: str) -> str:
    return "\n".join(["```mermaid", *lines, "```", ""])


def _layers() -> str:
    """The folders as a graph: an arrow where a module of one imports a module of another."""
    files: dict[str, list[Path]] = {layer: sorted(_folder(layer).glob("*.py*")) for layer in LAYERS}
    arrows = set()
    for layer, paths in files.items():
        for path in paths:
            for target in _imported(path.read_text(), layer):
                if target in LAYERS and target != layer:
                    arrows.add((LAYERS.index(layer), LAYERS.index(target)))
    counts = {layer: len({path.stem for path in paths} - {"__init__"}) for layer, paths in files.items()}
    boxes = [f'    {layer}["{_shown(layer)} ({counts[layer]} modules)"]' for layer in LAYERS]
    return _mermaid("flowchart LR", *boxes, *(f"    {LAYERS[a]} --> {LAYERS[b]}" for a, b in sorted(arrows)))


def _folder(layer: str) -> Path:
    return ROOT / "pccl" / layer if layer in {"actors", "memory", "_core"} else ROOT / layer


def _shown(layer: str) -> str:
    return f"pccl/{layer}" if layer in {"actors", "memory", "_core"} else layer


def _imported(text: str, layer: str) -> set[str]:
    """The layers that a source names in its imports."""
    found = set()
    for base in re.findall(r"^\s*(?:from|c?import)\s+([.\w]+)", text, re.MULTILINE):
        parts = base.split(".")
        if base.startswith(".."):
            found.add(parts[2] if parts[2] in LAYERS else "pccl")
        elif base.startswith(".") and layer == "pccl" and parts[1] in LAYERS:
            found.add(parts[1])
        elif parts[0] == "pccl":
            found.add(parts[1] if len(parts) > 1 and parts[1] in LAYERS else "pccl")
    # Leaves such as errors and options may be imported from anywhere and say nothing about layers.
    return found - {"pccl"} if layer in {"actors", "memory", "_core"} else found


def _phases() -> str:
    """The phases of a peer, and the events that may lead from one to another."""
    methods = _methods()
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (phase, event), handler in peer_state.TRANSITIONS.items():
        if event is Tick:
            continue  # one handler for all phases, which asks itself in which it is
        for target in sorted(_leads_to(_name(handler), methods, set())):
            if target != phase:
                arrows[phase, target].append(event.__name__)
    lines = ["    [*] --> new"]
    lines += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return _mermaid("stateDiagram-v2", *lines)


def _methods() -> dict[str, str]:
    """The source of each method of the peer's machine."""
    methods: dict[str, str] = {}
    for machine in MACHINES:
        text = (ROOT / "pccl" / "_core" / "peer" / f"{machine}.pyx").read_text()
        methods |= {match[1]: match[0] for match in METHOD.finditer(text)}
    return methods


def _leads_to(method: str, methods: dict[str, str], seen: set[str]) -> set[str]:
    """The phases that a method may set, by itself or through the methods that it calls."""
    if method in seen or method not in methods:
        return set()
    seen.add(method)
    source = methods[method]
    found = {getattr(peer_state, name) for name in re.findall(r"self\.phase = (\w+)", source)}
    for called in re.findall(r"self\.(\w+)\(", source):
        found |= _leads_to(called, methods, seen)
    return found


def _name(handler: Any) -> str:
    name: str = handler.__name__
    return name


def _understood(transitions: Mapping[tuple[str, type], object]) -> str:
    """Phases with a note of what is understood in them."""
    by_phase: dict[str, list[str]] = defaultdict(list)
    for phase, event in transitions:
        by_phase[phase].append(event.__name__)
    phases = list(by_phase)
    lines = [f"    [*] --> {phases[0]}"]
    lines += [f"    {before} --> {after}: a topology round closes" for before, after in pairwise(phases)]
    for phase, events in by_phase.items():
        lines += [f"    note right of {phase}", *(f"        {event}" for event in events), "    end note"]
    return _mermaid("stateDiagram-v2", *lines)


if __name__ == "__main__":
    sys.stdout.write(render())

"""Print `docs/architecture.md`: the prose from here, the diagrams from the transition tables and the imports.

    python docs/make_architecture.py > docs/architecture.md

A test compares the page with what this prints; another test checks that every file in a walk exists. A transition table
has a row for each phase and event: the handler, if the table has them, and the phases that may follow. The diagrams
show these rows.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pccl._core.master import group_phases, master_state, optimizer, topology_round
from pccl._core.peer import fetch, peer_state, reduce_machine, ring_links, sync_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Table = Mapping[tuple[str, type], tuple[Any, tuple[str, ...]]]

ROOT = Path(__file__).parents[1]

# The folders (rooms), from those that import to those that are imported, and the content of each.
ROOMS = {
    "cli": "the commands",
    "stress": "churn for hours, with an independent check of every result",
    "pccl": "the public API: `Communicator`, `MasterNode`, `SharedState`, `Options`, errors, values",
    "pccl/client": "the training process: one call from validation to result",
    "pccl/actors/master": "the master's process: its actor, its state file, the moonshot",
    "pccl/actors/peer": "the peer's process: its actor, the links and the pool of lane workers, transfers, probes",
    "pccl/actors/workers": "the processes that move bytes: lanes, states, probes",
    "pccl/actors/io": "I/O of all processes: loop, connections, listener, trials, fork, spawn, debug log, fault points",
    "pccl/memory": "shared memory: segments, arena, completion slots, windows",
    "pccl/torch": "everything that needs torch: tensors in shared memory, staging and digests of CUDA tensors",
    "pccl/_core/master": "the master's machine and its parts: runs, admission, rounds, rings, reduces, states, waits",
    "pccl/_core/peer": "the peer's machine and its parts: calls, ring links, reduces, syncs, fetches",
    "pccl/_core/dataplane": "the code of lane workers, without the GIL: plan, board, lanes, backup",
    "pccl/_core/protocol": "data between processes: hellos, messages, codec, mailbox, handshake, operations, manifests",
    "pccl/_core/solver": "rings: exact search, local search, paths",
    "pccl/_core/kernels": "arithmetic, quantization, checksums, digests",
    "pccl/_core/system": "wrappers of Linux: futex, memory mapping, process calls",
    "pccl/_core": "the base of all other folders: records, the story of a machine",
}
# Leaves of the public API, which every folder may import: arrows to them would show nothing.
LEAVES = {"pccl.options", "pccl.errors", "pccl.values", "pccl.shared_state"}
# Imported by every folder, so the graph has no arrows to it.
GROUND = ("pccl/_core",)

HEAD = """# Architecture, for contributors

Printed by `docs/make_architecture.py`, which draws the diagrams from the code.

The design has three layers. **Pure machines decide**: events in, actions out, time as an argument. **Thin actors act**:
each is one process, one loop, one machine. **Workers move bytes**: processes that know only their blocks and can be
killed at any instruction.

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

- The training process runs no thread of this library. A call posts a command and waits on a slot in shared memory.
- The peer actor is a new process, not a fork, because the training process may hold CUDA and threads. It imports
  neither numpy nor torch. It forks the workers: a sender and a receiver for each lane, others for state transfers and
  probes.
- Nothing outlives the training process: memory is anonymous and passed by descriptor, and every process ends with its
  parent.

## Where things are

A folder is a process or a kind of knowledge. Tests mirror the folders; a test checks that imports have one direction.

"""

GRAPH = """
The graph shows the number of modules in each folder, and which folder imports which. An arrow that follows from others
is left out, and so are the arrows to `pccl/_core`, which all folders import.

"""

PEER = """
## The life of a peer

The peer's machine (`pccl/_core/peer/peer_state.pyx`) is in one of these phases. An arrow is an event that may end a
phase: a message of the master leads to *gone* if it breaks the protocol, and a tick if a deadline has passed. Events
that leave a phase as it is are not drawn; [the protocol](protocol.md) lists them.

"""

LANE = """
### A lane of an edge

From the ring order to the worker that serves the connection (`pccl/_core/peer/ring_links.pyx`). All lanes of an edge
are dropped together.

"""

REDUCE = """
### A peer's part in a reduce

From the call to the completion of its slot (`pccl/_core/peer/reduce_machine.pyx`). A slot completes only when no worker
uses the memory any more.

"""

SYNC = """
### A peer's part in a sync

From the vote to the completion of the last slot (`pccl/_core/peer/sync_machine.pyx`).

"""

FETCH = """
### A peer's fetch of a state

From the order to the last block (`pccl/_core/peer/fetch.py`), while the sync is *fetching* or *starved*.

"""

FETCH_LINK = """
Each of its links to a source has phases too. `AskManifest` and `CloseLink` are actions that the fetch decides.

"""

MASTER = """
## What the master knows about a peer

The master's machine (`pccl/_core/master/master_state.pyx`) keeps a phase for every peer. *PeerWent* is the end of its
connection. A *Tick* kicks a peer that is silent for too long, or too slow. A newcomer is accepted at the end of a
topology round, with the last `Wired`, or with the end of the peer that had not sent it. Before that, trials show that
it can be reached (`pccl/_core/master/admission.pyx`): the master and the peers that would be its neighbours dial it.

"""

ROUND = """
### A topology round

One for the run (`pccl/_core/master/topology_round.pyx`). An arrow is an event that the machine finds by itself, after
whatever event made it true: the last vote, the last `Wired`, a loss. *Held*: every voter waits for a larger group.
*Closed*: the newcomers are in their rings, which are being wired.

"""

OPTIMISATION = """
### An optimisation of the rings

One for the run as well (`pccl/_core/master/optimizer.pyx`), and never during a topology round that is closed. *Wiring*:
every group has chosen its ring.

"""

TAG = """
### A reduce

For every group the master keeps the tags that members have initiated (`pccl/_core/master/collectives.pyx`).
*Interrupted*: the ring changed, and the verdict waits until the new ring is wired. *PeerWent* is here, and in the next
diagram, any end of a member of the group; the vote that completes a tag ends the membership of odd peers. A *Tick*
breaks a deadlock, or ends the late probes of an optimisation, which then changes the ring.

"""

CONSENSUS = """
### The consensus on the shared state

For every group it also keeps one consensus (`pccl/_core/master/state_consensus.pyx`). *Asking*: schemas differ, and the
master asks for them so that it can name the difference. *Transferring*: the state is elected, and peers fetch it.

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
    P->>M: Initiate (signature: tag, count, dtype, op)
    Note over M: all members initiated, with the same signature
    M->>P: Commence (sequence, epoch)
    P->>L: launch: own blocks become ready
    Note over L: blocks go around the ring, 2 (N - 1) hops each
    L->>P: ReduceEnded (all blocks here, none to send)
    P->>M: Finished (ok)
    Note over M: all members finished, none was lost: success
    M->>P: ReduceDone
    P->>T: completion slot
```

Each of these processes wakes up with cold caches, so the cost of a small reduce depends on the amount of code and the
number of objects on its path, not on how often they are used. That path is compiled, typed and short, and separate from
the code of rare cases: `reduce_request.pyx`, `pending_reduces.pyx` and `call_slots.pyx` in the training process,
`peer_fastpath.pyx` in the peer actor, `master_fastpath.pyx` and `group_dispatch.pyx` in the master. Records are made in
C, by one function for all of them (`records.pyx`).

If a member is lost before the last `Finished`, the master orders a new ring instead, which aborts the reduce, and the
call fails on all members once that ring is wired. If a member cannot finish although the ring is whole, the master
sends `AbortReduce`. A tensor that is reduced in place gets its old bytes from a backup, which was written in the same
pass that added the blocks.

Between hosts a block travels as a frame over TCP, with a checksum. Between peers of one host only the header of the
frame travels: the receiver has mapped the sender's memory for reading, and adds the block directly from there. Then it
gives the block back, and only after that the block counts as sent. So no peer votes, and no tensor is returned to its
user, while another process still reads it. `host_read.pyx` has the rules. Where the memory cannot be mapped (another
user, another process namespace), and with `Options.host_memory` off, peers of one host use TCP like all others; only
the checksums are left out, after both ends have verified that they are on the same host
(`pccl/_core/dataplane/lane.pyx`).

## One sync of shared state

Digests are computed in the training process, where the tensors are. If all votes are equal, nothing moves. Otherwise
the master elects a content (`election.py` has the rules), tells the peers that hold it to serve, and tells the others
from which peers to fetch. Transfers run from peer to peer, by blocks whose digests differ, from all sources at once.

## Four walks through the code

The first two walks go from the training process down to the workers and back. The third starts in the master.
"""

END = """
## How it is tested

Machines and protocol do no I/O, so the simulation in `tests/sim` runs the real ones: thousands of clusters with seeded
delays, losses and deaths in a minute. A failing seed can be replayed. The next tier runs real processes on loopback and
kills them at every fault point; the last tier is hours of churn. A bug found anywhere becomes a named case in the
lowest tier that shows it.
"""

WALKS = {
    "One all-reduce, file by file": (
        ("pccl/communicator.py", "`all_reduce` in the training process"),
        ("pccl/client/reduce_request.pyx", "checks tensors and options: `ReduceRequest`"),
        ("pccl/client/pending_reduces.pyx", "checks the membership and the tag, takes a completion slot"),
        ("pccl/client/reduce_request.pyx", "finds or stages the memory, and packs the `CallReduce`: `PendingReduce`"),
        ("pccl/client/call_slots.pyx", "sends it through the mailbox, and sleeps on the slot"),
        ("pccl/actors/peer/peer_fastpath.pyx", "reads the mailbox in the peer actor and feeds the machine"),
        ("pccl/_core/peer/peer_state.pyx", "the phase allows it: the member takes the call"),
        ("pccl/_core/peer/member.pyx", "refuses a reduce beside a sync or a topology round; passes on all others"),
        ("pccl/_core/peer/reduce_machine.pyx", "*initiated*: `Initiate` to the master"),
        ("pccl/actors/io/connection.pyx", "the control link"),
        ("pccl/actors/master/master_fastpath.pyx", "reads the message in the master"),
        ("pccl/_core/master/master_state.pyx", "finds the handler of the message in its table"),
        ("pccl/_core/master/group_dispatch.pyx", "finds the group of the peer"),
        ("pccl/_core/master/collectives.pyx", "all members initiated the same signature: `Commence` to all of them"),
        ("pccl/_core/peer/reduce_machine.pyx", "*running*: `BeginOperation`"),
        ("pccl/actors/peer/op_runner.pyx", "puts the operation on the board, in the order of the sequences"),
        ("pccl/_core/dataplane/board.pyx", "the operation in shared memory; bells wake the workers"),
        ("pccl/actors/workers/lane_worker.py", "a sender and a receiver process for each lane"),
        ("pccl/_core/dataplane/sender.pyx", "sends blocks that are ready to the next peer"),
        ("pccl/_core/dataplane/receiver.pyx", "receives blocks from the previous peer"),
        ("pccl/_core/dataplane/block_reduce.pyx", "saves and reduces a block, piece by piece"),
        ("pccl/_core/kernels/arithmetic.pyx", "adds: the bottom of the walk"),
        ("pccl/_core/dataplane/board.pyx", "the last block is here, and none is left to send: the actor's bell"),
        ("pccl/actors/peer/op_runner.pyx", "`ReduceEnded`"),
        ("pccl/_core/peer/reduce_machine.pyx", "*voted*: `Finished` to the master"),
        ("pccl/_core/master/collectives.pyx", "all members finished: `ReduceDone` to all of them"),
        ("pccl/_core/peer/reduce_machine.pyx", "*completed*: `EndOperation` and `Complete`"),
        ("pccl/memory/completion_slots.pyx", "the slot is done; the training process wakes on its futex"),
        ("pccl/client/call_slots.pyx", "reads the outcome and frees the slot"),
        ("pccl/client/reduce_request.pyx", "copies a staged result back, and releases the memory"),
        ("pccl/client/pending_reduces.pyx", "keeps the numbers of the world that came with the outcome"),
        ("pccl/communicator.py", "returns `ReduceInfo`, or raises the error of the outcome"),
    ),
    "One sync, file by file": (
        ("pccl/communicator.py", "`sync_shared_state` in the training process"),
        (
            "pccl/client/state_sync.py",
            "digests the tensors; `CallSync` with the digests and the revision",
        ),
        ("pccl/actors/peer/peer_actor.py", "the mailbox in the peer actor"),
        ("pccl/_core/peer/sync_machine.pyx", "*voted*: `VoteSync` to the master"),
        ("pccl/_core/master/state_consensus.pyx", "all members of the group voted"),
        ("pccl/_core/master/election.py", "elects a content"),
        (
            "pccl/_core/master/state_consensus.pyx",
            "if all hold it: `SyncDone`, and no transfer; if not: `Serve` to peers that hold it, `Fetch` to the others",
        ),
        ("pccl/_core/peer/sync_machine.pyx", "*ordered*: asks the caller to describe its state"),
        ("pccl/client/state_sync.py", "digests every block; `CallManifest` with the manifest in shared memory"),
        ("pccl/_core/peer/sync_machine.pyx", "*serving* or *fetching*: `ServeState` or `FetchState`"),
        ("pccl/actors/peer/transfers.py", "dials the sources, forks a worker for each link"),
        ("pccl/_core/peer/fetch.py", "decides which link fetches which blocks"),
        ("pccl/actors/workers/state_worker.py", "sends blocks, or receives them into the tensors and verifies each"),
        ("pccl/actors/peer/transfers.py", "`StateFetched`"),
        ("pccl/_core/peer/sync_machine.pyx", "*fetched*: `Fetched` to the master"),
        ("pccl/_core/master/state_consensus.pyx", "all members hold the content: `SyncDone`"),
        ("pccl/_core/peer/sync_machine.pyx", "*ending*: `EndTransfer`"),
        ("pccl/actors/peer/transfers.py", "ends the workers; `TransferEnded` when the last is reaped"),
        ("pccl/_core/peer/sync_machine.pyx", "*completed*: `Complete`"),
        ("pccl/memory/completion_slots.pyx", "the training process wakes"),
        ("pccl/client/state_sync.py", "takes over the revision"),
        ("pccl/communicator.py", "returns `SharedStateSyncInfo`"),
    ),
    "One join, file by file": (
        ("pccl/communicator.py", "`connect` in the training process"),
        ("pccl/actors/peer/peer_actor.py", "opens the peer's port, dials the master, and sends `Register`"),
        ("pccl/_core/master/runs.pyx", "the peer belongs to the run that is served; else it is told why not"),
        ("pccl/_core/master/membership.pyx", "*registered*: an id, and `Registered` with the options of the master"),
        ("pccl/_core/master/admission.pyx", "`DialBack`; chooses a gap of the ring, and which peers try each other"),
        ("pccl/_core/master/trial_table.pyx", "`Try` to the neighbours and to the newcomer"),
        ("pccl/actors/io/trials.py", "each of them dials; the peer that is dialled confirms its instance"),
        ("pccl/_core/peer/member.pyx", "`Tried` to the master"),
        ("pccl/_core/master/admission.pyx", "the newcomer fits, or is told who could not reach it, and where"),
        ("pccl/_core/master/topology_round.pyx", "all members have voted: closes the round"),
        ("pccl/_core/master/admission.pyx", "inserts the newcomers that fit"),
        ("pccl/_core/master/group.pyx", "a new epoch, and a `RingOrder` for every member and newcomer"),
        ("pccl/_core/peer/ring_links.pyx", "dials the changed edges; `Wired` when both are up"),
        ("pccl/_core/master/topology_round.pyx", "`Accepted` to the newcomers, `TopologyDone` to the members"),
        ("pccl/_core/peer/peer_state.pyx", "*member*: `Complete`"),
        ("pccl/communicator.py", "`connect` returns"),
    ),
    "One death, file by file": (
        ("pccl/actors/master/master_actor.py", "the connection of the dead peer is closed: `PeerWent`"),
        ("pccl/_core/master/master_state.pyx", "takes the event; its `Tick` finds a peer that is silent for too long"),
        ("pccl/_core/master/membership.pyx", "removes the peer from its group; the ring must be ordered anew"),
        ("pccl/_core/master/collectives.pyx", "all reduces of the group have failed; their verdict waits for the ring"),
        ("pccl/_core/master/ballots.pyx", "removes the votes of the peer"),
        ("pccl/_core/master/ring.py", "an order of the members that are left, without pairs that cannot connect"),
        ("pccl/_core/master/group.pyx", "a new epoch, and a `RingOrder` for every member"),
        ("pccl/_core/peer/peer_state.pyx", "in each peer that is left: the member takes the order"),
        ("pccl/_core/peer/member.pyx", "aborts the reduces, then follows the order"),
        ("pccl/_core/peer/reduce_machine.pyx", "*abandoned*: `AbortOperation`, before any lane is touched"),
        (
            "pccl/actors/peer/op_runner.pyx",
            "orders the workers to let go of the operation; has the whole worker set killed if one of them does not",
        ),
        ("pccl/_core/dataplane/board.pyx", "workers let go, at the latest after one block"),
        ("pccl/actors/peer/op_runner.pyx", "`ReduceDrained`"),
        ("pccl/_core/peer/reduce_machine.pyx", "*drained*: waits for the verdict"),
        ("pccl/_core/peer/ring_links.pyx", "meanwhile: dials the new next peer, waits for the new previous peer"),
        ("pccl/actors/peer/lane_links.py", "dials, and holds each connection until the machine decides"),
        ("pccl/actors/io/dialler.py", "connects and proves the token"),
        ("pccl/actors/peer/lane_pool.py", "gives each connection to a worker"),
        ("pccl/_core/peer/ring_links.pyx", "both edges are up: `Wired` to the master"),
        ("pccl/_core/master/membership.pyx", "all members of the ring have reported it"),
        ("pccl/_core/master/collectives.pyx", "`ReduceFailed`, with the world as it is now"),
        ("pccl/_core/peer/reduce_machine.pyx", "*completed*: `Complete` with the reason"),
        ("pccl/memory/completion_slots.pyx", "the training process wakes"),
        ("pccl/client/call_slots.pyx", "reads the outcome and frees the slot"),
        ("pccl/client/reduce_request.pyx", "ends the reduce with failure"),
        ("pccl/_core/dataplane/backup.pyx", "restores the tensor's old bytes"),
        ("pccl/client/pending_reduces.pyx", "keeps the numbers of the world; `run_all` starts the reduce again"),
        ("pccl/communicator.py", "raises the error of the outcome"),
    ),
}


def render() -> str:
    """Return the whole page."""
    parts = [HEAD, _rooms(), GRAPH, _graph(), PEER, _diagram(peer_state.TRANSITIONS)]
    parts += [LANE, _diagram(ring_links.TRANSITIONS), REDUCE, _diagram(reduce_machine.TRANSITIONS)]
    parts += [SYNC, _diagram(sync_machine.TRANSITIONS), FETCH, _diagram(fetch.TRANSITIONS)]
    parts += [FETCH_LINK, _diagram(fetch.LINK_TRANSITIONS), MASTER, _diagram(master_state.TRANSITIONS)]
    parts += [ROUND, _diagram(topology_round.TRANSITIONS), OPTIMISATION, _diagram(optimizer.TRANSITIONS)]
    parts += [TAG, _draw(group_phases.COLLECTIVES), CONSENSUS, _draw(group_phases.CONSENSUS), TAIL, *_walks(), END]
    return "".join(parts)


def _mermaid(*lines: str) -> str:
    return "\n".join(["```mermaid", *lines, "```", ""])


def _rooms() -> str:
    rows = [f"| `{room}/` | {what} |\n" for room, what in ROOMS.items()]
    rows += [
        "| `tests/` | unit, simulation, process, fuzz: see `CONTRIBUTING.md` |\n",
        "| `benchmarks/`, `examples/`, `docs/` | measurements, programs to copy from, pages |\n",
    ]
    return "".join(["| folder | what is in it |\n|---|---|\n", *rows])


def _graph() -> str:
    """Return the graph of the folders: an arrow where a module of one imports a module of another."""
    lines, imports = [], {}
    for room in ROOMS:
        files = [path for path in (ROOT / room).iterdir() if path.suffix in {".py", ".pyx", ".pxd", ".pyi"}]
        count = len({path.stem for path in files} - {"__init__"})
        lines.append(f'    {_node(room)}["{room} ({count})"]')
        imports[room] = {target for path in files for target in _imported(path)} - {room, *GROUND}
    reached = {room: _reached(room, imports) for room in ROOMS}
    for room, targets in imports.items():
        implied = set().union(*(reached[target] for target in targets))
        lines += [f"    {_node(room)} --> {_node(target)}" for target in ROOMS if target in targets - implied]
    return _mermaid("flowchart LR", *lines)


def _reached(room: str, imports: dict[str, set[str]]) -> set[str]:
    """Return all folders that a folder imports, directly or through others."""
    found: set[str] = set()
    waiting = list(imports[room])
    while waiting:
        target = waiting.pop()
        if target not in found:
            found.add(target)
            waiting += imports[target]
    return found


def _node(room: str) -> str:
    return room.replace("/", "_")


def _imported(path: Path) -> Iterator[str]:
    """Yield the folders that a source file imports from."""
    package = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
    for line in path.read_text().splitlines():
        found = re.match(r"\s*(?:from\s+([.\w]+)\s+c?import\s+(\w+)|c?import\s+([.\w]+))", line)
        if found is None:
            continue
        base = found[1] or found[3]
        if base.startswith("."):
            up = len(base) - len(base.lstrip("."))
            base = ".".join([*package.split(".")[: len(package.split(".")) - up + 1], base.lstrip(".")]).rstrip(".")
        names = [base, f"{base}.{found[2]}"]
        if not LEAVES & set(names):
            room = _room_of(names)
            if room is not None:
                yield room


def _room_of(names: list[str]) -> str | None:
    """Return the deepest folder that contains one of these names; None if there is none."""
    paths = [name.replace(".", "/") for name in names]
    # The commands and the stress harness are installed below the package.
    paths = [re.sub(r"^pccl/(?=(?:cli|stress)\b)", "", path) for path in paths]
    rooms = [room for room in ROOMS for path in paths if path == room or path.startswith(f"{room}/")]
    return max(rooms, key=len, default=None)


def _diagram(transitions: Table) -> str:
    """Return the diagram of a table that has handlers too."""
    return _draw({key: next_phases for key, (_, next_phases) in transitions.items()})


def _draw(following: Mapping[tuple[str, type], tuple[str, ...]]) -> str:
    """Return the diagram of a table: its phases, and the events that may lead from one to another."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (phase, event), next_phases in following.items():
        for target in next_phases:
            if target != phase:
                arrows[phase, target].append(event.__name__)
    first = next(phase for phase, _ in following)
    lines = [f"    [*] --> {first}"]
    lines += [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return _mermaid("stateDiagram-v2", *lines)


def _walks() -> Iterator[str]:
    for title, steps in WALKS.items():
        yield f"\n### {title}\n\n"
        yield from (f"{number}. `{file}`: {what}\n" for number, (file, what) in enumerate(steps, 1))


if __name__ == "__main__":
    sys.stdout.write(render())

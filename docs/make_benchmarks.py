"""Write `docs/benchmarks.md` and its pictures from the files in `benchmarks/results/`, and from nothing else.

    python docs/make_benchmarks.py

This script measures nothing. A test compares the page with the output of this script, and each picture with its
results: a picture carries a digest of its results, because its bytes depend on the version of matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import tempfile
import textwrap
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import all_reduce, tables, wan, wan_tables  # noqa: E402
from benchmarks.facts import RESULTS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "img"
KEYWORD = b"Source"  # of the text in a picture that names its results
HEADER_BYTES = 33  # of a PNG: signature, and the chunk that must be the first

HEAD = """# Benchmarks

Written by `docs/make_benchmarks.py` from the files in `benchmarks/results/`. Each section has the question, the
measurements with time and machine, and the command that measures again; the docstring of each benchmark describes its
method. Times are medians unless a table says otherwise. The target is in brackets after each measurement; a measurement
that misses its target is bold. After measuring, run `python docs/make_benchmarks.py` to update this page and its
pictures.

"""


@dataclass(frozen=True)
class Section:
    """One benchmark, or one experiment of a benchmark that has several."""

    title: str
    question: str
    source: str  # the benchmark, and its file of results
    table: Callable[[Any, tables.GoalCount], str]
    experiment: str = ""  # of that benchmark
    picture: str = ""  # what it shows, if there is one

    @property
    def name(self) -> str:
        """The name of the picture's file."""
        return "_".join((self.source, *self.experiment.split()))

    @property
    def command(self) -> str:
        """The command that measures it again."""
        only = f' --only "{self.experiment}"' if " " in self.experiment else f" --only {self.experiment}"
        return f"python -m benchmarks.{self.source}" + (only if self.experiment else "")

    @property
    def found(self) -> Any:
        """The results of its table and picture; None if it was not measured."""
        results = load(self.source)
        return results["experiments"].get(self.experiment) if results and self.experiment else results

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts of its measurement: time, machine, versions."""
        results = load(self.source) or {}
        facts: dict[str, Any] | None = results["runs"][self.experiment] if self.experiment else results.get("facts")
        return facts


SECTIONS = (
    Section(
        "All-reduce next to Gloo",
        "How fast is a sum of float32 among peers of one host, compared with Gloo in the same processes and rounds? By "
        "default such peers read blocks from each other's memory; peers of different hosts use TCP, as Gloo does here. "
        "With more peers than cores, the results also show how well each library shares the cores.",
        "all_reduce",
        tables.all_reduce,
        picture="Throughput against size, next to Gloo",
    ),
    Section(
        "Over a wide-area link",
        "Two peers in two network namespaces, over an emulated link of 1 Gbit/s with real TCP (`benchmarks/box`): "
        "which share of it does one all-reduce use, by round trip and number of connections, directly after "
        "another one, and after an idle time?",
        "wan",
        wan_tables.connections,
        "connections",
        "Share of the link against connections, a line for each round trip",
    ),
    Section(
        "Over a wide-area link, next to Gloo",
        "The same two peers and the same link, with a smaller tensor. Gloo and pccl take turns in the same "
        "rounds; times are medians.",
        "wan",
        wan_tables.contenders,
        "gloo",
        "Share of the link, next to Gloo",
    ),
    Section(
        "Over a wide-area link, many at once",
        "Is there a difference between one reduce over all connections and many reduces of the same bytes at once?",
        "wan",
        wan_tables.contenders,
        "at once",
    ),
    Section(
        "Communication hidden behind training",
        "How long does an outer step of DiLoCo take if training waits for the all-reduce, and if it continues "
        "meanwhile, as in [`examples/async_diloco.py`](../examples/async_diloco.py)? Peers compute on half of the "
        "cores; the other half runs the network processes and the emulator.",
        "wan",
        wan_tables.hidden,
        "hidden",
        "Step times: compute and communication alone, and steps of both ways",
    ),
    Section(
        "Two sites, and the ring that suits them",
        "Two sites have fast links inside and slow links between them, except for one faster link in each direction; "
        "peers of both sites join in turns. What does `optimize_topology()` gain, compared with the prediction?",
        "wan",
        wan_tables.optimised,
        "optimised",
        "The ring as peers joined, and the optimised one",
    ),
    Section(
        "Rings over known links",
        "Every pair of hosts has a link with a random rate. Are these rates measured correctly, is the best ring "
        "found, and is it as fast as its slowest link predicts?",
        "topology",
        tables.topology,
    ),
    Section(
        "Pools of connections",
        "What does a pool cost where one connection is enough, and what does it gain if one connection is slow?",
        "pool",
        tables.pool,
    ),
    Section(
        "Quantization",
        "What do fewer bits gain on a slow link, and what is their error (root mean square, relative to that of the "
        "data)? More in [quantization](quantization.md).",
        "quantized",
        tables.quantized,
    ),
    Section(
        "After a kill",
        "How long does it take from a SIGKILL until the last survivor has completed a reduce without the dead peer?",
        "recovery",
        tables.recovery,
    ),
    Section(
        "Latency",
        "How long does a small all-reduce between two peers take, compared with Gloo, and how long does a launch block "
        "the training process?",
        "latency",
        tables.latency,
    ),
    Section(
        "Shared state",
        "What does `sync_shared_state` cost if all peers agree, and how fast does a newcomer receive the state?",
        "shared_state",
        tables.shared_state,
    ),
    Section(
        "Digests",
        "What does a digest cost, compared with only reading the memory? More in [simplehash](simplehash.md).",
        "digest",
        tables.digest,
    ),
    Section(
        "Control calls",
        "What do topology calls cost, compared with Gloo's barrier, and what does a start cost?",
        "control",
        tables.control,
    ),
    Section(
        "Solving rings",
        "How good is the ring that the solver finds in a given time? Each cell has the rate of its slowest edge as a "
        "share of the best known one, and by how much its total cost exceeds the best; the worst of all seeds.",
        "solver",
        tables.solver,
    ),
    Section(
        "The master and many peers",
        "Does the master's work per peer stay constant when a run grows? CPU time of its machine, without I/O.",
        "growth",
        tables.growth,
    ),
    Section(
        "Kernels",
        "How fast are the kernels on blocks in the cache, by instruction set, compared with memcpy?",
        "kernels",
        tables.kernels,
    ),
)


@cache
def load(source: str) -> dict[str, Any] | None:
    """The results of a benchmark; None if there is no file."""
    path = RESULTS / f"{source}.json"
    results: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return results


# --- The page -----------------------------------------------------------------


def render() -> str:
    """Return the whole page."""
    parts, rows = [], []
    for section in SECTIONS:
        if section.found is None:
            continue
        goals = tables.GoalCount()
        parts.append(show(section, goals))
        if goals.targets:
            anchor = section.title.lower().replace(" ", "-").replace(",", "")
            rows.append((f"[{section.title}](#{anchor})", goals.targets, goals.missed))
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return HEAD + tables.table(("section", "targets", "missed"), [*rows, total]) + "".join(parts)


def show(section: Section, goals: tables.GoalCount) -> str:
    """Return a section: question, table, picture, and how to measure again."""
    lines = [f"\n## {section.title}\n", wrapped(section.question), section.table(section.found, goals)]
    if section.picture:
        lines.append(f"![{section.picture}](img/{section.name}.png)\n")
    return "\n".join([*lines, wrapped(measured(section.facts)), f"Measure again: `{section.command}`\n"])


def wrapped(text: str) -> str:
    """Return the text as a paragraph with the line width of the other pages."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def measured(facts: dict[str, Any] | None) -> str:
    """Return time, machine and versions of a measurement in one sentence."""
    if facts is None:
        return "The results do not say when and where they were measured."
    machine, versions = facts["machine"], facts["versions"]
    return (
        f"Measured {facts['date'][:16].replace('T', ' ')} UTC on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, load {machine['load']:.1f}, "
        f"{facts['congestion_control']}, Python {versions['python']}, torch {versions['torch']}, "
        f"commit `{facts['commit']}`."
    )


# --- Pictures -----------------------------------------------------------------


def pictured() -> dict[Path, str]:
    """Every picture of the page, with the digest of its results."""
    return {
        PICTURES / f"{section.name}.png": source_text(section.found)
        for section in SECTIONS
        if section.picture and section.found is not None
    }


def source_text(found: Any) -> str:
    """The digest of results."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def draw() -> None:
    """Draw all pictures, by the code of their benchmarks."""
    with tempfile.TemporaryDirectory(prefix="pccl-pictures-") as folder:
        if (results := load("all_reduce")) is not None:
            all_reduce.plot(numbered(results), Path(folder) / "all_reduce.png")
        if (results := load("wan")) is not None:
            wan.plot(results, Path(folder))
        PICTURES.mkdir(exist_ok=True)
        for path, text in pictured().items():
            drawn = Path(folder) / path.name.removeprefix("wan_")
            path.write_bytes(with_source(drawn.read_bytes(), text))


def numbered(results: dict[str, Any]) -> dict[str, Any]:
    """Results of `all_reduce` with worlds and sizes as numbers, which are strings in JSON."""
    worlds = {
        int(world): measured | {"sizes": {int(size): row for size, row in measured["sizes"].items()}}
        for world, measured in results["worlds"].items()
    }
    return results | {"worlds": worlds}


def with_source(png: bytes, text: str) -> bytes:
    """The picture with the digest of its results in it."""
    body = b"tEXt" + KEYWORD + b"\0" + text.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:HEADER_BYTES] + chunk + png[HEADER_BYTES:]


def source_of(png: bytes) -> str:
    """The digest of the results in a picture; empty if there is none."""
    begin = HEADER_BYTES + 8 + len(KEYWORD) + 1
    (length,) = struct.unpack(">I", png[HEADER_BYTES : HEADER_BYTES + 4])
    has_source = png[HEADER_BYTES + 4 : begin] == b"tEXt" + KEYWORD + b"\0"
    return png[begin : HEADER_BYTES + 8 + length].decode() if has_source else ""


if __name__ == "__main__":
    PAGE.write_text(render())
    draw()

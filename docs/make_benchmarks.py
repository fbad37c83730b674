"""Writes `docs/benchmarks.md` and its pictures, from the files in `benchmarks/results/` and from nothing else.

    python docs/make_benchmarks.py

Nothing is measured here. A test compares the page with what this would write, and each picture with its results: a
picture carries a digest of what it was drawn from, because its bytes depend on the version of matplotlib.
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
KEYWORD = b"Source"  # of the text in a picture that says what it was drawn from
HEADER_BYTES = 33  # of a PNG: signature, and the chunk that must be the first

HEAD = """# Benchmarks

Written by `docs/make_benchmarks.py` from the files in `benchmarks/results/`. Each section says what is asked, what was
measured when and where, and how to measure it again; the docstring of each benchmark says how it measures. Times are
medians unless something else is said. What is wanted stands in brackets behind what was measured, and what misses it
is bold. After measuring, `python docs/make_benchmarks.py` brings this page and its pictures up to date.

"""


@dataclass(frozen=True)
class Section:
    """One benchmark, or one experiment of a benchmark that has several."""

    title: str
    question: str
    source: str  # the benchmark, and its file of results
    table: Callable[[Any, tables.Tally], str]
    experiment: str = ""  # of that benchmark
    picture: str = ""  # what it shows, if there is one

    @property
    def name(self) -> str:
        """Of the picture's file."""
        return "_".join((self.source, *self.experiment.split()))

    @property
    def command(self) -> str:
        """What measures it again."""
        only = f' --only "{self.experiment}"' if " " in self.experiment else f" --only {self.experiment}"
        return f"python -m benchmarks.{self.source}" + (only if self.experiment else "")

    @property
    def found(self) -> Any:
        """What its table and picture are made from; None if it was not measured."""
        results = load(self.source)
        return results["experiments"].get(self.experiment) if results and self.experiment else results

    @property
    def facts(self) -> dict[str, Any] | None:
        """Where and when."""
        results = load(self.source) or {}
        facts: dict[str, Any] | None = results["runs"][self.experiment] if self.experiment else results.get("facts")
        return facts


SECTIONS = (
    Section(
        "All-reduce next to Gloo",
        "How fast is a sum of float32 among peers of one host, next to Gloo in the same processes and rounds? As they "
        "come, such peers read blocks in each other's memory; peers of different hosts use TCP, as Gloo does here. In "
        "worlds with more peers than the machine has cores, contenders differ in how well they share those.",
        "all_reduce",
        tables.all_reduce,
        picture="Throughput against size, next to Gloo",
    ),
    Section(
        "Over a wide-area link",
        "How much of a link with a delay does one all-reduce fill, by round trip and connections: right after another "
        "one, and after idleness?",
        "wan",
        wan_tables.connections,
        "connections",
        "Share of the link against connections, a line for each round trip",
    ),
    Section(
        "Over a wide-area link, next to Gloo",
        "The same link, a smaller tensor, and Gloo in the same rounds.",
        "wan",
        wan_tables.contenders,
        "gloo",
        "Share of the link, next to Gloo",
    ),
    Section(
        "Over a wide-area link, many at once",
        "Does it matter whether the same bytes travel as one striped reduce, or as many that run at the same time?",
        "wan",
        wan_tables.contenders,
        "at once",
    ),
    Section(
        "Communication hidden behind training",
        "What does an outer step of DiLoCo take if training waits for the all-reduce, and if it goes on meanwhile, as "
        "in [`examples/async_diloco.py`](../examples/async_diloco.py)? Peers compute on half of the cores; the other "
        "half has the network, and the emulator that stands for one.",
        "wan",
        wan_tables.hidden,
        "hidden",
        "Step times: compute and communication alone, and steps of both ways",
    ),
    Section(
        "Two sites, and the ring that suits them",
        "Two sites, fast within, slow between but for one faster link each way; peers join in turns. What is "
        "`optimize_topology()` worth, beside what the links predict?",
        "wan",
        wan_tables.optimised,
        "optimised",
        "The ring as peers joined, and the optimised one",
    ),
    Section(
        "Rings over known links",
        "Every pair of hosts has a link with a rate of its own, drawn by chance. Are these rates measured rightly, is "
        "the best ring found, and is it as fast as its slowest link says?",
        "topology",
        tables.topology,
    ),
    Section(
        "Pools of connections",
        "What does a pool cost where one connection would do, and what does it save where one of its connections is "
        "slow?",
        "pool",
        tables.pool,
    ),
    Section(
        "Quantization",
        "What do fewer bits save on a slow link, and what do they cost in precision (root of the mean square, by that "
        "of the data)? More in [quantization](quantization.md).",
        "quantized",
        tables.quantized,
    ),
    Section(
        "After a kill",
        "How long from a SIGKILL until the last survivor has completed a reduce without the dead?",
        "recovery",
        tables.recovery,
    ),
    Section(
        "Latency",
        "How long does a small all-reduce take between two peers, next to Gloo, and how long does launching one keep "
        "the training process?",
        "latency",
        tables.latency,
    ),
    Section(
        "Shared state",
        "What does `sync_shared_state` cost when all agree, and how fast does a newcomer get what it lacks?",
        "shared_state",
        tables.shared_state,
    ),
    Section(
        "Digests",
        "What does a digest cost, next to a loop that only reads the same memory? More in [simplehash](simplehash.md).",
        "digest",
        tables.digest,
    ),
    Section(
        "Control calls",
        "What does agreeing on who is in cost, next to Gloo's barrier, and what does it cost to start?",
        "control",
        tables.control,
    ),
    Section(
        "Solving rings",
        "How good a ring is found in how much time? In each cell: its bottleneck as a share of the best one known, and "
        "how far its total is above; the worst of the seeds.",
        "solver",
        tables.solver,
    ),
    Section(
        "The master and many peers",
        "Does the master's work per peer stay the same when a run grows? CPU time of its machine alone.",
        "growth",
        tables.growth,
    ),
    Section(
        "Kernels",
        "How fast are blocks reduced and summed in cache, by instruction set, next to memcpy?",
        "kernels",
        tables.kernels,
    ),
)


@cache
def load(source: str) -> dict[str, Any] | None:
    """A file of results, if it is there."""
    path = RESULTS / f"{source}.json"
    results: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return results


# --- The page -----------------------------------------------------------------


def render() -> str:
    """The whole page."""
    parts, rows = [], []
    for section in SECTIONS:
        if section.found is None:
            continue
        tally = tables.Tally()
        parts.append(show(section, tally))
        if tally.wanted:
            anchor = section.title.lower().replace(" ", "-").replace(",", "")
            rows.append((f"[{section.title}](#{anchor})", tally.wanted, tally.missed))
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return HEAD + tables.table(("goals", "wanted", "missed"), [*rows, total]) + "".join(parts)


def show(section: Section, tally: tables.Tally) -> str:
    """Question, table, picture, and how to get them again."""
    lines = [f"\n## {section.title}\n", wrapped(section.question), section.table(section.found, tally)]
    if section.picture:
        lines.append(f"![{section.picture}](img/{section.name}.png)\n")
    return "\n".join([*lines, wrapped(measured(section.facts)), f"Again: `{section.command}`\n"])


def wrapped(text: str) -> str:
    """A paragraph as wide as those of other pages."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def measured(facts: dict[str, Any] | None) -> str:
    """When, where and with what, in a sentence."""
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
    """Every picture of the page, and what it must say that it was drawn from."""
    return {
        PICTURES / f"{section.name}.png": source_text(section.found)
        for section in SECTIONS
        if section.picture and section.found is not None
    }


def source_text(found: Any) -> str:
    """A name for results."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def draw() -> None:
    """All pictures anew, by the benchmarks that they belong to."""
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
    """Worlds and sizes as the numbers that they were before they became JSON."""
    worlds = {
        int(world): measured | {"sizes": {int(size): row for size, row in measured["sizes"].items()}}
        for world, measured in results["worlds"].items()
    }
    return results | {"worlds": worlds}


def with_source(png: bytes, text: str) -> bytes:
    """The same picture, which says what it was drawn from."""
    body = b"tEXt" + KEYWORD + b"\0" + text.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:HEADER_BYTES] + chunk + png[HEADER_BYTES:]


def source_of(png: bytes) -> str:
    """What a picture says that it was drawn from; empty if it says nothing."""
    begin = HEADER_BYTES + 8 + len(KEYWORD) + 1
    (length,) = struct.unpack(">I", png[HEADER_BYTES : HEADER_BYTES + 4])
    has_source = png[HEADER_BYTES + 4 : begin] == b"tEXt" + KEYWORD + b"\0"
    return png[begin : HEADER_BYTES + 8 + length].decode() if has_source else ""


if __name__ == "__main__":
    PAGE.write_text(render())
    draw()

"""`pccl bench`: measures all-reduces on the user's machines, over the ring that training would use.

Every machine runs this command; together they form a run. This file has the flags and the output; the measurement is in
`bench_peer`.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

import click

from pccl import Communicator
from pccl._core.records import replace
from pccl.errors import MasterLostError, TooFewPeersError
from pccl.options import LANES_MAX

from .options import MasterAddress, exit_codes, one_line_errors, options_with, token_option
from .status_view import count, rate, size, table

if TYPE_CHECKING:
    from .bench_peer import Bench, Lap

RUN = "pccl bench"  # the name of its runs: on the master of a training run, this command is refused, and nobody else
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# The types that numpy has; the first one is the default because most gradients have it.
DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Size(click.ParamType[int]):
    """`4096`, `64MB`, `1GiB`, as bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes; fails with a message that shows the format."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG]i?)?B?", str(value))
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a size; write 4096, 64MB or 1GiB", param, ctx)
        return max(int(float(match[1]) * UNITS[match[2] or ""]), 1)


@click.command(
    epilog="\b\nExample, on each of four machines, with `pccl run-master` on the first:\n"
    "  pccl bench 10.0.0.7:48148 --peers 4 --size 256MB --seconds 30 --pool 8\n\n"
    + exit_codes("too few peers, no master, or interrupted")
)
@click.argument("address", type=MasterAddress(), metavar="HOST:PORT")
@click.option("--peers", type=click.IntRange(2), default=2, show_default=True, metavar="N",
              help="Start when this many peers have joined.")  # fmt: skip
@click.option("--size", "nbytes", type=Size(), default="64MB", show_default=True,
              help="Size of the reduced tensor in bytes: 4096, 64MB, 1GiB.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, metavar="SECONDS",
              help="How long to measure.")  # fmt: skip
@click.option("--pool", type=click.IntRange(1, LANES_MAX), default=4, show_default=True, metavar="N",
              help="Connections to each neighbour.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True,
              help="Type of the elements.")  # fmt: skip
@click.option("--wait", "patience", type=click.FloatRange(0), default=300.0, show_default=True, metavar="SECONDS",
              help="How long to wait for the peers.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object at the end; progress goes to standard error.")  # fmt: skip
@token_option
def bench(
    *,
    address: str,
    peers: int,
    nbytes: int,
    seconds: float,
    pool: int,
    dtype: str,
    patience: float,
    as_json: bool,
    token_file: str | None,
) -> None:
    """Measure all-reduces on your own machines.

    Start a separate master, then this command on every machine; the master of a training run refuses it. It joins the
    run at HOST:PORT, waits for the other
    peers, and reduces a tensor over the ring repeatedly. Peers may die during the measurement; the others report it and
    continue. The largest --peers and --seconds of all peers count; --size and --dtype must be the same on all peers.
    """
    try:
        from .bench_peer import Bench, BenchPlan  # imported here because it needs numpy
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise click.ClickException("pccl bench needs numpy; install it: pip install numpy") from None
    os.environ.pop("PCCL_RUN", None)  # it would name the training run, and has priority
    with one_line_errors(), Communicator(address, 0, pool, options=replace(options_with(token_file), run=RUN)) as peer:
        output = BenchOutput(as_json)
        output.say(f"joining the run at {address}")
        peer.connect()
        measured = Bench(peer, BenchPlan(peers, nbytes, seconds, dtype, patience), output.lap, output.say)
        output.say(f"this is peer {peer.peer_id}; the measurement starts with {count(peers, 'peer')}")
        failure = _run(measured)
        if measured.total.times:
            output.conclude(measured, dtype=dtype, pool=pool, size_bytes=measured.nbytes, failure=failure or None)
    if failure:
        raise click.ClickException(failure)


def _run(measured: Bench) -> str:
    """Measure. Returns the reason if the measurement ended early; the laps until then are still shown."""
    try:
        measured.run()
    except (TooFewPeersError, MasterLostError) as error:
        return error.message
    except KeyboardInterrupt:
        return "interrupted"
    return ""


class BenchOutput:
    """Prints progress lines, and at the end a table or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._began = time.monotonic()
        self._laps: list[dict[str, Any]] = []
        self._nbytes = 0

    def say(self, line: str) -> None:
        """Print one line with the elapsed time."""
        click.echo(f"{time.monotonic() - self._began:6.1f} s  {line}", err=self._as_json)

    def lap(self, lap: Lap, nbytes: int) -> None:
        """Print the numbers of one lap."""
        if lap.times:
            self._laps.append(lap.numbers(nbytes))
            self.say(_line(self._laps[-1]))

    def conclude(self, measured: Bench, **facts: Any) -> None:
        """Print the result of the whole measurement."""
        numbers = {**facts, "failed_reduces": measured.failed, **measured.total.numbers(measured.nbytes)}
        if self._as_json:
            click.echo(json.dumps({**numbers, "laps": self._laps}))
            return
        head = ["peers", "size", "reduces", "failed", "effective", "median", "p99", "tx", "rx"]
        row = [
            *(str(numbers["peers"]), size(measured.nbytes), str(numbers["reduces"]), str(measured.failed)),
            *(rate(numbers["bytes_per_second"]), f"{numbers['median_ms']:g} ms", f"{numbers['p99_ms']:g} ms"),
            *(rate(numbers["tx_bytes_per_second"]), rate(numbers["rx_bytes_per_second"])),
        ]
        click.echo()
        click.echo(table(head, [row]))


def _line(numbers: dict[str, Any]) -> str:
    return (
        f"{count(numbers['peers'], 'peer')}  {rate(numbers['bytes_per_second']):>9} effective"
        f"  median {numbers['median_ms']:.2f} ms  p99 {numbers['p99_ms']:.2f} ms"
        f"  tx {rate(numbers['tx_bytes_per_second'])}  rx {rate(numbers['rx_bytes_per_second'])}"
    )

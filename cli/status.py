"""`pccl status`: shows what a master knows about its run, once or repeatedly, as text or as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from pccl.actors.io.addresses import parse_address
from pccl.client.status_query import query_status
from pccl.errors import MasterConnectionError
from pccl.options import MASTER_PORT

from .options import MasterAddress, exit_codes, one_line_errors, options_with, token_option
from .status_view import render

if TYPE_CHECKING:
    from collections.abc import Callable

CLEAR = "\x1b[H\x1b[J"  # cursor to the upper left corner, then clear the screen


class WatchSeconds(click.FloatRange):
    """Seconds from 0.1 to 3600; without a number, --watch takes the next word for it."""

    def __init__(self) -> None:
        super().__init__(0.1, 3600)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds; fails with a message that shows where the address belongs."""
        try:
            seconds = float(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds; write the address before --watch", param, ctx)
        return float(super().convert(seconds, param, ctx))


@click.command(
    epilog="\b\nExamples:\n  pccl status 10.0.0.7\n  pccl status 10.0.0.7:48148 --watch\n"
    "  pccl status --json | jq .world\n\n" + exit_codes("no answer from a master")
)
@click.argument("address", type=MasterAddress(), metavar="[HOST:PORT]", default=f"127.0.0.1:{MASTER_PORT}")
@click.option("--watch", type=WatchSeconds(), is_flag=False, flag_value="1", metavar="[SECONDS]",
              help="Repeat every second, or this often, until Ctrl-C; waits while there is no master.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object, or one per line with --watch.")
@token_option
def status(address: str, watch: float | None, as_json: bool, token_file: str | None) -> None:
    """Show the peers, rings and votes of a run.

    Asks the master at HOST:PORT (default: this machine) and takes no part in the run: no peer waits for this command,
    and no number counts it. Rates are those of the peers' latest heartbeats.
    """
    with one_line_errors():
        options = options_with(token_file)
        host, port = parse_address(address)
        if watch is None:
            click.echo(_show(query_status(host, port, options), address, as_json))
            return
        try:
            _watch(lambda: query_status(host, port, options), address, watch, as_json)
        except KeyboardInterrupt:
            click.echo()  # the normal end: put the prompt on a new line


def _show(run: dict[str, Any], address: str, as_json: bool) -> str:
    return json.dumps(run) if as_json else render(run, address)


def _watch(ask: Callable[[], dict[str, Any]], address: str, seconds: float, as_json: bool) -> None:
    """Ask until interrupted. While there is no first answer, each reason for that is said once, on standard error."""
    live = sys.stdout.isatty() and not as_json
    answered, said = False, ""
    while True:
        began = time.monotonic()
        try:
            shown = _show(ask(), address, as_json)
            answered = True
        except MasterConnectionError as error:
            shown = json.dumps({"error": error.message}) if as_json else error.message
            if not answered and error.message != said:
                said = error.message
                click.echo(f"waiting for a master at {address}, until Ctrl-C: {said}", err=True)
        if answered:
            click.echo((CLEAR if live else "") + shown + ("" if live or as_json else "\n"))
        time.sleep(max(seconds - (time.monotonic() - began), 0))

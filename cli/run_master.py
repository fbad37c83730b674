"""`pccl run-master`: be the master of a run, in this terminal, until Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import click

from pccl.actors.io.logs import LEVELS, level_of, show
from pccl.master import serve
from pccl.options import MASTER_PORT

from .options import exit_codes, one_line_errors, options_with, token_option

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command(
    "run-master",
    epilog="\b\nExamples:\n  pccl run-master\n  pccl run-master --listen 10.0.0.7:48148 --token-file secret\n\n"
    + exit_codes("it cannot serve"),
)
@click.option("--listen", default=f"0.0.0.0:{MASTER_PORT}", show_default=True, metavar="HOST:PORT",
              help="Address and port that peers connect to. Port 0 takes a free one and prints it.")  # fmt: skip
@token_option
@click.option("--state", "state_file", type=click.Path(dir_okay=False), default="", metavar="FILE",
              help="Keep what groups agreed on in this file. A master that starts again with it goes on with the run, "
                   "and lets groups resume only from that. If it cannot be written at the start, the master does not "
                   "start; if it cannot be written later (a full disk), each time is logged as an error and the run "
                   "goes on.")  # fmt: skip
@click.option("--log-level", type=click.Choice(list(LEVELS), case_sensitive=False), default="INFO",
              envvar="PCCL_LOG_LEVEL", show_default=True, show_envvar=True,
              help="The least important lines that are shown.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Log to standard output, one JSON object per line.")
def run_master(listen: str, token_file: str | None, state_file: str, log_level: str, as_json: bool) -> None:
    """Run the master that peers connect to.

    It orders who is in, in which ring, and what was agreed: one process per run. It moves no tensors, so the smallest
    machine will do; peers must reach its port. Ctrl-C or SIGTERM end it; peers then get MasterLostError and may
    connect to the next one. Every timeout is an environment variable, like PCCL_HEARTBEAT_TIMEOUT=10 in seconds.
    """
    with one_line_errors():
        options = options_with(token_file)
        log, ready = _json_output(level_of(log_level)) if as_json else _log_output(level_of(log_level))
        serve(listen, options, log, ready, state_file)


def _log_output(level: int) -> tuple[Callable[[int, str], None], Callable[[str], None]]:
    show(level)
    logger = logging.getLogger("pccl.master")
    return logger.log, lambda where: logger.info("listening on %s", where)


def _json_output(least: int) -> tuple[Callable[[int, str], None], Callable[[str], None]]:
    def say(**fields: object) -> None:
        try:
            sys.stdout.write(json.dumps({"time": round(time.time(), 6), **fields}) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read this is gone, but the peers are not: the run is worth more than its log.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def log(level: int, line: str) -> None:
        if level >= least:
            say(event="log", level=logging.getLevelName(level), line=line)

    return log, lambda where: say(event="listening", address=where)

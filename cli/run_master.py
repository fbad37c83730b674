"""`pccl run-master`: runs the master of a run in this terminal, until Ctrl-C."""

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
              help="Address and port that peers connect to; a port alone means all addresses. Port 0 chooses a free "
                   "port and prints it.")  # fmt: skip
@token_option
@click.option("--state", "state_file", type=click.Path(dir_okay=False), default="", metavar="FILE",
              help="Save what groups agreed on in this file. A master that is restarted with it continues the run, and "
                   "lets groups resume only from what was saved. If the file cannot be written at the start, the "
                   "master does not start. If it cannot be written later (a full disk), each failure is logged as an "
                   "error and the run continues.")  # fmt: skip
@click.option("--new-run", is_flag=True,
              help="Begin a new run: drop what the state file remembers of runs of all names. Do not use it where the "
                   "master is restarted automatically: every restart would begin a new run.")  # fmt: skip
@click.option("--exit-when-finished", is_flag=True,
              help="End with exit code 0 when all members have called finish(), some seconds after the last peer was "
                   "told so. Without this flag the master continues, and answers late peers.")  # fmt: skip
@click.option("--log-level", type=click.Choice(list(LEVELS), case_sensitive=False), default="INFO",
              envvar="PCCL_LOG_LEVEL", show_default=True, show_envvar=True,
              help="Show lines of this level and above.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Log to standard output, one JSON object per line.")
def run_master(
    *,
    listen: str,
    token_file: str | None,
    state_file: str,
    new_run: bool,
    exit_when_finished: bool,
    log_level: str,
    as_json: bool,
) -> None:
    """Run the master that peers connect to.

    The master decides about members, rings and shared states: one process per run. It moves no tensors, so a small
    machine is enough; peers must reach its port. The first peer of an empty master names the run (Options.run,
    PCCL_RUN); peers of another name are refused. Ctrl-C or SIGTERM ends the master; peers then get MasterLostError and
    may connect to the next one. Every timeout is an environment variable in seconds, such as PCCL_HEARTBEAT_TIMEOUT=10.
    """
    with one_line_errors():
        options = options_with(token_file)
        level = level_of(log_level)
        log, ready = _json_output(level) if as_json else _log_output(level)
        flags = {"new_run": new_run, "exit_when_finished": exit_when_finished}
        serve(listen, options, log, ready, state_file, level=level, **flags)


def _log_output(level: int) -> tuple[Callable[[int, str], None], Callable[[str], None]]:
    show(level)
    logger = logging.getLogger("pccl.master")
    return logger.log, lambda where: logger.info("listening on %s", where)


def _json_output(level_min: int) -> tuple[Callable[[int, str], None], Callable[[str], None]]:
    def write(**fields: object) -> None:
        try:
            sys.stdout.write(json.dumps({"time": round(time.time(), 6), **fields}) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of the log is gone. The run continues without it.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)

    def log(level: int, line: str) -> None:
        if level >= level_min:
            write(event="log", level=logging.getLevelName(level), line=line)

    return log, lambda where: write(event="listening", address=where)

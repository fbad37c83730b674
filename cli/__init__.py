"""The command line, one file per command. A command turns flags into options and one call; it decides nothing.

Exit codes: 0 success, 1 failure (one line on standard error says why), 2 wrong command line, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

# Command -> its module and function. A module is imported only when its command is used: `pccl --help` is fast.
COMMANDS = {
    "run-master": ("run_master", "run_master"),
    "status": ("status", "status"),
    "bench": ("bench", "bench"),
    "demo": ("demo", "demo"),
    "stress": ("stress", "stress"),
}


class LazyGroup(click.Group):
    """Finds commands by name and imports only the one that is used."""

    def list_commands(self, _: click.Context) -> list[str]:
        """The commands in the order in which a new user needs them."""
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        """The command of that name, or None if there is none."""
        if name not in COMMANDS:
            return None
        module, function = COMMANDS[name]
        command: Any = getattr(importlib.import_module(f".{module}", __name__), function)
        return command if isinstance(command, click.Command) else None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Ctrl-C where a command has nothing to say about it ends quietly, as shells expect."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


INTERRUPTED = 130  # 128 and the number of SIGINT

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(
    cls=LazyGroup,
    context_settings=HELP,
    epilog="`pccl COMMAND --help` explains a command, with an example and its exit codes. docs/troubleshooting.md "
    "explains error messages.",
)
@click.version_option(package_name="pccl")
def main() -> None:
    """Fault-tolerant collective communication for training on machines that come and go.

    Run one master; every training process connects to it and finds its peers. These commands run, watch, measure and
    test the library; README.md and docs/ explain it.
    """

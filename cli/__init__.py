"""The command line, one file per command. Flags become options and one call; nothing is decided here.

Exit codes: 0 done, 1 it failed and one line on standard error says why, 2 the command line itself is wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

# Command to the module and the function that is it. Loaded when asked for, so that `pccl --help` is quick.
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
        """The commands in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        """The command of that name, or None."""
        if name not in COMMANDS:
            return None
        module, function = COMMANDS[name]
        command: Any = getattr(importlib.import_module(f".{module}", __name__), function)
        return command if isinstance(command, click.Command) else None


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(
    cls=LazyGroup,
    context_settings=HELP,
    epilog="`pccl COMMAND --help` explains a command, with an example and its exit codes. What error messages mean and "
    "what to do about them: docs/troubleshooting.md.",
)
@click.version_option(package_name="pccl")
def main() -> None:
    """Collective communication for training over machines that come and go.

    Run one master; every training process connects to it and finds its peers. See docs/ and README.md for the library;
    these commands run, watch, measure and test it.
    """

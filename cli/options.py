"""What commands that meet a master share: its address, the run's token, and how a failure is said in one line."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from pccl._core.records import replace
from pccl.actors.io.addresses import format_address, parse_address
from pccl.errors import PCCLError
from pccl.options import MASTER_PORT, Options, token_from_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

token_option: Callable[[Any], Any] = click.option(
    "--token-file",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="One line with the run's secret, the same everywhere. Else PCCL_TOKEN is used.",
)


class MasterAddress(click.ParamType[str]):
    """`HOST:PORT` of a master; the port may be left out if it is the usual one."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text with a port, or a message that shows the form."""
        try:
            host, port = parse_address(str(value), MASTER_PORT)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return format_address(host, port)


def options_with(token_file: str | None) -> Options:
    """The options of the environment, with the secret from that file if one is named."""
    options = Options().overridden()
    return options if token_file is None else replace(options, token=token_from_file(token_file))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What goes wrong in here ends the command with code 1 and one line that says why."""
    try:
        yield
    except PCCLError as error:
        raise click.ClickException(error.message or str(error)) from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def exit_codes(failure: str) -> str:
    """The end of a command's help."""
    return f"Exit codes: 0 done, 1 {failure} (one line on standard error says why), 2 wrong command line."

"""What commands that connect to a master share: its address, the token, and errors as one line."""

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
    help="File with the run's token in one line, the same on all machines. Default: PCCL_TOKEN.",
)


class MasterAddress(click.ParamType[str]):
    """`HOST:PORT` of a master; without a port, the default port."""

    name = "HOST:PORT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address with a port; fails with a message that shows the format."""
        try:
            host, port = parse_address(str(value), MASTER_PORT)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return format_address(host, port)


def options_with(token_file: str | None) -> Options:
    """The options of the environment, with the token of `token_file` if there is one."""
    options = Options().overridden()
    return options if token_file is None else replace(options, token=token_from_file(token_file))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors of the library into an exit with code 1 and one line that says why."""
    try:
        yield
    except PCCLError as error:
        raise click.ClickException(error.message or str(error)) from None
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def exit_codes(failure: str) -> str:
    """The last lines of a command's help; `failure` says what exit code 1 means."""
    return f"Exit codes: 0 success, 1 {failure} (one line on standard error says why), 2 wrong command line."

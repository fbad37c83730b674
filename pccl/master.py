"""The master as users start it: `MasterNode` in a script, `python -m pccl.master` or `pccl run-master` in a terminal.

The master of a script is a separate process, so that the work of the script, or its GIL, delays no votes. In a terminal
the master is the command's own process. In both cases `MasterActor` serves.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Self

from pccl._core.system.process import set_process_name
from pccl.actors.io.addresses import format_address, parse_listen_address
from pccl.actors.io.fork import mailbox_pair
from pccl.actors.io.listener import bind
from pccl.actors.io.logs import level_of, show
from pccl.actors.io.spawn import ActorProcess
from pccl.actors.master.master_actor import (
    BEGIN_NEW,
    EXIT_WHEN_FINISHED,
    READY,
    STATE_FILE,
    MasterActor,
    open_state_file,
)

from .errors import UsageError
from .options import MASTER_PORT, Options
from .values import Result

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

READY_TIMEOUT = 10.0  # a master starts in a tenth of a second; a busy machine takes longer
STOP_TIMEOUT = 5.0  # a master that was told to stop has nothing to wait for


class MasterNode:
    """A master in the background of a script: `run()`, then `interrupt()`, or let the script's end wait for it.

    With a `state_file`, a master that starts again with the same file continues the same run: its groups can resume
    only from their agreed state. If the file cannot be written later, the run goes on and an error is logged.
    `new_run` drops what the file remembers. `exit_when_finished` ends the master some seconds after all members have
    called `finish()`.
    """

    def __init__(
        self,
        listen_address: str = f"0.0.0.0:{MASTER_PORT}",
        *,
        options: Options | None = None,
        state_file: str | os.PathLike[str] | None = None,
        new_run: bool = False,
        exit_when_finished: bool = False,
    ) -> None:
        self._actor: ActorProcess | None = None  # first, so that __del__ works after any error below
        self._mailbox: socket.socket | None = None
        self._owner = os.getpid()
        self._host, self._port = parse_listen_address(listen_address)
        self._options = (options or Options()).overridden()
        self._state_file = os.path.abspath(state_file) if state_file is not None else ""
        self._flags = [BEGIN_NEW] * new_run + [EXIT_WHEN_FINISHED] * exit_when_finished

    @property
    def address(self) -> str:
        """The address for peers; if port 0 was requested, it has the chosen port."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return format_address(host, self._port)

    def run(self) -> None:
        """Bind the port and serve in the background. Raises UsageError if the port or the state file cannot be used."""
        if self._actor is not None:
            raise UsageError(Result.INVALID_USAGE, "run", f"this master already runs at {self.address}")
        listener = _bind_or_explain(self._host, self._port)
        self._mailbox, theirs = mailbox_pair()
        with listener, theirs:
            self._port = listener.getsockname()[1]
            self._mailbox.send(self._options.encode().encode())
            self._mailbox.send(_version().encode())
            self._mailbox.send(STATE_FILE + os.fsencode(self._state_file))
            self._mailbox.send(b",".join(self._flags) or b"none")
            fds = (listener.fileno(), theirs.fileno())
            self._actor = ActorProcess("pccl.actors.master.master_actor", fds, fds)
        self._mailbox.settimeout(READY_TIMEOUT)
        try:
            answer = self._mailbox.recv(1 << 16)
        except TimeoutError:
            answer = b""
        if answer and answer != READY:
            self.interrupt()
            raise UsageError(Result.INVALID_USAGE, "run", answer.decode())
        if not answer:
            end = self._actor.describe_end()
            self.interrupt()
            raise UsageError(Result.INTERNAL_ERROR, "run", f"the master did not start: its process {end}")

    def interrupt(self) -> None:
        """Stop the master; its port is free when this returns. A second call does nothing."""
        actor, self._actor = self._actor, None
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()
        if actor is None:
            return
        if self._owner != os.getpid():
            actor.disown()
        elif not actor.wait(STOP_TIMEOUT):
            actor.kill()

    def __enter__(self) -> Self:
        if self._actor is None:
            self.run()
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupt()

    def __del__(self) -> None:
        # `run()` may be the last line of a script: wait for a master that still runs when its object is deleted.
        if self._actor is not None and self._owner == os.getpid():
            try:
                self._actor.wait(None)
            except KeyboardInterrupt:
                pass  # the master got the same interrupt
        self.interrupt()


def _bind_or_explain(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError with one sentence that says why there is none."""
    where = format_address(host, port)
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"{where} is taken by another process; stop it or choose another port"
        elif error.errno == errno.EACCES:
            what = f"{where}: not allowed to bind this port; choose one above 1023"
        else:
            what = f"cannot listen on {where}: {error.strerror or error}"
        raise UsageError(Result.INVALID_USAGE, "run", what) from None


def _version() -> str:
    """The version of the package, for the status report."""
    from importlib.metadata import PackageNotFoundError, version  # here, because `import pccl` must stay cheap

    try:
        return version("pccl")
    except PackageNotFoundError:
        return "unknown"  # it runs from its sources and was never installed


def serve(
    listen_address: str,
    options: Options,
    log: Callable[[int, str], None],
    on_ready: Callable[[str], None],
    state_file: str = "",
    *,
    new_run: bool = False,
    exit_when_finished: bool = False,
    level: int | None = None,
) -> None:
    """Serve as the master in this process until SIGINT or SIGTERM, or the end of the run; ignored signals stay ignored.

    `level` is the lowest level that `log` shows; None: that of the library's logger.

    Raises UsageError if the port cannot be bound, ValueError if the state file cannot be used.
    """
    host, port = parse_listen_address(listen_address, MASTER_PORT)
    listener = _bind_or_explain(host, port)
    try:
        file = open_state_file(state_file)
        if level is None:
            level = logging.getLogger("pccl.master").getEffectiveLevel()
        actor = MasterActor(
            listener,
            options.token.encode(),
            options,
            log,
            version=_version(),
            level=level,
            state_file=file,
            new_run=new_run,
            exit_when_finished=exit_when_finished,
        )
    except ValueError:
        listener.close()
        raise
    # A job in the background is started with SIGINT ignored: a Ctrl-C at its terminal is meant for another process.
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: actor.stop()) for number in numbers}
    set_process_name("pccl-master")
    try:
        on_ready(format_address(host, actor.port))
        actor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """`python -m pccl.master [--listen-address HOST:PORT]` and `pccl_master`."""
    import argparse  # here, because `import pccl` must stay cheap

    parser = argparse.ArgumentParser(
        prog="pccl_master",
        description="Run a pccl master until Ctrl-C. `pccl run-master` does the same with more options.",
        epilog="The run's token is read from PCCL_TOKEN, the log level from PCCL_LOG_LEVEL.",
    )
    parser.add_argument("--listen-address", default=f"0.0.0.0:{MASTER_PORT}", metavar="HOST:PORT")
    parsed = parser.parse_args(arguments)
    try:
        show(level_of(os.environ.get("PCCL_LOG_LEVEL", "INFO")))
        options = Options().overridden()
        logger = logging.getLogger("pccl.master")
        serve(parsed.listen_address, options, logger.log, lambda where: logger.info("listening on %s", where))
    except (UsageError, ValueError) as error:
        sys.stderr.write(f"pccl_master: {error.message if isinstance(error, UsageError) else error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Query a master for the status of its run without joining it: one connection, one question, one answer.

`_core.master.status_report` says what the answer holds. The client proves that it holds the run's token, as peers do,
and checks that the master holds it too. Nothing here changes the run.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pccl._core.protocol.hellos import AskStatus
from pccl._core.protocol.messages import REPORT_PAGES_MAX, TO_OPERATOR, Report
from pccl._core.system.futex import monotonic_ns
from pccl.actors.io.addresses import format_address, resolve
from pccl.actors.io.dialler import Dialler
from pccl.actors.io.loop import Loop
from pccl.errors import MasterConnectionError
from pccl.options import STATUS_REPORT_TIME, nanoseconds
from pccl.values import Result

if TYPE_CHECKING:
    from pccl.actors.io.connection import Connection
    from pccl.options import Options


def query_status(host: str, port: int, options: Options) -> dict[str, Any]:
    """Return the master's status report, a dict that JSON can hold. Raises MasterConnectionError, which says why."""
    where = format_address(host, port)
    try:
        addresses = resolve(host, port)
    except OSError as error:
        message = f"cannot resolve the master's name {host!r}: {error.strerror or error}"
        raise MasterConnectionError(Result.MASTER_CONNECTION_FAILED, "query_status", message) from None
    question = _Question(addresses, options)
    try:
        text = question.ask()
        answer: dict[str, Any] = json.loads(text)
    except (ConnectionError, ValueError) as error:
        message = f"no answer from the master at {where}: {error}"
        raise MasterConnectionError(Result.MASTER_CONNECTION_FAILED, "query_status", message) from None
    finally:
        question.close()
    return answer


class _Question:
    """One query, from the dial to the last page of the report."""

    def __init__(self, addresses: list[tuple[str, int]], options: Options) -> None:
        self._loop = Loop()
        self._connection: Connection | None = None
        self._pages: list[bytes] = []
        self._failure = ""
        # The handshake has its own bound at the master; the answer has another one.
        dial_ns = nanoseconds(options.connect_timeout + options.handshake_timeout)
        self._deadline_ns = monotonic_ns() + dial_ns + nanoseconds(STATUS_REPORT_TIME)
        self._dialler = Dialler(
            self._loop,
            addresses,
            token=options.token.encode(),
            hello=AskStatus,
            on_up=self._up,
            on_down=lambda reason, _: self._end(reason),
            timeout_ns=dial_ns,
        )

    def ask(self) -> bytes:
        """Return the whole answer. Raises ConnectionError."""
        self._loop.run(lambda: self._deadline_ns, lambda _: self._end("its report did not come in time"))
        if self._failure:
            raise ConnectionError(self._failure)
        return b"".join(self._pages)

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._dialler.cancel()
        if self._connection is not None:
            self._connection.close()
        self._loop.close()

    def _up(self, connection: Connection) -> None:
        self._connection = connection
        connection.become(
            TO_OPERATOR, self._heard, lambda _, __, reason: self._end(f"its report was cut off: {reason}")
        )

    def _heard(self, _: int, page: Report) -> None:
        if page.page != len(self._pages) or not page.page < page.pages <= REPORT_PAGES_MAX:
            self._end(f"page {page.page} of {page.pages} of its report came out of order")
            return
        self._pages.append(page.text)
        if page.page + 1 == page.pages:
            self._end("")

    def _end(self, failure: str) -> None:
        self._failure = failure
        self._loop.stop()

"""A fetch that takes long tells how far it is; a source, or a transfer that is over, tells nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pccl._core.peer.progress import Progress
from pccl._core.protocol.events import INFO, WARNING
from pccl.actors.peer.transfers import Transfers

SECOND = 1_000_000_000


def test_a_long_fetch_is_reported() -> None:
    """Goal: information while bytes arrive, a warning when none do, and ever more rarely."""
    told: list[tuple[int, str]] = []
    fetching: Any = SimpleNamespace(round=1, fetching=object(), over=False, rx_bytes=0, sources={4: None, 2: None})
    serving: Any = SimpleNamespace(round=2, fetching=None, over=False, rx_bytes=0, sources={})
    transfers = Transfers.__new__(Transfers)
    transfers._rounds = {1: fetching, 2: serving}
    transfers._slow = Progress()
    transfers._tell = lambda level, line: told.append((level, line))
    transfers._identity = lambda: SimpleNamespace(report_ns=5 * SECOND)  # type: ignore[assignment, return-value]

    for second in range(25):
        fetching.rx_bytes = min(second, 12) * 1_000_000
        transfers.report(second * SECOND)

    assert told == [
        (INFO, "sync_shared_state fetches from peers 2, 4 for 5 s: 5.0 MB so far"),
        (INFO, "sync_shared_state fetches from peers 2, 4 for 10 s: 10.0 MB so far"),
        (WARNING, "sync_shared_state fetches from peers 2, 4 for 20 s: 12.0 MB so far, and nothing for 8 s"),
    ]
    fetching.over = True
    transfers.report(1000 * SECOND)
    assert len(told) == 3

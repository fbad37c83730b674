"""Rules for every test: the folder of a test is its tier, and process tests must leave nothing behind.

No fixture here starts a process; fixtures of a tier are in the folder of that tier.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from .leaks import Footprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
TIERS = ("unit", "sim", "process")

# Files whose tests share a slow fixture: a compiled wheel, four trained models. One worker runs such a file as a whole.
UNDIVIDED = ("test_distribution.py", "test_examples.py")

# What a shell ignores for a job in the background, and what nohup ignores.
INHERITED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def pytest_configure() -> None:
    """Prepare this process before any test is collected."""
    # A bound of seconds for one example says how busy the machine is, and nothing about the code.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")
    restore_signals()


def restore_signals() -> None:
    """Start every process of a test with default signal handling, however the tests themselves were started.

    A new program inherits ignored signals, but not handlers. So a handler that does nothing keeps the signal without
    effect in this process, and its children get the default.
    """
    for number in INHERITED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the exit status of every child is lost


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier of its folder."""
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        tier = item.path.relative_to(TESTS).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path}: tests belong in one of {', '.join(TIERS)}")
        item.add_marker(tier)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give tests to workers one by one; give each undivided file to one worker as a whole, before all others."""
    # xdist's own groups append a name to the test id, which pytest no longer allows.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(UNDIVIDED) else nodeid

    return Scheduler(config, log)


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a process test that leaves a process, a descriptor or a segment behind."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    with Footprint.watch() as footprint:
        yield
        leaks = footprint.leaks()
    if leaks:
        pytest.fail("left behind after the test:\n  " + "\n  ".join(leaks), pytrace=False)

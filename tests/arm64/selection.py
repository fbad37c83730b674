"""The plugin of the emulated pytest: skips the tests in left_out.toml, and records the outcome of all others.

An entry of left_out.toml is a file, a test, or a test with its parameters; a test without parameters means all of its
cases. An entry that matches no test is an error, and so is a file left out for an import that it does not contain.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import ROOT

LIST = Path(__file__).parent / "left_out.toml"


def read_list() -> list[dict[str, Any]]:
    """Return the groups of left_out.toml, each with a reason and its tests."""
    groups: list[dict[str, Any]] = tomllib.loads(LIST.read_text())["left_out"]
    entries = [entry for group in groups for entry in group["tests"]]
    if len(set(entries)) < len(entries):
        raise pytest.UsageError(f"{LIST}: listed twice: {[e for e, times in Counter(entries).items() if times > 1]}")
    return groups


def imports_at_the_top(path: Path, module: str) -> bool:
    """Return whether a file imports the module at its top level."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name == module or name.startswith(f"{module}.") for name in names):
            return True
    return False


def tests_in(path: Path) -> int:
    """Return how many test functions a file defines; it is parsed, because it cannot be imported."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes)


class Selection:
    """One run of pytest: which entries matched, and the outcome of each test."""

    def __init__(self, target: str, outcome: Path) -> None:
        self._target = target
        self._outcome = outcome
        self._groups = read_list()
        self._reasons = {entry: group["reason"] for group in self._groups for entry in group["tests"]}
        self._matched: set[str] = set()
        self._left_out: dict[str, str] = {}
        self._results: dict[str, dict[str, Any]] = {"passed": {}, "failed": {}, "skipped": {}}
        self._stale: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out whole files without importing them."""
        name = str(collection_path.relative_to(ROOT))
        if name not in self._reasons or not name.startswith(self._target):
            return None
        self._matched.add(name)
        self._left_out[f"{name} ({tests_in(collection_path)} tests)"] = self._reasons[name]
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out single tests and cases; then find entries below the target that matched nothing."""
        left_out = []
        for item in items:
            entry = next((name for name in (item.nodeid, item.nodeid.split("[")[0]) if name in self._reasons), None)
            if entry is not None:
                self._matched.add(entry)
                self._left_out[item.nodeid] = self._reasons[entry]
                left_out.append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self._left_out]
        self._find_stale()

    def _find_stale(self) -> None:
        for group in self._groups:
            for entry in group["tests"]:
                if not entry.startswith(self._target):
                    continue
                if entry not in self._matched:
                    self._stale.append(f"{entry}: there is no such test")
                elif "imports" in group and not imports_at_the_top(ROOT / entry, group["imports"]):
                    self._stale.append(f"{entry}: it no longer imports {group['imports']}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome; a test passes if all its phases pass."""
        if report.failed:
            self._results["failed"][report.nodeid] = report.when
            self._results["passed"].pop(report.nodeid, None)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self._results["skipped"][report.nodeid] = reason
        elif report.when == "call":
            self._results["passed"][report.nodeid] = round(report.duration, 3)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be imported as a failure."""
        if report.failed:
            self._results["failed"][report.nodeid] = "collection"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the outcome for __main__; an entry without a test fails the run."""
        found = {**self._results, "left_out": self._left_out, "stale": self._stale}
        self._outcome.write_text(json.dumps(found, indent=1))
        if self._stale:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show stale entries in pytest's summary."""
        for line in self._stale:
            terminalreporter.write_line(f"ERROR {LIST.relative_to(ROOT)}: {line}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file of the outcome."""
    parser.addoption("--outcome", type=Path, required=True, help="JSON file for the outcome of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the selection, and switch off hypothesis's time limits, because emulated code is slow."""
    hypothesis.settings.register_profile("emulated", deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.load_profile("emulated")
    config.pluginmanager.register(Selection(config.args[0], config.getoption("--outcome")))

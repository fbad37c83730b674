"""`pccl demo` as a new user sees it: it ends soon, with success and equal bits; or it names the missing package."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import ROOT, Script, eventually

PATIENCE = 120.0  # seconds: what the demo promises at most


@pytest.mark.timeout(200)
def test_the_demo_survives_a_killed_peer_and_a_newcomer(tmp_path: Path) -> None:
    """Goal: its last line says that bits are equal and where the curve is; the peers learned something on the way."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves" / "loss.png"
    command = (sys.executable, "-m", "pccl.cli", "demo", "--peers", 3, "--steps", 4, "--plot", picture)
    with Script.command(*command) as script:
        last = script.expect("all 3 peers", PATIENCE)
        assert script.end() == 0, script.errors()

    assert re.match(r"hold bit-identical parameters \(digest [0-9a-f]{16}\); loss curve: ", last)
    assert picture.read_bytes().startswith(b"\x89PNG")
    story = "\n".join(script.lines)
    assert re.search(r"kill -9 \d+: peer B is gone", story)
    assert "peer D received the state" in story
    assert len(re.findall(r"^[ACD] .* done$", story, re.MULTILINE)) == 3


def processes_of(session: int) -> list[str]:
    """The commands of all processes that were started in this session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in brackets: state, parent, group, session.
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["listens on", "peer A starts", "peer D starts", "orders a ring of 4"])
def test_an_interrupted_demo_is_quiet(when: str, number: signal.Signals) -> None:
    """Goal: during set-up, while peers start, and later: no traceback, the usual exit code, no process left."""
    with Script.command(sys.executable, "-u", "-m", "pccl.cli", "demo") as script:
        eventually(lambda: when in script.expect(""), "it has come that far")
        script.signal_group(number)
        ended = script.end()
        assert script.errors() == ""
        assert ended == 128 + number
        assert processes_of(script.pid) == []


WITHOUT = """
import sys
sys.modules[{missing!r}] = None
from pathlib import Path
{code}
"""


def without(missing: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that lacks a package."""
    program = WITHOUT.format(missing=missing, code=code)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_without_numpy_the_demo_says_how_to_get_it() -> None:
    """Goal: exit code 1 and one line."""
    done = without("numpy", "from pccl.cli import main; main(['demo'])")

    assert done.returncode == 1
    assert done.stderr == "Error: pccl demo needs numpy; install it: pip install numpy\n"


def test_without_matplotlib_the_demo_says_how_to_get_the_curve() -> None:
    """Goal: the demo itself does not need it."""
    done = without("matplotlib", "from pccl.cli.demo_view import plot; print(plot([], Path('x.png'), {}))")

    assert done.stdout.startswith("no loss curve: matplotlib is not installed; pip install 'pccl[plots]'")

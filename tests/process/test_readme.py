"""The README's loop, run as printed but for the port: three of them, one is killed, another joins."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from pathlib import Path

from .helpers import Script, eventually, running_master

README = Path(__file__).parents[2] / "README.md"


def test_the_loop_in_the_readme_survives_a_killed_peer() -> None:
    """Goal: what newcomers copy works, and every peer reduces with the same world after each change."""
    (loop,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "127.0.0.1:48148" in loop
    with running_master() as master, ExitStack() as stack:
        code = loop.replace("127.0.0.1:48148", master.address)

        def start() -> Script:
            return stack.enter_context(Script(code, PYTHONUNBUFFERED="1"))

        peers = [start() for _ in range(3)]
        for peer in peers:
            eventually(lambda peer=peer: peer.expect("step").endswith("3 peers"), "three peers see each other")
        peers.pop().signal(signal.SIGKILL)
        for peer in peers:
            eventually(lambda peer=peer: peer.expect("step").endswith("2 peers"), "the survivors go on")
        peers.append(start())
        for peer in peers:
            eventually(lambda peer=peer: peer.expect("step").endswith("3 peers"), "the newcomer is in")

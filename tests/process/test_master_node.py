"""A master in the background of a script: `MasterNode` from run() to its end, wanted or not."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from pccl import Communicator, MasterNode, Result
from pccl.errors import UsageError
from tests import has_ipv6

from .helpers import QUICK, Script, comm, eventually, free_port, gone, is_asleep, master_pid, running_master


def can_connect(address: str) -> bool:
    """Whether the master accepts a peer."""
    with Communicator(address, options=QUICK) as peer:
        peer.connect(n_attempts=1)
    return True


def is_free(address: str) -> bool:
    """Whether the port is free."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))
        probe.listen()
    return True


# ---------------------------------------------------------------------------------------------- the contract


def test_run_returns_and_serves() -> None:
    """Goal: when run() returns, a peer can connect at once; `address` shows the port that was chosen for port 0."""
    master = MasterNode("127.0.0.1:0", options=QUICK)
    assert master.address == "127.0.0.1:0"
    master.run()
    try:
        assert not master.address.endswith(":0")
        assert can_connect(master.address)
    finally:
        master.interrupt()


def test_a_wildcard_is_shown_as_an_address_that_can_be_dialled() -> None:
    """Goal: `address` of a master that listens everywhere works on this host."""
    with MasterNode("0.0.0.0:0", options=QUICK) as master:
        assert master.address.startswith("127.0.0.1:")
        assert can_connect(master.address)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address ::1")
def test_ipv6() -> None:
    """Goal: the same in the other family, in brackets."""
    with MasterNode("[::1]:0", options=QUICK) as master:
        assert master.address.startswith("[::1]:")
        assert can_connect(master.address)


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    """Goal: INVALID_USAGE that names the address; the master that has the port is not disturbed."""
    with running_master() as first:
        with pytest.raises(UsageError, match=f"{first.address} is taken") as caught:
            MasterNode(first.address, options=QUICK).run()

        assert caught.value.result is Result.INVALID_USAGE
        assert can_connect(first.address)


def test_a_master_with_a_state_file_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """Goal: the run's name survives a SIGKILL; a file in use, or a damaged one, is refused with its name."""
    path = tmp_path / "master.json"
    with MasterNode("127.0.0.1:0", options=QUICK, state_file=path) as first:
        run = json.loads(path.read_text())["state"]["run"]
        with pytest.raises(UsageError, match=f"{path} is in use by another master") as caught:
            MasterNode("127.0.0.1:0", options=QUICK, state_file=str(path)).run()
        assert caught.value.result is Result.INVALID_USAGE
        os.kill(master_pid(first), signal.SIGKILL)
    with MasterNode("127.0.0.1:0", options=QUICK, state_file=path) as second:
        assert can_connect(second.address)
        assert json.loads(path.read_text())["state"]["run"] == run

    path.write_text("{")
    with pytest.raises(UsageError, match=f"{path} is damaged or cut off"):
        MasterNode("127.0.0.1:0", options=QUICK, state_file=path).run()


def test_a_running_master_does_not_run_twice() -> None:
    """Goal: a second run() is refused and the first goes on."""
    with running_master() as master:
        with pytest.raises(UsageError, match="already runs") as caught:
            master.run()

        assert caught.value.result is Result.INVALID_USAGE
        assert can_connect(master.address)


def test_an_unknown_host_is_refused() -> None:
    """Goal: a name that does not resolve is one sentence, not a traceback from a resolver."""
    with pytest.raises(UsageError, match="cannot listen on no.such.host.invalid:1") as caught:
        MasterNode("no.such.host.invalid:1", options=QUICK).run()

    assert caught.value.result is Result.INVALID_USAGE


@pytest.mark.parametrize("address", ["127.0.0.1:http", "127.0.0.1:70000", "::1:80", ""])
def test_a_bad_address_is_refused_before_anything_is_started(address: str) -> None:
    """Goal: ValueError from the constructor, with the right way to write it."""
    with pytest.raises(ValueError, match="address"):
        MasterNode(address)


def test_interrupt_frees_the_port_and_may_be_repeated() -> None:
    """Goal: the port is free when interrupt returns, peers or not, and run() may follow."""
    master = MasterNode(f"127.0.0.1:{free_port()}", options=QUICK)
    master.interrupt()
    master.run()
    address = master.address
    with Communicator(address, options=QUICK) as peer:
        peer.connect()
        master.interrupt()
        assert is_free(address)
    master.interrupt()
    master.run()

    assert master.address == address
    assert can_connect(address)
    master.interrupt()
    assert is_free(address)


def fail_beside_a_master(seen: dict[str, int]) -> None:
    """Raise an error while a master runs; leave its port and process id in `seen`."""
    with running_master(port=free_port()) as master:
        seen[master.address] = master_pid(master)
        raise ZeroDivisionError


def test_with_ends_it_also_after_an_error() -> None:
    """Goal: the master ends with the block, and the error propagates."""
    seen: dict[str, int] = {}
    with pytest.raises(ZeroDivisionError):
        fail_beside_a_master(seen)

    ((address, pid),) = seen.items()
    assert is_free(address)
    assert gone(pid)


# ---------------------------------------------------------------------------------------------- the end of the script

SCRIPT = """
    master = MasterNode("127.0.0.1:0", options=QUICK)
    master.run()
    say("address", master.address)
    say("pid", master._actor.pid)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ending", ["", "    del master\n    say('deleted')\n"])
def test_a_script_that_ends_waits_for_its_master(ending: str, number: signal.Signals) -> None:
    """Goal: run() may be the last line of a script; only a signal ends it, and then the port is free."""
    with Script(SCRIPT + ending) as script:
        address, pid = script.expect("address"), int(script.expect("pid"))
        assert can_connect(address)
        assert can_connect(address)
        eventually(lambda: is_asleep(script.pid), "the script waits for its master")
        script.signal(number)
        status = script.end()

        assert status in (0, -number)
        eventually(lambda: gone(pid), "the master has ended")
        assert is_free(address)
        assert "Traceback" not in script.errors()
        if ending and number == signal.SIGINT:
            script.expect("deleted")


def test_ctrl_c_in_a_terminal_ends_both() -> None:
    """Goal: the signal reaches script and master together, as a terminal sends it, without a traceback of ours."""
    with Script(SCRIPT) as script:
        script.expect("address")
        pid = int(script.expect("pid"))
        eventually(lambda: is_asleep(script.pid), "the script waits for its master")
        script.signal_group(signal.SIGINT)

        assert script.end() in (0, -signal.SIGINT)
        eventually(lambda: gone(pid), "the master has ended")
        assert "Traceback" not in script.errors()


def test_a_killed_script_takes_its_master_along() -> None:
    """Goal: no master without a script, however the script ended."""
    with Script(SCRIPT + "    signal.pause()\n") as script:
        script.expect("address")
        pid = int(script.expect("pid"))
        assert comm(pid) == "pccl-master"
        script.signal(signal.SIGKILL)

        eventually(lambda: gone(pid), "the master has ended")


def test_a_master_that_died_does_not_hold_up_its_script() -> None:
    """Goal: a `del` that waits for a killed master returns."""
    with Script(SCRIPT + "    del master\n    say('deleted')\n") as script:
        script.expect("address")
        os.kill(int(script.expect("pid")), signal.SIGKILL)

        script.expect("deleted")
        assert script.end() == 0


def test_a_forked_child_does_not_end_the_master() -> None:
    """Goal: a child that drops its copy neither waits for the master nor stops it."""
    code = f"""
        {SCRIPT.strip()}
        child = os.fork()
        if not child:
            del master
            sys.exit(0)
        say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        sys.stdin.readline()
        master.interrupt()
    """
    with Script(code.replace("\n    ", "\n").replace("\n    ", "\n")) as script:
        address = script.expect("address")
        assert script.expect("child") == "0"
        assert can_connect(address)
        script.say()
        assert script.end() == 0

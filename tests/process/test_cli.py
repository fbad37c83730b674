"""The master from a terminal: `python -m pccl.master`, `pccl_master` and `pccl run-master`, and how they end.

Exit codes: 0 after SIGINT or SIGTERM, 1 when it cannot serve and one line says why, 2 for a wrong command line.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pccl import Communicator
from pccl.errors import MasterConnectionError

from .helpers import BOUND, QUICK, ROOT, Script, comm, eventually, quick, running_master

SCRIPTS = Path(sys.executable).parent
COMMANDS = {
    "python -m pccl.master": ([sys.executable, "-m", "pccl.master"], "--listen-address"),
    "pccl_master": ([SCRIPTS / "pccl_master"], "--listen-address"),
    "pccl run-master": ([SCRIPTS / "pccl", "run-master"], "--listen"),
}


def master_command(name: str, address: str = "127.0.0.1:0", *more: object, **environment: str) -> Script:
    """One of the three ways to start a master."""
    command, flag = COMMANDS[name]
    return Script.command(*command, flag, address, *more, **environment)


def address_of(script: Script) -> str:
    """Wait until the master logs that it listens, and return its address."""
    line = eventually(
        lambda: [line for line in script.errors().splitlines() if "listening on" in line], "it says that it listens"
    )
    return line[0].rpartition(" ")[2]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=BOUND, check=False)


def connect(address: str, token: str = "") -> None:
    """Become a member and leave."""
    with Communicator(address, options=quick(token=token)) as peer:
        peer.connect(n_attempts=1)


# ---------------------------------------------------------------------------------------------- serving and ending


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_master_serves_until_it_is_told_to_end(name: str, number: signal.Signals) -> None:
    """Goal: it logs its address, accepts a peer, and exits with 0 and without a traceback."""
    with master_command(name) as script:
        address = address_of(script)
        assert comm(script.pid) == "pccl-master"
        with Communicator(address, options=QUICK) as peer:
            peer.connect()
            script.signal(number)
            assert script.end() == 0

        assert "Traceback" not in script.errors()
        assert "registered" in script.errors()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_master_in_the_background_leaves_ctrl_c_to_others(name: str) -> None:
    """Goal: where SIGINT was ignored from the start it stays so; SIGTERM is the way to end such a master."""
    command, flag = COMMANDS[name]
    deaf = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    with Script.command(*deaf, *command, flag, "127.0.0.1:0") as script:
        address = address_of(script)
        script.signal(signal.SIGINT)
        connect(address)
        script.signal(signal.SIGTERM)
        assert script.end() == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_taken_port_is_one_clear_line(name: str) -> None:
    """Goal: exit code 1, and one line on standard error that names the address and the remedy."""
    with running_master() as first, master_command(name, first.address) as script:
        assert script.end() == 1

        (line,) = script.errors().splitlines()
        assert f"{first.address} is taken by another process" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_address_is_one_clear_line(name: str) -> None:
    """Goal: a wrong address is explained, not shown as a traceback."""
    with master_command(name, "127.0.0.1:http") as script:
        assert script.end() == 1

        (line,) = script.errors().splitlines()
        assert "'127.0.0.1:http' must be host:port" in line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_port_alone_means_all_addresses(name: str) -> None:
    """Goal: `--listen 47777` listens on that port, instead of looking for a host of that name."""
    with master_command(name, "0") as script:
        host, _, port = address_of(script).partition(":")
        connect(f"127.0.0.1:{port}")

    assert host == "0.0.0.0"


@pytest.mark.parametrize("name", ["status", "bench"])
def test_a_master_without_a_host_is_one_clear_line(name: str) -> None:
    """Goal: a peer needs the host of the master: a port alone is a wrong command line that says so."""
    ended = run(SCRIPTS / "pccl", name, "47777")

    assert ended.returncode == 2
    assert "address '47777' is only a port; write the host before it, like 10.0.0.7:47777" in ended.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_option_in_the_environment_is_one_clear_line(name: str) -> None:
    """Goal: with PCCL_HEARTBEAT_TIMEOUT=soon the message says that this is not a number."""
    with master_command(name, PCCL_HEARTBEAT_TIMEOUT="soon") as script:
        assert script.end() == 1

        (line,) = script.errors().splitlines()
        assert "PCCL_HEARTBEAT_TIMEOUT must be a number, not 'soon'" in line


@pytest.mark.parametrize("level", ["WARN", "NONE"])
def test_a_quiet_master_is_quiet(level: str) -> None:
    """Goal: --log-level applies to all log lines, also to the one with the address."""
    with master_command("pccl run-master", "127.0.0.1:0", "--log-level", level) as script:
        eventually(lambda: comm(script.pid) == "pccl-master", "it serves")
        script.signal(signal.SIGTERM)

        assert script.end() == 0
        assert script.errors() == ""


# ---------------------------------------------------------------------------------------------- JSON


def test_json_is_one_object_per_line() -> None:
    """Goal: a program that starts a master reads the address from the first line, and events after it."""
    with master_command("pccl run-master", "127.0.0.1:0", "--json") as script:
        first = json.loads("{" + script.expect("{"))
        assert first["event"] == "listening"
        connect(first["address"])
        log = json.loads("{" + script.expect("{"))
        script.signal(signal.SIGTERM)

        assert script.end() == 0
        assert log["event"] == "log"
        assert log["level"] == "INFO"
        assert log["line"].startswith("peer=1 registered")
        assert script.errors() == ""


def test_json_to_a_reader_that_went_away() -> None:
    """Goal: a closed pipe on standard output does not end the master: the run matters more than its log."""
    with master_command("pccl run-master", "127.0.0.1:0", "--json") as script:
        address = json.loads("{" + script.expect("{"))["address"]
        script.process.stdout.close()  # type: ignore[union-attr]
        connect(address)
        connect(address)
        script.signal(signal.SIGTERM)

        assert script.end() == 0
        assert "Traceback" not in script.errors()


# ---------------------------------------------------------------------------------------------- token


def test_a_token_file_guards_the_run(tmp_path: Path) -> None:
    """Goal: the line in the file, without the line end, is the token; peers without it are refused."""
    secret = tmp_path / "token"
    secret.write_text("open sesame\n")
    with master_command("pccl run-master", "127.0.0.1:0", "--token-file", secret) as script:
        address = address_of(script)
        connect(address, token="open sesame")
        with pytest.raises(MasterConnectionError, match="token"):
            connect(address)

        script.signal(signal.SIGTERM)
        assert script.end() == 0
        assert "open sesame" not in script.errors()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file"), ("", "one line of 1 to 512 bytes"), ("two\nlines\n", "one line"), ("x" * 600, "one line")],
)
def test_a_bad_token_file_is_one_clear_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    """Goal: exit code 1 and the name of the file; a master must not start without the intended token."""
    secret = tmp_path / "token"
    if content is not None:
        secret.write_text(content)
    ended = run(SCRIPTS / "pccl", "run-master", "--listen", "127.0.0.1:0", "--token-file", secret)

    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert str(secret) in line
    assert complaint in line


@pytest.mark.parametrize("output", [[], ["--json"]], ids=["lines", "json"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_token_file_that_others_can_read_is_pointed_out(tmp_path: Path, mode: int, output: list[str]) -> None:
    """Goal: the master starts, and names the file and the command that protects it on standard error, once."""
    secret = tmp_path / "token"
    secret.write_text("open sesame\n")
    secret.chmod(mode)
    with master_command("pccl run-master", "127.0.0.1:0", "--token-file", secret, *output) as script:
        if output:
            script.expect("{")
        else:
            address_of(script)
        script.signal(signal.SIGTERM)
        assert script.end() == 0

        remedy = f"token file {secret} can be read by other users of this machine: run chmod 600 {secret}"
        assert script.errors().count(remedy) == (1 if mode & 0o077 else 0)
        assert "open sesame" not in script.errors()


# ---------------------------------------------------------------------------------------------- help


def test_help_lists_the_commands() -> None:
    """Goal: a newcomer finds the way from `pccl --help`."""
    ended = run(SCRIPTS / "pccl", "--help")

    assert ended.returncode == 0
    assert "run-master" in ended.stdout
    assert "demo" in ended.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """Goal: --help shows how to set the address to listen on."""
    command, flag = COMMANDS[name]
    ended = run(*command, "--help")

    assert ended.returncode == 0
    assert flag in ended.stdout


def test_a_state_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """Goal: neither a traceback nor a silent fresh start; nothing listens."""
    ended = run(
        SCRIPTS / "pccl", "run-master", "--listen", "127.0.0.1:0", "--state", tmp_path / "no" / "such" / "folder"
    )

    assert ended.returncode == 1
    assert "cannot be written: No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["run-master", "status", "bench", "demo", "stress"])
def test_every_help_has_an_example_and_the_exit_codes(command: str) -> None:
    """Goal: what it does in one sentence, how to call it, and what its exit codes mean."""
    overview, ended = run(SCRIPTS / "pccl", "--help"), run(SCRIPTS / "pccl", command, "--help")

    assert ended.returncode == 0
    (sentence,) = [
        line.split(maxsplit=1)[1] for line in overview.stdout.splitlines() if line.startswith(f"  {command} ")
    ]
    assert sentence.endswith(".")
    assert sentence in ended.stdout
    assert re.search(rf"Examples?\b.*\n +pccl {command}", ended.stdout, re.DOTALL)
    assert re.search(r"Exit codes: 0 .*1 .*2\s+wrong\s+command\s+line", ended.stdout, re.DOTALL)


@pytest.mark.parametrize("arguments", [["no-such-command"], ["run-master", "--no-such-flag"]])
def test_a_wrong_command_line_is_code_two(arguments: list[str]) -> None:
    """Goal: a wrong command line has another exit code than a failure of the master."""
    assert run(SCRIPTS / "pccl", *arguments).returncode == 2

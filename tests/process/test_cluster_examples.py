"""The scripts and manifests of examples/cluster, as far as they can be tried without such a cluster.

Slurm's scripts are shell scripts whose directives are comments, so they are run as Slurm would run them, on this
machine. The ssh script gets an `ssh` that ignores the host. The manifest is read by a parser for as much of YAML as
it uses, and the names in it must fit together.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pccl.cli import COMMANDS

from .helpers import ROOT, Script, free_port

CLUSTER = ROOT / "examples" / "cluster"
SHELL_SCRIPTS = sorted(path for path in CLUSTER.iterdir() if path.suffix in {".sh", ".sbatch"})
PATIENCE = 60.0  # seconds for processes of processes on a busy machine

# Replaces training here: ends after one reduce with another peer. With an argument, that many peers die before the end.
TRAINING = """
import os, sys, pccl
ones = pccl.zeros(10)
with pccl.Communicator(sys.argv[-1]) as comm:
    try:
        comm.connect(n_attempts=30)
    except pccl.RunFinishedError:
        os.write(1, b"late\\n")
        sys.exit(0)
    comm.wait_for_world_size(2, timeout=60)
    ones.fill(comm.all_reduce(ones, ones, op=pccl.ReduceOp.SUM).world_size)
    if len(sys.argv) > 2 and comm.peer_id <= int(sys.argv[1]):
        os._exit(1)
    comm.finish()
os.write(1, f"peers {int(ones[0])}\\n".encode())  # at once: both peers share this pipe
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for the path: `pccl` and `python` of this interpreter, and an `ssh` that runs commands here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "pccl": f'exec "{sys.executable}" -m pccl.cli "$@"',
        "python": f'exec "{sys.executable}" "$@"',
        "ssh": 'for command in "$@"; do :; done; exec bash -c "$command"',
    }
    for name, body in scripts.items():
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    (tmp_path / "train.py").write_text(TRAINING)
    return folder


def environment(commands: Path, **more: object) -> dict[str, str]:
    """Return an environment with those commands first in PATH, and without variables of a run around the tests."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": paths, **{k: str(v) for k, v in more.items()}}


# ---------------------------------------------------------------------------------------------- shell scripts


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_knows_our_commands(script: Path) -> None:
    """Goal: the shell can parse it, it stops at errors, and the pccl commands that it calls exist."""
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    text = script.read_text()

    assert checked.returncode == 0, checked.stderr
    assert "set -euo pipefail" in text
    assert set(re.findall(r"\bpccl ([a-z-]+)", text)) <= set(COMMANDS)
    for path in re.findall(r"\b(examples/[\w/.]+)", text):
        assert (ROOT / path).exists(), path


def test_flags_of_commands_in_scripts_exist() -> None:
    """Goal: the flags in the scripts are flags of the commands."""
    import importlib

    for path in (*SHELL_SCRIPTS, CLUSTER / "kubernetes.yaml"):
        for line in path.read_text().splitlines():
            found = re.search(r'pccl[", ]+(run-master|status|bench)\b(.*)', line)
            if found and not line.lstrip().startswith("#"):
                module, function = COMMANDS[found[1]]
                known = {
                    flag
                    for option in getattr(importlib.import_module(f"pccl.cli.{module}"), function).params
                    for flag in option.opts
                }
                assert set(re.findall(r"--[a-z-]+", found[2])) <= known, line


@pytest.mark.timeout(200)
def test_the_ssh_script_runs_a_master_and_peers(commands: Path, tmp_path: Path) -> None:
    """Goal: two hosts, both this one: peers find the master, prove the token, reduce, and the script ends with 0."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(tmp_path / "train.py", folder)
    settings = {"REMOTE_DIR": folder, "MASTER_PORT": free_port(), "SSH": "ssh", "RESTARTS": 0}
    hosts = "user@127.0.0.1 user@127.0.0.1"
    with Script.command(CLUSTER / "ssh.sh", hosts, "python", "train.py", **environment(commands, **settings)) as script:
        assert script.expect("peers", PATIENCE) == "2"
        assert script.expect("peers", PATIENCE) == "2"
        assert script.end(PATIENCE) == 0, script.errors()

    assert (folder / ".pccl-token").stat().st_mode & 0o077 == 0


@pytest.mark.timeout(200)
def test_the_ssh_script_ends_although_a_peer_died_near_the_end(commands: Path, tmp_path: Path) -> None:
    """Goal: the peer that is started again hears that the run is finished; the master and the script end with 0."""
    settings = {"REMOTE_DIR": tmp_path, "MASTER_PORT": free_port(), "SSH": "ssh"}
    hosts = "user@127.0.0.1 user@127.0.0.1"
    script = (CLUSTER / "ssh.sh", hosts, "python", "train.py", "1")
    with Script.command(*script, **environment(commands, **settings)) as peers:
        assert peers.expect("peers", PATIENCE) == "2"
        peers.expect("late", PATIENCE)
        assert peers.end(PATIENCE) == 0, peers.errors()


def test_the_ssh_script_explains_itself() -> None:
    """Goal: without arguments it shows how it is used, and ends with 2."""
    done = subprocess.run([CLUSTER / "ssh.sh"], capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert done.returncode == 2
    assert "examples/cluster/ssh.sh" in done.stderr
    assert "MASTER_PORT" in done.stderr


@pytest.mark.timeout(200)
def test_the_slurm_scripts_run_a_master_and_peers(commands: Path, tmp_path: Path) -> None:
    """Goal: two tasks of an array find the address and the token in the shared folder, wherever they are."""
    settings = {"RUN_DIR": tmp_path / "run", "MASTER_HOST": "127.0.0.1", "MASTER_PORT": free_port()}
    shared = environment(commands, **settings)
    with ExitStack() as stack:
        master = stack.enter_context(Script.command("bash", CLUSTER / "slurm_master.sbatch", **shared))
        command = ("bash", CLUSTER / "slurm_peers.sbatch", "python", tmp_path / "train.py")
        tasks = [
            stack.enter_context(Script.command(*command, SLURM_ARRAY_TASK_ID=str(task), **shared)) for task in range(2)
        ]
        for task in tasks:
            assert task.expect("peers", PATIENCE) == "2"
            assert task.end(PATIENCE) == 0, task.errors()
        assert master.end(PATIENCE) == 0, master.errors()
        assert (tmp_path / "run" / "finished").exists()
        after = stack.enter_context(Script.command(*command, SLURM_ARRAY_TASK_ID="7", **shared))
        assert after.end(PATIENCE) == 0, after.errors()

    assert (tmp_path / "run" / "token").stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------------------------------------- the manifest


def parse_yaml(text: str) -> list[Any]:
    """The documents of a manifest: block mappings and lists, plain and quoted scalars, lists in brackets."""
    documents = []
    for part in re.split(r"^---$", text, flags=re.MULTILINE):
        lines = [line for line in part.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        rows = [(len(line) - len(line.lstrip()), line.strip()) for line in lines]
        assert "\t" not in part, "YAML knows no tabs"
        document, rest = parse_block(rows, rows[0][0])
        assert not rest, f"not understood: {rest[0]}"
        documents.append(document)
    return documents


def parse_block(rows: list[tuple[int, str]], indent: int) -> tuple[Any, list[tuple[int, str]]]:
    """Return the value that begins at this indentation, and the rows after it."""
    block: Any = [] if rows[0][1].startswith("- ") else {}
    while rows and rows[0][0] == indent:
        _, line = rows.pop(0)
        if isinstance(block, list):
            assert line.startswith("- "), line
            # An item is a block of its own, two columns further in.
            value, rows = parse_block([(indent + 2, line[2:]), *rows], indent + 2)
            block.append(value)
            continue
        key, separator, scalar = line.partition(":")
        assert separator, f"no mapping: {line}"
        assert key not in block, f"twice: {key}"
        if scalar.strip():
            block[key] = parse_scalar(scalar.strip())
        else:
            block[key], rows = parse_block(rows, rows[0][0])
    assert not rows or rows[0][0] < indent, f"indented by an odd amount: {rows[0]}"
    return block, rows


def parse_scalar(text: str) -> Any:
    """A list in brackets, a quoted text, a number, or a word."""
    return (
        ast.literal_eval(text) if text[0] in '["' or text.isdigit() else {"true": True, "false": False}.get(text, text)
    )


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The objects of the manifest by kind."""
    return {document["kind"]: document for document in parse_yaml((CLUSTER / "kubernetes.yaml").read_text())}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    """The one container of a workload's pods."""
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_the_service_leads_to_the_master(manifest: dict[str, Any]) -> None:
    """Goal: service, deployment and probe name the same pods and the same port; there is one master."""
    service, deployment = manifest["Service"]["spec"], manifest["Deployment"]["spec"]
    (port,) = service["ports"]
    command = container(manifest["Deployment"])["command"]

    assert service["selector"] == deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert command[:2] == ["pccl", "run-master"]
    assert command[command.index("--listen") + 1] == f"0.0.0.0:{port['targetPort']}"
    assert container(manifest["Deployment"])["readinessProbe"]["tcpSocket"]["port"] == port["targetPort"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}


def test_the_peers_reach_the_service_and_may_be_preempted(manifest: dict[str, Any]) -> None:
    """Goal: peers dial the service, know the secret that the master knows, and a preempted pod is replaced."""
    job, service = manifest["Job"]["spec"], manifest["Service"]
    command = container(manifest["Job"])["command"]
    (variable,) = container(manifest["Job"])["env"]
    (volume,) = manifest["Deployment"]["spec"]["template"]["spec"]["volumes"]

    assert f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in command
    assert (ROOT / command[1]).exists()
    assert variable["name"] == "PCCL_TOKEN"
    assert variable["valueFrom"]["secretKeyRef"]["name"] == volume["secret"]["secretName"]
    assert "completions" not in job
    assert job["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert job["template"]["spec"]["restartPolicy"] == "Never"


def test_the_parser_reads_what_yaml_means() -> None:
    """Goal: the parser above can read all that the manifest uses."""
    text = (
        'a: 1\nb:\n  - name: x\n    more:\n      c: "2"\n  - name: ["y", 3]\nd: plain words: and more\n---\ne: true\n'
    )

    assert parse_yaml(text) == [
        {"a": 1, "b": [{"name": "x", "more": {"c": "2"}}, {"name": ["y", 3]}], "d": "plain words: and more"},
        {"e": True},
    ]
    for wrong in ("a: 1\na: 2\n", "a:\n  b: 1\n   c: 2\n", "a\n"):
        with pytest.raises(AssertionError):
            parse_yaml(wrong)

"""Options: every default is consistent, operators can override it, and it reaches the actor unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pccl.options
from pccl._core.protocol.mailbox import CallConnect
from pccl._core.records import replace
from pccl.options import MASTER, READ_BY, VARIABLES, Options, link_silence_ns, nanoseconds, token_from_file

NAMES = Options.__match_args__


def test_the_defaults_are_valid() -> None:
    """Goal: a user who sets nothing gets bounds that agree with each other and with the contract."""
    options = Options().validated()

    assert (options.heartbeat_interval, options.heartbeat_timeout) == (1.0, 10.0)
    assert options.vote_warning == 5.0
    assert options.vote_timeout == 0.0
    # A deadlock may be checked only after two sweep intervals, and five seconds are promised.
    assert options.deadlock_timeout + 2 * options.heartbeat_interval <= 5.0
    # All dials of a rewiring can time out before the rewiring does.
    assert options.dial_attempts * (options.connect_timeout + 0.1) < options.wire_timeout


def test_every_field_has_its_reason_beside_it() -> None:
    """Goal: every bound has a sentence that says why."""
    text = Path(pccl.options.__file__).read_text()
    for name in NAMES:
        assert re.search(rf"^    {name}: \w+ = \S+  # \w", text, re.MULTILINE), f"{name} has no reason"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("PCCL_HEARTBEAT_TIMEOUT", "3", "heartbeat_timeout", 3.0),
        ("PCCL_DIAL_ATTEMPTS", "5", "dial_attempts", 5),
        ("PCCL_ADVERTISE", "host:1", "advertise", "host:1"),
        ("PCCL_CHECK", "1", "check", True),
        ("PCCL_CHECK", "yes", "check", True),
        ("PCCL_CHECK", "0", "check", False),
        ("PCCL_TOKEN", "secret", "token", "secret"),
    ],
)
def test_the_environment_has_the_last_word(variable: str, text: str, name: str, value: object) -> None:
    """Goal: an operator can change every bound without changing the program."""
    changed = Options().overridden({variable: text, "PCCL_TEST_X": "x", "PATH": "/bin"})

    assert changed == replace(Options(), **{name: value})
    assert type(getattr(changed, name)) is type(value)


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("PCCL_HEARTBEAT_TIMEOUT", "soon", "PCCL_HEARTBEAT_TIMEOUT must be a number, not 'soon'"),
        ("PCCL_DIAL_ATTEMPTS", "1.5", "PCCL_DIAL_ATTEMPTS must be a number"),
        ("PCCL_PORT", "-1", "port must be a number"),
        ("PCCL_CHECK", "maybe", "PCCL_CHECK must be one of 1, true, yes, on, 0, false, no, off, not 'maybe'"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, reason: str) -> None:
    """Goal: the error says which variable is wrong, as its user wrote it."""
    with pytest.raises(ValueError, match=reason):
        Options().overridden({variable: text})


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"heartbeat_interval": 0.0}, "heartbeat_interval must be above 0"),
        ({"connect_timeout": 0.0}, "connect_timeout must be above 0"),
        ({"wire_timeout": -1.0}, "wire_timeout must be a number"),
        ({"deadlock_timeout": 0}, "deadlock_timeout must be above 0"),
        ({"heartbeat_timeout": 1.5}, "at least twice heartbeat_interval"),
        ({"port": 65536}, "port must be 0 to 65535"),
        ({"slots": 0}, "slots must be 1 to 65536"),
        ({"slots": "many"}, "slots must be a number"),
        ({"advertise": "a\nport=1"}, "advertise must be one host"),
        ({"token": "a\nb"}, "token must be one line"),
        ({"token": "x" * 513}, "token must be one line of at most 512"),
    ],
)
def test_what_does_not_hold_together_is_refused(field: dict[str, Any], reason: str) -> None:
    """Goal: a value that would let a call wait for ever, or fail much later, is refused here."""
    with pytest.raises(ValueError, match=reason):
        replace(Options(), **field).validated()


@given(
    st.builds(
        Options,
        heartbeat_interval=st.floats(0.001, 100),
        slots=st.integers(1, 1 << 16),
        advertise=st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=20),
        token=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=20),
        check=st.booleans(),
    )
)
def test_they_survive_the_way_to_the_actor(options: Options) -> None:
    """Goal: the peer actor works with exactly the values that the training process chose."""
    assert Options.decode(options.encode()) == options


def test_the_secret_is_never_shown() -> None:
    """Goal: options appear in logs and tracebacks; the token does not."""
    assert "hunter2" not in repr(Options(token="hunter2"))
    call = CallConnect(1, 2, 3, 4, 5, b"::1 48148", "", 0, Options(token="hunter2").encode().encode())
    assert "hunter2" in call.options.decode()
    assert "hunter2" not in repr(call)
    assert repr(call).startswith("CallConnect(slot=1, ")
    for wrong in ({"token": "hunter2" * 100}, {"token": "hunter2\n"}, {"token": "hunter2", "port": -1}):
        with pytest.raises(ValueError) as raised:
            Options(**wrong).validated()
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("name", ["x" * 129, "é" * 65, "a\nb", "\x1b[1m"])
def test_the_name_of_a_run_is_one_short_line(name: str) -> None:
    """Goal: a name goes into messages and log lines; what cannot be shown there is refused where it is set."""
    with pytest.raises(ValueError, match="Options.run must be one line of at most 128 printable bytes"):
        Options(run=name).validated()
    assert Options(run="Größe 7b").validated().run == "Größe 7b"
    assert Options(run="a").overridden({"PCCL_RUN": "b"}).run == "b", "the operator's name has priority"


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o604, 0o644])
def test_a_secret_that_others_can_read_is_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Goal: the token is used, and the log names the file and the command that protects it, not the secret."""
    secret = tmp_path / "token"
    secret.write_text("hunter2\n")
    secret.chmod(mode)

    assert token_from_file(str(secret)) == "hunter2"
    warnings = [record.getMessage() for record in caplog.records if record.name == "pccl"]
    remedy = f"token file {secret} can be read by other users of this machine: run chmod 600 {secret}"
    assert warnings == ([remedy] if mode & 0o077 else [])


def test_an_unknown_option_is_refused() -> None:
    """Goal: an actor of another build fails instead of ignoring the option."""
    with pytest.raises(ValueError, match="there is no such option"):
        Options.decode("colour=green")


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PCCL_HEARTBEAT_TIMOUT", "PCCL_HEARTBEAT_TIMEOUT"),
        ("PCCL_LOGLEVEL", "PCCL_LOG_LEVEL"),
        ("PCCL_VOTE_TIMEOUTS", "PCCL_VOTE_TIMEOUT"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(variable: str, nearest: str) -> None:
    """Goal: one line that names both, and how to keep a variable of another program."""
    with pytest.raises(ValueError) as raised:
        Options().overridden({variable: "3"})
    message = str(raised.value)
    assert message.startswith(f"the environment variable {variable} is unknown to pccl: did you mean {nearest}? ")
    assert f"set PCCL_IGNORE={variable}" in message
    assert "\n" not in message


def test_the_variables_of_other_programs_can_be_ignored() -> None:
    """Goal: a wrapper with a name of its own is not locked out, and a name like no other gets no guess."""
    others = {"PCCL_IGNORE": "PCCL_SITE, PCCL_QUEUE", "PCCL_SITE": "1", "PCCL_QUEUE": "2"}
    assert Options().overridden(others) == Options()
    service = {"PCCL_MASTER_SERVICE_HOST": "10.0.0.1", "PCCL_MASTER_PORT_48148_TCP": "tcp://10.0.0.1:48148"}
    assert Options().overridden(service) == Options()
    with pytest.raises(ValueError, match="PCCL_QQ is unknown to pccl: Correct it or unset it"):
        Options().overridden({**others, "PCCL_QQ": "1"})


def test_every_variable_of_this_project_is_known() -> None:
    """Goal: no variable that our own code, builds or scripts set is refused by the library."""
    root = Path(pccl.options.__file__).parents[1]
    files = [*root.glob("*.py"), root / "Makefile"]
    for folder in ("pccl", "cli", "stress", "benchmarks", "examples", "tests", ".ci", ".github"):
        files += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".pyx", ".sh", ".yml", ".yaml")]
    wrong = {"PCCL_HEARTBEAT_TIMOUT", "PCCL_LOGLEVEL", "PCCL_VOTE_TIMEOUTS", "PCCL_SITE", "PCCL_QUEUE", "PCCL_QQ"}
    wrong.add("PCCL_MASTER_SERVICE_HOST")
    known = {f"PCCL_{name.upper()}" for name in NAMES} | set(VARIABLES) | wrong
    for path in files:
        for name in re.findall(r"[\"' {$]{1,2}(PCCL_[A-Z][A-Z_]*[A-Z])(?=[\"'=:}])", path.read_text()):
            assert name in known or name.startswith("PCCL_TEST_"), f"{path}: {name} is not in VARIABLES"


def test_every_field_says_which_process_reads_it() -> None:
    """Goal: a user knows where to set it."""
    assert READ_BY.keys() == set(NAMES)


def test_a_peer_follows_the_master_in_its_fields() -> None:
    """Goal: the values of the master count; one that was set at the peer gets a line that says where to set it."""
    master = Options(vote_timeout=60.0, wire_timeout=30.0, stall_timeout=99.0)
    peer = Options(vote_timeout=5.0, wire_timeout=30.0, stall_timeout=7.0)

    used, lines = peer.following(master.of_master())

    assert used == replace(peer, vote_timeout=60.0)
    assert lines == [
        "vote_timeout=5 has no effect here: the master decides it, and uses 60; set it where the master runs"
    ]
    assert Options().following(master.of_master())[1] == []


@pytest.mark.parametrize(
    "text", ["token=x", "colour=green", "vote_timeout", "vote_timeout=-1", "heartbeat_timeout=nan", "wire_timeout=0"]
)
def test_fields_that_no_honest_master_sends_are_refused(text: str) -> None:
    """Goal: a master cannot change what is a peer's own, and sends no impossible value."""
    with pytest.raises(ValueError):
        Options().following(text)


def test_the_master_decides_what_its_peers_share() -> None:
    assert all(isinstance(getattr(Options(), name), (int, float)) for name in NAMES if READ_BY[name] == MASTER)


def test_time_is_whole_nanoseconds() -> None:
    """Goal: machines compare times for equality."""
    assert nanoseconds(1.5) == 1_500_000_000
    assert isinstance(nanoseconds(0.1), int)


def test_a_silent_link_ends_before_the_reduce_that_uses_it() -> None:
    stall_ns = nanoseconds(Options().stall_timeout)

    assert 0 < link_silence_ns(stall_ns) < stall_ns

"""All bounds with their reasons: timeouts, limits, and the address that a peer shows to others.

Durations are seconds. Each field is set in code, `Options(heartbeat_timeout=3)`, and overridden by the environment,
`PCCL_HEARTBEAT_TIMEOUT=3`, so that the operator of a run decides. The peer actor receives the values as text;
`Options.decode(options.encode())` equals `options`. `READ_BY` says which process reads a field; the master sends its
own fields to every peer that registers. `VARIABLES` has the other environment variables; a name that is in neither is
refused. A leaf: imports only `records`.
"""

from __future__ import annotations

import os

from pccl._core.records import record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PORT_MAX = 65535  # of TCP
MASTER_PORT = 48148  # where a master listens by default
PEER_PORT_FIRST = 48149  # peers take the first free port from here up
PEER_PORTS_MAX = 4096  # how many ports a peer tries: more than a host has peers

TOKEN_BYTES_MAX = 512  # enough for any key; a larger file is a mistake worth reporting

PENDING_CONNECTIONS_MAX = 128  # of one port; if there are more, the oldest is refused
EARLY_LINKS_MAX = 1024  # lanes that arrive before their ring order: two neighbours with full pools
LANES_MAX = 256  # the largest connection pool; measurements show no gain beyond 128
SEND_QUEUE_BYTES_MAX = 8 << 20  # unread control bytes after which a peer counts as lost
EDGE_LOSSES_MAX = 5  # an edge that breaks this often before its ring was complete counts as unreachable
STORY_EVENTS_MAX = 256  # events that a machine keeps for its story
SECONDS_MAX = 1_000_000_000  # thirty years: nothing waits longer, and infinity cannot be converted to nanoseconds
SLOTS_MAX = 1 << 16  # completion slots of a communicator
TAGS_MAX = SLOTS_MAX  # reduces that a peer may have in flight: each has a completion slot
KEYS_MAX = 1 << 16  # tensors of a shared state: a hundred times the parameters of the largest models
KEY_BYTES_MAX = 512  # of one name, in UTF-8: paths through nested modules are rarely longer than a hundred
SCHEMA_BYTES_MAX = 6 << 20  # all names and sizes of a state; it must fit into the send queue of a control link
FETCH_BYTES_AHEAD = 16 << 20  # requested on one link and not received: 1 Gbit/s over 128 ms
FETCH_UNITS_AHEAD = 512  # the same in units, for states of many small tensors
STATE_LINKS_MAX = 1024  # connections over which other peers may fetch from one peer at a time; each costs a process
PROBES_MAX = 64  # connections of probes that one peer receives, beyond one full pool
RUN_NAME_BYTES_MAX = 128  # of the name of a run, in UTF-8: log lines and messages show it
STATUS_REPORT_TIME = 10.0  # for a status report to arrive: hundreds of kilobytes over a slow link
GROUPS_MAX = 1 << 16  # distinct peer groups of a run; more is a defect of the caller


@record
class Options:
    """How long to wait, how much to keep, and which address to show. The defaults suit a wide-area network."""

    heartbeat_interval: float = 1.0  # often enough to notice within the timeout after several lost packets
    heartbeat_timeout: float = 10.0  # long enough for a stalled link to recover by retransmission
    connect_timeout: float = 5.0  # one dial, three SYN retransmissions
    handshake_timeout: float = 5.0  # for the two round trips of the handshake; a slower caller is refused
    retry_interval: float = 1.0  # between attempts to reach the master
    dial_attempts: int = 2  # a lane is dialled twice before the pair counts as unreachable
    wire_timeout: float = 20.0  # all dials of a new ring, with time for every attempt to time out
    unreachable_expiry: float = 60.0  # how long a failed pair is avoided; routes and firewalls change
    vote_warning: float = 5.0  # a wait this long is reported with who is missing, then ever more rarely; 0: never
    vote_timeout: float = 0.0  # 0: never, because inner training steps may be long; else missing peers are kicked
    deadlock_timeout: float = 3.0  # a deadlock is explained after this time
    stall_timeout: float = 10.0  # aborts a reduce if no byte moves for this time; 8 times its longest pause if longer
    start_timeout: float = 30.0  # an actor starts in a twentieth of a second; an overloaded machine takes longer
    close_timeout: float = 2.0  # how long close() waits for the actor before it kills it
    probe_time: float = 1.0  # of one edge; the first part, in which TCP windows open, does not count
    probe_rounds: int = 30  # per optimize_topology: half a minute, all edges of 30 peers; the next call measures more
    rates_expiry: float = 600.0  # how long a rate is used: other traffic on a path changes by the hour
    moonshot_time: float = 30.0  # the search for a better ring in the background; 0: no search
    look_time: float = 0.0002  # how long actors poll for the next message before they sleep; a wake-up costs more
    host_memory: bool = True  # neighbours on one host read blocks in each other's memory; off: all use TCP
    digest_threads: int = 0  # for the digests of a shared state; 0: one per core, up to eight
    slots: int = 1024  # calls in flight per communicator
    port: int = 0  # the port of this peer; 0: the first free one from 48149 on
    advertise: str = ""  # host or host:port that others dial; empty: the address that the master sees
    run: str = ""  # the name of the run: the master refuses peers whose name differs from that of the others
    token: str = ""  # the run's shared secret, best set as PCCL_TOKEN; never shown, never sent
    check: bool = False  # machines verify their invariants after every event

    def __repr__(self) -> str:
        shown = ((name, getattr(self, name)) for name in _TYPES if name != "token")
        fields = ", ".join(f"{name}={value!r}" for name, value in shown)
        return f"Options({fields}, token={'set' if self.token else 'none'})"

    def encode(self) -> str:
        """One `field=value` per line, for the peer actor."""
        return "\n".join(f"{name}={getattr(self, name)!s}" for name in _TYPES)

    @staticmethod
    def decode(text: str) -> Options:
        """The inverse of `encode`."""
        pairs = dict(line.split("=", 1) for line in text.split("\n") if line)
        return replace(Options(), **{name: _parse(name, value, name) for name, value in pairs.items()})

    def overridden(self, environment: Mapping[str, str] | None = None) -> Options:
        """These values with every `PCCL_<FIELD>` of the environment applied. Raises ValueError for a wrong one."""
        source = os.environ if environment is None else environment
        refuse_unknown_variables(source)
        found = {}
        for name in _TYPES:
            variable = f"PCCL_{name.upper()}"
            if variable in source:
                found[name] = _parse(name, source[variable], variable)
        return replace(self, **found).validated()

    def of_master(self) -> str:
        """The fields that the master decides, one `field=value` per line; peers get them when they register."""
        return "\n".join(f"{name}={getattr(self, name)!s}" for name in _TYPES if READ_BY[name] == MASTER)

    def following(self, text: str) -> tuple[Options, list[str]]:
        """These options with the fields of a master, and one line for each value set here that has no effect.

        Raises ValueError if `text`, which `of_master` made, has another field or a value that is not legal.
        """
        pairs = {line.partition("=")[0]: line.partition("=")[2] for line in text.split("\n") if line}
        wrong = sorted(name for name in pairs if READ_BY.get(name) != MASTER)
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: no option that a master decides")
        theirs = replace(self, **{name: _parse(name, value, name) for name, value in pairs.items()}).validated()
        lines = []
        for name in pairs:
            mine, used = getattr(self, name), getattr(theirs, name)
            if mine not in (used, getattr(_DEFAULTS, name)):
                lines.append(
                    f"{name}={mine:g} has no effect here: the master decides it, and uses {used:g}; "
                    "set it where the master runs"
                )
        return theirs, lines

    def validated(self) -> Options:
        """These options. Raises ValueError, which names the field and its allowed values, if one is wrong."""
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if kind is not str and not (isinstance(value, (int, float)) and 0 <= value < SECONDS_MAX):
                raise ValueError(f"Options.{name} must be a number from 0 to {SECONDS_MAX}, not {value!r}")
        for name in _NEVER_ZERO:
            if getattr(self, name) <= 0:
                raise ValueError(f"Options.{name} must be above 0: without that bound a call could wait for ever")
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ValueError(
                f"Options.heartbeat_timeout ({self.heartbeat_timeout:g} s) must be at least twice "
                f"heartbeat_interval ({self.heartbeat_interval:g} s), or a single late heartbeat ends a membership"
            )
        if not 0 <= self.port <= PORT_MAX:
            raise ValueError(f"Options.port must be 0 to {PORT_MAX}, not {self.port}")
        if not 1 <= self.slots <= SLOTS_MAX:
            raise ValueError(f"Options.slots must be 1 to {SLOTS_MAX}, not {self.slots}")
        if "\n" in self.advertise:
            raise ValueError("Options.advertise must be one host or host:port")
        if len(self.run.encode("utf-8", "surrogatepass")) > RUN_NAME_BYTES_MAX or (
            self.run and not self.run.isprintable()
        ):
            raise ValueError(f"Options.run must be one line of at most {RUN_NAME_BYTES_MAX} printable bytes")
        if "\n" in self.token or len(self.token.encode()) > TOKEN_BYTES_MAX:
            raise ValueError(f"the token must be one line of at most {TOKEN_BYTES_MAX} bytes")
        return self


_DEFAULTS = Options()

MASTER, PEER, BOTH = "master", "peer", "both"

# Which process reads each field. Peers follow the master in its fields: they get them when they register.
READ_BY: dict[str, str] = {
    **dict.fromkeys(("heartbeat_interval", "heartbeat_timeout", "wire_timeout", "unreachable_expiry"), MASTER),
    **dict.fromkeys(("vote_warning", "vote_timeout", "deadlock_timeout"), MASTER),
    **dict.fromkeys(("probe_time", "probe_rounds", "rates_expiry", "moonshot_time"), MASTER),
    **dict.fromkeys(("retry_interval", "dial_attempts", "stall_timeout", "start_timeout", "close_timeout"), PEER),
    **dict.fromkeys(("host_memory", "digest_threads", "slots", "port", "advertise", "run"), PEER),
    **dict.fromkeys(("connect_timeout", "handshake_timeout", "look_time", "token", "check"), BOTH),
}

# The environment variables of this project that are no options, and what they do.
VARIABLES: dict[str, str] = {
    "PCCL_LOG_LEVEL": "shows log lines from this level on: TRACE, DEBUG, INFO, WARN, ERR, FATAL, NONE",
    "PCCL_MASTER": "the address of the master, for programs that name none",
    "PCCL_IGNORE": "names of other variables that begin with PCCL_ and are not of this library, separated by commas",
    "PCCL_SIMD": "the instruction set of the kernels, to compare them",
    "PCCL_FAULT": "plans a fault, for tests",
    "PCCL_STRESS_RUN": "marks the processes of one stress run",
    "PCCL_CFLAGS": "compiler flags of a build",
    "PCCL_DEBUG": "builds with assertions in compiled code",
    "PCCL_SANITIZE": "builds with sanitizers",
    "PCCL_COVERAGE": "builds with coverage counts",
    "PCCL_BUILT_TREE": "builds from the compiled files of another tree",
}
TESTS_PREFIX = "PCCL_TEST_"  # of variables that only our tests read


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raise ValueError, with the nearest right name, for a variable that begins with PCCL_ and that nobody reads.

    A misspelt bound would otherwise be ignored in silence.
    """
    known = [f"PCCL_{name.upper()}" for name in _TYPES] + list(VARIABLES)
    ignored = {name.strip() for name in environment.get("PCCL_IGNORE", "").split(",")}
    # Kubernetes sets such names in every pod beside a service, which may be called pccl-master.
    services = [name.removesuffix("SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")]
    foreign = (TESTS_PREFIX, *(f"{prefix}{part}" for prefix in services for part in ("SERVICE_", "PORT")))
    for name in sorted(environment):
        if name in known or name in ignored or not name.startswith("PCCL_") or name.startswith(foreign):
            continue
        import difflib  # here, because the actors start without it

        near = difflib.get_close_matches(name[5:], [other[5:] for other in known], n=1)
        meant = f"did you mean PCCL_{near[0]}? " if near else ""
        raise ValueError(
            f"the environment variable {name} is unknown to pccl: {meant}"
            f"Correct it or unset it; if another program needs it, set PCCL_IGNORE={name}"
        )


_NEVER_ZERO = (
    *("heartbeat_interval", "connect_timeout", "handshake_timeout"),
    *("wire_timeout", "deadlock_timeout", "stall_timeout", "start_timeout", "probe_time", "probe_rounds"),
)

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")

_TYPES: dict[str, type] = {name: type(getattr(Options(), name)) for name in Options.__match_args__}


def _parse(name: str, text: str, source: str) -> object:
    kind = _TYPES.get(name)
    if kind is None:
        raise ValueError(f"{source}: there is no such option; pccl.Options lists them")
    if kind is str:
        return text
    if kind is bool:
        word = text.strip().lower()
        if word not in (*_YES, *_NO):
            raise ValueError(f"{source} must be one of {', '.join((*_YES, *_NO))}, not {text!r}")
        return word in _YES
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{source} must be a number, not {text!r}") from None


def token_from_file(path: str) -> str:
    """Return the secret in a file, without the line end that editors add; warn if other users may read it.

    Raises ValueError, which names the file and what is wrong, if it cannot be read or does not hold one line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(TOKEN_BYTES_MAX + 2)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ValueError(f"token file {path}: {error.strerror}") from None
    token = data.decode("utf-8", "replace").strip()
    if not token or "\n" in token or len(data) > TOKEN_BYTES_MAX + 1:
        raise ValueError(f"token file {path} must hold one line of 1 to {TOKEN_BYTES_MAX} bytes")
    if mode & 0o077:
        import logging  # here, because the actors start without it

        warning = "token file %s can be read by other users of this machine: run chmod 600 %s"
        logging.getLogger("pccl").warning(warning, path, path)
    return token


def nanoseconds(seconds: float) -> int:
    """Convert seconds to whole nanoseconds, the unit of the machines; as integers, equal times compare equal."""
    return int(seconds * 1_000_000_000)


def link_silence_ns(stall_ns: int) -> int:
    """How long the other side of a link may acknowledge nothing.

    Shorter than the stall timeout, so that the error names the broken link and not the peer that noticed first.
    """
    return stall_ns * 4 // 5

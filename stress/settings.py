"""The settings of a stress run, as the command line gives them and `--replay` reads them. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pccl import Options

from .faults import ALL_FAMILIES, FAMILIES, FaultKind
from .records import Bounds


def _options() -> Options:
    """Options for one machine: losses are detected within two seconds, and probes are short."""
    return Options(
        heartbeat_interval=0.2,
        heartbeat_timeout=2.0,
        retry_interval=0.2,
        stall_timeout=1.5,
        deadlock_timeout=1.0,
        connect_timeout=1.0,
        handshake_timeout=1.0,
        unreachable_expiry=1.0,
        probe_time=0.04,
        probe_rounds=4,
        rates_expiry=10.0,
        moonshot_time=1.0,
        check=True,
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run; the command line fills it in."""

    duration: float = 60.0  # seconds
    peers: int = 10
    groups: int = 2
    lanes: int = 1
    interval: tuple[float, float] = (0.5, 1.0)  # seconds between two faults
    families: tuple[str, ...] = ALL_FAMILIES
    seed: int = 0
    all_paths: bool = False  # a rare path that was never taken is a violation
    folder: Path = Path("stress-report")
    options: Options = field(default_factory=_options)
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def kinds(self) -> set[FaultKind]:
        """The kinds of faults of this run."""
        return {kind for name in self.families for kind in FAMILIES[name]}

"""The facts beside every result: machine, date, versions, congestion control, commit."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def facts() -> dict[str, Any]:
    """Return all facts, as they are now."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("pccl", "torch", "numpy")},
        "congestion_control": congestion_control(),
        "commit": commit(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel."""
    processor = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib("MemTotal") / (1 << 20), 1),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
    }


def memory_kib(name: str) -> int:
    """A number of /proc/meminfo."""
    return next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith(f"{name}:")), 0)


def congestion_control() -> str:
    """Return the default congestion control of sockets."""
    return "".join(_lines("/proc/sys/net/ipv4/tcp_congestion_control")).strip() or "unknown"


def version(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the measured tree, with a mark if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def keep(results: dict[str, Any], path: Path) -> None:
    """Write results to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def size(text: str) -> int:
    """Parse a number of bytes: 4K, 64M, 1G, or plain bytes; a multiple of 4 for whole float32 elements."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not number.isdecimal() or not int(number) or int(number) * unit % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a positive multiple of 4 bytes, as 4K, 64M or 1G")
    return int(number) * unit


def size_text(nbytes: int) -> str:
    """Return a size as text, for tables."""
    for unit in ("G", "M", "K"):
        if nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]} {unit}iB"
    return f"{nbytes} B"


def time_text(microseconds: float) -> str:
    """Return a time with up to three digits and a unit."""
    if microseconds < 10:
        return f"{microseconds:.2g} µs"
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds / 1_000_000:.3g} s"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

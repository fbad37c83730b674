"""How much memory this process may still use before the kernel's out-of-memory killer acts.

The kernel does not refuse shared memory when none is left: it creates the file, and later kills a process, often
another one. So code that is about to fill gigabytes asks here first. Three limits count: the memory of the machine, and
the limits of the control groups (version 1 and 2) of this process. The answer is an estimate that may be outdated at
once; it prevents large mistakes, not races.

Actors import this module too, so it does not use `pathlib`, which takes longer to load than an actor's own code.
"""

_KIB = 1024
_MEMINFO = "/proc/meminfo"
_MEMBERSHIP = "/proc/self/cgroup"
_GROUPS = "/sys/fs/cgroup"

# Files of a control group of version 2 and 1: limit, use, and the lines of `memory.stat` that count the page cache,
# which the kernel drops before it kills.
_VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_UNLIMITED = 1 << 60  # without a limit, version 1 says eight exbibytes


def available_bytes() -> int:
    """Return how many bytes are left: the smallest value of the machine and its control groups."""
    return min([_machine_bytes(), *_group_bytes()])


def _machine_bytes() -> int:
    fields = _table(_MEMINFO)
    # Shared memory can be swapped out like any other.
    return (fields["MemAvailable:"] + fields.get("SwapFree:", 0)) * _KIB


def _group_bytes() -> list[int]:
    """What each control group of this process has left; groups without a limit or that we cannot read are left out."""
    found: list[int] = []
    try:
        memberships = _read(_MEMBERSHIP).splitlines()
    except OSError:
        return found
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = _GROUPS, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = f"{_GROUPS}/memory", _VERSION_1
        else:
            continue
        # Inside a container the path may be that of the host, and only its root is mounted here: try all parents.
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):
            found += _left("/".join([root, *names[:depth]]), files)
    return found


def _left(group: str, files: tuple[str, str, tuple[str, ...]]) -> list[int]:
    """What one group has left, as a list of one number, or an empty list."""
    limit_name, use_name, cache_names = files
    try:
        limit = int(_read(f"{group}/{limit_name}"))
        if limit >= _UNLIMITED:
            return []
        use = int(_read(f"{group}/{use_name}"))
        fields = _table(f"{group}/memory.stat")
    except (OSError, ValueError):
        # Missing, not readable, or "max".
        return []
    return [max(0, limit - use + sum(fields.get(name, 0) for name in cache_names))]


def _table(path: str) -> dict[str, int]:
    """Parse a file of lines that begin with a name and a number."""
    return {parts[0]: int(parts[1]) for line in _read(path).splitlines() if len(parts := line.split()) >= 2}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()

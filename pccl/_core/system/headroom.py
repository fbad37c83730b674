"""How much memory this process may still take before the kernel starts to kill.

Shared memory is not refused when there is none left: the kernel hands out the file, and then ends a process, often
not the one that asked. So whoever is about to fill gigabytes looks here first. Three bounds count: what the machine
has, and what the control groups around this process allow, of the first and of the second kind. The answer is an
estimate that is old the moment it is given; it prevents blunders, not races.

Actors import this too, so it makes do without `pathlib`, which alone takes longer to load than an actor's own code.
"""

_KIB = 1024
_MEMINFO = "/proc/meminfo"
_MEMBERSHIP = "/proc/self/cgroup"
_GROUPS = "/sys/fs/cgroup"

# Files of a control group, of the second and of the first kind: limit, use, and the lines of `memory.stat` that
# count the page cache, which the kernel drops before it kills.
_SECOND = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_UNLIMITED = 1 << 60  # where there is no limit, the first kind says eight exbibytes


def available_bytes() -> int:
    """The least of what the machine and the control groups have left."""
    return min([_machine_bytes(), *_group_bytes()])


def _machine_bytes() -> int:
    fields = _table(_MEMINFO)
    # Shared memory can be swapped out as any other.
    return (fields["MemAvailable:"] + fields.get("SwapFree:", 0)) * _KIB


def _group_bytes() -> list[int]:
    """What each control group around us has left; a group without a limit, or that we cannot see, says nothing."""
    found: list[int] = []
    try:
        memberships = _read(_MEMBERSHIP).splitlines()
    except OSError:
        return found
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = _GROUPS, _SECOND
        elif "memory" in controllers.split(","):
            root, files = f"{_GROUPS}/memory", _FIRST
        else:
            continue
        # Inside a container the path may be the host's, of which only the root is mounted here: ask all the way up.
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):
            found += _left("/".join([root, *names[:depth]]), files)
    return found


def _left(group: str, files: tuple[str, str, tuple[str, ...]]) -> list[int]:
    """What one group has left, as a list of one number or none."""
    limit_name, use_name, cache_names = files
    try:
        limit = int(_read(f"{group}/{limit_name}"))
        if limit >= _UNLIMITED:
            return []
        use = int(_read(f"{group}/{use_name}"))
        fields = _table(f"{group}/memory.stat")
    except (OSError, ValueError):
        # Not there, not for us to read, or "max".
        return []
    return [max(0, limit - use + sum(fields.get(name, 0) for name in cache_names))]


def _table(path: str) -> dict[str, int]:
    """A file of lines that begin with a name and a number."""
    return {parts[0]: int(parts[1]) for line in _read(path).splitlines() if len(parts := line.split()) >= 2}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()

"""How much memory is left: the least value of the machine and of all control groups of the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccl._core.system import headroom

MIB = 1 << 20


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake system files: 100 MiB available, 20 MiB of swap, no control groups yet."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {100 * 1024} kB\nSwapFree: {20 * 1024} kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(headroom, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(headroom, "_MEMBERSHIP", str(tmp_path / "membership"))
    monkeypatch.setattr(headroom, "_GROUPS", str(tmp_path / "cgroup"))
    return tmp_path


def write(group: Path, **files: object) -> None:
    """Write the files of a control group; two underscores in a name stand for a dot."""
    group.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (group / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_machine_without_groups_counts_memory_and_swap(host: Path) -> None:
    assert headroom.available_bytes() == 120 * MIB


def test_a_group_of_the_second_kind_bounds(host: Path) -> None:
    """Goal: used memory counts, except the page cache, which the kernel drops by itself."""
    (host / "membership").write_text("0::/job\n")
    stat = f"anon 5\nactive_file {2 * MIB}\ninactive_file {3 * MIB}"
    write(host / "cgroup/job", memory__max=50 * MIB, memory__current=40 * MIB, memory__stat=stat)

    assert headroom.available_bytes() == 15 * MIB


def test_the_tightest_of_nested_groups_bounds(host: Path) -> None:
    (host / "membership").write_text("0::/slice/job\n")
    write(host / "cgroup/slice/job", memory__max="max", memory__current=40 * MIB, memory__stat="")
    write(host / "cgroup/slice", memory__max=60 * MIB, memory__current=40 * MIB, memory__stat="")

    assert headroom.available_bytes() == 20 * MIB


def test_a_group_of_the_first_kind_bounds_also_where_only_its_root_is_mounted(host: Path) -> None:
    """Goal: a container sees the path that the host gave it, but only the files of its own root."""
    (host / "membership").write_text("5:cpu:/docker/abc\n4:memory:/docker/abc\n")
    write(
        host / "cgroup/memory",
        memory__limit_in_bytes=30 * MIB,
        memory__usage_in_bytes=10 * MIB,
        memory__stat=f"total_inactive_file {MIB}",
    )

    assert headroom.available_bytes() == 21 * MIB


def test_no_limit_of_the_first_kind_is_no_bound(host: Path) -> None:
    (host / "membership").write_text("4:memory:/\n")
    write(host / "cgroup/memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=10, memory__stat="")

    assert headroom.available_bytes() == 120 * MIB


def test_a_group_that_is_over_its_limit_has_nothing_left(host: Path) -> None:
    (host / "membership").write_text("0::/\n")
    write(host / "cgroup", memory__max=MIB, memory__current=2 * MIB, memory__stat="")

    assert headroom.available_bytes() == 0


def test_this_machine_has_some() -> None:
    assert headroom.available_bytes() > MIB

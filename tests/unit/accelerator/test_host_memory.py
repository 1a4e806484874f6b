# SPDX-License-Identifier: Apache-2.0
"""Resident set and cgroup limits, the latter on made-up file trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel import host_memory

MIB, GIB = 1 << 20, 1 << 30
V1_UNLIMITED = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def host(root: Path, cgroup: str, *mounts: str, total: int = 64 * GIB, free: int = 60 * GIB) -> Path:
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {free >> 10} kB",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": "\n".join(mounts),
        },
    )
    return root


def v2_mount(point: str = "/sys/fs/cgroup", shown: str = "/") -> str:
    return f"30 20 0:26 {shown} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def v1_mount(point: str = "/sys/fs/cgroup/memory", shown: str = "/") -> str:
    return f"35 31 0:32 {shown} {point} rw,relatime - cgroup cgroup rw,memory"


def test_no_cgroup(tmp_path: Path) -> None:
    host(tmp_path, "0::/")
    assert host_memory.total(tmp_path) == 64 * GIB
    assert host_memory.available(tmp_path) == 60 * GIB


def test_no_cgroup_files_at_all(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 1024 kB\nMemAvailable: 512 kB"})
    assert (host_memory.total(tmp_path), host_memory.available(tmp_path)) == (MIB, MIB // 2)


def test_v2_limit_of_the_own_group(tmp_path: Path) -> None:
    host(tmp_path, "0::/user/job", v2_mount())
    write(
        tmp_path,
        {
            "sys/fs/cgroup/user/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/user/job/memory.current": 5 * GIB,
            "sys/fs/cgroup/user/job/memory.stat": f"anon {3 * GIB}\nactive_file {GIB}\ninactive_file {GIB}",
        },
    )
    assert host_memory.total(tmp_path) == 8 * GIB
    # 5 GiB are in use, of which the kernel can drop 2 GiB of page cache.
    assert host_memory.available(tmp_path) == 5 * GIB


def test_v2_limit_of_a_parent_counts(tmp_path: Path) -> None:
    host(tmp_path, "0::/pod/container", v2_mount())
    write(
        tmp_path,
        {
            "sys/fs/cgroup/pod/memory.max": 4 * GIB,
            "sys/fs/cgroup/pod/memory.current": 3 * GIB,
            "sys/fs/cgroup/pod/container/memory.max": "max",
            "sys/fs/cgroup/pod/container/memory.current": GIB,
        },
    )
    assert host_memory.total(tmp_path) == 4 * GIB
    assert host_memory.available(tmp_path) == GIB


def test_v1_limit(tmp_path: Path) -> None:
    host(tmp_path, "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/x", v1_mount())
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
        },
    )
    assert host_memory.total(tmp_path) == 2 * GIB
    assert host_memory.available(tmp_path) == 3 * GIB // 2


def test_both_versions_mounted_the_lower_limit_wins(tmp_path: Path) -> None:
    host(tmp_path, "4:memory:/job\n0::/job", v1_mount(), v2_mount("/sys/fs/cgroup/unified"))
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/unified/job/memory.max": 32 * GIB,
        },
    )
    assert host_memory.total(tmp_path) == 16 * GIB
    assert host_memory.available(tmp_path) == 15 * GIB


@pytest.mark.parametrize(
    ("cgroup", "shown"),
    [
        ("4:memory:/docker/abc", "/docker/abc"),  # no cgroup namespace: the path is the host's
        ("4:memory:/../other", "/"),  # a namespace whose root is elsewhere
        ("4:memory:/docker/abc", "/docker/other"),  # a part of the hierarchy that is not ours
    ],
)
def test_inside_a_container_the_mount_point_is_read(tmp_path: Path, cgroup: str, shown: str) -> None:
    host(tmp_path, cgroup, v1_mount(shown=shown))
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": GIB})
    assert host_memory.total(tmp_path) == GIB


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    host(tmp_path, "0::/", v2_mount("/my\\040cgroups"))
    write(tmp_path, {"my cgroups/memory.max": GIB})
    assert host_memory.total(tmp_path) == GIB


def test_over_the_limit_nothing_is_available(tmp_path: Path) -> None:
    host(tmp_path, "0::/", v2_mount())
    write(tmp_path, {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 2 * GIB})
    assert host_memory.available(tmp_path) == 0


@pytest.fixture
def resident() -> host_memory.ResidentSet:
    return host_memory.ResidentSet()


def statm() -> int:
    """Number of the descriptor that the native code keeps."""
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).endswith("/statm"):
            return int(link.name)
    raise AssertionError("no descriptor is kept")


@pytest.mark.usefixtures("one_cpu")
def test_the_peak_where_the_kernel_refuses_a_reset(
    resident: host_memory.ResidentSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident.reset_peak()  # what tests before this one have used does not count, where the kernel allows that
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", str(tmp_path / "missing" / "clear_refs"))
    block = bytearray(96 * MIB)
    resident.reset_peak()
    start = resident.current()
    del block
    assert resident.peak() == start  # the old mark, 96 MiB of which are from before the reset, is not reported
    block = bytearray(32 * MIB)
    seen = resident.current()
    del block
    assert resident.peak() == max(start, seen)
    # Far above: a kernel that is short of memory takes pages of libraries away meanwhile.
    above = host_memory.high_water_mark() - resident.current() + 400 * MIB
    bytearray(above)  # exceeds the old mark, and is caught though no call saw it
    assert resident.peak() - start > 100 * MIB


def test_a_descriptor_that_someone_closed_is_opened_again(resident: host_memory.ResidentSet, tmp_path: Path) -> None:
    before = resident.current()
    os.close(statm())
    assert abs(resident.current() - before) < 16 * MIB
    taken = statm()
    os.close(taken)
    with open(tmp_path / "other", "w+") as other:  # takes the number that became free
        assert other.fileno() == taken
        other.write("1 2 3")
        other.flush()
        assert abs(resident.current() - before) < 16 * MIB


def test_the_file_of_somebody_else_is_not_closed(tmp_path: Path) -> None:
    script = f"""
import os
from anyaccel._native import resident_bytes
def statm():
    links = {{int(fd): os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd")[:-1]}}
    return next(fd for fd, target in links.items() if target.endswith("/statm"))
resident_bytes()
taken = statm()
os.close(taken)
with open({str(tmp_path / "other")!r}, "w") as other:
    assert other.fileno() == taken
    pid = os.fork()
    if pid == 0:
        other.write("still open")
        other.flush()
        os._exit(0 if resident_bytes() > 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert (tmp_path / "other").read_text() == "still open"


def test_one_descriptor_is_enough() -> None:
    host_memory.RESIDENT_SET.current()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        host_memory.RESIDENT_SET.peak()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.usefixtures("one_cpu")
def test_a_forked_child_sees_its_own_memory() -> None:
    # In a process of its own, without torch's threads.
    script = """
import os
from anyaccel.host_memory import RESIDENT_SET as resident
MIB = 1 << 20
resident.reset_peak()
before = resident.current()
pid = os.fork()
if pid == 0:
    block = bytearray(64 * MIB)
    ok = resident.current() - before > 40 * MIB and resident.peak() - before > 40 * MIB
    os._exit(0 if ok else 1)
assert os.waitpid(pid, 0)[1] == 0, "the child reads its parent's memory"
assert resident.peak() - before < 32 * MIB, "the parent sees its child's peak"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

# SPDX-License-Identifier: Apache-2.0
"""Cores that processes take for themselves: which ones, that no two have the same, and that the dead give them back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.launch.local.leases import choose_cores, lease_cores
from anyaccel.topology import Cpu, Machine, NumaNode

# Another process that has the cores whose bytes it is told, until its input ends.
OTHER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
for byte in map(int, sys.argv[2:]):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
print("has them", flush=True)
sys.stdin.read()
"""


def machine(*nodes: int) -> Machine:
    """So many cores in each node, each of two threads: the second ones come after all first ones."""
    all_cores = sum(nodes)
    cpus, found, first = [], [], 0
    for node, count in enumerate(nodes):
        cores = range(first, first + count)
        pairs = [(core, core + all_cores) for core in cores]
        cpus += [Cpu(thread, core_id=pair[0], node=node, siblings=pair) for pair in pairs for thread in pair]
        found.append(NumaNode(node, tuple(sorted(thread for pair in pairs for thread in pair)), 1 << 30))
        first += count
    cpus.sort(key=lambda cpu: cpu.id)
    return Machine(tuple(cpus), tuple(found), tuple(cpu.id for cpu in cpus), tuple(range(len(nodes))))


@contextmanager
def another(folder: Path, *bytes_of_cores: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has these cores."""
    command = [sys.executable, "-S", "-c", OTHER, str(folder / f"anyaccel-cores-{os.getuid()}")]
    process = subprocess.Popen(
        [*command, *map(str, bytes_of_cores)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "has them\n"
        yield process
        process.kill()


def test_cores_are_of_the_fullest_node_that_has_enough() -> None:
    nodes = machine(4, 2, 3).nodes_with_cores()
    assert choose_cores(nodes, 2) == (4, 5)
    assert choose_cores(nodes, 3) == (6, 7, 8)
    assert choose_cores(nodes, 4) == (0, 1, 2, 3)
    assert choose_cores(nodes, 6) == (0, 1, 2, 3, 6, 7)
    assert choose_cores(nodes, 10) == ()


def test_nobody_gets_the_cores_of_another_until_that_one_has_ended(tmp_path: Path) -> None:
    with another(tmp_path, 0, 2) as other:
        mine = lease_cores(machine(2, 2), 2, 0.0, str(tmp_path))
        assert mine.cores == (1, 3)
        mine.close()
        with pytest.raises(AnyAccelError, match=r"3 cores are wanted, and of the 4 .* only 2 are free"):
            lease_cores(machine(2, 2), 3, 0.0, str(tmp_path))
        other.kill()
        other.wait()
        mine = lease_cores(machine(2, 2), 3, 0.0, str(tmp_path))
        assert mine.cores == (0, 1, 2)
        mine.close()
        mine.close()
    assert (tmp_path / f"anyaccel-cores-{os.getuid()}").stat().st_mode & 0o777 == 0o600


def test_one_chooses_at_a_time(tmp_path: Path) -> None:
    with another(tmp_path, 1 << 20), pytest.raises(AnyAccelError, match="only 0 are free"):
        lease_cores(machine(2), 1, 0.0, str(tmp_path))


@pytest.mark.parametrize("count", [0, 5])
def test_more_than_there_are_is_an_error_at_once(tmp_path: Path, count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} cores are wanted, and this process may use 4"):
        lease_cores(machine(2, 2), count, 60.0, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / f"anyaccel-cores-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        lease_cores(machine(2), 1, 0.0, str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


def test_all_threads_of_a_process_are_bound() -> None:
    code = """
import os, threading
from anyaccel.launch.local.leases import bind_to
from anyaccel.topology import read_machine
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(3)]
for thread in threads: thread.start()
machine = read_machine()
last = machine.cores()[-1].id
bind_to(machine, (last,))
bound = [os.sched_getaffinity(int(name)) == {last} for name in os.listdir("/proc/self/task")]
stop.set()
print(len(bound) >= 4 and all(bound))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")

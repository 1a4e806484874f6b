# SPDX-License-Identifier: Apache-2.0
"""How pytest-xdist shares the tests out, where it is asked for: `pytest -n auto --dist loadfile`.

The tests of a file run in one process, which makes their models and servers once; so do all that run jobs on the hosts
of a test cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# In this order: what waits for the longest time comes first, and what is short fills up the end.
_FOLDERS = ("cluster", "e2e", "multiproc", "unit")
_MACHINE = re.compile(r"@[a-z0-9]+(-[a-z0-9]+)*")  # in the ids of tests/machines
# A worker takes about 1.5 GiB with torch and transformers.
_MOST_WORKERS = 8


def take_own_process_group() -> None:
    """Give each worker a process group of its own, whose parent in the session keeps it from being an orphan.

    In a session without a terminal all would be in one orphaned group. The kernel sends SIGHUP to all of such a group
    when one of its processes is stopped, as tests do, while another loses its parent.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.setpgid(0, 0)


@pytest.hookimpl
def pytest_keyboard_interrupt() -> None:
    """Pass Ctrl-C on to the workers, which are in other groups than the terminal's."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended, or has no group
                os.killpg(int(child), signal.SIGINT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two a core: many a test waits for other processes."""
    return min(2 * len(os.sched_getaffinity(0)), _MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of --dist loadfile, with one group for all tests of the cluster, and one for those of a machine."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if file.startswith("tests/machines/") and (machine := _MACHINE.search(nodeid)):
                return machine[0]
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    return Scheduler(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders in the order of `_FOLDERS`."""
    tests = Path(__file__).parents[1]

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)

    items.sort(key=place)  # a stable sort: files and tests keep their order


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in memory where there is some: thousands of files take a disk 15 times as long."""
    shm = Path("/dev/shm")
    try:
        in_memory = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1 << 30
    except OSError:
        in_memory = False
    return tempfile.TemporaryDirectory(prefix="pytest-", dir=shm if in_memory else None)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all workers of this run have."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """What is inside makes `path` once: other workers wait for the first one, and find it there."""
    with open(path.with_name(f"{path.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_of_another(path: str) -> bool:
    """Whether a process of another worker has a file mapped."""
    controller = os.getppid()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return False
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # one that has ended
                if path in (entry / "maps").read_text():
                    worker = _worker_above(int(entry.name), controller)
                    return worker not in (0, os.getpid())
    return False


def _worker_above(pid: int, controller: int) -> int:
    """The worker that a process descends from; 0 where it is none."""
    while pid > 1:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == controller:
            return pid
        pid = parent
    return 0

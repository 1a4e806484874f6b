# SPDX-License-Identifier: Apache-2.0
"""The lock under which one process makes an entry of a cache while others wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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
    while (file := _take(path)) is None:
        if time.monotonic() > deadline:
            raise ModelError(f"{path}: another process has held this lock for {LOCK_SECONDS:.0f} s") from None
        if check is not None:
            check()
        time.sleep(0.1)
    with file:
        yield


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock if it is free; yields False, without waiting, if another process has it."""
    file = _take(path)
    if file is None:
        yield False
        return
    with file:
        yield True


def _take(path: Path) -> TextIO | None:
    """The file, locked until it is closed; None when another process has it, or has just removed it.

    A lock on a file that is gone from `path` keeps nobody out.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def remove_if_free(folder: Path) -> None:
    """Remove an entry of a cache, unless a process is making it at the moment."""
    import shutil

    lock = folder.with_name(f"{folder.name}.lock")
    with contextlib.suppress(OSError), locked_if_free(lock) as free:
        if free:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)

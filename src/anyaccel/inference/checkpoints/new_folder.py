# SPDX-License-Identifier: Apache-2.0
"""Folders and files that appear atomically, when they are complete. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from anyaccel.errors import UsageError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _EndedBySignal(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def new_folder(target: Path, check: Callable[[], object]) -> Iterator[Path]:
    """An empty folder that is renamed to `target` at the end.

    If the block fails, nothing is left: see `_temporary_folder`.

    Args:
        check: called if something is at `target` at the end, which is replaced unless this raises a UsageError. It
            may have come there in the meantime.

    Raises:
        UsageError: that of `check`; it names the place where the folder is then.
    """
    with _temporary_folder(target) as folder:
        yield folder
        folder.chmod(0o755)
        if not _appears(folder, target):
            with _elsewhere(folder, target):
                check()
            _replace(folder, target)


@contextlib.contextmanager
def new_file(target: Path, check: Callable[[], object]) -> Iterator[Path]:
    """A path for a file that takes the place of `target` at the end; see `new_folder`."""
    with _temporary_folder(target) as folder:
        made = folder / target.name
        yield made
        if not _appears(made, target):
            with _elsewhere(made, target):
                check()
            made.replace(target)


@contextlib.contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` for the duration of the block.

    It is removed if the block fails, or if SIGTERM or SIGHUP ends the process. After SIGKILL, the next call for the
    same `target` removes it: a lock on the folder shows whether a process still uses it.
    """
    _remove_abandoned(target)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-{os.getpid()}-", dir=target.parent))
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _signals_raise():
            yield temporary
    except _EndedBySignal as ended:
        shutil.rmtree(temporary, ignore_errors=True)
        os.kill(os.getpid(), ended.number)  # the default handler, which is restored, ends the process
        raise SystemExit(128 + ended.number) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def check_room(folder: Path, size: int) -> None:
    """Raise UsageError, before any work, if a file system has less than `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UsageError(
            f"{folder}: {free / 2**20:.1f} MiB are free, {size / 2**20:.1f} MiB are needed; "
            "make room, or give a folder elsewhere"
        )


def _appears(made: Path, target: Path) -> bool:
    """Give what was made its name, unless something has that name."""
    if os.path.lexists(target):
        return False
    try:
        if made.is_dir():
            made.rename(target)  # fails where a folder that is not empty has come in between
        else:
            _link(made, target)
    except OSError:
        if os.path.lexists(target):
            return False
        raise
    return True


def _link(made: Path, target: Path) -> None:
    """As rename, which would replace a file at `target`; that is left to file systems without links."""
    try:
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise
        made.rename(target)


@contextlib.contextmanager
def _elsewhere(made: Path, target: Path) -> Iterator[None]:
    """Keep what was made, beside `target`, if the block raises a UsageError."""
    try:
        yield
    except UsageError as error:
        other = target.with_name(f"{target.stem}-{os.getpid()}{target.suffix}")
        made.rename(other)
        raise UsageError(f"{error}. It has come there since this began; what was made is {other}") from None


def _replace(temporary: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-{os.getpid()}-old-", dir=target.parent))
    try:
        target.rename(old / "old")
        temporary.rename(target)
    except BaseException:
        if not target.exists():
            (old / "old").rename(target)
        raise
    finally:
        if target.exists():  # otherwise the old folder is the only copy
            shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    # Folders named "old" are kept, as one of them may be the only copy that is left.
    pattern = re.compile(rf"\.{re.escape(target.name)}-(\d+)-(?!old-)")
    for folder in target.parent.iterdir():
        found = pattern.match(folder.name)
        if found is None or folder.is_symlink() or not folder.is_dir() or Path(f"/proc/{found[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Make signals that would end the process raise instead, so that temporary files are removed."""

    def ended(number: int, _frame: Any) -> NoReturn:
        raise _EndedBySignal(number)

    changed = []
    if threading.current_thread() is threading.main_thread():
        changed = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, ended)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)

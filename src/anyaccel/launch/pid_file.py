# SPDX-License-Identifier: Apache-2.0
"""The launcher's process id in a file, for scripts that end a job later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

from anyaccel.errors import UsageError


@contextmanager
def pid_file() -> Iterator[Path]:
    """Write this process's id to ``<temporary folder>/<id>.anyaccel``, and remove the file at the end.

    Raises:
        UsageError: the file cannot be written.
    """
    pid = os.getpid()
    path = Path(gettempdir()) / f"{pid}.anyaccel"
    try:
        path.unlink(missing_ok=True)  # of an earlier process with this id
        # Never through a link that somebody else put there.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--save_pid cannot write {path}: {error.strerror}; remove it, or set TMPDIR") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{pid}\n")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)

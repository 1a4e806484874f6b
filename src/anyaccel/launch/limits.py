# SPDX-License-Identifier: Apache-2.0
"""The limit on open files, for a launcher that has thousands of connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from anyaccel.errors import UsageError

# Descriptors that this process needs besides: for its own files, and to look through /proc.
_OTHERS = 64


@contextmanager
def many_descriptors(number: int) -> Iterator[None]:
    """Raise the soft limit on open files where `number` more do not fit. Children inherit it.

    Raises:
        UsageError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise UsageError(
            f"{number} connections do not fit into the limit of {hard} open files; raise it (ulimit -Hn), "
            "or use fewer hosts"
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

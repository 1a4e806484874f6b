# SPDX-License-Identifier: Apache-2.0
"""A progress bar for transfers that take longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DELAY_SECONDS = 1.0


@contextmanager
def progress_bar(what: str, total: int, wanted: bool | None) -> Iterator[Callable[[int], object] | None]:
    """A function that takes the bytes done so far; None where no bar is to be shown.

    Args:
        wanted: None shows a bar when stderr is a terminal, and tqdm is installed.
    """
    if wanted is None:
        wanted = sys.stderr is not None and sys.stderr.isatty()
    try:
        from tqdm import tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=_DELAY_SECONDS, leave=False) as bar:
        yield lambda done: bar.update(done - bar.n)
        bar.update(total - bar.n)

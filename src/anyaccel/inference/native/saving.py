# SPDX-License-Identifier: Apache-2.0
"""Packed weights that are written to the cache beside the work: nobody waits for the disk before the first token."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LATEST_START = 1.0  # seconds after the model is ready: when nobody asks it for a token
_NICE = 10  # of the thread that writes, which takes what the work leaves

_under_way: weakref.WeakSet[Saving] = weakref.WeakSet()


class _Stopped(Exception):
    pass


class Saving:
    """One write in a thread of its own; a process that ends waits for it, or ends it after Ctrl-C.

    Args:
        write: called there with what it is to call again and again, which raises once it shall stop.
        release: called there at the end, whatever that is.
    """

    def __init__(self, write: Callable[[Callable[[], None]], object], release: Callable[[], object]) -> None:
        # An event for the end, too: Python 3.11 takes a thread whose join() was interrupted for one that has ended.
        self._begun, self._stopped, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(write, release), name="anyaccel-saving", daemon=True)
        if not _under_way:
            atexit.register(finish_all)
        _under_way.add(self)
        self._thread.start()

    def begin(self) -> None:
        """The first token is there: from now on the disk may be busy."""
        self._begun.set()

    def finish(self, stop: bool = False) -> None:
        """Wait until it is written; with `stop`, or after Ctrl-C, give it up."""
        if stop:
            self._stopped.set()
        self.begin()
        try:
            self._ended.wait()
        except BaseException:
            self._stopped.set()
            self._ended.wait()
            raise
        finally:
            _under_way.discard(self)
        self._thread.join()

    def _run(self, write: Callable[[Callable[[], None]], object], release: Callable[[], object]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._begun.wait(_LATEST_START)
        try:
            write(self._raise_if_stopped)
        except _Stopped:
            logger.info("packed weights are not kept: the process ended before they were written")
        except Exception:
            logger.exception("packed weights are not kept")
        finally:
            release()
            self._ended.set()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _Stopped


def finish_all() -> None:
    """Wait for all of this process."""
    for saving in list(_under_way):
        saving.finish()

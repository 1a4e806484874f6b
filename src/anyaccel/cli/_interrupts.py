# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C where it does no harm: neither lost nor thrown through code that cannot bear it.

Python raises KeyboardInterrupt wherever the program happens to be. In the import system that breaks things: a callback
that frees a module's lock swallows it and may keep the lock of all imports, and the initialisation of a native library
that runs Python takes it for a C++ exception that nobody catches, which ends the process with SIGABRT. Both were seen
with torch. So Ctrl-C waits until no import is under way, and comes again where Python could only print and drop it
(finalizers, callbacks of weak references).
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

_AGAIN = 0.02  # seconds
_PATIENCE = 10.0  # seconds that an import may delay Ctrl-C: one that hangs is to be interrupted all the same
_IMPORT_SYSTEM = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """Ctrl-C of one command; see `careful_interrupts`."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the Ctrl-C came that has not been raised yet
        self._installed = True

    def raise_waiting(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C is still waiting at the end, where nothing else would raise it."""
        if self._since is not None:
            self._since = None
            raise KeyboardInterrupt

    def handle(self, _number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if _is_importing(frame) and now - self._since < _PATIENCE:
            self._come_again()
            return
        self._since = None
        raise KeyboardInterrupt

    def dropped(self) -> None:
        """Send the signal again for a Ctrl-C that came inside a callback, where Python could only print and drop it."""
        self._since = time.monotonic()
        self._come_again()

    def _come_again(self) -> None:
        # Not threading.Thread: the interrupted code may hold the locks that it takes.
        _thread.start_new_thread(self._later, ())

    def _later(self) -> None:
        time.sleep(_AGAIN)
        if self._installed and self._since is not None:
            # To the main thread, so that a system call in which it waits ends.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self) -> None:
        self._installed = False


@contextmanager
def careful_interrupts() -> Iterator[Interrupts]:
    """Have Ctrl-C raise KeyboardInterrupt in the main thread outside of imports, and never be lost."""
    interrupts = Interrupts()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts  # the process that started us ignores Ctrl-C, or other code has a handler of its own
        return
    print_unraisable = sys.unraisablehook

    def look(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            interrupts.dropped()
        else:
            print_unraisable(unraisable)

    sys.unraisablehook = look
    signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        interrupts.end()
        if signal.getsignal(signal.SIGINT) == interrupts.handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = print_unraisable

# SPDX-License-Identifier: Apache-2.0
"""A handler of Ctrl-C that neither loses it nor raises it in code that cannot bear an exception.

Python raises KeyboardInterrupt wherever the program happens to be. In the import system that breaks things: a callback
that frees a module's lock swallows it and may keep the lock of all imports, and the initialisation of a native library
that runs Python turns it into a C++ exception that nobody catches, which ends the process with SIGABRT. Both were seen
with torch. So the handler defers Ctrl-C until no import is under way, and sends it again where Python could only print
and drop it (in finalizers and in callbacks of weak references).
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

_RESEND_S = 0.02
_LONGEST_DEFERRAL_S = 10.0  # an import that hangs must be interrupted all the same
_IMPORT_SYSTEM = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """The state of the handler for one command; see `careful_interrupts`."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the deferred Ctrl-C came
        self._installed = True

    def raise_deferred(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C is still deferred when the command ends."""
        if self._since is not None:
            self._since = None
            raise KeyboardInterrupt

    def handle(self, _number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if _is_importing(frame) and now - self._since < _LONGEST_DEFERRAL_S:
            self._resend_soon()
            return
        self._since = None
        raise KeyboardInterrupt

    def resend_dropped(self) -> None:
        """Send a Ctrl-C again that came inside a callback, whose exceptions Python can only print."""
        self._since = time.monotonic()
        self._resend_soon()

    def _resend_soon(self) -> None:
        # The interrupted code may hold the locks that threading.Thread takes.
        _thread.start_new_thread(self._resend, ())

    def _resend(self) -> None:
        time.sleep(_RESEND_S)
        if self._installed and self._since is not None:
            # The main thread gets the signal itself, so that a system call in which it waits returns.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self) -> None:
        self._installed = False


@contextmanager
def careful_interrupts() -> Iterator[Interrupts]:
    """Within the context, Ctrl-C raises KeyboardInterrupt in the main thread outside of imports, and is never lost."""
    interrupts = Interrupts()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts  # our parent ignores Ctrl-C, or other code has its own handler
        return
    print_unraisable = sys.unraisablehook

    def resend_or_print(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            interrupts.resend_dropped()
        else:
            print_unraisable(unraisable)

    sys.unraisablehook = resend_or_print
    signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        interrupts.end()
        if signal.getsignal(signal.SIGINT) == interrupts.handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = print_unraisable

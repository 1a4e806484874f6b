# SPDX-License-Identifier: Apache-2.0
"""Runs the code of a vendor or extension with a deadline, so that one that hangs does not hang the program.

The work runs in a thread, not in a process of its own: importing torch again would cost seconds at each start. A
thread cannot be ended, so one that is too late is left behind. Code that holds the interpreter's lock while it hangs
holds everything; nothing but a process would help there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How long an interrupted caller waits for the work: importing torch takes two seconds, on a loaded machine more.
_ENDING_SECONDS = 10.0

_thread = threading.local()


def is_probing() -> bool:
    """Whether the calling thread is one that `run` has started."""
    return getattr(_thread, "probing", False)


def run(work: Callable[[], T], seconds: float, imports: str = "") -> T:
    """The result of `work()`.

    Args:
        seconds: after which it is given up.
        imports: module or ``"module:attribute"`` that the work imports.

    Raises:
        TimeoutError: it did not end in time.
        Exception: whatever it raises.
    """
    if _is_being_imported(imports.partition(".")[0].partition(":")[0]):
        # The caller's own thread imports this package: another thread would wait for it, and it for that.
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        _thread.probing = True
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)
        finally:
            ended.set()

    # Not Thread.join(): Python 3.11 takes a thread whose join was interrupted for one that has ended.
    ended = threading.Event()
    thread = threading.Thread(target=body, name="anyaccel-probe", daemon=True)
    try:
        thread.start()
        ended.wait(seconds)
    except BaseException:
        # Ctrl-C. What imports a native library must not be left behind when the interpreter goes away: that crashes.
        ended.wait(min(seconds, _ENDING_SECONDS))
        raise
    if results:
        return results[0]
    if not errors:
        raise TimeoutError(f"no answer within {seconds:g} s; ANYACCEL_PROBE_TIMEOUT=SECONDS allows more")
    if isinstance(errors[0], ValueError) and "main thread" in str(errors[0]):
        return work()  # the package installs signal handlers, which only the main thread may do
    raise errors[0]


def _is_being_imported(package: str) -> bool:
    spec = getattr(sys.modules.get(package), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))

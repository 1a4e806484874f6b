# SPDX-License-Identifier: Apache-2.0
"""Work in a thread beside the caller's own, which never outlives it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_STARTING = 1.0  # seconds


class Abandoned(BaseException):
    """Ends work that nobody waits for any more. No Exception, so that the work's own handlers let it pass."""


class Beside:
    """Work in a thread of its own: reading weights and reading the tokenizer take a core each.

    As a context manager it waits, whatever ends the block, until the thread has ended; the work is told to give up and
    looks for that each time it calls `check`. A thread that is left to itself while the interpreter goes away crashes
    the process: what it reads from and writes to is unmapped below it, or Python ends it within C++ code.
    """

    # Not Thread.join(): Python 3.11 takes a thread whose join was interrupted for one that has ended.

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned.set()
        if self._thread is None:
            return
        while not self._ended.wait(_STARTING):
            if self._thread.ident is None:  # Ctrl-C came within start(). If it does start yet, it ends at once.
                return
        self._thread.join()

    def start(self, work: Callable[[], Any]) -> None:
        """Begin; within the block, so that Ctrl-C finds its end."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="loading")
        self._thread.start()

    def check(self) -> None:
        """End the work if nobody waits for it any more; the work calls this often.

        Raises:
            Abandoned: nobody waits for it any more.
        """
        if self._abandoned.is_set():
            raise Abandoned

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.check()
            self._value = work()
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Any:
        """What the work returned, or raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value

# SPDX-License-Identifier: Apache-2.0
"""Runs work in a second thread, which never outlives the caller's block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_STARTING = 1.0  # seconds


class Abandoned(BaseException):
    """Ends work that nobody waits for any more. It is not an Exception, so that the work does not catch it."""


class BackgroundTask:
    """Work in a second thread, such as reading weights while the tokenizer is read.

    As a context manager it waits for the end of the thread, whatever ends the block, and cancels the work, which has to
    call `check` often. A thread that is still running when the interpreter exits crashes the process: memory that it
    uses is unmapped, or Python ends it within C++ code.
    """

    # An event is used instead of Thread.join(), as after an interrupted join Python 3.11 considers the thread ended.

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> BackgroundTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned.set()
        if self._thread is None:
            return
        while not self._ended.wait(_STARTING):
            if self._thread.ident is None:  # Ctrl-C came within start(); if the thread still starts, it ends at once
                return
        self._thread.join()

    def start(self, work: Callable[[], Any]) -> None:
        """Start the work. Call it within the block, so that Ctrl-C ends it."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="loading")
        self._thread.start()

    def check(self) -> None:
        """End the work if the block has ended; the work has to call this often.

        Raises:
            Abandoned: the block has ended.
        """
        if self._abandoned.is_set():
            raise Abandoned

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.check()
            self._value = work()
        except BaseException as error:  # noqa: BLE001  result() raises it
            self._error = error
        finally:
            self._ended.set()

    def result(self) -> Any:
        """Wait for the work, and return its result or raise its error."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value

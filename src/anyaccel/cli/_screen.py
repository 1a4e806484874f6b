# SPDX-License-Identifier: Apache-2.0
"""The output of commands while they work: the text of an answer as it comes, and progress on standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from anyaccel.terminal import moves_cursor, styled, terminal_width

_BAR_DELAY_S = 0.3  # loading that takes less shows no progress
_ELAPSED_DELAY_S = 0.7  # what takes less shows no elapsed time


def keep_bytes(stream: TextIO) -> TextIO:
    """Have standard input read bytes that are not UTF-8 as surrogates instead of failing.

    The tokenizer then refuses them with a message that names the bytes.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")
    return stream


class Elapsed:
    """The line on a terminal that says what the command does, and for how long while nothing else is written.

    A thread draws it with os.write: the command may fork, and the child would inherit a held lock of sys.stderr.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._quiet_since = self._started
        self._drawn = 0  # columns
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._draw_until_done, daemon=True)
        self._thread.start()

    def say(self, what: str) -> None:
        """Say this from now on."""
        with self._lock:
            self._what, self._quiet_since = what, time.monotonic()
            self._draw(what)

    def rename(self, what: str) -> None:
        """Say this once there is something to say again."""
        with self._lock:
            self._what = what

    def clear(self) -> None:
        """Erase the line before another one is printed."""
        with self._lock:
            self._quiet_since = time.monotonic()
            self._erase()

    def end(self) -> None:
        self._done.set()
        self._thread.join()
        self.clear()

    def _draw_until_done(self) -> None:
        while not self._done.wait(0.1):
            with self._lock:
                now = time.monotonic()
                if now - self._quiet_since > (1.0 if self._drawn else _ELAPSED_DELAY_S):
                    self._quiet_since = now
                    self._draw(f"{self._what} ... {now - self._started:.0f} s")

    def _draw(self, text: str) -> None:
        text = text[: terminal_width() - 1]
        self._erase()
        self._write(text)
        self._drawn = len(text)

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\r{' ' * self._drawn}\r")
            self._drawn = 0

    @staticmethod
    def _write(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within the context, a terminal shows what is being done and for how long; the line is erased afterwards.

    Args:
        what: what is being done, as in "importing torch".
    """
    if not moves_cursor(sys.stderr):
        yield
        return
    line = Elapsed(what)
    try:
        yield
    finally:
        line.end()


class Screen:
    """Prints messages and progress to standard error; with `shown` false, as on all ranks but 0, it prints nothing."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._started = 0.0
        self._drawn = 0.0
        self._bar = moves_cursor(sys.stderr)
        self._elapsed: Elapsed | None = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Within the context, a terminal shows for how long the model has been loading, while nothing else is shown."""
        if not self.shown or not self._bar:
            yield
            return
        self._elapsed = Elapsed("loading")
        try:
            yield
        finally:
            self._elapsed.end()
            self._elapsed = None

    def line(self, text: str, kind: str = "plan") -> None:
        if self.shown:
            self._clear()
            print(styled(text, kind, sys.stderr), file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """Show how many bytes of the weights are loaded: on a terminal as they are, elsewhere once at the end."""
        if not self.shown:
            return
        now = time.monotonic()
        self._started = self._started or now
        share = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        if done >= total:
            self._clear()
            if self._elapsed is not None:
                self._elapsed.rename("loading")
            print(f"loading: {share} in {now - self._started:.1f} s", file=sys.stderr, flush=True)
            self._started = self._drawn = 0.0
        elif self._elapsed is not None and now - max(self._drawn, self._started + _BAR_DELAY_S - 0.1) > 0.1:
            self._drawn = now
            self._elapsed.say(f"loading: {share} ({100 * done // max(total, 1)} %)")

    def _clear(self) -> None:
        if self._elapsed is not None:
            self._elapsed.clear()


class AnswerStream:
    """Decodes the tokens of one answer as they come and shows its text; it has ended once a stop string is complete."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str], show: Callable[[str], object] | None
    ) -> None:
        from anyaccel.inference.text.stopping import Detokenizer, StopFilter

        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stop)
        self._show = show
        self._parts: list[str] = []

    @property
    def ended(self) -> bool:
        return self._filter.stopped

    @property
    def text(self) -> str:
        """The text that has been shown so far."""
        return "".join(self._parts)

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._show is not None:
                self._show(text)

    def add(self, token: int) -> None:
        text = self._detokenizer.add(token)
        if text:
            self._add(self._filter.add(text))

    def finish(self) -> None:
        """Show the text that was held back because a stop string could have begun in it."""
        if not self.ended:
            self._add(self._filter.add(self._detokenizer.finish()))
        if not self.ended:
            self._add(self._filter.finish())


def show(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()

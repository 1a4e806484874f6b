# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `chat` show: an answer while it comes, and beside it what they do."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from anyaccel.cli._style import styled

_PROGRESS_SECONDS = 0.3  # loading that takes less is not worth a bar


def keep_bytes(stream: TextIO) -> TextIO:
    """Standard input that reads bytes that are not UTF-8 as surrogates instead of failing.

    The tokenizer refuses them with a message that names the bytes.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")
    return stream


class Screen:
    """What rank 0 tells the user on standard error; nothing when quiet and on the other ranks."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._started = 0.0
        self._drawn = 0.0
        self._bar = sys.stderr.isatty()

    def line(self, text: str, kind: str = "plan") -> None:
        if self.shown:
            print(styled(text, kind, sys.stderr), file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """How many bytes of the weights are loaded: a line that changes on a terminal, else one at the end."""
        if not self.shown:
            return
        now = time.monotonic()
        self._started = self._started or now
        share = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        if done >= total:
            start = "\r" if self._drawn else ""
            print(f"{start}loading: {share} in {now - self._started:.1f} s", file=sys.stderr, flush=True)
            self._started = self._drawn = 0.0
        elif self._bar and now - max(self._drawn, self._started + _PROGRESS_SECONDS - 0.1) > 0.1:
            self._drawn = now
            print(f"\rloading: {share} ({100 * done // max(total, 1)} %)", end="", file=sys.stderr, flush=True)


class Stream:
    """The text of one answer while its tokens come; `ended` once a stop string is complete."""

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
        """What has been shown so far."""
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
        """Show what was held back."""
        if not self.ended:
            self._add(self._filter.add(self._detokenizer.finish()))
        if not self.ended:
            self._add(self._filter.finish())


def show(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()

# SPDX-License-Identifier: Apache-2.0
"""Text while it is generated: detokenised token by token, and searched for strings that end it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anyaccel.errors import UsageError

Decode = Callable[[list[int]], str]

_CONTEXT = 8  # tokens before the answer that its first ones are decoded with: some tokenizers drop a leading space
_UNFINISHED = "\ufffd"  # what a part of a character decodes to


class Detokenizer:
    """Turns tokens into text as they come; characters of several tokens appear when they are complete.

    A token's text depends on those before it, so a few are decoded again each time: the new text is what the longer
    list adds to the shorter one's.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)[-_CONTEXT:]
        self._start = 0  # index of the first token that is decoded
        self._shown = len(self._tokens)  # tokens whose text has been given

    def add(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self._tokens.append(token)
        return self._new_text(final=False)

    def extend(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, for the price of one."""
        self._tokens.extend(tokens)
        return self._new_text(final=False)

    def finish(self) -> str:
        """What was held back, complete or not."""
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        known = self._decode(self._tokens[self._start : self._shown])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or (text.endswith(_UNFINISHED) and not final):
            return ""
        self._start = self._shown
        self._shown = len(self._tokens)
        if self._start > 256:  # a long answer does not keep all its tokens twice
            del self._tokens[: self._start]
            self._shown -= self._start
            self._start = 0
        return text[len(known) :]


class StopStrings:
    """Strings that end an answer when they appear in its text.

    Raises:
        UsageError: no string, or an empty one.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        if not strings or not all(isinstance(text, str) and text for text in strings):
            raise UsageError(f"stop_strings={list(strings)!r}: must be texts of at least one character")
        self.strings = tuple(strings)
        self.decode = decode

    def begin(self, prompt: Sequence[int]) -> StopSearch:
        """The search through one answer to `prompt`, in whose end a string may begin."""
        return StopSearch(self, prompt)


class StopSearch:
    """One answer's search."""

    def __init__(self, stop: StopStrings, prompt: Sequence[int]) -> None:
        self._strings = stop.strings
        self._longest = max(map(len, stop.strings))
        self._detokenizer = Detokenizer(stop.decode, prompt)
        self._tail = stop.decode(list(prompt)[-self._longest :])[-(self._longest - 1) :] if self._longest > 1 else ""

    def add(self, token: int) -> bool:
        """Whether a string is complete with this token."""
        text = self._detokenizer.add(token)
        if not text:
            return False
        window = self._tail + text
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        before = len(window) - len(text)
        # A match must end in the new text: the tail may hold a shorter string whole.
        return any(window.find(string, max(0, before - len(string) + 1)) >= 0 for string in self._strings)


class StopFilter:
    """Text for a reader who is not to see the strings: what may be the beginning of one is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False
        self.found = ""  # the string that stopped it

    def add(self, text: str) -> str:
        """What can be shown now; `stopped` is set when a string is complete."""
        text = self._held + text
        ends = [place for string in self._strings if (place := text.find(string)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            first = min(ends)
            self.found = next(string for string in self._strings if text.startswith(string, first))
            return text[:first]
        keep = max((overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)

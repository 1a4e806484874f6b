# SPDX-License-Identifier: Apache-2.0
"""Separates a model's thoughts from its answer: <think>…</think>, as Qwen 3 and DeepSeek R1 write it."""

from __future__ import annotations

from anyaccel.inference.text.stopping import overlap

BEGIN, END = "<think>", "</think>"


def thinks(template: str) -> bool:
    """Whether a model with this chat template writes its thoughts between these marks."""
    return END in template or BEGIN in template


class Thoughts:
    """Divides an answer into thoughts and the rest while it comes.

    Args:
        inside: whether the prompt ends with the opening mark.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._begun = inside  # an opening mark counts only at the beginning of the answer
        self._between = False  # skipping the line breaks after the thoughts, which belong to neither part
        self._text = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next thoughts and the next part of the answer; `last`: no more text comes."""
        self._text += text
        thoughts = ""
        if not self._begun:
            start = self._text.lstrip()
            if start.startswith(BEGIN):
                self._inside, self._text = True, start[len(BEGIN) :]
            elif BEGIN.startswith(start) and not last:
                return "", ""
            self._begun = True
        if self._inside:
            place = self._text.find(END)
            if place < 0:
                shown = len(self._text) - (0 if last else overlap(self._text, END))
                thoughts, self._text = self._text[:shown], self._text[shown:]
                return thoughts, ""
            thoughts, self._text = self._text[:place], self._text[place + len(END) :]
            self._inside, self._between = False, True
        if self._between:
            self._text = self._text.lstrip("\n")
            self._between = not self._text
        answer, self._text = self._text, ""
        return thoughts, answer

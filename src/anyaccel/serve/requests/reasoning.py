# SPDX-License-Identifier: Apache-2.0
"""Separates a model's reasoning from its answer: <think>…</think>, as Qwen 3 and DeepSeek R1 write it."""

from __future__ import annotations

from anyaccel.inference.text.stopping import overlap

BEGIN, END = "<think>", "</think>"


def has_reasoning(template: str) -> bool:
    """Whether a model with this chat template writes its reasoning between these marks."""
    return END in template or BEGIN in template


class ReasoningParser:
    """Divides an answer into reasoning and the rest while it comes.

    Args:
        inside: whether the prompt ends with the opening mark.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._started = inside  # an opening mark counts only at the beginning of the answer
        self._skipping = False  # the line breaks after the reasoning, which belong to neither part
        self._text = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next reasoning and the next part of the answer; `last`: no more text comes."""
        self._text += text
        reasoning = ""
        if not self._started:
            start = self._text.lstrip()
            if start.startswith(BEGIN):
                self._inside, self._text = True, start[len(BEGIN) :]
            elif BEGIN.startswith(start) and not last:
                return "", ""
            self._started = True
        if self._inside:
            place = self._text.find(END)
            if place < 0:
                complete = len(self._text) - (0 if last else overlap(self._text, END))
                reasoning, self._text = self._text[:complete], self._text[complete:]
                return reasoning, ""
            reasoning, self._text = self._text[:place], self._text[place + len(END) :]
            self._inside, self._skipping = False, True
        if self._skipping:
            self._text = self._text.lstrip("\n")
            self._skipping = not self._text
        answer, self._text = self._text, ""
        return reasoning, answer

# SPDX-License-Identifier: Apache-2.0
"""Separates a model's thoughts from its answer: the marks of each format, and their parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anyaccel.inference.text.stopping import overlap
from anyaccel.serve.requests.tools.format import containing


@dataclass(frozen=True)
class ReasoningFormat:
    """How models write their thoughts.

    Attributes:
        models: whose format it is, for the documentation.
        begin, end: the marks around the thoughts; a grammar takes the first ones.
        known_by: returns whether a chat template describes this format.
        opened: further ends of a prompt that has opened the thoughts.
        after: what follows the thoughts.
        answer: marks around the answer, which are no part of it.
        is_answer_marked: whether an answer cannot do without these marks.
    """

    name: str
    models: str
    begin: tuple[str, ...]
    end: tuple[str, ...]
    known_by: Callable[[str], bool]
    opened: tuple[str, ...] = ()
    after: str = ""
    answer: tuple[str, str] = ("", "")
    is_answer_marked: bool = False

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening mark."""
        return prompt.rstrip().endswith((*map(str.rstrip, self.begin), *self.opened))

    def is_inside(self, text: str) -> bool:
        """Whether the beginning of an answer ends within its thoughts."""
        return max(map(text.rfind, self.begin)) > max(map(text.rfind, self.end))

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begin, *self.end, *filter(None, self.answer))


_THINK = ("<think>",), ("</think>",)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat(
            "harmony",
            "gpt-oss",
            ("<|channel|>analysis<|message|>",),
            ("<|end|>",),
            containing("<|channel|>", "<|message|>"),
            after="<|start|>assistant",
            answer=("<|channel|>final<|message|>", ""),
            is_answer_marked=True,
        ),
        ReasoningFormat(
            "seed-oss",
            "Seed-OSS",
            ("<seed:think>",),
            ("</seed:think>",),
            containing("<seed:think>"),
            opened=("<seed:think><seed:cot_budget_reflect>",),
        ),
        ReasoningFormat("mistral", "Magistral, Ministral 3", ("[THINK]",), ("[/THINK]",), containing("[THINK]")),
        ReasoningFormat(
            "cohere",
            "Command R7B and A",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            containing("<|START_THINKING|>"),
            answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ReasoningFormat(
            "gemma-4", "Gemma 4", ("<|channel>thought\n",), ("<channel|>",), containing("<|channel>", "<channel|>")
        ),
        ReasoningFormat(
            "granite",
            "Granite 3.2",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            containing("Here is my thought process"),
        ),
        ReasoningFormat(
            "apriel",
            "Apriel 1.5 and 1.6",
            ("Here are my reasoning steps:",),
            ("[BEGIN FINAL RESPONSE]",),
            containing("[BEGIN FINAL RESPONSE]"),
            answer=("", "[END FINAL RESPONSE]"),
        ),
        ReasoningFormat(
            "hunyuan", "Hunyuan A13B", *_THINK, containing("</think>", "<answer>"), answer=("<answer>", "</answer>")
        ),
        ReasoningFormat(
            "ernie",
            "ERNIE 4.5, Granite 3.3",
            *_THINK,
            containing("<think>", "<response>", but=("<minimax:tool_call>",)),
            answer=("<response>", "</response>"),
        ),
        ReasoningFormat(
            "think",
            "Qwen 3, DeepSeek V3.1 and R1, GLM 4.5, MiniMax M2, Nemotron, Kimi K2, Phi 4 and others",
            *_THINK,
            lambda template: "<think>" in template or "</think>" in template,
        ),
    )
}


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format that a chat template describes, if it describes one."""
    return next((each for each in REASONING_FORMATS.values() if each.known_by(template)), None)


class ReasoningParser:
    """Divides an answer into reasoning and the rest while it comes.

    Args:
        inside: whether the prompt has opened the thoughts.
    """

    def __init__(self, form: ReasoningFormat, inside: bool) -> None:
        self._form = form
        # Where the text is: an opening mark counts only at the beginning of the answer.
        self._state = "inside" if inside else "start"
        self._text = ""

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next reasoning and the next part of the answer; `last`: no more text comes."""
        self._text += text
        reasoning = answer = ""
        while True:
            before = self._state
            match self._state:
                case "start":
                    self._find_begin(last)
                case "inside":
                    reasoning += self._take_until(self._form.end, "gap", last)
                case "gap":
                    self._find_answer(last)
                case "opened":
                    self._text = self._text.lstrip("\n")
                    if self._text:
                        self._state = "marked" if self._form.answer[1] else "answer"
                case "marked":
                    answer += self._take_until((self._form.answer[1],), "after", last, lines=True)
                case "after":
                    self._text = self._text.lstrip("\n")
                    self._state = "answer" if self._text else "after"
                case "answer":
                    answer, self._text = answer + self._text, ""
            if self._state == before:
                return reasoning, answer

    def _find_begin(self, last: bool) -> None:
        start = self._text.lstrip()
        opening = self._form.answer[0]
        for mark in self._form.begin:
            if start.startswith(mark):
                self._state, self._text = "inside", start[len(mark) :]
                return
        marks = (*self._form.begin, *([opening] if opening else ()))
        if opening and start.startswith(opening):
            self._state, self._text = "gap", start
        elif last or not any(mark.startswith(start) for mark in marks):
            self._state = "answer"

    def _find_answer(self, last: bool) -> None:
        """After the thoughts: skip line breaks, which belong to neither part, and the mark of the answer."""
        self._text = self._text.lstrip("\n")
        opening = self._form.answer[0]
        if opening and self._text.startswith(opening):
            self._state, self._text = "opened", self._text[len(opening) :]
        elif not opening and self._form.answer[1] and self._text:
            self._state = "marked"
        elif self._text and (last or not opening.startswith(self._text)):
            self._state = "answer"

    def _take_until(self, marks: tuple[str, ...], state: str, last: bool, lines: bool = False) -> str:
        """Take the text before the next mark; what may become one stays, and with `lines` the line breaks before it."""
        found = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self._text, self._state = self._text[:place], self._text[place + len(mark) :], state
            return text.rstrip("\n") if lines else text
        end = len(self._text)
        if not last:
            end -= max(overlap(self._text, mark) for mark in marks)
            if lines:
                end = len(self._text[:end].rstrip("\n"))
        text, self._text = self._text[:end], self._text[end:]
        return text

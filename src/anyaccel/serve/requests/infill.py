# SPDX-License-Identifier: Apache-2.0
"""Infill: a text between two others, for models of code that have tokens for it (fill in the middle)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyaccel.serve.protocol.errors import wrong

if TYPE_CHECKING:
    from anyaccel.serve.requests.tokenizer import ServerTokenizer

# The marks before what comes first, before what comes last, and before what is to be written.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral
# Tokens that end what is written, beside the marks: the model goes on with another file or document.
_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<file_sep>", "<|end_of_text|>", "▁<EOT>")


@dataclass(frozen=True)
class Infill:
    """The tokens for infill that a model has.

    Attributes:
        marks: before what comes first, before what comes last, and before what is to be written; where there are two,
            what comes last is written first.
        ends: tokens that end what is written.
    """

    marks: tuple[int, ...]
    ends: frozenset[int]

    def join(self, start: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """The tokens of a prompt; `start` is what each text of the model begins with."""
        if len(self.marks) == 2:
            return [*start, self.marks[0], *suffix, self.marks[1], *prefix]
        before, after, middle = self.marks
        return [*start, before, *prefix, after, *suffix, middle]


def find_infill(token_id: Callable[[str], int | None]) -> Infill | None:
    """The tokens for infill, if a vocabulary has some."""
    for marks in (*_MARKS, _SUFFIX_FIRST):
        found = [token for mark in marks if (token := token_id(mark)) is not None]
        if len(found) == len(marks):
            ends = [token for mark in _ENDS if (token := token_id(mark)) is not None]
            return Infill(tuple(found), frozenset([*found, *ends]))
    return None


async def infill_prompt(
    tokenizer: ServerTokenizer, infill: Infill | None, prefix: str, suffix: str, with_start: bool = True
) -> tuple[list[int], frozenset[int]]:
    """The prompt for a text between two others, and the tokens that end it.

    Raises:
        ApiError: the model has no tokens for it.
    """
    if infill is None:
        raise wrong("suffix", "this model has no tokens for a text between two others (infill)")
    start = await tokenizer.encode("", with_start)
    texts = [await tokenizer.encode(text, False) for text in (prefix, suffix)]
    return infill.join(start, *texts), infill.ends

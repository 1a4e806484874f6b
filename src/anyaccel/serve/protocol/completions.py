# SPDX-License-Identifier: Apache-2.0
"""OpenAI's shapes of plain completions, `/v1/completions`: texts or tokens that go on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import Logprobs, SamplingFields, Shape, Text, TokenId, Usage

_Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | _Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=limits.MOST_ANSWERS)]
        | Annotated[list[_Tokens], Field(min_length=1, max_length=limits.MOST_ANSWERS)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MOST_ANSWERS)] | None = None
    # vLLM's: whether the tokenizer's own beginning of a text is put before a prompt.
    add_special_tokens: bool | None = None


class CompletionLogprobs(Shape):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Shape):
    """An answer, or one `data:` of a stream, which `data: [DONE]` ends."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None

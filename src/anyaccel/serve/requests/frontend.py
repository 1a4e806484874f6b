# SPDX-License-Identifier: Apache-2.0
"""From requests in OpenAI's words to the engine's, in tokens; what all kinds of requests that generate share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.serve.interface import Engine, GenerationRequest, Grammar, Sampling
from anyaccel.serve.protocol.common import DetokenizeRequest, EmbeddingRequest, GenerationFields, SamplingFields
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.protocol.limits import Limits
from anyaccel.serve.requests.defaults import Defaults
from anyaccel.serve.requests.metrics import Metrics
from anyaccel.serve.requests.reasoning import thinks
from anyaccel.serve.requests.texts import Texts
from anyaccel.serve.requests.tools import FORMATS, Format, format_of


@dataclass
class Frontend:
    """Everything that the API's handlers share.

    Attributes:
        names: the model's names; responses use the first.
        aliases: further names that requests may use; they are never shown, as a path reveals what is on this machine.
        root: the name of the model's file or folder.
        pooling: the default pooling of embeddings.
        tools, thinking: how the model writes calls, and whether it writes thoughts; None: by its chat template.
        timeout_s, defaults: of a request that does not set them; None: the engine's own.
    """

    engine: Engine
    texts: Texts
    names: Sequence[str]
    aliases: Sequence[str] = ()
    root: str = ""
    pooling: Literal["mean", "last"] = "mean"
    tools: Format | None = None
    thinking: bool | None = None
    timeout_s: float | None = None
    defaults: Defaults = field(default_factory=Defaults)
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.tools = self.tools or format_of(self.texts.tool_template)
        self.thinking = thinks(self.texts.template) if self.thinking is None else self.thinking

    @property
    def format(self) -> Format:
        return self.tools or FORMATS["hermes"]

    @property
    def model(self) -> str:
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: there is none of this name.
        """
        if name is not None and name not in self.names and name not in self.aliases:
            there = ", ".join(self.names)
            raise ApiError(
                404,
                f"model: no model {name[:200]!r} here; there is {there}",
                "model",
                "model_not_found",
                "not_found_error",
            )

    # Prompts ----------------------------------------------------------------------------------------------

    def check_tokens(self, tokens: Sequence[int], param: str) -> list[int]:
        """The tokens of a request that has tokens for text.

        Raises:
            ApiError: one is not in the vocabulary.
        """
        most = self.engine.facts.vocabulary
        outside = next((token for token in tokens if token >= most), None)
        if outside is not None:
            raise wrong(param, f"token {outside} is not in the vocabulary of {most} tokens")
        return list(tokens)

    def room(self, prompt: Sequence[int], param: str, least: int = 1) -> int | None:
        """Tokens that an answer may have, at least `least`; None where the model has no limit.

        Raises:
            ApiError: the prompt is empty, or leaves no room.
        """
        if not prompt:
            raise wrong(param, "the prompt is empty: it needs at least one token")
        context = self.engine.facts.context
        if not context:
            return None
        if len(prompt) + least > context:
            raise ApiError(
                400,
                f"{param}: the prompt has {len(prompt)} tokens, and prompt and answer together at most {context}",
                param,
                "context_length_exceeded",
            )
        return context - len(prompt)

    def check_room(self, prompt: Sequence[int], wanted: int, param: str, prompt_param: str) -> int:
        """Check that an answer of `wanted` tokens fits, and return `wanted`.

        Raises:
            ApiError: the model's context is too short for them, or for the prompt alone.
        """
        room = self.room(prompt, prompt_param, min(wanted, 1))
        if room is not None and wanted > room:
            raise ApiError(
                400,
                f"{param}: {wanted} tokens and the prompt's {len(prompt)} are more than the {len(prompt) + room} "
                "that both may have together",
                param,
                "context_length_exceeded",
            )
        return wanted

    # Requests ---------------------------------------------------------------------------------------------

    def sampling(self, request: GenerationFields, index: int, logprobs: int | None) -> Sampling:
        """How tokens are chosen; the answers of one request differ in their seeds.

        Raises:
            ApiError: a token of logit_bias is not in the vocabulary.
        """

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        defaults = self.defaults
        more: dict[str, float] = {}
        bias: dict[int, float] = {}
        if isinstance(request, SamplingFields):
            more = {
                "frequency_penalty": given(request.frequency_penalty, 0.0),
                "presence_penalty": given(request.presence_penalty, 0.0),
            }
            bias = self._bias(request.logit_bias or {})
        return Sampling(
            temperature=given(request.temperature, defaults.temperature),
            top_k=defaults.top_k if request.top_k is None else max(0, request.top_k),
            top_p=max(given(request.top_p, defaults.top_p), 1e-6),  # 0 is the likeliest token, as with OpenAI
            min_p=given(request.min_p, defaults.min_p),
            repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=bias,
            seed=None if request.seed is None else _wrapped(request.seed + index),
            logprobs=logprobs,
            **more,
        )

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        most = self.engine.facts.vocabulary
        wrong_one = next(
            (key for key in given if not key.isascii() or not key.isdigit() or int(key[:12]) >= most), None
        )
        if wrong_one is not None:
            raise wrong("logit_bias", f"{wrong_one[:20]!r} is no token: they are 0 to {most - 1}")
        return {int(key): value for key, value in given.items()}

    def generation(
        self,
        request: GenerationFields,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        index: int = 0,
        key: str = "",
        logprobs: int | None = None,
        grammar: Grammar | None = None,
        prompt_logprobs: int | None = None,
    ) -> GenerationRequest:
        """The engine's request for one answer.

        Raises:
            ApiError: a token of logit_bias is not in the vocabulary, or min_tokens is more than there may be.
        """
        least = request.min_tokens or 0
        if least > max_tokens:
            raise wrong("min_tokens", f"{least} is more than the {max_tokens} tokens that the answer may have")
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=self.sampling(request, index, logprobs),
            ends=self.ends(request),
            min_tokens=least,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            key=key,
            timeout_s=self.timeout_s if request.timeout_s is None else request.timeout_s,
        )

    def ends(self, request: GenerationFields) -> frozenset[int]:
        """Tokens that end an answer: the model's own, unless they are to be ignored, and those of the request."""
        own: Collection[int] = () if request.ignore_eos else self.engine.facts.ends
        return frozenset(own) | frozenset(request.stop_token_ids or ())

    # Small requests ---------------------------------------------------------------------------------------

    async def embed(self, request: EmbeddingRequest, key: str) -> tuple[list[list[float]], int]:
        """Embeddings, and how many tokens they are of.

        Raises:
            ApiError: an input does not fit, or the length that is wanted is not the model's.
        """
        self.check_model(request.model)
        hidden = self.engine.facts.hidden
        if request.dimensions not in (None, hidden):
            raise wrong("dimensions", f"this model's embeddings have {hidden} values; they cannot be cut")
        given = request.input
        single = isinstance(given, str) or isinstance(given[0], int)
        inputs: Sequence[Any] = [given] if single else given
        prompts = []
        for place, each in enumerate(inputs):
            param = "input" if len(inputs) == 1 else f"input[{place}]"
            ids = await self.texts.encode(each) if isinstance(each, str) else self.check_tokens(each, param)
            context = self.engine.facts.context
            if not ids or (context and len(ids) > context):
                code = "context_length_exceeded" if ids else None
                raise wrong(param, f"{len(ids)} tokens; 1 to {context or 1 << 31} are possible", code)
            prompts.append(ids)
        vectors = await self.engine.embed(prompts, request.pooling or self.pooling, key)
        return vectors, sum(map(len, prompts))

    async def detokenize(self, request: DetokenizeRequest) -> str:
        """The text of tokens.

        Raises:
            ApiError: one is not in the vocabulary.
        """
        self.check_model(request.model)
        tokens = self.check_tokens(request.tokens, "tokens")
        if len(tokens) < 2_000:
            return self.texts.with_special(tokens)
        return await asyncio.to_thread(self.texts.with_special, tokens)


def _wrapped(seed: int) -> int:
    """The seed wrapped around to a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def new_id(prefix: str) -> str:
    """An identifier that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"

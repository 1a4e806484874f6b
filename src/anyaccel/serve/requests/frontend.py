# SPDX-License-Identifier: Apache-2.0
"""What the handlers of all APIs share: the model's names, and the engine's requests made of theirs."""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from anyaccel.serve.interface import Engine, GenerationRequest, Grammar, SamplingParams
from anyaccel.serve.protocol.common import GenerationFields, SamplingFields
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.protocol.limits import HttpLimits
from anyaccel.serve.requests.defaults import SamplingDefaults
from anyaccel.serve.requests.infill import Infill, find_infill
from anyaccel.serve.requests.metrics import Metrics
from anyaccel.serve.requests.reasoning import ReasoningFormat, detect_reasoning
from anyaccel.serve.requests.stored import AnswerStore
from anyaccel.serve.requests.tokenizer import ServerTokenizer
from anyaccel.serve.requests.tools.format import ToolFormat
from anyaccel.serve.requests.tools.formats import detect_format

_DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


def _of_length_1(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


class Frontend:
    """Everything that the handlers of all APIs share.

    Args:
        names: the model's names; responses use the first.
        aliases: further names that requests may use; they are never shown, as a path reveals what is on this machine.
        root: the name of the model's file or folder.
        pooling: the default pooling of embeddings.
        tool_format, reasoning: how the model writes calls and thoughts; "auto": by its chat template. Without
            `reasoning`, thoughts are part of the text.
        timeout_s, defaults: of a request that does not set them; None: the engine's own.

    Attributes:
        metrics, answers: what is counted and kept; those of the server where it has several models (`Models`).
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: ServerTokenizer,
        names: Sequence[str],
        aliases: Sequence[str] = (),
        *,
        root: str = "",
        pooling: Literal["mean", "last"] = "mean",
        tool_format: ToolFormat | Literal["auto"] = "auto",
        reasoning: ReasoningFormat | Literal["auto"] | None = "auto",
        timeout_s: float | None = None,
        defaults: SamplingDefaults | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.names = names
        self.aliases = aliases
        self.root = root
        self.pooling = pooling
        self.tool_format = detect_format(tokenizer.tool_template) if tool_format == "auto" else tool_format
        self.reasoning = detect_reasoning(tokenizer.template) if reasoning == "auto" else reasoning
        self.timeout_s = timeout_s
        self.defaults = defaults or SamplingDefaults()
        self.limits = limits or HttpLimits()
        self.metrics = Metrics()
        self.answers = AnswerStore()
        self.created = int(time.time())

    @property
    def model(self) -> str:
        return self.names[0]

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: the model's, and those that end one after a call."""
        found = (self.tokenizer.token_id(mark) for mark in self.tool_format.ends)
        return self.engine.facts.ends | {token for token in found if token is not None}

    @functools.cached_property
    def infill(self) -> Infill | None:
        """The tokens with which the model writes a text between two others."""
        return find_infill(self.tokenizer.token_id)

    def shows_special(self, with_calls: bool) -> bool:
        """Whether answers are parsed with special tokens, as some marks are such tokens."""
        marks = {*(self.reasoning.marks if self.reasoning else ()), *(self.tool_format.marks if with_calls else ())}
        return self.tool_format.is_messages or any(map(self.tokenizer.is_special, marks))

    async def embed(
        self,
        prompts: Sequence[Sequence[int]],
        key: str,
        pooling: Literal["mean", "last"] | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """Embeddings of length 1, or their first values as others of length 1.

        Raises:
            ApiError: the model's embeddings may not be cut to so many values.
        """
        facts = self.engine.facts
        if dimensions in (None, facts.hidden):
            return await self.engine.embed(prompts, pooling or self.pooling, key)
        if dimensions not in facts.cuts:
            possible = ", ".join(map(str, facts.cuts)) if isinstance(facts.cuts, list) else "fewer"
            why = f"{possible} are possible" if facts.cuts else 'its config.json has no "is_matryoshka": true'
            raise wrong("dimensions", f"this model's embeddings have {facts.hidden} values, not {dimensions}: {why}")
        vectors = await self.engine.embed(prompts, pooling or self.pooling, key)
        return [_of_length_1(vector[:dimensions]) for vector in vectors]

    # Prompts ----------------------------------------------------------------------------------------------

    def check_tokens(self, tokens: Sequence[int], param: str) -> list[int]:
        """The tokens of a request that has tokens for text.

        Raises:
            ApiError: one is not in the vocabulary.
        """
        most = self.engine.facts.vocabulary
        unknown = next((token for token in tokens if token >= most), None)
        if unknown is not None:
            raise wrong(param, f"token {unknown} is not in the vocabulary of {most} tokens")
        return list(tokens)

    def answer_room(
        self, prompt: Sequence[int], wanted: int | None, param: str, prompt_param: str, least: int = 1
    ) -> int:
        """The most tokens of an answer: as many as are wanted, else (None, -1) what the context leaves.

        Raises:
            ApiError: the prompt is empty, fewer than `least` are wanted, or there is no room for them.
        """
        if wanted == -1:
            wanted = None
        if wanted is not None and wanted < least:
            raise wrong(param, f"{wanted} is too few: at least 1; -1 is as many as the context leaves")
        if not prompt:
            raise wrong(prompt_param, "the prompt is empty: it needs at least one token")
        context = self.engine.facts.context
        if not context:
            if wanted is None:
                raise wrong(param, "is required, as this model has no longest text")
            return wanted
        room = context - len(prompt)
        if room < (1 if wanted is None else min(wanted, 1)):
            raise wrong(
                prompt_param,
                f"the prompt has {len(prompt)} tokens, and prompt and answer together at most {context}",
                "context_length_exceeded",
            )
        if wanted is not None and wanted > room:
            raise wrong(
                param,
                f"{wanted} tokens and the prompt's {len(prompt)} are more than the {context} that both may have "
                "together",
                "context_length_exceeded",
            )
        return room if wanted is None else wanted

    # Requests ---------------------------------------------------------------------------------------------

    def generation_request(
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
        more_ends: frozenset[int] = frozenset(),
    ) -> GenerationRequest:
        """The engine's request for one answer.

        Args:
            more_ends: tokens that end it, beside those of the model.

        Raises:
            ApiError: a token of logit_bias is not in the vocabulary, or min_tokens is more than there may be.
        """
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise wrong("min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that the answer may have")
        ends = frozenset() if request.ignore_eos else self.ends | more_ends
        return GenerationRequest(
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=self._sampling(request, index, logprobs),
            ends=ends | frozenset(request.stop_token_ids or ()),
            min_tokens=min_tokens,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            key=key,
            timeout_s=self.timeout_s if request.timeout_s is None else request.timeout_s,
        )

    def _sampling(self, request: GenerationFields, index: int, logprobs: int | None) -> SamplingParams:
        """How tokens are chosen; the answers of one request differ in their seeds."""

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        defaults = self.defaults
        params = SamplingParams(
            temperature=given(request.temperature, defaults.temperature),
            top_k=defaults.top_k if request.top_k is None else max(0, request.top_k),
            top_p=max(given(request.top_p, defaults.top_p), 1e-6),  # 0 is the likeliest token, as with OpenAI
            min_p=given(request.min_p, defaults.min_p),
            repetition_penalty=given(request.repetition_penalty, defaults.repetition_penalty),
            seed=None if request.seed is None else _as_signed(request.seed + index),
            logprobs=logprobs,
        )
        if not isinstance(request, SamplingFields):
            return params
        return replace(
            params,
            frequency_penalty=given(request.frequency_penalty, 0.0),
            presence_penalty=given(request.presence_penalty, 0.0),
            logit_bias=self._logit_bias(request.logit_bias or {}),
            xtc_probability=given(request.xtc_probability, 0.0),
            xtc_threshold=given(request.xtc_threshold, params.xtc_threshold),
            **self._dry(request, params),
        )

    def _dry(self, request: SamplingFields, default: SamplingParams) -> dict[str, Any]:
        if not request.dry_multiplier:
            return {}
        length, last = request.dry_allowed_length, request.dry_penalty_last_n
        return {
            "dry_multiplier": request.dry_multiplier,
            "dry_base": default.dry_base if request.dry_base is None else request.dry_base,
            "dry_allowed_length": default.dry_allowed_length if length is None else length,
            "dry_last_n": default.dry_last_n if last is None else last,
            "dry_breakers": self.tokenizer.breakers(_breakers(request), self.engine.facts.vocabulary),
        }

    async def prepare_sampling(self, request: GenerationFields) -> None:
        """Find the tokens of DRY's breakers, for which the whole vocabulary is read, outside the event loop."""
        if isinstance(request, SamplingFields) and request.dry_multiplier:
            await asyncio.to_thread(self.tokenizer.breakers, _breakers(request), self.engine.facts.vocabulary)

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        most = self.engine.facts.vocabulary
        unknown = next((key for key in given if not key.isascii() or not key.isdigit() or int(key[:12]) >= most), None)
        if unknown is not None:
            raise wrong("logit_bias", f"{unknown[:20]!r} is no token: they are 0 to {most - 1}")
        return {int(key): value for key, value in given.items()}


def _breakers(request: SamplingFields) -> tuple[str, ...]:
    given = request.dry_sequence_breakers
    return _DRY_BREAKERS if given is None else tuple(filter(None, given))


def _as_signed(seed: int) -> int:
    """The seed wrapped around to a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def new_id(prefix: str) -> str:
    """An identifier that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"

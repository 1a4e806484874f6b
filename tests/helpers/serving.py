# SPDX-License-Identifier: Apache-2.0
"""Engines of small random models, and requests to them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import native_models
from anyaccel.inference.native.runtime import NativeModel
from anyaccel.serve.engine.decoders import LocalDecoder
from anyaccel.serve.engine.engine import ServingEngine
from anyaccel.serve.engine.facts import StepDecoder, served_context
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import GenerationRequest, ModelFacts, SamplingParams, TokenLogprob

VOCAB = 131
GREEDY = SamplingParams(temperature=0.0)


def native(case: str = "llama", **options: Any) -> NativeModel:
    """A model of the zoo as `load_native` gives it."""
    model, spec, _ = native_models.whole(case, 1024)
    made = native_models.native(case, positions=1024, **options)
    return NativeModel(made, spec, spec, model.config.to_dict(), {}, None, {})


def decoder_of(model: NativeModel, settings: EngineSettings) -> LocalDecoder:
    context = served_context(model.spec.max_tokens, settings)
    facts = ModelFacts(context, model.spec.vocab, frozenset({2}), model.spec.hidden, "fp32")
    return LocalDecoder(model, facts, settings.max_batch)


@asynccontextmanager
async def engine(
    model: NativeModel | Callable[[Callable[[], object]], StepDecoder], tokenizer: Any = None, **settings: Any
) -> AsyncIterator[ServingEngine]:
    """An engine in the running loop, closed at the end."""
    chosen = EngineSettings(**settings)
    load = model if callable(model) else lambda _check: decoder_of(model, chosen)
    made = ServingEngine(load, chosen, GrammarCompiler("", tokenizer))
    try:
        yield made
    finally:
        await made.close()


@dataclass
class Answer:
    """All that came of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached: int = 0
    finish: str | None = None


async def answer(
    made: ServingEngine, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY, **options: Any
) -> Answer:
    """Ask, and wait for the end."""
    whole = Answer()
    async for chunk in made.generate(GenerationRequest(prompt, max_tokens, sampling, **options)):
        whole.tokens += chunk.tokens
        whole.logprobs += chunk.logprobs
        whole.prompt_logprobs = chunk.prompt_logprobs or whole.prompt_logprobs
        whole.cached = chunk.cached_tokens
        assert whole.finish is None
        whole.finish = chunk.finish
    return whole


def prompt_of(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(3, VOCAB) for _ in range(count)]

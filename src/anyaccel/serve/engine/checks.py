# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before the engine accepts it, and its options for `_llm.Request`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.inference.generate import LEAST_TEMPERATURE
from anyaccel.serve.interface import GenerationRequest, ModelFacts, SamplingParams

MOST_LOGPROBS = 100
_MOST_BIASES = 1024


def check_request(request: GenerationRequest, facts: ModelFacts) -> None:
    """Raise UsageError, which names the field, where a value is out of its range."""
    check_prompt(request.prompt, facts)
    if request.max_tokens < 0 or request.min_tokens < 0:
        name = "max_tokens" if request.max_tokens < 0 else "min_tokens"
        raise UsageError(f"{name}={getattr(request, name)}: must be 0 or above")
    if request.min_tokens > request.max_tokens:
        raise UsageError(f"min_tokens={request.min_tokens}: must be at most max_tokens, {request.max_tokens}")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise UsageError(f"timeout_s={request.timeout_s}: must be above 0")
    _check_count("prompt_logprobs", request.prompt_logprobs)
    _check_sampling(request.sampling, facts)


def check_prompt(prompt: Sequence[int], facts: ModelFacts) -> None:
    """Check the prompt alone."""
    if not prompt:
        raise UsageError("prompt: it must have at least one token")
    least, most = min(prompt), max(prompt)
    if least < 0 or most >= facts.vocabulary:
        token = least if least < 0 else most
        raise UsageError(f"prompt: token {token} is outside the model's vocabulary of {facts.vocabulary}")


def _check_count(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise UsageError(f"{name}={count}: must be from 0 to {MOST_LOGPROBS}")


def _check_sampling(sampling: SamplingParams, facts: ModelFacts) -> None:
    def within(name: str, least: float, most: float, words: str) -> None:
        value = getattr(sampling, name)
        if not (math.isfinite(value) and least <= value <= most):
            raise UsageError(f"{name}={value}: must be {words}")

    within("temperature", 0, 100, "from 0 (greedy) to 100")
    within("top_k", 0, 2**31 - 1, "0 (off) or above")
    within("top_p", 1e-20, 1, "above 0 and at most 1")
    within("min_p", 0, 1, "from 0 to 1")
    within("repetition_penalty", 1e-6, 1e6, "above 0")
    within("frequency_penalty", -2, 2, "from -2 to 2")
    within("presence_penalty", -2, 2, "from -2 to 2")
    within("dry_multiplier", 0, 100, "from 0 (off) to 100")
    within("dry_base", 1, 100, "from 1 to 100")
    within("dry_allowed_length", 0, 2**31 - 1, "0 or above")
    within("dry_last_n", -1, 2**31 - 1, "-1 (all), 0 (off) or above")
    within("xtc_probability", 0, 1, "from 0 (off) to 1")
    within("xtc_threshold", 0, 1, "from 0 to 1")
    _check_count("logprobs", sampling.logprobs)
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
        raise UsageError(f"seed={sampling.seed}: must fit 64 bits")
    if len(sampling.logit_bias) > _MOST_BIASES:
        raise UsageError(f"logit_bias: {len(sampling.logit_bias)} tokens are more than {_MOST_BIASES}")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < facts.vocabulary:
            raise UsageError(f"logit_bias: token {token} is outside the model's vocabulary of {facts.vocabulary}")
        if not -100 <= bias <= 100:
            raise UsageError(f"logit_bias: {bias} of token {token} must be from -100 to 100")


def native_options(request: GenerationRequest) -> dict[str, Any]:
    """Options of `_llm.Request`."""
    sampling = request.sampling
    sample = sampling.temperature >= LEAST_TEMPERATURE
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64
    return {
        "goal": "answer" if request.max_tokens > 0 else "scores",
        "do_sample": sample,
        "temperature": sampling.temperature if sample else 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **(_dry_options(sampling) if sampling.dry_multiplier else {}),
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "bias": [*sampling.logit_bias.items()],  # pairs, since JSON has no numbers as keys
        "seed": seed,
        "max_new_tokens": request.max_tokens,
        "min_new_tokens": request.min_tokens,
        "end_tokens": sorted(request.ends),
        "ignore_end": request.ignore_end,
        "logprobs": -1 if sampling.logprobs is None else sampling.logprobs,
        "prompt_logprobs": -1 if request.prompt_logprobs is None else request.prompt_logprobs,
    }


def _dry_options(sampling: SamplingParams) -> dict[str, Any]:
    names = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_last_n")
    return {**{name: getattr(sampling, name) for name in names}, "dry_breakers": [*map(list, sampling.dry_breakers)]}

# SPDX-License-Identifier: Apache-2.0
"""Token-by-token generation with timing, the same tokens on every rank."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from anyaccel import comm
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.engine import InferenceEngine


@dataclass
class Generation:
    """What a generation did; filled while it runs.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: ids generated so far, the end-of-text token among them.
        prompt_seconds: from the call to the first token.
        decode_seconds: from the first token to the last.
    """

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens per second; 0.0 before the first token."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the first, which belongs to the prompt; 0.0 when there is no other."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


def _check(
    engine: InferenceEngine, input_ids: torch.Tensor, max_new_tokens: int, temperature: float, top_p: float, seed: int
) -> None:
    if input_ids.dim() != 1 or input_ids.numel() == 0:
        raise UsageError(f"the prompt must be a list of at least one token, got shape {tuple(input_ids.shape)}")
    vocabulary = engine.config.get_text_config().vocab_size
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocabulary:
        raise UsageError(f"token {int(input_ids.max())} is outside the model's vocabulary of {vocabulary}")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if temperature < 0:
        raise UsageError(f"temperature={temperature}: must be 0 (greedy) or above")
    if not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p}: must be above 0 and at most 1")
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed}: must fit 64 bits")
    limit = getattr(engine.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and input_ids.numel() + max_new_tokens > limit:
        raise UsageError(
            f"{input_ids.numel()} prompt tokens and {max_new_tokens} new ones exceed the model's context of {limit}"
        )


class _Sampler:
    """Chooses the next token on rank 0 and tells the others.

    Rank 0 alone decides, so rounding that differs between ranks can never make them generate different texts.
    """

    def __init__(self, engine: InferenceEngine, temperature: float, top_p: float, seed: int) -> None:
        self._engine = engine
        self._temperature = temperature
        self._top_p = top_p
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, logits_V: torch.Tensor) -> torch.Tensor:
        """The next token id, shape [1], on the engine's device.

        Raises:
            ModelError: the logits are not finite; on every rank.
        """
        engine = self._engine
        token = torch.full((1,), -1, dtype=torch.int64)
        if engine.tp_rank == 0:
            logits_V = logits_V.to("cpu", torch.float32)
            if bool(torch.isfinite(logits_V.amax())):
                token = self._choose(logits_V)
        token = token.to(engine.device)
        if engine.tp_size > 1:
            comm.inference_broadcast(token, group=engine.group)
        if int(token) < 0:
            raise ModelError(
                f"the model's logits are NaN or infinite in {engine.dtype}; try another dtype, such as fp32"
            )
        return token

    def _choose(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Greedy at temperature 0, else nucleus sampling (Holtzman et al., 2020)."""
        if self._temperature == 0:
            return logits_V.argmax(dim=-1, keepdim=True)
        # Subtracting the largest first keeps tiny temperatures finite.
        probabilities_V = torch.softmax((logits_V - logits_V.amax()) / self._temperature, dim=-1)
        if self._top_p < 1:
            ordered_V, order_V = probabilities_V.sort(descending=True)
            # Keep a token while those before it have not reached top_p; the first always stays.
            ordered_V[ordered_V.cumsum(0) - ordered_V >= self._top_p] = 0
            probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, ordered_V)
        return torch.multinomial(probabilities_V, 1, generator=self._generator)


def generate_tokens(
    engine: InferenceEngine,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    result: Generation | None = None,
) -> Iterator[int]:
    """Generate from one prompt and yield each token id as it comes; every rank of the engine must iterate.

    Args:
        input_ids: [prompt length], integer.
        max_new_tokens: upper limit; generation also ends after one of the model's end-of-text tokens.
        temperature: 0 for greedy, else the softmax temperature.
        top_p: sample from the most likely tokens that together have this probability.
        seed: of the sampling; the same seed gives the same tokens.
        result: receives tokens and timings.

    Raises:
        UsageError: an argument is out of range, or prompt and answer exceed the model's context.
    """
    _check(engine, input_ids, max_new_tokens, temperature, top_p, seed)
    result = Generation() if result is None else result
    result.prompt_tokens = input_ids.numel()
    return _steps(engine, input_ids, max_new_tokens, _Sampler(engine, temperature, top_p, seed), result)


def _end_tokens(engine: InferenceEngine) -> set[int]:
    configured = getattr(getattr(engine.module, "generation_config", None), "eos_token_id", None)
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)


def _steps(
    engine: InferenceEngine, input_ids: torch.Tensor, max_new_tokens: int, sampler: _Sampler, result: Generation
) -> Iterator[int]:
    ends = _end_tokens(engine)
    known = inspect.signature(engine.module.forward).parameters
    # Logits of the last position are enough; not every model has the option.
    options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    # A model that keeps its state under another name gets the whole sequence in each step.
    cached = "past_key_values" in known
    ids_BT = input_ids.to(engine.device)[None]
    start = first = time.perf_counter()
    for step in range(max_new_tokens):
        with torch.inference_mode():
            output = engine(ids_BT, use_cache=cached, **options)
            token = sampler.next(output.logits[0, -1])
        now = time.perf_counter()
        if step == 0:
            first = now
            result.prompt_seconds = now - start
        result.decode_seconds = now - first
        result.tokens.append(int(token))
        yield result.tokens[-1]
        if result.tokens[-1] in ends:
            return
        if cached:
            options["past_key_values"] = output.past_key_values
            ids_BT = token[None]
        else:
            ids_BT = torch.cat([ids_BT, token[None]], dim=1)

# SPDX-License-Identifier: Apache-2.0
"""Token-by-token generation with timing, the same tokens on every rank."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from anyaccel import comm
from anyaccel.errors import UsageError
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
    engine: InferenceEngine, input_ids: torch.Tensor, max_new_tokens: int, temperature: float, top_p: float
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
    limit = getattr(engine.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and input_ids.numel() + max_new_tokens > limit:
        raise UsageError(
            f"{input_ids.numel()} prompt tokens and {max_new_tokens} new ones exceed the model's context of {limit}"
        )


def _sample(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> torch.Tensor:
    """One token id, shape [1]: greedy at temperature 0, else nucleus sampling (Holtzman et al., 2020)."""
    if temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    probabilities_V = torch.softmax(logits_V.float() / temperature, dim=-1)
    if top_p < 1:
        ordered_V, order_V = probabilities_V.sort(descending=True)
        # Keep a token while those before it have not reached top_p; the first always stays.
        ordered_V[ordered_V.cumsum(0) - ordered_V >= top_p] = 0
        probabilities_V = torch.zeros_like(probabilities_V).scatter_(0, order_V, ordered_V)
    return torch.multinomial(probabilities_V, 1, generator=generator)


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
    _check(engine, input_ids, max_new_tokens, temperature, top_p)
    result = Generation() if result is None else result
    result.prompt_tokens = input_ids.numel()
    return _steps(engine, input_ids, max_new_tokens, temperature, top_p, seed, result)


def _end_tokens(engine: InferenceEngine) -> set[int]:
    configured = getattr(getattr(engine.module, "generation_config", None), "eos_token_id", None)
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)


def _steps(
    engine: InferenceEngine,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    result: Generation,
) -> Iterator[int]:
    from transformers import DynamicCache

    ends = _end_tokens(engine)
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=engine.config)
    # Logits of the last position are enough; not every model has the option.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(engine.module.forward).parameters else {}
    ids_BT = input_ids.to(engine.device)[None]
    start = first = time.perf_counter()
    for step in range(max_new_tokens):
        with torch.inference_mode():
            output = engine(ids_BT, past_key_values=cache, use_cache=True, **last_only)
            token = torch.zeros(1, dtype=torch.int64)
            if engine.tp_rank == 0:
                token = _sample(output.logits[0, -1].to("cpu"), temperature, top_p, generator)
            if engine.tp_size > 1:
                # Rank 0 decides: rounding that differs between ranks can never make them generate different texts.
                comm.inference_broadcast(token, group=engine.group)
        now = time.perf_counter()
        if step == 0:
            first = now
            result.prompt_seconds = now - start
        result.decode_seconds = now - first
        result.tokens.append(int(token))
        yield result.tokens[-1]
        if result.tokens[-1] in ends:
            return
        ids_BT = token.to(engine.device)[None]

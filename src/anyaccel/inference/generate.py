# SPDX-License-Identifier: Apache-2.0
"""Token-by-token generation with timing, the same tokens on every rank. Torch-free for a native model."""

from __future__ import annotations

import numbers
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.native.draft import MOST_DRAFTS
from anyaccel.inference.native.runtime import check_memory, logits_error
from anyaccel.numerals import to_integer

if TYPE_CHECKING:
    import torch

    from anyaccel import _llm
    from anyaccel.inference.engine import InferenceEngine
    from anyaccel.inference.native.runtime import NativeModel

# Below it the likeliest token is all that can be drawn, and single precision, which the decoders have, soon has 0.
LEAST_TEMPERATURE = 1e-20


@dataclass
class Generation:
    """What a generation did; filled while it runs.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: ids generated so far, the end-of-text token among them.
        prompt_seconds: from the call to the first token.
        decode_seconds: from the first token to the last.
        drafted, accepted: how many tokens were drafted, and how many of them were right.
    """

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    _start: float = field(default=0.0, repr=False)
    _first: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """The computation of the prompt begins."""
        self._start = time.perf_counter()

    def add(self, token: int) -> None:
        """Record a token that has just come."""
        now = time.perf_counter()
        if not self.tokens:
            self._first = now
            self.prompt_seconds = now - self._start
        self.decode_seconds = now - self._first
        self.tokens.append(token)

    def was_cut(self, most: int, ends: Collection[int]) -> bool:
        """Whether the answer has ended by its number of tokens, and not by one of `ends`."""
        return len(self.tokens) >= most and self.tokens[-1] not in ends

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens per second; 0.0 before the first token."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, without the first, which belongs to the prompt; 0.0 when there is no other."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, under Hugging Face's names; temperature 0 takes the likeliest.

    Attributes:
        draft_tokens: the most tokens that are guessed and verified in one pass, in the native runtime; 0: none. The
            tokens that are chosen are the same with and without.
        draft_model: they are guessed by the model's draft model, which it must have; False: from prompt and answer.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    draft_tokens: int = 0
    draft_model: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise UsageError(f"{name}={value!r}: must be a number")
        for name in ("top_k", "seed", "draft_tokens"):
            to_integer(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}: must be 0 (greedy) or above")
        if not 0 <= self.draft_tokens < 2**31:
            raise UsageError(f"draft_tokens={self.draft_tokens}: must be 0 (none) or above, and below 2**31")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top_k={self.top_k}: must be 0 (off) or above, and below 2**31")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p={self.min_p}: must be from 0 to 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(f"repetition_penalty={self.repetition_penalty}: must be above 0")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed}: must fit 64 bits")

    def native(self) -> dict[str, Any]:
        """Options of a native Request."""
        sample = self.temperature >= LEAST_TEMPERATURE
        return {
            "do_sample": sample,
            "temperature": self.temperature if sample else 1.0,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed % 2**64,
            "draft_tokens": self.draft_tokens,
            "draft_model": self.draft_model,
            "keep_states": True,  # where the next prompt may go on
        }


def check_prompt(ids: Sequence[int], max_new_tokens: int, vocabulary: int, limit: int, where: str = "") -> None:
    """What must hold for a prompt before anything runs.

    Args:
        where: the file of the tokenizer that has made it of a text, for messages.

    Raises:
        UsageError: it is empty, has a token that the model does not have, or leaves no room for the answer.
    """
    if not ids:
        if where:
            raise UsageError(f"{where}: its tokenizer or chat template makes no token of this prompt")
        raise UsageError("the prompt must be a list of at least one token")
    if min(ids) < 0 or max(ids) >= vocabulary:
        token = min(ids) if min(ids) < 0 else max(ids)
        if where:
            raise ModelError(f"{where}: it gives token {token}, outside the model's vocabulary of {vocabulary}")
        raise UsageError(f"token {token} is outside the model's vocabulary of {vocabulary}")
    if to_integer("max_new_tokens", max_new_tokens) < 1:
        raise UsageError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if limit and len(ids) + max_new_tokens > limit:
        raise UsageError(
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the model's context of {limit}"
        )


def generate_tokens(
    engine: InferenceEngine,
    input_ids: torch.Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    draft_tokens: int | None = None,
    result: Generation | None = None,
) -> Iterator[int]:
    """Generate from one prompt and yield each token id as it comes; every rank of the engine must iterate.

    Args:
        input_ids: of one prompt: a list of whole numbers, or a tensor [prompt length] or [1, prompt length].
        max_new_tokens: upper limit; generation also ends after one of the model's end-of-text tokens.
        temperature: 0 for greedy, else the softmax temperature.
        top_p: sample from the most likely tokens that together have this probability.
        seed: of the sampling; the same seed gives the same tokens.
        top_k: sample from so many most likely tokens; 0: from all.
        min_p: sample from tokens at least this likely, relative to the likeliest.
        repetition_penalty: above 1 makes tokens of prompt and answer less likely.
        draft_tokens: guess up to so many tokens and verify them in one pass: the same tokens, sooner. The engine's
            draft model guesses (`draft` of `init_inference`; 15 by default), or, without one, what followed the same
            words before (0 by default: none). Other runtimes than the native one do without.
        result: receives tokens and timings.

    Raises:
        UsageError: an argument is out of range, or prompt and answer exceed the model's context.
    """
    by_model = engine.native is not None and engine.native.draft is not None
    drafts = (MOST_DRAFTS if by_model else 0) if draft_tokens is None else draft_tokens
    sampling = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed, drafts, by_model)
    ids = _one_prompt(input_ids)
    vocabulary, limit = sizes_of(engine)
    check_prompt(ids, max_new_tokens, vocabulary, limit)
    result = Generation() if result is None else result
    result.prompt_tokens = len(ids)
    native = engine.native or _of_own_code(engine, max_new_tokens)
    check_memory(native, [len(ids)], 1, max_new_tokens)
    options = sampling.native() | {"max_new_tokens": max_new_tokens, "end_tokens": sorted(end_tokens_of(engine))}
    return native_steps(native, ids, options, result)


def _of_own_code(engine: InferenceEngine, max_new_tokens: int) -> NativeModel:
    """What computes one answer of an engine on its model's own code, on all of its ranks."""
    from anyaccel.inference.generic.executor import AnswerExecutor
    from anyaccel.inference.generic.requests import answered_together, model_of

    return answered_together(engine) or model_of(engine, AnswerExecutor(engine.module, engine.group, max_new_tokens))


def _one_prompt(input_ids: Any) -> list[int]:
    """The tokens of a list, or of a tensor or array with a prompt or a row with one."""
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not isinstance(ids, list | tuple) or any(isinstance(token, list | tuple) for token in ids):
        shape = f"of shape {list(input_ids.shape)}" if hasattr(input_ids, "shape") else f"{input_ids!r:.80}"
        raise UsageError(f"input_ids {shape}: must be the token ids of one prompt, such as [1, 2, 3]")
    return [to_integer("a token of the prompt", token) for token in ids]


def native_steps(native: NativeModel, ids: list[int], options: dict[str, Any], result: Generation) -> Iterator[int]:
    """The tokens of one native Request. Torch-free."""
    from anyaccel import _llm

    request = _llm.Request(native.model, ids, options)
    try:
        yield from request_steps(native, request, result)
    finally:
        request.finish()


def request_steps(native: NativeModel, request: _llm.Request, result: Generation) -> Iterator[int]:
    """The tokens that a native Request gives until it has finished; the request stays as it is then.

    Raises:
        ModelError: the logits are NaN or infinite.
    """
    result.begin()
    while not request.finished:
        (token,) = native.model.step([request])
        if token < 0:
            raise logits_error(native.dtype)
        if not result.tokens and native.saving is not None:
            native.saving.begin()
        result.add(token)
        result.drafted, result.accepted = request.drafts
        yield token


def sizes_of(engine: InferenceEngine) -> tuple[int, int]:
    """The vocabulary and the longest context of an engine's model, 0 for any."""
    if engine.native is not None:
        return engine.native.whole_spec.vocab, engine.native.whole_spec.max_tokens
    from anyaccel.inference.generic import requests

    return requests.sizes_of(engine.config)


def end_tokens_of(engine: InferenceEngine) -> set[int]:
    """The tokens that end a text of an engine's model."""
    native = engine.native
    configured: Any
    if native is not None and engine.is_lazy and (native.generation_config or "eos_token_id" in native.config):
        configured = (native.generation_config or native.config).get("eos_token_id")
    else:  # transformers has tokens of its own for configurations that say nothing
        configured = getattr(getattr(engine.module, "generation_config", None), "eos_token_id", None)
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)

# SPDX-License-Identifier: Apache-2.0
"""The interface between the HTTP side of the server and its engine, in token ids. Torch-free, HTTP-free.

The frontend (`api`, `requests`) turns text into tokens and back, finds stop strings and writes JSON; the engine
schedules, computes and samples. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable

from anyaccel.errors import AnyAccelError, UsageError

Finish = Literal["stop", "length", "abort"]


class EngineFullError(AnyAccelError):
    """The queue is full; HTTP 429.

    Attributes:
        retry_after_s: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[EngineFullError], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class EngineStoppedError(AnyAccelError):
    """The engine or one of its ranks has ended, or it takes no more requests because it is shutting down; HTTP 503."""


class DeadlineError(AnyAccelError):
    """The request's time was over before its answer was complete; HTTP 504, or the last event of a stream."""

    def __init__(self, message: str = "the request's time was over before its answer was complete") -> None:
        super().__init__(message)


class TooLongError(AnyAccelError):
    """Prompt and answer do not fit the model's context or the cache; HTTP 400."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like, from which the engine makes token masks.

    Attributes:
        kind: "json_object" (any JSON object, `text` is unused), "json_schema", "regex", or "lark" (llguidance's
            grammar format).
        text: the schema as JSON, the regular expression, the grammar.
        param: the field of the request that has it, for errors.
        parts: grammars that this one consists of: a Lark grammar refers to them as @name. Errors name the wrong part.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: str = ""
    param: str = field(default="grammar", compare=False)
    parts: tuple[tuple[str, Grammar], ...] = field(default=(), compare=False)


class GrammarError(UsageError):
    """A grammar that no answer can follow; `param` is the field of the request that has it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param
        self.problem = problem

    def __reduce__(self) -> tuple[type[GrammarError], tuple[str, str]]:
        return type(self), (self.param, self.problem)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, with OpenAI's and vLLM's meanings; temperature 0 takes the likeliest.

    Attributes:
        logit_bias: token -> what is added to its logit before anything else, -100 to 100.
        logprobs: the number of likeliest tokens whose log-probabilities are returned, in addition to the chosen one's;
            None: not even that. Of the model's logits, before bias, penalties and temperature, as with vLLM.
        seed: None: another one for each request.
        dry_multiplier, dry_base, dry_allowed_length, dry_last_n, dry_breakers: the sampler DRY of llama.cpp, off where
            the multiplier is 0: a token that would go on with a repetition loses multiplier * base^(length - allowed
            length); of the last tokens (-1: all), and across no breaker, which is a token and those that follow it.
        xtc_probability, xtc_threshold: the sampler XTC of llama.cpp.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: Sequence[Sequence[int]] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and one answer. `n` answers are n requests; the prefix cache makes the prompt's cost one.

    Attributes:
        prompt: tokens, at least one.
        max_tokens: of the answer; 0: only the prompt is processed (for `prompt_logprobs`).
        ends: tokens that end the answer, and are its last token then.
        ignore_end: the answer continues past them.
        prompt_logprobs: as SamplingParams.logprobs, for each token of the prompt but the first.
        key: the client; clients have equal shares of the machine while they compete.
        timeout_s: from generate() to the last token; None: the engine's own.
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    ends: frozenset[int] = frozenset()
    ignore_end: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    key: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability (natural logarithm) of a token, and the likeliest tokens in its place, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """The part of an answer since the last chunk.

    Attributes:
        tokens: new ones; several if the reader was slower than the engine.
        logprobs: one for each token; () if they were not asked for.
        prompt_logprobs: in the first chunk only, one for each token of the prompt but the first.
        cached_tokens: tokens of the prompt that were in the prefix cache; in every chunk.
        queued_s: seconds from generate() to the first step with tokens of the prompt; in every chunk.
        drafts: numbers of drafted and of accepted tokens so far; in the last chunk, at least.
        finish: None while the answer goes on. "abort" comes only from shutting down.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    finish: Finish | None = None
    queued_s: float = 0.0
    drafts: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Stats:
    """The state of the engine, for /metrics; counters only grow.

    Attributes:
        running, waiting: numbers of requests.
        cache_used, cache_total: bytes of the KV cache that running requests hold, and of the whole cache.
        prefix_hits, prefix_queries: tokens of prompts that were in the prefix cache, and all tokens of prompts.
        prompt_tokens, generation_tokens: computed so far.
        preemptions: requests that were preempted because the cache was full.
        steps: steps of the decoder.
        drafted, accepted: drafted tokens, and those that were accepted.
    """

    running: int = 0
    waiting: int = 0
    cache_used: int = 0
    cache_total: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Stats) -> Stats:
        """The sum of each field."""
        return Stats(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Stats)})


@dataclass(frozen=True)
class ModelFacts:
    """What the frontend knows of a model.

    Attributes:
        context: most tokens of prompt and answer together; 0: no limit.
        ends: tokens that end a text of this model.
        hidden: length of an embedding.
        weight_bytes, cache_bytes: that the weights take, and that the cache may take; 0: not known.
        plan: lines about ranks, precision and cache, printed when the server starts.
        pooling: of embeddings, where the model's own files say it, not the request.
        cuts: the numbers of first values of an embedding that are an embedding as well.
    """

    context: int
    vocabulary: int
    ends: frozenset[int]
    hidden: int
    dtype: str
    plan: tuple[str, ...] = ()
    weight_bytes: int = 0
    cache_bytes: int = 0
    pooling: str = ""
    cuts: Sequence[int] = ()


@runtime_checkable
class TextEncoder(Protocol):
    """What engines of encoders have beside `Engine`. UsageError: the model does something else."""

    async def score(self, query: str, texts: Sequence[str]) -> tuple[list[float], int]:
        """How well each text answers the query, and the tokens of all pairs."""

    async def classify(self, prompts: Sequence[Sequence[int]], activated: bool) -> list[dict[str, float]]:
        """The probability of each class by its name, in the model's order; else the logits."""

    async def embed_each(self, prompts: Sequence[Sequence[int]], normalized: bool) -> list[list[list[float]]]:
        """The hidden states of each prompt's tokens, of length 1 where that is asked."""


class Engine(Protocol):
    """Answers many requests at once. All methods are called from one event loop, and never block it.

    An engine is made by `anyaccel.serve.engine.opening.open_engine(path, options, screen)`.
    """

    facts: ModelFacts

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """The answer as it comes. Closing the iterator (aclose(), or a cancelled task) ends the request before the next
        step.

        Raises:
            UsageError: a value is out of range; the error names the field of `GenerationRequest`.
            TooLongError, EngineFullError, EngineStoppedError, DeadlineError: see there.
            ModelError: the logits are NaN or infinite.
        """

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Literal["mean", "last"], key: str = ""
    ) -> list[list[float]]:
        """The hidden states after the last norm, pooled over the prompt's tokens and divided by their 2-norm."""

    def stats(self) -> Stats: ...

    def ready(self) -> bool:
        """Whether a request that is sent now would be computed; False while the model loads or restarts."""

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait for the open ones, at most `seconds`; the others end with "abort"."""

    async def close(self) -> None:
        """End all processes and threads of the engine; open requests get EngineStoppedError."""

# SPDX-License-Identifier: Apache-2.0
"""One answer under way, as `_llm.Request` is one of the native model."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.device.options import read_options
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.random import Random
from anyaccel.inference.device.rotary import changes_between
from anyaccel.inference.device.sampling import History, TokenScore
from anyaccel.inference.spec.decoder import DecoderSpec


class Owner(Protocol):
    """What a request needs of its model."""

    spec: DecoderSpec
    cache: KvPages
    lock: threading.RLock

    def check_tokens(self, tokens: Sequence[int]) -> None: ...
    def leave(self, sequence: int) -> None: ...


class Request:
    """Its tokens, its sampling, its place in the cache (freed when this object goes)."""

    def __init__(
        self,
        model: Owner,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        prefix: Request | None = None,
        keep_logits: bool = False,
    ) -> None:
        self.model = model
        self.sequence = -1
        self.options = read_options(options)
        if prefix is not None and prefix.model is not model:
            raise UsageError("the prefix is a request of another model")
        self.keep_logits = keep_logits
        self.prefix = prefix  # until the first step
        self.all_tokens = [int(token) for token in prompt]
        self.prompt = len(self.all_tokens)
        self.in_cache = 0
        self.context = 0  # the sequence's length when its cache was computed, which longrope's angles depend on
        self.passing = 0  # tokens that the step under way computes
        self.ended = ""
        self._random = Random(self.options.seed)
        self._drawn: float | None = None
        self.mask: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self.scores: list[TokenScore] = []
        self.of_prompt: list[TokenScore] = []
        self.pooled: torch.Tensor | None = None
        self.pooled_tokens = 0
        self._history: History | None = None
        with model.lock:
            if not self.all_tokens:
                raise UsageError("the prompt is empty: it needs one token at least")
            model.check_tokens(self.all_tokens)
            self._check_room(self.prompt, self.answering)
            if self.options.prompt_logprobs >= 0:
                self.of_prompt = [(-1, 0.0, [])] * (self.prompt - 1)
            self.sequence = model.cache.create()

    def __del__(self) -> None:
        if getattr(self, "sequence", -1) >= 0:
            with contextlib.suppress(Exception):
                self.model.leave(self.sequence)

    def _check_room(self, tokens: int, answer: bool) -> None:
        most = self.model.spec.max_tokens
        if most > 0 and tokens + answer > most:
            raise UsageError(
                f"a prompt of {tokens} tokens leaves no room for an answer: the model's context has {most} tokens"
            )

    @property
    def answering(self) -> bool:
        return self.options.goal == "answer"

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.all_tokens) - self.in_cache

    @property
    def answered(self) -> int:
        return len(self.all_tokens) - self.prompt

    @property
    def tokens(self) -> list[int]:
        return self.all_tokens[self.prompt :]

    @property
    def prompt_length(self) -> int:
        return self.prompt

    @property
    def drafts(self) -> tuple[int, int]:
        return 0, 0

    @property
    def finished(self) -> str:
        return self.ended

    def finish(self) -> None:
        with self.model.lock:
            self.prefix = None
            sequence = self.sequence
            if sequence >= 0:
                self.model.leave(sequence)  # first: a signal may end this call
                self.sequence = -1
                self.model.cache.destroy(sequence)
            self.in_cache = 0
            self.ended = self.ended or "stopped"

    def extend(self, tokens: Sequence[int], max_new_tokens: int = 0) -> None:
        if max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {max_new_tokens}")
        with self.model.lock:
            if self.sequence < 0:
                raise UsageError("the request was finished with finish(): make a new one")
            self.model.check_tokens(tokens)
            self._check_room(len(self.all_tokens) + len(tokens), True)
            if not self.answering or self.options.prompt_logprobs >= 0:
                raise UsageError("extend: the request is of a prompt only")
            if not self.pending and not tokens:
                raise UsageError("extend: no tokens to go on with")
            self.all_tokens += [int(token) for token in tokens]
            self.prompt = len(self.all_tokens)
            self._history = None  # what was the answer's is the prompt's now
            if max_new_tokens > 0:
                self.options.max_new_tokens = max_new_tokens
            self.ended = ""

    def share(self, other: Request, tokens: int) -> None:
        if other.model is not self.model:
            raise UsageError("share: the other request is of another model")
        with self.model.lock:
            if self.sequence < 0 or other.sequence < 0:
                raise UsageError("share: a request was finished with finish()")
            fits = not self.in_cache and 1 <= tokens <= other.in_cache and tokens < len(self.all_tokens)
            if not fits or self.all_tokens[:tokens] != other.all_tokens[:tokens]:
                raise UsageError(f"share: the first {tokens} tokens are not those of the other request")
            self._take_over(other, tokens)

    def share_prefix(self) -> None:
        """Before the first step, with the prefix in the cache as far as it will be."""
        prefix, self.prefix = self.prefix, None
        if prefix is None or prefix.sequence < 0 or self.in_cache > 0:
            return
        # The last token of the prompt is computed anyway: its logits are wanted.
        most = min(prefix.in_cache, len(self.all_tokens) - 1)
        common = 0
        while common < most and self.all_tokens[common] == prefix.all_tokens[common]:
            common += 1
        ropes = self.model.spec.ropes
        if common and not any(changes_between(rope, len(self.all_tokens), prefix.in_cache) for rope in ropes):
            self._take_over(prefix, common)

    def _take_over(self, other: Request, tokens: int) -> None:
        shared = self.model.cache.fork(other.sequence, tokens)
        own, self.sequence = self.sequence, shared
        self.in_cache, self.context = tokens, other.context
        self.model.cache.destroy(own)

    def shrink(self, tokens: int) -> None:
        with self.model.lock:
            if self.sequence < 0:
                raise UsageError("shrink: the request was finished with finish()")
            if not 0 <= tokens <= self.in_cache:
                raise UsageError(f"shrink: {self.in_cache} tokens are there")
            self.model.cache.truncate(self.sequence, tokens)
            self.in_cache = tokens

    @property
    def cached(self) -> int:
        return self.in_cache

    def set_mask(self, mask: bytes) -> None:
        vocabulary = self.model.spec.vocab
        if len(mask) // 4 != (vocabulary + 31) // 32:
            words = (vocabulary + 31) // 32
            raise UsageError(f"set_mask: {len(mask) // 4} words, and the vocabulary has {words}")
        octets = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # words are little-endian
        self.mask = bits.flatten()[:vocabulary].bool()

    def take_scores(self) -> list[TokenScore]:
        taken, self.scores = self.scores, []
        return taken

    def prompt_scores(self) -> list[TokenScore]:
        return list(self.of_prompt)

    def history(self, vocabulary: int, device: torch.device) -> History:
        """The tokens so far, counted on the device."""
        if self._history is None:
            self._history = History(vocabulary, device)
        self._history.count(self.all_tokens, self.prompt)
        return self._history

    def draw(self) -> float:
        """The random number of the next token: the same one in a step that is repeated after an error."""
        if self._drawn is None:
            self._drawn = self._random.uniform()
        return self._drawn

    def pool(self, hidden: torch.Tensor, position: int) -> None:
        """Add the hidden states of tokens from `position` on; those that are computed again are passed over."""
        passed = min(max(self.pooled_tokens - position, 0), len(hidden))
        own = hidden[passed:].float()
        self.pooled = own.sum(0) if self.pooled is None else self.pooled + own.sum(0)
        self.pooled_tokens += len(own)

    def embedding(self) -> list[float]:
        if self.pooled is None or not self.ended:
            raise UsageError("embedding: no hidden states have been pooled")
        pooled = self.pooled.cpu().double()
        norm = float(pooled.norm())
        if norm - norm != 0:
            raise ModelError("the model's hidden states are NaN or infinite: try another dtype, such as fp32")
        return (pooled / norm if norm > 0 else pooled).float().tolist()

    def add(self, token: int) -> None:
        """A token that has been chosen."""
        self.all_tokens.append(token)
        self.mask = self._drawn = None
        o, context = self.options, self.model.spec.max_tokens
        if not o.ignore_end and token in o.end_tokens:
            self.ended = "end"
        elif (o.max_new_tokens and self.answered >= o.max_new_tokens) or 0 < context <= len(self.all_tokens):
            self.ended = "length"

    def copy_logits(self, address: int) -> None:
        if self.logits is None:
            raise UsageError(
                "no step has been made yet" if self.keep_logits else "logits are kept with keep_logits only"
            )
        values = self.logits.cpu().contiguous()
        ctypes.memmove(address, values.data_ptr(), values.nbytes)

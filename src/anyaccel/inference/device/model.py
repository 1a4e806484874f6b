# SPDX-License-Identifier: Apache-2.0
"""A decoder on a torch device, with the interface of `_llm.Model`: steps of requests, and sequences for other loops."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from anyaccel.accelerator.base import HOST
from anyaccel.errors import UsageError
from anyaccel.inference.device.decoder import Decoder
from anyaccel.inference.device.pages import PAGE, KvPages
from anyaccel.inference.device.passes import Passes, Work
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.request import Request
from anyaccel.inference.device.results import Results, wanted_of
from anyaccel.inference.device.rotary import changes_between
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import DecoderSpec

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _undisturbed(method: _Method) -> _Method:
    """Whatever the caller's thread has set: no autograd, no autocast, and tensors of the host are made on the host."""

    @functools.wraps(method)
    def wrapped(self: DeviceModel, *arguments: Any, **more: Any) -> Any:
        kind = self.device.type
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device() != HOST:
                stack.enter_context(HOST)
            return method(self, *arguments, **more)

    return cast("_Method", wrapped)


class DeviceModel:
    """See `_llm.pyi` for what each method means; what differs is said here.

    `exact` in `step` divides prompts and answers as the native model does, and does not make results the same bits
    whatever else is in the step: that is up to the device's products. Drafts are not made.

    Args:
        precise: dtype of sums over the vocabulary when a token is drawn.
    """

    threads = 0

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DeviceWeights,
        dtype: torch.dtype,
        cache_limit_bytes: int,
        precise: torch.dtype = torch.float64,
        ranks: TensorRanks | None = None,
    ) -> None:
        self.spec = spec
        self.device = weights.device
        self.dtype = dtype
        self.weight_bytes = weights.weight_bytes
        self.lock = threading.RLock()
        self._left: list[int] = []  # sequences of requests that have gone, freed by the next call
        widths = [
            each.attention.kv_heads * (each.attention.head_dim + each.attention.value_dim) for each in spec.layers
        ]
        self.ranks = ranks
        least = None if ranks is None else ranks.least
        self.cache = KvPages(widths, dtype, self.device, cache_limit_bytes, least)
        self.decoder = Decoder(spec, weights, dtype, self.cache, ranks)
        self._passes = Passes(self.decoder, self.cache, self.device, ranks)
        self._precise = precise

    # Checks and sequences -------------------------------------------------------------------------------------

    def check_tokens(self, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens):
            if not 0 <= token < self.spec.vocab:
                raise UsageError(
                    f"token {token} at position {position} is not in the vocabulary of {self.spec.vocab} tokens"
                )

    def _check_sequence(self, sequence: int) -> None:
        if sequence not in self.cache:
            raise UsageError(f"there is no sequence {sequence}")

    def leave(self, sequence: int) -> None:
        """Called by a request that goes, in any thread."""
        self._left.append(sequence)

    def _free_left(self) -> None:
        while self._left:
            if self._left[0] in self.cache:
                self.cache.destroy(self._left[0])
            del self._left[0]  # last, since a signal may end this call; others append meanwhile

    def request(
        self,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        prefix: Request | None = None,
        keep_logits: bool = False,
    ) -> Request:
        return Request(self, prompt, options, prefix, keep_logits)

    def create(self) -> int:
        with self.lock:
            self._free_left()
            return self.cache.create()

    def fork(self, sequence: int, tokens: int) -> int:
        with self.lock:
            self._check_sequence(sequence)
            return self.cache.fork(sequence, tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        with self.lock:
            self._check_sequence(sequence)
            self.cache.truncate(sequence, tokens)

    def destroy(self, sequence: int) -> None:
        with self.lock:
            self._check_sequence(sequence)
            self.cache.destroy(sequence)

    def length(self, sequence: int) -> int:
        with self.lock:
            self._check_sequence(sequence)
            return self.cache.length(sequence)

    def cache_bytes_per_token(self) -> int:
        return self.cache.page_bytes // PAGE

    @property
    def cache_used_bytes(self) -> int:
        with self.lock:
            self._free_left()
            return self.cache.used_bytes

    @property
    def cache_reserved_bytes(self) -> int:
        return self.cache.reserved_bytes

    @property
    def cache_limit_bytes(self) -> int:
        return self.cache.limit_bytes

    @property
    def graph_bytes(self) -> int:
        """What captured steps hold of the device's memory; 0 without graphs, and where the device does not tell."""
        return self._passes.graphs.bytes

    # Ranks ----------------------------------------------------------------------------------------------------

    def create_segment(
        self,
        timeout_s: float,
        anonymous: bool = False,
        hosts: Sequence[int] = (),
        addresses: Sequence[str] = (),
        wire_dtype: str = "f32",
        transport: str = "",
    ) -> str:
        """Nothing that others need to know: the ranks talk through a group of torch.distributed, which is there.

        That sums in the model's own dtype, within a host and between hosts: `wire_dtype` and `transport` do nothing.
        """
        return ""

    def connect(self, names: Sequence[str], pids: Sequence[int]) -> None:
        """Agree on what all ranks must have the same of; every rank calls it."""
        self.cache.agree()

    def unlink(self) -> None:
        """Nothing has a name that has to go."""

    def shared(self, value: int) -> int:
        """Rank 0's, 64 bits without a sign; every rank calls it, between steps."""
        return value if self.ranks is None else self.ranks.shared(value)

    # Passes ---------------------------------------------------------------------------------------------------

    @_undisturbed
    def logits(
        self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int], rows: Sequence[int]
    ) -> torch.Tensor:
        """As `forward`, on the device: float32 [rows, vocabulary]."""
        with self.lock:
            self._free_left()
            work = self._forward_work(sequences, counts, tokens)
            if any(not 0 <= row < len(tokens) for row in rows) or sorted(set(rows)) != list(rows):
                raise UsageError(f"forward: rows must be ascending, and of the {len(tokens)} tokens")
            found = []
            for _, residuals in self._passes.residuals(work, rows):
                found.append(self.decoder.logits(self.decoder.hidden(residuals)))
        if not found:
            return torch.empty(0, self.spec.vocab, device=self.device)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _forward_work(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> list[Work]:
        if len(sequences) != len(counts):
            raise UsageError("forward: needs one count a sequence")
        work = []
        first = 0
        for sequence, count in zip(sequences, counts, strict=True):
            self._check_sequence(sequence)
            if sequences.count(sequence) > 1:
                raise UsageError(f"forward: sequence {sequence} is there twice")
            if count < 0:
                raise UsageError(f"forward: a sequence with {count} tokens")
            length = self.cache.length(sequence) + count
            if 0 < self.spec.max_tokens < length:
                raise UsageError(
                    f"sequence {sequence} would have {length} tokens: the model's context has {self.spec.max_tokens}"
                )
            work.append(Work(sequence, tokens[first : first + count], length))
            first += count
        self.check_tokens(tokens)
        return work

    def forward(
        self, sequences: Sequence[int], counts: Sequence[int], tokens: int, logits: int, rows: Sequence[int]
    ) -> None:
        """With addresses of host memory, as the native model has it; `logits` is the same on the device."""
        if rows and not logits:
            raise UsageError("forward: rows are wanted, and no place for logits")
        total = sum(counts)
        numbers = list((ctypes.c_int64 * total).from_address(tokens)) if total else []
        found = self.logits(sequences, counts, numbers, rows)
        if rows:
            host = found.cpu().contiguous()
            ctypes.memmove(logits, host.data_ptr(), host.nbytes)

    # Steps ----------------------------------------------------------------------------------------------------

    @_undisturbed
    def step(self, requests: Sequence[Request], limits: Sequence[int] = (), exact: bool = False) -> list[int]:
        with self.lock:
            self._free_left()
            first, second = self._waves(requests, limits)
            results = Results(self.decoder, self.cache, self._precise, requests, self.ranks)
            try:
                self._step_some(first, exact, results)
                # The second wave can share what the first one has put into the cache.
                for request in first:
                    request.in_cache += request.passing
                self._step_some(second, exact, results)
            except BaseException:
                # The first wave's last tokens are computed again in the next step, as is all of a wave that failed.
                for request in first:
                    if request.pending == 0:
                        request.in_cache -= 1
                for request in (*first, *second):
                    if self.cache.length(request.sequence) > request.in_cache:
                        self.cache.truncate(request.sequence, request.in_cache)
                raise
            for request in second:
                request.in_cache += request.passing
            return [self._told(request, results.chosen) for request in requests]

    def _told(self, request: Request, chosen: Mapping[int, int]) -> int:
        """What a step tells of a request: its token, -1 when it had finished, -2 when it goes on."""
        if request.ended:
            return -1
        token = chosen.get(id(request), -2)
        if token >= 0:
            request.add(token)
        if not request.answering and request.pending == 0:
            request.ended = "length"
        return token

    def _waves(self, requests: Sequence[Request], limits: Sequence[int]) -> tuple[list[Request], list[Request]]:
        """Those that compute at once, and those that wait for the prefix which they share with one of them."""
        if limits and len(limits) != len(requests):
            raise UsageError(f"step: {len(limits)} limits for {len(requests)} requests")
        seen: set[int] = set()
        for number, request in enumerate(requests):
            if request.model is not self:
                raise UsageError(f"request {number} of the step is of another model")
            if id(request) in seen:
                raise UsageError(f"request {number} is in the step twice")
            if request.sequence < 0:
                raise UsageError(f"request {number} of the step was finished with finish()")
            seen.add(id(request))
            if not request.ended:
                self._settle(request)
            limit = limits[number] if limits else 0
            request.passing = limit if limit > 0 else request.pending
        first: list[Request] = []
        second: list[Request] = []
        for request in requests:
            if request.ended:
                continue
            prefix = request.prefix
            waits = prefix is not None and prefix.in_cache == 0 and id(prefix) in seen and not prefix.ended
            (second if prefix is not None and waits and prefix.prefix is None else first).append(request)
        return first, second

    def _settle(self, request: Request) -> None:
        """Take back what a step has left half done that a signal ended: cache and request agree, a token is pending."""
        length = self.cache.length(request.sequence)
        request.in_cache = min(request.in_cache, length)
        if request.pending == 0:
            request.in_cache -= 1
        if length > request.in_cache:
            self.cache.truncate(request.sequence, request.in_cache)

    def _step_some(self, requests: Sequence[Request], exact: bool, results: Results) -> None:
        work = []
        for request in requests:
            request.share_prefix()
            length = len(request.all_tokens)
            # As transformers does with longrope: the cache is made anew when the context outgrows the short factors.
            for rope in self.spec.ropes:
                if rope.long_inv_freq and request.in_cache and changes_between(rope, request.context, length):
                    self.cache.truncate(request.sequence, 0)
                    request.in_cache = 0
            request.context = length
            request.passing = min(request.passing, request.pending)
            if exact and request.in_cache < request.prompt:
                request.passing = min(request.passing, request.prompt - request.in_cache)
            begin = request.in_cache
            context = length
            if exact and not any(rope.long_inv_freq for rope in self.spec.ropes):
                context = max(request.prompt, begin + request.passing)
            work.append(Work(request.sequence, request.all_tokens[begin : begin + request.passing], context))
        if not requests:
            return
        results.begin(work)
        wanted, pooled = wanted_of(requests)
        everything = sorted({each.index for each in (*wanted, *pooled)})
        place = 0
        for count, residuals in self._passes.residuals(work, everything):
            here = {index: row for row, index in enumerate(everything[place : place + count])}
            place += count
            results.take(residuals, [(here[each.index], each) for each in wanted if each.index in here])
            results.pool(residuals, [(here[each.index], each) for each in pooled if each.index in here])

    def steps(self, requests: Sequence[Request], most: int, feed: Any, tag: int) -> tuple[list[list[int]], int]:
        """One step: the feed is the native model's."""
        return [self.step(requests, exact=True)], 0

    def profile(self, enabled: bool) -> dict[str, tuple[float, int]]:
        """Nothing: torch.profiler knows the device's kernels."""
        return {}

# SPDX-License-Identifier: Apache-2.0
"""A decoder on a torch device as the executor of `_llm.ExternalModel`, which has the requests and makes the steps."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from anyaccel import _llm
from anyaccel.accelerator import get_accelerator
from anyaccel.accelerator.base import HOST
from anyaccel.errors import CommError
from anyaccel.inference.device.ahead import Begun, next_step
from anyaccel.inference.device.batch import Segment, make_batch, to_device
from anyaccel.inference.device.decoder import Decoder, cache_widths
from anyaccel.inference.device.graphs import Graphs
from anyaccel.inference.device.pages import PAGE, KvPages
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.sampling import Pick, choose
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import DecoderSpec

# Tokens of prompts that pass at once: their activations should stay small beside the weights.
MOST_TOKENS = 1024

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _undisturbed(method: _Method) -> _Method:
    """Whatever the caller's thread has set: no autograd, no autocast, and tensors of the host are made on the host."""

    @functools.wraps(method)
    def wrapped(self: DeviceExecutor, *arguments: Any) -> Any:
        kind = self.device.type
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device() != HOST:
                stack.enter_context(HOST)
            return method(self, *arguments)

    return cast("_Method", wrapped)


class DeviceExecutor:
    """See `_llm.Executor` for what each method means.

    Args:
        precise: dtype of sums over the vocabulary when a token is drawn.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DeviceWeights,
        dtype: torch.dtype,
        cache_limit_bytes: int,
        precise: torch.dtype = torch.float64,
        ranks: TensorRanks | None = None,
    ) -> None:
        self.device = weights.device
        self.weight_bytes = weights.weight_bytes
        self.most_tokens = MOST_TOKENS
        least = None if ranks is None else ranks.least
        self.decoder = Decoder(spec, weights, dtype, ranks)
        self.cache = KvPages(
            cache_widths(spec), dtype, self.device, cache_limit_bytes, least, self.decoder.states.floats
        )
        self.graphs = Graphs(self.decoder, self.cache, self.device, ranks)
        self._begun: Begun | None = None
        # A state goes on with each token; a rank's tokens are rank 0's; and angles may depend on what the host knows.
        self._looks_ahead = self.graphs.usable and ranks is None and not spec.is_recurrent
        self._looks_ahead &= not any(rope.long_inv_freq or rope.dynamic_base for rope in spec.ropes)
        self._precise = precise
        self._ranks = ranks
        self.kept: list[torch.Tensor] = []  # logits for which no address was given

    @property
    def token_bytes(self) -> int:
        return self.cache.page_bytes // PAGE

    @property
    def used_bytes(self) -> int:
        return self.cache.used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.cache.reserved_bytes

    @property
    def limit_bytes(self) -> int:
        return self.cache.limit_bytes

    def connect(self) -> None:
        """Agree on the size of the cache; every rank calls it."""
        self.cache.agree()

    def shared(self, value: int) -> int:
        return value if self._ranks is None else self._ranks.shared(value)

    def change(self, sequence: int, of: int, length: int) -> None:
        if self._begun is not None:
            self._begun.forget(sequence)
        self.cache.change(sequence, of, length)

    @_undisturbed
    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        self.cache.reserve(wanted)

    @_undisturbed
    def clear(self, sequence: int) -> None:
        self.cache.clear(sequence)

    @_undisturbed
    def run(
        self,
        segments: Sequence[tuple[int, int, list[int], int]],
        picks: Sequence[Pick],
        logits_rows: Sequence[int],
        logits: int,
        hidden_rows: Sequence[int],
        hidden: int,
    ) -> list[int]:
        batch = _joined(Segment(*each) for each in segments)
        begun, self._begun = self._begun, None
        ready = {} if begun is None or logits_rows or hidden_rows else begun.ready(batch, picks)
        for each in batch:
            self.cache.extend(each.sequence, len(each.tokens))
        left, rows = _without(batch, ready)
        residuals = self._residuals(left) if left else torch.empty(0, device=self.device)
        if logits_rows:
            values = self._logits(residuals, logits_rows)
            if logits:
                _copy_to_host(values, logits)
            else:
                self.kept.append(values)
        if hidden_rows:
            _copy_to_host(self._hidden(residuals, hidden_rows).float(), hidden)
        if not picks:
            return self._of_rank_0([], batch) if logits_rows else []
        others = [pick for pick in picks if pick[0] not in ready]
        parts = [] if begun is None or not ready else [begun.chosen]
        if others:
            parts.append(choose(self._logits(residuals, [rows[pick[0]] for pick in others]), others, self._precise))
        chosen = parts[0] if len(parts) == 1 else torch.cat(parts)
        if ready:
            place = iter(range(len(chosen) - len(others), len(chosen)))
            order = [ready[pick[0]] if pick[0] in ready else next(place) for pick in picks]
            if order != list(range(len(chosen))):
                chosen = chosen.index_select(0, to_device(torch.tensor(order, dtype=torch.int64), self.device))
        if not self._looks_ahead or logits_rows or hidden_rows:
            return self._of_rank_0(chosen, batch)
        return self._tokens_and_next_step(batch, picks, chosen)

    def _residuals(self, batch: Sequence[Segment]) -> torch.Tensor:
        residuals = self.graphs.run(batch)
        if residuals is None:
            decoder = self.decoder
            made = make_batch(batch, self.cache, decoder.ropes, self.device, decoder.sinks)
            residuals = decoder.run(made, self.cache)
        return residuals

    def _tokens_and_next_step(self, batch: Sequence[Segment], picks: Sequence[Pick], chosen: torch.Tensor) -> list[int]:
        """The tokens on the host; the next step begins before anybody waits for them."""
        on_the_way, arrived = chosen.to(HOST, non_blocking=True), get_accelerator().Event()
        arrived.record()
        following = next_step(batch, picks, self.decoder.spec.max_tokens)
        residuals = None if following is None else self.graphs.run(following[0], chosen)
        later = None
        if following is not None and residuals is not None:
            later = choose(self.decoder.logits(self.decoder.hidden(residuals)), following[1], self._precise)
        arrived.synchronize()
        tokens: list[int] = on_the_way.tolist()
        if following is not None and later is not None:
            self._begun = Begun(*following, tokens, later)
        return tokens

    def _hidden(self, residuals: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if list(rows) != list(range(len(residuals))):
            residuals = residuals.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), self.device))
        return self.decoder.hidden(residuals)

    def _logits(self, residuals: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self.decoder.logits(self._hidden(residuals, rows))

    def _of_rank_0(self, chosen: torch.Tensor | list[int], batch: Sequence[Segment]) -> list[int]:
        """The tokens on the host, by one copy: rank 0's, whatever rounds differently elsewhere.

        Raises:
            CommError: a rank computes another run than rank 0.
        """
        if self._ranks is None:
            return chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen
        own = zlib.crc32(repr([(each.tokens, each.context) for each in batch]).encode())
        checksum = to_device(torch.tensor([own], dtype=torch.int64), self.device)
        values = torch.cat([chosen, checksum]) if isinstance(chosen, torch.Tensor) else checksum
        *tokens, expected = self._ranks.first(values).tolist()
        if expected != own:
            raise CommError("the ranks disagree: this one computes other requests or tokens than rank 0 in this step")
        return tokens


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    """Tokens that follow each other in a sequence as one segment: what is computed again comes one by one."""
    found: list[Segment] = []
    for each in segments:
        last = found[-1] if found else None
        if last is not None and (last.sequence, last.context) == (each.sequence, each.context):
            found[-1] = replace(last, tokens=[*last.tokens, *each.tokens])
        else:
            found.append(each)
    return found


def _without(batch: Sequence[Segment], gone: Container[int]) -> tuple[list[Segment], dict[int, int]]:
    """The segments whose first rows are not gone, and where the rows of these go."""
    left: list[Segment] = []
    rows: dict[int, int] = {}
    first = 0
    for each in batch:
        if first not in gone:
            left.append(each)
            rows |= {first + i: len(rows) + i for i in range(len(each.tokens))}
        first += len(each.tokens)
    return left, rows


def _copy_to_host(values: torch.Tensor, address: int) -> None:
    floats = (ctypes.c_float * values.numel()).from_address(address)
    torch.frombuffer(floats, dtype=torch.float32).view(values.shape).copy_(values)


def device_logits(
    model: _llm.ExternalModel,
    sequences: Sequence[int],
    counts: Sequence[int],
    tokens: Sequence[int],
    rows: Sequence[int],
) -> torch.Tensor:
    """As `model.forward`, with the logits on the device: float32 [rows, vocabulary]."""
    executor: DeviceExecutor = model.executor
    numbers = (ctypes.c_int64 * len(tokens))(*tokens)
    executor.kept.clear()  # of a call that failed
    model.forward(sequences, counts, ctypes.addressof(numbers), 0, rows)
    return torch.cat(executor.kept) if rows else torch.empty(0, executor.decoder.spec.vocab, device=executor.device)

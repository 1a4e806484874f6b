# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a model's own code in pages of the native cache, and the native attention over them.

Letters: H query heads, K key and value heads, T tokens of a step, D of a head, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyaccel import _llm
from anyaccel.errors import ModelError

_FEW = 16  # values of a tensor that a mask's function may hold


@dataclass(frozen=True)
class Pattern:
    """Which tokens before it a token sees: all, those of a window, or those of its chunk."""

    window: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class LayerShape:
    """What a layer's attention is given."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    pattern: Pattern


_patterns: dict[Any, Pattern] = {}  # by what `_identity` says of a mask's function


def pattern_of(sees: Callable[..., torch.Tensor]) -> Pattern:
    """What the function of a mask of transformers' computes.

    Raises:
        ModelError: something that the native attention has not.
    """
    identity = _identity(sees)
    if identity not in _patterns:
        _patterns[identity] = _find_pattern(sees, sorted({number for number in _numbers(identity) if number > 0}))
    return _patterns[identity]


def _identity(value: Any) -> Any:
    """A value of which equal functions have equal ones: their code, and all that they hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    if isinstance(value, torch.Tensor) and value.numel() <= _FEW and not value.is_floating_point():
        return ("tensor", tuple(value.flatten().tolist()))
    if callable(value) and hasattr(value, "__code__"):
        return (value.__code__, *(_identity(cell.cell_contents) for cell in value.__closure__ or ()))
    raise ModelError(f"a mask that depends on {type(value).__name__}")


def _numbers(identity: Any) -> Iterator[int]:
    if isinstance(identity, int) and not isinstance(identity, bool):
        yield identity
    elif isinstance(identity, tuple):
        for each in identity:
            yield from _numbers(each)


def _find_pattern(sees: Callable[..., torch.Tensor], numbers: Sequence[int]) -> Pattern:
    """The pattern that the function has around every place at which the numbers that it holds could matter."""
    edges = {
        place
        for number in (*numbers, 8)
        for times in (1, 2, 3)
        for place in range(times * number - 2, times * number + 3)
    }
    queries = torch.tensor(sorted({0, 1, *(place for place in edges if place >= 0)}))[:, None]
    keys = torch.arange(int(queries.max()) + 2)[None]
    zero = torch.zeros((), dtype=torch.int64)
    found = sees(zero, zero, queries, keys)
    for pattern in (Pattern(), *(each for n in numbers for each in (Pattern(window=n), Pattern(chunk=n)))):
        expected = keys <= queries
        if pattern.window:
            expected = expected & (keys > queries - pattern.window)
        if pattern.chunk:
            expected = expected & (keys // pattern.chunk == queries // pattern.chunk)
        if torch.equal(found.broadcast_to(expected.shape), expected):
            return pattern
    raise ModelError("a mask of a pattern that the native attention has not")


class Pages:
    """The memory of sequences, and attention over it, as `BatchedExecutor` takes them.

    Args:
        layers: by the number that the model has for each.

    Raises:
        ModelError: the native attention has not what a layer needs.
    """

    def __init__(self, layers: Mapping[int, LayerShape], dtype: torch.dtype, limit_bytes: int) -> None:
        self._layers = {number: (place, shape) for place, (number, shape) in enumerate(sorted(layers.items()))}
        shapes = [(each.heads, each.kv_heads, each.head_dim, each.value_dim) for _, each in self._layers.values()]
        form = "bf16" if dtype == torch.bfloat16 else "f32"
        try:
            self._native = _llm.PagedAttention(shapes, form, limit_bytes, torch.get_num_threads())
        except ValueError as error:
            raise ModelError(str(error)) from error
        self._limit_bytes = limit_bytes
        self._sequences: dict[int, int] = {}
        self._sinks: dict[int, torch.Tensor] = {}  # of layers, as float32

    @property
    def token_bytes(self) -> int:
        return self._native.token_bytes

    @property
    def used_bytes(self) -> int:
        return self._native.used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._native.reserved_bytes

    def change(self, sequence: int, of: int, length: int) -> None:
        if of == sequence and length >= 0:
            own = self._sequences[sequence]
            self._native.truncate(own, min(length, self._native.length(own)))
            return
        new = None
        if length >= 0:
            new = self._native.fork(self._sequences[of], length) if of >= 0 else self._native.create()
        old = self._sequences.pop(sequence, None)
        if old is not None:
            self._native.destroy(old)
        if new is not None:
            self._sequences[sequence] = new

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        new = sum(self._native.extend_bytes(self._sequences[sequence], count) for sequence, count in wanted)
        if self.used_bytes + new > self._limit_bytes:
            raise ModelError(f"the key/value cache of {self._limit_bytes} bytes is full; cache_bytes sets its size")

    def clear(self, sequence: int) -> None:
        """Does nothing: no sequence reads what is behind its end."""

    def begin(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """The tokens of a run: (sequence, start, count)."""
        try:
            self._native.begin([(self._sequences[sequence], start, count) for sequence, start, count in segments])
        except RuntimeError as error:
            raise ModelError(f"the key/value cache of {self._limit_bytes} bytes is full ({error})") from error

    def end(self) -> None:
        """Does nothing: lengths are the cache's."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: Pattern,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `executor.attend`."""
        place, shape = self._layers[layer]
        if pattern != shape.pattern:
            raise ModelError(f"layer {layer} has another mask than before")
        q_THD, k_TKD, v_TKV = (_dense(each) for each in (query, key, value))
        tokens = q_THD.shape[0]
        if q_THD.shape[1:] != (shape.heads, shape.head_dim) or k_TKD.shape != (tokens, shape.kv_heads, shape.head_dim):
            raise ModelError(f"layer {layer} has other heads than before")
        out = torch.empty(tokens, shape.heads, shape.value_dim)
        if sinks is not None:
            self._sinks[layer] = sinks.detach().float().contiguous()
        self._native.attend(
            place,
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKV.data_ptr(),
            out.data_ptr(),
            shape.head_dim**-0.5 if scaling is None else scaling,
            softcap or 0.0,
            shape.pattern.window,
            shape.pattern.chunk,
            0 if sinks is None else self._sinks[layer].data_ptr(),
        )
        return out[None].to(query.dtype)


def _dense(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] as float32 [T, heads, D]."""
    return heads[0].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format).contiguous()

# SPDX-License-Identifier: Apache-2.0
"""Models that run their own code as executors of `_llm.ExternalModel`, which has the requests and makes the steps.

`BatchedExecutor` computes the tokens of all sequences of a step together, as one row of tokens: linears, norms and MLPs
do not care whose a token is, and attention goes through transformers' interface to `attend` here, which has keys and
values of each sequence: on a CPU in pages of the native cache, which the native attention reads (`pages.py`), elsewhere
and where a model masks in another way as tensors. vLLM's Transformers backend has the same idea. `OneByOneExecutor` is
for what does not allow that, recurrent states above all: it computes one sequence after another, as `generate` does.

Letters: B batch (1), H query heads, K key and value heads, T tokens of a step, N tokens of a sequence, D of a head.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.sampling import Pick, choose
from anyaccel.inference.generic.pages import LayerShape, Pages, Pattern, pattern_of
from anyaccel.inference.generic.steps import TorchSequence
from anyaccel.inference.options import dtype_name
from anyaccel.validation import error_text

logger = logging.getLogger(__name__)

_NAME = "anyaccel"  # of our attention, among transformers'
_GROWTH = 256  # tokens for which a sequence takes memory at once
_MOST_TOKENS = 1024
# Sequences with a common part share its memory until one of them goes on; the limit counts it twice.
_SHARED = 2

Segment = tuple[int, int, list[int], int]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _own_code(method: _Method) -> _Method:
    """Whatever the module's own code raises, as one error."""

    @functools.wraps(method)
    def wrapped(self: _Executor, *arguments: Any) -> Any:
        try:
            with torch.inference_mode():
                return method(self, *arguments)
        except AnyAccelError:
            raise
        except Exception as error:
            kind, dtype = type(self.module).__name__, dtype_name(self.module.dtype)
            advice = "" if dtype == "fp32" else "; with --dtype fp32 it may run"
            raise ModelError(f"{kind}: its own code fails in {dtype} ({error_text(error)}){advice}") from error

    return cast("_Method", wrapped)


class _Executor:
    """What both have in common; see `_llm.Executor` for what each method means.

    Args:
        module: a causal language model of transformers, on one device.
        limit_bytes: of the memory of sequences.
        group: of the ranks that share the module; they choose by rank 0's logits, as rounding that differs between
            them would give different texts.
    """

    def __init__(self, module: Any, limit_bytes: int, weight_bytes: int, group: Any = None) -> None:
        self.module = module
        self._ranks = None if group is None else TensorRanks(group, ())
        self.limit_bytes = limit_bytes if self._ranks is None else self._ranks.least(limit_bytes)
        self.weight_bytes = weight_bytes
        self.most_tokens = _MOST_TOKENS
        self.token_bytes = 1
        self.device = next(module.parameters()).device
        config = module.config.get_text_config()
        self._widths = (config.vocab_size, getattr(config, "hidden_size", 1))  # of the rows that `_llm` has room for

    def run(
        self,
        segments: Sequence[Segment],
        picks: Sequence[Pick],
        logits_rows: Sequence[int],
        logits: int,
        hidden_rows: Sequence[int],
        hidden: int,
    ) -> list[int]:
        rows = sorted({*logits_rows, *(pick[0] for pick in picks)})
        logits_RV, hidden_TE = self.compute(segments, rows, bool(hidden_rows))
        logits_RV = self._of_rank_0(logits_RV)
        found = (logits_RV.shape[1], self._widths[1] if hidden_TE is None else hidden_TE.shape[1])
        if found != self._widths:
            raise ModelError(
                f"the model gives rows of {found} logits and hidden values, its config says {self._widths}"
            )
        at = {row: index for index, row in enumerate(rows)}
        if logits_rows:
            _copy_to_host(logits_RV[[at[row] for row in logits_rows]], logits)
        if hidden_rows:
            assert hidden_TE is not None
            _copy_to_host(hidden_TE[list(hidden_rows)], hidden)
        if not picks:
            return []
        chosen: list[int] = choose(logits_RV[[at[pick[0]] for pick in picks]].float(), picks, torch.float64).tolist()
        return chosen

    def compute(
        self, segments: Sequence[Segment], rows: Sequence[int], hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [rows, vocabulary] and, where they are asked for, last hidden states of all segments' tokens.

        Args:
            rows: of the tokens of all segments, ascending: those whose logits are wanted.
        """
        raise NotImplementedError

    def _of_rank_0(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._ranks is None else self._ranks.first(logits.contiguous())

    def connect(self) -> None:
        """Does nothing: the module's own layers know the other ranks."""

    def shared(self, value: int) -> int:
        return value if self._ranks is None else self._ranks.shared(value)


def _copy_to_host(values: torch.Tensor, address: int) -> None:
    floats = (ctypes.c_float * values.numel()).from_address(address)
    torch.frombuffer(floats, dtype=torch.float32).view(values.shape).copy_(values)


def _alike(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits differ by no more than rounding does.

    In 16 bits that is a part of all of them: single ones of a real model may differ by half (measured: 0.02 to 0.05 of
    their root mean square, and 0.25 and more where positions or order are wrong).
    """
    difference = found - expected
    if dtype == torch.float32:
        return bool(difference.abs().max() <= 1e-3 * expected.abs().max())
    return bool(difference.square().mean() <= 0.1**2 * expected.square().mean())


def depends_on_length(config: Any) -> bool:
    """Whether rotary frequencies, and with them cached keys, change with a text's length (dynamic NTK, longrope)."""

    def values(part: Any) -> Iterator[Any]:
        if isinstance(part, Mapping):
            yield from (part[name] for name in ("rope_type", "type") if isinstance(part.get(name), str))
            for each in part.values():
                yield from values(each)

    return not {"dynamic", "longrope"}.isdisjoint(values(config.to_dict()))


# All sequences together -----------------------------------------------------------------------------------


@dataclass
class _Layer:
    """Keys [K, capacity, D] and values of a sequence in a layer; `own`: nobody else has this memory."""

    keys: torch.Tensor
    values: torch.Tensor
    own: bool = True

    def append(self, keys_KTD: torch.Tensor, values_KTD: torch.Tensor, start: int) -> None:
        end = start + keys_KTD.shape[1]
        if not self.own or end > self.keys.shape[1]:
            self.keys, self.values = _grown(self.keys, start, end), _grown(self.values, start, end)
            self.own = True
        self.keys[:, start:end] = keys_KTD
        self.values[:, start:end] = values_KTD


def _grown(old: torch.Tensor, start: int, end: int) -> torch.Tensor:
    new = old.new_empty(old.shape[0], -(-end // _GROWTH) * _GROWTH, old.shape[2])
    new[:, :start] = old[:, :start]
    return new


@dataclass
class _Sequence:
    length: int = 0
    layers: dict[int, _Layer] = field(default_factory=dict)


@dataclass(frozen=True)
class _Row:
    """Where the tokens of a segment are in the row of all, and whose they are."""

    sequence: _Sequence
    start: int
    begin: int
    count: int


@dataclass(frozen=True)
class _Mask:
    """What transformers' models get for a mask and hand to `attend`: which positions see which."""

    sees: Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
    made: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)  # most layers of a step share one

    @functools.cached_property
    def pattern(self) -> Pattern:
        """What it is for the native attention."""
        return pattern_of(self.sees)

    def between(self, start: int, end: int, device: torch.device) -> torch.Tensor | None:
        """[end - start, end], of the tokens from `start` on; None: each sees all."""
        if (start, end) not in self.made:
            queries = torch.arange(start, end, device=device)[:, None]
            keys = torch.arange(end, device=device)[None]
            zero = torch.zeros((), dtype=torch.int64, device=device)
            seen = self.sees(zero, zero, queries, keys)
            self.made[start, end] = None if bool(seen.all()) else seen
        return self.made[start, end]


def _causal(window: int | None) -> _Mask:
    """For models that hand over no mask."""
    return _Mask(lambda _, __, query, key: (key <= query) & (key > query - window if window else True))


def _make_mask(*_: Any, mask_function: Any, attention_mask: Any = None, **__: Any) -> _Mask:
    if attention_mask is not None:
        raise ModelError("the model's code makes masks of its own")
    return _Mask(mask_function)


class _NoCache(Cache):  # type: ignore[misc]
    """Stands for the model's own cache, and keeps nothing: `attend` has keys and values."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Mask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the tokens of several sequences, each to its own; an `attention_interface` of transformers.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D].
        s_aux: a logit of each head that takes part in the softmax (GPT-OSS).

    Returns:
        [1, T, H, D].
    """
    layer = int(cast("Any", module).layer_idx)
    mask = attention_mask or _causal(sliding_window)
    (memory,) = _current
    if isinstance(memory, Pages):
        return memory.attend(layer, query, key, value, mask.pattern, scaling, softcap, s_aux), None
    return memory.attend(layer, query, key, value, mask, scaling, softcap, s_aux), None


class _Tensors:
    """Keys and values of sequences as tensors, for every device and mask; the same methods as `Pages`."""

    def __init__(self, limit_bytes: int) -> None:
        self.token_bytes = 1
        self.limit_bytes = limit_bytes
        self.shapes: dict[int, LayerShape] | None = {}  # None: the native attention has not what some layer needs
        self._sequences: dict[int, _Sequence] = {}
        self._rows: list[_Row] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: _Mask,
        scaling: float | None,
        softcap: float | None,
        s_aux: torch.Tensor | None,
    ) -> torch.Tensor:
        self._note(layer, query, key, value, mask)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for row in self._rows:
            part = slice(row.begin, row.begin + row.count)
            end = row.start + row.count
            held = row.sequence.layers.get(layer)
            if held is None:
                held = row.sequence.layers[layer] = _Layer(
                    key.new_empty(key.shape[1], 0, key.shape[3]), value.new_empty(value.shape[1], 0, value.shape[3])
                )
            held.append(key[0, :, part], value[0, :, part], row.start)
            seen = mask.between(row.start, end, query.device)
            heads = _softmax(
                query[:, :, part], held.keys[None, :, :end], held.values[None, :, :end], seen, scaling, softcap, s_aux
            )
            out[0, part] = heads[0].transpose(0, 1)
        return out

    def _note(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: _Mask) -> None:
        if self.shapes is None or layer in self.shapes:
            return
        try:
            pattern = mask.pattern
        except Exception as error:  # noqa: BLE001  of code that is not ours
            logger.info("keys and values are kept as tensors: %s", error)
            self.shapes = None
            return
        self.shapes[layer] = LayerShape(query.shape[1], key.shape[1], query.shape[3], value.shape[3], pattern)

    def begin(self, segments: Sequence[tuple[int, int, int]]) -> None:
        self._rows, at = [], 0
        for number, start, count in segments:
            self._rows.append(_Row(self._sequences[number], start, at, count))
            at += count

    def end(self) -> None:
        for row in self._rows:
            row.sequence.length = row.start + row.count

    def measure(self) -> None:
        """What a token takes, now that there are some."""
        layers = next(iter(self._sequences.values())).layers.values()
        self.token_bytes = sum(_row_bytes(each.keys) + _row_bytes(each.values) for each in layers)

    @property
    def used_bytes(self) -> int:
        return sum(each.length for each in self._sequences.values()) * self.token_bytes

    @property
    def reserved_bytes(self) -> int:
        held = {
            tensor.data_ptr(): tensor.nbytes
            for sequence in self._sequences.values()
            for layer in sequence.layers.values()
            for tensor in (layer.keys, layer.values)
        }
        return sum(held.values())

    def change(self, sequence: int, of: int, length: int) -> None:
        if length < 0:
            self._sequences.pop(sequence, None)
        elif of == sequence:
            self._sequences[sequence].length = length
        else:
            new = _Sequence(length)
            if of >= 0 and length > 0:
                for index, layer in self._sequences[of].layers.items():
                    layer.own = False
                    new.layers[index] = _Layer(layer.keys, layer.values, own=False)
            self._sequences[sequence] = new

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        new = sum(count for _, count in wanted) * self.token_bytes
        if self.used_bytes + new > _SHARED * self.limit_bytes:
            raise ModelError(f"the key/value cache of {self.limit_bytes} bytes is full; cache_bytes sets its size")

    def clear(self, sequence: int) -> None:
        for layer in self._sequences[sequence].layers.values():
            if layer.own:  # others have had theirs from before
                layer.keys.zero_()
                layer.values.zero_()


# Of the call under way: executors run in one thread at a time, within `_llm`'s lock.
_current: list[_Tensors | Pages] = []


def _softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if softcap is None and sinks is None:
        return nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True)
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(v.dtype) @ v


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, _make_mask)


class BatchedExecutor(_Executor):
    """Tokens of all sequences together.

    Raises:
        ModelError: the module's attention does not go through transformers' interface, or answers otherwise than when
            it is called alone.
    """

    def __init__(self, module: Any, limit_bytes: int, weight_bytes: int, group: Any = None) -> None:
        super().__init__(module, limit_bytes, weight_bytes, group)
        tensors = _Tensors(self.limit_bytes)
        self._memory: _Tensors | Pages = tensors
        kind = type(module)
        if getattr(kind, "_is_stateful", False) or not getattr(kind, "_supports_attention_backend", False):
            raise ModelError(f"{kind.__name__} has states of its own, or an attention of its own")
        if depends_on_length(module.config):
            raise ModelError(f"the rotary positions of {kind.__name__} depend on the longest sequence")
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._configs = _configs_of_attention(module)
        tokens = self._some_tokens(8)
        try:
            with torch.inference_mode():
                logits = module(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits
            expected = self._of_rank_0(logits[0].float())
            self._check(tokens[:1], expected)  # which shows what attention is given
            tensors.measure()
            if not self._use_pages(tensors, tokens, expected):
                self._check(tokens, expected)
        except Exception as error:  # of code that is not ours
            raise ModelError(f"{kind.__name__} cannot compute sequences together ({error})") from error
        for number in (0, 1):
            self._memory.change(number, -1, -1)
        self.token_bytes = self._memory.token_bytes

    def _some_tokens(self, count: int) -> list[int]:
        """Tokens of a text: RoBERTa's models, for one, give padding a position of its own."""
        vocabulary = self.module.get_input_embeddings().weight.shape[0]
        special = {getattr(self.module.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        first = vocabulary // 2  # the first ones are often special ones too, of which models make little
        usual = [token for token in range(first, min(vocabulary, first + count + 8)) if token not in special] or [0]
        return [usual[index % len(usual)] for index in range(count)]

    @property
    def paged(self) -> bool:
        """Whether the native attention computes this model's."""
        return isinstance(self._memory, Pages)

    def _use_pages(self, tensors: _Tensors, tokens: list[int], expected: torch.Tensor) -> bool:
        """Go over to the native attention, where it has all that the model asks for."""
        if not self.module.get_input_embeddings().weight.is_cpu or not tensors.shapes:
            return False
        try:
            self._memory = Pages(tensors.shapes, self.module.dtype, self.limit_bytes)
            self._check(tokens, expected)
        except ModelError as why:
            logger.info("%s keeps keys and values as tensors: %s", type(self.module).__name__, why)
            self._memory = tensors
        return self.paged

    def _check(self, tokens: list[int], expected: torch.Tensor) -> None:
        """Compare tokens that come in parts, beside those of another sequence, with the module called alone."""
        for number in (0, 1):
            self.change(number, -1, 0)
        parts = []
        for begin, end in ((0, 5), (5, 7), (7, 8)):
            if part := tokens[begin:end]:
                both = [(1, begin, part[::-1], 0), (0, begin, part, 0)]
                parts.append(self.compute(both, range(len(part), 2 * len(part)), False)[0])
        found = self._of_rank_0(torch.cat(parts).float())
        if not _alike(found, expected[: len(tokens)], self.module.dtype):
            raise ModelError("the answers differ from those of the module alone")

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._memory.reserved_bytes

    def change(self, sequence: int, of: int, length: int) -> None:
        self._memory.change(sequence, of, length)

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        self._memory.reserve(wanted)

    def clear(self, sequence: int) -> None:
        self._memory.clear(sequence)

    @_own_code
    def compute(
        self, segments: Sequence[Segment], rows: Sequence[int], hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids: list[int] = []
        positions: list[int] = []
        for _, start, tokens, _ in segments:
            ids += tokens
            positions += range(start, start + len(tokens))
        self._memory.begin([(number, start, len(tokens)) for number, start, tokens, _ in segments])
        kept = torch.tensor(rows, dtype=torch.int64, device=self.device)
        with self._attending():
            output = self.module(
                input_ids=torch.tensor([ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                past_key_values=_NoCache(),
                use_cache=True,
                output_hidden_states=hidden,
                return_dict=True,
                **({"logits_to_keep": kept} if self._keeps_logits else {}),
            )
        self._memory.end()
        logits = output.logits[0] if self._keeps_logits else output.logits[0, kept]
        return logits, output.hidden_states[-1][0] if hidden else None

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """Within, the module's attention is `attend`; and otherwise transformers', for whoever calls the module."""
        usual = [each._attn_implementation_internal for each in self._configs]
        _current[:] = [self._memory]
        for each in self._configs:
            each._attn_implementation_internal = _NAME
        try:
            yield
        finally:
            for each, own in zip(self._configs, usual, strict=True):
                each._attn_implementation_internal = own
            _current.clear()


def _configs_of_attention(module: Any) -> list[Any]:
    """The configurations by which transformers says which attention the module's layers call."""
    found = {}
    for own in (each.config for each in module.modules() if hasattr(each, "config")):
        for config in (own, *(getattr(own, name, None) for name in getattr(own, "sub_configs", ()))):
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
    return [*found.values()]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[0] * tensor.shape[2] * tensor.element_size()


# One sequence after another -------------------------------------------------------------------------------


@dataclass
class _OwnState:
    """A sequence with the model's own cache; without one, its tokens are computed again when it goes on."""

    tokens: list[int] = field(default_factory=list)
    state: TorchSequence | None = None


class OneByOneExecutor(_Executor):
    """Sequences one after another, each with the cache that the model's own code makes."""

    def __init__(self, module: Any, limit_bytes: int, weight_bytes: int) -> None:
        super().__init__(module, limit_bytes, weight_bytes)
        self._sequences: dict[int, _OwnState] = {}
        config = module.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None) or 1
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = getattr(config, "num_hidden_layers", 1)
        self.token_bytes = 2 * layers * heads * width * module.dtype.itemsize  # at most: states do not grow
        self.most_tokens = getattr(config, "max_position_embeddings", None) or 1 << 20
        # How a sequence goes on: with its own cache, and by several tokens at once. Else it is computed from its
        # beginning, which gives the same answer.
        self._forgets_lengths = depends_on_length(module.config)
        self.keeps_states = self.continues = True
        self.keeps_states = self._is_same((5, 6))
        self.continues = self.keeps_states and self._is_same((3, 6))

    def _is_same(self, last: tuple[int, int]) -> bool:
        """Whether the last tokens of a text of six get the logits that they get in one call, with another text between.

        Some models have their states in the module, and some go on by one token only.
        """
        count = self.module.get_input_embeddings().weight.shape[0]
        tokens = [token % count for token in range(1, 7)]
        begin, end = last
        for number in (0, 1):
            self.change(number, -1, 0)
        try:
            self.compute([(0, 0, tokens[:begin], 0), (1, 0, tokens[::-1], 0)], [], False)
            found, _ = self.compute([(0, begin, tokens[begin:end], 0)], range(end - begin), False)
        except Exception as error:  # noqa: BLE001  of code that is not ours
            logger.info("%s cannot go on from its own cache: %s", type(self.module).__name__, error)
            return False
        finally:
            self.change(0, 0, 0)
        expected, _ = self.compute([(0, 0, tokens, 0)], range(begin, len(tokens)), False)
        self._sequences.clear()
        return _alike(found, expected, self.module.dtype)

    @property
    def used_bytes(self) -> int:
        return sum(len(each.tokens) for each in self._sequences.values()) * self.token_bytes

    reserved_bytes = used_bytes

    def change(self, sequence: int, of: int, length: int) -> None:
        if length < 0:
            self._sequences.pop(sequence, None)
        elif of == sequence:
            state = self._sequences[sequence]
            if length < len(state.tokens):
                self._sequences[sequence] = _OwnState(state.tokens[:length])
        else:
            self._sequences[sequence] = _OwnState(self._sequences[of].tokens[:length] if of >= 0 else [])

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        new = sum(count for _, count in wanted) * self.token_bytes
        if self.used_bytes + new > self.limit_bytes:
            raise ModelError(f"the key/value cache of {self.limit_bytes} bytes is full; cache_bytes sets its size")

    def clear(self, sequence: int) -> None:
        self._sequences[sequence].state = None

    @_own_code
    def compute(
        self, segments: Sequence[Segment], rows: Sequence[int], hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = [self._extend(self._sequences[number], start, tokens, hidden) for number, start, tokens, _ in segments]
        logits = torch.cat([each for each, _ in found])[list(rows)]
        return logits, torch.cat([each for _, each in found]) if hidden else None

    def _extend(self, own: _OwnState, start: int, tokens: list[int], hidden: bool) -> tuple[torch.Tensor, Any]:
        own.tokens[start:] = tokens
        state, own.state = own.state, None  # an error leaves a sequence that is computed again
        if state is None or len(state) != start or (len(tokens) > 1 and not self.continues):
            state = TorchSequence(self.module, torch.tensor([own.tokens], device=self.device), 1)
        else:
            state.append(torch.tensor(tokens, device=self.device))
        if self._forgets_lengths:  # the module's frequencies may be those of another, longer text
            self.module(input_ids=torch.tensor([own.tokens[:1]], device=self.device), use_cache=False)
        output = state.step(output_hidden_states=hidden)
        own.state = state if self.keeps_states else None
        count = len(tokens)
        return output.logits[0, -count:], output.hidden_states[-1][0, -count:] if hidden else None


# One answer -----------------------------------------------------------------------------------------------


class AnswerExecutor(_Executor):
    """One prompt and its answer, token by token, by all that transformers' `generate` does between them.

    So models answer here that read their prompt with an encoder, and what a generation_config demands of the logits
    holds.
    """

    used_bytes = reserved_bytes = 0

    def __init__(self, module: Any, group: Any, max_new_tokens: int) -> None:
        super().__init__(module, 1 << 40, 0, group)
        self.most_tokens = 1 << 30
        self._max_new_tokens = max_new_tokens
        self._sequence: TorchSequence | None = None

    def change(self, sequence: int, of: int, length: int) -> None:
        """Does nothing: there is one sequence, which only grows."""

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Does nothing: the model's own cache grows."""

    def clear(self, sequence: int) -> None:
        """Does nothing: the sequence ends with this object."""

    def _of_rank_0(self, logits: torch.Tensor) -> torch.Tensor:
        return super()._of_rank_0(logits).cpu()  # where tokens can be drawn in double precision

    @_own_code
    def compute(
        self, segments: Sequence[Segment], rows: Sequence[int], hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ((_, start, tokens, _),) = segments
        if start == 0:
            ids_BT = torch.tensor([tokens], device=self.device)
            self._sequence = TorchSequence(self.module, ids_BT, self._max_new_tokens)
            logits_V = self._sequence.logits()
        else:
            assert self._sequence is not None
            logits_V = self._sequence.logits(torch.tensor(tokens, device=self.device))
        vocabulary, count = self._widths[0], logits_V.numel()
        # Some models have rows for tokens that their vocabulary has not.
        logits_V = nn.functional.pad(logits_V, (0, vocabulary - count), value=float("-inf"))
        return logits_V[None], None

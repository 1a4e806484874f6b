# SPDX-License-Identifier: Apache-2.0
"""Which part of each native weight a rank has. Pure functions.

With tensor parallelism it has a part of each layer, with pipeline parallelism the layers of its stage. Embedding and
position embedding are the first stage's, the last norm and the head the last one's; a head that is the embedding's
matrix is on both. Ranks are numbered stage by stage.

Heads go along their KV groups, features in aligned units, the vocabulary in blocks of 16 rows. A matrix that is divided
by its columns (`o`, `down`) gives each rank a part of a sum: its bias belongs to rank 0 alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import (
    Attention,
    DecoderSpec,
    GatedLru,
    Layer,
    LinearAttention,
    Mlp,
    Moe,
    Recurrent,
    SelectiveScan,
    ShortConv,
)
from anyaccel.inference.spec.partition import HeadShard, split_evenly, split_features, split_heads

_LAYER = re.compile(r"layers\.(\d+)\.")
_OF_THE_LAST = ("final_norm.", "head")
_VOCABULARY_BLOCK = 16  # rows of a block of a packed matrix


@dataclass(frozen=True)
class WeightSlice:
    """A rank's part of a whole native weight.

    Attributes:
        rows: ranges of its rows (entries, for a vector), in this order.
        cols: of a matrix; None: all.
        zero: the rank's values are zeros, whatever the whole weight has.
    """

    rows: tuple[range, ...]
    cols: range | None = None
    zero: bool = False


def _vocabulary(spec: DecoderSpec, rank: int, size: int) -> range:
    blocks = -(-spec.vocab // _VOCABULARY_BLOCK)
    if blocks < size:
        raise UsageError(f"tensor_parallel tp_size={size}: a vocabulary of {spec.vocab} is too small to be divided")
    part = split_evenly(blocks, size)[rank]
    return range(part.start * _VOCABULARY_BLOCK, min(part.stop * _VOCABULARY_BLOCK, spec.vocab))


def _heads(attention: Attention, rank: int, size: int) -> HeadShard:
    return split_heads(attention.heads, attention.kv_heads, size)[rank]


def _mlp(mlp: Mlp, rank: int, size: int) -> Mlp:
    return replace(mlp, features=len(split_features(mlp.features, size)[rank]))


def _attention(attention: Attention, rank: int, size: int) -> Attention:
    heads = _heads(attention, rank, size)
    return replace(
        attention,
        heads=len(heads.query),
        kv_heads=len(heads.key_value),
        kv_copies=sum(_heads(attention, other, size).key_value == heads.key_value for other in range(size)),
        alibi=tuple(attention.alibi[heads.query.start : heads.query.stop]),
    )


def _linear_heads(mixer: LinearAttention, rank: int, size: int) -> HeadShard:
    if not mixer.tiled:
        return split_heads(mixer.heads, mixer.key_heads, size)[rank]
    # Heads that follow one another have different heads of keys: ranks with whole rounds of them have them all.
    own, keys = split_evenly(mixer.heads, size)[rank], mixer.key_heads
    first = own.start % keys
    if own and len(own) % keys == 0 and first == 0:
        return HeadShard(own, range(keys))
    if own and first + len(own) <= keys:
        return HeadShard(own, range(first, first + len(own)))
    raise UsageError(
        f"tensor_parallel tp_size={size}: {mixer.heads} heads of linear attention, which take turns on {keys} heads of "
        f"keys, cannot be divided so; use a tp_size of which {mixer.heads // keys} is a multiple"
    )


def _lru_heads(mixer: GatedLru, rank: int, size: int) -> range:
    return split_heads(mixer.heads, mixer.heads, size)[rank].query


def _recurrent(mixer: Recurrent, rank: int, size: int) -> Recurrent:
    if isinstance(mixer, GatedLru):
        return replace(mixer, heads=len(_lru_heads(mixer, rank, size)))
    if isinstance(mixer, ShortConv | SelectiveScan):
        return replace(mixer, channels=len(split_features(mixer.channels, size)[rank]))
    heads = _linear_heads(mixer, rank, size)
    own, width = len(heads.query) * mixer.value_dim, mixer.norm_width
    if mixer.norm is not None and own % width and width != mixer.heads * mixer.value_dim:
        raise UsageError(
            f"tensor_parallel tp_size={size}: norms of {width} values of linear attention would be divided; use a "
            f"tp_size that divides {mixer.heads * mixer.value_dim // width}"
        )
    return replace(
        mixer,
        heads=len(heads.query),
        key_heads=len(heads.key_value),
        slopes=tuple(mixer.slopes[heads.query.start : heads.query.stop]),
        key_copies=sum(_linear_heads(mixer, other, size).key_value == heads.key_value for other in range(size)),
    )


def _layer(layer: Layer, rank: int, size: int) -> Layer:
    mlp = layer.mlp
    if isinstance(mlp, Moe):
        shared = None if mlp.shared is None else _mlp(mlp.shared, rank, size)
        mlp = replace(mlp, expert=_mlp(mlp.expert, rank, size), shared=shared)
    elif mlp is not None:
        mlp = _mlp(mlp, rank, size)
    return replace(
        layer,
        attention=layer.attention and _attention(layer.attention, rank, size),
        recurrent=layer.recurrent and _recurrent(layer.recurrent, rank, size),
        mlp=mlp,
    )


def shard(spec: DecoderSpec, rank: int, size: int) -> DecoderSpec:
    """The decoder of one rank, from a whole one.

    Raises:
        UsageError: the model is too small for so many ranks.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not one of {size}")
    part = _vocabulary(spec, rank, size)
    own_layer = functools.cache(lambda layer: _layer(layer, rank, size))  # most layers are alike
    return replace(
        spec,
        layers=tuple(map(own_layer, spec.layers)),
        rank=rank,
        size=size,
        vocab_first=part.start,
        vocab_count=len(part),
    )


def _scaled(part: range, unit: int, first: int = 0) -> range:
    return range(first + part.start * unit, first + part.stop * unit)


def slices(spec: DecoderSpec, rank: int, size: int) -> dict[str, WeightSlice]:
    """This rank's part of every native weight of the whole decoder `spec` that it has not whole, by name."""
    if size == 1:
        return {}
    ends = ("embed", "head", "head.bias") if spec.hidden_inputs is None else ()  # a head that drafts has its own whole
    found = {name: WeightSlice((_vocabulary(spec, rank, size),)) for name in ends}
    for index, layer in enumerate(spec.layers):
        for name, part in _layer_slices(layer, rank, size):
            found[f"layers.{index}.{name}"] = part
    return found


def _layer_slices(layer: Layer, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    if layer.attention is not None:
        yield from _attention_slices(layer.attention, rank, size)
    if layer.recurrent is not None:
        for name, part in _recurrent_slices(layer.recurrent, rank, size):
            yield f"mixer.{name}", part
        if rank > 0:
            yield "mixer.out.bias", WeightSlice((), zero=True)
    if isinstance(layer.mlp, Mlp):
        yield from _mlp_slices("mlp", layer.mlp, rank, size)
    if not isinstance(layer.mlp, Moe):
        return
    for expert in range(layer.mlp.experts):
        yield from _mlp_slices(f"experts.{expert}", layer.mlp.expert, rank, size)
    if layer.mlp.shared is not None:
        yield from _mlp_slices("shared", layer.mlp.shared, rank, size)


def _recurrent_slices(mixer: Recurrent, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    if isinstance(mixer, ShortConv):
        yield from _short_conv_slices(mixer, rank, size)
    elif isinstance(mixer, SelectiveScan):
        yield from _scan_slices(mixer, rank, size)
    elif isinstance(mixer, GatedLru):
        yield from _lru_slices(mixer, rank, size)
    else:
        yield from _linear_slices(mixer, rank, size)


def _short_conv_slices(mixer: ShortConv, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    part = split_features(mixer.channels, size)[rank]
    rows = WeightSlice(tuple(_scaled(part, 1, which * mixer.channels) for which in range(3)))
    yield "in", rows
    yield "in.bias", rows
    yield "conv.weight", WeightSlice((_scaled(part, mixer.kernel),))
    yield "conv.bias", WeightSlice((part,))
    yield "out", WeightSlice((), part)


def _scan_slices(mixer: SelectiveScan, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    part = split_features(mixer.channels, size)[rank]
    rows = WeightSlice((part, _scaled(part, 1, mixer.channels)))
    yield "in", rows
    yield "in.bias", rows
    yield "conv.weight", WeightSlice((_scaled(part, mixer.kernel),))
    yield "select", WeightSlice((), part)
    yield "rate", WeightSlice((_scaled(part, mixer.state_dim),))
    for name in ("conv.bias", "step_up", "step_up.bias", "skip"):
        yield name, WeightSlice((part,))
    yield "out", WeightSlice((), part)


def _lru_slices(mixer: GatedLru, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    part, all_channels = _scaled(_lru_heads(mixer, rank, size), mixer.head_dim), mixer.heads * mixer.head_dim
    both = WeightSlice((part, _scaled(part, 1, all_channels)))
    for name in ("in", "in.bias", "gates", "gates.bias"):
        yield name, both
    yield "conv.weight", WeightSlice((_scaled(part, mixer.kernel),))
    yield "conv.bias", WeightSlice((part,))
    yield "rate", WeightSlice((part,))
    yield "out", WeightSlice((), part)


def _linear_slices(mixer: LinearAttention, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    heads = _linear_heads(mixer, rank, size)
    keys, values = mixer.key_heads * mixer.key_dim, mixer.heads * mixer.value_dim
    own_values = _scaled(heads.query, mixer.value_dim)
    convolved = (
        _scaled(heads.key_value, mixer.key_dim),
        _scaled(heads.key_value, mixer.key_dim, keys),
        _scaled(heads.query, mixer.value_dim, 2 * keys),
    )
    gate = _scaled(heads.query, mixer.value_dim, 2 * keys + values)
    rows = WeightSlice((*convolved, gate) if mixer.gate and not mixer.gate_rank else convolved)
    biases = heads.query
    steps = WeightSlice((heads.query, _scaled(heads.query, 1, mixer.heads)))
    if mixer.strength == "step":
        steps = WeightSlice((heads.query,))
    if mixer.decay_rank:
        biases, of_gates = _scaled(heads.query, mixer.key_dim), mixer.decay_rank + mixer.heads
        strengths = _scaled(heads.query, 1, mixer.decay_rank)
        steps = WeightSlice((range(mixer.decay_rank), strengths, range(of_gates, of_gates + mixer.gate_rank)))
        yield "step_up", WeightSlice((biases,))
        yield "gate_up", WeightSlice((own_values,))
    for suffix in ("", ".bias"):
        yield f"in{suffix}", rows
        yield f"steps{suffix}", steps
    yield (
        "conv.weight",
        WeightSlice(tuple(range(each.start * mixer.kernel, each.stop * mixer.kernel) for each in convolved)),
    )
    yield "conv.bias", WeightSlice(convolved)
    yield "step_bias", WeightSlice((biases,))
    for name in ("rate", "skip"):
        yield name, WeightSlice((heads.query,))
    if not mixer.norm_shared:
        yield "norm.weight", WeightSlice((own_values,))
    yield "out", WeightSlice((), own_values)


def _attention_slices(a: Attention, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    heads = _heads(a, rank, size)
    if a.mla is not None:
        yield "q_b", WeightSlice((_scaled(heads.query, a.head_dim),))
        yield "kv_b", WeightSlice((_scaled(heads.query, a.mla.nope_dim + a.value_dim),))
    elif a.kv_layer >= 0:
        own = WeightSlice((_scaled(heads.query, a.head_dim),))
        yield "qkv", own
        yield "qkv.bias", own
    else:
        keys = a.heads * a.head_dim
        values = keys + a.kv_heads * a.head_dim
        rows = [
            _scaled(heads.query, a.head_dim),
            _scaled(heads.key_value, a.head_dim, keys),
            _scaled(heads.key_value, a.value_dim, values),
        ]
        if a.gated:
            rows.append(_scaled(heads.query, a.value_dim, values + a.kv_heads * a.value_dim))
        own = WeightSlice(tuple(rows))
        yield "qkv", own
        yield "qkv.bias", own
    if a.qk_norm is not None and (a.qk_norm.across or a.qk_norm.own_weights):
        for kind in ("weight", "bias"):
            yield f"q_norm.{kind}", WeightSlice((_scaled(heads.query, a.head_dim),))
            yield f"k_norm.{kind}", WeightSlice((_scaled(heads.key_value, a.head_dim),))
    if a.out_norm is not None:
        for kind in ("weight", "bias"):
            yield f"out_norm.{kind}", WeightSlice((_scaled(heads.query, a.value_dim),))
    yield "sinks", WeightSlice((heads.query,))
    yield "o", WeightSlice((), _scaled(heads.query, a.value_dim))
    if rank > 0:
        yield "o.bias", WeightSlice((), zero=True)


def _mlp_slices(name: str, mlp: Mlp, rank: int, size: int) -> Iterator[tuple[str, WeightSlice]]:
    part = split_features(mlp.features, size)[rank]
    rows = WeightSlice((part, _scaled(part, 1, mlp.features)) if mlp.gated else (part,))
    yield f"{name}.gate_up", rows
    yield f"{name}.gate_up.bias", rows
    if mlp.norm is not None:
        for kind in ("weight", "bias"):
            yield f"{name}.norm.{kind}", WeightSlice((part,))
    yield f"{name}.down", WeightSlice((), part)
    if rank > 0:
        yield f"{name}.down.bias", WeightSlice((), zero=True)


def bytes_by_layer(spec: DecoderSpec, weights: Iterable[tuple[str, int]]) -> tuple[list[int], int, int]:
    """The bytes of each layer, and those that the first and the last stage have beside their layers.

    Args:
        weights: name and bytes of each weight of the whole decoder.
    """
    layers, first, last = [0] * len(spec.layers), 0, 0
    for name, size in weights:
        if found := _LAYER.match(name):
            layers[int(found[1])] += size
        elif name.startswith(_OF_THE_LAST):
            last += size
        else:
            first += size
            if name == "embed" and spec.tied:
                last += size
    return layers, first, last


def split_layers(layers: Sequence[int], first: int, last: int, stages: int) -> list[range]:
    """The layers of each stage, one stage after the other, so that the largest stage is as small as it can be.

    Of divisions that are equal in this, the one whose stages' sizes have the smallest sum of squares, then the one with
    more layers in earlier stages.

    Args:
        layers: the bytes of each.
        first, last: bytes that the first and the last stage have beside.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    count = len(layers)
    if stages > count:
        raise UsageError(f"pipeline_parallel size={stages}: the model has only {count} layers; use a smaller size")
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)
    never: tuple[float, float, list[int]] = (float("inf"), 0.0, [])
    # best[n]: for the first n layers on so many stages: the largest stage, the sum of squares, where each stage begins.
    best = [(0.0, 0.0, list[int]()), *[never] * count]
    for stage in range(stages):
        longer = [never] * (count + 1)
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        for end in range(stage + 1, count - (stages - 1 - stage) + 1):
            for begin in range(end - 1, stage - 1, -1):
                largest, squares, cuts = best[begin]
                held = float(sums[end] - sums[begin] + extra)
                found = (max(largest, held), squares + held * held, [*cuts, begin])
                if found[:2] < longer[end][:2]:
                    longer[end] = found
        best = longer
    cuts = [*best[count][2], count]
    return [range(cuts[stage], cuts[stage + 1]) for stage in range(stages)]


def stage_spec(spec: DecoderSpec, layers: Sequence[range], stage: int) -> DecoderSpec:
    """The decoder of one stage, from one that has all layers."""
    own = layers[stage]
    if len(layers) > 1:
        if spec.layer_inputs is not None or any(layer.side_block is not None for layer in spec.layers):
            raise UsageError("pipeline_parallel: all layers of this model need the embedding; use tensor_parallel")
        for index in own:
            attention = spec.layers[index].attention
            if attention is not None and 0 <= attention.kv_layer < own.start:
                raise UsageError(
                    f"pipeline_parallel: layer {index} sees keys and values of layer {attention.kv_layer}, which "
                    "another stage has; use tensor_parallel"
                )
            indexer = None if attention is None else attention.indexer
            if index == own.start and indexer is not None and not indexer.own:
                raise UsageError(
                    f"pipeline_parallel: layer {index} sees the tokens that a layer of another stage has chosen; use "
                    "tensor_parallel, or another number of stages"
                )
    return replace(
        spec,
        layers=spec.layers[own.start : own.stop],
        stage=stage,
        stages=len(layers),
        first_layer=own.start,
    )

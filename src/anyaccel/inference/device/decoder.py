# SPDX-License-Identifier: Apache-2.0
"""Executes a DecoderSpec on a torch device. What differs between families is read from the spec, never from a name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from anyaccel.inference.device.activations import activated
from anyaccel.inference.device.attention_layer import SelfAttention
from anyaccel.inference.device.batch import Batch
from anyaccel.inference.device.mixers import RecurrentMixer, StateLayout, recurrent_mixer
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.parts import Dense, Experts, Linear, Normed, Ranks, normed, rows_of
from anyaccel.inference.device.rotary import Angles, has_complex
from anyaccel.inference.device.streams import LowRank, StreamsOfLayer, StreamsOfModel
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp, Moe

Mixer = SelfAttention | RecurrentMixer


class Both:
    """Two mixers whose results are added."""

    def __init__(self, *mixers: Mixer) -> None:
        self.mixers = mixers
        self.out = Sum(*(mixer.out for mixer in mixers))

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> list[torch.Tensor]:
        return [mixer(x, batch, cache) for mixer in self.mixers]


class Sum:
    """The sum of products, each of its own rows."""

    def __init__(self, *parts: Linear) -> None:
        self.parts = parts

    def __call__(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.add, (part(x) for part, x in zip(self.parts, rows, strict=True)))

    def added(self, h: torch.Tensor, rows: Sequence[torch.Tensor], factor: float, ranks: Ranks | None) -> torch.Tensor:
        if ranks is not None:
            return torch.add(h, ranks.add(self(rows)), alpha=factor)
        for part, x in zip(self.parts, rows, strict=True):
            h = part.added(h, x, factor, None)
        return h


class LayerRun:
    """One layer: `run` takes the residual and gives the next one.

    Args:
        place, index_place: see SelfAttention.
        states: where its recurrent state gets its place.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        weights: DeviceWeights,
        place: int,
        states: StateLayout,
        ranks: Ranks | None,
        index_place: int,
    ) -> None:
        self.layer: Layer = spec.layers[index]
        self.ranks = ranks
        at = f"layers.{index}"
        layer, layout = self.layer, weights.layouts[index]
        self.joint = layout.joint
        attn_norm = layer.attn_norm
        if attn_norm is not None and layout.folded:
            attn_norm = replace(attn_norm, weight=False, bias=False)
        self.attn_norm = normed(attn_norm, weights, f"{at}.attn_norm")
        self.attn_post_norm = normed(layer.attn_post_norm, weights, f"{at}.attn_post_norm")
        self.mlp_norm = normed(None if layout.folded else layer.mlp_norm, weights, f"{at}.mlp_norm")
        self.mlp_post_norm = normed(layer.mlp_post_norm, weights, f"{at}.mlp_post_norm")
        mixers: list[Mixer] = []
        if layer.attention is not None:
            mixers.append(SelfAttention(layer.attention, spec, weights, at, place, layout.joint, ranks, index_place))
        if layer.recurrent is not None:
            mixers.append(recurrent_mixer(layer.recurrent, weights, f"{at}.mixer", states, ranks))
        self.mixer = Both(*mixers) if len(mixers) == 2 else next(iter(mixers), None)
        self.laurel = None if layer.laurel is None else LowRank(layer.laurel, weights, at)
        self.mlp: Dense | Experts | None = None
        if layer.mlp is not None:
            own = layer.mlp
            self.mlp = Experts(own, weights, at) if isinstance(own, Moe) else Dense(own, weights, f"{at}.mlp", ranks)
        self._move_norms()

    def _move_norms(self) -> None:
        """Give norms that nothing else reads to the product behind them."""
        layer = self.layer
        if layer.parallel or layer.residual_from_norm:
            return
        if isinstance(self.mixer, SelfAttention) and self.mixer.a.mla is None and layer.laurel is None:
            self.mixer.qkv.norm, self.attn_norm = self.attn_norm, None
        if isinstance(self.mlp, Dense) and self.ranks is None and self.attn_post_norm is None:
            self.mlp.gate_up.norm, self.mlp_norm = self.mlp_norm, None

    def run(self, h: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        if self.layer.parallel:
            return self._run_parallel(h, batch, cache)
        if self.mixer is None:
            x = h if self.mlp_norm is None else self.mlp_norm(h)
        else:
            h, x = self._mixed(self.mixer, h, batch, cache)
        return h if self.mlp is None else self._behind_mlp(self.mlp, h, x)

    def _mixed(
        self, mixer: Mixer | Both, h: torch.Tensor, batch: Batch, cache: KvPages
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual behind the mixer, and what the MLP reads of it."""
        scale, post, ranks = self.layer.residual_scale, self.attn_post_norm, self.ranks
        x = h if self.attn_norm is None else self.attn_norm(h)
        rows = mixer(x, batch, cache)
        residual = x if self.layer.residual_from_norm else h
        if self.laurel is not None:
            h = self.laurel.joined(h, x, _of_ranks(mixer.out, rows, post, ranks))
        elif self.mlp_norm is not None and (ranks is not None or post is not None):
            return self.mlp_norm.of_sum(residual, _of_ranks(mixer.out, rows, post, ranks), scale)
        else:
            h = _added(mixer.out, residual, rows, scale, post, ranks)
        return h, h if self.mlp_norm is None else self.mlp_norm(h)

    def _behind_mlp(self, mlp: Dense | Experts, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scale, ranks = self.layer.residual_scale, self.ranks
        residual = x if self.layer.residual_from_norm else h
        if isinstance(mlp, Experts) and mlp.own_norms:
            y = mlp.of_residual(h, x, ranks)
            return torch.add(residual, y if self.mlp_post_norm is None else self.mlp_post_norm(y), alpha=scale)
        return _added(mlp, residual, x, scale, self.mlp_post_norm, ranks)

    def _run_parallel(self, h: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        """Attention and MLP beside each other."""
        assert isinstance(self.mixer, SelfAttention) and self.mlp is not None
        x = h if self.attn_norm is None else self.attn_norm(h)
        if self.joint:
            return self._run_joint(self.mixer, h, x, batch, cache)
        scale, ranks, out = self.layer.residual_scale, self.ranks, self.mixer.out
        seen = self.mixer(x, batch, cache)
        before_mlp = x if self.mlp_norm is None else self.mlp_norm(h)
        if ranks is not None:  # one exchange for both
            return torch.add(h, ranks.add(out(seen) + self.mlp(before_mlp)), alpha=scale)
        return self.mlp.added(out.added(h, seen, scale, None), before_mlp, scale, None)

    def _run_joint(
        self, mixer: SelfAttention, h: torch.Tensor, x: torch.Tensor, batch: Batch, cache: KvPages
    ) -> torch.Tensor:
        """Attention and MLP at once, of one product."""
        assert isinstance(self.mlp, Dense)
        scale, ranks, down = self.layer.residual_scale, self.ranks, self.mlp.down
        both = mixer.qkv(x)
        seen = mixer.seen(both[:, : mixer.qkv_rows], batch, cache)
        features = activated(self.mlp.mlp, both[:, mixer.qkv_rows :])
        if ranks is not None:  # one exchange for both
            return torch.add(h, ranks.add(down.added(mixer.out(seen), features, 1.0, None)), alpha=scale)
        return down.added(mixer.out.added(h, seen, scale, None), features, scale, None)


class SideBlockRun:
    """A layer whose attention and MLP are for its mixer only: see SideBlock, and LayerRun for the arguments."""

    def __init__(
        self,
        spec: DecoderSpec,
        index: int,
        weights: DeviceWeights,
        place: int,
        states: StateLayout,
        ranks: Ranks | None,
        index_place: int,
    ) -> None:
        layer, at = spec.layers[index], f"layers.{index}"
        assert layer.attention and isinstance(layer.mlp, Mlp) and layer.recurrent and layer.side_block
        self.ranks = ranks
        self.attn_norm = normed(layer.attn_norm, weights, f"{at}.attn_norm")
        self.attention = SelfAttention(layer.attention, spec, weights, at, place, False, ranks, index_place)
        self.mlp_norm = normed(layer.mlp_norm, weights, f"{at}.mlp_norm")
        self.mlp = Dense(layer.mlp, weights, f"{at}.mlp", ranks)
        self.side = Linear(weights, f"{at}.side")
        self.side_norm = Normed(layer.side_block.norm, weights, f"{at}.side_norm")
        self.mixer = recurrent_mixer(layer.recurrent, weights, f"{at}.mixer", states, ranks)

    def run(self, h: torch.Tensor, embedded: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        x = torch.cat([h, embedded], 1)
        seen = self.attention(x if self.attn_norm is None else self.attn_norm(x), batch, cache)
        x = _of_ranks(self.mlp, _of_ranks(self.attention.out, seen, self.mlp_norm, self.ranks), None, self.ranks)
        x = self.side_norm(h + self.side(x))
        return _added(self.mixer.out, h, self.mixer(x, batch, cache), 1.0, None, self.ranks)


def _added(
    of: Linear | Sum | Dense | Experts,
    residual: torch.Tensor,
    x: Any,
    scale: float,
    post: Normed | None,
    ranks: Ranks | None,
) -> torch.Tensor:
    """residual + scale * post(of(x)); without a norm in between the product itself adds."""
    if post is None:
        return of.added(residual, x, scale, ranks)
    return torch.add(residual, _of_ranks(of, x, post, ranks), alpha=scale)


def _of_ranks(of: Linear | Sum | Dense | Experts, x: Any, post: Normed | None, ranks: Ranks | None) -> torch.Tensor:
    """post(of(x)) of all ranks."""
    y = of(x) if ranks is None else ranks.add(of(x))
    return y if post is None else post(y)


class LayerEnd:
    """What comes behind a layer's MLP: its part of the inputs of all layers, and a factor."""

    def __init__(self, layer: Layer, weights: DeviceWeights, index: int) -> None:
        at, own = f"layers.{index}", layer.input_gate
        self.index, self.own = index, own
        if own is not None:
            self.gate, self.down = Linear(weights, f"{at}.input_gate"), Linear(weights, f"{at}.input_down")
            self.norm = Normed(own.norm, weights, f"{at}.input_norm")
        self.scale = weights[f"{at}.layer_scale"] if layer.scaled else None
        self.streams = None if layer.streams is None else StreamsOfLayer(layer.streams, weights, at)

    def run(self, h: torch.Tensor, inputs_NLF: torch.Tensor | None) -> torch.Tensor:
        if self.own is not None:
            h = h + self._gated(h, inputs_NLF)
        return h if self.scale is None else h * self.scale

    def _gated(self, h: torch.Tensor, inputs_NLF: torch.Tensor | None) -> torch.Tensor:
        assert inputs_NLF is not None and self.own is not None
        both = torch.cat([self.gate(h), inputs_NLF[:, self.index]], 1)
        return self.norm(self.down(activated(self.own.mlp, both)))

    def run_streams(
        self, streams: StreamsOfLayer, h_NSD: torch.Tensor, made: torch.Tensor, inputs_NLF: torch.Tensor | None
    ) -> torch.Tensor:
        """The streams behind a layer, which has made `made` of the first one."""
        h_NSD = streams.corrected(h_NSD, made)
        if self.own is not None:
            y = self._gated(streams.read(h_NSD), inputs_NLF)
            h_NSD = torch.cat([h_NSD[:, :1], h_NSD[:, 1:] + y[:, None]], 1)
        return h_NSD if self.scale is None else h_NSD * self.scale


def cache_widths(spec: DecoderSpec) -> list[int]:
    """Values of a token's row in each part of the cache: of keys and values of layers, then of indexers' keys."""
    heads = [layer.attention for layer in spec.layers if layer.attention is not None]
    return [a.kv_heads * (a.head_dim + a.value_dim) for a in heads if a.kv_layer < 0] + [
        a.indexer.head_dim for a in heads if a.indexer is not None and a.indexer.own
    ]


def _index_places(spec: DecoderSpec, first: int) -> list[int]:
    """The place of each layer's indexer keys, from `first` on; -1 without any."""
    places: list[int] = []
    for a in (layer.attention for layer in spec.layers):
        own = a is not None and a.indexer is not None and a.indexer.own
        places.append(first if own else -1)
        first += own
    return places


def _places(spec: DecoderSpec) -> list[int]:
    """The place of each layer's keys and values among those that layers have of their own; -1 without attention."""
    places: list[int] = []
    count = 0
    for a in (layer.attention for layer in spec.layers):
        own = a is not None and a.kv_layer < 0
        places.append(-1 if a is None else count if own else places[a.kv_layer])
        count += own
    return places


class Decoder:
    """All layers, from tokens to logits.

    Attributes:
        states: the recurrent states of layers among the floats of a sequence's.
    """

    def __init__(
        self, spec: DecoderSpec, weights: DeviceWeights, dtype: torch.dtype, ranks: Ranks | None = None
    ) -> None:
        self.spec, self.ranks = spec, ranks
        as_complex = has_complex(spec, dtype, weights.device)
        self.ropes = [Angles(rope, dtype, weights.device, as_complex) for rope in spec.ropes]
        self.sinks = any(layer.attention is not None and layer.attention.sinks for layer in spec.layers)
        self.embed = weights.matrix("embed")
        self.positions = weights["positions"] if spec.positions else None
        self.embed_norm = normed(spec.embedding_norm, weights, "embed_norm")
        self.states = StateLayout()
        places = _places(spec)
        index_places = _index_places(spec, max(places) + 1)
        self.layers = [
            (LayerRun if layer.side_block is None else SideBlockRun)(
                spec, index, weights, places[index], self.states, ranks, index_places[index]
            )
            for index, layer in enumerate(spec.layers)
        ]
        self.ends = [LayerEnd(layer, weights, index) for index, layer in enumerate(spec.layers)]
        if spec.layer_inputs is not None:
            self.layer_embed = weights.matrix("layer_embed")
            self.layer_projection = Linear(weights, "layer_projection")
            self.layer_projection_norm = Normed(spec.layer_inputs.norm, weights, "layer_projection_norm")
        self.streams = StreamsOfModel(spec.streams, weights) if spec.streams > 1 else None
        self.final_norm = normed(spec.final_norm, weights, "final_norm")
        self.head = Linear(weights, "embed" if spec.tied else "head", bias="head.bias")

    def run(self, batch: Batch, cache: KvPages) -> torch.Tensor:
        """The residual of every token behind the last layer, or the streams that `hidden` makes it of."""
        h = self._embedded(batch.tokens)
        if self.spec.embedding_scale != 1.0:
            h = h * self.spec.embedding_scale
        if self.positions is not None:
            at = batch.positions + self.spec.position_offset if self.spec.position_offset else batch.positions
            h = h + self.positions.index_select(0, at)
        if self.embed_norm is not None:
            h = self.embed_norm(h)
        inputs_NLF, embedded = self._layer_inputs(batch.tokens, h), h
        if self.streams is not None:
            h = self.streams.opened(h)
        for layer, end in zip(self.layers, self.ends, strict=True):
            if isinstance(layer, SideBlockRun):
                h = layer.run(h, embedded, batch, cache)
            elif end.streams is None:
                h = end.run(layer.run(h, batch, cache), inputs_NLF)
            else:
                h = end.streams.predicted(h)
                h = end.run_streams(end.streams, h, layer.run(h[:, 0], batch, cache), inputs_NLF)
        return h

    def _layer_inputs(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor | None:
        """What the layers get beside the residual: see LayerInputs."""
        own = self.spec.layer_inputs
        if own is None:
            return None
        rows = rows_of(self.layer_embed, torch.where(tokens < own.vocab, tokens, 0))
        projected = self.layer_projection(h).view(-1, own.features) * own.projection_scale
        projected = self.layer_projection_norm(projected).view(len(h), own.layers, own.features)
        return own.scale * torch.add(projected, rows.view_as(projected), alpha=own.embed_scale)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return rows_of(self.embed, tokens)
        own = tokens - self.spec.vocab_first
        here = (own >= 0) & (own < len(self.embed))
        rows = rows_of(self.embed, own.clamp(0, len(self.embed) - 1))
        return self.ranks.add(rows * here[:, None])

    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        """What the head gets, of residuals."""
        if self.streams is not None:
            h = self.streams.closed(h)
        return h if self.final_norm is None else self.final_norm(h)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        spec = self.spec
        logits = self.head(hidden)
        if self.ranks is not None:
            logits = self.ranks.join(logits)
        logits = logits.float()
        if spec.logits_scale != 1.0:
            logits = logits * spec.logits_scale
        return (logits / spec.logits_softcap).tanh_() * spec.logits_softcap if spec.logits_softcap else logits

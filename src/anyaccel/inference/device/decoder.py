# SPDX-License-Identifier: Apache-2.0
"""Executes a DecoderSpec on a torch device. What differs between families is read from the spec, never from a name.

Suffixes: N tokens of a batch, H heads, D values of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from anyaccel.inference.device.activations import activated
from anyaccel.inference.device.attention import attend
from anyaccel.inference.device.batch import Batch
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.parts import Dense, Experts, Linear, Normed, Ranks, normed, normed_of_ranks, rows_of
from anyaccel.inference.device.rotary import Angles, has_complex, turn
from anyaccel.inference.device.streams import LowRank, StreamsOfLayer, StreamsOfModel
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer, Mla, Moe, QkNorm, Rope


class Heads:
    """Norms of queries and keys, both in one pass where each head is normed alone."""

    def __init__(self, a: Attention, qk: QkNorm, weights: DeviceWeights, at: str, ranks: Ranks | None) -> None:
        self.a, self.qk, self.ranks = a, qk, ranks
        self.kv_heads = a.kv_heads if a.kv_layer < 0 else 0
        self.q = Normed(qk.norm, weights, f"{at}.q_norm")
        self.k = Normed(qk.norm, weights, f"{at}.k_norm") if self.kv_heads else self.q
        self.weight = self._both(self.q.weight, self.k.weight)
        self.bias = self._both(self.q.bias, self.k.bias)

    def _both(self, of_q: torch.Tensor | None, of_k: torch.Tensor | None) -> torch.Tensor | None:
        """[heads and key/value heads, head_dim], or None."""
        if of_q is None or of_k is None or self.qk.across:
            return None
        a = self.a
        parts = (of_q.view(-1, a.head_dim).expand(a.heads, -1), of_k.view(-1, a.head_dim).expand(self.kv_heads, -1))
        return torch.cat(parts)

    def normed(self, qkv: torch.Tensor) -> torch.Tensor:
        """Rows of queries, keys and values: in place where each head is normed alone."""
        a = self.a
        counts = [a.heads * a.head_dim, self.kv_heads * a.head_dim, self.kv_heads * a.value_dim]
        if self.qk.across:
            q, k, v = torch.split(qkv, counts, 1)
            q, k = normed_of_ranks(self.q, q, self.ranks), normed_of_ranks(self.k, k, self.ranks, a.kv_copies)
            return torch.cat([q, k, v], 1)
        qk_NHD = qkv[:, : counts[0] + counts[1]].view(len(qkv), -1, a.head_dim)
        plain = self.q.plain(qk_NHD)
        if self.weight is None:
            qk_NHD.copy_(plain if self.bias is None else plain + self.bias)
        elif self.bias is None:
            torch.mul(plain, self.weight, out=qk_NHD)
        else:
            torch.addcmul(self.bias, plain, self.weight, out=qk_NHD)
        return qkv


class LayerRun:
    """One layer: `run` takes the residual and gives the next one."""

    def __init__(self, spec: DecoderSpec, index: int, weights: DeviceWeights, ranks: Ranks | None) -> None:
        self.layer: Layer = spec.layers[index]
        self.a = a = self.layer.softmax
        self.ranks = ranks
        self.joint = weights.layouts[index].joint
        self.rope: Rope | None = spec.ropes[a.rope] if a.rope >= 0 else None
        at = f"layers.{index}"
        layer = self.layer
        layout = weights.layouts[index]
        attn_norm = layer.attn_norm
        if attn_norm is not None and layout.folded:
            attn_norm = replace(attn_norm, weight=False, bias=False)
        self.attn_norm = normed(attn_norm, weights, f"{at}.attn_norm")
        self.attn_post_norm = normed(layer.attn_post_norm, weights, f"{at}.attn_post_norm")
        self.mlp_norm = normed(None if layout.folded else layer.mlp_norm, weights, f"{at}.mlp_norm")
        self.mlp_post_norm = normed(layer.mlp_post_norm, weights, f"{at}.mlp_post_norm")
        if a.mla is None:
            self.qkv = Linear(weights, f"{at}.joint" if layout.joint else f"{at}.qkv")
            self.kv_heads = a.kv_heads if a.kv_layer < 0 else 0
            self.qkv_rows = a.heads * a.head_dim + self.kv_heads * (a.head_dim + a.value_dim)
        else:
            self.q_a = Linear(weights, f"{at}.q_a") if a.mla.q_rank else None
            self.q_a_norm = normed(a.mla.q_norm, weights, f"{at}.q_a_norm") if a.mla.q_rank else None
            self.q_b, self.kv_a, self.kv_b = (Linear(weights, f"{at}.{name}") for name in ("q_b", "kv_a", "kv_b"))
            self.kv_a_norm = Normed(a.mla.kv_norm, weights, f"{at}.kv_a_norm")
        self.heads = None if a.qk_norm is None else Heads(a, a.qk_norm, weights, at, ranks)
        self.value_norm = normed(a.value_norm, weights, f"{at}.v_norm")
        self.sinks = weights[f"{at}.sinks"] if a.sinks else None
        self.o = Linear(weights, f"{at}.o")
        self.out_norm = normed(a.out_norm, weights, f"{at}.out_norm")
        self.laurel = None if layer.laurel is None else LowRank(layer.laurel, weights, at)
        mlp = layer.features
        self.mlp: Dense | Experts = (
            Experts(mlp, weights, at) if isinstance(mlp, Moe) else Dense(mlp, weights, f"{at}.mlp", ranks)
        )

    def run(self, h: torch.Tensor, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        layer, scale, ranks = self.layer, self.layer.residual_scale, self.ranks
        x = h if self.attn_norm is None else self.attn_norm(h)
        if self.joint:
            return self._run_joint(h, x, batch, cache)
        seen = self._attention(x, batch, cache)
        if layer.parallel:
            before_mlp = x if self.mlp_norm is None else self.mlp_norm(h)
            if ranks is not None:  # one exchange for both
                return torch.add(h, ranks.add(self.o(seen) + self.mlp(before_mlp)), alpha=scale)
            return self.mlp.added(self.o.added(h, seen, scale, None), before_mlp, scale, None)
        residual = x if layer.residual_from_norm else h
        if self.laurel is not None:
            h = self.laurel.joined(h, x, _of_ranks(self.o, seen, self.attn_post_norm, ranks))
            x = h if self.mlp_norm is None else self.mlp_norm(h)
        elif self.mlp_norm is not None and (ranks is not None or self.attn_post_norm is not None):
            h, x = self.mlp_norm.of_sum(residual, _of_ranks(self.o, seen, self.attn_post_norm, ranks), scale)
        else:
            h = _added(self.o, residual, seen, scale, self.attn_post_norm, ranks)
            x = h if self.mlp_norm is None else self.mlp_norm(h)
        residual = x if layer.residual_from_norm else h
        if isinstance(self.mlp, Experts) and self.mlp.own_norms:
            y = self.mlp.of_residual(h, x, ranks)
            return torch.add(residual, y if self.mlp_post_norm is None else self.mlp_post_norm(y), alpha=scale)
        return _added(self.mlp, residual, x, scale, self.mlp_post_norm, ranks)

    def _run_joint(self, h: torch.Tensor, x: torch.Tensor, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Attention and MLP at once, of one product."""
        assert isinstance(self.mlp, Dense)
        scale, ranks = self.layer.residual_scale, self.ranks
        both = self.qkv(x)
        seen = self._seen(*self._heads_of(both[:, : self.qkv_rows], batch), batch, cache)
        features = activated(self.mlp.mlp, both[:, self.qkv_rows :])
        if ranks is not None:  # one exchange for both
            return torch.add(h, ranks.add(self.mlp.down.added(self.o(seen), features, 1.0, None)), alpha=scale)
        return self.mlp.down.added(self.o.added(h, seen, scale, None), features, scale, None)

    def _attention(self, x: torch.Tensor, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        a = self.a
        if a.mla is not None:
            return self._seen(*self._latent(a.mla, x, batch), batch, cache)
        qkv = self.qkv(x)
        seen = self._seen(*self._heads_of(qkv[:, : self.qkv_rows], batch), batch, cache)
        if a.gated:
            seen = seen * torch.sigmoid(qkv[:, self.qkv_rows :])
        return seen if self.out_norm is None else normed_of_ranks(self.out_norm, seen, self.ranks)

    def _seen(self, q_NHD: torch.Tensor, row: torch.Tensor, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        a = self.a
        if a.kv_layer < 0:
            cache.view(-1, cache.shape[-1]).index_copy_(0, batch.rows, row)
        return attend(a, q_NHD, cache, batch, self.sinks)

    def _heads_of(self, qkv: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and the cache's rows of keys and values. They stay in the product's own memory mostly."""
        a = self.a
        if a.clip:
            qkv.clamp_(-a.clip, a.clip)
        q_count = a.heads * a.head_dim
        if self.value_norm is not None:
            v = qkv[:, q_count + self.kv_heads * a.head_dim :]
            v.copy_(self.value_norm(v.reshape(-1, a.value_dim)).view_as(v))
        norm = self.heads
        if norm is not None and not norm.qk.after_rope:
            qkv = norm.normed(qkv)
        if self.rope is not None:
            qk_NHD = qkv[:, : q_count + self.kv_heads * a.head_dim].view(len(qkv), -1, a.head_dim)
            turn(qk_NHD, self.rope.first, batch.angles[a.rope])
        if norm is not None and norm.qk.after_rope:
            qkv = norm.normed(qkv)
        return self._grown(qkv[:, :q_count].view(len(qkv), a.heads, a.head_dim), batch), qkv[:, q_count:]

    def _grown(self, q_NHD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Queries with the factor of their positions."""
        a = self.a
        if not a.growth:
            return q_NHD
        times = (batch.positions + a.growth_first) // a.growth_from
        return q_NHD * (1 + a.growth * torch.log1p(times.float())).to(q_NHD.dtype)[:, None, None]

    def _latent(self, mla: Mla, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Multi-head latent attention (DeepSeek-V2, 2024): queries and keys through latents, decompressed."""
        a = self.a
        x_q = x
        if self.q_a is not None:
            x_q = self.q_a(x)
            x_q = x_q if self.q_a_norm is None else self.q_a_norm(x_q)
        q_NHD = self.q_b(x_q).view(len(x), a.heads, a.head_dim)
        latent, turned = torch.split(self.kv_a(x), [mla.kv_rank, mla.rope_dim], -1)
        k_N1D = turned[:, None]
        if self.rope is not None:
            turn(q_NHD, self.rope.first, batch.angles[a.rope])
            turn(k_N1D, max(self.rope.first - mla.nope_dim, 0), batch.angles[a.rope])
        kv_NHD = self.kv_b(self.kv_a_norm(latent)).view(len(x), a.heads, -1)
        k_NHD = torch.cat([kv_NHD[..., : mla.nope_dim], k_N1D.expand(-1, a.heads, -1)], -1)
        row = torch.cat([k_NHD.flatten(1), kv_NHD[..., mla.nope_dim :].flatten(1)], -1)
        return self._grown(q_NHD, batch), row


def _added(
    of: Linear | Dense | Experts,
    residual: torch.Tensor,
    x: torch.Tensor,
    scale: float,
    post: Normed | None,
    ranks: Ranks | None,
) -> torch.Tensor:
    """residual + scale * post(of(x)); without a norm in between the product itself adds."""
    if post is None:
        return of.added(residual, x, scale, ranks)
    return torch.add(residual, _of_ranks(of, x, post, ranks), alpha=scale)


def _of_ranks(of: Linear | Dense | Experts, x: torch.Tensor, post: Normed | None, ranks: Ranks | None) -> torch.Tensor:
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


class Decoder:
    """All layers, from tokens to logits; `cache` is written as batches pass."""

    def __init__(
        self, spec: DecoderSpec, weights: DeviceWeights, dtype: torch.dtype, cache: KvPages, ranks: Ranks | None = None
    ) -> None:
        self.spec, self.cache, self.ranks = spec, cache, ranks
        as_complex = has_complex(spec, dtype, weights.device)
        self.ropes = [Angles(rope, dtype, weights.device, as_complex) for rope in spec.ropes]
        self.sinks = any(layer.softmax.sinks for layer in spec.layers)
        self.embed = weights.matrix("embed")
        self.positions = weights["positions"] if spec.positions else None
        self.embed_norm = normed(spec.embedding_norm, weights, "embed_norm")
        self.layers = [LayerRun(spec, index, weights, ranks) for index in range(len(spec.layers))]
        own = [index for index, layer in enumerate(spec.layers) if layer.softmax.kv_layer < 0]
        self.places = [
            own.index(index if layer.softmax.kv_layer < 0 else layer.softmax.kv_layer)
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

    def run(self, batch: Batch) -> torch.Tensor:
        """The residual of every token behind the last layer, or the streams that `hidden` makes it of."""
        h = self._embedded(batch.tokens)
        if self.spec.embedding_scale != 1.0:
            h = h * self.spec.embedding_scale
        if self.positions is not None:
            at = batch.positions + self.spec.position_offset if self.spec.position_offset else batch.positions
            h = h + self.positions.index_select(0, at)
        if self.embed_norm is not None:
            h = self.embed_norm(h)
        inputs_NLF = self._layer_inputs(batch.tokens, h)
        if self.streams is not None:
            h = self.streams.opened(h)
        for layer, end, place in zip(self.layers, self.ends, self.places, strict=True):
            cache = self.cache.layers[place]
            if end.streams is None:
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

# SPDX-License-Identifier: Apache-2.0
"""Attention as the mixer of a layer: from the layer's input to what its last product reads.

Suffixes: N tokens of a batch, H heads, D values of a head.
"""

from __future__ import annotations

import torch

from anyaccel.inference.device.attention import attend
from anyaccel.inference.device.batch import Batch
from anyaccel.inference.device.indexer import TokenIndexer
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.parts import Linear, Normed, Ranks, normed, normed_of_ranks
from anyaccel.inference.device.rotary import turn
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Mla, QkNorm, Rope


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


class SelfAttention:
    """See Attention.

    Args:
        place: its keys and values among those of the cache.
        joint: the name of the product that makes queries, keys and values, and the MLP's first features behind them.
        index_place: the same as `place` of its indexer's keys.
    """

    def __init__(
        self,
        a: Attention,
        spec: DecoderSpec,
        weights: DeviceWeights,
        at: str,
        place: int,
        joint: bool,
        ranks: Ranks | None,
        index_place: int,
    ) -> None:
        self.a, self.place, self.ranks = a, place, ranks
        self.rope: Rope | None = spec.ropes[a.rope] if a.rope >= 0 else None
        if a.mla is None:
            self.qkv = Linear(weights, f"{at}.joint" if joint else f"{at}.qkv")
            self.kv_heads = a.kv_heads if a.kv_layer < 0 else 0
            self.qkv_rows = a.heads * a.head_dim + self.kv_heads * (a.head_dim + a.value_dim)
        else:
            self.q_a = Linear(weights, f"{at}.q_a") if a.mla.q_rank else None
            self.q_a_norm = normed(a.mla.q_norm, weights, f"{at}.q_a_norm") if a.mla.q_rank else None
            self.q_b, self.kv_a, self.kv_b = (Linear(weights, f"{at}.{name}") for name in ("q_b", "kv_a", "kv_b"))
            self.kv_a_norm = Normed(a.mla.kv_norm, weights, f"{at}.kv_a_norm")
        self.indexer = None
        if a.indexer is not None and a.indexer.own:
            of_index = spec.ropes[a.indexer.rope].first if a.indexer.rope >= 0 else 0
            self.indexer = TokenIndexer(a.indexer, weights, at, index_place, of_index)
        self.heads = None if a.qk_norm is None else Heads(a, a.qk_norm, weights, at, ranks)
        self.value_norm = normed(a.value_norm, weights, f"{at}.v_norm")
        self.sinks = weights[f"{at}.sinks"] if a.sinks else None
        self.out = Linear(weights, f"{at}.o")
        self.out_norm = normed(a.out_norm, weights, f"{at}.out_norm")

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        a = self.a
        if a.mla is not None:
            return self._seen(*self._latent(a.mla, x, batch, cache), batch, cache)
        qkv = self.qkv(x)
        seen = self.seen(qkv[:, : self.qkv_rows], batch, cache)
        if a.gated:
            seen = seen * torch.sigmoid(qkv[:, self.qkv_rows :])
        return seen if self.out_norm is None else normed_of_ranks(self.out_norm, seen, self.ranks)

    def seen(self, qkv: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        """What tokens see, of rows of queries, keys and values."""
        return self._seen(*self._heads_of(qkv, batch), batch, cache)

    def _seen(self, q_NHD: torch.Tensor, row: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        layer = cache.layers[self.place]
        if self.a.kv_layer < 0:
            layer.view(-1, layer.shape[-1]).index_copy_(0, batch.rows, row)
        return attend(self.a, q_NHD, layer, batch, self.sinks)

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

    def _latent(self, mla: Mla, x: torch.Tensor, batch: Batch, cache: KvPages) -> tuple[torch.Tensor, torch.Tensor]:
        """Multi-head latent attention (DeepSeek-V2, 2024): queries and keys through latents, decompressed."""
        a = self.a
        x_q = x
        if self.q_a is not None:
            x_q = self.q_a(x)
            x_q = x_q if self.q_a_norm is None else self.q_a_norm(x_q)
        if self.indexer is not None:
            self.indexer.choose(x, x_q, batch, cache)
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

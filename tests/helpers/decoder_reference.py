# SPDX-License-Identifier: Apache-2.0
"""What a DecoderSpec means, in plain torch: the oracle for families (against transformers) and for the native decoder.

One sequence at a time, no tricks. `assemble` puts a model's tensors together as the families' tables say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from anyaccel.inference.families.family import Family
from anyaccel.inference.spec.decoder import (
    Attention,
    DecoderSpec,
    GatedLru,
    Indexer,
    Layer,
    LinearAttention,
    Mla,
    Mlp,
    Moe,
    Norm,
    QkNorm,
    Recurrent,
    Rope,
    SelectiveScan,
    ShortConv,
    Streams,
    weights,
)
from anyaccel.inference.spec.mapping import Part, first_stored

_FEW_TOKENS = 16  # of a query whose context threads divide


def part_rows(part: Part, tensor: Tensor, vector: bool) -> Tensor:
    """The rows (or a vector's values) that a Part means."""
    if part.index is not None:
        tensor = tensor[part.index]
    if vector:
        tensor = tensor.flatten()
    if part.transposed:
        tensor = tensor.T
    if part.order is not None:
        return tensor[list(part.order)] * part.times + part.plus
    end = tensor.shape[0] if part.count < 0 else part.first + part.count
    assert 0 <= part.first < end <= tensor.shape[0], (part, tensor.shape)
    return tensor[part.first : end] * part.times + part.plus


def _whole(part: Part, tensors: Mapping[str, Tensor]) -> Tensor:
    base, *adapter = (tensors[name].float() for name in part.tensors)
    return base + adapter[1] @ adapter[0] if adapter else base


def assemble(family: Family, spec: DecoderSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native name -> float32 weight, each of exactly the size that `weights(spec)` says."""
    found = {}
    matrices, vectors = weights(spec)
    for weight in [*matrices, *vectors]:
        vector = not hasattr(weight, "rows")
        shape = (weight.count,) if vector else (weight.rows, weight.cols)
        alternatives = family.names.parts(spec, weight.name)
        parts = first_stored(alternatives, tensors)
        assert parts, f"{weight.name}: none of {[[part.tensor for part in parts] for parts in alternatives]}"
        value = torch.cat([part_rows(part, _whole(part, tensors), vector) for part in parts])
        assert value.shape == shape, f"{weight.name}: {tuple(value.shape)} instead of {shape}"
        found[weight.name] = value.contiguous()
    return found


def _norm(norm: Norm | None, name: str, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight:
        x = x * w[f"{name}.weight"]
    return x + w[f"{name}.bias"] if norm.bias else x


def _head_norm(qk: QkNorm, name: str, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """x: [tokens, heads, head_dim]."""
    if qk.across:
        return _norm(qk.norm, name, x.flatten(1), w).view_as(x)
    if qk.own_weights:
        w = {key: w[key].view(x.shape[1:]) for key in (f"{name}.weight", f"{name}.bias") if key in w}
    return _norm(qk.norm, name, x, w)


def _linear(name: str, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    y = x @ w[name].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _rotate(rope: Rope, x: Tensor, first: int, positions: Tensor, length: int) -> Tensor:
    """x: [tokens, heads, dim], of which values from `first` on rotate; `length`: the sequence's after this step."""
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32)
    scale = rope.scale
    if rope.dynamic_base and length > rope.dynamic_from:
        dim = 2 * len(rope.inv_freq)
        grown = rope.dynamic_factor * length / rope.dynamic_from - (rope.dynamic_factor - 1)
        base = rope.dynamic_base * grown ** (dim / (dim - 2))
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    if rope.long_inv_freq and length > rope.long_from:
        frequencies, scale = torch.tensor(rope.long_inv_freq, dtype=torch.float32), rope.long_scale
    angles = (positions.float()[:, None] * frequencies)[:, None]
    cosine, sine = (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
    half = frequencies.shape[0]
    turned = x[..., first : first + 2 * half]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if rope.interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * cosine - b * sine, b * cosine + a * sine)
    out = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat([x[..., :first], out, x[..., first + 2 * half :]], -1)


def _xielu(x: Tensor, values: Tensor) -> Tensor:
    alpha_p, alpha_n, beta, eps = values
    below = (torch.expm1(x.minimum(eps)) - x) * (beta + F.softplus(alpha_n))
    return torch.where(x > 0, F.softplus(alpha_p) * x * x, below) + beta * x


def _activate(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if kind == "swiglu_oai":
        assert up is not None
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    y = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }[kind](gate)
    return y if up is None else y * up


def _sparsemixer(moe: Moe, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and factors of the chosen experts."""
    left = logits.clone()
    chosen, factors = [], []
    for _ in range(moe.top_k):
        best = left.amax(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * moe.jitter
        chosen.append(left.argmax(-1, keepdim=True))
        factors.append(left.masked_fill(far, -math.inf).softmax(-1).gather(1, chosen[-1]))
        left = left.scatter(1, chosen[-1], -math.inf)
    return torch.cat(chosen, 1), torch.cat(factors, 1)


def _mlp(mlp: Mlp, name: str, x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    y = _linear(f"{name}.gate_up", x, w)
    gate, up = y.chunk(2, -1) if mlp.gated else (y, None)
    if mlp.cutoff is not None:
        cutoff = gate.mean(-1, keepdim=True) + mlp.cutoff * gate.std(-1, keepdim=True, correction=0)
        gate = F.relu(gate - cutoff)
    features = _xielu(gate, w[f"{name}.act"]) if mlp.activation == "xielu" else _activate(mlp.activation, gate, up)
    return _linear(f"{name}.down", _norm(mlp.norm, f"{name}.norm", features, w), w)


def _experts(moe: Moe, at: str, x: Tensor, h: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """x: the layer's norm of h."""
    of_router = x if moe.router_norm is None else _norm(moe.router_norm, f"{at}.router_norm", h, w)
    of_shared, x = x, x if moe.experts_norm is None else _norm(moe.experts_norm, f"{at}.experts_norm", h, w)
    logits = _linear(f"{at}.router", of_router, w) * moe.logit_scale
    if moe.scoring == "sparsemixer":
        chosen, factors = _sparsemixer(moe, logits)
    else:
        chosen, factors = _chosen(moe, at, logits, w)
    rows = []
    for token in range(x.shape[0]):
        row = x[token : token + 1]
        each = []
        for place, expert in enumerate(chosen[token]):
            factor, name = factors[token, place], f"{at}.experts.{int(expert)}"
            each.append(
                _mlp(moe.expert, name, factor * row, w) if moe.scale_input else factor * _mlp(moe.expert, name, row, w)
            )
        rows.append(torch.stack(each).sum(0))
    y = _norm(moe.post_norm, f"{at}.experts_post_norm", torch.cat(rows), w)
    if moe.shared is not None:
        x = of_shared
        shared = moe.shared_scale * _mlp(moe.shared, f"{at}.shared", x, w)
        shared = _norm(moe.shared_post_norm, f"{at}.shared_post_norm", shared, w)
        y = y + (torch.sigmoid(_linear(f"{at}.shared_gate", x, w)) * shared if moe.shared_gate else shared)
    return y


def _chosen(moe: Moe, at: str, logits: Tensor, w: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers and factors of the chosen experts."""
    scores = {"softmax": lambda s: s.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda s: s}[moe.scoring](logits)
    choice = scores + w[f"{at}.router.choice_bias"] if moe.choice_bias else scores
    if moe.groups > 1:
        grouped = choice.view(-1, moe.groups, moe.experts // moe.groups)
        best = grouped.amax(-1) if moe.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(moe.top_groups, -1).indices, 1.0).bool()
        choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
    chosen = choice.topk(moe.top_k, -1).indices
    factors = scores.gather(1, chosen)
    if moe.softmax_after:
        factors = factors.softmax(-1)
    if moe.normalise:
        factors = factors / factors.sum(-1, keepdim=True)
    if moe.expert_scale:
        factors = factors * w[f"{at}.router.expert_scale"][chosen]
    return chosen, factors * moe.scale


def _convolve(name: str, kernel: int, x: Tensor, before: Tensor | None, w: Mapping[str, Tensor]) -> Tensor:
    """A causal convolution of each channel alone; `before`: what came before x."""
    earlier = [x.new_zeros(kernel - 1, x.shape[1]), *([] if before is None else [before])]
    x = torch.cat([*earlier, x])[-(len(x) + kernel - 1) :]
    taps = w[f"{name}.weight"].view(-1, 1, kernel)
    return F.conv1d(x.T[None], taps, w.get(f"{name}.bias"), groups=len(taps))[0].T


class Cached:
    """A sequence's keys and values, and its recurrent states: what the convolutions saw, and matrices of the heads."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.seen: list[Tensor | None] = [None] * layers
        self.states: list[Tensor | None] = [None] * layers
        self.index_keys: list[Tensor | None] = [None] * layers
        self.chosen = torch.empty(0)  # of the last indexer: which tokens each new one sees


class Reference:
    """A decoder that computes what `spec` says with `w`, the weights as `assemble` gives them.

    `keep`: what the cache has of keys and values [tokens, heads, values].
    """

    def __init__(
        self,
        spec: DecoderSpec,
        w: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        keep: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        self.spec = spec
        self.keep = keep
        self.w = {name: value.to(dtype) for name, value in w.items()}

    def start(self) -> Cached:
        return Cached(len(self.spec.layers))

    def _qkv(self, at: str, a: Attention, x: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        rope = self.spec.ropes[a.rope] if a.rope >= 0 else None
        if a.mla is not None:
            return self._latent(at, a, a.mla, x, positions, length)
        qkv = _linear(f"{at}.qkv", x, self.w)
        if a.kv_layer >= 0:
            q = qkv.unflatten(-1, (a.heads, a.head_dim))
            q = q if a.qk_norm is None else _head_norm(a.qk_norm, f"{at}.q_norm", q, self.w)
            return (q if rope is None else _rotate(rope, q, rope.first, positions, length)), None, None
        if a.clip:
            qkv = qkv.clamp(-a.clip, a.clip)
        sizes = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim]
        qkv = qkv[:, : sum(sizes)]  # the gate's rows follow
        q, k, v = (
            part.unflatten(-1, (-1, dim))
            for part, dim in zip(qkv.split(sizes, -1), (a.head_dim, a.head_dim, a.value_dim), strict=True)
        )
        qk = a.qk_norm
        if qk is not None and not qk.after_rope:
            q, k = _head_norm(qk, f"{at}.q_norm", q, self.w), _head_norm(qk, f"{at}.k_norm", k, self.w)
        v = _norm(a.value_norm, f"{at}.v_norm", v, self.w)
        if rope is not None:
            q, k = (_rotate(rope, each, rope.first, positions, length) for each in (q, k))
        if qk is not None and qk.after_rope:
            q, k = _head_norm(qk, f"{at}.q_norm", q, self.w), _head_norm(qk, f"{at}.k_norm", k, self.w)
        return q, k, v

    def _latent(
        self, at: str, a: Attention, mla: Mla, x: Tensor, positions: Tensor, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        w = self.w
        rope = self.spec.ropes[a.rope] if a.rope >= 0 else None
        if mla.q_rank:
            x_q = _norm(mla.q_norm, f"{at}.q_a_norm", _linear(f"{at}.q_a", x, w), w)
        else:
            x_q = x
        q = _linear(f"{at}.q_b", x_q, w).unflatten(-1, (a.heads, a.head_dim))
        latent, k_rope = _linear(f"{at}.kv_a", x, w).split([mla.kv_rank, mla.rope_dim], -1)
        latent = _norm(mla.kv_norm, f"{at}.kv_a_norm", latent, w)[:, None]
        k_rope = k_rope[:, None]
        if rope is not None:
            q = _rotate(rope, q, rope.first, positions, length)
            k_rope = _rotate(rope, k_rope, 0, positions, length)
        return q, torch.cat([latent, k_rope], -1), latent

    def _of_latents(self, at: str, a: Attention, mla: Mla, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads of what the cache has: of a long query both are made of what it has as keys."""
        latent, k_rope = k.split([mla.kv_rank, mla.rope_dim], -1)
        values = latent if count > _FEW_TOKENS else v
        made = [_linear(f"{at}.kv_b", each[:, 0], self.w).unflatten(-1, (a.heads, -1)) for each in (latent, values)]
        k_nope = made[0][..., : mla.nope_dim]
        return torch.cat([k_nope, k_rope.expand(-1, a.heads, -1)], -1), made[1][..., mla.nope_dim :]

    def _chosen(
        self, index: int, a: Attention, indexer: Indexer, x: Tensor, positions: Tensor, sequence: Cached
    ) -> Tensor:
        """Which of all tokens each new one sees, [tokens, keys]."""
        at, w, length = f"layers.{index}", self.w, sequence.length + len(x)
        assert a.mla is not None
        latent = _norm(a.mla.q_norm, f"{at}.q_a_norm", _linear(f"{at}.q_a", x, w), w)
        q = _linear(f"{at}.index_q", latent, w).unflatten(-1, (indexer.heads, indexer.head_dim))
        k = _norm(indexer.norm, f"{at}.index_norm", _linear(f"{at}.index_k", x, w), w)[:, None]
        if indexer.rope >= 0:
            rope = self.spec.ropes[indexer.rope]
            q, k = (_rotate(rope, each, rope.first, positions, length) for each in (q, k))
        earlier = sequence.index_keys[index]
        k = self.keep(k) if earlier is None else torch.cat([earlier, self.keep(k)])
        sequence.index_keys[index] = k
        scores = torch.einsum("qhd,kd->qhk", q, k[:, 0]).relu()
        scores = torch.einsum("qh,qhk->qk", _linear(f"{at}.index_weights", x, w), scores)
        scores = scores.masked_fill(torch.arange(length) > positions[:, None], -math.inf)
        best = scores.topk(min(indexer.top_k, length), -1).indices
        return torch.zeros_like(scores).scatter(1, best, 1.0).bool()

    def _attention(self, index: int, a: Attention, x: Tensor, sequence: Cached) -> Tensor:
        at = f"layers.{index}"
        count = x.shape[0]
        positions = torch.arange(sequence.length, sequence.length + count)
        q, k, v = self._qkv(at, a, x, positions, sequence.length + count)
        if a.growth:
            grown = torch.log1p(torch.floor((positions + a.growth_first) / a.growth_from))
            q = q * (1 + a.growth * grown)[:, None, None].to(q.dtype)
        if a.kv_layer >= 0:
            k, v = sequence.keys[a.kv_layer], sequence.values[a.kv_layer]
        else:
            k, v = self.keep(k), self.keep(v)
            if (earlier := sequence.keys[index]) is not None:
                k, v = torch.cat([earlier, k]), torch.cat([sequence.values[index], v])  # type: ignore[list-item]
        sequence.keys[index], sequence.values[index] = k, v
        if a.mla is not None:
            k, v = self._of_latents(at, a, a.mla, k, v, count)
        group = a.heads // a.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * a.scale
        if a.softcap:
            scores = a.softcap * torch.tanh(scores / a.softcap)
        distance = torch.arange(k.shape[0])[None] - positions[:, None]  # key - query
        if a.alibi:
            scores = scores + torch.tensor(a.alibi, dtype=x.dtype)[:, None, None] * distance
        seen = distance <= 0
        if a.indexer is not None:
            if a.indexer.own:
                sequence.chosen = self._chosen(index, a, a.indexer, x, positions, sequence)
            seen = seen & sequence.chosen
        if a.window:
            seen &= distance > -a.window
        if a.chunk:
            seen &= torch.arange(k.shape[0])[None] // a.chunk == positions[:, None] // a.chunk
        scores = scores.masked_fill(~seen, -math.inf)
        if a.sinks:
            sinks = self.w[f"{at}.sinks"][:, None, None].expand(-1, count, 1)
            factors = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            factors = scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", factors, v).flatten(1)
        if a.gated:
            out = out * torch.sigmoid(_linear(f"{at}.qkv", x, self.w)[:, -out.shape[1] :])
        out = _norm(a.out_norm, f"{at}.out_norm", out, self.w)
        return _linear(f"{at}.o", out, self.w)

    def _remember(self, index: int, x: Tensor, sequence: Cached) -> Tensor | None:
        """What convolutions saw before x, which they see now."""
        before = sequence.seen[index]
        sequence.seen[index] = x if before is None else torch.cat([before, x])
        return before

    def _short_conv(self, index: int, mixer: ShortConv, x: Tensor, sequence: Cached) -> Tensor:
        at = f"layers.{index}.mixer"
        b, c, x = _linear(f"{at}.in", x, self.w).chunk(3, -1)
        y = _convolve(f"{at}.conv", mixer.kernel, b * x, self._remember(index, b * x, sequence), self.w)
        return _linear(f"{at}.out", c * y, self.w)

    def _linear_attention(self, index: int, m: LinearAttention, x: Tensor, sequence: Cached) -> Tensor:
        at, w, count = f"layers.{index}.mixer", self.w, x.shape[0]
        keys, values = m.key_heads * m.key_dim, m.heads * m.value_dim
        mixed = _linear(f"{at}.in", x, w)
        qkv, gate = mixed[:, : 2 * keys + values], mixed[:, 2 * keys + values :]
        if m.kernel:
            qkv = F.silu(_convolve(f"{at}.conv", m.kernel, qkv, self._remember(index, qkv, sequence), w))
        if m.silu:
            qkv = F.silu(qkv)
        if m.gate_rank:
            gate = _linear(f"{at}.gate_up", _linear(f"{at}.steps", x, w)[:, m.decay_rank + m.heads :], w)
        gate = torch.sigmoid(gate) if m.gate_activation == "sigmoid" else F.silu(gate)
        q, k, v = qkv.split([keys, keys, values], -1)
        q, k = (each.unflatten(-1, (m.key_heads, m.key_dim)) for each in (q, k))
        v = v.unflatten(-1, (m.heads, m.value_dim))
        if m.l2_norm:
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        group = m.heads // m.key_heads
        q, k = (each.repeat(1, group, 1) if m.tiled else each.repeat_interleave(group, 1) for each in (q * m.scale, k))
        if m.decay_rank:
            latents = _linear(f"{at}.steps", x, w)
            raw = _linear(f"{at}.step_up", latents[:, : m.decay_rank], w) + w[f"{at}.step_bias"]
            step = F.softplus(raw).unflatten(-1, (m.heads, m.key_dim))
            decay = torch.exp(-w[f"{at}.rate"].exp()[:, None] * step)
            strength = m.strength_scale * torch.sigmoid(latents[:, m.decay_rank : m.decay_rank + m.heads])
        elif m.slopes:
            decay, strength = torch.exp(-torch.tensor(m.slopes)).expand(count, -1), x.new_ones(count, m.heads)
        else:
            inputs = _linear(f"{at}.steps", x, w)
            step = F.softplus(inputs[:, : m.heads] + w[f"{at}.step_bias"]).clamp(m.step_min, m.step_max or None)
            decay = torch.exp(-w[f"{at}.rate"].exp() * step)
            strength = step if m.strength == "step" else m.strength_scale * torch.sigmoid(inputs[:, m.heads :])
        state = sequence.states[index]
        if state is None:
            state = x.new_zeros(m.heads, m.key_dim, m.value_dim)
        rows = []
        for t in range(count):
            state = state * decay[t].view(m.heads, -1, 1)
            written = v[t] - torch.einsum("hk,hkv->hv", k[t], state) if m.delta else v[t]
            state = state + torch.einsum("hk,hv->hkv", k[t], written * strength[t][:, None])
            rows.append(torch.einsum("hk,hkv->hv", q[t], state))
        sequence.states[index] = state
        out = torch.stack(rows)
        if m.skip:
            out = out + w[f"{at}.skip"][:, None] * v
        out = out.flatten(1)
        if m.gate and not m.norm_first:
            out = out * gate
        if m.norm is not None:
            groups = out.unflatten(-1, (-1, m.norm_width))
            weight = w[f"{at}.norm.weight"].view(-1, m.norm_width)
            out = _norm(m.norm, "norm", groups, {"norm.weight": weight}).flatten(1)
        if m.gate and m.norm_first:
            out = out * gate
        return _linear(f"{at}.out", out, w)

    def _scan(self, index: int, m: SelectiveScan, x: Tensor, sequence: Cached) -> Tensor:
        at, w = f"layers.{index}.mixer", self.w
        x, gate = _linear(f"{at}.in", x, w).chunk(2, -1)
        x = F.silu(_convolve(f"{at}.conv", m.kernel, x, self._remember(index, x, sequence), w))
        parts = _linear(f"{at}.select", x, w).split([m.step_rank, m.state_dim, m.state_dim], -1)
        r, b, c = (
            _norm(m.norm, f"{at}.{name}_norm", part, w) for name, part in zip(("step", "b", "c"), parts, strict=True)
        )
        step = F.softplus(_linear(f"{at}.step_up", r, w))
        rate = w[f"{at}.rate"].view(m.channels, m.state_dim).exp()
        state = sequence.states[index]
        if state is None:
            state = x.new_zeros(m.channels, m.state_dim)
        rows = []
        for t in range(x.shape[0]):
            state = torch.exp(-rate * step[t][:, None]) * state + (step[t] * x[t])[:, None] * b[t]
            rows.append(state @ c[t])
        sequence.states[index] = state
        return _linear(f"{at}.out", (torch.stack(rows) + w[f"{at}.skip"] * x) * F.silu(gate), w)

    def _gated_lru(self, index: int, m: GatedLru, x: Tensor, sequence: Cached) -> Tensor:
        at, w, count = f"layers.{index}.mixer", self.w, x.shape[0]
        x, y = _linear(f"{at}.in", x, w).chunk(2, -1)
        x = _convolve(f"{at}.conv", m.kernel, x, self._remember(index, x, sequence), w)
        blocks = w[f"{at}.gates"].view(2, m.heads, m.head_dim, m.head_dim)
        gates = torch.einsum("ghij,thj->gthi", blocks, x.view(count, m.heads, -1)).flatten(2)
        i, r = torch.sigmoid(gates + w[f"{at}.gates.bias"].view(2, 1, -1))
        decay = torch.exp(-8 * r * F.softplus(w[f"{at}.rate"]))
        written = torch.sqrt(1 - decay * decay) * i * x
        state = sequence.states[index]
        if state is None:
            state, written[0] = torch.zeros_like(x[0]), (i * x)[0]
        rows = []
        for t in range(count):
            state = decay[t] * state + written[t]
            rows.append(state)
        sequence.states[index] = state
        return _linear(f"{at}.out", torch.stack(rows) * _activate(m.activation, y, None), w)

    def _recurrent(self, index: int, mixer: Recurrent, x: Tensor, sequence: Cached) -> Tensor:
        if isinstance(mixer, ShortConv):
            return self._short_conv(index, mixer, x, sequence)
        if isinstance(mixer, SelectiveScan):
            return self._scan(index, mixer, x, sequence)
        if isinstance(mixer, GatedLru):
            return self._gated_lru(index, mixer, x, sequence)
        return self._linear_attention(index, mixer, x, sequence)

    def _side_block(self, index: int, layer: Layer, h: Tensor, embedded: Tensor, sequence: Cached) -> Tensor:
        at, w = f"layers.{index}", self.w
        x = _norm(layer.attn_norm, f"{at}.attn_norm", torch.cat([h, embedded], -1), w)
        x = self._attention(index, layer.attention, x, sequence)
        x = _mlp(layer.mlp, f"{at}.mlp", _norm(layer.mlp_norm, f"{at}.mlp_norm", x, w), w)
        x = _norm(layer.side_block.norm, f"{at}.side_norm", h + _linear(f"{at}.side", x, w), w)
        return h + self._recurrent(index, layer.recurrent, x, sequence)

    def _layer(self, index: int, layer: Layer, h: Tensor, sequence: Cached) -> Tensor:
        at, w, r = f"layers.{index}", self.w, layer.residual_scale

        def mlp(x: Tensor) -> Tensor:
            moe = isinstance(layer.mlp, Moe)
            y = _experts(layer.mlp, at, x, h, w) if moe else _mlp(layer.mlp, f"{at}.mlp", x, w)
            return _norm(layer.mlp_post_norm, f"{at}.mlp_post_norm", y, w)

        x = _norm(layer.attn_norm, f"{at}.attn_norm", h, w)
        y = torch.zeros_like(h)
        if layer.attention is not None:
            y = y + self._attention(index, layer.attention, x, sequence)
        if layer.recurrent is not None:
            y = y + self._recurrent(index, layer.recurrent, x, sequence)
        if layer.attention is not None or layer.recurrent is not None:
            y = _norm(layer.attn_post_norm, f"{at}.attn_post_norm", y, w)
        if layer.parallel:
            return h + r * (y + mlp(x if layer.mlp_norm is None else _norm(layer.mlp_norm, f"{at}.mlp_norm", h, w)))
        h = (x if layer.residual_from_norm else h) + r * y
        if layer.laurel is not None:
            side = _linear(f"{at}.laurel_up", _linear(f"{at}.laurel_down", x, w), w)
            h = layer.laurel.scale * (h + x + _norm(layer.laurel.norm, f"{at}.laurel_norm", side, w))
        if layer.mlp is None:
            return h
        x = _norm(layer.mlp_norm, f"{at}.mlp_norm", h, w)
        return (x if layer.residual_from_norm else h) + r * mlp(x)

    def _inputs(self, tokens: Sequence[int], h: Tensor) -> Tensor | None:
        """What the layers get beside the residual, [tokens, layers, features]."""
        own, w = self.spec.layer_inputs, self.w
        if own is None:
            return None
        rows = [token if token < own.vocab else 0 for token in tokens]
        table = w["layer_embed"][rows].unflatten(-1, (own.layers, own.features))
        projected = _linear("layer_projection", h, w).view_as(table) * own.projection_scale
        return own.scale * (_norm(own.norm, "layer_projection_norm", projected, w) + own.embed_scale * table)

    def _streamed(self, index: int, layer: Layer, streams: Streams, h: Tensor, sequence: Cached) -> Tensor:
        """What a layer makes of streams [streams, tokens, hidden], without its input_gate."""
        at, w, count = f"layers.{index}", self.w, streams.count

        def routed(x: Tensor) -> Tensor:
            x = _norm(streams.norm, f"{at}.stream_norm", x, w) / x.shape[-1]
            return torch.tanh(x @ w[f"{at}.stream_router"].view(count, -1).T)

        factors = w[f"{at}.stream_predict"].view(count, count, count)
        h = h + torch.einsum("ikm,nm,knd->ind", factors, routed(h[0]), h)
        made = self._layer(index, layer, h[0], sequence)
        factors = 1 + routed(made) @ w[f"{at}.stream_correct"].view(count, count).T
        return h + factors.T[..., None] * (made - h[0])

    def _in_streams(self, h: Tensor, opening: bool) -> Tensor:
        """All streams of the embedding, or the residual of all of them."""
        others, name = self.spec.streams - 1, "streams_in" if opening else "streams_out"
        first = h if opening else h[0]
        size = first.square().mean(-1, keepdim=True).sqrt()
        found = [first]
        for number, weight in enumerate(self.w[name].chunk(others)):
            y = (first if opening else h[number + 1]) @ weight.T
            found.append(y * size / y.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt())
        return torch.stack(found) if opening else torch.stack(found).mean(0)

    def step(self, sequence: Cached, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab] of new tokens of a sequence."""
        spec, w = self.spec, self.w
        h = w["embed"][list(tokens)] * spec.embedding_scale
        if spec.positions:
            first = sequence.length + spec.position_offset
            h = h + w["positions"][first : first + len(tokens)]
        h = _norm(spec.embedding_norm, "embed_norm", h, w)
        inputs, embedded = self._inputs(tokens, h), h
        if spec.streams > 1:
            h = self._in_streams(h, opening=True)
        for index, layer in enumerate(spec.layers):
            at, streams = f"layers.{index}", layer.streams
            if layer.side_block is not None:
                h = read = self._side_block(index, layer, h, embedded, sequence)
            elif streams is None:
                h = read = self._layer(index, layer, h, sequence)
            else:
                h = self._streamed(index, layer, streams, h, sequence)
                read = h[0] * w[f"{at}.stream_scale"] if streams.scaled else h[0]
            if layer.input_gate is not None:
                gate = _linear(f"{at}.input_gate", read, w)
                y = _linear(f"{at}.input_down", _activate(layer.input_gate.mlp.activation, gate, inputs[:, index]), w)
                y = _norm(layer.input_gate.norm, f"{at}.input_norm", y, w)
                h = h + y if streams is None else torch.cat([h[:1], h[1:] + y])
            if layer.scaled:
                h = h * w[f"{at}.layer_scale"]
        if spec.streams > 1:
            h = self._in_streams(h, opening=False)
        sequence.length += len(tokens)
        h = _norm(spec.final_norm, "final_norm", h, w)
        logits = h @ (w["embed"] if spec.tied else w["head"]).T
        if spec.head_bias:
            logits = logits + w["head.bias"]
        logits = logits * spec.logits_scale
        return spec.logits_softcap * torch.tanh(logits / spec.logits_softcap) if spec.logits_softcap else logits

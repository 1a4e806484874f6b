# SPDX-License-Identifier: Apache-2.0
"""Mixers with a state of fixed size for each sequence: see `Recurrent` in spec/decoder.py.

A mixer makes its rows of all tokens by products, takes them through the states of their sequences, and gives what its
last product, `out`, reads. Recurrences are in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from anyaccel.inference.device.activations import ACTIVATIONS
from anyaccel.inference.device.batch import Batch
from anyaccel.inference.device.pages import KvPages
from anyaccel.inference.device.parts import Linear, Normed, Ranks, normed, normed_of_ranks
from anyaccel.inference.device.recurrence import accumulated, attended, convolved, scanned
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import GatedLru, LinearAttention, Recurrent, SelectiveScan, ShortConv

_ALIGNED = 16  # floats: csrc/llm/decoder/state.h counts as many
_L2_EPS = 1e-6


class StateLayout:
    """Where the parts of all layers' states are among the floats of a sequence's state."""

    def __init__(self) -> None:
        self.floats = 0

    def take(self, *shape: int) -> State:
        first = self.floats
        self.floats += -(-math.prod(shape) // _ALIGNED) * _ALIGNED
        return State(first, shape)


class State:
    """A part of the state of a layer."""

    def __init__(self, first: int, shape: tuple[int, ...]) -> None:
        self.own, self.shape = slice(first, first + math.prod(shape)), shape

    def through(
        self,
        batch: Batch,
        cache: KvPages,
        advance: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        *rows: torch.Tensor,
    ) -> torch.Tensor:
        """What `advance` makes of all tokens' rows: see `recurrence.py`. The states are those behind them then."""
        whole = torch.unflatten(cache.states[:, self.own], 1, self.shape)
        made = []
        for group in batch.groups:
            size = (group.sequences, group.queries)
            own = [torch.unflatten(each[group.first : group.first + math.prod(size)], 0, size) for each in rows]
            y, state = advance(whole.index_select(0, group.states), *own)
            whole.index_copy_(0, group.states, state)
            made.append(y.flatten(0, 1))
        return made[0] if len(made) == 1 else torch.cat(made)


class Convolution:
    """A causal convolution of each channel alone, with what it has seen as its state."""

    def __init__(
        self, weights: DeviceWeights, at: str, channels: int, kernel: int, silu: bool, layout: StateLayout
    ) -> None:
        self.taps = weights[f"{at}.conv.weight"].view(channels, kernel).t().contiguous()
        self.bias, self.silu = weights.get(f"{at}.conv.bias"), silu
        self.window = layout.take(kernel - 1, channels)

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        advance = functools.partial(convolved, taps_TC=self.taps, bias=self.bias, silu=self.silu)
        return self.window.through(batch, cache, advance, x)


class ShortConvolution:
    """See ShortConv."""

    def __init__(self, mixer: ShortConv, weights: DeviceWeights, at: str, layout: StateLayout) -> None:
        self.inward, self.out = Linear(weights, f"{at}.in"), Linear(weights, f"{at}.out")
        self.convolution = Convolution(weights, at, mixer.channels, mixer.kernel, False, layout)

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        b, c, x = self.inward(x).chunk(3, -1)
        return (c * self.convolution(b * x, batch, cache)).to(x.dtype)


class LinearHeads:
    """See LinearAttention."""

    def __init__(
        self, mixer: LinearAttention, weights: DeviceWeights, at: str, layout: StateLayout, ranks: Ranks | None
    ) -> None:
        self.mixer, self.ranks = m, _ = mixer, ranks
        self.keys, self.values = m.key_heads * m.key_dim, m.heads * m.value_dim
        self.inward, self.out = Linear(weights, f"{at}.in"), Linear(weights, f"{at}.out")
        convolved = 2 * self.keys + self.values
        self.convolution = Convolution(weights, at, convolved, m.kernel, True, layout) if m.kernel else None
        self.state = layout.take(m.heads, m.key_dim, m.value_dim)
        if m.slopes:
            self.fixed = -torch.tensor(m.slopes, device=weights.device)[:, None]
        else:
            self.steps = Linear(weights, f"{at}.steps")
            self.rates = -weights[f"{at}.rate"].exp()[:, None]
            self.step_bias = weights[f"{at}.step_bias"]
        self.step_up = Linear(weights, f"{at}.step_up") if m.decay_rank else None
        self.gate_up = Linear(weights, f"{at}.gate_up") if m.gate_rank else None
        self.norm = normed(m.norm, weights, f"{at}.norm")
        self.skip = weights[f"{at}.skip"][:, None] if m.skip else None

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        m, convolved = self.mixer, 2 * self.keys + self.values
        made = self.inward(x)
        qkv, gate = made[:, :convolved], made[:, convolved:]
        qkv = qkv.float() if self.convolution is None else self.convolution(qkv, batch, cache)
        if m.silu:
            qkv = F.silu(qkv)
        q, k, v = torch.split(qkv, [self.keys, self.keys, self.values], 1)
        q, k = (self._for_heads(each.view(len(x), m.key_heads, m.key_dim)) for each in (q, k))
        v = v.view(len(x), m.heads, m.value_dim)
        inputs = qkv[:, :0] if m.slopes else self.steps(x)
        decays, strengths = self._steps(inputs, x.dtype)
        if self.gate_up is not None:
            gate = self.gate_up(inputs[:, m.decay_rank + m.heads :].to(x.dtype))
        advance = functools.partial(attended, delta=m.delta)
        y = self.state.through(batch, cache, advance, q * m.scale, k, v, decays, strengths)
        if self.skip is not None:
            y = torch.addcmul(y, self.skip, v)
        return self._finished(y.flatten(1), gate.float()).to(x.dtype)

    def _for_heads(self, x_NHK: torch.Tensor) -> torch.Tensor:
        """Of each head of values."""
        m = self.mixer
        if m.l2_norm:
            x_NHK = x_NHK * torch.rsqrt(x_NHK.square().sum(-1, keepdim=True) + _L2_EPS)
        each = m.heads // m.key_heads
        return x_NHK.repeat(1, each, 1) if m.tiled else x_NHK.repeat_interleave(each, 1)

    def _steps(self, inputs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms of decays, [tokens, heads, 1 or key_dim], and strengths [tokens, heads]."""
        m = self.mixer
        if m.slopes:
            return self.fixed.expand(len(inputs), -1, -1), inputs.new_ones(len(inputs), m.heads)
        strengths = inputs[:, (m.decay_rank or m.heads) :][:, : m.heads].sigmoid() * m.strength_scale
        if self.step_up is not None:
            raw = self.step_up(inputs[:, : m.decay_rank].to(dtype)).float()
            steps = F.softplus(raw + self.step_bias).view(-1, m.heads, m.key_dim)
            return self.rates * steps, strengths
        steps = F.softplus(inputs[:, : m.heads] + self.step_bias).clamp(m.step_min, m.step_max or None)
        return self.rates * steps[..., None], steps if m.strength == "step" else strengths

    def _finished(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """With gate and norm."""
        m = self.mixer
        if m.gate:
            gate = gate.sigmoid() if m.gate_activation == "sigmoid" else F.silu(gate)
        if m.gate and not m.norm_first:
            y = y * gate
        if self.norm is not None:
            y = self._normed(self.norm, y)
        return y * gate if m.gate and m.norm_first else y

    def _normed(self, norm: Normed, y: torch.Tensor) -> torch.Tensor:
        width = self.mixer.norm_width
        if width > y.shape[1]:  # other ranks have a part of it
            return normed_of_ranks(norm, y, self.ranks)
        plain = norm.plain(y.view(len(y), -1, width))
        return (plain if norm.weight is None else plain * norm.weight.view(-1, width)).flatten(1)


class Scan:
    """See SelectiveScan."""

    def __init__(
        self, mixer: SelectiveScan, weights: DeviceWeights, at: str, layout: StateLayout, ranks: Ranks | None
    ) -> None:
        self.mixer, self.ranks = mixer, ranks
        self.inward, self.out = Linear(weights, f"{at}.in"), Linear(weights, f"{at}.out")
        self.select, self.step_up = Linear(weights, f"{at}.select"), Linear(weights, f"{at}.step_up")
        self.norms = [normed(mixer.norm, weights, f"{at}.{name}_norm") for name in ("step", "b", "c")]
        self.convolution = Convolution(weights, at, mixer.channels, mixer.kernel, True, layout)
        self.state = layout.take(mixer.channels, mixer.state_dim)
        self.rates = -weights[f"{at}.rate"].view(mixer.channels, mixer.state_dim).exp()
        self.skip = weights[f"{at}.skip"]

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        m, dtype = self.mixer, x.dtype
        x, gate = self.inward(x).chunk(2, -1)
        x = self.convolution(x, batch, cache)
        selected = self.select(x.to(dtype))
        if self.ranks is not None:
            selected = self.ranks.add(selected)
        parts = torch.split(selected.float(), [m.step_rank, m.state_dim, m.state_dim], 1)
        steps, b, c = (part if norm is None else norm(part) for norm, part in zip(self.norms, parts, strict=True))
        steps = F.softplus(self.step_up(steps.to(dtype)).float())
        y = self.state.through(batch, cache, functools.partial(scanned, rates_CN=self.rates), steps, x, b, c)
        return (torch.addcmul(y, self.skip, x) * F.silu(gate.float())).to(dtype)


class GatedUnit:
    """See GatedLru."""

    def __init__(self, mixer: GatedLru, weights: DeviceWeights, at: str, layout: StateLayout) -> None:
        self.mixer = m = mixer
        self.inward, self.out = Linear(weights, f"{at}.in"), Linear(weights, f"{at}.out")
        self.gates_2HDD = weights[f"{at}.gates"].view(2, m.heads, m.head_dim, m.head_dim)
        self.gates_bias = weights[f"{at}.gates.bias"].view(2, 1, -1)
        self.convolution = Convolution(weights, at, m.heads * m.head_dim, m.kernel, False, layout)
        self.state = layout.take(m.heads * m.head_dim)
        self.rates = -8 * F.softplus(weights[f"{at}.rate"])

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        dtype = x.dtype
        x, y = self.inward(x).chunk(2, -1)
        x = self.convolution(x, batch, cache)
        heads_NHD = x.to(dtype).view(len(x), self.mixer.heads, -1)
        gates = torch.einsum("ghij,nhj->gnhi", self.gates_2HDD, heads_NHD).flatten(2) + self.gates_bias
        i, r = gates.float().sigmoid()
        decays = r * self.rates
        root = (-torch.expm1(2 * decays)).sqrt().masked_fill(batch.positions[:, None] == 0, 1.0)
        made = self.state.through(batch, cache, accumulated, decays.exp(), root * i * x)
        return made.to(dtype) * ACTIVATIONS[self.mixer.activation](y)


RecurrentMixer = ShortConvolution | LinearHeads | Scan | GatedUnit


def recurrent_mixer(
    mixer: Recurrent, weights: DeviceWeights, at: str, layout: StateLayout, ranks: Ranks | None
) -> RecurrentMixer:
    if isinstance(mixer, ShortConv):
        return ShortConvolution(mixer, weights, at, layout)
    if isinstance(mixer, SelectiveScan):
        return Scan(mixer, weights, at, layout, ranks)
    if isinstance(mixer, GatedLru):
        return GatedUnit(mixer, weights, at, layout)
    return LinearHeads(mixer, weights, at, layout, ranks)

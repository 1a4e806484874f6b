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
from anyaccel.inference.device.kernels.choice import Kernels, kernels_of
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
        in_place: Callable[..., torch.Tensor] | None = None,
        prompts: bool = False,
    ) -> torch.Tensor:
        """What is made of all tokens' rows; the states are those behind them then.

        Args:
            advance: see `recurrence.py`.
            in_place: the same by kernels, of all states and the sequences' numbers; of single tokens, or `prompts` too.
        """
        whole = torch.unflatten(cache.states[:, self.own], 1, self.shape)
        kernels = None if in_place is None else kernels_of(whole.device)
        made = []
        for group in batch.groups:
            size = (group.sequences, group.queries)
            own = [each[group.first : group.first + math.prod(size)] for each in rows]
            if kernels is not None and in_place is not None and (prompts or group.queries == 1):
                made.append(in_place(kernels, whole, group.states, *own))
                continue
            y, state = advance(whole.index_select(0, group.states), *(torch.unflatten(each, 0, size) for each in own))
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
        return self.window.through(batch, cache, advance, x, in_place=self._in_place)

    def _in_place(
        self, kernels: Kernels, windows: torch.Tensor, numbers: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        return kernels.convolve(windows, numbers, x, self.taps, self.bias, self.silu)


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
        self.steps = None if m.slopes else Linear(weights, f"{at}.steps")
        self.rates = -(torch.tensor(m.slopes, device=weights.device) if m.slopes else weights[f"{at}.rate"].exp())
        self.step_bias = self.rates if m.slopes else weights[f"{at}.step_bias"]
        self.step_up = Linear(weights, f"{at}.step_up") if m.decay_rank else None
        self.gate_up = Linear(weights, f"{at}.gate_up") if m.gate_rank else None
        self.norm = normed(m.norm, weights, f"{at}.norm")
        self.skip = weights[f"{at}.skip"] if m.skip else None

    def __call__(self, x: torch.Tensor, batch: Batch, cache: KvPages) -> torch.Tensor:
        m, convolved = self.mixer, 2 * self.keys + self.values
        made = self.inward(x)
        qkv, gate = made[:, :convolved], made[:, convolved:]
        qkv = qkv.float() if self.convolution is None else self.convolution(qkv, batch, cache)
        if m.silu:
            qkv = F.silu(qkv)
        inputs = qkv if self.steps is None else self.steps(x)
        channels = inputs if self.step_up is None else self.step_up(inputs[:, : m.decay_rank].to(x.dtype))
        if self.gate_up is not None:
            gate = self.gate_up(inputs[:, m.decay_rank + m.heads :].to(x.dtype))
        y = self.state.through(batch, cache, self._advanced, qkv, inputs, channels, in_place=self._in_place)
        return self._finished(y, gate.float()).to(x.dtype)

    def _in_place(
        self, kernels: Kernels, states: torch.Tensor, numbers: torch.Tensor, *rows: torch.Tensor
    ) -> torch.Tensor:
        return kernels.attend_linearly(self.mixer, states, numbers, *rows, self.rates, self.step_bias, self.skip)

    def _advanced(
        self, state: torch.Tensor, qkv_BTx: torch.Tensor, inputs_BTx: torch.Tensor, channels_BTx: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.mixer
        size = qkv_BTx.shape[:2]
        q, k, v = torch.split(qkv_BTx, [self.keys, self.keys, self.values], -1)
        q, k = (self._for_heads(each.view(*size, m.key_heads, m.key_dim)) for each in (q, k))
        v = v.view(*size, m.heads, m.value_dim)
        decays, strengths = self._steps(inputs_BTx, channels_BTx)
        y, state = attended(state, q * m.scale, k, v, decays, strengths, m.delta)
        if self.skip is not None:
            y = torch.addcmul(y, self.skip[:, None], v)
        return y.flatten(2), state

    def _for_heads(self, x_BTHK: torch.Tensor) -> torch.Tensor:
        """Of each head of values."""
        m = self.mixer
        if m.l2_norm:
            x_BTHK = x_BTHK * torch.rsqrt(x_BTHK.square().sum(-1, keepdim=True) + _L2_EPS)
        each = m.heads // m.key_heads
        return x_BTHK.repeat(1, 1, each, 1) if m.tiled else x_BTHK.repeat_interleave(each, 2)

    def _steps(self, inputs: torch.Tensor, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms of decays, [B, T, heads, 1 or key_dim], and strengths [B, T, heads]."""
        m = self.mixer
        if m.slopes:
            ones = inputs.new_ones(*inputs.shape[:2], m.heads)
            return (ones * self.rates)[..., None], ones
        strengths = inputs[..., (m.decay_rank or m.heads) :][..., : m.heads].sigmoid() * m.strength_scale
        if m.decay_rank:
            steps = F.softplus(channels.float() + self.step_bias)
            return self.rates[:, None] * steps.view(*steps.shape[:2], m.heads, m.key_dim), strengths
        steps = F.softplus(inputs[..., : m.heads] + self.step_bias).clamp(m.step_min, m.step_max or None)
        return (self.rates * steps)[..., None], steps if m.strength == "step" else strengths

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
        advance = functools.partial(scanned, rates_CN=self.rates)
        y = self.state.through(batch, cache, advance, steps, x, b, c, in_place=self._in_place, prompts=True)
        return (torch.addcmul(y, self.skip, x) * F.silu(gate.float())).to(dtype)

    def _in_place(
        self, kernels: Kernels, states: torch.Tensor, numbers: torch.Tensor, *rows: torch.Tensor
    ) -> torch.Tensor:
        return kernels.scan(states, numbers, *rows, self.rates)


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

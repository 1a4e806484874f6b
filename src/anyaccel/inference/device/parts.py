# SPDX-License-Identifier: Apache-2.0
"""What layers are made of: products, norms, MLPs and experts, each in as few operators as torch has."""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from anyaccel.inference.device.activations import activated, xielu
from anyaccel.inference.device.kernels.choice import Kernels, kernels_of
from anyaccel.inference.device.quantised import Quantised
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import Mlp, Moe, Norm

# Rows of experts' features that may be gathered at once: of as many tokens, each with its experts, a copy of these
# experts' weights costs no more than reading all.
GATHERED = 8


class Ranks(Protocol):
    """The other ranks of tensor parallelism."""

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, which may be in the place of this one."""

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of the ranks' parts of it."""


class Linear:
    """y = x Wᵀ + bias. A router's is in float32 whatever x is.

    Args:
        bias: its name, where it is not the weight's.

    Attributes:
        norm: of x, before the product; of one token it is part of the kernel where there is one.
    """

    def __init__(self, weights: DeviceWeights, name: str, bias: str = "") -> None:
        self.weight = weights.matrix(name)
        self.bias = weights.get(bias or f"{name}.bias")
        self.norm: Normed | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = None
        if self.norm is not None:
            norm = self.norm.in_product if len(x) == 1 else None
            if norm is None or not self._takes_norm(x):
                x, norm = self.norm(x), None
        if isinstance(self.weight, Quantised):
            return self.weight(x, self.bias, norm)
        x = x.to(self.weight.dtype)
        kernels = self._kernels(x)
        if kernels is not None:
            return kernels.product(x, self.weight, bias=self.bias, norm=norm)
        return F.linear(x, self.weight, self.bias)

    def _takes_norm(self, x: torch.Tensor) -> bool:
        if isinstance(self.weight, Quantised):
            return self.weight.takes_norm(x)
        return x.dtype is self.weight.dtype and self._kernels(x) is not None

    def _kernels(self, x: torch.Tensor) -> Kernels | None:
        """Those that multiply one token by floats sooner than the vendor's product."""
        if len(x) != 1 or x.stride(1) != 1 or isinstance(self.weight, Quantised) or not self.weight.is_contiguous():
            return None
        return kernels_of(x.device)

    def added(self, h: torch.Tensor, x: torch.Tensor, factor: float, ranks: Ranks | None) -> torch.Tensor:
        """h + factor * (this of x), of all ranks: each has a part of the columns."""
        if ranks is not None:
            return torch.add(h, ranks.add(self(x)), alpha=factor)
        if isinstance(self.weight, Quantised):
            return self.weight.added(h, x, factor, self.bias)
        kernels = self._kernels(x) if x.dtype is self.weight.dtype and h.stride(1) == 1 else None
        if kernels is not None:
            return kernels.product(x, self.weight, bias=self.bias, residual=h, factor=factor)
        if self.bias is not None:
            h = torch.add(h, self.bias, alpha=factor)
        return torch.addmm(h, x, self.weight.t(), alpha=factor)


class Normed:
    """A norm over the last dimension."""

    def __init__(self, norm: Norm, weights: DeviceWeights, name: str) -> None:
        self.norm = norm
        self.weight = weights[f"{name}.weight"] if norm.weight else None
        self.bias = weights[f"{name}.bias"] if norm.bias else None
        # What a product's kernel takes of it.
        self.in_product = (self.weight, norm.eps) if norm.kind == "rms" and not norm.bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kernels = kernels_of(x.device)
        if kernels is not None and x.dim() == 2 and x.stride(1) == 1 and x.shape[1] <= kernels.widest:
            return kernels.norm(x, self.weight, self.bias, self.norm.eps, self.norm.kind == "layer")
        if self.norm.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.norm.eps)
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.norm.eps)
        return y if self.bias is None else y + self.bias

    def of_sum(self, residual: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + scale * y, both [tokens, width], and the norm of that."""
        kernels = kernels_of(residual.device)
        if kernels is not None and y.dtype is residual.dtype and y.shape[1] <= kernels.widest:
            layer = self.norm.kind == "layer"
            return kernels.add_norm(residual, y, scale, self.weight, self.bias, self.norm.eps, layer)
        total = torch.add(residual, y, alpha=scale)
        return total, self(total)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Without weight and bias."""
        if self.norm.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], eps=self.norm.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.norm.eps)


def normed(norm: Norm | None, weights: DeviceWeights, name: str) -> Normed | None:
    return None if norm is None else Normed(norm, weights, name)


def sums_of(x: torch.Tensor, ranks: Ranks, copies: int = 1) -> torch.Tensor:
    """[3, rows, 1]: mean, mean of squares and number of the values of rows that ranks divide, in float32.

    Args:
        copies: ranks that have the same ones.
    """
    own = x.float()
    sums = torch.stack([own.sum(-1), own.square().sum(-1), torch.full_like(own[:, 0], x.shape[-1])])
    added = ranks.add(sums / copies)[..., None]
    return torch.cat([added[:2] / added[2], added[2:]])


def normed_of_ranks(norm: Normed, x: torch.Tensor, ranks: Ranks | None, copies: int = 1) -> torch.Tensor:
    """One norm over rows that ranks divide; `copies` ranks have the same part of it."""
    if ranks is None:
        return norm(x)
    mean, squares, _ = sums_of(x, ranks, copies)
    if norm.norm.kind == "rms":
        mean = torch.zeros_like(mean)
    y: torch.Tensor = ((x.float() - mean) * torch.rsqrt(squares - mean.square() + norm.norm.eps)).to(x.dtype)
    y = y if norm.weight is None else y * norm.weight
    return y if norm.bias is None else y + norm.bias


class Dense:
    """An MLP that every token goes through."""

    def __init__(self, mlp: Mlp, weights: DeviceWeights, name: str, ranks: Ranks | None = None) -> None:
        self.mlp, self.ranks = mlp, ranks
        self.gate_up = Linear(weights, f"{name}.gate_up")
        self.down = Linear(weights, f"{name}.down")
        self.values = weights[f"{name}.act"] if mlp.activation == "xielu" else None
        self.norm = normed(mlp.norm, weights, f"{name}.norm")

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate_up(x)
        if self.mlp.cutoff is not None:
            y = self._cut(y, self.mlp.cutoff)
        y = activated(self.mlp, y) if self.values is None else xielu(y, self.values)
        return y if self.norm is None else normed_of_ranks(self.norm, y, self.ranks)

    def _cut(self, gate_up: torch.Tensor, cutoff: float) -> torch.Tensor:
        """With gates of which is left what is so many standard deviations above their mean."""
        gate, up = gate_up.chunk(2, -1)
        if self.ranks is None:
            deviation, mean = torch.std_mean(gate.float(), -1, correction=0, keepdim=True)
        else:
            mean, squares, _ = sums_of(gate, self.ranks)
            deviation = (squares - mean.square()).clamp(min=0).sqrt()
        return torch.cat([F.relu(gate - (mean + cutoff * deviation)).to(up.dtype), up], -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A rank's part of the result."""
        return self.down(self._features(x))

    def added(self, h: torch.Tensor, x: torch.Tensor, factor: float, ranks: Ranks | None) -> torch.Tensor:
        return self.down.added(h, self._features(x), factor, ranks)


def rows_of(matrix: torch.Tensor | Quantised, numbers: torch.Tensor) -> torch.Tensor:
    """Rows, or of stacked matrices some of them, as floats."""
    return matrix.of_rows(numbers) if isinstance(matrix, Quantised) else matrix.index_select(0, numbers)


def _entry(stack: torch.Tensor | Quantised, index: int) -> torch.Tensor:
    return stack.entry(index) if isinstance(stack, Quantised) else stack[index]


def sparsemixer(moe: Moe, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and factors of the experts that are chosen one by one: see Moe in spec/decoder.py."""
    left, chosen, factors = logits, [], []
    for _ in range(moe.top_k):
        best, number = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * moe.jitter
        chosen.append(number)
        factors.append(left.masked_fill(far, -math.inf).softmax(-1).gather(-1, number))
        left = left.scatter(-1, number, -math.inf)
    return torch.cat(chosen, -1), torch.cat(factors, -1) * moe.scale


class Experts:
    """A mixture of experts. Few tokens gather the weights of theirs; many go through one expert after the other."""

    def __init__(self, moe: Moe, weights: DeviceWeights, at: str) -> None:
        self.moe = moe
        self.router = Linear(weights, f"{at}.router")
        self.choice_bias = weights.get(f"{at}.router.choice_bias")
        self.gate_up, self.down = (weights.stack(f"{at}.experts.{name}") for name in ("gate_up", "down"))
        self.gate_up_bias, self.down_bias = (
            weights.stacked_vectors(f"{at}.experts.{name}.bias") for name in ("gate_up", "down")
        )
        self._by_scores = self.choice_bias is None and moe.top_groups >= moe.groups
        self.shared = None if moe.shared is None else Dense(moe.shared, weights, f"{at}.shared")
        self.shared_gate = Linear(weights, f"{at}.shared_gate") if moe.shared_gate else None
        self.router_norm = normed(moe.router_norm, weights, f"{at}.router_norm")
        self.experts_norm = normed(moe.experts_norm, weights, f"{at}.experts_norm")
        self.post_norm = normed(moe.post_norm, weights, f"{at}.experts_post_norm")
        self.shared_post_norm = normed(moe.shared_post_norm, weights, f"{at}.shared_post_norm")
        self.expert_scale = weights.get(f"{at}.router.expert_scale")
        self.own_norms = moe.router_norm is not None or moe.experts_norm is not None or moe.post_norm is not None

    def added(self, h: torch.Tensor, x: torch.Tensor, factor: float, ranks: Ranks | None) -> torch.Tensor:
        if ranks is None and self.shared is None and len(x) <= GATHERED:
            factors_N1E, y_NEC = self._few(x, *self.route(x))
            return torch.baddbmm(h[:, None], factors_N1E, y_NEC, alpha=factor)[:, 0]
        y = self(x)
        return torch.add(h, y if ranks is None else ranks.add(y), alpha=factor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._routed(x, *self.route(x))
        return y if self.shared is None else torch.add(y, self._shared(x), alpha=self.moe.shared_scale)

    def of_residual(self, h: torch.Tensor, x: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
        """With norms of the residual `h` beside the layer's norm of it, `x`; the result is of all ranks."""
        of_router = x if self.router_norm is None else self.router_norm(h)
        own = x if self.experts_norm is None else self.experts_norm(h)
        y = self._routed(own, *self.route(of_router))
        if self.shared is None or self.shared_post_norm is None or self.post_norm is None:
            y = y if self.shared is None else torch.add(y, self._shared(x), alpha=self.moe.shared_scale)
            return y if ranks is None else ranks.add(y)
        both = torch.stack([y, self._shared(x) * self.moe.shared_scale])
        y, shared = both if ranks is None else ranks.add(both)
        return self.post_norm(y) + self.shared_post_norm(shared)

    def _routed(self, x: torch.Tensor, chosen_NE: torch.Tensor, factors_NE: torch.Tensor) -> torch.Tensor:
        if len(x) <= GATHERED:
            return torch.bmm(*self._few(x, chosen_NE, factors_NE))[:, 0]
        return self._many(x, chosen_NE, factors_NE)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x)).to(shared.dtype)
        return shared

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and factors of the experts of each token."""
        moe = self.moe
        scores = self.router(x)
        if moe.logit_scale != 1.0:
            scores = scores * moe.logit_scale
        if moe.scoring == "sparsemixer":
            return sparsemixer(moe, scores)
        # A softmax that is divided by the sum of the chosen ones is the softmax of these alone.
        late = moe.softmax_after or (self._by_scores and moe.scoring == "softmax" and moe.normalise)
        if moe.scoring == "softmax" and not late:
            scores = scores.softmax(-1)
        elif moe.scoring == "sigmoid":
            scores = scores.sigmoid()
        if self._by_scores:
            factors, chosen = scores.topk(moe.top_k, -1)
        else:
            chosen = self._choice(scores).topk(moe.top_k, -1).indices
            factors = scores.gather(-1, chosen)
        if late:
            factors = factors.softmax(-1)
        elif moe.normalise:
            factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
        if self.expert_scale is not None:
            factors = factors * self.expert_scale[chosen]
        return chosen, factors * moe.scale if moe.scale != 1.0 else factors

    def _choice(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are chosen by, where that is not their scores alone."""
        moe = self.moe
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        if moe.top_groups < moe.groups:
            grouped = choice.view(len(scores), moe.groups, -1)
            pair = moe.group_score == "top2" and grouped.shape[-1] > 1
            best = grouped.topk(2, -1).values.sum(-1) if pair else grouped.amax(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(moe.top_groups, -1).indices, True)
            choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
        return choice

    def _few(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors [tokens, 1, experts] and results [tokens, experts, values], whose product is the mixture."""
        tokens, each = chosen.shape
        flat = chosen.flatten()
        rows = x[:, None].expand(-1, each, -1).reshape(tokens * each, -1, 1)
        y = torch.bmm(rows_of(self.gate_up, flat), rows)[..., 0]
        if self.moe.scale_input:
            y = y * factors.to(y.dtype).view(-1, 1)
            factors = torch.ones_like(factors)
        if self.gate_up_bias is not None:
            y = y + self.gate_up_bias.index_select(0, flat)
        features = activated(self.moe.expert, y)[..., None]
        y = torch.bmm(rows_of(self.down, flat), features)[..., 0]
        if self.down_bias is not None:
            y = y + self.down_bias.index_select(0, flat)
        return factors.to(y.dtype)[:, None], y.view(tokens, each, -1)

    def _many(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Tokens in the order of their experts; how many each expert has is the one thing the host must know."""
        each = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.moe.experts, dtype=torch.int64, device=x.device)
        counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        token = order // each
        rows = x.index_select(0, token)
        row_factors = factors.flatten().index_select(0, order).to(x.dtype)[:, None]
        parts = []
        first = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
                y = F.linear(rows[first : first + count], _entry(self.gate_up, expert), bias)
                if self.moe.scale_input:
                    y = y * row_factors[first : first + count]
                y = activated(self.moe.expert, y)
                parts.append(
                    F.linear(y, _entry(self.down, expert), None if self.down_bias is None else self.down_bias[expert])
                )
            first += count
        y = torch.cat(parts)
        y = y if self.moe.scale_input else y * row_factors
        return torch.zeros_like(x).index_add_(0, token, y)

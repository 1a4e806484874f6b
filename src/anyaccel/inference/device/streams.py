# SPDX-License-Identifier: Apache-2.0
"""Several residuals of a token, and a low-rank way beside attention: Streams and Laurel in spec/decoder.py.

Suffixes: N tokens of a batch, S streams, D values of the residual.
"""

from __future__ import annotations

import torch

from anyaccel.inference.device.parts import Linear, Normed
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import Laurel, Streams

_LEAST_SQUARE = 1e-5  # of a mean of squares that is divided by


class LowRank:
    """What comes beside attention."""

    def __init__(self, laurel: Laurel, weights: DeviceWeights, at: str) -> None:
        self.laurel = laurel
        self.down, self.up = Linear(weights, f"{at}.laurel_down"), Linear(weights, f"{at}.laurel_up")
        self.norm = Normed(laurel.norm, weights, f"{at}.laurel_norm")

    def joined(self, h: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual behind attention, which has read x."""
        return self.laurel.scale * (h + attended + x + self.norm(self.up(self.down(x))))


class StreamsOfLayer:
    """Before a layer and behind it."""

    def __init__(self, streams: Streams, weights: DeviceWeights, at: str) -> None:
        count = streams.count
        self.norm = Normed(streams.norm, weights, f"{at}.stream_norm")
        self.router = weights[f"{at}.stream_router"].view(count, -1)
        self.predict = weights[f"{at}.stream_predict"].view(count * count, count)
        self.correct = weights[f"{at}.stream_correct"].view(count, count)
        self.scale = weights[f"{at}.stream_scale"] if streams.scaled else None

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((self.norm(x) / x.shape[-1]) @ self.router.t())

    def predicted(self, h_NSD: torch.Tensor) -> torch.Tensor:
        """Streams before the layer."""
        count = h_NSD.shape[1]
        factors = (self._routed(h_NSD[:, 0]) @ self.predict.t()).view(-1, count, count)
        return torch.baddbmm(h_NSD, factors, h_NSD)

    def corrected(self, h_NSD: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Streams behind the layer, which made that of the first one."""
        factors = 1 + self._routed(made) @ self.correct.t()
        return h_NSD + factors[..., None] * (made - h_NSD[:, 0])[:, None]

    def read(self, h_NSD: torch.Tensor) -> torch.Tensor:
        """What the gate of the layer's inputs reads."""
        return h_NSD[:, 0] if self.scale is None else h_NSD[:, 0] * self.scale


class StreamsOfModel:
    """Before the first layer and behind the last one."""

    def __init__(self, count: int, weights: DeviceWeights) -> None:
        self.count = count
        self.inward, self.outward = Linear(weights, "streams_in"), Linear(weights, "streams_out")

    def opened(self, h: torch.Tensor) -> torch.Tensor:
        """[N, S, D] of embeddings."""
        others = self.inward(h).view(len(h), self.count - 1, -1)
        return torch.cat([h[:, None], _as_large(others, h[:, None])], 1)

    def closed(self, h_NSD: torch.Tensor) -> torch.Tensor:
        """The residuals, of streams."""
        tokens, others = len(h_NSD), self.count - 1
        # Each stream has some of the rows; these are few tokens, of which the head makes logits.
        each = self.outward(h_NSD[:, 1:].reshape(tokens * others, -1)).view(tokens, others, others, -1)
        own = each.diagonal(dim1=1, dim2=2).transpose(1, 2)
        first = h_NSD[:, :1]
        return torch.cat([first, _as_large(own, first)], 1).mean(1)


def _as_large(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """x with the root mean square of `target`."""
    wanted = target.float().square().mean(-1, keepdim=True).sqrt()
    size = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return (x * (wanted / size)).to(x.dtype)

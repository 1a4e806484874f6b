# SPDX-License-Identifier: Apache-2.0
"""Which tokens latent attention sees: see Indexer in spec/decoder.py.

Letters: B sequences, T queries of each, S tokens of the context, H heads and D values of the indexer, K chosen tokens.
"""

from __future__ import annotations

import math

import torch

from anyaccel.inference.device.batch import Batch, Group
from anyaccel.inference.device.pages import PAGE, KvPages
from anyaccel.inference.device.parts import Linear, Normed
from anyaccel.inference.device.rotary import turn
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import Indexer

_MOST_SCORES = 1 << 26  # of all heads at once: more queries come in parts


class TokenIndexer:
    """The indexer of a layer.

    Args:
        place: of its keys in the cache.
        first: the first value of a head that turns.
    """

    def __init__(self, indexer: Indexer, weights: DeviceWeights, at: str, place: int, first: int) -> None:
        self.indexer, self.place, self.first = indexer, place, first
        self.q, self.k, self.weights = (Linear(weights, f"{at}.index_{name}") for name in ("q", "k", "weights"))
        self.norm = Normed(indexer.norm, weights, f"{at}.index_norm")

    def choose(self, x: torch.Tensor, latent: torch.Tensor, batch: Batch, cache: KvPages) -> None:
        """Say in each group of the batch what its tokens see.

        Args:
            x: the layer's input, [tokens, hidden].
            latent: that of the queries, [tokens, rank].
        """
        own = self.indexer
        q_NHD = self.q(latent).view(len(x), own.heads, own.head_dim)
        k_N1D = self.norm(self.k(x))[:, None]
        if own.rope >= 0:
            for heads in (q_NHD, k_N1D):
                turn(heads, self.first, batch.angles[own.rope])
        layer = cache.layers[self.place]
        layer.view(-1, own.head_dim).index_copy_(0, batch.rows, k_N1D[:, 0])
        weights_NH = self.weights(x).float()
        for group in batch.groups:
            group.chosen = None
            if context_of(group) > own.top_k:
                rows = slice(group.first, group.first + group.sequences * group.queries)
                group.chosen = self._chosen(q_NHD[rows].float(), weights_NH[rows], layer, group)

    def _chosen(self, q_NHD: torch.Tensor, weights_NH: torch.Tensor, layer: torch.Tensor, group: Group) -> torch.Tensor:
        """Numbers [B, T, K]; of a shorter context some are behind it."""
        size = (group.sequences, group.queries)
        keys_BDS = seen_rows(layer, group).float().transpose(1, 2)
        q_BTHD, weights_BTH = torch.unflatten(q_NHD, 0, size), torch.unflatten(weights_NH, 0, size)
        count, heads = keys_BDS.shape[-1], self.indexer.heads
        at_S = torch.arange(count, device=layer.device)
        step = max(_MOST_SCORES // (group.sequences * heads * count), 1)
        found = []
        for first in range(0, group.queries, step):
            part = slice(first, first + step)
            scores_BTHS = torch.unflatten((q_BTHD[:, part].flatten(1, 2) @ keys_BDS).relu_(), 1, (-1, heads))
            scores_BTS = (weights_BTH[:, part, None] @ scores_BTHS)[:, :, 0]
            scores_BTS.masked_fill_(at_S > group.positions[:, part, None], -math.inf)
            found.append(scores_BTS.topk(self.indexer.top_k, sorted=False).indices)
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def context_of(group: Group) -> int:
    """How many tokens of each sequence `seen_rows` gives."""
    if group.pages is None or group.sequences == 1:
        return group.keys
    return (len(group.pages) // group.sequences - 1) * PAGE


def seen_rows(layer: torch.Tensor, group: Group) -> torch.Tensor:
    """The rows of a layer of the cache that are a group's contexts, [B, S, values]."""
    count = context_of(group)
    if group.pages is None:
        return layer.view(1, -1, layer.shape[-1])[:, group.begin : group.begin + count]
    return layer.index_select(0, group.pages).view(group.sequences, -1, layer.shape[-1])[:, :count]


def chosen_rows(layer: torch.Tensor, group: Group, chosen_BK: torch.Tensor) -> torch.Tensor:
    """Those of chosen tokens, [B, K, values]."""
    if group.pages is None:
        rows = group.begin + chosen_BK
    else:
        rows = group.pages.view(group.sequences, -1).gather(1, chosen_BK // PAGE) * PAGE + chosen_BK % PAGE
    return layer.view(-1, layer.shape[-1]).index_select(0, rows.flatten()).view(*chosen_BK.shape, -1)

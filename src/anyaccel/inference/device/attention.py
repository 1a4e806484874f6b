# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages of a cache: torch's scaled_dot_product_attention with the masks that a layer needs.

Letters: B sequences, T queries of each, S keys, K key/value heads, G query heads of each, D and V values of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from anyaccel.inference.device.batch import Batch, Group
from anyaccel.inference.device.indexer import chosen_rows
from anyaccel.inference.device.kernels.choice import Kernels, kernels_of
from anyaccel.inference.device.pages import PAGE
from anyaccel.inference.spec.decoder import Attention


def attend(
    a: Attention, q_NHD: torch.Tensor, layer: torch.Tensor, batch: Batch, sinks: torch.Tensor | None
) -> torch.Tensor:
    """What the tokens of a batch see, [tokens, heads * value_dim]; their own keys and values are in the cache.

    Args:
        layer: of the cache, [pages, PAGE, values of a token].
    """
    parts = [_attend(a, q_NHD, layer, group, sinks) for group in batch.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    a: Attention, q_NHD: torch.Tensor, layer: torch.Tensor, group: Group, sinks: torch.Tensor | None
) -> torch.Tensor:
    count, queries, per_head = group.sequences, group.queries, a.heads // a.kv_heads
    if a.indexer is not None and group.chosen is not None and queries == 1:
        return _attend_chosen(a, q_NHD[group.first : group.first + count], layer, group, group.chosen[:, 0])
    kernels = kernels_of(q_NHD.device) if queries == 1 else None
    if kernels is not None and q_NHD.stride(1) == a.head_dim and q_NHD.stride(2) == 1:
        return _attend_paged(kernels, a, q_NHD[group.first : group.first + count], layer, group, sinks)
    keys = group.keys
    if group.pages is None:
        kv = layer.view(1, -1, layer.shape[-1])[:, group.begin : group.begin + keys]
    else:
        kv = layer.index_select(0, group.pages).view(count, -1, layer.shape[-1])
        # Behind the pages of the longest comes page 0, whose first row is the key of the sink.
        keys = kv.shape[1] - PAGE if sinks is not None or count > 1 else keys
        kv = kv[:, : keys + (sinks is not None)]
    k_BKSD = kv[..., : a.kv_heads * a.head_dim].view(count, -1, a.kv_heads, a.head_dim).transpose(1, 2)
    v_BKSV = kv[..., a.kv_heads * a.head_dim :].view(count, -1, a.kv_heads, a.value_dim).transpose(1, 2)
    q = q_NHD[group.first : group.first + count * queries]
    if queries == 1:  # the heads of a group as queries of one key/value head: no kernel has to know of groups
        q_BKTD = q.view(count, a.kv_heads, per_head, a.head_dim)
    else:
        q_BKTD = q.view(count, queries, a.heads, a.head_dim).transpose(1, 2)
    mask = _mask(a, group, keys, q.dtype, sinks)
    grouped = queries > 1 and per_head > 1
    causal = isinstance(mask, str)
    if a.softcap:
        assert not isinstance(mask, str)
        out = _explicit(a, q_BKTD, k_BKSD, v_BKSV, mask, per_head if grouped else 1)
    else:
        out = F.scaled_dot_product_attention(
            q_BKTD,
            k_BKSD,
            v_BKSV,
            attn_mask=None if causal else mask,  # type: ignore[arg-type]
            is_causal=causal,
            scale=a.scale,
            enable_gqa=grouped,
        )
    if queries > 1:
        out = out.transpose(1, 2)
    return out.reshape(count * queries, a.heads * a.value_dim)


def _attend_chosen(
    a: Attention, q_BHD: torch.Tensor, layer: torch.Tensor, group: Group, chosen_BK: torch.Tensor
) -> torch.Tensor:
    """Single queries, of the tokens that each has chosen."""
    count = group.sequences
    k, v = torch.split(chosen_rows(layer, group, chosen_BK), [a.heads * a.head_dim, a.heads * a.value_dim], -1)
    out = F.scaled_dot_product_attention(
        q_BHD[:, :, None],
        k.view(count, -1, a.heads, a.head_dim).transpose(1, 2),
        v.view(count, -1, a.heads, a.value_dim).transpose(1, 2),
        attn_mask=(chosen_BK <= group.positions)[:, None, None],
        scale=a.scale,
    )
    return out.view(count, a.heads * a.value_dim)


def _attend_paged(
    kernels: Kernels, a: Attention, q_BHD: torch.Tensor, layer: torch.Tensor, group: Group, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Single queries, of pages that are read where they are."""
    pages = None if group.pages is None else group.pages.view(group.sequences, -1)
    return kernels.attend(
        q_BHD,
        layer,
        pages,
        group.begin // PAGE,
        -(-group.keys // PAGE),
        group.positions.view(-1),
        a.kv_heads,
        a.value_dim,
        a.scale,
        a.softcap,
        a.window,
        a.chunk,
        _slopes(a, group).view(-1) if a.alibi else None,
        sinks,
    )


def _explicit(
    a: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    repeats: int,
) -> torch.Tensor:
    """Attention with a soft cap on its scores, which torch's own operator has not."""
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = ((q * (a.scale / a.softcap)) @ k.transpose(-1, -2)).tanh_()
    scores = scores.mul_(a.softcap) if mask is None else torch.add(mask, scores, alpha=a.softcap)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _mask(
    a: Attention, group: Group, keys: int, dtype: torch.dtype, sinks: torch.Tensor | None
) -> torch.Tensor | str | None:
    """What hides keys: a tensor (one that is added to the scores where these are capped), "causal", or None."""
    window = a.window if 0 < a.window < group.keys else 0
    chunk = a.chunk if 0 < a.chunk < group.keys else 0
    if a.indexer is not None and group.chosen is not None:
        seen = torch.zeros(*group.chosen.shape[:2], keys, dtype=torch.bool, device=group.chosen.device)
        return _seen(group, keys, 0, 0) & seen.scatter_(2, group.chosen, True)[:, None]
    exact = keys == group.keys
    if group.plain and exact and not (window or chunk or a.alibi or sinks is not None):
        if group.plain == "all":
            return None
        if not a.softcap:
            return "causal"
    seen_B1TS = _seen(group, keys, window, chunk)
    if not a.alibi and sinks is None and not a.softcap:
        return seen_B1TS
    # Added to the scores: [B, K, G, S] for single queries, else [B, H, T, S].
    bias = _bias(a, group, seen_B1TS, keys, dtype)
    if sinks is not None:
        own = sinks.to(dtype).view(1, -1, 1, 1).expand(group.sequences, -1, group.queries, 1)
        bias = torch.cat([bias.expand(-1, a.heads, -1, -1), own], -1)
    if group.queries > 1 or bias.shape[1] == 1:
        return bias
    return bias.view(group.sequences, a.kv_heads, -1, bias.shape[-1])


def _seen(group: Group, keys: int, window: int, chunk: int) -> torch.Tensor:
    key = ("seen", keys, window, chunk)
    if key not in group.made:
        at_S = torch.arange(keys, device=group.positions.device)
        own_B1T1 = group.positions[:, None, :, None]
        seen = at_S <= own_B1T1
        if window:
            seen &= at_S > own_B1T1 - window
        if chunk:
            seen &= at_S // chunk == own_B1T1 // chunk
        group.made[key] = seen
    return group.made[key]


def _bias(a: Attention, group: Group, seen: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    key = ("bias", keys, a.window, a.chunk, a.alibi)
    if key not in group.made:
        device = group.positions.device
        hidden = torch.zeros((), dtype=torch.float32, device=device).masked_fill(~seen, -math.inf)
        if a.alibi:
            distance = torch.arange(keys, device=device) - group.positions[:, None, :, None]
            hidden = hidden + _slopes(a, group) * distance
            hidden = hidden.expand(-1, a.heads, -1, -1)
        group.made[key] = hidden.to(dtype)
    return group.made[key]


def _slopes(a: Attention, group: Group) -> torch.Tensor:
    key = ("slopes", a.alibi)
    if key not in group.made:
        slopes = torch.tensor(a.alibi, dtype=torch.float32).to(group.positions.device, non_blocking=True)
        group.made[key] = slopes.view(1, -1, 1, 1)
    return group.made[key]

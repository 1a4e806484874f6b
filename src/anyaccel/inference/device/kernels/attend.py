# SPDX-License-Identifier: Apache-2.0
"""Attention of single new tokens over the pages of the cache, which are read where they are.

The keys of a sequence are divided among programs, whose parts are put together by a second kernel (Flash-Decoding, Dao
et al., 2023); each keeps the largest score and the sum as it goes (Milakov and Gimelshein, 2018). `attention.py`
computes the same with torch's operators, of pages that it gathers.

Letters: B sequences, H heads, K key/value heads, G heads of each, D and V values of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 512  # as many as keep a large device busy
_LEAST_PAGES = 2  # of a part: smaller ones cost more to put together than they save


@triton.jit(do_not_specialize=["page_stride", "begin"])  # they change from step to step, and must not compile it anew
def _parts(
    q,
    cache,
    pages,
    positions,
    slopes,
    sinks,
    out,
    parts,
    q_stride,
    page_stride,
    begin,
    scale,
    softcap,
    window,
    chunk,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    b = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    G: tl.constexpr = HEADS // KV_HEADS
    position = tl.load(positions + b).to(tl.int32)
    least = 0
    if window > 0:
        least = tl.maximum(position - window + 1, 0)
    if chunk > 0:
        least = tl.maximum(position // chunk * chunk, least)
    first_page = least // PAGE
    count = position // PAGE + 1 - first_page
    each = tl.cdiv(count, SPLITS)
    first = first_page + split * each
    last = tl.minimum(first + each, position // PAGE + 1)

    g = tl.arange(0, BLOCK_G)
    head = kv * G + g
    of_group = g < G
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    s = tl.arange(0, PAGE)
    queries = tl.load(
        q + b.to(tl.int64) * q_stride + head[:, None] * D + d[None, :],
        mask=of_group[:, None] & (d < D)[None, :],
        other=0.0,
    )
    highest = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    sums = tl.zeros((BLOCK_G, BLOCK_V), tl.float32)
    for i in range(first, last):
        if PAGED:
            page = tl.load(pages + b * page_stride + i)
        else:
            page = begin + i
        rows = cache + page.to(tl.int64) * (PAGE * WIDTH) + s * WIDTH
        key = i * PAGE + s
        seen = (key <= position) & (key >= least)
        keys = tl.load(rows[:, None] + kv * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:  # tanh of the logistic function
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if ALIBI:
            slope = tl.load(slopes + head, mask=of_group, other=0.0)
            scores += slope[:, None] * (key - position).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(highest, tl.max(scores, 1))  # a page of the range has a key that is seen
        kept = tl.exp(highest - now)
        weights = tl.exp(scores - now[:, None])
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(
            rows[:, None] + KV_HEADS * D + kv * V + v[None, :], mask=seen[:, None] & (v < V)[None, :], other=0.0
        )
        sums = sums * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = now
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=of_group, other=0.0).to(tl.float32)
            now = tl.maximum(highest, sink)
            sums *= tl.exp(highest - now)[:, None]
            total = total * tl.exp(highest - now) + tl.exp(sink - now)
        y = sums / total[:, None]
        at = (b.to(tl.int64) * HEADS + head)[:, None] * V + v[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=of_group[:, None] & (v < V)[None, :])
    else:
        at = ((b * HEADS + head) * SPLITS + split) * (V + 2)
        tl.store(parts + at[:, None] + v[None, :], sums, mask=of_group[:, None] & (v < V)[None, :])
        tl.store(parts + at + V, highest, mask=of_group)
        tl.store(parts + at + V + 1, total, mask=of_group)


@triton.jit
def _together(
    parts,
    sinks,
    out,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    at = tl.program_id(0)  # sequence and head
    s = tl.arange(0, BLOCK_S)
    v = tl.arange(0, BLOCK_V)
    part = parts + (at * SPLITS + s) * (V + 2)
    there = s < SPLITS
    highest = tl.load(part + V, mask=there, other=-float("inf"))
    total = tl.load(part + V + 1, mask=there, other=0.0)
    sums = tl.load(part[:, None] + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0.0)
    most = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks + at % HEADS).to(tl.float32)
        most = tl.maximum(most, sink)
    kept = tl.exp(highest - most)  # 0 of a part without keys
    whole = tl.sum(total * kept, 0)
    if SINKS:
        whole += tl.exp(sink - most)
    y = tl.sum(sums * kept[:, None], 0) / whole
    tl.store(out + at.to(tl.int64) * V + v, y.to(out.dtype.element_ty), mask=v < V)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    pages: torch.Tensor | None,
    begin: int,
    most: int,
    positions: torch.Tensor,
    kv_heads: int,
    value_dim: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What single tokens see, [B, H * V]; their own keys and values are in the cache.

    Args:
        q: [B, H, D], the values of all heads of a sequence neighbours in memory.
        cache: [pages, PAGE, K * (D + V)], a power of two of tokens a page: the keys of all heads, then the values.
        pages: their numbers [B, pages of a sequence]; None, of one sequence: that of `begin` and those behind it.
        most: pages of the longest sequence, or an upper bound.
        positions: [B] of the tokens.
        window, chunk: how many of the latest keys are seen, and the size of pieces of the context; 0: all.
        slopes, sinks: [H], of ALiBi in float32, and scores of keys without a value.
    """
    count, heads, head_dim = q.shape
    page = cache.shape[1]
    out = q.new_empty(count, heads * value_dim)
    splits = min(-(-most // _LEAST_PAGES), max(_PROGRAMS // (count * kv_heads), 1), 128)
    splits = 1 << (splits.bit_length() - 1)  # few kernels for all lengths
    parts = q.new_empty((count * heads * splits * (value_dim + 2)) if splits > 1 else 1, dtype=torch.float32)
    block_v = triton.next_power_of_2(value_dim)
    _parts[(count, kv_heads, splits)](
        q,
        cache,
        positions if pages is None else pages,
        positions,
        q if slopes is None else slopes,
        q if sinks is None else sinks,
        out,
        parts,
        q.stride(0),
        0 if pages is None else pages.stride(0),
        begin,
        scale,
        softcap,
        window,
        chunk,
        PAGE=page,
        WIDTH=cache.shape[2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        V=value_dim,
        SPLITS=splits,
        PAGED=pages is not None,
        CAPPED=softcap > 0,
        ALIBI=slopes is not None,
        SINKS=sinks is not None,
        BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_V=max(16, block_v),
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _together[(count * heads,)](
            parts,
            q if sinks is None else sinks,
            out,
            HEADS=heads,
            V=value_dim,
            SPLITS=splits,
            SINKS=sinks is not None,
            BLOCK_S=splits,
            BLOCK_V=block_v,
            num_warps=4,
        )
    return out

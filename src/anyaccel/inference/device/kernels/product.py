# SPDX-License-Identifier: Apache-2.0
"""Products of few tokens with a matrix as it is stored, floats or whole numbers with scales: x Wᵀ, with what is added.

Reading the matrix is what such a product costs, so it is read once, in its own bits. One token is multiplied by fused
multiply-adds in float32; several share the matrix units, with the weights rounded to the dtype of x. More tokens are
multiplied by the vendor's product, of floats that `dequantised` writes where the matrix has none.

The sizes of blocks are those that were fastest on the device at hand, timed when a product of this size is first
computed; Triton keeps what it found beside the compiled kernels.

Letters: M tokens, N rows of the matrix, K columns, G columns of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

MOST_TOKENS = 64  # of a product
TIMED = not triton.knobs.runtime.interpret


def milliseconds(run: Callable[[], object], quantiles: Any = None) -> Any:
    """What a call takes on the device, the matrix not in its cache."""
    return triton.testing.do_bench(run, warmup=5, rep=20, quantiles=quantiles)


def _tuned(names: tuple[str, ...], key: list[str], *sizes: tuple[int, ...]) -> Any:
    """Have a kernel run with the fastest of these sizes, warps and stages; interpreted, with the first."""
    configs = [triton.Config(dict(zip(names, size, strict=False)), *size[len(names) :]) for size in sizes]
    kept = {"cache_results": True} if "cache_results" in inspect.signature(triton.autotune).parameters else {}
    return triton.autotune(configs if TIMED else configs[:1], key, do_bench=milliseconds, **kept)


@triton.jit
def _numbers(q, row, k, rows, cols, stored, BITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] values of the matrix from column k on, without scales; 0 beyond it."""
    if BITS == 4:
        at = k // 2 + tl.arange(0, BLOCK_K // 2)
        there = (row < rows)[:, None] & (2 * at < cols)[None, :]
        both = tl.load(q + row.to(tl.int64)[:, None] * stored + at[None, :], mask=there, other=0)
        return tl.reshape(tl.join(both >> 4, both & 15), (row.shape[0], BLOCK_K))
    start = q + row.to(tl.int64)[:, None] * stored
    at = k + tl.arange(0, BLOCK_K)
    return tl.load(start + at[None, :], mask=(row < rows)[:, None] & (at < cols)[None, :], other=0)


@triton.jit
def _of_groups(scales, minima, row, group, rows, groups, MINIMA: tl.constexpr):
    """Scales and minima of rows and groups, in float32."""
    there = (row < rows)[:, None] & (group < groups)[None, :]
    at = row[:, None] * groups + group[None, :]
    scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    least = tl.zeros_like(scale)
    if MINIMA:
        least = tl.load(minima + at, mask=there, other=0.0).to(tl.float32)
    return scale, least


@triton.jit
def _scaled(values, scale, least, G: tl.constexpr):
    """Numbers times the scales of their groups of G, with the minima."""
    n: tl.constexpr = values.shape[0]
    width: tl.constexpr = values.shape[1]
    y = tl.reshape(values.to(tl.float32), (n, width // G, G)) * scale[:, :, None] + least[:, :, None]
    return tl.reshape(y, (n, width))


@triton.jit
def _store_one(y, row, rows, bias, residual, out, factor, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    inside = row < rows
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y = tl.load(residual + row, mask=inside, other=0.0).to(tl.float32) + factor * y
    tl.store(out + row, y.to(out.dtype.element_ty), mask=inside)


@_tuned(
    ("BLOCK_N", "BLOCK_K"), ["rows", "COLS", "G"], (4, 1024, 4), (1, 1024, 4), (2, 1024, 4), (1, 2048, 8), (8, 1024, 8)
)
@triton.jit
def _one_token(
    x,
    q,
    scales,
    minima,
    bias,
    residual,
    norm,
    out,
    rows,
    stored,
    groups,
    factor,
    eps,
    COLS: tl.constexpr,
    SCALES: tl.constexpr,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Floats, and whole numbers of 8 bits."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    start = q + row.to(tl.int64)[:, None] * stored
    if G:
        sums = tl.zeros((BLOCK_N, BLOCK_K // G), tl.float32)
    else:
        sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    of_x = tl.zeros((BLOCK_K,), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(0, COLS, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        values = tl.load(start + at[None, :], mask=inside[:, None] & (at < COLS)[None, :], other=0)
        whole = tl.load(x + at, mask=at < COLS, other=0.0).to(tl.float32)
        if NORM:
            squares += whole * whole
            if NORM_WEIGHT:
                whole *= tl.load(norm + at, mask=at < COLS, other=0.0).to(tl.float32)
        part = values.to(tl.float32) * whole[None, :]
        if G:
            group = k // G + tl.arange(0, BLOCK_K // G)
            there = inside[:, None] & (group < groups)[None, :]
            of_group = row[:, None] * groups + group[None, :]
            part = tl.sum(tl.reshape(part, (BLOCK_N, BLOCK_K // G, G)), 2)
            sums += part * tl.load(scales + of_group, mask=there, other=0.0)
            if MINIMA:
                totals = tl.sum(tl.reshape(whole, (BLOCK_K // G, G)), 1)
                sums += tl.load(minima + of_group, mask=there, other=0.0) * totals[None, :]
        else:
            sums += part
            if MINIMA:
                of_x += whole
    y = tl.sum(sums, 1)
    if SCALES and not G:
        y *= tl.load(scales + row, mask=inside, other=0.0)
        if MINIMA:
            y += tl.load(minima + row, mask=inside, other=0.0) * tl.sum(of_x, 0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / COLS + eps)
    _store_one(y, row, rows, bias, residual, out, factor, BIAS, RESIDUAL)


@triton.jit
def _floats_of(word, i: tl.constexpr):
    """1 + u / 16 of the values u of four bits that words have at place i, counted from the low end.

    The bits become the highest of a float's mantissa, which takes two instructions; a conversion is four times as slow.
    """
    left: tl.constexpr = 19 - 4 * i
    if left >= 0:
        moved = word << left
    else:
        moved = word >> -left
    return ((moved & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _columns(x):
    """Eight times [M, W] of x [M, 8 W]: the columns that words have at each place, counted from the low end.

    Read as it lies in memory and divided in registers; columns that are read alone lie 16 bytes apart.
    """
    m: tl.constexpr = x.shape[0]
    w: tl.constexpr = x.shape[1] // 8
    even, odd = tl.split(tl.reshape(x, (m, w, 2, 2, 2)))  # the high half of an octet is the even column
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    x_0, x_4 = tl.split(even_0)
    x_2, x_6 = tl.split(even_1)
    x_1, x_5 = tl.split(odd_0)
    x_3, x_7 = tl.split(odd_1)
    return x_1, x_0, x_3, x_2, x_5, x_4, x_7, x_6


# Few warps: what the columns of x go through in shared memory is then no wait for others.
@_tuned(("BLOCK_N", "BLOCK_W"), ["rows", "COLS", "G"], (8, 128, 1), (4, 128, 1), (4, 256, 2), (8, 256, 2))
@triton.jit
def _one_token_words(
    x,
    q,
    scales,
    minima,
    bias,
    residual,
    norm,
    out,
    rows,
    words,
    groups,
    factor,
    eps,
    COLS: tl.constexpr,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Whole numbers of 4 bits, in words of 32. The words of a group are added before they are scaled."""
    EACH: tl.constexpr = G // 8 if G else 4
    GROUPS: tl.constexpr = BLOCK_W // EACH
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    start = q + row.to(tl.int64)[:, None] * words
    sums = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    of_x = tl.zeros((GROUPS,), tl.float32)
    squares = tl.zeros((BLOCK_W,), tl.float32)
    for w in range(0, (COLS + 7) // 8, BLOCK_W):
        at = w + tl.arange(0, BLOCK_W)
        word = tl.load(start + at[None, :], mask=inside[:, None] & (8 * at < COLS)[None, :], other=0)
        col = 8 * w + tl.arange(0, 8 * BLOCK_W)
        values = tl.load(x + col, mask=col < COLS, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(values * values, (BLOCK_W, 8)), 1)
            if NORM_WEIGHT:
                values *= tl.load(norm + col, mask=col < COLS, other=0.0).to(tl.float32)
        columns = _columns(values[None, :])
        part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        whole = tl.zeros((1, BLOCK_W), tl.float32)
        for i in tl.static_range(8):
            part += _floats_of(word, i) * columns[i]
            whole += columns[i]
        part = tl.sum(tl.reshape(part, (BLOCK_N, GROUPS, EACH)), 2)
        totals = tl.sum(tl.reshape(whole, (GROUPS, EACH)), 1)
        part = 16.0 * (part - totals[None, :])
        if G:
            group = w // EACH + tl.arange(0, GROUPS)
            scale, least = _of_groups(scales, minima, row, group, rows, groups, MINIMA)
            part *= scale
            if MINIMA:
                part += least * totals[None, :]
        elif MINIMA:
            of_x += totals
        sums += part
    y = tl.sum(sums, 1)
    if not G:
        y *= tl.load(scales + row, mask=inside, other=0.0)
        if MINIMA:
            y += tl.load(minima + row, mask=inside, other=0.0) * tl.sum(of_x, 0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / COLS + eps)
    _store_one(y, row, rows, bias, residual, out, factor, BIAS, RESIDUAL)


@triton.jit
def _store_few(
    sums,
    of_x,
    row,
    token,
    scales,
    minima,
    bias,
    residual,
    out,
    tokens,
    rows,
    residual_stride,
    factor,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """What comes behind the products of several tokens: the scales of rows, and what is added."""
    inside = row < rows
    y = sums
    if not G:
        y *= tl.load(scales + row, mask=inside, other=0.0)[None, :]
        if MINIMA:
            y += of_x[:, None] * tl.load(minima + row, mask=inside, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    both = (token < tokens)[:, None] & inside[None, :]
    if RESIDUAL:
        y = tl.load(residual + token[:, None] * residual_stride + row[None, :], mask=both, other=0.0) + factor * y
    tl.store(out + token[:, None] * rows + row[None, :], y.to(out.dtype.element_ty), mask=both)


@_tuned(
    ("BLOCK_N", "BLOCK_K"),
    ["rows", "COLS", "G", "BLOCK_M"],
    (32, 64, 4, 2),
    (32, 128, 4, 3),
    (32, 128, 4, 5),
    (64, 128, 4, 4),
    (64, 256, 8, 3),
)
@triton.jit(do_not_specialize=["tokens"])  # a batch of another size must not compile it anew
def _few_tokens(
    x,
    q,
    scales,
    minima,
    bias,
    residual,
    out,
    tokens,
    rows,
    stored,
    groups,
    x_stride,
    residual_stride,
    factor,
    COLS: tl.constexpr,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Whole numbers of 8 bits."""
    WIDTH: tl.constexpr = G if G > BLOCK_K else BLOCK_K
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_x = tl.zeros((BLOCK_M,), tl.float32)
    for k in range(0, COLS, WIDTH):
        at = k + tl.arange(0, WIDTH)
        values = tl.load(
            x + token[:, None] * x_stride + at[None, :],
            mask=(token < tokens)[:, None] & (at < COLS)[None, :],
            other=0.0,
        )
        if MINIMA and not G:
            of_x += tl.sum(values.to(tl.float32), 1)
        if G:
            group = k // G + tl.arange(0, WIDTH // G)
            scale, least = _of_groups(scales, minima, row, group, rows, groups, MINIMA)
        weights = _numbers(q, row, k, rows, COLS, stored, 8, WIDTH)
        if G:
            weights = _scaled(weights, scale, least, G)
        sums = tl.dot(values, tl.trans(weights.to(values.dtype)), sums, input_precision="ieee")
    _store_few(
        sums,
        of_x,
        row,
        token,
        scales,
        minima,
        bias,
        residual,
        out,
        tokens,
        rows,
        residual_stride,
        factor,
        G,
        MINIMA,
        BIAS,
        RESIDUAL,
    )


@triton.jit
def _add_product(sums, x, word, i: tl.constexpr, scale, least):
    weights = _floats_of(word, i) * scale + least
    return tl.dot(x, tl.trans(weights.to(x.dtype)), sums, input_precision="ieee")


@_tuned(
    ("BLOCK_N", "BLOCK_W"),
    ["rows", "COLS", "G", "BLOCK_M"],
    (32, 16, 4, 4),
    (64, 16, 4, 3),
    (32, 32, 4, 3),
    (128, 16, 4, 3),
)
@triton.jit(do_not_specialize=["tokens"])
def _few_tokens_words(
    x,
    q,
    scales,
    minima,
    bias,
    residual,
    out,
    tokens,
    rows,
    words,
    groups,
    x_stride,
    residual_stride,
    factor,
    COLS: tl.constexpr,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Whole numbers of 4 bits, in words of 32: what these have at each place is a product of its own."""
    EACH: tl.constexpr = G // 8 if G else BLOCK_W
    WIDTH: tl.constexpr = EACH if EACH > BLOCK_W else BLOCK_W
    GROUPS: tl.constexpr = WIDTH // EACH
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < rows
    token = tl.arange(0, BLOCK_M)
    start = q + row.to(tl.int64)[:, None] * words
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    of_x = tl.zeros((BLOCK_M,), tl.float32)
    for w in range(0, (COLS + 7) // 8, WIDTH):
        at = w + tl.arange(0, WIDTH)
        word = tl.load(start + at[None, :], mask=inside[:, None] & (8 * at < COLS)[None, :], other=0)
        col = 8 * w + tl.arange(0, 8 * WIDTH)
        values = tl.load(
            x + token[:, None] * x_stride + col[None, :],
            mask=(token < tokens)[:, None] & (col < COLS)[None, :],
            other=0.0,
        )
        if G:
            group = w // EACH + tl.arange(0, GROUPS)
            scale, least = _of_groups(scales, minima, row, group, rows, groups, MINIMA)
            scale = 16.0 * scale
            least -= scale
            scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, EACH)), (BLOCK_N, WIDTH))
            least = tl.reshape(tl.broadcast_to(least[:, :, None], (BLOCK_N, GROUPS, EACH)), (BLOCK_N, WIDTH))
        else:
            scale, least = 16.0, -16.0
            if MINIMA:
                of_x += tl.sum(values.to(tl.float32), 1)
        columns = _columns(values)
        for i in tl.static_range(8):
            sums = _add_product(sums, columns[i], word, i, scale, least)
    _store_few(
        sums,
        of_x,
        row,
        token,
        scales,
        minima,
        bias,
        residual,
        out,
        tokens,
        rows,
        residual_stride,
        factor,
        G,
        MINIMA,
        BIAS,
        RESIDUAL,
    )


@triton.jit
def _dequantise(
    q,
    scales,
    minima,
    out,
    rows,
    cols,
    stored,
    groups,
    BITS: tl.constexpr,
    G: tl.constexpr,
    MINIMA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K
    weights = _numbers(q, row, k, rows, cols, stored, BITS, BLOCK_K)
    inside = row < rows
    if G:
        group = k // G + tl.arange(0, BLOCK_K // G)
        scale, least = _of_groups(scales, minima, row, group, rows, groups, MINIMA)
        y = _scaled(weights, scale, least, G)
    else:
        y = weights.to(tl.float32) * tl.load(scales + row, mask=inside, other=0.0)[:, None]
        if MINIMA:
            y += tl.load(minima + row, mask=inside, other=0.0)[:, None]
    at = k + tl.arange(0, BLOCK_K)
    there = inside[:, None] & (at < cols)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * cols + at[None, :], y.to(out.dtype.element_ty), mask=there)


def product(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
    group: int = 0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    factor: float = 1.0,
    norm: tuple[torch.Tensor | None, float] | None = None,
) -> torch.Tensor:
    """x Wᵀ + bias, or with a residual: residual + factor * (x Wᵀ + bias).

    Args:
        x: [M, K], the values of a token neighbours in memory; M up to MOST_TOKENS, of floats 1.
        q: [N, K] floats; or int8; or uint8 [N, K / 2] in fours, whose high four bits are the value of the even column.
        scales, minima: [N, groups], float32 or halves; none of floats.
        group: columns of a group, a power of two from 16 to 256, where a row has several.
        residual: [M, N], the values of a token neighbours in memory.
        norm: weight [K] and epsilon of a root mean square norm of x, which is not rounded; of one token.
    """
    tokens, cols = x.shape
    rows, stored = q.shape
    groups = 0 if scales is None else scales.shape[-1]
    out = x.new_empty(tokens, rows)
    form = {"G": group if groups > 1 else 0, "MINIMA": minima is not None, "BIAS": bias is not None}
    form["RESIDUAL"] = residual is not None
    bits = 4 if q.dtype is torch.uint8 else 8
    if bits == 4:
        q = q.view(torch.int32)
        stored = q.shape[1]
    given = (x, q, x if scales is None else scales, x if minima is None else minima, x if bias is None else bias)
    to = x if residual is None else residual

    def grid(sizes: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(rows, sizes["BLOCK_N"]),)

    if tokens == 1:
        weight, eps = norm or (None, 0.0)
        form |= {"NORM": norm is not None, "NORM_WEIGHT": weight is not None}
        one = (*given, to, x if weight is None else weight, out, rows, stored, groups, factor, eps)
        if bits == 4:
            _one_token_words[grid](*one, COLS=cols, **form)
        else:
            _one_token[grid](*one, COLS=cols, SCALES=scales is not None, **form)
    elif tokens:
        assert norm is None
        block_m = max(16, triton.next_power_of_2(tokens))
        others = (to, out, tokens, rows, stored, groups, x.stride(0), to.stride(0), factor)
        kernel = _few_tokens_words if bits == 4 else _few_tokens
        kernel[grid](*given, *others, COLS=cols, BLOCK_M=block_m, **form)
    return out


def dequantised(
    q: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, group: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """[N, K] of whole numbers as `product` takes them, computed in float32 and rounded once."""
    rows, stored = q.shape
    groups = scales.shape[-1]
    out = torch.empty(rows, cols, dtype=dtype, device=q.device)
    block_n, block_k = 8, 512
    _dequantise[(triton.cdiv(rows, block_n), triton.cdiv(cols, block_k))](
        q,
        scales,
        scales if minima is None else minima,
        out,
        rows,
        cols,
        stored,
        groups,
        BITS=4 if q.dtype is torch.uint8 else 8,
        G=group if groups > 1 else 0,
        MINIMA=minima is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    return out

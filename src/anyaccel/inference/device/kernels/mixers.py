# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in the place where they lie: read once and written once. `recurrence.py` has the same in torch.

A state is float32, one of [states, ...] whose parts follow each other in memory; each sequence has its number of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anyaccel.inference.spec.decoder import LinearAttention

_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e  # log(u) e / (u - 1) is log(1 + e) also where u is rounded
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _convolve(
    windows,
    numbers,
    x,
    taps,
    bias,
    out,
    window_stride,
    x_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    window = windows + tl.load(numbers + b) * window_stride + at
    new = tl.load(x + b * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = new * tl.load(taps + (KERNEL - 1) * CHANNELS + at, mask=inside, other=0.0)
    for i in tl.static_range(KERNEL - 1):
        seen = tl.load(window + i * CHANNELS, mask=inside, other=0.0)
        y += seen * tl.load(taps + i * CHANNELS + at, mask=inside, other=0.0)
        if i > 0:
            tl.store(window + (i - 1) * CHANNELS, seen, mask=inside)
    if KERNEL > 1:
        tl.store(window + (KERNEL - 2) * CHANNELS, new, mask=inside)
    if BIAS:
        y += tl.load(bias + at, mask=inside, other=0.0)
    if SILU:
        y *= tl.sigmoid(y)
    tl.store(out + b * CHANNELS + at, y, mask=inside)


def convolve(
    windows: torch.Tensor,
    numbers: torch.Tensor,
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """`convolved` of one token of each sequence: float32 [sequences, channels].

    Args:
        windows: [states, kernel - 1, channels].
        x: the values of a token neighbours in memory.
    """
    kernel, channels = taps.shape
    out = torch.empty(len(x), channels, device=x.device)
    _convolve[(len(x), triton.cdiv(channels, 256))](
        windows,
        numbers,
        x,
        taps,
        taps if bias is None else bias,
        out,
        windows.stride(0),
        x.stride(0),
        CHANNELS=channels,
        KERNEL=kernel,
        BIAS=bias is not None,
        SILU=silu,
        BLOCK=256,
    )
    return out


@triton.jit
def _attend_linearly(
    states,
    numbers,
    qkv,
    inputs,
    channels,
    rates,
    biases,
    skip,
    out,
    state_stride,
    qkv_stride,
    inputs_stride,
    channels_stride,
    scale,
    strength_scale,
    step_min,
    step_max,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILED: tl.constexpr,
    DELTA: tl.constexpr,
    L2: tl.constexpr,
    SIGMOID: tl.constexpr,
    FIXED: tl.constexpr,
    RANK: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if TILED:
        of_keys = h % KEY_HEADS
    else:
        of_keys = h // (HEADS // KEY_HEADS)
    k_at = tl.arange(0, BLOCK_K)
    v_at = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_k, of_v = k_at < K, v_at < V
    row = qkv + b * qkv_stride
    q = tl.load(row + of_keys * K + k_at, mask=of_k, other=0.0).to(tl.float32)
    k = tl.load(row + (KEY_HEADS + of_keys) * K + k_at, mask=of_k, other=0.0).to(tl.float32)
    v = tl.load(row + 2 * KEY_HEADS * K + h * V + v_at, mask=of_v, other=0.0).to(tl.float32)
    if L2:
        q *= tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS)
        k *= tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
    rate = tl.load(rates + h)
    strength = 1.0
    if FIXED:
        decay = tl.exp(rate + tl.zeros((BLOCK_K,), tl.float32))
    else:
        own = inputs + b * inputs_stride + RANK
        if RANK > 0:
            at = h * K + k_at
            raw = tl.load(channels + b * channels_stride + at, mask=of_k, other=0.0).to(tl.float32)
            step = _softplus(raw + tl.load(biases + at, mask=of_k, other=0.0))
            strength = strength_scale * tl.sigmoid(tl.load(own + h))
        else:
            one = tl.maximum(_softplus(tl.load(own + h) + tl.load(biases + h)), step_min)
            if step_max > 0:
                one = tl.minimum(one, step_max)
            step = one + tl.zeros((BLOCK_K,), tl.float32)
            if SIGMOID:
                strength = strength_scale * tl.sigmoid(tl.load(own + HEADS + h))
            else:
                strength = one
        decay = tl.exp(rate * step)
    there = of_k[:, None] & of_v[None, :]
    place = states + tl.load(numbers + b) * state_stride + h * (K * V) + k_at[:, None] * V + v_at[None, :]
    state = tl.load(place, mask=there, other=0.0) * decay[:, None]
    written = v
    if DELTA:
        written = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (strength * written)[None, :]
    tl.store(place, state, mask=there)
    y = scale * tl.sum(state * q[:, None], 0)
    if SKIP:
        y += tl.load(skip + h) * v
    tl.store(out + (b * HEADS + h) * V + v_at, y, mask=of_v)


def attend_linearly(
    m: LinearAttention,
    states: torch.Tensor,
    numbers: torch.Tensor,
    qkv: torch.Tensor,
    inputs: torch.Tensor,
    channels: torch.Tensor,
    rates: torch.Tensor,
    biases: torch.Tensor,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """One token of each sequence through the heads of `m`: float32 [sequences, heads * value_dim].

    Args:
        states: [states, heads, key_dim, value_dim].
        qkv: [sequences, queries, keys and values], ready but for the length of queries and keys.
        inputs, channels: of steps, the second ones of each channel of the keys; without, anything.
        rates: [heads], of decays' logarithms; `biases` of steps.
    """
    out = torch.empty(len(qkv), m.heads * m.value_dim, device=qkv.device)
    block_k = triton.next_power_of_2(m.key_dim)
    block_v = min(triton.next_power_of_2(m.value_dim), max(16, 4096 // block_k))  # a tile of registers
    _attend_linearly[(len(qkv), m.heads, triton.cdiv(m.value_dim, block_v))](
        states,
        numbers,
        qkv,
        inputs,
        channels,
        rates,
        biases,
        rates if skip is None else skip,
        out,
        states.stride(0),
        qkv.stride(0),
        inputs.stride(0),
        channels.stride(0),
        m.scale,
        m.strength_scale,
        m.step_min,
        m.step_max,
        HEADS=m.heads,
        KEY_HEADS=m.key_heads,
        K=m.key_dim,
        V=m.value_dim,
        TILED=m.tiled,
        DELTA=m.delta,
        L2=m.l2_norm,
        SIGMOID=m.strength == "sigmoid",
        FIXED=bool(m.slopes),
        RANK=m.decay_rank,
        SKIP=skip is not None,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["tokens"])  # a prompt of another length must not compile it anew
def _scan(
    states,
    numbers,
    steps,
    x,
    b,
    c,
    rates,
    out,
    tokens,
    state_stride,
    b_stride,
    c_stride,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    inside, of_n = at < CHANNELS, n < N
    there = inside[:, None] & of_n[None, :]
    own = at[:, None] * N + n[None, :]
    place = states + tl.load(numbers + sequence) * state_stride + own
    state = tl.load(place, mask=there, other=0.0)
    rate = tl.load(rates + own, mask=there, other=0.0)
    for t in range(tokens):
        row = sequence * tokens + t
        step = tl.load(steps + row * CHANNELS + at, mask=inside, other=0.0)
        value = tl.load(x + row * CHANNELS + at, mask=inside, other=0.0)
        of_b = tl.load(b + row * b_stride + n, mask=of_n, other=0.0)
        of_c = tl.load(c + row * c_stride + n, mask=of_n, other=0.0)
        state = state * tl.exp(rate * step[:, None]) + (step * value)[:, None] * of_b[None, :]
        tl.store(out + row * CHANNELS + at, tl.sum(state * of_c[None, :], 1), mask=inside)
    tl.store(place, state, mask=there)


def scan(
    states: torch.Tensor,
    numbers: torch.Tensor,
    steps: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """`scanned` of as many tokens of each sequence, one sequence after the other: float32 [all tokens, channels].

    Args:
        states: [states, channels, state_dim].
        steps, x: [all tokens, channels], dense.
        b, c: [all tokens, state_dim], the values of a token neighbours in memory.
    """
    channels, state_dim = rates.shape
    out = torch.empty_like(x)
    _scan[(len(numbers), triton.cdiv(channels, 32))](
        states,
        numbers,
        steps,
        x,
        b,
        c,
        rates,
        out,
        len(x) // len(numbers),
        states.stride(0),
        b.stride(0),
        c.stride(0),
        CHANNELS=channels,
        N=state_dim,
        BLOCK_C=32,
        BLOCK_N=triton.next_power_of_2(state_dim),
    )
    return out

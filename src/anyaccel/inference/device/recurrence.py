# SPDX-License-Identifier: Apache-2.0
"""What recurrent states become as tokens pass, in torch's operators and in float32.

Each function takes a state and the new tokens of sequences, and gives their results and the next state. A prompt goes
through in chunks, whose tokens are multiplied together.

Letters: B sequences, T new tokens of each, H heads, K and V values of keys and values, C tokens of a chunk, N chunks or
values of a channel's state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_CHUNK = 64
_EXACT = 16  # tokens between which the decays of channels are multiplied one by one
_SCANNED = 32


def convolved(
    window_BTC: torch.Tensor, x_BTC: torch.Tensor, taps_TC: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A causal convolution of each channel alone. The window has the tokens that the first new one sees before it."""
    count = x_BTC.shape[1]
    seen_BTC = torch.cat([window_BTC, x_BTC.float()], 1)
    y = seen_BTC[:, :count] * taps_TC[0]
    for i in range(1, len(taps_TC)):
        y.addcmul_(seen_BTC[:, i : i + count], taps_TC[i])
    if bias is not None:
        y += bias
    return F.silu(y) if silu else y, seen_BTC[:, count:]


def attended(
    state_BHKV: torch.Tensor,
    q_BTHK: torch.Tensor,
    k_BTHK: torch.Tensor,
    v_BTHV: torch.Tensor,
    decays: torch.Tensor,
    strengths_BTH: torch.Tensor,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention, see LinearAttention in spec/decoder.py.

    Args:
        decays: logarithms of them, [B, T, H, K], or [B, T, H, 1] of all channels.
    """
    if q_BTHK.shape[1] > 1:
        return _in_chunks(state_BHKV, q_BTHK, k_BTHK, v_BTHV, decays, strengths_BTH, delta)
    q, k, v, decay = q_BTHK[:, 0, :, None], k_BTHK[:, 0, :, None], v_BTHV[:, 0, :, None], decays[:, 0]
    state = state_BHKV * decay.exp()[..., None]
    if delta:
        v = v - k @ state
    state = torch.addcmul(state, k.mT, v * strengths_BTH[:, 0, :, None, None])
    return (q @ state).mT.squeeze(-1)[:, None], state


def _in_chunks(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decays: torch.Tensor,
    strengths: torch.Tensor,
    delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks by the WY representation of the delta rule (Yang et al., 2024), with decays between any two tokens.

    What a token writes with the delta rule depends on what those before it in the chunk have written: one triangular
    system for each chunk, of which all are solved at once. Only states go from chunk to chunk.
    """
    tokens = q.shape[1]
    q, k, v, decays, strengths = (_chunks(each) for each in (q, k, v, decays, strengths[..., None]))  # [B, H, N, C, ..]
    sums = decays.cumsum(-2)
    left = (sums[..., -1:, :] - sums).exp() * k  # of a key at its chunk's end
    whole = sums[..., -1, :].exp()[..., None]
    since = sums.exp()
    written, corrected = v * strengths, None
    if delta:
        system = _decayed_products(k, k, sums) * strengths
        both = torch.cat([written, k * since * strengths], -1)
        both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        written, corrected = both.split([v.shape[-1], k.shape[-1]], -1)
    states, writes = [], []
    for n in range(q.shape[2]):
        write = written[:, :, n] if corrected is None else written[:, :, n] - corrected[:, :, n] @ state
        states.append(state)
        writes.append(write)
        state = whole[:, :, n] * state + left[:, :, n].mT @ write
    y = (q * since) @ torch.stack(states, 2) + _decayed_products(q, k, sums) @ torch.stack(writes, 2)
    return y.flatten(2, 3).transpose(1, 2)[:, :tokens], state


def _chunks(x_BTHx: torch.Tensor) -> torch.Tensor:
    """[B, H, N, C, x], with zeros behind the last token."""
    padded = F.pad(x_BTHx, (0, 0, 0, 0, 0, -x_BTHx.shape[1] % _CHUNK))
    return padded.view(len(padded), -1, _CHUNK, *padded.shape[2:]).permute(0, 3, 1, 2, 4)


def _decayed_products(q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """[.., C, C] of queries and the keys that are not behind them, decayed from key to query.

    Args:
        sums: of the logarithms of decays up to each token: no difference is taken that could overflow.
    """
    if sums.shape[-1] == 1:
        return ((q @ k.mT) * (sums - sums.mT).clamp(max=0).exp()).tril()
    found = q.new_zeros(*q.shape[:-1], k.shape[-2])
    for first in range(0, k.shape[-2], _EXACT):
        own = slice(first, first + _EXACT)
        base = sums[..., first : first + 1, :]
        if first:  # decayed to the first of these queries, and on from there
            decayed = k[..., :first, :] * (base - sums[..., :first, :]).exp()
            found[..., own, :first] = (q[..., own, :] * (sums[..., own, :] - base).exp()) @ decayed.mT
        between = (sums[..., own, None, :] - sums[..., None, own, :]).clamp(max=0).exp()
        products = q[..., own, None, :] * k[..., None, own, :] * between
        found[..., own, own] = products.sum(-1).tril()
    return found


def scanned(
    state_BCN: torch.Tensor,
    steps_BTC: torch.Tensor,
    x_BTC: torch.Tensor,
    b_BTN: torch.Tensor,
    c_BTN: torch.Tensor,
    rates_CN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba's selective scan.

    Args:
        rates_CN: negative, of the decays' logarithms.
    """
    made = []
    chunks = (torch.split(each, _SCANNED, 1) for each in (steps_BTC, x_BTC, b_BTN, c_BTN))
    for steps, x, b, c in zip(*chunks, strict=True):
        decays = (steps[..., None] * rates_CN).exp()
        states_BTCN = _states(state_BCN, decays, (steps * x)[..., None] * b[:, :, None])
        made.append((states_BTCN @ c[..., None])[..., 0])
        state_BCN = states_BTCN[:, -1]
    return torch.cat(made, 1), state_BCN


def accumulated(
    state_BC: torch.Tensor, decays_BTC: torch.Tensor, written_BTC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A number for each channel, which decays before something is added."""
    made = []
    for decays, written in zip(
        torch.split(decays_BTC, _SCANNED, 1), torch.split(written_BTC, _SCANNED, 1), strict=True
    ):
        made.append(_states(state_BC, decays, written))
        state_BC = made[-1][:, -1]
    return torch.cat(made, 1), state_BC


def _states(before: torch.Tensor, decays: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Behind each token of a chunk [B, T, ..], by doubling how far back tokens see (Hillis and Steele, 1986)."""
    sums = torch.cat([torch.addcmul(written[:, :1], decays[:, :1], before[:, None]), written[:, 1:]], 1)
    back = 1
    while back < sums.shape[1]:
        more = decays[:, back:]
        sums = torch.cat([sums[:, :back], torch.addcmul(sums[:, back:], more, sums[:, :-back])], 1)
        decays = torch.cat([decays[:, :back], more * decays[:, :-back]], 1)
        back *= 2
    return sums

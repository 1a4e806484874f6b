# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels beside torch's operators: case -> largest error, and what it may be.

As a script it prints them for the CPU, where Triton needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F

from anyaccel.inference.device import activations, attention, mixers, parts, rotary
from anyaccel.inference.device.executor import device_logits
from anyaccel.inference.device.kernels.choice import Kernels, errors_of, load
from anyaccel.inference.device.parts import Normed
from anyaccel.inference.spec.decoder import Mlp, Norm

# Relative to the largest value. In 16 bits the reference rounds more often than a kernel does.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.01, torch.float16: 1.2e-3}


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)


def gated(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for activation in ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai"):
        for dtype, bound in BOUNDS.items():
            whole = 3 * _random(3, 2500, dtype=dtype, device=device)
            mine = whole[:, 100:2304]  # rows that are parts of longer ones, in two blocks
            expected = activations.activated(Mlp(features=1102, gated=True, activation=activation), mine.clone())
            made = kernels.gated(activation, mine)
            found[f"gated {activation} {dtype}"] = _error(made, expected), bound
    return found


def turn(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for dtype, bound in BOUNDS.items():
        for width, first, pairs in ((16, 0, 8), (20, 4, 6), (96, 0, 48)):
            rows = _random(5, 7 * width, dtype=dtype, device=device)
            angles = _random(5, pairs, dtype=torch.float32, device=torch.device("cpu"))
            cosine, sine = angles.cos(), angles.sin()
            matrices = torch.stack([cosine, sine, -sine, cosine], -1).view(5, pairs, 2, 2).to(dtype).to(device)
            expected = rows.clone()
            rotary.turn(expected[:, width : 6 * width].view(5, 5, width), first, matrices)
            kernels.turn(rows[:, width : 6 * width].view(5, 5, width), first, matrices)
            found[f"turn {width} {first} {dtype}"] = _error(rows, expected), bound
    return found


def add_norm(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for dtype, bound in BOUNDS.items():
        for kind, weight, bias in (("rms", True, False), ("layer", True, True), ("layer", False, False)):
            norm = Normed.__new__(Normed)
            norm.norm = Norm(kind, 1e-5, weight, bias)
            norm.weight = _random(300, dtype=dtype, device=device) if weight else None
            norm.bias = _random(300, dtype=dtype, device=device) if bias else None
            residual, y = _random(4, 600, dtype=dtype, device=device).split(300, 1)
            expected = norm.of_sum(residual, y, 0.7)
            made = kernels.add_norm(residual, y, 0.7, norm.weight, norm.bias, 1e-5, kind == "layer")
            found[f"add_norm {kind} {weight} {dtype}"] = max(map(_error, made, expected)), bound
    return found


def norm(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    found = {}
    for dtype, bound in BOUNDS.items():
        x = _random(4, 600, dtype=dtype, device=device)[:, 100:400]
        weight, bias = _random(2, 300, dtype=dtype, device=device)
        made = kernels.norm(x, weight, None, 1e-5, False), kernels.norm(x, weight, bias, 1e-5, True)
        whole = x.float()
        expected = (
            F.rms_norm(whole, (300,), weight.float(), 1e-5),
            F.layer_norm(whole, (300,), weight.float(), bias.float(), 1e-5),
        )
        found[f"norm {dtype}"] = max(map(_error, made, expected)), bound
    return found


# Of bits, columns of a group (0: all), minima.
FORMS = ((16, 0, False), (8, 0, False), (8, 32, True), (8, 128, False), (4, 0, True), (4, 32, True), (4, 64, False))


def _matrix(
    bits: int, group: int, minima: bool, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]:
    """What a kernel takes, and its values in float64."""
    if bits == 16:
        whole = _random(rows, cols, dtype=dtype, device=device)
        return (whole, None, None), whole.double()
    generator = torch.Generator().manual_seed(rows + bits + group)
    groups = -(-cols // (group or cols))
    stored = groups * (group or cols)
    if bits == 8:
        q = numbers = torch.randint(-127, 128, (rows, stored), dtype=torch.int8, generator=generator)
    else:
        q = torch.randint(0, 256, (rows, stored // 2), dtype=torch.uint8, generator=generator)
        numbers = torch.stack([q >> 4, q & 15], -1).flatten(-2)
    scales = torch.rand(rows, groups, generator=generator) / 50 + 0.01
    least = torch.randn(rows, groups, generator=generator) if minima else None
    if group:
        scales, least = scales.half(), None if least is None else least.half()
    values = numbers.double().view(rows, groups, -1) * scales[..., None].double()
    values = values if least is None else values + least[..., None].double()
    put = (q.to(device), scales.to(device), None if least is None else least.to(device))
    return put, values.flatten(1)[:, :cols].to(device)


def product(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    """Of one token and of several, with and without what is added; and matrices as floats."""
    found = {}
    for dtype, bound in BOUNDS.items():
        if device.type == "cpu" and dtype is torch.bfloat16:
            continue  # Triton's interpreter multiplies none
        for bits, group, minima in FORMS:
            rows, cols = 37, 296
            (q, scales, least), values = _matrix(bits, group, minima, rows, cols, dtype, device)
            errors = []
            for tokens in (1, 5, 40) if bits < 16 else (1,):
                x = _random(tokens, cols + 8, dtype=dtype, device=device)[:, :cols]
                bias = _random(rows, dtype=dtype, device=device)
                h = _random(tokens, rows + 3, dtype=dtype, device=device)[:, :rows]
                made = kernels.product(x, q, scales, least, group or cols)
                errors.append(_error(made, x.double() @ values.t()))
                made = kernels.product(x, q, scales, least, group or cols, bias, h, 0.7)
                errors.append(_error(made, h.double() + 0.7 * (x.double() @ values.t() + bias.double())))
            weight = _random(cols, dtype=dtype, device=device)
            x = 3 * _random(1, cols, dtype=dtype, device=device)
            for norm in ((weight, 1e-5), (None, 0.1)):
                own = None if norm[0] is None else norm[0].double()
                made = kernels.product(x, q, scales, least, group or cols, bias, h[:1], 0.7, norm=norm)
                normed = F.rms_norm(x.double(), (cols,), own, norm[1])
                errors.append(_error(made, h[:1].double() + 0.7 * (normed @ values.t() + bias.double())))
            if bits < 16:
                errors.append(_error(kernels.dequantised(q, scales, least, group or cols, cols, dtype), values))
            found[f"product {bits} {group} {minima} {dtype}"] = max(errors), bound
    return found


def attend(kernels: Kernels, device: torch.device) -> dict[str, tuple[float, float]]:
    """Sequences of several lengths, beside attention in float64 of the pages that they have."""
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "softcap": {"softcap": 5.0},
        "window": {"window": 70},
        "chunk": {"chunk": 128},
        "alibi": {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.01, 0.7, 0.3])},
        "sinks": {"sinks": torch.tensor([1.0, -1.0, 3.0, 0.0, 0.5, 2.0]), "window": 3, "softcap": 3.0},
    }
    heads, kv_heads, head_dim, value_dim, most = 6, 2, 20, 12, 7
    for dtype, bound in BOUNDS.items():
        if device.type == "cpu" and dtype is torch.bfloat16:
            continue
        for name, given in cases.items():
            more = {key: value.to(device) if torch.is_tensor(value) else value for key, value in given.items()}
            positions = torch.tensor([0, 63, 64, 400])
            pages = torch.randperm(4 * most, generator=torch.Generator().manual_seed(1)).view(4, most) + 1
            cache = _random(1 + 4 * most, 64, kv_heads * (head_dim + value_dim), dtype=dtype, device=device)
            q = _random(4, heads * head_dim + 7, dtype=dtype, device=device)[:, : heads * head_dim]
            q = q.view(4, heads, head_dim)
            expected = torch.cat(
                [
                    _attention(q[i], cache[pages[i].to(device)].flatten(0, 1)[: int(at) + 1], kv_heads, **more)
                    for i, at in enumerate(positions)
                ]
            )
            errors = []
            for bound_of_pages in (most, 16):  # in several parts, and in more than there are pages
                shape = (0, bound_of_pages, positions.to(device), kv_heads, value_dim, 0.3)
                made = kernels.attend(q, cache, pages.to(device), *shape, **more)
                errors.append(_error(made, expected))
            found[f"attend {name} {dtype}"] = max(errors), bound
    return found


def _attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    kv_heads: int,
    softcap: float = 0.0,
    window: int = 0,
    chunk: int = 0,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, heads * values] of the last of these rows of the cache, in float64."""
    heads, head_dim = q.shape
    count = len(rows)
    k, v = rows.double().split([kv_heads * head_dim, rows.shape[1] - kv_heads * head_dim], 1)
    k, v = (each.view(count, kv_heads, -1).repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("hd,shd->hs", q.double(), k) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(count, device=q.device)
    if slopes is not None:
        scores = scores + slopes.double()[:, None] * (at - (count - 1))
    seen = torch.ones_like(at, dtype=torch.bool)
    if window:
        seen &= at > count - 1 - window
    if chunk:
        seen &= at // chunk == (count - 1) // chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    return torch.einsum("hs,shv->hv", scores.softmax(-1)[:, :count], v).view(1, -1)


def models(kernels: Kernels) -> dict[str, tuple[float, float]]:
    """Logits of whole decoders on the CPU, with torch's operators and with the kernels."""
    from device_models import on_device

    found = {}
    recurrent = ("lfm2", "qwen3_next", "kimi_linear", "mamba2", "jamba", "minimax")
    for name in (
        "llama",
        "gemma2",
        "gpt_neox",
        "olmo2",
        "phi3-longrope",
        "gpt_oss",
        "bloom",
        "deepseek_v3",
        *recurrent,
    ):
        logits = []
        for each in (None, kernels):
            for module in (activations, attention, mixers, parts, rotary):
                module.kernels_of = lambda _device, each=each: each  # type: ignore[attr-defined]
            rotary.has_complex = lambda *_arguments: False
            model = on_device(name)
            sequence = model.create()
            many = device_logits(model, [sequence], [9], list(range(5, 14)), list(range(9)))
            logits.append(torch.cat([many, device_logits(model, [sequence], [1], [20], [0])]))
        found[f"model {name}"] = _error(logits[1], logits[0]), 1e-5
    return found


def _error(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made.float() - expected.float()).abs().max() / expected.float().abs().max())


def main() -> None:
    kernels, host = load(), torch.device("cpu")
    found = models(kernels) | {f"tried {name}": (error, 1e-5) for name, error in errors_of(kernels, host).items()}
    for cases in (gated, turn, add_norm, norm, product, attend):
        found |= cases(kernels, host)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

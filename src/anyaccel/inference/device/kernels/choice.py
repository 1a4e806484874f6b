# SPDX-License-Identifier: Apache-2.0
"""Whether Triton's kernels run on a device: where the accelerator says so and each gives what torch's operators give.

Triton compiles at run time, with the vendor's part of it and a C compiler of the machine; what goes wrong there is said
once, and torch's own operators run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anyaccel.accelerator import get_accelerator
from anyaccel.inference.device import recurrence
from anyaccel.inference.spec.decoder import LinearAttention

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """See the files of these names."""

    gated: Callable[..., torch.Tensor]
    turn: Callable[..., None]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm: Callable[..., torch.Tensor]
    product: Callable[..., torch.Tensor]
    dequantised: Callable[..., torch.Tensor]
    attend: Callable[..., torch.Tensor]
    convolve: Callable[..., torch.Tensor]
    attend_linearly: Callable[..., torch.Tensor]
    scan: Callable[..., torch.Tensor]
    widest: int  # values of a row, of norms
    most_tokens: int  # of a product
    milliseconds: Callable[[Callable[[], object]], float] | None  # of a call on the device; None: nothing is timed


@functools.cache
def kernels_of(device: torch.device) -> Kernels | None:
    """The kernels for tensors of a device, which have been tried; None where torch's operators are to run."""
    accelerator = get_accelerator()
    if device.type != accelerator.device().type or not accelerator.is_triton_supported():
        return None
    try:
        found = load()
        wrong = [name for name, error in errors_of(found, device).items() if not error < 1e-4]
    except Exception as error:  # noqa: BLE001 - whatever a compiler, its driver or its import may raise
        logger.warning("Triton cannot be used (%s: %s): torch's own operators run", type(error).__name__, error)
        return None
    if wrong:
        logger.warning("Triton's %s: wrong on %s, torch's own operators run", ", ".join(wrong), device)
        return None
    return found


def load() -> Kernels:
    """The kernels, not tried.

    Raises:
        ImportError: there is no Triton.
    """
    from anyaccel.inference.device.kernels.add_norm import WIDEST, add_norm, norm
    from anyaccel.inference.device.kernels.attend import attend
    from anyaccel.inference.device.kernels.gated import gated
    from anyaccel.inference.device.kernels.mixers import attend_linearly, convolve, scan
    from anyaccel.inference.device.kernels.product import MOST_TOKENS, TIMED, dequantised, milliseconds, product
    from anyaccel.inference.device.kernels.rotary import turn

    mixers = (convolve, attend_linearly, scan)
    return Kernels(
        gated,
        turn,
        add_norm,
        norm,
        product,
        dequantised,
        attend,
        *mixers,
        WIDEST,
        MOST_TOKENS,
        milliseconds if TIMED else None,
    )


def errors_of(kernels: Kernels, device: torch.device) -> dict[str, float]:
    """The largest difference of each kernel from torch's operators, on small tensors in float32."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 3, 60, generator=generator)
    weight = torch.randn(60, generator=generator)
    found = {"gated": kernels.gated("silu", x.to(device)).cpu() - F.silu(x[:, :30]) * x[:, 30:]}

    made = kernels.add_norm(x.to(device), y.to(device), 0.5, weight.to(device), None, 1e-5, False)
    whole = x + 0.5 * y
    found["add_norm"] = torch.cat(made).cpu() - torch.cat([whole, F.rms_norm(whole, (60,), weight, 1e-5)])
    normed = kernels.norm(x.to(device), None, None, 1e-5, True)
    found["norm"] = normed.cpu() - F.layer_norm(x, (60,), eps=1e-5)
    found["product"] = kernels.product(x[:1].to(device), y.to(device)).cpu() - x[:1] @ y.t()
    made_of_norm = kernels.product(x[:1].to(device), y.to(device), norm=(weight.to(device), 1e-5))
    found["product of a norm"] = made_of_norm.cpu() - F.rms_norm(x[:1], (60,), weight, 1e-5) @ y.t()

    # Two heads of one key/value head over 70 keys, in pages 2 and 1 of the cache.
    q, cache = torch.randn(1, 2, 16, generator=generator), torch.randn(3, 64, 32, generator=generator)
    pages, at = torch.tensor([[2, 1]]).to(device), torch.tensor([69]).to(device)
    seen = kernels.attend(q.to(device), cache.to(device), pages, 0, 2, at, 1, 16, 0.25)
    rows = torch.cat([cache[2], cache[1]])[:70]
    k, v = rows[:, :16], rows[:, 16:]
    found["attend"] = seen.cpu() - ((q[0] @ k.t() * 0.25).softmax(-1) @ v).flatten()

    heads, angles = x.view(3, 4, 15), torch.randn(3, 7, generator=generator)
    on_device = heads.clone().to(device)
    cosine, sine = angles.cos(), angles.sin()
    kernels.turn(on_device, 1, torch.stack([cosine, sine, -sine, cosine], -1).view(3, 7, 2, 2).to(device))
    turned = torch.complex(heads[..., 1::2], heads[..., 2::2]) * torch.complex(cosine, sine)[:, None]
    found["turn"] = on_device.cpu() - torch.cat([heads[..., :1], torch.view_as_real(turned).flatten(2)], -1)
    found |= _of_states(kernels, device, generator)
    return {name: float(difference.abs().max()) for name, difference in found.items()}


def _of_states(kernels: Kernels, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two sequences with the states 2 and 1 of three: results and states."""
    numbers = torch.tensor([2, 1]).to(device)
    found = {}

    def some(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.randn(shape, generator=generator)
        return made, made.clone().to(device)

    def differences(y: torch.Tensor, states: torch.Tensor, expected: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return torch.cat([(y.cpu() - expected).flatten(), (states.cpu()[[2, 1]] - after).flatten()])

    (windows, own), (x, own_x), (taps, own_taps) = some(3, 2, 20), some(2, 20), some(3, 20)
    y, after = recurrence.convolved(windows[[2, 1]], x[:, None], taps, None, True)
    made = kernels.convolve(own, numbers, own_x, own_taps, None, True)
    found["convolve"] = differences(made, own, y[:, 0], after)

    heads = LinearAttention(2, 1, 6, 5, 0.5, delta=True, strength="sigmoid")
    (states, own), (qkv, own_qkv), (inputs, own_inputs) = some(3, 2, 6, 5), some(2, 22), some(2, 4)
    (rates, own_rates), (biases, own_biases) = some(2), some(2)
    q, k, v = torch.split(qkv[:, None], [6, 6, 10], -1)
    decays = -rates.abs() * F.softplus(inputs[:, None, :2] + biases)
    q, k = (each.view(2, 1, 1, 6).expand(-1, -1, 2, -1) for each in (q * 0.5, k))
    strengths = inputs[:, None, 2:].sigmoid()
    y, after = recurrence.attended(states[[2, 1]], q, k, v.view(2, 1, 2, 5), decays[..., None], strengths, True)
    made = kernels.attend_linearly(
        heads, own, numbers, own_qkv, own_inputs, own_inputs, -own_rates.abs(), own_biases, None
    )
    found["attend_linearly"] = differences(made, own, y[:, 0].flatten(1), after)

    (states, own), (steps, own_steps), (x, own_x) = some(3, 7, 3), some(2, 4, 7), some(2, 4, 7)
    (b, own_b), (c, own_c), (rates, own_rates) = some(2, 4, 3), some(2, 4, 3), some(7, 3)
    y, after = recurrence.scanned(states[[2, 1]], steps.abs(), x, b, c, -rates.abs())
    flat = (each.flatten(0, 1) for each in (own_steps.abs(), own_x, own_b, own_c))
    found["scan"] = differences(kernels.scan(own, numbers, *flat, -own_rates.abs()), own, y.flatten(0, 1), after)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Matrices of whole numbers of 8 or 4 bits with scales, and products of them by torch's own operators.

value = scale * q + minimum. Triton's kernels multiply them as they are, where these run. Elsewhere, which operator of
torch a device has is tried: a product of each size is compared with that of the dequantised matrix when a model is
loaded. Where there is none, rows are dequantised for each product: right everywhere, and slower than 16-bit floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from anyaccel.inference.device.kernels.choice import Kernels, kernels_of

Product = Callable[[torch.Tensor], torch.Tensor]

# The largest relative error of a product: operators have scales in the activations' precision.
_BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_CHECKED_ROWS = 256  # of a product that is compared, at either end: what is dequantised for it should be small
_HALF = 8  # what torch's operators take from a value of 4 bits


class Quantised:
    """Matrices [..., rows, cols].

    Args:
        kind: "i8", or "i4" with values from 0 to 15.
        group: columns that share a scale; 0: all.
        minimum: whether groups have one; without, that of i4 is -8 scales.
        dtype: of what it is multiplied by.
        gathered: single rows are asked for: they are kept as they are, beside what an operator wants.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        kind: str,
        group: int,
        minimum: bool,
        dtype: torch.dtype,
        device: torch.device,
        gathered: bool = False,
    ) -> None:
        *more, self.rows, self.cols = shape
        self.kind, self.dtype, self.device, self.gathered = kind, dtype, device, gathered
        self.form = (kind, group, minimum)
        self.group = group or self.cols
        groups = -(-self.cols // self.group)
        self.stored_cols = groups * self.group
        width = self.stored_cols if kind == "i8" else self.stored_cols // 2
        octets = torch.int8 if kind == "i8" else torch.uint8
        self.q = torch.zeros((*more, self.rows, width), dtype=octets, device=device)
        self.scales = torch.zeros((*more, self.rows, groups), dtype=torch.float16, device=device)
        self.minima = torch.zeros_like(self.scales) if minimum or kind == "i4" else None
        self.minimum = minimum
        self._product: Product | None = None
        self._kernels: Kernels | None = None
        self._most_tokens = 0  # of the kernels' products
        self._norm_pays = False
        self._packed_bytes = 0

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.q, self.scales, self.minima) if each is not None) + self._packed_bytes

    def parts(
        self, q: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Where each part of rows goes, and its values in that form.

        Args:
            q: [rows, cols] on the host, int8 or 0..15.
        """
        if q.shape[1] < self.stored_cols:
            q = F.pad(q, (0, self.stored_cols - q.shape[1]))
        yield self.q, q if self.kind == "i8" else (q[:, 0::2] << 4) | q[:, 1::2]
        self.scales = _with_room(self.scales, scales)
        yield self.scales, scales.to(self.scales.dtype)
        if self.minima is not None:
            minima = scales * -_HALF if minima is None else minima
            self.minima = _with_room(self.minima, minima)
            yield self.minima, minima.to(self.minima.dtype)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, cols] by their numbers, or of stacked matrices those [n, rows, cols], dequantised."""
        minima = None if self.minima is None else self.minima.index_select(0, rows)
        return self._floats(self.q.index_select(0, rows), self.scales.index_select(0, rows), minima)

    def entry(self, index: int) -> torch.Tensor:
        """One of stacked matrices, dequantised."""
        minima = None if self.minima is None else self.minima[index]
        return self._floats(self.q[index], self.scales[index], minima)

    def dequantised(self) -> torch.Tensor:
        if self._kernels is not None:
            return self._kernels.dequantised(self.q, self.scales, self.minima, self.group, self.cols, self.dtype)
        return self._floats(self.q, self.scales, self.minima)

    def _floats(self, q: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
        """Computed in float32 and rounded once."""
        if self.kind == "i4":
            q = torch.stack([q >> 4, q & 15], -1)
        numbers, scales = q.view(*scales.shape, self.group), scales.float()
        values = torch.empty(numbers.shape, dtype=self.dtype, device=self.device)
        if minima is None:
            torch.mul(numbers, scales[..., None], out=values)
        else:
            torch.add(numbers * scales[..., None], minima[..., None], out=values)
        return values.flatten(-2)[..., : self.cols]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, norm: tuple[torch.Tensor | None, float] | None = None
    ) -> torch.Tensor:
        """x Wᵀ + bias; with the norm of x, as the kernels' product has it, where `takes_norm` says so."""
        if self._product is None:
            return self._of_kernels(x, bias, None, 1.0, norm) if self._fits(x) else self._by_floats(x, bias)
        y = self._product(x.contiguous())
        return y if bias is None else y.add_(bias)

    def _by_floats(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.dequantised(), bias)

    def added(self, h: torch.Tensor, x: torch.Tensor, factor: float, bias: torch.Tensor | None) -> torch.Tensor:
        """h + factor * (x Wᵀ + bias)."""
        if self._fits(x) and h.stride(1) == 1:
            return self._of_kernels(x, bias, h, factor)
        if bias is not None:
            h = torch.add(h, bias, alpha=factor)
        if self._product is not None:
            return torch.add(h, self._product(x.contiguous()), alpha=factor)
        return torch.addmm(h, x, self.dequantised().t(), alpha=factor)

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether Triton's kernel multiplies these tokens; more of them are worth a dequantised matrix."""
        return self._kernels is not None and len(x) <= self._most_tokens and x.stride(1) == 1

    def takes_norm(self, x: torch.Tensor) -> bool:
        """Whether the norm of this token is worth being part of its product."""
        return self._norm_pays and len(x) == 1 and self._fits(x)

    def _of_kernels(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        factor: float,
        norm: tuple[torch.Tensor | None, float] | None = None,
    ) -> torch.Tensor:
        assert self._kernels is not None
        return self._kernels.product(x, self.q, self.scales, self.minima, self.group, bias, residual, factor, norm)

    def choose_product(self, tried: dict[object, Any]) -> None:
        """Take Triton's kernels or the first operator whose product is right; to be called when all values are there.

        Args:
            tried: what was found for matrices of these forms and sizes.
        """
        form = (self.form, self.rows, self.cols)
        if self._take_kernels():
            if form not in tried:
                tried[form] = self._count_of_tokens(), self._has_time_for_norm()
            self._most_tokens, self._norm_pays = tried[form]
            return
        if form not in tried:
            tried[form] = next((make for make in _MAKERS if self._is_right(make)), None)
        make = tried[form]
        if make is None:
            return
        self._product = make(self)
        if self.kind == "i4":
            self._packed_bytes = self.q.nbytes + self.scales.numel() * 2 * self.dtype.itemsize
            if not self.gathered:
                none = torch.empty(0, device=self.device)
                self.q, self.scales, self.minima = none.to(torch.uint8), none, None

    def _take_kernels(self) -> bool:
        """Whether Triton's kernels run here and are right: of one token, of several, and of more than they multiply."""
        kernels = kernels_of(self.device)
        groups = self.scales.shape[-1]
        if kernels is None or not (groups == 1 or (16 <= self.group <= 256 and self.group & (self.group - 1) == 0)):
            return False
        if self.kind == "i4" and self.q.shape[-1] % 4:
            return False
        self._kernels, self._most_tokens = kernels, kernels.most_tokens
        if all(self._is_right(lambda m: m, tokens) for tokens in (1, 3, 65)):
            return True
        self._kernels = None
        return False

    def _count_of_tokens(self) -> int:
        """Up to how many tokens the kernels' product takes less time than that of a dequantised matrix."""
        kernels = self._kernels
        assert kernels is not None
        count = kernels.most_tokens
        while kernels.milliseconds is not None and count > 1:
            x = torch.zeros(count, self.cols, dtype=self.dtype, device=self.device)
            own = kernels.milliseconds(functools.partial(self._of_kernels, x, None, None, 1.0))
            if own <= kernels.milliseconds(functools.partial(self._by_floats, x, None)):
                break
            count //= 2
        return count

    def _has_time_for_norm(self) -> bool:
        """Whether a product with the norm of its token takes less time than both after each other.

        Each program of the product computes the norm. That is for nothing while it waits for memory, which products of
        few bits hardly do.
        """
        kernels = self._kernels
        assert kernels is not None
        if kernels.milliseconds is None:
            return True
        x, weight = torch.ones(2, self.cols, dtype=self.dtype, device=self.device)
        x = x[None]
        product = functools.partial(self._of_kernels, bias=None, residual=None, factor=1.0)
        both = kernels.milliseconds(lambda: product(kernels.norm(x, weight, None, 1e-5, False)))
        return kernels.milliseconds(lambda: product(x, norm=(weight, 1e-5))) < both

    def _is_right(self, make: Callable[[Quantised], Product], tokens: int = 3) -> bool:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(tokens, self.cols, generator=generator).to(self.dtype).to(self.device)
        try:
            y = make(self)(x)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError):
            return False  # the device has no such operator, or not of this size
        ends = torch.arange(self.rows)
        ends = torch.cat([ends[:_CHECKED_ROWS], ends[-_CHECKED_ROWS:]]).to(self.device)
        expected = F.linear(x.float(), self.of_rows(ends).float())
        error = (y.index_select(1, ends).float() - expected).norm()
        return bool(error <= _BOUNDS[self.dtype] * expected.norm())


def _with_room(held: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales or minima as halves, which most files have, or in float32 once one of their values is no half."""
    return held if torch.equal(values.to(held.dtype).float(), values) else held.float()


def _by_int8(m: Quantised) -> Product:
    """Where each row has one scale. The operator of torch 2.13 for CPUs reads beyond rows that 32 does not divide."""
    if m.kind != "i8" or m.minima is not None or m.scales.shape[-1] > 1 or m.cols % 32:
        raise ValueError("not of this form")
    q, scales = m.q, m.scales[:, 0].to(m.dtype)
    return lambda x: torch._weight_int8pack_mm(x, q, scales)


def _by_int4(m: Quantised) -> Product:
    """As CUDA and Metal devices have it. In tiles of 16 columns, of which `inner` are together."""
    scales = _scales_and_zeros(m)
    inner = next((each for each in (8, 4, 2) if m.cols % (16 * each) == 0), 0)
    if not inner or m.rows % 8:
        raise ValueError("not of this size")
    packed = torch._convert_weight_to_int4pack(m.q, inner)
    group = m.group
    return lambda x: torch._weight_int4pack_mm(x, packed, group, scales)


def _by_int4_of_cpus(m: Quantised) -> Product:
    scales = _scales_and_zeros(m)
    if m.rows % 16 or m.cols % 32:
        raise ValueError("not of this size")
    numbers = torch.stack([m.q >> 4, m.q & 15], -1).flatten(-2).int()
    packed = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
    group = m.group
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, group, scales)


def _scales_and_zeros(m: Quantised) -> torch.Tensor:
    """[groups, rows, 2] for value = scale * (q - 8) + zero."""
    if m.kind != "i4" or m.minima is None or m.group not in (32, 64, 128, 256) or m.cols != m.stored_cols:
        raise ValueError("not of this form")
    scales = m.scales.float()
    both = torch.stack([scales, m.minima + _HALF * scales], -1)
    return both.transpose(0, 1).contiguous().to(m.dtype)


_MAKERS: tuple[Callable[[Quantised], Product], ...] = (_by_int8, _by_int4, _by_int4_of_cpus)

# SPDX-License-Identifier: Apache-2.0
"""HQQ's layout. Torch-free.

The matrix is flat, cut to [groups, group_size] (axis 1) or [group_size, groups] (axis 0). W_q has its rows in `parts`
of as many rows each, the first part in the highest bits: value p of W_q[i] is row p * len(W_q) + i. W = (q - zero) *
scale, with one scale and one zero, which is no whole number, a group.
"""

from __future__ import annotations

from typing import Any

from anyaccel.inference.checkpoints.quantised_layout import (
    FLOATS,
    DecodedTensor,
    Layout,
    QuantisedTensor,
    StoredMatrix,
    Unreadable,
)

# The word that says how values are packed -> bits, parts.
_PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
_FACTS = ("shape", "nbits", "group_size", "axis", "packing")
_UNREAD = (
    *("unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


class Hqq(Layout):
    mains = (".W_q",)
    companions = (".scale", ".zero", *(f".{name}" for name in _FACTS))
    skipped = tuple(f".{name}" for name in _UNREAD)

    def _fact(self, stem: str, name: str) -> Any:
        """A number of what a matrix says of itself, as an array."""
        found = f"{stem}.{name}"
        values = self.array(found, ("U8", "I32", "I64", "F32"), self.rank(found)).reshape(-1)
        self.check(values.size > 0, found, "it is empty")
        return values

    def make(self, stem: str) -> StoredMatrix:
        name = f"{stem}.W_q"
        shape = tuple(map(int, self._fact(stem, "shape")))
        packing = "".join(map(chr, self._fact(stem, "packing")))
        if packing not in _PACKINGS or len(shape) != 2:
            raise Unreadable(f"HQQ weights packed as {packing!r}, of shape {shape} ({self.where(name)})")
        bits, parts = _PACKINGS[packing]
        group, axis = (int(self._fact(stem, fact)[0]) for fact in ("group_size", "axis"))
        rows, cols = shape
        self.check(rows > 0 < cols and group > 0 and rows * cols % group == 0, name, f"groups of {group} in {shape}")
        groups = rows * cols // group
        length, width = (groups, group) if axis else (group, groups)
        stored = self._stored(name)
        fits = stored.shape[1] == width and stored.shape[0] == -(-length // parts)
        self.check(fits, name, f"values {stored.shape} for {groups} groups of {group}, {bits} bits")
        scales, zeros = self._levels(stem)
        self.check(scales.size == zeros.size == groups, name, f"{scales.size} scales and {zeros.size} zeros")
        given = (self.where(name), shape, self, stem, "hqq")
        if not axis or cols % group:
            return DecodedTensor(*given, made=(parts, bits, axis, width))
        most = self.most(f"{stem}.scale", scales)
        # What HQQ has as 8 bits may have any number of bits up to that.
        return QuantisedTensor(*given, bits=bits, group=group % cols, zero=None, most_scale=most)

    def _stored(self, name: str) -> Any:
        found = self.array(name, ("U8", "I32"))
        return found.view("<u4") if found.dtype.itemsize == 4 else found

    def _levels(self, stem: str) -> tuple[Any, Any]:
        """Scales and zeros, one a group."""
        names = (f"{stem}.scale", f"{stem}.zero")
        return tuple(self.array(each, FLOATS, self.rank(each)).reshape(-1) for each in names)

    def _rows(self, stem: str, rows: Any, parts: int, bits: int) -> Any:
        """Rows of the cut matrix, unpacked."""
        stored = self._stored(f"{stem}.W_q")
        part, row = rows // len(stored), rows % len(stored)
        shifts = (bits * (parts - 1 - part)).astype(stored.dtype)
        shape = (-1, *[1] * (rows.ndim - 1), 1)
        return (stored[row] >> shifts.reshape(shape) & ((1 << bits) - 1)).astype("u1")

    def unpack(self, tensor: QuantisedTensor, rows: Any) -> tuple[Any, Any, Any]:
        import numpy

        group = tensor.group or tensor.shape[1]
        count = tensor.shape[1] // group
        parts = next(parts for bits, parts in _PACKINGS.values() if bits == tensor.bits)
        wanted = (numpy.asarray(rows)[:, None] * count + numpy.arange(count)).reshape(-1)
        q = self._rows(tensor.stem, wanted, parts, tensor.bits).reshape(len(rows), tensor.shape[1])
        scales, zeros = (each[wanted].astype("f4").reshape(len(rows), count) for each in self._levels(tensor.stem))
        return q, scales, zeros

    def decode(self, tensor: DecodedTensor, rows: Any) -> Any:
        import numpy

        parts, bits, axis, width = tensor.made
        cols = tensor.shape[1]
        where = numpy.asarray(rows)[:, None] * cols + numpy.arange(cols)
        row, col = where // width, where % width
        stored = self._stored(f"{tensor.stem}.W_q")
        shifts = (bits * (parts - 1 - row // len(stored))).astype(stored.dtype)
        q = stored[row % len(stored), col] >> shifts & ((1 << bits) - 1)
        scales, zeros = (each.astype(numpy.float32)[row if axis else col] for each in self._levels(tensor.stem))
        return (q.astype(numpy.float32) - zeros) * scales

# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder as tensors of a device. They are filled as `_llm.DecoderModel` is, by the same packing plan.

What the plan hands over is a few megabytes of the checkpoint at a time, so the host never has more of them than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import BLOCKS
from anyaccel.inference.device.activations import activated
from anyaccel.inference.device.layout import CONSTANTS, LayerLayout, layer_layout, row_orders
from anyaccel.inference.device.quantised import Quantised
from anyaccel.inference.device.stored import (
    SOURCES,
    blocks,
    dequantised_blocks,
    holds_blocks,
    host_memory,
    rounded,
)
from anyaccel.inference.spec.decoder import DecoderSpec, Layer, Mlp

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_FOLDED = 1 << 22  # values of a matrix that are in float32 at once
_CONSTANT = 16.0  # what activations leave large; divisions by it are exact
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)")
# Vectors of what is computed in float32 whatever the rest is: the choice of experts, and recurrent states.
_IN_FLOAT32 = re.compile(r"(router|shared_gate|steps)\.|mixer\.(conv\.|rate|step_bias|skip|(\w+_)?norm\.)")


class DeviceWeights:
    """Every weight by its native name; those of a layer's experts are the entries of one tensor.

    Args:
        spec: by which `layout` puts weights elsewhere, and has some of them changed when all are there.
        shapes: as `packing.Plan.shapes` gives them, of floats, i8 and i4.
        dtype: of vectors, and of what quantised matrices are multiplied by.
    """

    def __init__(self, spec: DecoderSpec, shapes: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.spec = spec
        self.dtype = dtype
        self._stacks: dict[str, torch.Tensor | Quantised] = {}  # "layers.3.experts.down" -> [experts, rows, cols]
        self._tensors: dict[str, torch.Tensor] = {}
        self._quantised: dict[str, Quantised] = {}
        self._products: dict[object, Any] = {}
        self._filled: dict[str, torch.Tensor] = {}  # what a weight's own values go to, where its tensor has more
        self._owned: list[torch.Tensor] = []
        self._missing: dict[str, int] = {}
        self._orders = row_orders(spec)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        quantised: dict[str, tuple[tuple[int, int], tuple[str, int, bool]]] = {}
        for name, rows, cols, kind, group, minimum, _scales in shapes["matrices"]:
            if kind in DTYPES:
                sizes[name] = (rows, cols), DTYPES[kind]
            else:
                quantised[name] = (rows, cols), (kind, group, minimum)
        for name, count in shapes["vectors"]:
            sizes[name] = (count,), torch.float32 if _IN_FLOAT32.search(name) else dtype
        self._missing = {name: shape[0] for name, (shape, _) in (sizes | quantised).items()}
        kinds = {name: kind for name, _, _, kind, *_ in shapes["matrices"]}
        self.layouts: list[LayerLayout] = []
        for index, layer in enumerate(spec.layers):
            at = f"layers.{index}."
            own = {name.removeprefix(at): kind for name, kind in kinds.items() if name.startswith(at)}
            self.layouts.append(layer_layout(layer, own))
            self._lay_out(at, layer, self.layouts[-1], sizes, dtype)
        counts: dict[str, int] = {}
        for name in (*sizes, *quantised):
            if found := _EXPERT.match(name):
                stack = f"{found[1]}.{found[3]}"
                counts[stack] = max(counts.get(stack, 0), int(found[2]) + 1)
        for name, (shape, kind) in sizes.items():
            self._make(name, shape, kind, counts)
        for name, (size, form) in quantised.items():
            self._make_quantised(name, size, form, counts)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._owned.append(torch.zeros(shape, dtype=dtype, device=self.device))
        return self._owned[-1]

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, counts: Mapping[str, int]) -> None:
        if found := _EXPERT.match(name):
            stack = f"{found[1]}.{found[3]}"
            if stack not in self._stacks:
                self._stacks[stack] = self._new((counts[stack], *shape), dtype)
            whole = self._stacks[stack]
            assert isinstance(whole, torch.Tensor)  # quantised ones come later
            self._tensors[name] = whole[int(found[2])]
        else:
            self._tensors[name] = self._new(shape, dtype)

    def _make_quantised(
        self, name: str, shape: tuple[int, int], form: tuple[str, int, bool], counts: Mapping[str, int]
    ) -> None:
        if found := _EXPERT.match(name):
            stack = f"{found[1]}.{found[3]}"
            whole = self._stacks.get(stack)
            if whole is None:
                self._stacks[stack] = Quantised((counts[stack], *shape), *form, self.dtype, self.device)
            elif not isinstance(whole, Quantised) or whole.form != form:
                raise ModelError(f"{name}: the experts of a layer are stored in several forms; load it as bf16")
        else:
            self._quantised[name] = Quantised(
                shape, *form, self.dtype, self.device, gathered=name in ("embed", "layer_embed")
            )

    def _lay_out(
        self,
        at: str,
        layer: Layer,
        layout: LayerLayout,
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        dtype: torch.dtype,
    ) -> None:
        """Make what a layer has in another form; the rest stays in `sizes`."""
        if not (layout.joint or layout.constant):
            return
        assert isinstance(layer.mlp, Mlp)
        qkv, gate_up, down = f"{at}qkv", f"{at}mlp.gate_up", f"{at}mlp.down"
        (features, cols), kind = sizes.pop(gate_up)
        more = CONSTANTS if layout.constant else 0
        halves = 2 if layer.mlp.gated else 1
        rows = features + more * halves
        if more and halves == 2:  # each half has its own
            order = torch.arange(features)
            order[features // 2 :] += more
            self._orders[gate_up] = self._orders[f"{gate_up}.bias"] = order
        before = sizes[qkv][0][0] if layout.joint else 0
        whole = self._new((before + rows, cols), kind)
        if layout.joint:
            self._tensors[f"{at}joint"] = whole
            self._tensors[qkv] = whole[:before]
            del sizes[qkv]
        self._tensors[gate_up] = whole[before:]
        biases = [
            f"{each}.bias" for each in (qkv, gate_up) if f"{each}.bias" in sizes and (layout.joint or each != qkv)
        ]
        if biases or layout.folded or more:
            bias = self._new((before + rows,), dtype)
            if layout.joint:
                self._tensors[f"{at}joint.bias"] = bias
                self._tensors[f"{qkv}.bias"] = bias[:before]
            self._tensors[f"{gate_up}.bias"] = bias[before:]
            for name in biases:
                del sizes[name]
        if more:
            (hidden, inner), kind = sizes.pop(down)
            self._tensors[down] = self._new((hidden, inner + more), kind)
            self._filled[down] = self._tensors[down][:, :inner]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(name)

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        return self._quantised[name] if name in self._quantised else self._tensors[name]

    def stack(self, name: str) -> torch.Tensor | Quantised:
        """Of a layer's experts: [experts, rows, cols]."""
        return self._stacks[name]

    def stacked_vectors(self, name: str) -> torch.Tensor | None:
        """Of a layer's experts: [experts, values], where they have them."""
        found = self._stacks.get(name)
        assert not isinstance(found, Quantised)
        return found

    @property
    def weight_bytes(self) -> int:
        stacked = [each for each in self._stacks.values() if isinstance(each, Quantised)]
        floats = sum(each.nbytes for each in self._owned)
        return floats + sum(each.nbytes for each in (*self._quantised.values(), *stacked))

    # What `packing.Plan.fill` calls, with the meaning that it has for `_llm.DecoderModel` -----------------------------

    def set_rows(
        self,
        name: str,
        first: int,
        count: int,
        address: int,
        type: str,
        row_stride: int,
        col_stride: int = 0,
        order: Sequence[int] | None = None,
    ) -> None:
        target = self._quantised_target(name)
        cols = self._target(name).shape[1] if target is None else target[0].cols
        stored = count if order is None else max(order) + 1
        if BLOCKS[type][0] > 1:
            if target is not None and holds_blocks(target[0], type):
                q, scales, minima = blocks(address, type, stored, cols, row_stride)
                wanted = slice(None) if order is None else torch.tensor(order)
                minima = None if minima is None else minima[wanted]
                self._write_quantised(name, first, q[wanted], scales[wanted], minima)
                return
            rows = dequantised_blocks(address, type, stored, cols, row_stride)
        else:
            rows = host_memory(address, type, (stored, cols), (row_stride, col_stride or SOURCES[type].itemsize))
        if order is not None:
            rows = rows[torch.tensor(order)]
        if target is None:
            self._write(name, first, rows)
        else:
            self._write_quantised(name, first, *rounded(rows, target[0]))

    def set_quantised_rows(self, name: str, first: int, count: int, q: int, scales: int, minima: int = 0) -> None:
        """Of a matrix that is kept as whole numbers: these are kept as they are. See `_llm.Linear`."""
        found = self._quantised_target(name)
        if found is None:
            raise ModelError(f"{name}: whole numbers for a matrix of floats")
        target = found[0]
        groups = target.scales.shape[-1]
        values = host_memory(q, "i8" if target.kind == "i8" else "u8", (count, target.cols))
        scale = host_memory(scales, "f32", (count, groups))
        minimum = host_memory(minima, "f32", (count, groups)) if target.minimum and minima else None
        self._write_quantised(name, first, values, scale, minimum)

    def _quantised_target(self, name: str) -> tuple[Quantised, int | None] | None:
        """The quantised matrix, and of a stack which."""
        if name in self._quantised:
            return self._quantised[name], None
        if found := _EXPERT.match(name):
            stack = self._stacks[f"{found[1]}.{found[3]}"]
            return (stack, int(found[2])) if isinstance(stack, Quantised) else None
        return None

    def _write_quantised(
        self, name: str, first: int, q: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None
    ) -> None:
        found = self._quantised_target(name)
        assert found is not None
        matrix, index = found
        for whole, values in matrix.parts(q, scales, minima):
            self._put(name, whole if index is None else whole[index], first, values)
        self._missing[name] -= len(q)
        if self._missing[name] == 0 and index is None:
            matrix.choose_product(self._products)

    def set_vector(
        self, name: str, first: int, count: int, address: int, type: str, stride: int = 0, plus: float = 0.0
    ) -> None:
        values = host_memory(address, type, (count,), (stride or SOURCES[type].itemsize,))
        self._write(name, first, values.float() + plus if plus else values)

    def _target(self, name: str) -> torch.Tensor:
        return self._filled.get(name, self._tensors[name])

    def _write(self, name: str, first: int, values: torch.Tensor) -> None:
        target = self._target(name)
        if values.dtype is not target.dtype:
            values = values.to(target.dtype)  # here: a device may lack the file's type
        self._put(name, target, first, values)
        self._missing[name] -= len(values)

    def _put(self, name: str, target: torch.Tensor, first: int, values: torch.Tensor) -> None:
        """Values of rows from `first` on, each where it goes."""
        order = self._orders.get(name)
        moved = 0 if order is None else min(max(len(order) - first, 0), len(values))  # what comes behind them stays
        if order is not None and moved:
            target.index_copy_(0, order[first : first + moved].to(self.device), values[:moved].to(self.device))
        target[first + moved : first + len(values)].copy_(values[moved:])

    def finish(self) -> None:
        """After the last weight.

        Raises:
            ModelError: some were not set.
        """
        missing = sorted(name for name, rows in self._missing.items() if rows > 0)
        if missing:
            raise ModelError(f"{len(missing)} weights were not set or not in full, {missing[0]!r} among them")
        for index, (layer, layout) in enumerate(zip(self.spec.layers, self.layouts, strict=True)):
            at = f"layers.{index}."
            if layout.folded:
                self._fold(f"{at}attn_norm", f"{at}qkv")
                self._fold(f"{at}mlp_norm", f"{at}mlp.gate_up")
            if layout.constant:
                self._take_in_biases(at, layer)

    def _fold(self, norm: str, name: str) -> None:
        """Have a product do what a norm's weight and bias do to what it reads."""
        weight, bias = self._tensors[name], self._tensors[f"{name}.bias"]
        if (own := self._tensors.pop(f"{norm}.bias", None)) is not None:
            step = max(_FOLDED // weight.shape[1], 1)
            for first in range(0, len(weight), step):
                rows = weight[first : first + step]
                bias[first : first + step] += (rows.float() @ own.float()).to(bias.dtype)
        if (own := self._tensors.pop(f"{norm}.weight", None)) is not None:
            weight.mul_(own)

    def _take_in_biases(self, at: str, layer: Layer) -> None:
        """Have the last products' biases as a column of the MLP's matrix, beside a feature that is always the same."""
        assert isinstance(layer.mlp, Mlp)
        mlp, first = layer.mlp, self._tensors[f"{at}mlp.gate_up.bias"]
        down, bias = self._tensors[f"{at}mlp.down"], self._tensors.pop(f"{at}mlp.down.bias").float()
        inner = down.shape[1] - CONSTANTS
        first[inner] = _CONSTANT
        if mlp.gated:
            first[-CONSTANTS] = 1.0
        if layer.parallel and (of_attention := self._tensors.pop(f"{at}o.bias", None)) is not None:
            bias = bias + of_attention.float()
        constant = activated(mlp, first.to(down.dtype)[None])[0, inner]
        down[:, inner].copy_(bias / constant.float())

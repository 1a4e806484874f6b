# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of PEFT, added to a model's weights as these are read: W + scale B A (Hu et al., 2021). Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import SafetensorsSource, TensorSource, TensorView
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.spec.packed_formats import Format
from anyaccel.validation import Fields, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
# Options of PEFT by which an adapter computes something else than W + scale B A, and ways to begin whose W is another.
_OTHER_PRODUCTS = (
    "use_dora", "fan_in_fan_out", "use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config",
    "layer_replication",
)  # fmt: skip
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "merge it with PEFT (model.merge_and_unload()) and save the whole model"


@dataclass(frozen=True)
class MergedTensor:
    """A matrix with an adapter: `base` [rows, cols] + up [rows, r] down [r, cols], in float32, a few rows at a time.

    Rows of `up` are in the order in which `base` stores its own.
    """

    base: Any  # a TensorView or a ConvertedTensor
    up: Any
    down: Any

    transposed = False
    plus = 0.0

    @property
    def order(self) -> Sequence[int] | None:
        order: Sequence[int] | None = self.base.order
        return order

    @property
    def where(self) -> str:
        return str(self.base.where)

    @property
    def type(self) -> str:
        return str(self.base.type)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    def format(self, cols: range) -> Format:
        """Floats: those that the base has, or bfloat16."""
        kept = self.type if isinstance(self.base, TensorView) and self.type in ("f32", "f16") else "bf16"
        return (kept, 0, False)

    def will_need(self) -> None:
        self.base.will_need()

    def floats(self, rows: Any, cols: range) -> Any:
        """float32 [rows, cols]."""
        import numpy

        base, stored = self.base, numpy.asarray(rows)
        if isinstance(base, TensorView):
            values = floats_of(replace(base, order=list(rows)), range(len(rows)))[:, cols.start : cols.stop]
            base.done(rows)
        else:
            values = base.floats(rows, cols)
        merged = values + self.up[stored] @ self.down[:, cols.start : cols.stop]
        return numpy.ascontiguousarray(merged, numpy.float32)

    def values(self, rows: Any, cols: range, group: int) -> tuple[Any, Any, Any]:
        raise NotImplementedError  # of floats nobody asks for it

    def entry(self, index: int) -> MergedTensor:
        raise Unsupported(f"adapter of stacked experts ({self.where})", advice=_MERGE)


class AdapterSource:
    """The tensors of a model with those that an adapter changes.

    Args:
        folder: of the adapter, as PEFT saves it.

    Raises:
        ModelError: the adapter is damaged, of another model, or has parts that no matrix can take.
    """

    def __init__(self, source: TensorSource, folder: Path) -> None:
        self._source = source
        self._products: dict[str, tuple[Any, Any]] = {}  # tensor -> up with its scale, as its rows are stored, and down
        config, pairs = check_adapter(folder), _pairs(folder)
        scales = _scales(config, pairs)
        for module, (down, up) in pairs.items():
            name = f"{module}.weight"
            if name not in source:
                raise ModelError(
                    f"{folder}: adapts {module!r}, which the model does not have as one matrix: the adapter is of "
                    f"another model, or of stacked experts; then {_MERGE}"
                )
            base = source.tensor(name)
            if base.transposed or base.plus or len(base.shape) != 2:
                raise Unsupported(f"adapter of a matrix that is stored otherwise ({base.where})", advice=_MERGE)
            if (up.shape[0], down.shape[1]) != tuple(base.shape) or up.shape[1] != down.shape[0]:
                shapes = f"{up.shape} and {down.shape} for a matrix of {tuple(base.shape)}"
                raise ModelError(f"{folder}: {module!r} has {shapes}: the adapter is of another model")
            stored = up * scales[module]
            if base.order is not None:
                stored[list(base.order)] = stored.copy()
            self._products[name] = stored, down

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def names(self) -> Iterable[str]:
        return self._source.names()

    def tensor(self, name: str) -> Any:
        base = self._source.tensor(name)
        return MergedTensor(base, *self._products[name]) if name in self._products else base

    def release(self, name: str) -> None:
        self._source.release(name)


def check_adapter(folder: Path) -> Fields:
    """The configuration of an adapter.

    Raises:
        ModelError: the folder has not an adapter's files, or the adapter computes something else than W + scale B A.
    """
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder}: is no adapter of PEFT, which has the files {CONFIG} and {WEIGHTS}")
    config = Fields(read_json(folder / CONFIG), f"{folder / CONFIG}: ")
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{folder}: peft_type {kind!r} is no LoRA adapter; {_MERGE}")
    values = config.known()
    if other := next((name for name in _OTHER_PRODUCTS if values.get(name)), None):
        raise ModelError(f"{folder}: {other} of {CONFIG} is not merged here; {_MERGE}")
    if values.get("alora_invocation_tokens"):
        raise ModelError(f"{folder}: acts from its alora_invocation_tokens on only: no merged weights do the same")
    if str(start := values.get("init_lora_weights")).lower().startswith(_OTHER_BASES):
        raise ModelError(f"{folder}: init_lora_weights={start!r} has changed the model's own weights; {_MERGE}")
    return config


def _pairs(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Module -> A [r, in] and B [out, r], float32."""
    tensors = SafetensorsSource(folder, [folder / WEIGHTS])
    found: dict[str, dict[str, Any]] = {}
    for name in tensors.names():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{folder}: has {name!r}, which is no part of a LoRA adapter of linear layers; {_MERGE}")
        tensor = tensors.tensor(name)
        if len(tensor.shape) != 2:
            raise ModelError(f"{folder}: {name!r} of shape {tuple(tensor.shape)} is no matrix; {_MERGE}")
        found.setdefault(match[1], {})[match[2]] = floats_of(tensor)
    alone = [module for module, pair in found.items() if len(pair) != 2]
    if alone or not found:
        raise ModelError(f"{folder}: {f'{alone[0]!r} has one matrix of two' if alone else 'has no matrices'}: damaged")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _scales(config: Fields, pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Module -> what its product is multiplied by."""
    whole = config.number("lora_alpha", 8.0)
    patterns = config.mapping("alpha_pattern").known() if config.has("alpha_pattern") else {}
    found = {}
    for module, (down, _) in pairs.items():
        # As PEFT: the first key that is the module's name or its end, as a regular expression.
        key = next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), None)
        alpha = float(patterns[key]) if key is not None else whole
        rank = down.shape[0]
        found[module] = alpha / (math.sqrt(rank) if config.get_bool("use_rslora", False) else rank)
    return found

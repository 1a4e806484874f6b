# SPDX-License-Identifier: Apache-2.0
"""Reads a model's config.json as transformers does: aliases and the family's defaults, with checks. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.inference.runtimes.spec import Activation

# Names in transformers' activations.py -> the runtime's.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "relu2": "relu2",
}
# Kinds whose values loading can bring into a packed format, or finds as plain tensors.
_QUANTISATIONS = ("gptq", "awq", "compressed-tensors")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# A damaged config must not ask for lists that fill the memory.
_MOST_LAYERS = 512
_MOST_VALUES = 1 << 16  # heads, values of a head
_OLD_LAYER_TYPES = {"attention": "full_attention"}


def finite(value: Any, name: str) -> float:
    """`value` as a float.

    Raises:
        ModelError: it is no number, or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config: {name}={value!r} is not a number")
    return float(value)


class Config:
    """A config as transformers would see it: missing values are the family's defaults, `null` stays None."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        self._values = {**defaults, **{key: value for key, value in values.items() if key not in aliases}}
        for key in aliases.keys() & values.keys():
            if values[key] is not None:
                self._values[aliases[key]] = values[key]
        if self._values.get("rope_parameters", False) is None:
            self._values["rope_parameters"] = defaults.get("rope_parameters")
        self._aliases = aliases
        if values.get("per_layer_config"):
            raise Unsupported("per_layer_config (layers of different sizes)")
        self._check_quantisation()

    def _check_quantisation(self) -> None:
        quantisation = self._values.get("quantization_config")
        if quantisation is None:
            return
        if not isinstance(quantisation, Mapping):
            raise ModelError(f"config: quantization_config={quantisation!r} is not an object")
        method = quantisation.get("quant_method")
        if method not in _QUANTISATIONS and not quantisation.get("dequantize"):
            raise Unsupported(f"quantization {method!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value; `default` where neither the config nor the family has one."""
        return self._values.get(self._aliases.get(name, name), default)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"config: {name} is missing")
        return value

    def integer(self, name: str, minimum: int = 1, maximum: int = (1 << 31) - 1) -> int:
        """A whole number; JSON's 64.0 is one too."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise ModelError(f"config: {name}={value!r} is not a whole number of {minimum} to {maximum}")
        if int(value) != value:
            raise ModelError(f"config: {name}={value!r} is not a whole number")
        return int(value)

    def integer_or(self, name: str, default: int, minimum: int = 1) -> int:
        """As `integer`, `default` when missing or null."""
        return default if self.get(name) is None else self.integer(name, minimum)

    def number(self, name: str) -> float:
        return finite(self[name], name)

    def number_or(self, name: str, default: float) -> float:
        """As `number`, `default` when missing or null."""
        return default if self.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        return bool(self.get(name, False))

    def activation(self, name: str = "hidden_act") -> Activation:
        value = self[name]
        if value not in _ACTIVATIONS:
            raise Unsupported(f"{name} {value!r}")
        return _ACTIVATIONS[value]

    @property
    def hidden(self) -> int:
        return self.integer("hidden_size")

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=_MOST_LAYERS)

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads", maximum=_MOST_VALUES)

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as heads when missing or null."""
        count = self.integer_or("num_key_value_heads", self.heads)
        if self.heads % count:
            raise ModelError(f"config: {self.heads} attention heads are not a multiple of {count} key/value heads")
        return count

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is None:
            return max(self.hidden // self.heads, 1)
        return self.integer("head_dim", maximum=_MOST_VALUES)

    def layer_types(self, otherwise: Callable[[int], bool] = lambda index: False) -> list[str]:
        """The config's `layer_types`; when it has none, those layers slide for whose index `otherwise` is true."""
        types = self.get("layer_types") or [
            "sliding_attention" if otherwise(index) else "full_attention" for index in range(self.layers)
        ]
        types = [_OLD_LAYER_TYPES.get(kind, kind) for kind in types]
        if len(types) < self.layers:
            raise ModelError(f"config: {len(types)} layer_types for {self.layers} layers")
        for kind in types:
            if kind not in _LAYER_TYPES:
                raise Unsupported(f"layer type {kind!r}")
        return types[: self.layers]

    def window(self) -> int:
        """The sliding window, 0 when there is none."""
        return self.integer_or("sliding_window", 0, minimum=0)

    def refuse(self, *names: str) -> None:
        """Raise for each option that is set."""
        for name in names:
            if self.get(name):
                raise Unsupported(f"{name}={self.get(name)!r}")

# SPDX-License-Identifier: Apache-2.0
"""Reads a model's config.json as transformers does: aliases and the family's defaults, with checks. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised import METHODS, method_of
from anyaccel.inference.spec.decoder import Activation
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import MAX_INT, Fields, check_text, short_repr

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
    "xielu": "xielu",
}
# Far more than any model has: a damaged config must not ask for lists that fill the memory.
MOST_LAYERS = 512
_MOST_HEADS = 1 << 16  # also values of a head
_MOST_VALUES = 1 << 20  # of a row or a column
_OLD_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}


class Config(Fields):
    """A config as transformers would see it: missing values are the family's defaults, `null` stays None."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        merged = {**defaults, **{key: value for key, value in values.items() if key not in aliases}}
        for key in aliases.keys() & values.keys():
            if values[key] is not None:
                merged[aliases[key]] = values[key]
        if merged.get("rope_parameters", False) is None:
            merged["rope_parameters"] = defaults.get("rope_parameters")
        super().__init__(merged, "config: ")
        self._aliases = aliases
        if values.get("per_layer_config") and "per_layer_config" not in defaults:
            raise Unsupported("per_layer_config (layers of different sizes)")
        quantisation = self.mapping("quantization_config")
        if quantisation.known() and not quantisation.get_bool("dequantize"):
            method = method_of(quantisation)
            if method not in METHODS:
                raise Unsupported(f"quantization {method!r}")

    def _value(self, name: str) -> Any:
        return super()._value(self._aliases.get(name, name))

    def integer(self, name: str, minimum: int = 1, maximum: int = MAX_INT) -> int:
        """A whole number that must be there."""
        return self.get_int(name, None, minimum, maximum)

    def integer_or(self, name: str, default: int, minimum: int = 1, maximum: int = MAX_INT) -> int:
        """As `integer`, `default` when missing or null."""
        return self.get_int(name, default, minimum, maximum)

    def size(self, name: str, default: int | None = None) -> int:
        """A dimension of the model's matrices: rows, columns, values of a head."""
        return self.get_int(name, default, 1, _MOST_VALUES)

    def activation(self, name: str = "hidden_act") -> Activation:
        value = self.text(name)
        if value not in _ACTIVATIONS:
            raise Unsupported(f"{name} {short_repr(value)}")
        return _ACTIVATIONS[value]

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MOST_LAYERS)

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads", maximum=_MOST_HEADS)

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as heads when missing or null."""
        count = self.integer_or("num_key_value_heads", self.heads)
        if self.heads % count:
            raise ModelError(f"config: {self.heads} attention heads are not a multiple of {count} key/value heads")
        return count

    @property
    def head_dim(self) -> int:
        if not self.has("head_dim"):
            return max(self.hidden // self.heads, 1)
        return self.integer("head_dim", maximum=_MOST_HEADS)

    def layer_types(
        self, otherwise: Callable[[int], bool] = lambda index: False, local: str = "sliding_attention"
    ) -> list[str]:
        """The config's `layer_types`; when it has none, those layers are local for whose index `otherwise` is true.

        Args:
            local: what layers are called that do not see everything.
        """
        given = self.items("layer_types") or [
            local if otherwise(index) else "full_attention" for index in range(self.layers)
        ]
        if len(given) < self.layers:
            raise ModelError(f"config: {len(given)} layer_types for {self.layers} layers")
        types = [check_text(kind, f"config: layer_types[{index}]") for index, kind in enumerate(given[: self.layers])]
        types = [_OLD_LAYER_TYPES.get(kind, kind) for kind in types]
        for kind in types:
            if kind not in ("full_attention", local):
                raise Unsupported(f"layer type {short_repr(kind)}")
        return types

    def window(self) -> int:
        """The sliding window, 0 when there is none."""
        return self.integer_or("sliding_window", 0, minimum=0)

    def refuse(self, *names: str) -> None:
        """Raise for each option that is set."""
        for name in names:
            if self._value(name):
                raise Unsupported(f"{name}={short_repr(self._value(name))}")

# SPDX-License-Identifier: Apache-2.0
"""From hidden states to a text's embedding, as a folder's modules.json of sentence-transformers says. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import folder_source
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.encoders.classifier import ACTIVATIONS, Array, Layer
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import Fields, check_list, check_mapping, error_text, read_json, short_repr

POOLINGS = ("mean", "cls", "last", "max")

# In the order in which several are put together.
_OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True)
class Pooling:
    """What is made of a text's hidden states.

    Attributes:
        modes: each gives `hidden` values; several are put one after another.
        layers: linears behind them.
        normalize: the result has length 1.
    """

    modes: tuple[str, ...] = ("mean",)
    layers: tuple[Layer, ...] = ()
    normalize: bool = False

    def __call__(self, hidden: Array, counts: Sequence[int]) -> Array:
        """Embeddings [texts, values] of hidden states [tokens, hidden] of texts with so many tokens."""
        sizes = numpy.asarray(counts)
        firsts = numpy.cumsum([0, *counts[:-1]])
        return self.behind(numpy.concatenate([_MODES[mode](hidden, firsts, sizes) for mode in self.modes], axis=1))

    def behind(self, x: Array) -> Array:
        """Embeddings [texts, values] of pooled hidden states [texts, values]."""
        for layer in self.layers:
            x = layer(x)
        return normalized(x) if self.normalize else x


def normalized(x: Array) -> Array:
    """Rows of length 1; zeros stay."""
    return numpy.asarray(x / numpy.maximum(numpy.linalg.norm(x, axis=1, keepdims=True), 1e-12))


def _mean(hidden: Array, firsts: Array, sizes: Array) -> Array:
    return numpy.asarray(numpy.add.reduceat(hidden, firsts, axis=0) / sizes[:, None].astype(numpy.float32))


def _weighted(hidden: Array, firsts: Array, sizes: Array) -> Array:
    """The later a token the more it counts (SGPT)."""
    weights = numpy.concatenate([numpy.arange(1, size + 1, dtype=numpy.float32) for size in sizes])[:, None]
    sums = numpy.add.reduceat(weights, firsts, axis=0)
    return numpy.asarray(numpy.add.reduceat(hidden * weights, firsts, axis=0) / sums)


_MODES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "cls": lambda hidden, firsts, sizes: hidden[firsts],
    "last": lambda hidden, firsts, sizes: hidden[firsts + sizes - 1],
    "max": lambda hidden, firsts, sizes: numpy.maximum.reduceat(hidden, firsts, axis=0),
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, firsts, sizes: (
        _mean(hidden, firsts, sizes) * numpy.sqrt(sizes[:, None].astype(numpy.float32))
    ),
    "weightedmean": _weighted,
}


def read_pooling(folder: Path) -> Pooling | None:
    """What a folder's modules.json says; None without one.

    Raises:
        Unsupported: it has a module of another kind.
        ModelError: a file is damaged.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None
    try:
        listed = check_list(json.loads(file.read_text()), f"{file}")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not a list of modules ({error_text(error)})") from error
    pooling = Pooling()
    for number, each in enumerate(listed):
        module = Fields(check_mapping(each, f"{file}: module {number}"), f"{file}: module {number}: ")
        kind = module.text("type").rpartition(".")[2]
        place = folder / module.text("path", "")
        if kind == "Pooling":
            pooling = Pooling(_modes(place), pooling.layers, pooling.normalize)
        elif kind == "Dense":
            pooling = Pooling(pooling.modes, (*pooling.layers, _dense(place)), pooling.normalize)
        elif kind == "Normalize":
            pooling = Pooling(pooling.modes, pooling.layers, True)
        elif kind not in ("Transformer", "Dropout"):
            raise Unsupported(f"module {short_repr(kind)} of sentence-transformers ({file})")
    return pooling


def _modes(place: Path) -> tuple[str, ...]:
    file = place / "config.json"
    config = Fields(read_json(file), f"{file}: ")
    if not config.get_bool("include_prompt", True):
        raise Unsupported(f"include_prompt=False ({file})")
    if config.has("pooling_mode"):
        given = config.items("pooling_mode") if config.is_list("pooling_mode") else [config.text("pooling_mode")]
        modes = [str(each).replace("lasttoken", "last") for each in given]
    else:
        modes = [mode for name, mode in _OLDER.items() if config.get_bool(name)] or ["mean"]
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise Unsupported(f"pooling {short_repr(unknown[0])} ({file})")
    return tuple(modes)


def _dense(place: Path) -> Layer:
    file = place / "config.json"
    config = Fields(read_json(file), f"{file}: ")
    activation = config.text("activation_function", "Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS or config.get_bool("use_residual"):
        raise Unsupported(f"activation_function {short_repr(activation)} ({file})")
    source = folder_source(place)
    bias = floats_of(source.tensor("linear.bias")) if "linear.bias" in source else None
    weight: Any = floats_of(source.tensor("linear.weight"))
    assert _ACTIVATIONS[activation] in ACTIVATIONS
    return Layer(weight, bias, _ACTIVATIONS[activation])

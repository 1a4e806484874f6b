# SPDX-License-Identifier: Apache-2.0
"""The heads of ...ForSequenceClassification: a few small products of one hidden state a text. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import ModuleSource, TensorSource, folder_source
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.families.family import Dense, EncoderFamily
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.mapping import Base, Unsupported

_CLASS = "ForSequenceClassification"
Array = numpy.ndarray[Any, Any]


def _gelu(x: Array) -> Array:
    phi = numpy.vectorize(math.erf, otypes=[numpy.float32])(x / math.sqrt(2.0))
    return numpy.asarray(0.5 * x * (1.0 + phi))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    "tanh": numpy.tanh,
    "relu": lambda x: numpy.maximum(x, 0),
    "gelu": _gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + numpy.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + numpy.exp(-x)),
}


@dataclass(frozen=True)
class Layer:
    """A linear, an activation and a norm: weight [out, in]."""

    weight: Array
    bias: Array | None
    activation: str = ""
    norm_weight: Array | None = None
    norm_bias: Array | None = None
    eps: float = 0.0

    def __call__(self, x: Array) -> Array:
        # Without BLAS, whose threads would wait for more work on the cores of the encoder's next text.
        x = numpy.einsum("ti,oi->to", x, self.weight)
        if self.bias is not None:
            x = x + self.bias
        x = ACTIVATIONS[self.activation](x)
        if self.norm_weight is not None:
            x = x - x.mean(-1, keepdims=True)
            x = x / numpy.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.norm_weight
            if self.norm_bias is not None:
                x = x + self.norm_bias
        return x.astype(numpy.float32, copy=False)


@dataclass(frozen=True)
class Classifier:
    """From hidden states to logits.

    Attributes:
        mean: the mean of a text's hidden states goes through the layers, not the first one.
    """

    layers: Sequence[Layer]
    mean: bool = False

    @property
    def labels(self) -> int:
        """How many logits a text has."""
        return int(self.layers[-1].weight.shape[0])

    def __call__(self, hidden: Array, counts: Sequence[int]) -> Array:
        """Logits [texts, labels] of hidden states [tokens, hidden] of texts with so many tokens."""
        firsts = numpy.cumsum([0, *counts[:-1]])
        x = hidden[firsts]
        if self.mean:
            x = numpy.add.reduceat(hidden, firsts, axis=0) / numpy.asarray(counts, numpy.float32)[:, None]
        for layer in self.layers:
            x = layer(x)
        return numpy.asarray(x)


def has_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config says that its model classifies texts."""
    return any(str(each).endswith(_CLASS) for each in config.get("architectures") or ())


def read_classifier(model: Any, config: Mapping[str, Any], family: EncoderFamily) -> Classifier:
    """The head of a Hugging Face folder, or of a model in memory.

    Raises:
        Unsupported: the family's heads are not known here, or the config asks for another one.
        ModelError: a tensor is missing.
    """
    if not family.classifier:
        raise Unsupported(f"head for sequence classification of {family.models}")
    source = _source(model)
    values = Config(config, family.defaults, family.aliases)
    pooling = values.text(family.pooling, "cls", ("cls", "mean")) if family.pooling else "cls"
    return Classifier([_layer(source, values, family, each) for each in family.classifier], pooling == "mean")


def read_pooler(model: Any, config: Mapping[str, Any], family: EncoderFamily) -> Layer | None:
    """BERT's pooler, which is a part of the encoder but not of its hidden states; None where the model has none."""
    if family.pooler is None:
        return None
    source = _source(model)
    if _find(source, family, f"{family.pooler.module}.weight") is None:
        return None
    return _layer(source, Config(config, family.defaults, family.aliases), family, family.pooler)


def _source(model: Any) -> TensorSource:
    return folder_source(Path(model).expanduser()) if isinstance(model, str | Path) else ModuleSource(model, False)


def _layer(source: TensorSource, config: Config, family: EncoderFamily, dense: Dense) -> Layer:
    activation = dense.activation
    if activation.startswith("="):
        said = config.text(activation[1:])
        activation = said if said == "tanh" else config.activation(activation[1:])
    if activation not in ACTIVATIONS:
        raise Unsupported(f"activation {activation!r} in a classification head")
    weight = _find(source, family, f"{dense.module}.weight")
    if weight is None:
        raise ModelError(f"the checkpoint has no tensor {dense.module.strip('/')}.weight for its classification head")
    norm = _find(source, family, f"{dense.norm}.weight") if dense.norm else None
    return Layer(
        weight,
        _find(source, family, f"{dense.module}.bias"),
        activation,
        norm,
        _find(source, family, f"{dense.norm}.bias") if dense.norm else None,
        config.number(family.norm_eps) if family.norm_eps else 0.0,
    )


def _find(source: TensorSource, family: EncoderFamily, module: str) -> Array | None:
    """A tensor as floats; None where there is none of the name."""
    for base in family.names.bases:
        name = _name(base, module)
        if name in source:
            return numpy.asarray(floats_of(source.tensor(name)))
    return None


def _name(base: Base, module: str) -> str:
    return base.root + module[1:] if module.startswith("/") else base.body + module

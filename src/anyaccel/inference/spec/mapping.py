# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a native weight lie in a checkpoint, and how a family says so. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anyaccel.errors import ModelError
from anyaccel.inference.spec.decoder import Attention, DecoderSpec, Layer


class Unsupported(ModelError):
    """The native or the device runtime lacks something that this model needs; its own code can still run it.

    Args:
        feature: what is lacking, with the value that asks for it, for example ``"hidden_act 'tanh'"``.
        runtime: which of the two was asked.
        advice: what the user can do.
    """

    def __init__(self, feature: str, runtime: str = "native", advice: str = "") -> None:
        super().__init__(f"the {runtime} runtime has no {feature}{'; ' if advice else ''}{advice}")
        self.feature = feature


@dataclass(frozen=True)
class Part:
    """Some rows of a checkpoint tensor. A native weight's rows are the concatenation of its parts.

    A vector is the values of its tensor (after `index`) in order, whatever the tensor's shape.

    Attributes:
        tensor: its name in the checkpoint.
        first, count: its rows, after `index` and `transposed`; count -1: all the rest.
        order: explicit rows instead of `first` and `count`.
        transposed: it is stored [in, out] (GPT-2's Conv1D, GPT-OSS's experts).
        index: entry of a stacked tensor [experts, ...].
        plus: added to each value (Gemma's norms multiply by 1 + weight).
        times: each value of a matrix is multiplied by it (Falcon-H1).
        adapter: the names of matrices [r, cols] and [rows, r] of a whole matrix, whose product is added (Zamba2).
    """

    tensor: str
    first: int = 0
    count: int = -1
    order: tuple[int, ...] | None = None
    transposed: bool = False
    index: int | None = None
    plus: float = 0.0
    times: float = 1.0
    adapter: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that it is made of."""
        return (self.tensor, *self.adapter)


@dataclass(frozen=True)
class Base:
    """A way to name a model's modules: `root` comes before the head, `body` before everything else."""

    body: str
    root: str = ""


@dataclass(frozen=True)
class At:
    """The weight that a rule is asked for."""

    spec: DecoderSpec
    base: Base
    prefix: str  # of the module that the rule's names are relative to
    suffix: str  # "weight" or "bias"
    layer: int = -1
    expert: int = -1

    @property
    def of_layer(self) -> Layer:
        return self.spec.layers[self.layer]

    @property
    def attention(self) -> Attention:
        """Of a layer that has it."""
        assert self.of_layer.attention is not None
        return self.of_layer.attention

    def name(self, module: str) -> str:
        """The tensor of `module`: relative to the layer, or to the root with a leading "/"; "=" adds no suffix."""
        suffix = f".{self.suffix}"
        if module.startswith("="):
            module, suffix = module[1:], ""
        module = module.replace("{expert}", str(self.expert))
        return (self.base.root + module[1:] if module.startswith("/") else self.prefix + module) + suffix


# The name of a module, of which all rows are taken; or a function that gives the parts.
Rule = str | Callable[[At], Sequence[Part]]
# A tuple is concatenated; a list has alternatives, of which a checkpoint has one.
Rules = Rule | tuple[Rule, ...] | list[Rule | tuple[Rule, ...]]


def stacked(module: str, first: int = 0, count: int = -1, transposed: bool = False) -> Rule:
    """The expert's entry of a stacked tensor [experts, ...]; a stacked bias has no `transposed`."""
    return lambda at: (
        Part(at.name(module), first, count, transposed=transposed and at.suffix == "weight", index=at.expert),
    )


def transposed(module: str) -> Rule:
    """A Conv1D: its weight is [in, out]."""
    return lambda at: (Part(at.name(module), transposed=at.suffix == "weight"),)


def plus_one(module: str) -> Rule:
    """A norm that multiplies by 1 + weight."""
    return lambda at: (Part(at.name(module), plus=1.0 if at.suffix == "weight" else 0.0),)


@dataclass(frozen=True)
class Names:
    """A family's names of modules.

    Attributes:
        rules: by the native name without the layer's and the expert's number; ".weight" or ".bias" is appended.
        layer: where a layer's modules are.
        bases: where the model's modules may be: in a model with a head, in one without, in one of several modalities.
    """

    rules: Mapping[str, Rules]
    layer: str = "layers.{layer}."
    bases: tuple[Base, ...] = field(
        default=(
            Base("model."),
            Base(""),
            Base("model.language_model."),
            Base("language_model.model.", "language_model."),
        )
    )

    def but(self, **changed: Rules) -> Names:
        """These names with some others, "mlp.down" written mlp__down."""
        return Names(
            {**self.rules, **{key.replace("__", "."): rule for key, rule in changed.items()}}, self.layer, self.bases
        )

    def parts(self, spec: DecoderSpec, name: str) -> list[list[Part]]:
        """The alternatives for the native weight `name`: the first one whose tensors all exist is it."""
        key, suffix, layer, expert = _split(name)
        rules = self.rules.get(key)
        if rules is None:
            raise ModelError(f"{name}: the model's family has no such weight")
        if key == "embed" and spec.tied:  # as transformers: a tied pair may be stored under either name
            rules = [*_as_list(rules), *_as_list(self.rules["head"])]
        alternatives = []
        for base in self.bases:
            prefix = base.body + (self.layer.format(layer=layer) if layer >= 0 else "")
            at = At(spec, base, prefix, suffix, layer, expert)
            for rule in _as_list(rules):
                found = list(_parts(rule, at))
                if found not in alternatives:
                    alternatives.append(found)
        return alternatives


class Tensors(Protocol):
    """What knows by name which tensors a checkpoint has."""

    def __contains__(self, name: str, /) -> bool: ...


def first_stored(alternatives: Sequence[Sequence[Part]], source: Tensors) -> Sequence[Part] | None:
    """The first of them whose tensors all exist."""
    return next((each for each in alternatives if all(name in source for part in each for name in part.tensors)), None)


def _as_list(rules: Rules) -> list[Rule | tuple[Rule, ...]]:
    return rules if isinstance(rules, list) else [rules]


def _parts(rule: Rule | tuple[Rule, ...], at: At) -> Iterator[Part]:
    for one in rule if isinstance(rule, tuple) else (rule,):
        if isinstance(one, str):
            yield Part(at.name(one))
        else:
            yield from one(at)


def _split(name: str) -> tuple[str, str, int, int]:
    """Native name -> key of the rules, suffix, layer, expert: "layers.3.experts.5.down.bias" is expert 5 of layer 3."""
    words = name.split(".")
    layer = expert = -1
    if words[0] == "layers":
        layer = int(words[1])
        words = words[2:]
    if words[0] == "experts":
        expert = int(words[1])
        words = [words[0], *words[2:]]
    suffix = words.pop() if words[-1] in ("weight", "bias") else "weight"
    return ".".join(words), suffix, layer, expert

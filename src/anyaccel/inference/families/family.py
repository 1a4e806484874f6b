# SPDX-License-Identifier: Apache-2.0
"""What a family of models is: one entry of a file's FAMILIES. Torch- and transformers-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec, HiddenInputs
from anyaccel.inference.spec.mapping import Base, Names, Rules
from anyaccel.validation import Fields, error_text


@dataclass(frozen=True)
class DraftHead:
    """A layer for multi-token prediction that checkpoints may have: it is like the last one with attention.

    Attributes:
        rules: names of its own weights (fuse, fuse_embed_norm, fuse_hidden_norm, final_norm), and of others that are
            not named as in the model. `{first}` is the number of the model's layers.
        layer, bases: as those of Names, of its weights; no bases: those of the model.
        taps, hidden_first: see HiddenInputs; a tap None is the number of the model's layers.
    """

    rules: Mapping[str, Rules]
    layer: str = "layers.{first}."
    bases: tuple[Base, ...] = ()
    taps: tuple[int | None, ...] = (-1,)
    hidden_first: bool = False

    def spec(self, model: DecoderSpec) -> DecoderSpec:
        """What it computes, beside that model."""
        layer = next(each for each in reversed(model.layers) if each.attention is not None)
        attention = layer.attention
        if attention is not None and attention.indexer is not None:  # there is no layer before it
            layer = replace(layer, attention=replace(attention, indexer=replace(attention.indexer, own=True)))
        taps = tuple(len(model.layers) if tap is None else tap for tap in self.taps)
        norm = model.final_norm
        inputs = HiddenInputs(
            len(taps) * model.hidden, taps, embed_norm=norm, hidden_norm=norm, hidden_first=self.hidden_first
        )
        return replace(model, layers=(layer,), tied=False, head_bias=False, hidden_inputs=inputs)

    def names(self, model: Names, layers: int) -> Names:
        """The names of its weights, beside a model of so many layers."""
        first = str(layers)
        rules = {
            name: rule.replace("{first}", first) if isinstance(rule, str) else rule for name, rule in self.rules.items()
        }
        return Names({**model.rules, **rules}, self.layer.replace("{first}", first), self.bases or model.bases)


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        models: what it is known by.
        build: config -> what it computes.
        names: of its weights.
        defaults: transformers' values for what a config.json lacks.
        aliases: other names of config values, as transformers' attribute_map (other name -> the one of `defaults`).
        draft_head: a layer of its checkpoints that drafts; None: they have none.
        text: the config of the language model is this entry of a config for several modalities; "": the config itself.
    """

    models: str
    build: Callable[[Config], DecoderSpec]
    names: Names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    draft_head: DraftHead | None = None

    def of_draft_head(self, config: Mapping[str, Any]) -> Family | None:
        """The same for the layer that drafts; None: the family has none. Raises as `spec` does."""
        head = self.draft_head
        if head is None:
            return None
        names = head.names(self.names, len(self.spec(config).layers))
        return replace(self, build=lambda given: head.spec(self.build(given)), names=names)

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """What the model computes, before sharding.

        Args:
            config: config.json, or `config.to_dict()`.

        Raises:
            Unsupported: the runtime lacks a feature that the config asks for.
            ModelError: a value is missing or impossible.
        """
        values = config
        if self.text:
            values = Fields(config, "config: ").mapping(self.text).known()
            # These are the outer level's.
            own = ("quantization_config", "tie_word_embeddings")
            values = {name: value for name, value in values.items() if name not in own}
            values |= {name: config[name] for name in own if name in config}
        try:
            return self.build(Config(values, self.defaults, self.aliases))
        except ModelError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ModelError(
                f"config: a value is of a wrong kind ({type(error).__name__}: {error_text(error)})"
            ) from error


@dataclass(frozen=True)
class Dense:
    """A linear of a classification head.

    Attributes:
        module: its name; one that begins with "/" is beside the encoder, else it is a part of it.
        activation: of its result; or the name of the config's value that says it, after an "=".
        norm: module of a norm behind it.
    """

    module: str
    activation: str = ""
    norm: str = ""


@dataclass(frozen=True)
class EncoderFamily(Family):
    """A `model_type` whose model makes hidden states of whole texts.

    Attributes:
        classifier: what ...ForSequenceClassification does with the hidden state of a text's first token.
        pooling: the config's value that says which hidden state that is; "": it is the first token's.
        pooler: what the model without a head does with it for its pooler_output, if the checkpoint has it.
        norm_eps: the config's value for norms of the classifier.
        marks_texts: tokens of a pair's second text are of type 1.
        only_with: the config's value without which the model is a decoder; "": it is an encoder always.
    """

    classifier: Sequence[Dense] = ()
    pooling: str = ""
    pooler: Dense | None = None
    norm_eps: str = ""
    marks_texts: bool = False
    only_with: str = ""

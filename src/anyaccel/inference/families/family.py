# SPDX-License-Identifier: Apache-2.0
"""What a family of models is: one entry of a file's FAMILIES. Torch- and transformers-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.mapping import Names
from anyaccel.validation import Fields, error_text


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        models: what it is known by.
        build: config -> what it computes.
        names: of its weights.
        defaults: transformers' values for what a config.json lacks.
        aliases: other names of config values, as transformers' attribute_map (other name -> the one of `defaults`).
        text: the config of the language model is this entry of a config for several modalities; "": the config itself.
    """

    models: str
    build: Callable[[Config], DecoderSpec]
    names: Names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

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
        norm_eps: the config's value for norms of the classifier.
        marks_texts: tokens of a pair's second text are of type 1.
        only_with: the config's value without which the model is a decoder; "": it is an encoder always.
    """

    classifier: Sequence[Dense] = ()
    pooling: str = ""
    norm_eps: str = ""
    marks_texts: bool = False
    only_with: str = ""

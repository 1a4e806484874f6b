# SPDX-License-Identifier: Apache-2.0
"""A native encoder: hidden states of whole texts, packed one after another without padding. Torch-free from files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy

from anyaccel.errors import UsageError
from anyaccel.inference.encoders.classifier import Classifier, Layer, has_classifier, read_classifier, read_pooler
from anyaccel.inference.families.registry import encoder_of
from anyaccel.inference.native.runtime import Callbacks, NativeModel, Progress, load_native
from anyaccel.inference.options import DEFAULTS, ModelOptions

if TYPE_CHECKING:
    from anyaccel import _llm

_RUN_TOKENS = 16384  # whose hidden states are made at once, where only a part of them is wanted


class Encoder:
    """An encoder that is ready, with the classification head of its checkpoint where there is one.

    Args:
        model: path of a Hugging Face folder, or a Hugging Face model in memory.
        options: precision and threads; an encoder has neither ranks nor a key/value cache that is kept.
        head: whether a classification head is read.

    Raises:
        Unsupported: the native runtime lacks something that this model needs.
        ModelError: a file is missing or damaged.
    """

    def __init__(
        self, model: Any, options: ModelOptions = DEFAULTS, head: bool = False, progress: Progress | None = None
    ) -> None:
        if options.ranks > 1:
            raise UsageError(f"{options.rank_options}: an encoder runs in one process")
        if options.draft is not None:
            raise UsageError("draft: an encoder predicts no tokens")
        self.native: NativeModel = load_native(model, options, callbacks=Callbacks(progress), encoder=True)
        if self.native.saving is not None:
            self.native.saving.begin()
        self.family = encoder_of(self.native.config)
        self.classifier: Classifier | None = None
        self.pooler: Layer | None = None
        if head and has_classifier(self.native.config):
            self.classifier = read_classifier(model, self.native.config, self.family)
        else:
            self.pooler = read_pooler(model, self.native.config, self.family)

    @property
    def hidden(self) -> int:
        """Values of a hidden state."""
        return self.native.spec.hidden

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        return self.native.spec.vocab

    @property
    def threads(self) -> int:
        """That compute."""
        return self.native.model.threads

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return self.native.model.weight_bytes

    @property
    def labels(self) -> int:
        """Classes of its head; 0 without one."""
        return 0 if self.classifier is None else self.classifier.labels

    @property
    def marks_texts(self) -> bool:
        """Whether the family tells apart the texts of a pair."""
        return self.family.marks_texts

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text."""
        return self.native.spec.max_tokens

    def encode(
        self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> numpy.ndarray[Any, Any]:
        """The last hidden states [tokens of all texts, hidden] in float32, text by text.

        Args:
            texts: the tokens of each, 1 or more.
            types: of the tokens, for encoders that tell a pair's texts apart; None: all are 0.

        Raises:
            UsageError: a text is empty or too long, or has tokens that the model has not.
        """
        counts = [len(text) for text in texts]
        tokens = numpy.fromiter((token for text in texts for token in text), numpy.int64, sum(counts))
        kinds = None
        if types is not None and self.native.spec.token_types > 1:
            kinds = numpy.fromiter((kind for text in types for kind in text), numpy.int64, sum(counts))
        return self.encode_packed(counts, tokens, kinds)

    def encode_packed(
        self, counts: Sequence[int], tokens: numpy.ndarray[Any, Any], types: numpy.ndarray[Any, Any] | None = None
    ) -> numpy.ndarray[Any, Any]:
        """As `encode`, of int64 arrays with the texts one after another."""
        hidden = numpy.empty((len(tokens), self.hidden), numpy.float32)
        if len(counts):
            model = cast("_llm.DecoderModel", self.native.model)
            kinds = 0 if types is None else types.ctypes.data
            model.encode(list(map(int, counts)), tokens.ctypes.data, kinds, hidden.ctypes.data)
        return hidden

    def pool(self, hidden: numpy.ndarray[Any, Any], counts: Sequence[int]) -> numpy.ndarray[Any, Any] | None:
        """What transformers calls pooler_output, of texts with so many tokens; None without a pooler."""
        if self.pooler is None or not len(counts):
            return None
        return self.pooler(hidden[numpy.cumsum([0, *counts[:-1]])])

    def groups(self, counts: Sequence[int]) -> list[list[int]]:
        """The texts' numbers in groups whose hidden states are made together, the longest texts first."""
        found: list[list[int]] = []
        total = _RUN_TOKENS
        for number in sorted(range(len(counts)), key=lambda each: -counts[each]):
            if total + counts[number] > _RUN_TOKENS:
                found.append([])
                total = 0
            found[-1].append(number)
            total += counts[number]
        return found

    def logits(
        self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> numpy.ndarray[Any, Any]:
        """What the classification head makes of each text: [texts, labels] in float32.

        Raises:
            UsageError: the model has none; and as `encode`.
        """
        if self.classifier is None:
            kinds = self.native.config.get("architectures")
            raise UsageError(f"the model has no head for sequence classification (architectures={kinds!r})")
        found = numpy.empty((len(texts), self.classifier.labels), numpy.float32)
        for group in self.groups([len(text) for text in texts]):
            own = [texts[number] for number in group]
            hidden = self.encode(own, None if types is None else [types[number] for number in group])
            found[group] = self.classifier(hidden, [len(text) for text in own])
        return found

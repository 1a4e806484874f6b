# SPDX-License-Identifier: Apache-2.0
"""Encoders and classifiers of texts without a native family: transformers' code with packed linears."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers.utils import logging as transformers_logging

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.encoders.opening import scores_texts
from anyaccel.inference.encoders.pooling import Pooling
from anyaccel.inference.generic.runtime import Packed, pack
from anyaccel.inference.options import ModelOptions
from anyaccel.validation import error_text

Array = numpy.ndarray[Any, Any]

logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 32  # which are padded to the longest of them, and sorted by length before


def pack_module(module: Any, options: ModelOptions) -> Packed:
    """Give a module of transformers packed linears and norms in the place of its own ones."""
    module.eval()
    made = pack(module, "bf16" if options.dtype == "auto" else options.dtype, options.group_size)
    name = type(module).__name__
    logger.warning("runtime: the model's own code with packed linears; the native one has no %s", name)
    return made


class OwnCode:
    """A model's hidden states, or with `head` its logits, by transformers' code.

    Args:
        folder: of a Hugging Face encoder, also the one of an encoder-decoder; of a causal model the last hidden states.

    Attributes:
        hidden: values of a hidden state.
        labels: names of classes; 0 without `head`.
        max_tokens: the most tokens of a text; 0: no limit.
        vocabulary, threads, weight_bytes: its tokens; threads that compute; bytes of its weights.
        marks_texts: it tells apart the texts of a pair.

    Raises:
        ModelError: transformers cannot load it. UsageError: an option is not for such models.
    """

    usual = Pooling(("mean",))

    def __init__(self, folder: Path, options: ModelOptions, head: bool = False) -> None:
        if options.ranks > 1:
            raise UsageError(f"{options.rank_options}: an encoder runs in one process")
        if options.draft is not None:
            raise UsageError("draft: an encoder predicts no tokens")
        if head and not scores_texts(folder):  # transformers would make a random one
            raise UsageError(f"{folder}: the model has no head that scores pairs of texts; `anyaccel embed` is for it")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(options.dtype, torch.bfloat16)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            named = getattr(transformers, str((config.architectures or [""])[0]), None)
            kind: Any = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
            if not head and getattr(named, "__name__", "").endswith("EncoderModel"):
                kind = named
            module = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
            if config.is_encoder_decoder and not head:
                module = module.get_encoder()
        except Exception as error:  # a configuration can be wrong in any way
            raise ModelError(f"{folder}: transformers cannot load this model ({error_text(error)})") from error
        made, self._module = pack_module(module, options), module
        self._types = "token_type_ids" in inspect.signature(self._module.forward).parameters
        self._pad = getattr(config, "pad_token_id", None)
        self.marks_texts = self._types and getattr(config, "type_vocab_size", 2) > 1
        self.labels = config.num_labels if head else 0
        self.hidden = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0))
        self.max_tokens = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.vocabulary, self.threads, self.weight_bytes = (
            int(getattr(config, "vocab_size", 0)),
            torch.get_num_threads(),
            made.bytes,
        )

    def check(self, pooling: Pooling) -> None:
        """It has them all."""

    def embed(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, pooling: Pooling) -> Array:
        """Embeddings [texts, values] of tokens."""
        found: Array | None = None
        for numbers, output, mask in self._outputs(texts, types):
            hidden = output.last_hidden_state[mask].float().numpy()
            made = pooling(hidden, [len(texts[number]) for number in numbers])
            if found is None:
                found = numpy.empty((len(texts), made.shape[1]), numpy.float32)
            found[numbers] = made
        return numpy.zeros((0, self.hidden), numpy.float32) if found is None else found

    def logits(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Array:
        """[texts, labels]."""
        found = numpy.empty((len(texts), self.labels), numpy.float32)
        for numbers, output, _ in self._outputs(texts, types):
            found[numbers] = output.logits.float().numpy()
        return found

    def _outputs(
        self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None
    ) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
        """Of texts of like lengths: their numbers, the module's output, and which tokens are no padding."""
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        step = 1 if self._pad is None else _TEXTS_AT_ONCE  # heads of causal models look for the token that pads
        for first in range(0, len(order), step):
            numbers = order[first : first + step]
            shape = len(numbers), len(texts[numbers[0]])
            given = {"input_ids": torch.full(shape, self._pad or 0), "attention_mask": torch.zeros(shape).long()}
            if self._types and types is not None:
                given["token_type_ids"] = torch.zeros(shape).long()
            for row, number in enumerate(numbers):
                end = len(texts[number])
                given["input_ids"][row, :end] = torch.tensor(texts[number])
                given["attention_mask"][row, :end] = 1
                if "token_type_ids" in given and types is not None:
                    given["token_type_ids"][row, :end] = torch.tensor(types[number])
            try:
                with torch.inference_mode():
                    output = self._module(**given)
            except (TypeError, ValueError, AttributeError) as error:
                kind = type(self._module).__name__
                raise ModelError(f"{kind}: it does not read texts alone ({error_text(error)})") from error
            yield numbers, output, given["attention_mask"].bool()

# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: its tensors and the configs that go with them, whatever its format. Torch-free."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.inference.checkpoints.model_path import check_language_model, check_model_path
from anyaccel.inference.checkpoints.sources import BLOCKS, TensorSource, TensorView, folder_source
from anyaccel.inference.families.eagle import EAGLE3, eagle3_config, is_eagle3
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.registry import encoder_of, family_of
from anyaccel.inference.spec.decoder import DecoderSpec, Moe
from anyaccel.inference.spec.mapping import Unsupported, first_stored
from anyaccel.validation import read_json, short_repr

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20  # of an embedding and a head, compared and given back at a time
_HEAD = re.compile(r"(^|\.)lm_head\.")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors under Hugging Face's names and the configs that go with them.

    Attributes:
        check_all_used: called with the names of the source's tensors that the model reads.
        encoder: hidden states are wanted, and what is beside the encoder is not read.
        draft_head: of the layer that drafts, where that is wanted and not the model.
        headless: no logits are wanted, so that a head which is missing is not missed.
        rounded: what a model in memory has made of the frequencies of its rotary positions; None: they are as computed.
    """

    source: TensorSource
    config: dict[str, Any]
    generation_config: dict[str, Any]
    check_all_used: Callable[[Iterable[str]], None] | None = None
    rounded: Callable[[Sequence[float]], tuple[float, ...]] | None = None
    encoder: bool = False
    headless: bool = False
    draft_head: Family | None = None

    @property
    def family(self) -> Family:
        """What the config is of.

        Raises:
            Unsupported: it is of none that runs here.
        """
        if self.draft_head is not None:
            return self.draft_head
        return encoder_of(self.config) if self.encoder else family_of(self.config)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: something is missing or damaged. Unsupported: it is of a kind that is not read here.
    """
    check_model_path(path)
    if path.is_file():
        from anyaccel.inference.families.gguf_models import open_gguf

        opened = open_gguf(path)
        return Checkpoint(opened.source, opened.config, opened.generation_config, opened.source.check_all_used)
    from anyaccel.inference.checkpoints.quantised import folder_config, quantised_source

    config = folder_config(path)
    generation = path / "generation_config.json"
    from anyaccel.inference.families.text_part import READS, TextPart, text_part

    check_language_model(path, config)
    source = quantised_source(folder_source(path), config)
    if (part := text_part(config, any(map(_HEAD.search, source.names())))) is not None:
        if (reads := READS.get(config["model_type"])) is not None:
            logger.warning("%s: the language model of %s runs, %s is read", path, config["model_type"], reads)
        source, config = TextPart(source), part
    return Checkpoint(source, config, read_json(generation) if generation.is_file() else {})


def read_encoder(path: Path) -> Checkpoint:
    """The checkpoint of an encoder in a Hugging Face folder.

    Raises:
        ModelError: something is missing or damaged. Unsupported: it is of a kind that is not read here.
    """
    from anyaccel.inference.checkpoints.quantised import folder_config, quantised_source

    check_model_path(path)
    if path.is_file():
        raise Unsupported(f"encoder in a file ({path.name})", advice="give the path of a Hugging Face folder")
    config = folder_config(path)
    return Checkpoint(quantised_source(folder_source(path), config), config, {}, encoder=True)


def has_experts(path: Path) -> bool:
    """Whether a model is a mixture of experts that the native runtime has."""
    try:
        checkpoint = read_checkpoint(path)
        layers = checkpoint.family.spec(checkpoint.config).layers
    except AnyAccelError:
        return False
    return any(isinstance(layer.mlp, Moe) for layer in layers)


def check_head(path: Path, checkpoint: Checkpoint, kind: str) -> None:
    """Raise ModelError for a model without a head, whose class is `kind`, where the embedding is not its head."""
    family = checkpoint.family
    spec = family.spec(checkpoint.config)
    heads = family.names.parts(spec, "head")
    if not spec.tied and not any(part.tensor in checkpoint.source for parts in heads for part in parts):
        raise ModelError(f"{path}: {kind} has no head that predicts the next token, and its embedding is not one")


def of_draft_head(path: Path, checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """The same for the layer that drafts for a model of so many layers.

    Raises:
        Unsupported: models of its family have none. ModelError: this one has none.
    """
    if is_eagle3(checkpoint.config):
        config = eagle3_config(checkpoint.config, layers)
        return replace(checkpoint, config=config, draft_head=EAGLE3, check_all_used=None)
    family = family_of(checkpoint.config).of_draft_head(checkpoint.config)
    if family is None:
        raise Unsupported(f"multi-token prediction of model_type {short_repr(checkpoint.config.get('model_type'))}")
    found = family.names.parts(family.spec(checkpoint.config), "fuse")
    if not any(part.tensor in checkpoint.source for parts in found for part in parts):
        raise ModelError(
            f"{path}: the checkpoint has no weights for multi-token prediction ({found[0][0].tensor} would be one): "
            "draft with another model, or with ngram"
        )
    return replace(checkpoint, draft_head=family, check_all_used=None)


def find_untied_head(source: TensorSource, family: Family, spec: DecoderSpec) -> tuple[str, str] | None:
    """The tensors of embedding and head, where `spec` ties them and both are stored with different values.

    Such a checkpoint comes of training that untied the two and left the flag. transformers believes the weights then.
    """
    if not spec.tied:
        return None
    untied = replace(spec, tied=False)
    stored = []
    for name in ("embed", "head"):
        alternatives = family.names.parts(untied, name)
        found = first_stored(alternatives, source)
        if found is None:
            return None
        stored.append(found[0].tensor)
    return None if _have_equal_values(source, stored[0], stored[1]) else (stored[0], stored[1])


def _have_equal_values(source: TensorSource, embedding: str, head: str) -> bool:
    a, b = source.tensor(embedding), source.tensor(head)
    if not isinstance(a, TensorView) or not isinstance(b, TensorView):
        return embedding == head  # not compared: nobody stores one quantised matrix under two names
    if (a.type, a.shape) != (b.type, b.shape) or len(a.shape) != 2:
        return False
    if (a.address, a.strides) == (b.address, b.strides):
        return True
    if BLOCKS[a.type][0] > 1:
        return False
    try:
        step = max(_CHUNK_BYTES // max(a.shape[1] * BLOCKS[a.type][1], 1), 1)
        chunks = (range(first, min(first + step, a.shape[0])) for first in range(0, a.shape[0], step))
        return all(_same_rows(a, b, rows) for rows in chunks)
    finally:
        a.done(range(a.shape[0]))
        b.done(range(b.shape[0]))


def _same_rows(a: TensorView, b: TensorView, rows: range) -> bool:
    """Whether these rows have the same bytes in both."""
    import numpy

    same = numpy.array_equal(_rows(a, rows), _rows(b, rows))
    for each in (a, b):
        if each.is_by_rows:
            each.done(rows)
    return bool(same)


def _rows(tensor: TensorView, rows: range) -> Any:
    """The bits of rows, as unsigned numbers in place."""
    import numpy

    size = BLOCKS[tensor.type][1]
    length = (len(rows) - 1) * tensor.strides[0] + (tensor.shape[1] - 1) * tensor.strides[1] + size
    memory: Any = (ctypes.c_ubyte * length).from_address(tensor.address + rows.start * tensor.strides[0])
    return numpy.ndarray((len(rows), tensor.shape[1]), f"u{size}", memory, strides=tensor.strides)

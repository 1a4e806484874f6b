# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: its tensors and the configs that go with them, whatever its format. Torch-free."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.model_path import check_language_model, check_model_path
from anyaccel.inference.checkpoints.sources import TensorSource, folder_source
from anyaccel.outside import read_json

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"(^|\.)lm_head\.")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors under Hugging Face's names and the configs that go with them.

    Attributes:
        check_all_used: called with the names of the source's tensors that the model reads.
        rounded: what a model in memory has made of the frequencies of its rotary positions; None: they are as computed.
    """

    source: TensorSource
    config: dict[str, Any]
    generation_config: dict[str, Any]
    check_all_used: Callable[[Iterable[str]], None] | None = None
    rounded: Callable[[Sequence[float]], tuple[float, ...]] | None = None


def checkpoint_of(path: Path) -> Checkpoint:
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
        reads = READS[config["model_type"]]
        logger.warning("%s: the language model of %s runs, %s is read", path, config["model_type"], reads)
        source, config = TextPart(source), part
    return Checkpoint(source, config, read_json(generation) if generation.is_file() else {})


def check_head(path: Path, checkpoint: Checkpoint, kind: str) -> None:
    """Raise ModelError for a model without a head, whose class is `kind`, where the embedding is not its head."""
    from anyaccel.inference.families.registry import family_of

    family = family_of(checkpoint.config)
    spec = family.spec(checkpoint.config)
    heads = family.names.parts(spec, "head")
    if not spec.tied and not any(part.tensor in checkpoint.source for parts in heads for part in parts):
        raise ModelError(f"{path}: {kind} has no head that predicts the next token, and its embedding is not one")

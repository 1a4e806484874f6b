# SPDX-License-Identifier: Apache-2.0
"""Which models are encoders that run natively. Torch-free from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.registry import FAMILIES, is_encoder_family
from anyaccel.validation import read_json

# Of transformers' classes of these families. A folder of a masked LM is used as the encoder in it.
_CLASSES = ("Model", "ForSequenceClassification")


def is_encoder(model: Any) -> bool:
    """Whether a folder, or a Hugging Face model in memory, is an encoder or classifier of a family that is known here.

    Of an unreadable folder this is False: who opens it says what is wrong.
    """
    if isinstance(model, str | Path):
        return is_encoder_config(config_of(Path(model).expanduser()), (*_CLASSES, "ForMaskedLM"))
    config = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping) or not type(model).__name__.endswith(_CLASSES):
        return False
    return is_encoder_family(config.to_dict()) and not getattr(config, "is_decoder", False)


def reads_whole_texts(folder: Path) -> bool:
    """Whether a folder is of an encoder or classifier, native or not: of what makes no text."""
    return is_encoder(folder) or is_of_own_code(folder) or scores_texts(folder)


def scores_texts(folder: Path) -> bool:
    """Whether a folder is, by the class that it names, of a classifier of texts."""
    return _named(config_of(folder)).endswith("ForSequenceClassification")


def is_of_own_code(folder: Path) -> bool:
    """Whether neither a native encoder nor a native decoder makes embeddings of a folder's model."""
    config = config_of(folder)
    name = _named(config)
    encodes = name.endswith(("Model", "ForMaskedLM")) and not name.endswith("LMHeadModel")
    return encodes and not is_encoder_config(config) and config.get("model_type") not in FAMILIES


def _named(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def is_encoder_config(config: Mapping[str, Any], classes: tuple[str, ...] = (*_CLASSES, "ForMaskedLM")) -> bool:
    """Whether a config.json is of such a model."""
    named = config.get("architectures")
    names = [str(each) for each in named] if isinstance(named, list) else []
    return is_encoder_family(config) and all(name.endswith(classes) for name in names)


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json; {} where there is none that can be read."""
    file = folder / "config.json"
    try:
        return read_json(file) if file.is_file() else {}
    except ModelError:
        return {}

# SPDX-License-Identifier: Apache-2.0
"""Which models the native runtime runs: what the files beside this one have in their FAMILIES and ARCHITECTURES.

Torch- and transformers-free. See docs/add-a-model.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from anyaccel.inference import families
from anyaccel.inference.families.family import EncoderFamily, Family
from anyaccel.inference.families.gguf import Architecture
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import short_repr

# By Hugging Face's model_type, and by GGUF's name of an architecture.
FAMILIES: dict[str, Family] = {}
ENCODERS: dict[str, EncoderFamily] = {}
ARCHITECTURES: dict[str, Architecture] = {}

for _file in pkgutil.iter_modules(families.__path__):
    if _file.name not in ("registry", "gguf_models", "text_part"):  # which import this one
        _module = importlib.import_module(f"{families.__name__}.{_file.name}")
        FAMILIES |= getattr(_module, "FAMILIES", {})
        ENCODERS |= getattr(_module, "ENCODERS", {})
        ARCHITECTURES |= getattr(_module, "ARCHITECTURES", {})


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.

    Raises:
        Unsupported: there is none.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise Unsupported(f"model_type {short_repr(kind)}")
    return family


def is_encoder_family(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a family of encoders."""
    kind = config.get("model_type")
    family = ENCODERS.get(kind) if isinstance(kind, str) else None
    return family is not None and (not family.only_with or bool(config.get(family.only_with)))


def encoder_of(config: Mapping[str, Any]) -> EncoderFamily:
    """The family of an encoder's config.

    Raises:
        Unsupported: there is none.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not is_encoder_family(config):
        raise Unsupported(f"encoder of model_type {short_repr(kind)}")
    return ENCODERS[kind]

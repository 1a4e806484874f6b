# SPDX-License-Identifier: Apache-2.0
"""An engine on its model's own code as a model that takes requests: see `executor.py`.

`engine` is an InferenceEngine, which is made of what is here.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin

from anyaccel import _llm
from anyaccel.errors import ModelError
from anyaccel.inference.generic.executor import BatchedExecutor, OneByOneExecutor, depends_on_length
from anyaccel.inference.generic.steps import TorchSequence
from anyaccel.inference.native.runtime import NativeModel, cache_limit
from anyaccel.inference.spec.decoder import DecoderSpec, Rope

logger = logging.getLogger(__name__)

_together: WeakKeyDictionary[Any, NativeModel | None] = WeakKeyDictionary()


def computed_together(engine: Any) -> NativeModel | None:
    """What computes the tokens of several sequences together by the engine's module; None where it does not allow that.

    All ranks of the engine call it.
    """
    if engine not in _together:
        _together[engine] = _compute_together(engine)
    return _together[engine]


def _compute_together(engine: Any) -> NativeModel | None:
    is_usual = getattr(type(engine.module), "generate", None) is GenerationMixin.generate
    if engine.runtime != "torch" or not is_usual or engine.config.is_encoder_decoder:
        return None
    try:
        return batched_model(engine)
    except ModelError as why:
        logger.info("%s", why)
        return None


def answered_together(engine: Any) -> NativeModel | None:
    """The same for whole answers; None also where the model's generation_config demands something of their logits."""
    found = computed_together(engine)
    if found is None or TorchSequence(engine.module, torch.tensor([[0]], device=engine.device), 1).rules:
        return None
    return found


def batched_model(engine: Any) -> NativeModel:
    """Tokens of all sequences together.

    Raises:
        ModelError: the module does not allow it, see `BatchedExecutor`.
    """
    return model_of(engine, BatchedExecutor(engine.module, *_bytes(engine), engine.group))


def one_by_one_model(engine: Any) -> NativeModel:
    """One sequence after another."""
    return model_of(engine, OneByOneExecutor(engine.module, *_bytes(engine)))


def _bytes(engine: Any) -> tuple[int, int]:
    """The most of keys and values, and those of the weights."""
    weights = sum(each.numel() * each.element_size() for each in engine.module.parameters())
    return engine.settings.cache_bytes or cache_limit(engine.tp_size), weights + engine.packed_bytes


def model_of(engine: Any, executor: Any) -> NativeModel:
    """What makes tokens of an executor of the engine's module."""
    config = engine.config
    vocabulary, context = sizes_of(config)
    # The server reads of it whether prefixes may be shared.
    ropes = (Rope((1.0,), dynamic_from=1),) if depends_on_length(config) else ()
    width = getattr(config.get_text_config(), "hidden_size", 1)
    spec = DecoderSpec(vocabulary, width, (), None, ropes=ropes, max_tokens=context)
    dtype, generation = engine.settings.dtype, getattr(engine.module, "generation_config", None)
    defaults = {} if generation is None else generation.to_dict()
    model = _llm.ExternalModel(spec, executor)
    return NativeModel(model, spec, spec, config.to_dict(), defaults, dtype, {}, runtime=engine.runtime)


def sizes_of(config: Any) -> tuple[int, int]:
    """The vocabulary and the longest context of a configuration's model, 0 for any."""
    own = config.get_text_config()
    return own.vocab_size, max(getattr(own, "max_position_embeddings", None) or 0, 0)  # XLNet's -1: any

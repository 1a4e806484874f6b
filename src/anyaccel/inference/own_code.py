# SPDX-License-Identifier: Apache-2.0
"""Models that run their own code behind requests and the server's scheduler. Torch-free until one is loaded."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from anyaccel import host_memory
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.generate import sizes_of
from anyaccel.inference.native.runtime import SHARE_OF_MEMORY, Callbacks, NativeModel, RankPlace
from anyaccel.inference.opening import OwnCode
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.decoder import DecoderSpec, Rope

logger = logging.getLogger(__name__)


def own_code_model(path: Path, code: OwnCode, options: ModelOptions, callbacks: Callbacks) -> NativeModel:
    """A model on its own code as requests and the server's scheduler take it: see `inference/generic/executor.py`.

    Raises:
        UsageError: it is none of those that continue their prompt.
        ModelError: see `own_code_engine`.
    """
    from transformers.utils import logging as transformers_logging

    from anyaccel import _llm
    from anyaccel.inference.engine import own_code_engine
    from anyaccel.inference.generic.executor import BatchedExecutor, OneByOneExecutor, depends_on_length

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings = dataclasses.replace(options, cache_bytes=0, kv_cache="auto", runtime="auto")
    engine = own_code_engine(path, settings, RankPlace(), code, callbacks.progress)
    module: Any = engine.module
    config = module.config
    if config.is_encoder_decoder:
        raise UsageError(
            f"{path}: {type(module).__name__} has an encoder for the prompt; anyaccel generate has such models"
        )
    limit = options.cache_bytes or int(host_memory.available() * SHARE_OF_MEMORY)
    weights = sum(each.numel() * each.element_size() for each in module.parameters())
    weights += engine.packed_bytes
    executor: Any
    try:
        executor, how = BatchedExecutor(module, limit, weights), "together"
    except ModelError as why:
        logger.info("%s", why)
        executor, how = OneByOneExecutor(module, limit, weights), "one after another"
    callbacks.line(f"{code}; requests are computed {how}")
    vocabulary, context = sizes_of(engine)
    # The server reads of it whether prefixes may be shared.
    ropes = (Rope((1.0,), dynamic_from=1),) if depends_on_length(config) else ()
    spec = DecoderSpec(vocabulary, config.get_text_config().hidden_size, (), None, ropes=ropes, max_tokens=context)
    return NativeModel(
        _llm.ExternalModel(spec, executor),
        spec,
        spec,
        config.to_dict(),
        module.generation_config.to_dict(),
        options.dtype,
        {},
        runtime=engine.runtime,
    )

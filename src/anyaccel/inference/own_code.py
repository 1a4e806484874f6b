# SPDX-License-Identifier: Apache-2.0
"""Models that run their own code behind the server's scheduler. Torch-free until one is loaded."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace
from anyaccel.inference.opening import OwnCode
from anyaccel.inference.options import ModelOptions

logger = logging.getLogger(__name__)


def own_code_model(path: Path, code: OwnCode, options: ModelOptions, callbacks: Callbacks) -> NativeModel:
    """A model on its own code as requests and the server's scheduler take it: see `inference/generic/executor.py`.

    Raises:
        UsageError: it is none of those that continue their prompt.
        ModelError: see `own_code_engine`.
    """
    from transformers.utils import logging as transformers_logging

    from anyaccel.inference.engine import own_code_engine
    from anyaccel.inference.generic.requests import batched_model, one_by_one_model

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings = dataclasses.replace(options, kv_cache="auto", runtime="auto")
    engine = own_code_engine(path, settings, RankPlace(), code, callbacks.progress)
    if engine.config.is_encoder_decoder:
        kind = type(engine.module).__name__
        raise UsageError(f"{path}: {kind} has an encoder for the prompt; anyaccel generate has such models")
    try:
        model, how = batched_model(engine), "together"
    except ModelError as why:
        logger.info("%s", why)
        model, how = one_by_one_model(engine), "one after another"
    callbacks.line(f"{code}; requests are computed {how}")
    return model

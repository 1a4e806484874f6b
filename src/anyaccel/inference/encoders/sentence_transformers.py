# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers on the native encoder, as its `backend="anyaccel"`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.extras import pip_line
from anyaccel.inference.encoders.model import Encoder
from anyaccel.inference.encoders.module import NativeEncoderModel
from anyaccel.inference.encoders.opening import is_encoder
from anyaccel.inference.encoders.own_code import pack_module
from anyaccel.inference.options import ModelOptions, dtype_name

BACKEND = "anyaccel"


def _transformer_class() -> Any:
    """sentence-transformers' module that has a Hugging Face model."""
    for place in ("sentence_transformers.base.modules.transformer", "sentence_transformers.models.Transformer"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(place).Transformer
    raise AnyAccelError(f"this needs more packages: {pip_line('sentence-transformers')}")


def _options(given: dict[str, Any]) -> ModelOptions:
    """The options among `model_kwargs`; float32 unless they say otherwise, as sentence-transformers has it."""
    values = {name: given[name] for name in ("threads", "group_size") if name in given}
    dtype = given.get("dtype", given.get("torch_dtype")) or "fp32"
    return ModelOptions(dtype=dtype_name(dtype), **values)


def _wrapped(load: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("backend") != BACKEND:
            return load(self, *args, **kwargs)
        name = bound.arguments["model_name_or_path"]
        if not Path(name).expanduser().is_dir():
            raise UsageError(f"{name}: backend='anyaccel' takes the path of a folder; download the model first")
        config = bound.arguments["config"]
        task = bound.arguments.get("transformer_task") or "feature-extraction"
        if task not in ("feature-extraction", "sequence-classification"):
            raise UsageError(f"{name}: backend='anyaccel' has no {task!r}")
        more = {**bound.arguments.get("model_kwargs", {}), **bound.arguments.get("model_args", {})}
        if not is_encoder(name):  # a causal model, or one without a native family
            bound.arguments["backend"] = "torch"
            module = load(*bound.args, **bound.kwargs)
            pack_module(module, _options(more))
            return module
        encoder = Encoder(name, _options(more), head=task == "sequence-classification")
        if task == "sequence-classification" and encoder.classifier is None:
            raise UsageError(f"{name}: the model has no head for sequence classification")
        return NativeEncoderModel(encoder, config)

    return load_model


def add_to_sentence_transformers() -> None:
    """Let SentenceTransformer and CrossEncoder have `backend="anyaccel"`; calling it again changes nothing.

    `model_kwargs` may have dtype (float32 without it), group_size and threads, see ModelOptions.
    """
    transformer = _transformer_class()
    if not hasattr(transformer._load_model, "__wrapped__"):
        transformer._load_model = _wrapped(transformer._load_model)

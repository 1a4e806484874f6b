# SPDX-License-Identifier: Apache-2.0
"""deepspeed.init_inference on anyaccel's."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import anyaccel.inference
from anyaccel.errors import UsageError
from anyaccel.inference import InferenceEngine
from anyaccel.launch.small_file import read_small_file

from ._cover import refuse

logger = logging.getLogger("anyaccel.compat")

# Other names of an option.
_ALIASES = {"tp": "tensor_parallel", "kernel_inject": "replace_with_kernel_inject"}
# What only says how fast it is to be, or how DeepSpeed divides a model: results are the same without.
_NEEDLESS = frozenset(
    {
        "replace_with_kernel_inject", "replace_method", "injection_policy", "injection_dict", "injection_policy_tuple",
        "enable_cuda_graph", "use_triton", "triton_autotune", "max_out_tokens", "max_tokens", "min_out_tokens",
        "min_tokens", "return_tuple", "set_empty_params", "keep_module_on_host", "transposed_mode",
    }
)  # fmt: skip
# What changes results or files; accepted as long as it is off. Option -> what to do instead.
_REFUSED = {
    "checkpoint": "give init_inference the path of the model's folder instead of a module",
    "base_dir": "give init_inference the path of the model's folder instead of a module",
    "save_mp_checkpoint_path": "ranks read their shards out of the whole checkpoint; `anyaccel quantize` writes files",
    "checkpoint_config": "give init_inference the path of the model's folder instead of a module",
    "ckpt_config": "give init_inference the path of the model's folder instead of a module",
    "mpu": "consecutive ranks form a group; give tensor_parallel={'tp_size': n}",
    "moe": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "ep_size": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "ep_group": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "ep_mp_group": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "moe_experts": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "moe_type": "experts are divided like all else; give tensor_parallel={'tp_size': n}",
    "quant": "give dtype=torch.int8 or 'int4' instead",
    "zero": "weights are read shard by shard, and mapped from the file where they fit; leave it out",
    "training_mp_size": "the checkpoint must be that of the whole model; leave it out",
    "config": "it is the first option after the model, a dict or a file",
}
# Methods of DeepSpeed's engine for which ours has no place: a model is not called once a token.
_TIMED = "take the time around generate(), or run `anyaccel bench llm`"
_METHODS = {"profile_model_time": _TIMED, "model_times": _TIMED}
_TP_NEEDLESS = ("tp_grain_size",)
_TP_REFUSED = ("mpu", "tp_group")


def default_inference_config() -> dict[str, Any]:
    """The options of init_inference that count here, with DeepSpeed's defaults."""
    return {"dtype": torch.float16, "tensor_parallel": {"enabled": True, "tp_size": 1}}


def init_inference(
    model: nn.Module | str | Path, config: str | Mapping[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """`anyaccel.init_inference` with DeepSpeed's arguments and its default dtype, float16.

    Args:
        model: a Hugging Face causal LM, or the path of one.
        config: options as a dict, or the path of a JSON file of them.
        kwargs: options; where both have one, they must agree.

    Raises:
        UsageError: an option is wrong, unknown or given twice.
        NotCoveredError: an option asks for something that anyaccel does not do.
    """
    options = _read(config)
    for name, value in kwargs.items():
        if name in options and options[name] != value:
            raise UsageError(f"init_inference: {name} is {options[name]!r} in config, and {value!r} as an argument")
        options[name] = value
    engine = anyaccel.inference.init_inference(model, _translate(options))
    for name, instead in _METHODS.items():
        vars(engine)[name] = partial(_refuse_method, name, instead)
    return engine


def _refuse_method(name: str, instead: str, *arguments: object, **options: object) -> NoReturn:
    raise refuse(f"InferenceEngine.{name}()", instead)


def _read(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, Path)):
        raise UsageError(
            f"init_inference: config must be a dict or the path of a JSON file, not {type(config).__name__}"
        )
    try:
        options = json.loads(read_small_file(str(config), "init_inference: config", encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"init_inference: config {str(config)!r} cannot be read: {error}") from None
    if not isinstance(options, dict):
        raise UsageError(f"init_inference: config {str(config)!r} is no JSON object")
    return options


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": torch.float16}
    for name, value in options.items():
        name = _ALIASES.get(name, name)
        if name in _NEEDLESS:
            logger.debug("init_inference: %s=%r is not needed here", name, value)
        elif name in ("triangular_masking", "tm"):
            if not value:
                raise refuse("init_inference(triangular_masking=False)", "only causal language models are run")
        elif name in _REFUSED:
            if not _is_off(value):
                raise refuse(f"init_inference({name}=...)", _REFUSED[name])
        elif name == "tensor_parallel":
            found[name] = _parallel(value)
        elif name == "dtype":
            found[name] = "bf16" if value == "bfloat" else value
        else:
            found[name] = value  # ours, or an error that lists them
    if found.get("mp_size") == 1 or (
        "mp_size" in found and found.get("tensor_parallel", {}).get("tp_size") == found["mp_size"]
    ):
        del found["mp_size"]
    return found


def _is_off(value: object) -> bool:
    """Whether that is DeepSpeed's default, or asks for nothing."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    if isinstance(value, bool):
        return not value
    return not value or value in (1, [1], "standard")


def _parallel(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"init_inference: tensor_parallel={value!r} must be a dict such as {{'tp_size': 2}}")
    for name in _TP_REFUSED:
        if value.get(name) is not None:
            raise refuse(f"init_inference(tensor_parallel={{{name!r}: ...}})", _REFUSED["mpu"])
    return {name: item for name, item in value.items() if name not in (*_TP_REFUSED, *_TP_NEEDLESS)}

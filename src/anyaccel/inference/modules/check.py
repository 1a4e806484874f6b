# SPDX-License-Identifier: Apache-2.0
"""Whether a model in memory has the modules and shapes of its configuration: the native runtime knows no others.

What those modules compute is compared by running them, see `native/module_probe.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from anyaccel.inference.spec.mapping import Unsupported


def check_structure(model: nn.Module, encoder: bool = False) -> None:
    """Compare a model with the one that transformers builds from its configuration, without memory.

    Args:
        encoder: it may be any model of transformers.

    Raises:
        Unsupported: it is no causal LM of transformers, or it has modules, hooks, functions or shapes of its own.
    """
    kind = type(model)
    config = getattr(model, "config", None)
    known = kind.__module__.startswith("transformers.models.")
    if not encoder:
        known = kind in _causal_lms(config) or _is_language_model(kind, config)
    if not known:
        what = "model" if encoder else "causal LM"
        raise Unsupported(f"code for {kind.__module__}.{kind.__qualname__}, which is no {what} of transformers")
    for name, module in model.named_modules():
        where = f"module {name!r} ({type(module).__name__})"
        if not all(map(_is_transformers, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            raise Unsupported(f"code for forward hooks ({where})")
        if "forward" in vars(module):
            raise Unsupported(f"code for a forward that was replaced ({where})")
    _compare(model, _as_configured(model))


def _is_transformers(hook: Any) -> bool:
    """Whether it is a hook of transformers, which only record outputs or mark inputs for training."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def _causal_lms(config: Any) -> tuple[type, ...]:
    """transformers' causal LMs of a configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _is_language_model(kind: Any, config: Any) -> bool:
    """Whether it is one that transformers has for models of several modalities only, as Mistral 4's."""
    own = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("ForCausalLM")
    return own and kind.config_class is type(config)


def _as_configured(model: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            built: nn.Module = type(model)._from_config(copy.deepcopy(model.config))
    except Exception as error:  # a configuration that somebody edited may raise anything
        raise Unsupported(f"code for a configuration that transformers cannot build a model from ({error})") from error
    return built


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _compare(model: nn.Module, plain: nn.Module) -> None:
    wanted = {name: type(module) for name, module in plain.named_modules(remove_duplicate=False)}
    for name, module in model.named_modules(remove_duplicate=False):
        usual = wanted.pop(name, None)
        if usual is not type(module):
            instead = f"where the architecture has {_full_name(usual)}" if usual else "which the architecture has not"
            raise Unsupported(f"code for module {name!r} of type {_full_name(type(module))} {instead}")
    if wanted:
        raise Unsupported(f"code for a model without the module {next(iter(wanted))!r} of its architecture")
    shapes = {name: each.shape for name, each in plain.state_dict().items()}
    for name, tensor in model.state_dict().items():
        if name in shapes and tensor.shape != shapes[name]:
            raise Unsupported(
                f"code for {name!r} of shape {tuple(tensor.shape)}, where the configuration gives {tuple(shapes[name])}"
            )
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names:
            raise Unsupported(f"code for parameter {name!r}, which the architecture has not")
        if type(parameter.data) is not torch.Tensor:
            raise Unsupported(f"weights of type {type(parameter.data).__name__} (tensor {name!r})")
        names.discard(name)
    if names:
        raise Unsupported(f"code for a model without the parameter {min(names)!r} of its architecture")

# SPDX-License-Identifier: Apache-2.0
"""Checks that transformers' code, which the native `generate` replaces, was not modified by anybody.

It can be modified at any time: a method of a class or of one model, a logits processor, a hook. All of it is checked in
each call, which takes 20 microseconds, as functions that were found to be unmodified are compared by identity.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerationMixin

from anyaccel.inference.modules.code import is_compiled_call, is_genuine, is_transformers_hook

# Methods whose replacement has no effect here: a native model overrides them for transformers' loops too, or they run
# before the native model exists.
_OURS = frozenset(
    (
        *("_prepare_cache_for_generation", "_valid_auto_compile_criteria", "_get_static_cache_init_shape"),
        *("_prepare_static_cache", "_supports_default_dynamic_cache", "load_custom_generate", "adjust_generation_fn"),
    )
)
_METHODS = tuple(
    name for name, value in vars(GenerationMixin).items() if isinstance(value, types.FunctionType | staticmethod)
)
# Functions that were found to be transformers' own, by class and name.
_known: dict[tuple[type, str], Any] = {}


@functools.cache
def _processors() -> tuple[type, ...]:
    return tuple(
        each
        for module in (logits_process, stopping_criteria)
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__ and "__call__" in vars(each)
    )


def replaced(model: Any, kind: type) -> str:
    """A description of the first part of `generate` that was replaced; empty if all of it is transformers' own.

    Args:
        model: the native model, whose class is derived from `kind`, transformers' class.
    """
    own = vars(model)
    for name in _METHODS:
        if name in _OURS:
            continue
        if name in own:
            return f"{name}, which this model has its own of,"
        if not _is_own(kind, name):
            return f"{kind.__name__}.{name}, which was replaced,"
    for processor in _processors():
        if not _is_own(processor, "__call__"):
            return f"{processor.__name__}, which was replaced,"
    if "forward" in own and not is_compiled_call(own["forward"], type(model).forward):
        return "forward, which this model has its own of,"
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if not all(map(is_transformers_hook, hooks)):
        return "a forward hook"
    machinery: Any = nn.modules.module
    if machinery._global_forward_hooks or machinery._global_forward_pre_hooks:
        return "a forward hook of all modules"
    return ""


def _is_own(kind: type, name: str) -> bool:
    """Whether a class's function of this name is the one of its installed package."""
    found = getattr(kind, name, None)
    if found is None or _known.get((kind, name)) is found:
        return found is not None
    genuine = is_genuine(found, name)
    if genuine:
        _known[kind, name] = found
    return genuine

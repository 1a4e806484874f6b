# SPDX-License-Identifier: Apache-2.0
"""What the modules of a model in memory compute with beside their weights, against the same modules as they are built.

Everything counts that a module holds, so that no list of names has to be complete: numbers, texts, functions, objects
and the buffers that no checkpoint has. Only what the lists below name is left out, with the reason.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from anyaccel.inference.modules.code import ATTENTION, is_compiled_call
from anyaccel.inference.spec.mapping import Unsupported

# nn.Module's own: hooks, which module_check looks at, registries, and `training`, which inference switches off.
_MACHINERY = frozenset(vars(nn.Module()))
# What transformers notes about how a model was loaded, may be trained or is described.
# fmt: off
NOTES = frozenset((
    "_is_hf_initialized", "gradient_checkpointing", "_gradient_checkpointing_func", "is_gradient_checkpointing",
    "generation_config", "name_or_path", "warnings_issued", "model_tags", "hf_device_map", "_weight_conversions",
    "_loss_function", "loss_function", "_tp_plan", "_ep_plan", "_pp_plan", "_tp_size", "_device_mesh", "dtype",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules", "_skip_keys_device_placement",
    "_dtype", "all_tied_weights_keys", "_tied_weights_keys", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_ddp_params_and_buffers_to_ignore", "_output_capturing_hooks_installed",
    "_require_grads_hook", "_require_grads_hooks",
))
# fmt: on
# Lengths that a rotary embedding keeps; only the kinds whose frequencies change with the length read them.
_LENGTHS = frozenset(("max_seq_len_cached", "original_max_seq_len"))
_CHANGING = ("dynamic", "longrope")
# Fields of a configuration that describe it and change no result. The choice of an implementation is code.py's.
_DESCRIPTIONS = frozenset(
    ("dtype", "torch_dtype", "transformers_version", "architectures", "name_or_path", "use_cache", "return_dict")
)
_ROUNDINGS = (torch.bfloat16, torch.float16)
_DEEPEST = 8


def restore_buffers(plain: Any) -> None:
    """Give the buffers of a model on the meta device that no checkpoint has the values that its configuration gives.

    transformers computes them so, too, after it has loaded a model. Those of a type for which its code fails (of
    Gemma 3n without its vision part, say) stay on the meta device, and are not compared.
    """
    for module in plain.modules():
        names = [name for name, each in module._buffers.items() if each is not None and each.is_meta]
        names = [name for name in names if name in module._non_persistent_buffers_set]
        if not names:
            continue
        before = {name: module._buffers[name] for name in names}
        results = []
        try:
            for fill in (0, 1):  # a value that _init_weights leaves alone differs between the two
                for name in names:
                    empty = torch.empty_like(module._buffers[name], device="cpu")
                    module._buffers[name] = empty.fill_(fill)
                with torch.no_grad():
                    plain._init_weights(module)
                results.append([module._buffers[name] for name in names])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            module._buffers.update(before)
            continue
        for name, first, second in zip(names, *results, strict=True):
            if not torch.equal(first, second):
                module._buffers[name] = first.to("meta")


def compare_state(model: nn.Module, plain: nn.Module) -> None:
    """Compare modules of the same names and types.

    Args:
        plain: what is built from the configuration, after `restore_buffers`.

    Raises:
        Unsupported: a module of `model` has another value than that of `plain`.
    """
    pairs = dict(_configs(model, plain))
    usual_modules = dict(plain.named_modules(remove_duplicate=False))
    # A module that stands in two places is compared for each.
    for name, module in model.named_modules(remove_duplicate=False):
        difference = _difference(module, usual_modules[name], pairs)
        if difference and "RotaryEmbedding" in type(module).__name__:
            difference = _difference(_refreshed(module), usual_modules[name], pairs)
        if difference:
            where = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise Unsupported(f"code for {difference} of {where}, which its configuration does not give")


def _configs(model: Any, plain: Any) -> Iterator[tuple[int, int]]:
    """The identities of the model's configurations and of the copies that `plain` was built from."""
    yield id(model.config), id(plain.config)
    for name in getattr(model.config, "sub_configs", None) or ():
        yield id(getattr(model.config, name, None)), id(getattr(plain.config, name, None))


def _difference(module: nn.Module, usual: nn.Module, configs: Mapping[int, int]) -> str:
    """The first difference, by name and value; empty when there is none."""
    ours, theirs = _state(module), _state(usual)
    skipped = NOTES
    if "RotaryEmbedding" in type(module).__name__ and not any(
        kind in str(getattr(module, "rope_type", "")) for kind in _CHANGING
    ):
        skipped = NOTES | _LENGTHS
    for name, value in theirs.items():
        if name in skipped:
            continue
        if name not in ours:
            return f"a missing attribute {name!r}"
        chosen = name == "_attn_implementation" and ATTENTION.fullmatch(str(ours[name])) is not None
        if not chosen and not _same(ours[name], value, configs):
            return f"{name}={_short(ours[name])}"
    kind: Any = type(module)
    for name in ours.keys() - theirs.keys() - skipped:
        if name == "_compiled_call_impl" and (ours[name] is None or is_compiled_call(ours[name])):
            continue
        if hasattr(kind, name) or name in _names_used(kind):
            return f"an attribute {name!r}"
    # Persistent buffers are stored in checkpoints and count as weights, so only the others are compared.
    weights = usual._buffers.keys() - usual._non_persistent_buffers_set
    for name, buffer in usual._buffers.items():
        mine = module._buffers.get(name)
        if (name not in weights or mine is None) and not _same(mine, buffer, configs):
            return f"the buffer {name!r}"
    for name in module._buffers.keys() - usual._buffers.keys():
        if name in usual._parameters or hasattr(kind, name) or name in _names_used(kind):
            return f"a buffer {name!r}"
    return ""


def _state(module: nn.Module) -> dict[str, Any]:
    """The attributes that may change a result: not those of nn.Module itself, nor dropout, which is off."""
    if isinstance(module, nn.Dropout):
        return {}
    dropout = {name for name, value in vars(module).items() if "drop" in name and isinstance(value, int | float)}
    return {name: value for name, value in vars(module).items() if name not in _MACHINERY | dropout}


def _refreshed(module: Any) -> Any:
    """A rotary embedding as a call with a short text leaves it: frequencies may be those of an earlier, longer one."""
    fresh = copy.copy(module)
    fresh._buffers = {name: None if each is None else each.clone() for name, each in module._buffers.items()}
    kinds = getattr(module, "rope_type", None)
    takes = inspect.signature(type(module).forward).parameters
    try:
        with torch.no_grad():
            for kind in kinds if isinstance(kinds, Mapping) else (None,):
                more = {"layer_type": kind} if kind is not None and "layer_type" in takes else {}
                fresh(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long), **more)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
        return module
    return fresh


def _same(value: Any, usual: Any, configs: Mapping[int, int], depth: int = 0) -> bool:
    """Whether two values of corresponding places compute the same."""
    if value is usual or configs.get(id(value)) == id(usual):
        return True
    if isinstance(value, torch.Tensor) or isinstance(usual, torch.Tensor):
        return isinstance(value, torch.Tensor) and isinstance(usual, torch.Tensor) and _same_tensor(value, usual)
    if isinstance(value, int | float) and isinstance(usual, int | float):
        return value == usual or (value != value and usual != usual)
    if type(value) is not type(usual) or depth > _DEEPEST:
        return False

    def same(one: Any, other: Any) -> bool:
        return _same(one, other, configs, depth + 1)

    if isinstance(value, nn.Module):  # those that are registered are compared one by one
        return not _difference(value, usual, configs)
    if isinstance(value, torch.device | torch.Generator):
        return True
    if isinstance(value, Mapping):
        return value.keys() == usual.keys() and all(same(value[key], usual[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(usual) and all(map(same, value, usual))
    if isinstance(value, types.MethodType):
        return value.__func__ is usual.__func__ and type(value.__self__) is type(usual.__self__)
    if isinstance(value, types.FunctionType):
        cells = ([cell.cell_contents for cell in each.__closure__ or ()] for each in (value, usual))
        return value.__code__ is usual.__code__ and same(*cells)
    if isinstance(value, functools.partial):
        parts = ([each.func, each.args, each.keywords] for each in (value, usual))
        return same(*parts)
    if hasattr(value, "to_diff_dict"):  # a configuration that is not the model's own object
        kept = ({k: v for k, v in each.to_dict().items() if k not in _DESCRIPTIONS} for each in (value, usual))
        return same(*kept)
    if value == usual:
        return True
    plain = "__eq__" not in {name for base in type(value).__mro__[:-1] for name in vars(base)}
    return plain and hasattr(value, "__dict__") and same(vars(value), vars(usual))


def _same_tensor(value: torch.Tensor, usual: torch.Tensor) -> bool:
    """Equal but for the last digits, which another device may round otherwise, or for a conversion of the model."""
    if value.shape != usual.shape or value.is_meta or usual.is_meta:
        return False
    value = value.detach().cpu()
    if not (value.is_floating_point() and usual.is_floating_point()):
        return torch.equal(value.to(usual.dtype), usual)
    expected = [usual, *(usual.to(each) for each in _ROUNDINGS)]
    return any(
        torch.allclose(value.double(), each.to(value.dtype).double(), rtol=1e-6, atol=0.0, equal_nan=True)
        for each in expected
    )


@functools.cache
def _names_used(kind: Any) -> frozenset[str]:
    """Names and texts in the code of a class: an attribute whose name is not among them is nothing to it."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object) or base.__module__.startswith(("transformers.modeling_", "transformers.gener")):
            continue
        codes = [inspect.unwrap(each).__code__ for each in vars(base).values() if inspect.isfunction(each)]
        while codes:
            code = codes.pop()
            found.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
            codes += [each for each in code.co_consts if inspect.iscode(each)]
    return frozenset(found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

# SPDX-License-Identifier: Apache-2.0
"""Whether the code that a model in memory runs is what torch and transformers were installed with.

Classes and functions can be replaced for all models, so that no comparison of two modules shows it; and a run of a few
tokens shows only what counts there. A function says which file its code is from.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from anyaccel.inference.spec.mapping import Unsupported


def _folder(package: str) -> str:
    """Where a package is, which need not be imported for it."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    return str(Path(str(found.origin)).parent)


_TORCH, _TRANSFORMERS = _folder("torch"), _folder("transformers")
_INSTALLED = (_TORCH + "/", _TRANSFORMERS + "/", sysconfig.get_path("stdlib") + "/", "<frozen ", "<__array_function__")
_MODELS = f"{_TRANSFORMERS}/models/"
# The modules of transformers that every model takes its caches, masks, positions and activations from.
_EVERY_MODELS = ("masking_utils", "modeling_rope_utils", "activations", "cache_utils", "integrations.sdpa_attention")
# Implementations of attention that compute the same.
ATTENTION = re.compile(r"(paged\|)?(eager|sdpa|flex_attention|flash_attention_\d)")
_RECORDERS = ("output_capturing_hook", "make_inputs_require_grads")


def is_transformers_hook(hook: Any) -> bool:
    """Whether it is a hook of transformers that only records outputs or marks inputs for training."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename.startswith(_TRANSFORMERS) and code.co_name in _RECORDERS


def is_compiled_call(value: Any, original: Any = nn.Module._call_impl) -> bool:
    """Whether it is what torch.compile made of a module's own call (`Module.compile`): it computes the same."""
    own = getattr(value, "_torchdynamo_orig_callable", None)
    return getattr(own, "__func__", None) is original and _is_installed(nn.Module._call_impl)


def is_genuine(value: Any, name: str) -> bool:
    """Whether a function is from the installed files of torch, transformers or Python, and called `name` there."""
    return _is_installed(value) and _is_named(value, name)


def replaced_in_torch() -> str:
    """The first part of torch's code that packed layers stand in for and that was replaced or hooked; else empty."""
    from transformers.pytorch_utils import Conv1D

    machinery: Any = nn.modules.module
    if machinery._global_forward_hooks or machinery._global_forward_pre_hooks:
        return "hooks of all modules"
    for kind in (nn.Linear, nn.Embedding, Conv1D):
        if not is_own_method(kind, "forward"):
            return f"{kind.__name__}.forward, which was replaced"
    for name in ("_wrapped_call_impl", "_call_impl"):
        if not is_own_method(nn.Module, name):
            return f"nn.Module.{name}, which was replaced"
    if vars(nn.Module)["__call__"] is not nn.Module._wrapped_call_impl:
        return "nn.Module.__call__, which was replaced"
    for place, name in ((nn.functional, "linear"), (nn.functional, "embedding"), (nn.functional, "rms_norm")):
        value = getattr(place, name)
        if not _is_installed(value) or getattr(value, "__name__", "") != name:
            return f"torch.nn.functional.{name}, which was replaced"
    return ""


def is_own_method(kind: type, name: str) -> bool:
    """Whether a class still has the method that its source file gives it, and none that was assigned later."""
    base = next(each for each in kind.__mro__ if name in vars(each))
    value = vars(base)[name]
    innermost = inspect.unwrap(value)
    if not inspect.isfunction(innermost) or innermost.__qualname__ != f"{base.__qualname__}.{name}":
        return False
    if base.__module__.startswith(("torch.", "transformers.")):
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        return _is_installed(value) and innermost.__code__.co_filename == file
    made = vars(base).get("__init__")
    files = {each for each in _files(value, 0) if not each.startswith(_INSTALLED)}
    return not inspect.isfunction(made) or files <= {made.__code__.co_filename}


def has_own_experts(config: Any) -> bool:
    """Whether the implementation of experts that a configuration names is one of transformers' own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    registry: Any = ALL_EXPERTS_FUNCTIONS
    function = registry.get(getattr(config, "_experts_implementation", None), None)
    return function is None or _is_installed(function)


def is_torch_genuine() -> bool:
    """Whether no layer or function of torch was replaced, and none is hooked: what `check_code` would say of these."""
    try:
        _check_hooks()
        _check_module(nn.functional)
        for kind in vars(nn).values():
            # Old names warn in a __new__ that was made for them.
            if isinstance(kind, type) and issubclass(kind, nn.Module) and "__new__" not in vars(kind):
                _check_class(kind)
    except Unsupported:
        return False
    return True


def check_code(model: nn.Module) -> None:
    """Look at the classes of all modules, the files that they are from, and what those take from transformers.

    Raises:
        Unsupported: a class or a function is not what was installed, or there are hooks of all modules.
    """
    _check_hooks()
    kinds = {
        base for kind in {type(module) for module in model.modules()} for base in kind.__mro__ if base is not object
    }
    files = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    files |= {f"transformers.{name}" for name in _EVERY_MODELS} | {"torch.nn.functional"}
    for name in sorted(files):
        if name in sys.modules:
            _check_module(sys.modules[name])
    for kind in kinds:
        _check_class(kind)


def check_implementations(config: Any, where: str) -> None:
    """Raise Unsupported unless the attention and the experts that a configuration names are transformers' own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and not ATTENTION.fullmatch(str(attention)):
        raise Unsupported(f"code for the attention implementation {attention!r}{where}")
    registries: Any = (
        (attention, ALL_ATTENTION_FUNCTIONS),
        (attention, ALL_MASK_ATTENTION_FUNCTIONS),
        (getattr(config, "_experts_implementation", None), ALL_EXPERTS_FUNCTIONS),
    )
    for name, registry in registries:
        function = registry.get(name, None)
        if function is not None and not _is_installed(function):
            raise Unsupported(f"code for {name!r}{where}, for which another function was registered")


def _check_hooks() -> None:
    machinery: Any = nn.modules.module
    if machinery._global_forward_hooks or machinery._global_forward_pre_hooks:
        raise Unsupported("code for hooks of all modules")


def _check_module(module: types.ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue  # torch.compile leaves what it has made there
        if isinstance(value, type):
            if value.__module__ == module.__name__ and not dataclasses.is_dataclass(value):  # those have made methods
                _check_class(value)
            elif issubclass(value, nn.Module) and not value.__module__.startswith(("torch.", "transformers.")):
                _refuse(f"{module.__name__}.{name}")
        elif callable(value) and not (_is_installed(value) and _is_named(value, name)):
            _refuse(f"{module.__name__}.{name}")


def _check_class(kind: type) -> None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not callable(function) or isinstance(function, type):
            continue
        genuine = _is_installed(function)
        if genuine and isinstance(function, types.FunctionType):
            code = inspect.unwrap(function).__code__
            if code.co_filename.startswith(_MODELS):
                genuine = code.co_filename == file and (
                    inspect.unwrap(function).__qualname__ == f"{kind.__qualname__}.{name}"
                )
        if not genuine:
            _refuse(f"{kind.__module__}.{kind.__qualname__}.{name}")


def _refuse(name: str) -> None:
    raise Unsupported(f"code for {name}, which was replaced")


def _is_named(value: Any, name: str) -> bool:
    own = getattr(inspect.unwrap(value), "__code__", None)
    return own is None or not own.co_filename.startswith(_TRANSFORMERS) or own.co_name == name


def _is_installed(value: Callable[..., Any]) -> bool:
    return all(file.startswith(_INSTALLED) for file in _files(value, 0))


def _files(value: Any, depth: int) -> Iterator[str]:
    """The files of all code that a callable reaches through wrappers, cells and partial calls."""
    if depth > 8:
        return
    if isinstance(value, functools.partial):
        yield from _files(value.func, depth + 1)
        for each in (*value.args, *value.keywords.values()):
            yield from _files(each, depth + 1)
    elif isinstance(value, types.MethodType):
        yield from _files(value.__func__, depth + 1)
    elif isinstance(value, types.FunctionType):
        yield value.__code__.co_filename
        inner = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        for each in (*inner, getattr(value, "__wrapped__", None)):
            if isinstance(each, types.FunctionType | types.MethodType | functools.partial):
                yield from _files(each, depth + 1)
    elif not isinstance(value, type):
        call = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(call, types.FunctionType):
            yield call.__code__.co_filename


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has no value yet
        return False

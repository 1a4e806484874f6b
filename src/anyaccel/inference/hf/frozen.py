# SPDX-License-Identifier: Apache-2.0
"""Freezes the modules of a model that the native runtime computes: they show its structure, but refuse calls and edits.

A change to them would have no effect on an answer, so each attempt raises an error: replacing a module, weight, number
or function, adding a hook, reading or writing a state dict or the values of a weight. The modules get subclasses of
their classes, with the same names, and registries that are immutable dicts. Calls of the model are not slowed down.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.modules.stand_in import stand_in
from anyaccel.inference.modules.state import NOTES

ADVICE = "do it before init_inference, or load the model with runtime='plain'"
_REGISTRIES = ("_modules", "_parameters", "_buffers")
# Attributes that may be set, as they have no effect on what is computed.
_FREE = NOTES | {"training", "_compiled_call_impl"}


class _Fixed(dict[str, Any]):
    """A registry of a module that cannot be changed."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        super().__init__(content)
        self.where = where

    def _refuse(self, *args: Any, **_kwargs: Any) -> NoReturn:
        raise _change_error(f"{self.where}.{args[0]}" if args and isinstance(args[0], str) else self.where)

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse
    move_to_end = _refuse


class _Frozen:
    """Mixed into the classes of the modules below the model."""

    _where: str

    def __setattr__(self, name: str, value: Any) -> None:
        absent = self  # a sentinel, as no attribute of a module is the module itself
        there = getattr(self, name, absent)
        if there is value:
            return
        if name in _FREE or (there is absent and not isinstance(value, nn.Module | torch.Tensor)):
            object.__setattr__(self, name, value)  # a new name is harmless, as no module reads it
        elif "_where" in vars(self):
            raise _change_error(f"{self._where}.{name}")
        else:  # a module that was made of frozen ones, such as a slice of a list of modules
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_where" in vars(self):
            raise _change_error(f"{self._where}.{name}")
        super().__delattr__(name)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse_state_dict("state_dict()")

    def _load_from_state_dict(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse_state_dict("load_state_dict()")

    load_state_dict = _load_from_state_dict

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_state_dict("pickle or deepcopy")


def refuse_state_dict(what: str) -> NoReturn:
    """Raise the error for reading or writing weights.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{what}: the weights are packed for the native runtime; {ADVICE}")


def _change_error(where: str) -> UsageError:
    return UsageError(f"{where}: a change here would do nothing, as the native runtime has packed the model; {ADVICE}")


@functools.cache
def _frozen_class(kind: type) -> Any:
    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    def forward(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(
            f"{kind.__name__}: the layers run in the native runtime; call the whole model, or "
            "load it with runtime='torch' (their own code) or 'plain' (nothing packed)"
        )

    return type(
        kind.__name__,
        (_Frozen, kind),
        {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__, "forward": forward},
    )


def shapes_of(model: nn.Module) -> dict[int, torch.Size]:
    """Shapes of a model's parameters by id(), as packing frees their memory."""
    return {id(each): each.shape for each in model.parameters()}


def code_of(model: nn.Module) -> dict[type, Any]:
    """The classes of a model's modules -> their forward functions."""
    return {kind: kind.forward for kind in {type(module) for module in model.modules()}}


def check_code_is(recorded: Mapping[type, Any]) -> None:
    """Check that the classes still have the functions that `code_of` found before the model was frozen.

    Raises:
        UsageError: a function was replaced since, which would have no effect on what is computed.
    """
    for kind, code in recorded.items():
        if kind.forward is not code:  # type: ignore[attr-defined]
            raise UsageError(
                f"{kind.__name__}.forward was replaced after the native runtime had packed the model, which runs "
                f"without it; {ADVICE}"
            )


def numbers_of(config: Any) -> Any:
    """What a model's configuration says about what it computes: the description that the runtime was made of."""
    values = config.to_dict()
    try:
        return family_of(values).spec(values)
    except AnyAccelError as error:  # of a value that was set since, which no model has
        return str(error)


def check_numbers_are(recorded: Any, config: Any) -> None:
    """Check that a configuration still says what it said to `numbers_of`.

    Raises:
        UsageError: a value was changed since, which would have no effect on what is computed.
    """
    if numbers_of(config) != recorded:
        raise UsageError(
            "config: a value that the model is computed with was changed after the native runtime had packed the "
            f"model, which runs without it; {ADVICE}"
        )


def freeze(model: nn.Module, shapes: Mapping[int, torch.Size]) -> None:
    """Free a model's weights and make its modules refuse changes.

    The model itself, which is the native one from then on, refuses only other modules, parameters and buffers.

    Args:
        shapes: `shapes_of` the model before its weights were packed.
    """
    made: dict[int, Any] = {}
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        for registry in (module._parameters, module._buffers):
            for short, tensor in registry.items():
                if tensor is not None:
                    registry[short] = _stand_in_for(tensor, prefix + short, shapes, made)
        for registry_name in _REGISTRIES:
            vars(module)[registry_name] = _Fixed(vars(module)[registry_name], name or type(model).__name__)
        if module is model:
            continue
        for registry_name in _hooks(module):
            vars(module)[registry_name] = _Fixed({}, f"{name}: hooks")
        kind: Any = type(module)
        module.__class__ = _frozen_class(kind)
        vars(module)["_where"] = name


def _hooks(module: nn.Module) -> Iterable[str]:
    return [name for name, value in vars(module).items() if name.endswith("_hooks") and isinstance(value, dict)]


def _stand_in_for(tensor: torch.Tensor, name: str, shapes: Mapping[int, torch.Size], made: dict[int, Any]) -> Any:
    if id(tensor) not in made:
        told = f"{name}: its values are packed for the native runtime, and can be neither read nor changed; {ADVICE}"
        made[id(tensor)] = stand_in(tuple(shapes.get(id(tensor), tensor.shape)), tensor.dtype, "meta", told)
    return made[id(tensor)]

# SPDX-License-Identifier: Apache-2.0
"""What a native model was when its weights were packed: the runtime computes that, so a later edit is an error.

The modules stay to show the structure, with weights that have no values. The first call after an edit of them raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.modules.stand_in import stand_in

ADVICE = "do it before init_inference, or load the model with runtime='plain'"
_REGISTRIES = ("_modules", "_parameters", "_buffers")


class Snapshot:
    """The modules of a model, the values that they hold and the configuration, as they are now.

    Hooks and attributes of the model itself are its own, as its forward and its `generate` run them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._spec = _describe(model.config)
        self._held = [
            (name, module, {key: _copied(value) for key, value in self._content(module).items()})
            for name, module in model.named_modules()
        ]

    def _content(self, module: nn.Module) -> Mapping[str, Any]:
        held = vars(module)
        return {name: held[name] for name in _REGISTRIES} if module is self._model else held

    def check(self) -> None:
        """Compare with the model of now.

        Raises:
            UsageError: a module, weight, number, function or hook in it is another one, or the configuration gives
                another decoder.
        """
        for name, module, before in self._held:
            now = self._content(module)
            if not _equal(now, before) and (changed := _changed(type(module), now, before)):
                raise _change_error(f"{name}.{changed}" if name else changed)
        if _describe(self._model.config) != self._spec:
            raise _change_error("config: a value that the model is computed with")


def _change_error(what: str) -> UsageError:
    return UsageError(
        f"{what} was changed after the native runtime had packed the model, which runs without that; undo it, and "
        f"{ADVICE}"
    )


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _equal(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    try:
        return now == before
    except (RuntimeError, UsageError):  # of comparing tensors, which happens only where one is not the same as before
        return False


def _changed(kind: type, now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first name under which a module has something else than before; empty where only notes were added."""
    for name, value in before.items():
        other = now.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            for each in (*value, *other):
                if other.get(each) is not value.get(each):
                    return str(each) if name in _REGISTRIES else name
        elif other is not value and (isinstance(value, torch.Tensor | nn.Module) or other != value):
            return name
    return next((name for name in now.keys() - before.keys() if hasattr(kind, name)), "")


def _describe(config: Any) -> Any:
    """The decoder that a configuration describes; the error's text for one that no model can have."""
    values = config.to_dict()
    try:
        return family_of(values).spec(values)
    except AnyAccelError as error:
        return str(error)


def refuse_state_dict(what: str) -> NoReturn:
    """Raise the error for reading or writing weights.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{what}: the weights are packed for the native runtime; {ADVICE}")


def parameter_shapes(model: nn.Module) -> dict[int, torch.Size]:
    """Shapes of a model's parameters by id(), as packing frees their memory."""
    return {id(each): each.shape for each in model.parameters()}


def free_weights(model: nn.Module, shapes: Mapping[int, torch.Size]) -> None:
    """Put tensors without values, which say so, in the place of a model's parameters and buffers.

    Args:
        shapes: `parameter_shapes` the model before its weights were packed.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        for registry in (module._parameters, module._buffers):
            for short, tensor in registry.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    message = (
                        f"{name}{'.' if name else ''}{short}: its values are packed for the native runtime, and can be "
                        f"neither read nor changed; {ADVICE}"
                    )
                    shape = tuple(shapes.get(id(tensor), tensor.shape))
                    made[id(tensor)] = stand_in(shape, tensor.dtype, "meta", message)
                registry[short] = made[id(tensor)]

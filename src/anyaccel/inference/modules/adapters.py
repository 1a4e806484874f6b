# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT (LoRA, DoRA and others), which read, replace and change the weights of the layers that they are in.

Packed weights allow none of that, so a model with adapters is not packed, and a packed one takes none.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn

from anyaccel.errors import UsageError

MERGE = (
    "adapters (PEFT) do not work with packed weights: merge them before init_inference, model = "
    "model.merge_and_unload(), or keep them apart with runtime='plain'"
)


def has_adapters(model: nn.Module) -> bool:
    """Whether a module of a model is PEFT's, as a model's wrapper or in the place of a layer."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__module__.partition(".")[0] == "peft" for kind in kinds)


class WithoutAdapters:
    """Mixed into the class of a packed model: ways of transformers to add an adapter are refused before they begin."""

    def load_adapter(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(f"{type(self).__name__}: {MERGE}")

    add_adapter = load_adapter


@functools.cache
def _class_without_adapters(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (WithoutAdapters, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def refuse_adapters(model: nn.Module) -> None:
    """Give a packed model a class with the same name that refuses adapters."""
    model.__class__ = _class_without_adapters(type(model))  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""An engine whose Hugging Face model is created lazily, on first access, as importing transformers takes seconds.

The native runtime computes without that model, which shows its structure and configuration and has their `generate`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Later:
    """The model of an engine, created on demand.

    Args:
        make: creates it.
        name: the name of its class, if that is known.
    """

    def __init__(self, make: Callable[[], nn.Module], name: str) -> None:
        self.name = name
        self._make = make
        self._lock = threading.Lock()
        self._made: nn.Module | None = None

    def made(self) -> nn.Module:
        """The model, which is created once."""
        with self._lock:
            if self._made is None:
                with torch.inference_mode(False):  # torch would mark tensors that are created in inference mode
                    self._made = self._make()
            return self._made


class MadeLater:
    """A mixin for such an engine: accessing a missing attribute or a submodule creates the model first.

    The engine then becomes one of the ordinary class.
    """

    _arrive: Callable[[nn.Module], None]  # becomes the ordinary engine of a model

    def _made(self) -> Any:
        later = vars(self).get("_later")
        if later is not None:
            self._arrive(later.made())
        return self

    @property
    def _modules(self) -> dict[str, Any]:
        registry: dict[str, Any] = vars(self._made())["_modules"]
        return registry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._made().__reduce_ex__(protocol)

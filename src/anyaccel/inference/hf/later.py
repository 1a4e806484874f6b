# SPDX-License-Identifier: Apache-2.0
"""An engine whose Hugging Face model is made when somebody asks for it: transformers takes seconds to import.

The native runtime computes without that model, which tells its structure and configuration and has their `generate`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Later:
    """The model of an engine that is still to be made.

    Args:
        make: makes it.
        name: of its class, as far as that is known.
    """

    def __init__(self, make: Callable[[], nn.Module], name: str) -> None:
        self.name = name
        self._make = make
        self._lock = threading.Lock()
        self._made: nn.Module | None = None

    def made(self) -> nn.Module:
        """The model, made once."""
        with self._lock:
            if self._made is None:
                with torch.inference_mode(False):  # somebody may ask within it, and torch marks what is made there
                    self._made = self._make()
            return self._made


class MadeLater:
    """Mixed into the class of such an engine: whatever it lacks, and what is below it, makes the model first.

    The engine is of the ordinary class from then on.
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

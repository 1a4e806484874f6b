# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.abstract_accelerator: the base class of accelerators that extensions for DeepSpeed bring."""

from __future__ import annotations

import abc
import threading
from typing import Any, Self

from anyaccel.accelerator import Accelerator, BackendSpec
from anyaccel.accelerator.base import _DERIVED
from anyaccel.accelerator.spec import METHODS_OF, Capability

from .._cover import cover

__all__ = ["DeepSpeedAccelerator"]


class _Meta(abc.ABCMeta):
    """Every accelerator of anyaccel is a DeepSpeedAccelerator for isinstance() and issubclass()."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls.__dict__.get("_is_the_base"):
            return Accelerator in subclass.__mro__  # issubclass() would ask here again
        return super().__subclasscheck__(subclass)

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__dict__.get("_is_the_base"):
            return cls.__subclasscheck__(type(instance))
        return super().__instancecheck__(instance)


class DeepSpeedAccelerator(Accelerator, metaclass=_Meta):
    """An accelerator as DeepSpeed's documents describe it: methods, and `_name` set by the constructor.

    A subclass needs no `spec` and need not call this constructor. It has the capabilities whose methods it defines.
    """

    _is_the_base = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._name = cls.__name__.removesuffix("Accelerator").rstrip("_").lower()
        self._communication_backend_name = ""
        self._compile_backend = "inductor"
        self._ranges = threading.local()
        self._capabilities = frozenset(filter(self._provides, Capability))
        return self

    def __init__(self) -> None:
        """Nothing is left to do: __new__ has done it also for those who do not call this."""

    @property
    def spec(self) -> BackendSpec:  # type: ignore[override]
        """What a backend of anyaccel declares, as far as this object says it."""
        return BackendSpec(name=self._name, device_type=self._name, torch_module=f"torch.{self._name}")

    def _provides(self, capability: Capability) -> bool:
        return all(self._overrides(name) for name in METHODS_OF.get(capability, ()) if name not in _DERIVED)


cover(globals())

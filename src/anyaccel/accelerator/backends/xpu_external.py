# SPDX-License-Identifier: Apache-2.0
"""An Intel GPU whose accelerator class another package delivers, as intel_extension_for_deepspeed does."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any, ClassVar

from anyaccel.accelerator.backends.xpu import XpuAccelerator
from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.spec import BackendSpec, Unavailable

_PACKAGE = "intel_extension_for_deepspeed"
_CLASS = "XPU_Accelerator"


class ExternalXpuAccelerator(XpuAccelerator):
    """The package's class, completed by ours.

    Where its class is one of our accelerators it is used as it is. Else it was written for DeepSpeed's interface,
    maybe an older one: each method that it has with the arguments of today is used, the others are ours.
    """

    spec: ClassVar[BackendSpec] = replace(
        XpuAccelerator.spec,
        package=_PACKAGE,
        install=f"install {_PACKAGE} and the software that it drives",
        order=10,
        why="installed to replace the built-in accelerator for Intel GPUs",
        yields_to=(),
        without_torch=XpuAccelerator.spec.without_torch._replace(choice="xpu.external"),
    )

    def __new__(cls) -> Any:
        external = _external_class()
        return external() if issubclass(external, Accelerator) else super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        external = _external_class()
        missing: frozenset[str] = getattr(external, "__abstractmethods__", frozenset())
        complete = type(external.__name__, (external,), dict.fromkeys(missing))  # else it cannot be instantiated
        self._external = complete()
        self._delivers = {name for name in dir(external) if not name.startswith("_")} - missing
        for name in self._delivers:
            ours, theirs = getattr(XpuAccelerator, name, None), getattr(self._external, name)
            if callable(ours) and callable(theirs) and _takes_arguments_of(theirs, ours):
                setattr(self, name, theirs)
        self._name = getattr(self._external, "_name", self._name)

    @classmethod
    def probe(cls) -> Unavailable | None:
        missing = cls._probe_package()
        if missing:
            return missing
        if not isinstance(getattr(importlib.import_module(_PACKAGE), _CLASS, None), type):
            return Unavailable(f"{_PACKAGE} is installed but has no class {_CLASS}", installed=True)
        return cls._probe_count(cls().device_count)

    @classmethod
    def _is_built(cls) -> bool:
        return True  # the package knows

    @property
    def Stream(self) -> Any:
        return self._external.Stream if "Stream" in self._delivers else super().Stream

    @property
    def Event(self) -> Any:
        return self._external.Event if "Event" in self._delivers else super().Event


def _external_class() -> type[Any]:
    found: type[Any] = getattr(importlib.import_module(_PACKAGE), _CLASS)
    return found


def _takes_arguments_of(theirs: Any, ours: Any) -> bool:
    """Whether a bound method can be called in every way that one of ours (a function) can."""
    wanted = list(inspect.signature(ours).parameters.values())[1:]
    by_position = [item for item in wanted if item.kind is item.POSITIONAL_OR_KEYWORD]
    by_name = {item.name: None for item in wanted if item.kind is item.KEYWORD_ONLY}
    required = [item for item in by_position if item.default is item.empty]
    for positional in (by_position, required):
        try:
            inspect.signature(theirs).bind(*positional, **(by_name if positional is by_position else {}))
        except TypeError:
            return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Builders of the optimizers for parameters in host memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from anyaccel.ops.builders.in_tree import InTreeBuilder


class _OptimizerBuilder(InTreeBuilder):
    """load() gives an object of `anyaccel.ops.optimizer_ops`."""

    OP: ClassVar[str]

    def wrap(self, op: Any) -> Any:
        """The native step, and DeepSpeed's functions on it: the same object for the same library."""
        return _wrapped(self.OP, op)


class CPUAdamBuilder(_OptimizerBuilder):
    """Adam and AdamW."""

    NAME: ClassVar[str] = "cpu_adam"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_ADAM"
    OP: ClassVar[str] = "AdamOp"


class CPUAdagradBuilder(_OptimizerBuilder):
    """Adagrad."""

    NAME: ClassVar[str] = "cpu_adagrad"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_ADAGRAD"
    OP: ClassVar[str] = "AdagradOp"


class CPULionBuilder(_OptimizerBuilder):
    """Lion."""

    NAME: ClassVar[str] = "cpu_lion"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_LION"
    OP: ClassVar[str] = "LionOp"


class FusedAdamBuilder(_OptimizerBuilder):
    """Adam over lists of tensors, for the accelerator `cpu`; it is in the library of ``cpu_adam``."""

    NAME: ClassVar[str] = "fused_adam"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_FUSED_ADAM"
    LIBRARY: ClassVar[str] = "cpu_adam"
    OP: ClassVar[str] = "FusedAdamOp"


class FusedLionBuilder(_OptimizerBuilder):
    """Lion over lists of tensors, for the accelerator `cpu`; it is in the library of ``cpu_lion``."""

    NAME: ClassVar[str] = "fused_lion"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_FUSED_LION"
    LIBRARY: ClassVar[str] = "cpu_lion"
    OP: ClassVar[str] = "FusedLionOp"


@functools.cache
def _wrapped(op: str, library: Any) -> Any:
    return getattr(importlib.import_module("anyaccel.ops.optimizer_ops"), op)(library)

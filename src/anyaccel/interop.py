# SPDX-License-Identifier: Apache-2.0
"""anyaccel beside other frameworks: our accelerator in a DeepSpeed that is installed."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import CompatError

if TYPE_CHECKING:
    from anyaccel.accelerator import Accelerator

__all__ = ["use_in_deepspeed"]


def use_in_deepspeed(accelerator: Accelerator | None = None) -> Accelerator:
    """Make the real DeepSpeed run on one of our accelerators: `deepspeed.accelerator.get_accelerator()` returns it.

    Our accelerators become `DeepSpeedAccelerator`s for isinstance(). Call it at the start of a script: DeepSpeed
    chooses an accelerator of its own while it is imported, and objects that it made with that one keep it. Its op
    builders, which it looks up at that time, stay its own too; `create_op_builder()` of ours gives ours, and from then
    on None where there is none, as DeepSpeed wants it.

    Args:
        accelerator: the one of `anyaccel.accelerator.get_accelerator()` when left out.

    Returns:
        That accelerator.

    Raises:
        CompatError: DeepSpeed is not installed, or is our alias, or cannot be imported.
    """
    deepspeed = _deepspeed()
    ours = get_accelerator() if accelerator is None else accelerator
    from anyaccel.accelerator import Accelerator

    # A virtual subclass: the interface is the same, so there is nothing to inherit.
    deepspeed.DeepSpeedAccelerator.register(Accelerator)
    # DeepSpeed asks for every builder that it knows, and tests for None, where ours raises an error that says why.
    vars(ours)["create_op_builder"] = partial(_builder_or_none, ours)
    deepspeed.set_accelerator(ours)
    return ours


def _builder_or_none(accelerator: Accelerator, class_name: str) -> Any:
    builder = accelerator.get_op_builder(class_name)
    return None if builder is None else builder()


def _deepspeed() -> Any:
    """The package deepspeed.accelerator of the real one."""
    try:
        package = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise CompatError(f"DeepSpeed cannot be imported: {error}") from error
        raise CompatError(
            "DeepSpeed is not installed: pip install deepspeed; or use `anyaccel compat install`, which needs none"
        ) from None
    except Exception as error:
        raise CompatError(f"DeepSpeed cannot be imported: {type(error).__name__}: {error}") from error
    if hasattr(package, "INTERFACE"):
        raise CompatError(
            f"deepspeed is anyaccel's alias here ({package.__file__}) and uses its accelerator already; for the real "
            "DeepSpeed: anyaccel compat remove, pip install deepspeed"
        )
    return importlib.import_module("deepspeed.accelerator")

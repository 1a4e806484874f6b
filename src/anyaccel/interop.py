# SPDX-License-Identifier: Apache-2.0
"""anyaccel beside other frameworks: our accelerator, collectives and ops in DeepSpeed and Lightning."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import CompatError, UsageError
from anyaccel.lightning import use_in_lightning

if TYPE_CHECKING:
    from anyaccel.accelerator import Accelerator

__all__ = ["use_in_deepspeed", "use_in_lightning"]


# DeepSpeed's wrapper of oneCCL calls another interface than our op has; without it, its `ccl` is torch's: our groups.
_NOT_FOR_DEEPSPEED = {"CCLCommBuilder"}
# What DeepSpeed calls every op that it lacks for a CPU.
_NO_OP = "deepspeed_not_implemented"


def use_in_deepspeed(accelerator: Accelerator | None = None) -> Accelerator:
    """Make the real DeepSpeed run on one of our accelerators, with our collectives and our ops.

    - `deepspeed.accelerator.get_accelerator()` returns it; our accelerators are `DeepSpeedAccelerator`s for
      isinstance().
    - The op builders that we have (CPUAdam, CPUAdagrad, CPULion, FusedAdam, FusedLion, AsyncIO and others) are behind
      DeepSpeed's names, in modules that are imported already too: its optimizers and its offload to files call our
      kernels, and nothing is compiled. Builders that we lack stay DeepSpeed's; an op that neither has is an
      error with its name.
    - `deepspeed.init_distributed()` takes our backend `shm` for a CPU, and knows `shm` and `ccl` by name.

    Call it at the start of a script: objects that DeepSpeed has made before keep what they have.

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
    _take_builders(ours)
    _take_collectives(ours)
    return ours


def _builder_or_none(accelerator: Accelerator, class_name: str) -> Any:
    builder = None if class_name in _NOT_FOR_DEEPSPEED else accelerator.get_op_builder(class_name)
    return None if builder is None else builder()


def _take_builders(accelerator: Accelerator) -> None:
    """Put our builders into the modules of DeepSpeed that have imported its own ones by name."""
    if not accelerator.spec.op_builders:
        return
    from anyaccel.ops.builder import builders_in

    builders = {
        name: kind for name, kind in builders_in(accelerator.spec.op_builders).items() if name not in _NOT_FOR_DEEPSPEED
    }
    for module_name, module in list(sys.modules.items()):
        # Below deepspeed.ops.op_builder are the definitions of its own; what others import is in the package itself.
        if module_name.startswith("deepspeed.") and not module_name.startswith("deepspeed.ops.op_builder."):
            for name, kind in list(vars(module).items()):
                if name in builders:
                    vars(module)[name] = builders[name]
                elif getattr(kind, "NAME", None) == _NO_OP and name != kind.__name__:
                    vars(module)[name] = _without_op(name, kind, accelerator.device_name())
    # What DeepSpeed knows of its ops: filled when it is first asked for, so perhaps with its own already.
    if (all_ops := sys.modules.get("deepspeed.ops.op_builder.all_ops")) is not None:
        all_ops.ALL_OPS.update({kind.NAME: kind() for kind in builders.values()})
    vars(sys.modules["deepspeed.ops"]).pop("__compatible_ops__", None)


def _without_op(name: str, kind: type[Any], device: str) -> type[Any]:
    """This builder of an op that there is not, with an error that names the op: DeepSpeed's is one class for all."""

    def load(self: Any, verbose: bool = True) -> NoReturn:
        raise UsageError(
            f"neither DeepSpeed nor anyaccel has the op {name.removesuffix('Builder')} for {device}: choose a setting "
            "that does without it"
        )

    return type(name, (kind,), {"load": load})


def _take_collectives(accelerator: Accelerator) -> None:
    from anyaccel.comm import backends

    backends.register()
    if accelerator.spec.device_type == backends.TENSORS_IN:
        vars(accelerator)["communication_backend_name"] = lambda: "shm"


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

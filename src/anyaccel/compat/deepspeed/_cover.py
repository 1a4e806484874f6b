# SPDX-License-Identifier: Apache-2.0
"""What each module of the alias is made of: names that load on first use, and errors for all others.

A script imports this package as `deepspeed`, so modules here import each other relatively.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from anyaccel.errors import NotCoveredAttributeError, NotCoveredError, NotCoveredImportError

from ._names import MODULES

ROOT = __name__.rpartition(".")[0]

_TO_TRAIN = "use FSDP2 (torch.distributed.fsdp.fully_shard), as in examples/train_gpt.py"
_FSDP = "train with FSDP2 (torch.distributed.fsdp.fully_shard), as in examples/train_gpt.py"
# Why a part is not covered and what there is instead; the longest prefix of a name counts.
WHY_NOT: dict[str, str] = {
    "deepspeed.initialize": f"the training engine and ZeRO are out of scope; {_FSDP}",
    "deepspeed.zero": f"ZeRO is out of scope; {_FSDP}",
    "deepspeed.runtime": f"it is of the training engine, which is out of scope; to train, {_TO_TRAIN}; to run a model, "
    "deepspeed.init_inference takes the place of all of it",
    "deepspeed.checkpoint": f"checkpoints of ZeRO are out of scope; {_FSDP} and torch.distributed.checkpoint",
    "deepspeed.DeepSpeedEngine": f"the training engine is out of scope; {_FSDP}",
    "deepspeed.DeepSpeedHybridEngine": f"the training engine is out of scope; {_FSDP}",
    "deepspeed.DeepSpeedConfig": f"it configures the training engine, which is out of scope; {_FSDP}",
    "deepspeed.checkpointing": "use torch.utils.checkpoint",
    "deepspeed.pipe": "pipeline parallelism is out of scope; use torch.distributed.pipelining",
    "deepspeed.PipelineModule": "pipeline parallelism is out of scope; use torch.distributed.pipelining",
    "deepspeed.PipelineEngine": "pipeline parallelism is out of scope; use torch.distributed.pipelining",
    "deepspeed.moe": "training of mixtures of experts is out of scope; init_inference runs trained ones",
    "deepspeed.sequence": "sequence parallelism is out of scope; use torch.distributed.tensor.experimental",
    "deepspeed.autotuning": "tuning of a training configuration is out of scope",
    "deepspeed.compression": "compression is out of scope; `anyaccel quantize` writes int8 and int4 weights",
    "deepspeed.monitor": "monitoring of the training engine is out of scope; use TensorBoard or Weights & Biases",
    "deepspeed.profiling": "use torch.profiler and torch.utils.flop_counter",
    "deepspeed.linear": "LoRA is out of scope; use the package peft",
    "deepspeed.nvme": "use anyaccel.ops.aio and benchmarks/aio.py",
    "deepspeed.io": "use anyaccel.io, or deepspeed.ops.aio here",
    "deepspeed.ops.lamb": "there is no LAMB; use deepspeed.ops.adam",
    "deepspeed.ops.transformer": "its kernels are out of scope; init_inference brings its own",
    "deepspeed.ops.sparse_attention": "use torch.nn.attention.flex_attention",
    "deepspeed.tp_model_init": "tensor-parallel training is out of scope; use torch.distributed.tensor.parallel",
    "deepspeed.launcher.launch": "the command `deepspeed` starts the workers of each host itself",
    "deepspeed.utils.groups": "groups of the training engine are out of scope; use deepspeed.comm.new_group",
    "deepspeed.utils.safe_": "parameters of ZeRO are out of scope; those of FSDP2 are DTensors, see full_tensor()",
    "deepspeed.utils.zero_to_fp32": "checkpoints of ZeRO are out of scope; their script of that name needs DeepSpeed",
}


def public_name(name: str) -> str:
    """A module's name as scripts know it."""
    return f"deepspeed{name.removeprefix(ROOT)}"


def why_not(name: str) -> str:
    """The sentence about a name that is not covered, as errors and the documentation have it."""
    fitting = [prefix for prefix in WHY_NOT if name.startswith(prefix)]
    return WHY_NOT[max(fitting, key=len)] if fitting else ""


def not_covered(name: str) -> str:
    """The message of the errors about `name`."""
    why = why_not(name)
    return (
        f"{name} is not part of anyaccel's alias of DeepSpeed{f': {why}' if why else ''}. docs/deepspeed-names.md "
        "lists what is; DeepSpeed itself comes back with `anyaccel compat remove` and `pip install deepspeed`"
    )


def refuse(what: str, instead: str) -> NotCoveredError:
    """The error of a function for what it does not do.

    Args:
        what: function and argument, such as ``init_inference(moe=...)``.
        instead: what to do.
    """
    return NotCoveredError(f"deepspeed.{what} is not covered by anyaccel's alias of DeepSpeed: {instead}")


def cover(module: dict[str, Any], lazy: Mapping[str, str] | None = None, packages: tuple[str, ...] = ()) -> None:
    """Make the rest of a module, called with its globals().

    Args:
        lazy: name -> ``"module:attribute"``, loaded on first use; a module that begins with a dot is one of the alias.
        packages: submodules that are attributes without being imported, as they are in DeepSpeed.
    """
    own = module["__name__"]
    lazy = lazy or {}
    # `from module import name` asks the finder below for a name that is missing, whose error then tells more than
    # Python's own; it does so only for a package.
    module.setdefault("__path__", [])

    def __getattr__(name: str) -> object:
        if name in lazy:
            source, _, attribute = lazy[name].partition(":")
            found = importlib.import_module(f"{ROOT}{source}" if source.startswith(".") else source)
            value: object = getattr(found, attribute)
        elif name in packages:
            return importlib.import_module(f"{own}.{name}")
        elif name.startswith("__"):
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        else:
            raise NotCoveredAttributeError(not_covered(f"{public_name(own)}.{name}"))
        module[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*module, *lazy, *packages})

    module["__getattr__"], module["__dir__"] = __getattr__, __dir__


class _Finder:
    """The last of sys.meta_path: a module of this package that has no file is in `_names`, or is not covered."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{ROOT}."):
            return None
        if name.removeprefix(f"{ROOT}.") not in MODULES:
            raise NotCoveredImportError(not_covered(public_name(name)), name=name)
        return ModuleSpec(name, _Loader(), is_package=True)


class _Loader(Loader):
    """Makes a module of `_names`."""

    def create_module(self, spec: ModuleSpec) -> None:
        """None: a plain module is what is wanted."""

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__.removeprefix(f"{ROOT}.")
        module.__doc__ = f"deepspeed.{own}."
        vars(module)["__all__"] = sorted(MODULES[own])
        below = tuple(name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == own)
        cover(vars(module), MODULES[own], below)


def install_finder() -> None:
    """Once a process, however often the package is imported anew."""
    if not any(getattr(finder, "anyaccel_root", None) == ROOT for finder in sys.meta_path):
        finder = _Finder()
        finder.anyaccel_root = ROOT  # type: ignore[attr-defined]
        sys.meta_path.append(finder)

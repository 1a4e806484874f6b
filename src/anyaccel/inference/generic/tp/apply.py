# SPDX-License-Identifier: Apache-2.0
"""Loads this rank's shards into a model, from a checkpoint or from the weights that it already has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.slices import Slice, take
from anyaccel.inference.generic.tp.layers import RowParallelLinear
from anyaccel.inference.generic.tp.plan import TensorParallelPlan


class WeightSource(Protocol):
    """A source of weights.

    Attributes:
        mapped: whether `read` returns views of a mapped file, which are strided for slices of columns.
    """

    mapped: bool

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        """The tensor `name`, whose whole shape is `shape`, or only `part` of it. Each is read once."""
        ...

    def held(self, name: str, part: Slice | None) -> Any:
        """The same in a form that a packed layer can have as it is; None if there is none."""
        ...


class LoadedWeights:
    """The weights of a model in memory; each is released after it was read."""

    def __init__(self, model: nn.Module, mapped: bool = False) -> None:
        self.mapped = mapped
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers(remove_duplicate=False))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: torch.Size, part: Slice | None) -> torch.Tensor:
        tensor = self._tensors.pop(name).detach()
        return tensor if part is None else take(tensor, part)

    def held(self, name: str, part: Slice | None) -> None:
        return None


def apply(
    model: nn.Module,
    plan: TensorParallelPlan,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Replace every parameter of `model` by this rank's part in `dtype` on `device`.

    Row-parallel linears become modules that add up the ranks' outputs.

    Args:
        source: gives the weights by parameter name.
        progress: called with the bytes of each parameter once it is there.
    """
    places = _places(model)
    built_in = next((p.dtype for p in model.parameters() if p.is_floating_point()), dtype)
    for name, parameter in list(model.named_parameters()):
        tensor = source.read(name, parameter.shape, plan.slices.get(name))
        if parameter.is_floating_point() and not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name!r} has integers ({tensor.dtype}), and the model's configuration does not say what they "
                "stand for"
            )
        # Mapped tensors are copied, to be contiguous and in memory of this rank's NUMA node.
        wanted = _dtype_for(model, name, dtype) if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.to(device, wanted, copy=source.mapped, memory_format=torch.contiguous_format)
        loaded = nn.Parameter(tensor, requires_grad=False)
        if (held := source.held(name, plan.slices.get(name))) is not None:
            loaded.held = held  # type: ignore[attr-defined]  # for the packed layer that takes its place
        for owner, short in places.pop(parameter):
            owner._parameters[short] = loaded
        del parameter
        if progress is not None:
            progress(tensor.numel() * tensor.element_size())
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in saved and name in source:  # the model computes other buffers itself
            buffer = source.read(name, buffer.shape, plan.slices.get(name)).to(buffer.dtype, copy=True)
        # Buffers in the dtype in which the model was built get the weights' dtype; rotary frequencies stay float32.
        if buffer.dtype == built_in and not name.endswith("inv_freq"):
            buffer = buffer.to(_dtype_for(model, name, dtype))
        owner_name, _, short = name.rpartition(".")
        model.get_submodule(owner_name)._buffers[short] = buffer.to(device)
    for name, attributes in plan.attributes.items():
        for attribute, value in attributes.items():
            setattr(model.get_submodule(name), attribute, value)
    for name, values in plan.config.items():
        module = model.get_submodule(name)
        local = copy.copy(module.config)
        for attribute, value in values.items():
            setattr(local, attribute, value)
        module.config = local
    for module in model.modules():
        _update_features(module)
    for name in plan.row_parallel:
        parent_name, _, short = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        old = getattr(parent, short)
        weight = old.weight
        if type(old).__name__ == "Conv1D":
            weight = nn.Parameter(weight.t().contiguous(), requires_grad=False)
        setattr(parent, short, RowParallelLinear(weight, old.bias, group))


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules and names of each parameter; a shared one has several, which all get the same tensor."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for short, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, short))
    return places


def _dtype_for(model: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 for parameters and buffers that the model's class keeps out of half precision."""
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return torch.float32 if any(f".{module}." in f".{name}." for module in keep) else dtype


def _update_features(module: nn.Module) -> None:
    """Set a linear's sizes to those of its weight, which is a shard in a column-parallel one."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif type(module).__name__ == "Conv1D" and isinstance(module.weight, torch.Tensor):
        vars(module).update(nx=module.weight.shape[0], nf=module.weight.shape[1])

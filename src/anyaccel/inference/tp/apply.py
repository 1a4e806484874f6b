# SPDX-License-Identifier: Apache-2.0
"""Gives a model this rank's shards, from a checkpoint or from the weights that it has already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from anyaccel.inference.tp.layers import RowParallelLinear
from anyaccel.inference.tp.plan import Slice, TensorParallelPlan


class WeightSource(Protocol):
    """Where the weights come from; `part` None means the whole tensor.

    Attributes:
        mapped: `read` returns views of a mapped file, strided ones for slices of columns.
    """

    mapped: bool

    def read(self, name: str, part: Slice | None) -> torch.Tensor: ...


class LoadedWeights:
    """Weights that the model has in memory already: a shard is copied out, so that the rest can be freed."""

    def __init__(self, model: nn.Module, mapped: bool = False) -> None:
        self.mapped = mapped
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def read(self, name: str, part: Slice | None) -> torch.Tensor:
        tensor = self._parameters[name].detach()
        return tensor if part is None else take(tensor, part)


def take(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """A dense copy of `part` of `tensor`."""
    pieces = [tensor.narrow(part.dim, piece.start, len(piece)) for piece in part.ranges]
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def apply(
    model: nn.Module,
    plan: TensorParallelPlan,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Replace every parameter of `model` by this rank's part in `dtype` on `device`, and put the sums in.

    Args:
        source: gives the weights by parameter name.
        progress: called with the bytes of each parameter once it is there.
    """
    for name, parameter in list(model.named_parameters()):
        tensor = source.read(name, plan.slices.get(name))
        # Out of the file into this rank's own memory, dense, on its own memory node.
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        tensor = tensor.to(device, kind, copy=source.mapped, memory_format=torch.contiguous_format)
        owner_name, _, short = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        # Every name of a shared parameter gets the one tensor.
        _replace_everywhere(model, parameter, nn.Parameter(tensor, requires_grad=False), owner, short)
        if progress is not None:
            progress(tensor.numel() * tensor.element_size())
    for buffer_owner in model.modules():
        for short, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner._buffers[short] = buffer.to(device)
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
        _fit_features(module)
    for name in plan.row_parallel:
        parent_name, _, short = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        old = getattr(parent, short)
        weight = old.weight
        if type(old).__name__ == "Conv1D":
            weight = nn.Parameter(weight.t().contiguous(), requires_grad=False)
        setattr(parent, short, RowParallelLinear(weight, old.bias, group))


def _replace_everywhere(model: nn.Module, old: nn.Parameter, new: nn.Parameter, owner: nn.Module, short: str) -> None:
    owner._parameters[short] = new
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _fit_features(module: nn.Module) -> None:
    """Linears remember their sizes; a column-parallel one has become narrower."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif type(module).__name__ == "Conv1D" and isinstance(module.weight, torch.Tensor):
        vars(module).update(nx=module.weight.shape[0], nf=module.weight.shape[1])

# SPDX-License-Identifier: Apache-2.0
"""The parts of nn.DataParallel, which programs put together on their own: on a CPU, one replica after the other.

torch has them for devices that are apart from the host. Here each named device has its part of a batch and its replica
of the module, as on several GPUs: the first shares the module's buffers, the others have copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.cuda.comm
from torch import nn
from torch.nn.parallel import _functions, comm


def install_on_host() -> None:
    """Replace what moves tensors between devices, below nn.parallel.scatter, gather and replicate."""
    functions: Any = _functions
    functions.Scatter.apply = staticmethod(_scatter)
    functions.Gather.apply = staticmethod(_gather)
    functions.Broadcast.apply = staticmethod(lambda devices, *tensors: tuple(chain(*_copies(tensors, devices))))
    moves: Any
    for moves in (comm, torch.cuda.comm):
        moves.scatter = _scattered
        moves.gather = lambda tensors, dim=0, destination=None, *, out=None: _gather(destination, dim, *tensors)
        moves.broadcast = lambda tensor, devices=None, *, out=None: [
            one for (one,) in _copies([tensor], devices or [0])
        ]
        moves.broadcast_coalesced = lambda tensors, devices, buffer_size=0: _copies(tensors, devices)
        moves.reduce_add = lambda inputs, destination=None: torch.stack(list(inputs)).sum(0)
        moves.reduce_add_coalesced = _added
    nn.parallel.parallel_apply = _one_after_the_other
    for name in ("parallel_apply", "data_parallel"):
        sys.modules[f"torch.nn.parallel.{name}"].parallel_apply = _one_after_the_other  # type: ignore[attr-defined]


def _scattered(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> Any:
    return _scatter(devices or [0], chunk_sizes, dim, tensor)


def _added(inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, buffer_size: int = 0) -> Any:
    return tuple(torch.stack(same).sum(0) for same in zip(*inputs, strict=True))


def _scatter(devices: Sequence[Any], chunk_sizes: Sequence[int] | None, dim: int, tensor: torch.Tensor) -> Any:
    return torch.split(tensor, list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)


def _gather(_device: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.view(1) if tensor.dim() == 0 else tensor for tensor in tensors], dim)


def _copies(tensors: Sequence[torch.Tensor], devices: Sequence[Any]) -> list[list[torch.Tensor]]:
    """The tensors for each device. A view, so that a replica's parameters are no leaves, as torch wants them."""
    first = [tensor.view_as(tensor) for tensor in tensors]
    return [first, *([tensor.clone() for tensor in tensors] for _ in devices[1:])]


def _one_after_the_other(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Any = None,
) -> list[Any]:
    named = kwargs_tup or [{} for _ in modules]
    return [
        module(*(given if isinstance(given, (list, tuple)) else [given]), **names)
        for module, given, names in zip(modules, inputs, named, strict=True)
    ]

# SPDX-License-Identifier: Apache-2.0
"""Process groups, meshes and wrappers of models that are told to use CUDA and NCCL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from anyaccel.cuda.callers import for_users
from anyaccel.cuda.devices import here, is_cuda
from anyaccel.cuda.imports import when_imported
from anyaccel.cuda.parallel import install_on_host
from anyaccel.cuda.report import CHANGED, MATCHED, note

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator

dist: Any = torch.distributed


def install(accelerator: Accelerator) -> None:
    """Redirect torch.distributed and torch.nn.parallel."""
    on_host = accelerator.device().type == "cpu"
    if on_host:
        install_on_host()
    if not dist.is_available():
        return
    dist.init_process_group = _group(dist.init_process_group, accelerator)
    dist.new_group = _group(dist.new_group, accelerator)
    dist.is_nccl_available = for_users(dist.is_nccl_available, lambda: True)
    available = dist.is_backend_available
    dist.is_backend_available = functools.wraps(available)(lambda backend: available(_backend(backend, accelerator)))
    dist.barrier = _without(dist.barrier, "device_ids") if on_host else dist.barrier
    for module in (dist.distributed_c10d,):
        module.init_process_group, module.new_group = dist.init_process_group, dist.new_group
        module.is_nccl_available, module.barrier = dist.is_nccl_available, dist.barrier
        module.is_backend_available = dist.is_backend_available
    mesh: Any = dist.device_mesh
    mesh.DeviceMesh.__init__ = _of_type(mesh.DeviceMesh.__init__, accelerator, method=True)
    mesh.init_device_mesh = dist.init_device_mesh = _of_type(mesh.init_device_mesh, accelerator)
    if not on_host:
        return
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp.__init__ = _without(ddp.__init__, "device_ids", "output_device")
    ddp._passing_sync_batchnorm_handle = lambda self, module: None  # it refuses what `_normalised` can do
    ddp._check_comm_hook = _without_version_of_nccl(ddp._check_comm_hook)
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _shard_on_the_cpu)
    nn.parallel.data_parallel = _alone
    sync: Any = nn.SyncBatchNorm
    sync.forward = _normalised(sync.forward)


def _backend(name: Any, accelerator: Accelerator) -> Any:
    """A backend's name with the accelerator's own in the place of NCCL, also in "cpu:gloo,cuda:nccl"."""
    if not isinstance(name, str) or "nccl" not in name.lower():
        return name
    own = _own_backend(accelerator)
    if ":" not in name:
        note("backend nccl", MATCHED, own)
        return own
    parts = dict(part.split(":", 1) for part in name.lower().split(","))
    parts[accelerator.device().type] = own
    parts.pop("cuda", None)
    note("backend nccl", MATCHED, own)
    return ",".join(f"{device}:{backend}" for device, backend in parts.items())


def _own_backend(accelerator: Accelerator) -> str:
    """The fastest that carries the accelerator's tensors: shared memory for those of CPUs."""
    from anyaccel.comm import shm

    if accelerator.device().type in dist.Backend.backend_capability.get(shm.NAME, ()):
        return shm.NAME
    return accelerator.communication_backend_name()


def _group(original: Callable[..., Any], accelerator: Accelerator) -> Callable[..., Any]:
    at = 0 if original.__name__ == "init_process_group" else 2

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], _backend(args[at], accelerator), *args[at + 1 :])
        elif kwargs.get("backend") is not None:
            kwargs["backend"] = _backend(kwargs["backend"], accelerator)
        if is_cuda(kwargs.get("device_id")):
            where = here(kwargs["device_id"])
            kwargs["device_id"] = None if where.type == "cpu" else where
        return original(*args, **kwargs)

    return make


def _without(original: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A function whose arguments of these names are indices of devices, which a CPU has not."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            if kwargs.get(name) is not None:
                note(f"{name}=", CHANGED, "left out on a CPU")
                kwargs[name] = None
        if original.__name__ == "__init__" and len(args) > 2:  # self, module, device_ids, output_device
            args = (*args[:2], *(None for _ in args[2:4]), *args[4:])
        return original(*args, **kwargs)

    return call


def _of_type(original: Callable[..., Any], accelerator: Accelerator, method: bool = False) -> Callable[..., Any]:
    at = 1 if method else 0

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at and is_cuda(args[at]):
            args = (*args[:at], accelerator.device().type, *args[at + 1 :])
        elif is_cuda(kwargs.get("device_type")):
            kwargs["device_type"] = accelerator.device().type
        return original(*args, **kwargs)

    return make


def _shard_on_the_cpu(module: Any) -> None:
    """FSDP looks for a GPU unless the device that it is given is the CPU, which has no index."""
    fsdp = module.FullyShardedDataParallel
    original = fsdp.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["device_id"] is None or is_cuda(given.arguments["device_id"]):
            given.arguments["device_id"] = torch.device("cpu")
        original(*given.args, **given.kwargs)

    fsdp.__init__ = begin
    from torch.distributed.fsdp import _init_utils

    states: Any = _init_utils  # torch refuses to send weights that are on a CPU, which NCCL cannot
    states._check_module_states_for_sync_module_states = lambda module_states: None


def _without_version_of_nccl(original: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's check of hooks: those in bfloat16 ask for a version of NCCL, and every backend here adds bfloat16."""

    @functools.wraps(original)
    def check(self: Any, hook: Any) -> None:
        if getattr(hook, "__name__", "") not in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
            original(self, hook)

    return check


def _alone(
    module: Any,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> Any:
    """nn.parallel.data_parallel on one device: the module itself."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return module(*inputs, **(module_kwargs or {}))


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def _normalised(original: Callable[..., Any]) -> Callable[..., Any]:
    """SyncBatchNorm.forward for tensors of the CPU, which torch has for other devices only.

    Mean and variance of all ranks are made of each rank's count, sum and sum of squares (Ioffe and Szegedy, 2015).
    """

    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.device.type != "cpu":
            return original(self, x)
        self._check_input_dim(x)
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        group = self.process_group
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        if not use_batch or ranks == 1:
            return _own_norm(self, x, use_batch)
        axes = [0, *range(2, x.dim())]
        count = torch.full((1,), x.numel() / x.shape[1], dtype=torch.float32)
        own = torch.cat([x.float().sum(axes), x.float().square().sum(axes), count])
        total = _Sum.apply(own, group)  # type: ignore[no-untyped-call]
        count = total[-1:]
        mean, square = (total[:-1] / count).chunk(2)
        variance = square - mean.square()
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            unbiased = variance * count / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.detach().to(self.running_var.dtype), factor)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        y = (x.float() - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    return forward


def _own_norm(self: Any, x: torch.Tensor, use_batch: bool) -> torch.Tensor:
    factor = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats:
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
    kept = not self.training or self.track_running_stats
    return F.batch_norm(
        x,
        self.running_mean if kept else None,
        self.running_var if kept else None,
        self.weight,
        self.bias,
        use_batch,
        factor,
        self.eps,
    )

# SPDX-License-Identifier: Apache-2.0
"""The objects that the optimizers' builders load: the native step, with DeepSpeed's functions.

As in DeepSpeed, ``create_*`` keeps the fixed settings of an optimizer under a number that the caller chooses, and
``*_update`` takes the other settings with each call. Tensors are in host memory; gradients are not changed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch

from anyaccel.errors import UsageError
from anyaccel.ops._native_step import NativeStep, TensorBatch
from anyaccel.ops.zenflow import ZenFlow

logger = logging.getLogger("anyaccel.ops")

_double, _int, _address = ctypes.c_double, ctypes.c_int, ctypes.c_void_p


def _previous_step(step: int) -> torch.Tensor:
    """The step before `step`, as a tensor that native code increments."""
    if not step >= 1:
        raise UsageError(f"steps count from 1, and this is {step}")
    return torch.tensor(step - 1, dtype=torch.float32)


class _Op:
    """A library, and the settings of the optimizers that its `create_*` function has created, by number."""

    def __init__(self, library: ctypes.CDLL, optimizer: str, hyper: Sequence[type[Any]]) -> None:
        self.library = library
        self.native_step = NativeStep(library, f"anyaccel_{optimizer}_step", hyper)
        self._optimizer = optimizer
        self._created: dict[int, Any] = {}

    def _create(self, number: int, fixed: Any, should_log: bool, **config: object) -> int:
        self._created[number] = fixed
        if should_log:
            settings = ", ".join(f"{name}={value}" for name, value in config.items())
            logger.info("%s optimizer %d: %s", self._optimizer, number, settings)
        return 0

    def _settings(self, number: int) -> Any:
        try:
            return self._created[number]
        except KeyError:
            raise UsageError(
                f"there is no {self._optimizer} optimizer {number}: call create_{self._optimizer}({number}, ...) first"
            ) from None

    def _update(
        self,
        step: int,
        params: torch.Tensor,
        grads: torch.Tensor,
        states: Sequence[torch.Tensor],
        copy: torch.Tensor | None,
        *hyper: float,
    ) -> int:
        before = _previous_step(step)
        copies = None if copy is None else [copy]
        batch = TensorBatch([params], [grads], [[state] for state in states], [before], copies)
        self.native_step.run(batch, *hyper)
        return 0


class AdamOp(_Op, ZenFlow):
    """The op ``cpu_adam``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        _Op.__init__(self, library, "adam", (_double,) * 5 + (_int,) * 2)
        ZenFlow.__init__(self)
        self._rollback = library.anyaccel_adam_rollback
        self._rollback.argtypes = ((_address,) * 4) + (ctypes.c_int64,) + (_double,) * 6 + (_int,) * 2

    def create_adam(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        should_log: bool = False,
    ) -> int:
        """Keep `adamw_mode` under `optimizer_id`; the other settings come again with each update."""
        return self._create(
            optimizer_id, adamw_mode, should_log,
            lr=alpha, betas=(betta1, betta2), eps=eps, weight_decay=weight_decay, adamw_mode=adamw_mode,
        )  # fmt: skip

    def adam_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> int:
        """Step number `step` (from 1) on one parameter."""
        hyper = lr, beta1, beta2, epsilon, weight_decay, self._settings(optimizer_id), bias_correction
        return self._update(step, params, grads, (exp_avg, exp_avg_sq), None, *hyper)

    def adam_update_copy(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gpu_params: torch.Tensor,
    ) -> int:
        """`adam_update`, which also copies the new parameter to `gpu_params`, on its device and in its dtype."""
        hyper = lr, beta1, beta2, epsilon, weight_decay, self._settings(optimizer_id), bias_correction
        copy = gpu_params if gpu_params.is_cpu else torch.empty_like(gpu_params, device="cpu")
        if copy.dtype == torch.float32:
            self._update(step, params, grads, (exp_avg, exp_avg_sq), None, *hyper)
            gpu_params.copy_(params)
            return 0
        self._update(step, params, grads, (exp_avg, exp_avg_sq), copy, *hyper)
        if copy is not gpu_params:
            gpu_params.copy_(copy)
        return 0

    def adam_rollback(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        bias_correction: bool,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> int:
        """Undo AdamW step number `step`, except for rounding; tensors are float32, bfloat16 or float16.

        Raises:
            UsageError: the optimizer is not AdamW, or a tensor is none of these, or of another size.
        """
        if not self._settings(optimizer_id):
            raise UsageError("adam_rollback undoes AdamW only: create the optimizer with adamw_mode=True")
        tensors = params, grads, exp_avg, exp_avg_sq
        for tensor in tensors:
            if not tensor.is_cpu or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UsageError("adam_rollback takes float32, bfloat16 or float16 tensors in host memory")
            if tensor.numel() != params.numel():
                raise UsageError("adam_rollback: the tensors have different numbers of elements")
        wide = [tensor.detach().float().contiguous() for tensor in tensors]  # the same tensor where it is that already
        self._rollback(
            *(tensor.data_ptr() for tensor in wide), params.numel(),
            step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, torch.get_num_threads(),
        )  # fmt: skip
        for tensor, computed in zip(tensors, wide, strict=True):
            if tensor is not grads and tensor.data_ptr() != computed.data_ptr():
                tensor.detach().copy_(computed)
        return 0

    def destroy_adam(self, optimizer_id: int) -> int:
        """Forget `optimizer_id`."""
        self._created.pop(optimizer_id, None)
        return 0


class FusedAdamOp:
    """The op ``fused_adam`` of the CPU, with the library of ``cpu_adam``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.native_step = AdamOp(library).native_step

    def multi_tensor_adam(
        self,
        chunk_size: int,
        noop_flag: torch.Tensor | None,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        """Step number `step` on lists of gradients, parameters and both moments; AdamW with mode 1, Adam with 0.

        Nothing is done when `noop_flag` is not 0. `chunk_size` is for GPUs.
        """
        if noop_flag is not None and bool(noop_flag.any()):
            return
        grads, params, exp_avgs, exp_avg_sqs = tensor_lists
        steps = [_previous_step(step) for _ in params]
        hyper = lr, beta1, beta2, epsilon, weight_decay, mode, bias_correction
        self.native_step.run(TensorBatch(params, grads, (exp_avgs, exp_avg_sqs), steps, None), *hyper)


class AdagradOp(_Op):
    """The op ``cpu_adagrad``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, "adagrad", (_double,) * 4)

    def create_adagrad(
        self,
        optimizer_id: int,
        alpha: float = 1e-2,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Make `optimizer_id` known; the settings come again with each update."""
        return self._create(optimizer_id, None, should_log, lr=alpha, eps=eps, weight_decay=weight_decay)

    def adagrad_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        epsilon: float,
        weight_decay: float,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg_sq: torch.Tensor,
    ) -> int:
        """Step number `step` (from 1) on one parameter."""
        self._settings(optimizer_id)
        return self._update(step, params, grads, (exp_avg_sq,), None, lr, 0.0, epsilon, weight_decay)

    def destroy_adagrad(self, optimizer_id: int) -> int:
        """Forget `optimizer_id`."""
        self._created.pop(optimizer_id, None)
        return 0


class LionOp(_Op):
    """The op ``cpu_lion``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library, "lion", (_double,) * 4)

    def create_lion(
        self,
        optimizer_id: int,
        alpha: float = 1e-3,
        betta1: float = 0.9,
        betta2: float = 0.999,
        weight_decay: float = 0.0,
        should_log: bool = False,
    ) -> int:
        """Make `optimizer_id` known; the settings come again with each update."""
        settings = {"lr": alpha, "betas": (betta1, betta2), "weight_decay": weight_decay}
        return self._create(optimizer_id, None, should_log, **settings)

    def lion_update(
        self,
        optimizer_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        params: torch.Tensor,
        grads: torch.Tensor,
        exp_avg: torch.Tensor,
    ) -> int:
        """Step number `step` (from 1) on one parameter."""
        self._settings(optimizer_id)
        return self._update(step, params, grads, (exp_avg,), None, lr, beta1, beta2, weight_decay)

    def destroy_lion(self, optimizer_id: int) -> int:
        """Forget `optimizer_id`."""
        self._created.pop(optimizer_id, None)
        return 0


class FusedLionOp:
    """The op ``fused_lion`` of the CPU, with the library of ``cpu_lion``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.native_step = LionOp(library).native_step

    def multi_tensor_lion(
        self,
        chunk_size: int,
        noop_flag: torch.Tensor | None,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        step: int,
        weight_decay: float,
    ) -> None:
        """Step number `step` on lists of gradients, parameters and momenta.

        Nothing is done when `noop_flag` is not 0. `chunk_size` is for GPUs.
        """
        if noop_flag is not None and bool(noop_flag.any()):
            return
        grads, params, exp_avgs = tensor_lists
        steps = [_previous_step(step) for _ in params]
        self.native_step.run(TensorBatch(params, grads, (exp_avgs,), steps, None), lr, beta1, beta2, weight_decay)

# SPDX-License-Identifier: Apache-2.0
"""ZenFlow's step of Adam: another process updates parameters in shared memory while this one goes on training.

Both hold a control block, which is in shared memory too: the trainer writes what a step needs and posts one semaphore,
the process that steps posts the other when it is done. Functions and arguments are those of DeepSpeed's op.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from collections.abc import Callable, Sequence

import torch

from anyaccel.errors import UsageError

__all__ = ["ZenFlow"]

_MOST_GROUPS = 1024
_LOOK_SECONDS = 2.0  # how often a process without a step looks whether its trainer lives


class _Semaphore(ctypes.Structure):
    """Room for a sem_t: 32 bytes with glibc and with musl."""

    _fields_ = (("room", ctypes.c_uint64 * 8),)


class _Group(ctypes.Structure):
    """What a step needs of a group of parameters, in the order of zenflow_adam_submit()."""

    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "bias_correction")
    )


class _Control(ctypes.Structure):
    _fields_ = (
        ("submitted", _Semaphore),
        ("done", _Semaphore),
        ("leave", ctypes.c_int64),
        ("state", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("groups", _Group * _MOST_GROUPS),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _call(name: str, semaphore: _Semaphore, *rest: object) -> int:
    """One of libc's functions of semaphores; its errno, or 0. A signal does not end it, but runs its Python handler."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    while function(ctypes.byref(semaphore), *rest) != 0:
        if (error := ctypes.get_errno()) != errno.EINTR:
            return error
    return 0


def _post(semaphore: _Semaphore) -> None:
    if error := _call("sem_post", semaphore):
        raise OSError(error, f"sem_post: {os.strerror(error)}")


def _wait(semaphore: _Semaphore, timeout_s: float) -> bool:
    fraction, seconds = math.modf(time.time() + timeout_s)  # sem_timedwait counts on this clock
    until = _Time(int(seconds), int(fraction * 1e9))
    error = _call("sem_timedwait", semaphore, ctypes.byref(until))
    if error not in (0, errno.ETIMEDOUT):
        raise OSError(error, f"sem_timedwait: {os.strerror(error)}")
    return error == 0


class _Worker:
    """What the process that steps has: cores, and of each group parameter, gradients, moments and the stale copy."""

    def __init__(self, optimizer_id: int, cores: Sequence[int]) -> None:
        self.optimizer_id = optimizer_id
        self.cores = cores
        self.groups: list[tuple[torch.Tensor, ...]] = []


class ZenFlow:
    """The functions ``zenflow_adam_*`` of the op ``cpu_adam``. `control` is the address of the control block."""

    adam_update: Callable[..., int]  # the op's

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}

    def zenflow_adam_ctrl_size(self) -> int:
        """Bytes of a control block."""
        return ctypes.sizeof(_Control)

    def zenflow_adam_ctrl_init(self, control: int, num_groups: int) -> None:
        """Prepare a control block for so many groups of parameters, before the other process starts.

        Raises:
            UsageError: these are too many.
        """
        if num_groups > _MOST_GROUPS:
            raise UsageError(f"ZenFlow's step takes at most {_MOST_GROUPS} groups of parameters, and gets {num_groups}")
        block = _Control.from_address(control)
        block.leave, block.count = 0, num_groups
        for semaphore in (block.submitted, block.done):
            if error := _call("sem_init", semaphore, 1, 0):
                raise OSError(error, f"sem_init: {os.strerror(error)}")

    def zenflow_adam_submit(
        self,
        control: int,
        now_state: int,
        step: int,
        lr: Sequence[float],
        beta1: Sequence[float],
        beta2: Sequence[float],
        eps: Sequence[float],
        weight_decay: Sequence[float],
        bias_correction: Sequence[int],
    ) -> None:
        """Begin step number `step` with gradients and moments `now_state`, 0 or 1; each list has a value a group."""
        block = _Control.from_address(control)
        for number, values in enumerate(zip(lr, beta1, beta2, eps, weight_decay, bias_correction, strict=True)):
            block.groups[number] = _Group(*values)
        block.state, block.step = now_state, step
        _post(block.submitted)

    def zenflow_adam_wait(self, control: int, timeout_s: float) -> bool:
        """Wait for the end of a step; False if it has not ended after `timeout_s` seconds."""
        return _wait(_Control.from_address(control).done, timeout_s)

    def zenflow_adam_ctrl_exit(self, control: int) -> None:
        """Let the other process end its loop."""
        block = _Control.from_address(control)
        block.leave = 1
        _post(block.submitted)

    def zenflow_adam_create(self, optimizer_id: int, zf_affinity: Sequence[int]) -> int:
        """In the process that steps: a handle for steps of this optimizer on these cores."""
        handle = max(self._workers, default=-1) + 1
        self._workers[handle] = _Worker(optimizer_id, zf_affinity)
        return handle

    def zenflow_adam_register_group(
        self,
        handle: int,
        param: torch.Tensor,
        grad0: torch.Tensor,
        grad1: torch.Tensor,
        exp_avg0: torch.Tensor,
        exp_avg1: torch.Tensor,
        exp_avg_sq0: torch.Tensor,
        exp_avg_sq1: torch.Tensor,
        stale: torch.Tensor,
    ) -> None:
        """Add a group: gradients and moments of both states, and the tensor that each step copies its result to."""
        self._worker(handle).groups.append((param, grad0, grad1, exp_avg0, exp_avg1, exp_avg_sq0, exp_avg_sq1, stale))

    def zenflow_adam_run_worker(self, handle: int, control: int) -> None:
        """Step whenever the trainer submits a step, until it calls zenflow_adam_ctrl_exit() or has ended."""
        worker, trainer = self._worker(handle), os.getppid()
        if worker.cores:
            os.sched_setaffinity(0, worker.cores)  # native threads take it over
            torch.set_num_threads(len(worker.cores))
        block = _Control.from_address(control)
        while True:
            while not _wait(block.submitted, _LOOK_SECONDS):
                if os.getppid() != trainer:
                    return
            if block.leave:
                return
            if block.count != len(worker.groups):
                raise UsageError(f"the trainer steps {block.count} groups, and {len(worker.groups)} are registered")
            for values, tensors in zip(block.groups, worker.groups, strict=False):
                param, *gradients_and_moments, stale = tensors
                grad, exp_avg, exp_avg_sq = gradients_and_moments[block.state :: 2]
                self.adam_update(
                    worker.optimizer_id, block.step, values.lr, values.beta1, values.beta2, values.eps,
                    values.weight_decay, bool(values.bias_correction), param, grad, exp_avg, exp_avg_sq,
                )  # fmt: skip
                stale.copy_(param)
            _post(block.done)

    def zenflow_adam_destroy(self, handle: int) -> None:
        """Forget this handle and its tensors."""
        self._workers.pop(handle, None)

    def _worker(self, handle: int) -> _Worker:
        try:
            return self._workers[handle]
        except KeyError:
            raise UsageError(f"there is no ZenFlow handle {handle}: call zenflow_adam_create() first") from None

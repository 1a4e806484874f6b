# SPDX-License-Identifier: Apache-2.0
"""ZenFlow's functions of the op cpu_adam: a worker that steps when it is told, here on another thread."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.ops import zenflow
from anyaccel.ops.builders.cpu import CPUAdamBuilder

HYPER = ([1e-2, 1e-3], [0.9, 0.8], [0.999, 0.99], [1e-8, 1e-6], [0.1, 0.0], [1, 0])  # of two groups


def test_submitted_steps_are_those_of_adam_update() -> None:
    op = CPUAdamBuilder().load()
    op.create_adam(70)
    control = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    op.zenflow_adam_ctrl_init(control.data_ptr(), 2)
    generator = torch.Generator().manual_seed(0)
    groups = [[torch.randn(size, generator=generator)] + [torch.zeros(size) for _ in range(7)] for size in (1003, 64)]
    twins = [[tensor.clone() for tensor in group] for group in groups]
    handle = op.zenflow_adam_create(70, [])  # on the cores that this thread has
    for group in groups:
        op.zenflow_adam_register_group(handle, *group)
    worker = threading.Thread(target=op.zenflow_adam_run_worker, args=(handle, control.data_ptr()))
    worker.start()
    try:
        assert not op.zenflow_adam_wait(control.data_ptr(), 0.01)
        for step in range(1, 5):
            state = step % 2
            for group, twin in zip(groups, twins, strict=True):
                for tensors in (group, twin):
                    tensors[1 + state].copy_(torch.randn(group[0].shape, generator=torch.Generator().manual_seed(step)))
            op.zenflow_adam_submit(control.data_ptr(), state, step, *HYPER)
            assert op.zenflow_adam_wait(control.data_ptr(), 60.0)
            for twin, hyper in zip(twins, zip(*HYPER, strict=True), strict=True):
                moments = twin[3 + state], twin[5 + state]
                op.adam_update(70, step, *hyper, twin[0], twin[1 + state], *moments)
                twin[7].copy_(twin[0])
    finally:
        op.zenflow_adam_ctrl_exit(control.data_ptr())
        worker.join(60)
    assert not worker.is_alive()
    for group, twin in zip(groups, twins, strict=True):
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(group, twin, strict=True))
        assert torch.equal(group[7], group[0]) and group[0].isfinite().all()
    op.zenflow_adam_destroy(handle)
    op.destroy_adam(70)


def test_the_worker_ends_when_its_trainer_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    op = CPUAdamBuilder().load()
    control = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    op.zenflow_adam_ctrl_init(control.data_ptr(), 0)
    parents = iter([os.getppid(), os.getppid(), 1 << 22])  # then another process adopts it
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(zenflow, "_LOOK_SECONDS", 0.01)
    handle = op.zenflow_adam_create(70, [])
    op.zenflow_adam_run_worker(handle, control.data_ptr())
    op.zenflow_adam_destroy(handle)
    assert next(parents, None) is None


def test_a_handle_that_there_is_not_and_too_many_groups_are_told() -> None:
    op = CPUAdamBuilder().load()
    control = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    with pytest.raises(UsageError, match="no ZenFlow handle 99"):
        op.zenflow_adam_run_worker(99, control.data_ptr())
    with pytest.raises(UsageError, match="at most 1024 groups"):
        op.zenflow_adam_ctrl_init(control.data_ptr(), 1025)

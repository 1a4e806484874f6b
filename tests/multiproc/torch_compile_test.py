# SPDX-License-Identifier: Apache-2.0
"""Runs a file of torch's own tests of torch.compile with collectives on a backend of the CPU.

`torch_compile_test.py BACKEND FILE CLASS [TEST...]`, with test/distributed/test_dynamo_distributed.py or
test_inductor_collectives.py of torch's sources as FILE, and `shm`, `ccl`, `hierarchy` (shm with a host a rank) or
`gloo` as BACKEND. Prints a line a test: its name, `ok`, `failed` or `skipped`, and why.

The tests are written for GPUs. They run here because torch is told that the CPU is the accelerator and because the
conditions under which it skips tests without GPUs are gone; those that need one all the same fail on gloo, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import unittest
from typing import Any
from unittest import mock


def _pass_through(*_: Any, **__: Any) -> Any:
    return lambda test: test


def _pretend(backend: str) -> None:
    """Make torch's helpers take the CPU for the accelerator, and `backend` for its backend."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_cuda, common_distributed, inductor_utils

    import anyaccel.comm  # noqa: F401
    from anyaccel.comm import shm

    if backend == "hierarchy":
        shm.host_identity = lambda: f"host {dist.get_rank()}" if dist.is_initialized() else f"host {os.getpid()}"
    name = "shm" if backend == "hierarchy" else backend
    cpu = torch.device("cpu")
    torch.accelerator.current_accelerator = lambda *_, **__: cpu
    torch.accelerator.is_available = lambda: False  # else dynamo would ask for its streams
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.set_device_index = lambda *_: None
    dist.distributed_c10d.get_default_backend_for_device = dist.get_default_backend_for_device = lambda *_: name
    common_distributed.requires_accelerator_dist_backend = _pass_through
    common_distributed.skip_if_lt_x_gpu = _pass_through
    common_cuda.SM80OrLater = True
    inductor_utils.HAS_GPU = True
    initialise = dist.init_process_group

    def at_free_port(*args: Any, **options: Any) -> None:
        os.environ["MASTER_PORT"] = os.environ["TEST_PORT"]  # the tests have fixed ones
        initialise(*args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = at_free_port

    def fork(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork


class _Lines(unittest.TextTestResult):
    def _line(self, test: Any, outcome: str, why: object = "") -> None:
        name = getattr(test, "_testMethodName", str(test))
        print(f"TEST {name} {outcome} {' '.join(str(why).split())[:2000]}", flush=True)

    def addSuccess(self, test: Any) -> None:
        self._line(test, "ok")

    def addFailure(self, test: Any, error: Any) -> None:
        self._line(test, "failed", error[1])

    def addError(self, test: Any, error: Any) -> None:
        self._line(test, "failed", error[1])

    def addSkip(self, test: Any, reason: str) -> None:
        self._line(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, error: Any) -> None:
        self._line(test, "ok", "as expected, it fails")


def main(backend: str, path: str, kind: str, *names: str) -> None:
    _pretend(backend)
    logging.disable(logging.WARNING)
    spec = importlib.util.spec_from_file_location("torchs_own", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchs_own"] = module
    with contextlib.ExitStack() as stack:
        # Without a GPU these files would skip whole classes.
        stack.enter_context(mock.patch.object(unittest, "skipIf", _pass_through))
        stack.enter_context(mock.patch.object(unittest, "skipUnless", _pass_through))
        spec.loader.exec_module(module)
    found = unittest.defaultTestLoader.loadTestsFromTestCase(getattr(module, kind))
    chosen = [test for test in found if not names or test._testMethodName in names]  # type: ignore[union-attr]
    unittest.TextTestRunner(resultclass=_Lines, verbosity=0, stream=sys.stderr).run(unittest.TestSuite(chosen))


if __name__ == "__main__":
    main(*sys.argv[1:])

# SPDX-License-Identifier: Apache-2.0
"""Runs torch's own DistributedTest on a backend, each test on forked ranks: `torch_distributed_test.py BACKEND WORLD`.

The tests are those that torch has for gloo: a test that asks whether the backend is gloo is told so, and one that makes
groups of gloo gets them of the backend. Prints a line a test: its name, `ok`, `failed` or `skipped`, and why.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from typing import Any


class _AlsoGloo(str):
    """A backend's name that compares equal to gloo's too."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _Distributed:
    """torch.distributed, whose groups of gloo are of another backend."""

    def __init__(self, real: Any, backend: str) -> None:
        self._real, self._backend = real, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def new_group(self, *args: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            options["backend"] = self._backend
        return self._real.new_group(*args, **options)


def main(backend: str, world: str, *names: str) -> None:
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=world, TEMP_DIR=folder, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    import anyaccel.comm  # noqa: F401

    torch.set_num_threads(1)
    from torch.testing._internal.distributed import distributed_test as tests

    tests.BACKEND = _AlsoGloo(backend)
    tests.dist = _Distributed(dist, backend)
    for supported in (tests.PROFILING_SUPPORTED_BACKENDS, tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        supported.append(backend)

    class Torch(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Lines(unittest.TextTestResult):
        def _line(self, test: Any, outcome: str, why: object = "") -> None:
            print(f"TEST {test._testMethodName} {outcome} {' '.join(str(why).split())}", flush=True)

        def addSuccess(self, test: Any) -> None:
            self._line(test, "ok")

        def addFailure(self, test: Any, error: Any) -> None:
            self._line(test, "failed", error[1])

        def addError(self, test: Any, error: Any) -> None:
            self._line(test, "failed", error[1])

        def addSkip(self, test: Any, reason: str) -> None:
            self._line(test, "skipped", reason)

    found = unittest.defaultTestLoader.loadTestsFromTestCase(Torch)
    chosen = [test for test in found if not names or test._testMethodName in names]  # type: ignore[union-attr]
    unittest.TextTestRunner(resultclass=Lines, verbosity=0, stream=sys.stderr).run(unittest.TestSuite(chosen))


if __name__ == "__main__":
    main(*sys.argv[1:])

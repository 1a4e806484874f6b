# SPDX-License-Identifier: Apache-2.0
"""Backend `shm` for Hugging Face's accelerate, which has a list of backends and no way to add one."""

from __future__ import annotations

import functools
import os
from typing import Any

from anyaccel.errors import CommError, UsageError

_MARK = "_anyaccel_takes_shm"


def support_accelerate() -> None:
    """Make accelerate accept `shm` for CPU jobs of several processes, as it accepts MPI.

    `TrainingArguments(use_cpu=True, ddp_backend="shm")` of transformers and `PartialState(cpu=True, backend="shm")`
    then start a job of this backend. Call it before them; a second time it does nothing. Programs that call
    `init_process_group("shm")` first and name no backend to accelerate need none of it.

    Raises:
        UsageError: accelerate is not installed.
        CommError: this accelerate chooses backends in another way.
    """
    try:
        from accelerate.state import DistributedType, PartialState
    except ImportError as error:
        raise UsageError(f"accelerate cannot be imported ({error}): pip install accelerate") from error
    known: Any = getattr(PartialState, "_prepare_backend", None)
    if known is None:
        raise CommError(
            "this version of accelerate chooses backends in another way: call torch.distributed.init_process_group"
            '("shm") first, and name no backend to accelerate'
        )
    if getattr(known, _MARK, False):
        return

    @functools.wraps(known)
    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found, kind = known(self, cpu, sagemaker_dp, None if backend == "shm" else backend)
        if backend != "shm":
            return found, kind
        if kind == DistributedType.NO and "LOCAL_RANK" in os.environ:
            kind = DistributedType.MULTI_CPU  # a job of several processes, and no device of accelerate's
        return ("shm" if kind in (DistributedType.MULTI_CPU, DistributedType.NO) else found), kind

    setattr(prepare, _MARK, True)
    PartialState._prepare_backend = prepare

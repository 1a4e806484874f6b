# SPDX-License-Identifier: Apache-2.0
"""deepspeed.git_version_info: the version, and which ops there are."""

from __future__ import annotations

import torch

from . import git_branch, git_hash, version
from ._cover import cover
from .ops.op_builder.all_ops import ALL_OPS, accelerator_name

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

# Name of the op -> whether it can be expected to load.
compatible_ops = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
# Those whose library is a module of deepspeed: ours are elsewhere, and their builders know where.
installed_ops = dict.fromkeys(ALL_OPS, False)
# "0.0" stands for what is not there.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}

cover(globals())

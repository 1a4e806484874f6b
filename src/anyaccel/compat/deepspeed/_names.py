# SPDX-License-Identifier: Apache-2.0
"""The modules of the alias that have no code of their own: their names are those of other modules."""

from __future__ import annotations

# Those of DeepSpeed's accelerators; a module's class is called as in `NPU_Accelerator`.
ACCELERATORS = ("cpu", "cuda", "hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu")

# Module -> name -> "module:attribute", which is loaded on first use; a leading dot is a module of the alias.
MODULES: dict[str, dict[str, str]] = {
    **{
        f"accelerator.{name}_accelerator": {
            "DeepSpeedAccelerator": ".accelerator.abstract_accelerator:DeepSpeedAccelerator",
            f"{name.upper()}_Accelerator": f"anyaccel.accelerator.backends.{name}:{name.capitalize()}Accelerator",
        }
        for name in ACCELERATORS
    },
    "comm.reduce_op": {"ReduceOp": "torch.distributed:ReduceOp"},
    "inference": {"InferenceEngine": "anyaccel.inference:InferenceEngine"},
    "inference.engine": {"InferenceEngine": "anyaccel.inference:InferenceEngine"},
    "ops.adam.fused_adam": {"FusedAdam": "anyaccel.ops.adam:FusedAdam"},
    "ops.aio": {"AsyncIOBuilder": "anyaccel.ops.builders.aio:AsyncIOBuilder"},
    "ops.lion.fused_lion": {"FusedLion": "anyaccel.ops.lion:FusedLion"},
}

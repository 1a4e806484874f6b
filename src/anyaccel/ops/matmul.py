# SPDX-License-Identifier: Apache-2.0
"""Which library multiplies torch's float32 matrices on a CPU."""

from __future__ import annotations

from pathlib import Path

import anyaccel._needs_torch  # noqa: F401

# isort: split
import torch


def use_onednn_matmul() -> bool:
    """Let torch multiply float32 matrices by oneDNN rather than MKL in this process, where that is faster and as exact.

    It is on processors with AVX-512 that are not Intel's, on which MKL takes AVX2: products of matrices take about half
    the time. Products of one or two rows take up to twice as long, so this is for training and for prompts.

    torch takes oneDNN for float32 where that may compute in bfloat16 (`torch.backends.mkldnn.matmul.fp32_precision`).
    oneDNN does so only with instructions that these processors lack. To make sure, products are computed of which
    bfloat16 would lose bits. What the program itself has set stays.

    Returns:
        Whether products go to oneDNN now.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    if matmul.fp32_precision != "none" or not _mkl_is_slow():
        return False
    matmul.fp32_precision = "bf16"
    if not _is_exact():
        matmul.fp32_precision = "none"
        return False
    return True


def _mkl_is_slow() -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):  # type: ignore[no-untyped-call]
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "GenuineIntel" not in processor and bool(torch.cpu.get_capabilities().get("avx512_f"))


def _is_exact() -> bool:
    """Whether products keep bits that bfloat16 and TF32 lack."""
    for rows, inner in ((64, 64), (256, 512)):
        value = 1 + 2.0**-12
        product = torch.full((rows, inner), value) @ torch.ones(inner, 512)
        if not bool((product == inner * value).all()):
            return False
    return True

# SPDX-License-Identifier: Apache-2.0
"""Blocks of the types of GGUF files."""

from __future__ import annotations

from typing import Any

import numpy as np

from anyaccel.inference.checkpoints.gguf_types import BLOCK_BYTES

# Where the blocks have their halves. iq1_m's is in pieces; mxfp4 has a power of two.
HALVES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(kind: str, rows: int, cols: int, seed: int = 0, size: float = 0.01) -> Any:
    """Random bits with scales that are numbers: some matrix of that type, uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    if kind in ("F64", "F32", "F16", "BF16"):
        values = rng.normal(0, size, (rows, cols))
        if kind == "BF16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype({"F64": np.float64, "F32": np.float32, "F16": np.float16}[kind]).view(np.uint8)
    values, length = BLOCK_BYTES[kind.lower()]
    blocks = rng.integers(0, 256, (rows * cols // values, length), dtype=np.uint8)

    def scales() -> Any:
        return rng.choice([-1, 1], len(blocks)) * size * rng.uniform(0.2, 1.0, len(blocks))

    for at in HALVES_AT.get(kind, ()):
        blocks[:, at : at + 2] = scales().astype(np.float16)[:, None].view(np.uint8)
    if kind == "IQ1_M":
        bits, words = scales().astype(np.float16).view(np.uint16), blocks[:, 48:56].copy().view(np.uint16)
        for number in range(4):
            words[:, number] = (words[:, number] & 0x0FFF) | (((bits >> (4 * number)) & 15) << 12)
        blocks[:, 48:56] = words.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + np.frexp(scales())[1]
    return blocks.reshape(rows, -1)

# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of one layer in the layouts of GPTQ, AWQ and compressed-tensors.

The layouts are written down here a second time, from their documentation:
- GPTQ: github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear (zero points are stored less one)
- AWQ: github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py (order 0 2 4 6 1 3 5 7) and gemv.py
- compressed-tensors: github.com/vllm-project/compressed-tensors, compressors/pack_quantized
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, FEATURES, VOCAB = 128, 256, 48
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEATURES, HIDDEN),
    "mlp.up_proj": (FEATURES, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEATURES),
}
Arrays = dict[str, Any]


def words_of(values: Any, bits: int, order: tuple[int, ...] | None = None) -> Any:
    """int32 words along the last axis: entry i of a word has value order[i]."""
    count = 32 // bits
    grouped = values.astype(np.uint32).reshape(*values.shape[:-1], -1, count)
    words = np.zeros(grouped.shape[:-1], np.uint32)
    for i in range(count):
        words |= grouped[..., order[i] if order else i] << np.uint32(bits * i)
    return words.view(np.int32)


def random_values(rng: Any, rows: int, cols: int, group: int, bits: int, zero: int | None) -> tuple[Any, Any, Any]:
    """Unsigned q [rows, cols], scales and zero points [rows, groups]."""
    groups = cols // group if group > 0 else 1
    q = rng.integers(0, 1 << bits, (rows, cols))
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    zeros = np.full((rows, groups), zero) if zero is not None else rng.integers(1, 1 << bits, (rows, groups))
    return q, scales, zeros


def dequantised(q: Any, scales: Any, zeros: Any) -> Any:
    of = np.arange(q.shape[1]) // (q.shape[1] // scales.shape[1])
    return scales.astype(np.float32)[:, of] * (q - zeros[:, of]).astype(np.float32)


def gptq(q: Any, scales: Any, zeros: Any, bits: int = 4, offset: int = 1) -> Arrays:
    group = q.shape[1] // scales.shape[1]
    stored = (zeros.T - offset) & ((1 << bits) - 1)
    return {
        "qweight": np.ascontiguousarray(words_of(q, bits).T),
        "qzeros": words_of(stored, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(q.shape[1]) // group).astype(np.int32),
    }


def gemv(q: Any, scales: Any, zeros: Any) -> Arrays:
    """Words along `in`; scales and zero points are padded to whole words, and for small groups to more of them."""
    groups = scales.shape[1]
    width = -(-groups // 8) * 8 * {32: 4, 64: 2}.get(q.shape[1] // groups, 1)
    more = ((0, 0), (0, width - groups))
    return {"qweight": words_of(q, 4), "qzeros": words_of(np.pad(zeros, more), 4), "scales": np.pad(scales, more)}


def awq(q: Any, scales: Any, zeros: Any) -> Arrays:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words_of(np.ascontiguousarray(q.T), 4, order),
        "qzeros": words_of(np.ascontiguousarray(zeros.T), 4, order),
        "scales": np.ascontiguousarray(scales.T),
    }


def compressed(q: Any, scales: Any, zeros: Any, bits: int = 4, symmetric: bool = True) -> Arrays:
    parts = {
        "weight_packed": words_of(q, bits),
        "weight_scale": scales,
        "weight_shape": np.array(q.shape, np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(words_of(np.ascontiguousarray(zeros.T), bits).T)
    return parts


def write(folder: Path, quantization: dict[str, Any], linears: dict[str, Arrays]) -> None:
    rng = np.random.default_rng(1)
    tensors: Arrays = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float16),
        "model.norm.weight": np.ones(HIDDEN, np.float16),
        "model.layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float16),
        "model.layers.0.post_attention_layernorm.weight": np.ones(HIDDEN, np.float16),
    }
    for module, parts in linears.items():
        tensors |= {f"model.layers.0.{module}.{name}": np.ascontiguousarray(value) for name, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

# Name -> quantization_config, group (-1: a whole row), bits, zero point (None: one each group), how it is stored,
# the format in which it is kept, bf16 when it is converted.
CASES: dict[str, tuple[dict[str, Any], int, int, int | None, Any, tuple[str, int, bool]]] = {
    "gptq-sym": (GPTQ, 32, 4, 8, gptq, ("i4", 32, False)),
    "gptq-asym-128": (GPTQ, 128, 4, None, gptq, ("i4", 128, True)),
    "gptq-row": (GPTQ, -1, 4, 8, gptq, ("i4", 128, False)),
    "gptq-v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        64,
        4,
        None,
        lambda *a: gptq(*a, offset=0),
        ("i4", 64, True),
    ),
    "gptq-8": ({**GPTQ, "bits": 8}, 64, 8, 128, lambda *a: gptq(*a, bits=8), ("i8", 32, False)),
    "gptq-8-row": ({**GPTQ, "bits": 8}, -1, 8, 128, lambda *a: gptq(*a, bits=8), ("i8", 0, False)),
    "gptq-8-asym": ({**GPTQ, "bits": 8}, 32, 8, None, lambda *a: gptq(*a, bits=8), ("i8", 32, True)),
    "gptq-group-16": (GPTQ, 16, 4, 8, gptq, ("i6", 16, False)),
    "gptq-group-8": (GPTQ, 8, 4, 8, gptq, ("bf16", 0, False)),
    "gptq-2": ({**GPTQ, "bits": 2}, 64, 2, 2, lambda *a: gptq(*a, bits=2), ("i4", 64, False)),
    "gemv": ({**AWQ, "version": "gemv"}, 32, 4, None, gemv, ("i4", 32, True)),
    "gemv-128": ({**AWQ, "version": "GEMV", "group_size": 128}, 128, 4, None, gemv, ("i4", 128, True)),
    "awq": (AWQ, 64, 4, None, awq, ("i4", 64, True)),
    "awq-128": (AWQ, 128, 4, None, awq, ("i4", 128, True)),
    "compressed-sym": (PACKED, 32, 4, 8, compressed, ("i4", 32, False)),
    "compressed-asym": (PACKED, 128, 4, None, lambda *a: compressed(*a, symmetric=False), ("i4", 128, True)),
    "compressed-8": (PACKED, -1, 8, 128, lambda *a: compressed(*a, bits=8), ("i8", 0, False)),
    "compressed-int8": (
        {**PACKED, "format": "int-quantized"},
        -1,
        8,
        128,
        lambda q, s, z: {"weight": (q - 128).astype(np.int8), "weight_scale": s},
        ("i8", 0, False),
    ),
}


def make(name: str, folder: Path) -> Arrays:
    """Write a checkpoint of a case; returns the values of its linears."""
    quantization, group, bits, zero, store, _ = CASES[name]
    rng = np.random.default_rng(0)
    linears, weights = {}, {}
    for module, (rows, cols) in LINEARS.items():
        parts = random_values(rng, rows, cols, group, bits, zero)
        linears[module] = store(*parts)
        weights[module] = dequantised(*parts)
    write(folder, quantization, linears)
    return weights

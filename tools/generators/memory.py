# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/memory.md: the memory that the weights of public models take in each precision.

The sizes are those of the native runtime: it is asked for the memory of a model of these shapes with one layer and with
two, and packs nothing. Every layer takes as much as the second.
The shapes are those of the models' public configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyaccel import _llm
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.formats import Precision, choose
from anyaccel.inference.spec.decoder import weights
from generators import DOCS, fill

PAGE = DOCS / "memory.md"
DTYPES = ("fp32", "bf16", "int8", "int4")


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": False, **more,
    }  # fmt: skip


MODELS = {
    "SmolLM2 135M": _llama(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "SmolLM2 1.7B": _llama(2048, 8192, 24, 32, 32, 49152, tie_word_embeddings=True),
    "Llama 3.2 3B": _llama(3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "Qwen2.5 7B": _llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2", rms_norm_eps=1e-6),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "Llama 2 13B": _llama(5120, 13824, 40, 40, 40, 32000),
    "DeepSeek-V2-Lite 16B": _llama(
        2048,
        10944,
        27,
        16,
        16,
        102400,
        model_type="deepseek_v2",
        rms_norm_eps=1e-6,
        moe_intermediate_size=1408,
        n_shared_experts=2,
        n_routed_experts=64,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
}


def model(config: dict[str, Any], dtype: str) -> _llm.Model:
    """A model of these shapes, without weights."""
    spec = family_of(config).spec(config)
    matrices, vectors = weights(spec)
    chosen = [choose(each, Precision(dtype), [("bf16", 0, False)]) for each in matrices]
    return _llm.DecoderModel(
        spec,
        [shape.entry() for shape in chosen],
        [(v.name, v.count) for v in vectors],
        1,
        "bf16",
        1 << 20,
    )


def rows() -> Iterator[str]:
    yield f"| model | {' | '.join(DTYPES)} | keys and values of 1,000 tokens, bf16 |"
    yield "| --- |" + " --- |" * (len(DTYPES) + 1)
    for name, config in MODELS.items():
        sizes = {dtype: _of_all_layers(config, dtype, "weight_bytes") for dtype in DTYPES}
        cache = _of_all_layers(config, "bf16", "cache_bytes_per_token") * 1000
        told = [f"{size / 2**30:.2f} GiB" for size in sizes.values()]
        yield f"| {name} | {' | '.join(told)} | {cache / 2**20:.0f} MiB |"


def _of_all_layers(config: dict[str, Any], dtype: str, what: str) -> int:
    one, two = (getattr(model({**config, "num_hidden_layers": layers}, dtype), what) for layers in (1, 2))
    if callable(one):
        one, two = one(), two()
    return int(one + (config["num_hidden_layers"] - 1) * (two - one))


def files() -> dict[Path, str]:
    return {PAGE: fill(PAGE.read_text(), "memory", ["", *rows(), ""])}

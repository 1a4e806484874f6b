# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with few and many tokens in a step: each sequence's logits are those that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyaccel

transformers = pytest.importorskip("transformers")

_SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 4,
}
# Alone, with a shared expert, and with one expert for all: more than one product of few tokens holds.
_CASES = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 16, "shared_expert_intermediate_size": 48}),
    "one for all": ("Qwen3MoeConfig", {"num_experts": 1, "num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("count", [2, 17, 40, 140])
@pytest.mark.parametrize("threads", [1, 3])
def test_sequences_together(case: str, count: int, threads: int) -> None:
    name, more = _CASES[case]
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**_SIZES, **more})).eval()
    ids = torch.randint(3, 200, (count, 5))
    with torch.inference_mode():
        expected = module(input_ids=ids).logits[:, -1]
    engine = anyaccel.init_inference(module, dtype="fp32", threads=threads)
    assert engine.runtime == "native"
    model = engine.native.model
    sequences = [model.create() for _ in range(count)]
    logits = torch.empty(count, 200)
    for step in range(5):
        tokens = ids[:, step].contiguous()
        model.forward(sequences, [1] * count, tokens.data_ptr(), logits.data_ptr(), list(range(count)))
    assert float((logits - expected).abs().max()) < 1e-4

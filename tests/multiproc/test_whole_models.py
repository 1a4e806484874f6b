# SPDX-License-Identifier: Apache-2.0
"""Models of which nothing can be divided: each rank has all of it, and the result is that of one rank."""

from __future__ import annotations

from typing import Any

import torch

import anyaccel
import ranks

_COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
_HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "jetmoe": ("JetMoeConfig", _COMMON | _HEADS),
}
IDS = torch.tensor([[5, 17, 90, 3, 64, 28, 11]])


def build(name: str) -> Any:
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options)).eval()


def logits_of_ranks() -> dict[str, tuple[float, dict[str, str]]]:
    """Of each model and runtime on this rank: the error of the logits, and what is whole, with the reason."""
    found = {}
    for name in MODELS:
        for runtime in ("plain", "auto"):
            with torch.inference_mode():
                expected = build(name)(IDS).logits
                engine = anyaccel.init_inference(
                    build(name), dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": 2}
                )
                difference = (engine(IDS).logits - expected).abs().max() / expected.abs().max()
            assert engine.tp_size == 2
            assert not engine.plan.row_parallel
            found[f"{name}, {runtime}"] = (float(difference), engine.plan.whole)
    return found


def test_two_ranks_of_what_cannot_be_divided_give_the_logits_of_one() -> None:
    for found in ranks.run(logits_of_ranks, 2, timeout=110):
        for name, (error, whole) in found.items():
            assert error < 1e-4, name
            assert all(whole.values()) and whole, name

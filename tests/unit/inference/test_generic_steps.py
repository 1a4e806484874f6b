# SPDX-License-Identifier: Apache-2.0
"""generate_tokens on a model's own code gives transformers' tokens, however the model keeps its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.inference import generate_tokens

IDS = torch.tensor([[5, 17, 99, 3, 64, 28, 101]])
_TINY = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# A state without attention; a token that stands for the next one (two ways); inputs of its own; a forced last token.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "lru_width": 32,
            "attention_window_size": 8,
        },
    ),
    "xlm": ("XLMConfig", {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True, "n_words": 131}),
    "xlnet": ("XLNetConfig", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "cpmant": (
        "CpmAntConfig",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "num_hidden_layers": 2,
            "prompt_types": 8,
            "prompt_length": 4,
            "segment_types": 8,
        },
    ),
    "bart": (
        "BartConfig",
        {
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "forced_eos_token_id": 2,
        },
    ),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}


def _build(name: str) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**_TINY, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runtime", ["plain", "torch"])
def test_tokens_are_those_of_transformers(name: str, runtime: str) -> None:
    want = _build(name).generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=9, do_sample=False)
    answer = want[0, IDS.shape[1] :].tolist()
    assert len(set(answer)) > 1 or name in ("xlm", "xlnet")  # these see the same last token in each step
    engine = anyaccel.init_inference(_build(name), dtype="fp32", runtime=runtime)
    assert list(generate_tokens(engine, IDS, max_new_tokens=9)) == answer


def test_a_model_without_generate_is_named() -> None:
    bert = transformers.BertModel(
        transformers.BertConfig(
            **_TINY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
        )
    )
    engine = anyaccel.init_inference(bert, dtype="fp32", runtime="plain")
    with pytest.raises(UsageError, match=r"BertModel has no generate\(\)"):
        list(generate_tokens(engine, IDS, max_new_tokens=1))

# SPDX-License-Identifier: Apache-2.0
"""generate_tokens on a model's own code gives transformers' tokens, however the model keeps its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import anyaccel
import family_cases
from anyaccel.errors import ModelError, UsageError
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


def test_a_model_with_an_encoder_answers_its_prompt() -> None:
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "decoder_start_token_id": 0}

    def build() -> Any:
        torch.manual_seed(3)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**_TINY, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.4)
        return model.eval()

    want = build().generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=9, do_sample=False)[0, 1:].tolist()
    engine = anyaccel.init_inference(build(), dtype="fp32", runtime="torch")
    assert list(generate_tokens(engine, IDS, max_new_tokens=9)) == want


@pytest.mark.parametrize(
    "how",
    [{"temperature": 1.2, "top_p": 0.9, "top_k": 20}, {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3}],
)
def test_every_runtime_draws_the_same_tokens(how: dict[str, Any]) -> None:
    found = [
        list(
            generate_tokens(
                anyaccel.init_inference(family_cases.build("llama"), dtype="fp32", runtime=runtime),
                IDS,
                max_new_tokens=12,
                seed=7,
                **how,
            )
        )
        for runtime in ("native", "torch", "plain")
    ]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 3


def test_own_code_that_fails_in_a_precision_is_one_error_with_advice() -> None:
    engine = anyaccel.init_inference(_build("xlnet"), dtype="bf16", runtime="torch")
    with pytest.raises(
        ModelError, match=r"^XLNetLMHeadModel: its own code fails in bf16 \(.*\); with --dtype fp32 it may run$"
    ):
        list(generate_tokens(engine, IDS, max_new_tokens=1))


def test_a_model_without_generate_is_named() -> None:
    bert = transformers.BertModel(
        transformers.BertConfig(
            **_TINY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
        )
    )
    engine = anyaccel.init_inference(bert, dtype="fp32", runtime="plain")
    with pytest.raises(UsageError, match=r"BertModel has no generate\(\)"):
        list(generate_tokens(engine, IDS, max_new_tokens=1))

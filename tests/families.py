# SPDX-License-Identifier: Apache-2.0
"""Small random models of the families that tensor parallelism is tested on."""

from __future__ import annotations

from typing import Any

import torch

# Family -> (configuration class, its arguments). 6 heads with 2 KV heads unless the family has its own way.
_COMMON = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _common(*without: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in without} | more


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _common(head_dim=8)),
    "llama-9-heads": (
        "LlamaConfig",
        _common(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    ),
    "mistral": ("MistralConfig", _common(head_dim=8, sliding_window=4)),
    "qwen2": ("Qwen2Config", _common()),
    "qwen3": ("Qwen3Config", _common(head_dim=8)),
    "gemma2": ("Gemma2Config", _common(head_dim=8, sliding_window=4)),
    "gemma3": ("Gemma3TextConfig", _common(head_dim=8, sliding_window=4)),
    "granite": ("GraniteConfig", _common()),
    "phi": ("PhiConfig", _common()),
    "phi3": ("Phi3Config", _common()),
    "stablelm": ("StableLmConfig", _common()),
    "starcoder2": ("Starcoder2Config", _common()),
    "cohere": ("CohereConfig", _common(use_qk_norm=True)),
    "olmo2": ("Olmo2Config", _common()),
    "gpt_neox": ("GPTNeoXConfig", _common("num_key_value_heads")),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 128, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "eos_token_id": 2},
    ),
    "gptj": (
        "GPTJConfig",
        {"vocab_size": 128, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "rotary_dim": 4},
    ),
    "opt": (
        "OPTConfig",
        _common("intermediate_size", "num_key_value_heads", ffn_dim=80, word_embed_proj_dim=48),
    ),
    "bloom": ("BloomConfig", {"vocab_size": 128, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "falcon": ("FalconConfig", _common("intermediate_size", "num_key_value_heads", multi_query=False)),
    "mixtral": ("MixtralConfig", _common(num_local_experts=4)),
    "glm4_moe": (
        "Glm4MoeConfig",
        _common(
            head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
        ),
    ),
    "diffllama": ("DiffLlamaConfig", _common(num_attention_heads=6, num_key_value_heads=6)),
    "stablelm-norms": ("StableLmConfig", _common(qk_layernorm=True)),
    "gpt_oss": (
        "GptOssConfig",
        _common(head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=None),
    ),
}

# Families whose attention (or MLP) stays whole on every rank, and a word of the reason.
WHOLE = {
    "olmo2": ("attn", "across heads"),
    "bloom": ("attention", "ALiBi"),
    "falcon": ("attention", "fused"),
    "diffllama": ("attn", "across heads"),
    "stablelm-norms": ("attn", "across heads"),
}


def build(family: str, seed: int = 0) -> Any:
    """A causal LM of `family` with random weights, the same for the same seed, in eval mode."""
    import transformers

    name, arguments = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The families' own initialisation leaves biases at 0 and norms at 1, which would hide mistakes.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model

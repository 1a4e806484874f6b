# SPDX-License-Identifier: Apache-2.0
"""The zoo: small random models of every family of the native runtime, of every variant of its configs that matters,
and of architectures that the runtime lacks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_IDS,
}
_GPT = {"vocab_size": 131, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, **_IDS}
_MLA = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
}
_MLA_ONLY = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 6,
}
# Enough heads that a score of 0, of which many are equal, is rare; fewer tokens than the prompts have.
_INDEXER = {"index_topk": 5, "index_head_dim": 16, "index_n_heads": 12, "n_group": 2, "topk_group": 1}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LAYERS4 = {"num_hidden_layers": 4}


def common(*without: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in without} | more


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=16)
_LONG = {
    "short_factor": [1.0, 1.05, 1.1],
    "long_factor": [1.5, 3.0, 6.0],
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
_GROWING = {**_YARN["rope_parameters"], "original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.5}
_WINDOWS = ["sliding_attention", "full_attention"]

# Case -> (configuration class, its arguments). Windows are shorter than the prompts. Columns are in groups of 32, as
# four bits need them, in llama-64 only: elsewhere int4 is int8.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", common()),
    "llama-mha-tied": ("LlamaConfig", common(num_key_value_heads=6, tie_word_embeddings=True)),
    "llama-mqa-biases": ("LlamaConfig", common(num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ("LlamaConfig", common(head_dim=20, hidden_act="gelu", rms_norm_eps=1e-3)),
    "llama-9-heads": (
        "LlamaConfig",
        common(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    ),
    "llama-64": ("LlamaConfig", common(hidden_size=64, intermediate_size=96, num_attention_heads=8)),
    "llama-theta": ("LlamaConfig", common(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "llama-linear": ("LlamaConfig", common(**_rope("linear", factor=3.0))),
    "llama-dynamic": ("LlamaConfig", common(max_position_embeddings=8, **_rope("dynamic", factor=4.0))),
    "llama-llama3": ("LlamaConfig", common(**_LLAMA3)),
    "llama-yarn": ("LlamaConfig", common(**_YARN)),
    "llama-yarn-factors": (
        "LlamaConfig",
        common(
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=8.0,
                beta_slow=2.0,
                attention_factor=0.9,
                truncate=False,
            )
        ),
    ),
    "llama-longrope": (
        "LlamaConfig",
        common(
            **_rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[2.0, 3.0, 4.0, 5.0],
                factor=4.0,
                original_max_position_embeddings=10,
            )
        ),
    ),
    "mistral": ("MistralConfig", common(sliding_window=5)),
    "mistral-no-window": ("MistralConfig", common(sliding_window=None, head_dim=12)),
    "ministral": ("MinistralConfig", common(sliding_window=5, layer_types=_WINDOWS, head_dim=8)),
    "ministral-all": ("MinistralConfig", common(sliding_window=5, head_dim=8)),
    "ministral3": (
        "Ministral3Config",
        common(
            head_dim=8,
            rope_parameters={
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
    ),
    "smollm3": ("SmolLM3Config", common(**_LAYERS4, no_rope_layer_interval=2)),
    "smollm3-windows": (
        "SmolLM3Config",
        common(use_sliding_window=True, sliding_window=4, no_rope_layers=[1, 0], attention_bias=True),
    ),
    "qwen2": ("Qwen2Config", common()),
    "qwen2-windows": (
        "Qwen2Config",
        common(use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": ("Qwen3Config", common(head_dim=16)),
    "qwen3-bias": ("Qwen3Config", common(head_dim=8, attention_bias=True, **_YARN)),
    "gemma": ("GemmaConfig", common(head_dim=12)),
    "gemma-gelu": ("GemmaConfig", common(head_dim=12, hidden_act="gelu", attention_bias=True)),
    "gemma2": ("Gemma2Config", common(head_dim=12, sliding_window=4, query_pre_attn_scalar=9)),
    "gemma2-softcaps": (
        "Gemma2Config",
        common(head_dim=8, sliding_window=4, attn_logit_softcapping=0.7, final_logit_softcapping=2.0),
    ),
    "gemma2-no-softcaps": (
        "Gemma2Config",
        common(head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        common(head_dim=8, sliding_window=4, layer_types=_WINDOWS, attn_logit_softcapping=0.5),
    ),
    "gemma3-linear": (
        "Gemma3TextConfig",
        common(
            head_dim=8,
            sliding_window=4,
            layer_types=_WINDOWS,
            final_logit_softcapping=3.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "phi": ("PhiConfig", common()),
    "phi-norms": ("PhiConfig", common(qk_layernorm=True, partial_rotary_factor=0.75, num_key_value_heads=6)),
    "phi3": ("Phi3Config", common()),
    "phi3-partial": ("Phi3Config", common(sliding_window=6, partial_rotary_factor=0.5)),
    "phi3-longrope": (
        "Phi3Config",
        common(original_max_position_embeddings=10, rope_parameters=_LONG, tie_word_embeddings=True),
    ),
    "granite": (
        "GraniteConfig",
        common(
            embedding_multiplier=6.0,
            logits_scaling=4.0,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "granite-plain": ("GraniteConfig", common(tie_word_embeddings=True)),
    "olmo": ("OlmoConfig", common()),
    "olmo-clip": ("OlmoConfig", common(clip_qkv=0.5, attention_bias=True)),
    "olmo2": ("Olmo2Config", common()),
    "olmo2-bias": ("Olmo2Config", common(attention_bias=True)),
    "olmo3": ("Olmo3Config", common(**_LAYERS4, sliding_window=5)),
    "olmo3-yarn": (
        "Olmo3Config",
        common(
            sliding_window=5,
            layer_types=_WINDOWS,
            rope_parameters={
                "full_attention": _YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "starcoder2": ("Starcoder2Config", common(sliding_window=5)),
    "starcoder2-plain": ("Starcoder2Config", common(use_bias=False, tie_word_embeddings=False)),
    "stablelm": ("StableLmConfig", common()),
    "stablelm-norms": ("StableLmConfig", common(qk_layernorm=True, use_qkv_bias=True, partial_rotary_factor=0.5)),
    "stablelm-parallel": ("StableLmConfig", common(use_parallel_residual=True)),
    "cohere": ("CohereConfig", common()),
    "cohere-norms": ("CohereConfig", common(use_qk_norm=True, attention_bias=True, logit_scale=2.0)),
    "cohere2": ("Cohere2Config", common(sliding_window=5, layer_types=_WINDOWS)),
    "cohere2-pattern": ("Cohere2Config", common(**_LAYERS4, sliding_window=5, attention_bias=True)),
    "glm": ("GlmConfig", common(head_dim=12)),
    "glm4": ("Glm4Config", common(head_dim=8, partial_rotary_factor=0.5, attention_bias=False)),
    "glm4_moe": (
        "Glm4MoeConfig",
        common(
            head_dim=8,
            num_hidden_layers=3,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.7,
        ),
    ),
    "glm4_moe-norms": (
        "Glm4MoeConfig",
        common(
            head_dim=8,
            use_qk_norm=True,
            attention_bias=True,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
        ),
    ),
    "seed_oss": ("SeedOssConfig", common(head_dim=12, attention_out_bias=True, mlp_bias=True)),
    "arcee": ("ArceeConfig", common(mlp_bias=True)),
    "ernie4_5": ("Ernie4_5Config", common(head_dim=12, use_bias=True)),
    "helium": ("HeliumConfig", common(head_dim=8)),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", common(head_dim=8)),
    "hunyuan_v1_dense-alpha": (
        "HunYuanDenseV1Config",
        common(head_dim=8, attention_bias=True, **_rope("dynamic", alpha=50.0, factor=1.0)),
    ),
    "exaone4": ("Exaone4Config", common(**_LAYERS4, sliding_window=5)),
    "exaone4-no-window": ("Exaone4Config", common(sliding_window=None, layer_types=["full_attention"] * 2)),
    "nemotron": ("NemotronConfig", common()),
    "nemotron-biases": ("NemotronConfig", common(attention_bias=True, mlp_bias=True, head_dim=12)),
    "gpt2": ("GPT2Config", _GPT),
    "gpt2-scales": (
        "GPT2Config",
        _GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 56, "tie_word_embeddings": False},
    ),
    "gpt2-unscaled": ("GPT2Config", _GPT | {"scale_attn_weights": False, "activation_function": "relu"}),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT),
    "gpt_bigcode-heads": ("GPTBigCodeConfig", _GPT | {"multi_query": False}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": 131,
            "max_position_embeddings": 64,
            "hidden_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            **_IDS,
        },
    ),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", common("num_key_value_heads", rotary_pct=0.5)),
    "gpt_neox-serial": (
        "GPTNeoXConfig",
        common("num_key_value_heads", use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast"),
    ),
    "opt": ("OPTConfig", common("intermediate_size", "num_key_value_heads", ffn_dim=72)),
    "opt-plain": (
        "OPTConfig",
        common(
            "intermediate_size",
            "num_key_value_heads",
            ffn_dim=72,
            enable_bias=False,
            layer_norm_elementwise_affine=False,
            activation_function="gelu",
            _remove_final_layer_norm=True,
            tie_word_embeddings=False,
        ),
    ),
    "falcon": ("FalconConfig", common("intermediate_size", "num_key_value_heads")),
    "falcon-heads": (
        "FalconConfig",
        common("intermediate_size", "num_key_value_heads", multi_query=False, bias=True, ffn_hidden_size=56),
    ),
    "falcon-serial": ("FalconConfig", common("intermediate_size", "num_key_value_heads", parallel_attn=False)),
    "falcon-groups": (
        "FalconConfig",
        common("intermediate_size", "num_key_value_heads", new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon-groups-one-norm": (
        "FalconConfig",
        common(
            "intermediate_size",
            "num_key_value_heads",
            new_decoder_architecture=True,
            num_kv_heads=3,
            num_ln_in_parallel_attn=1,
            bias=True,
        ),
    ),
    "falcon-alibi": (
        "FalconConfig",
        common(
            "intermediate_size",
            "num_key_value_heads",
            num_attention_heads=8,
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
        ),
    ),
    "bloom": ("BloomConfig", {"vocab_size": 131, "hidden_size": 48, "n_layer": 2, "n_head": 6, **_IDS}),
    "bloom-post": (
        "BloomConfig",
        {
            "vocab_size": 131,
            "hidden_size": 48,
            "n_layer": 2,
            "n_head": 4,
            "apply_residual_connection_post_layernorm": True,
            **_IDS,
        },
    ),
    "mpt": ("MptConfig", {"vocab_size": 131, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 64, **_IDS}),
    "mpt-clip": (
        "MptConfig",
        {
            "vocab_size": 131,
            "d_model": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
            **_IDS,
        },
    ),
    "mixtral": ("MixtralConfig", common(num_local_experts=5, sliding_window=5)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        common(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    ),
    "qwen2_moe-mixed": (
        "Qwen2MoeConfig",
        common(
            **_LAYERS4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=3,
            qkv_bias=False,
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        common(head_dim=8, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "qwen3_moe-mixed": (
        "Qwen3MoeConfig",
        common(
            **_LAYERS4,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            decoder_sparse_step=2,
            use_sliding_window=True,
            sliding_window=4,
            attention_bias=True,
        ),
    ),
    "olmoe": ("OlmoeConfig", common(num_experts=5, num_experts_per_tok=2)),
    "granitemoe": (
        "GraniteMoeConfig",
        common(num_local_experts=5, num_experts_per_tok=2, residual_multiplier=0.5, attention_multiplier=0.3),
    ),
    "gpt_oss": (
        "GptOssConfig",
        common(head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=5),
    ),
    "deepseek_v2": ("DeepseekV2Config", common() | _MLA),
    "deepseek_v2-groups": (
        "DeepseekV2Config",
        common()
        | _MLA
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "attention_bias": True,
            "mlp_bias": True,
            "routed_scaling_factor": 3.0,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9),
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", common() | _MLA | {"n_group": 4, "topk_group": 2}),
    "deepseek_v3-plain": (
        "DeepseekV3Config",
        common()
        | _MLA
        | {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
}


CASES |= {
    "afmoe": (
        "AfmoeConfig",
        common(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            num_hidden_layers=3,
            sliding_window=5,
            head_dim=12,
            num_dense_layers=1,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            route_scale=1.7,
            mup_enabled=True,
        ),
    ),
    "afmoe-plain": (
        "AfmoeConfig",
        common(
            **_LAYERS4,
            head_dim=8,
            num_dense_layers=0,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            moe_intermediate_size=24,
        ),
    ),
    "flint": (
        "FlintConfig",
        common(
            **_LAYERS4,
            head_dim=12,
            sliding_window=5,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
        ),
    ),
    "flint-plain": (
        "FlintConfig",
        common(
            head_dim=8,
            layer_types=_WINDOWS,
            sliding_window=5,
            attention_bias=True,
            mlp_only_layers=[],
            decoder_sparse_step=2,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            **_YARN,
        ),
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        common(
            **_EXPERTS,
            **_LAYERS4,
            num_key_value_heads=1,
            head_dim=12,
            v_head_dim=10,
            sliding_window=5,
            n_group=4,
            topk_group=2,
        ),
    ),
    "mimo_v2_flash-plain": (
        "MiMoV2FlashConfig",
        common(
            **_EXPERTS,
            num_key_value_heads=3,
            head_dim=8,
            v_head_dim=8,
            layer_types=_WINDOWS,
            mlp_layer_types=["sparse", "dense"],
            sliding_window_size=4,
            attention_bias=True,
            attention_value_scale=None,
            norm_topk_prob=False,
            routed_scaling_factor=2.5,
            rope_parameters={
                "full_attention": {**_YARN["rope_parameters"], "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
            },
        ),
    ),
    "cwm": ("CwmConfig", common(**_LAYERS4, sliding_window=5, head_dim=12, **_LLAMA3)),
    "internlm3": ("InternLM3Config", common(head_dim=12, attention_bias=True, mlp_bias=True)),
    "iquestcoder": ("IQuestCoderConfig", common(head_dim=12, attention_bias=True)),
    "jais2": ("Jais2Config", common()),
    "jais2-plain": ("Jais2Config", common(attention_bias=False, mlp_bias=False, head_dim=12)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        common(
            **_LAYERS4,
            moe_num_experts=5,
            moe_k=2,
            moe_intermediate_size=24,
            moe_layer_start_index=1,
            moe_layer_end_index=2,
            use_bias=True,
            head_dim=12,
        ),
    ),
    "ernie4_5_moe-plain": (
        "Ernie4_5_MoeConfig",
        common(num_experts=5, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=0, moe_layer_interval=2),
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        common(head_dim=8, num_experts=5, moe_topk=[2, 3], **_rope("dynamic", alpha=50.0, factor=1.0)),
    ),
    "hy_v3": (
        "HYV3Config",
        common(head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, num_shared_experts=2),
    ),
    "hy_v3-sparse": (
        "HYV3Config",
        common(
            head_dim=12,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_layer_types=["sparse", "dense"],
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "axk1": (
        "AXK1Config",
        common()
        | {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}
        | {"n_group": 4, "topk_group": 2},
    ),
    "axk1-plain": (
        "AXK1Config",
        common()
        | {key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}
        | {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek_v32": ("DeepseekV32Config", common() | _MLA | _INDEXER),
    "deepseek_v32-yarn": (
        "DeepseekV32Config",
        common()
        | _MLA
        | _INDEXER
        | {
            "index_head_dim": 20,
            "index_n_heads": 13,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaConfig", common() | _MLA | _INDEXER),
    "glm_moe_dsa-shared": (
        "GlmMoeDsaConfig",
        common() | _MLA | _INDEXER | {"indexer_types": ["full", "shared", "full"]},
    ),
    "glm_moe_dsa-every-second": ("GlmMoeDsaConfig", common() | _MLA | _INDEXER | {"index_topk_freq": 2}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        common(**_MLA_ONLY, num_hidden_layers=3, n_group=2, topk_group=1, **_EXPERTS),
    ),
    "glm4_moe_lite-plain": (
        "Glm4MoeLiteConfig",
        common(
            **_MLA_ONLY | {"q_lora_rank": None},
            **_EXPERTS,
            mlp_layer_types=["sparse", "dense"],
            attention_bias=True,
            rope_interleave=False,
            norm_topk_prob=False,
        ),
    ),
    "solar_open": ("SolarOpenConfig", common("intermediate_size", head_dim=8, n_group=2, topk_group=1, **_EXPERTS)),
    "solar_open-plain": (
        "SolarOpenConfig",
        common(
            "intermediate_size",
            head_dim=12,
            attention_bias=True,
            norm_topk_prob=False,
            **_EXPERTS,
        ),
    ),
    "dots1": (
        "Dots1Config",
        common(
            **_LAYERS4,
            **_EXPERTS,
            n_shared_experts=2,
            first_k_dense_replace=1,
            sliding_window=5,
            max_window_layers=2,
            norm_topk_prob=True,
            head_dim=12,
        ),
    ),
    "dots1-plain": (
        "Dots1Config",
        common(
            **_EXPERTS,
            n_shared_experts=1,
            sliding_window=None,
            attention_bias=True,
            routed_scaling_factor=1.7,
            n_group=2,
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        common(
            head_dim=12,
            num_local_experts=5,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        common(
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
        ),
    ),
    "granitemoeshared-none": ("GraniteMoeSharedConfig", common(num_local_experts=4, attention_bias=True)),
    "granite_swa": (
        "GraniteSWAConfig",
        common(**_LAYERS4, sliding_window=5, layer_rope_theta=[1e4, 5e5, 0, 1e4], logits_scaling=3.0, mlp_bias=True),
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        common(sliding_window=5, layer_types=_WINDOWS, num_local_experts=4, shared_intermediate_size=40),
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        common(logits_scaling=0.4, residual_multiplier=0.6, embedding_multiplier=3.0, head_dim=12),
    ),
    "hyperclovax-plain": (
        "HyperCLOVAXConfig",
        common(use_post_norm=False, attention_multiplier=0.3, attention_bias=True, mlp_bias=True),
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        common(
            **_LAYERS4,
            sliding_window=5,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            num_shared_experts=2,
            n_group=2,
            head_dim=12,
        ),
    ),
    "exaone_moe-plain": (
        "ExaoneMoeConfig",
        common(
            sliding_window=5,
            layer_types=["full_attention"] * 2,
            mlp_layer_types=["sparse", "dense"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
        ),
    ),
    "flex_olmo": ("FlexOlmoConfig", common(num_experts=5, num_experts_per_tok=2)),
    "flex_olmo-normed": (
        "FlexOlmoConfig",
        common(num_experts=5, num_experts_per_tok=3, norm_topk_prob=True, attention_bias=True),
    ),
    "codegen": ("CodeGenConfig", _GPT | {"rotary_dim": 8}),
    "codegen-heads": ("CodeGenConfig", _GPT | {"rotary_dim": 4, "n_head": 8, "n_inner": 56}),
    "biogpt": ("BioGptConfig", common("num_key_value_heads")),
    "biogpt-plain": (
        "BioGptConfig",
        common("num_key_value_heads", scale_embedding=False, hidden_act="relu", tie_word_embeddings=False),
    ),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseConfig",
        common("num_key_value_heads", "intermediate_size", intermediate_multiple_size=2, rotary_pct=0.5),
    ),
    "persimmon": ("PersimmonConfig", common("num_key_value_heads")),
    "persimmon-plain": (
        "PersimmonConfig",
        common("num_key_value_heads", qk_layernorm=False, hidden_act="gelu", tie_word_embeddings=True),
    ),
    "minicpm3": ("MiniCPM3Config", common(**_MLA_ONLY, dim_model_base=24, scale_emb=3, scale_depth=0.9)),
    "minicpm3-plain": (
        "MiniCPM3Config",
        common(
            **_MLA_ONLY | {"q_lora_rank": None, "v_head_dim": None},
            scale_depth=None,
            dim_model_base=None,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "vaultgemma": ("VaultGemmaConfig", common(head_dim=12, sliding_window=4, query_pre_attn_scalar=9)),
    "vaultgemma-no-softcaps": (
        "VaultGemmaConfig",
        common(head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True),
    ),
    "nanochat": ("NanoChatConfig", common(final_logit_softcapping=2.0)),
    "aria_text": ("AriaTextConfig", common(moe_num_experts=5, moe_topk=2, moe_num_shared_experts=2)),
    "aria_text-plain": (
        "AriaTextConfig",
        common(
            moe_num_experts=6,
            moe_topk=3,
            moe_num_shared_experts=1,
            head_dim=12,
            hidden_act="gelu",
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "apertus": ("ApertusConfig", common()),
    "apertus-plain": (
        "ApertusConfig",
        common("num_key_value_heads", attention_bias=True, hidden_act="gelu", rope_parameters=_YARN["rope_parameters"]),
    ),
    "bitnet": ("BitNetConfig", common()),
    "bitnet-biases": ("BitNetConfig", common(attention_bias=True, hidden_act="silu", tie_word_embeddings=True)),
    "nanochat-yarn": ("NanoChatConfig", common(final_logit_softcapping=None, attention_bias=True, **_YARN)),
}

_DELTA = {
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
}
_MAMBA = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "state_size": 7,
    "time_step_rank": 5,
    "conv_kernel": 3,
    **_IDS,
}
_MAMBA2 = {"vocab_size": 131, "num_hidden_layers": 2, "head_dim": 8, "state_size": 10, **_IDS}
_HYBRID = {"mamba_n_heads": 6, "mamba_d_state": 8}
# Those whose sequences have a recurrent state.
_RECURRENT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", common(layer_types=["conv", "full_attention"], block_multiple_of=8)),
    "lfm2-biases": (
        "Lfm2Config",
        common(full_attn_idxs=[0], conv_bias=True, conv_L_cache=5, block_auto_adjust_ff_dim=False),
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        common(
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        common(
            layer_types=["linear_attention", "full_attention"],
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=32,
            **_DELTA,
        ),
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        common(layer_types=["linear_attention", "full_attention"], head_dim=16, attention_bias=True, **_DELTA),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        common(
            "intermediate_size",
            layer_types=["linear_attention", "full_attention"],
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=32,
            **_DELTA,
        ),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        common(
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            n_group=2,
            topk_group=1,
            kv_lora_rank=16,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
            linear_head_dim=12,
            linear_num_heads=4,
            linear_conv_kernel_dim=3,
        ),
    ),
    "minimax": ("MiniMaxConfig", common(**_LAYERS4, num_local_experts=4, head_dim=12, block_size=8)),
    "minimax-factors": (
        "MiniMaxConfig",
        common(
            layer_types=["full_attention", "linear_attention"],
            num_local_experts=4,
            block_size=256,
            **{f"{kind}_alpha_factor": 3.5 for kind in ("full_attn", "linear_attn", "mlp")},
            **{f"{kind}_beta_factor": 0.8 for kind in ("full_attn", "linear_attn", "mlp")},
        ),
    ),
    "mamba": ("MambaConfig", {**_MAMBA, "use_bias": True}),
    "mamba-plain": ("MambaConfig", {**_MAMBA, "use_conv_bias": False, "tie_word_embeddings": False, "expand": 3}),
    "falcon_mamba": ("FalconMambaConfig", _MAMBA),
    "jamba": (
        "JambaConfig",
        common(
            **_LAYERS4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=0,
            num_experts=4,
            mamba_d_state=6,
            mamba_dt_rank=5,
        ),
    ),
    "jamba-dense": (
        "JambaConfig",
        common(attn_layer_period=2, attn_layer_offset=0, num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        common(num_hidden_layers=3, intermediate_size=80, attention_window_size=5, logits_soft_cap=3.0),
    ),
    "recurrent_gemma-biases": (
        "RecurrentGemmaConfig",
        common(
            **_LAYERS4,
            conv1d_width=3,
            block_types=["attention", "recurrent"],
            hidden_activation="silu",
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "zamba2": (
        "Zamba2Config",
        common(
            "num_key_value_heads",
            num_hidden_layers=5,
            layers_block_type=["mamba", *["hybrid"] * 3, "mamba"],
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=5,
            use_mem_rope=True,
            n_mamba_heads=6,
            mamba_d_state=8,
            time_step_min=1e-6,
        ),
    ),
    "zamba2-plain": (
        "Zamba2Config",
        common(
            num_hidden_layers=3,
            layers_block_type=["hybrid", "mamba", "hybrid"],
            adapter_rank=5,
            n_mamba_heads=12,
            mamba_d_state=8,
            mamba_ngroups=4,
            time_step_min=1e-6,
            add_bias_linear=True,
            tie_word_embeddings=False,
        ),
    ),
    "mamba2": ("Mamba2Config", {**_MAMBA2, "hidden_size": 36, "num_heads": 9, "n_groups": 1}),
    "mamba2-groups": (
        "Mamba2Config",
        {**_MAMBA2, "hidden_size": 48, "num_heads": 12, "n_groups": 4, "use_bias": True, "tie_word_embeddings": True},
    ),
    "bamba": ("BambaConfig", common(attn_layer_indices=[1], **_HYBRID, mamba_n_groups=1, mamba_d_head=16)),
    "bamba-biases": (
        "BambaConfig",
        common(
            attn_layer_indices=[0],
            **(_HYBRID | {"mamba_n_heads": 12, "mamba_n_groups": 4, "mamba_proj_bias": True, "mlp_bias": True}),
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        common(
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.3,
            **_HYBRID,
        ),
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybridConfig",
        common(
            layer_types=["full_attention", "linear_attention"],
            num_local_experts=0,
            position_embedding_type="rope",
            **_HYBRID,
        ),
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        common(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=3,
            linear_key_head_dim=10,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
    ),
    "olmo_hybrid-plain": (
        "OlmoHybridConfig",
        common(
            **_LAYERS4,
            linear_num_key_heads=6,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            linear_allow_neg_eigval=False,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": None},
        ),
    ),
    "falcon_h1": (
        "FalconH1Config",
        common(
            mamba_n_heads=6,
            mamba_d_ssm=72,
            mamba_d_state=8,
            mamba_n_groups=2,
            mamba_norm_before_gate=False,
            attention_in_multiplier=0.9,
            attention_out_multiplier=0.6,
            key_multiplier=0.8,
            mlp_multipliers=[0.7, 1.2],
            ssm_in_multiplier=1.1,
            ssm_multipliers=[0.9, 0.8, 1.3, 0.7, 1.2],
            ssm_out_multiplier=0.5,
            embedding_multiplier=3.0,
            lm_head_multiplier=0.3,
        ),
    ),
    "falcon_h1-norm": (
        "FalconH1Config",
        common(
            mamba_n_heads=6,
            mamba_d_ssm=72,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            mlp_bias=True,
        ),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        common(
            "num_hidden_layers",
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            head_dim=8,
            ssm_state_size=8,
            mamba_num_heads=12,
            mamba_head_dim=8,
            n_groups=4,
            n_routed_experts=4,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=32,
            routed_scaling_factor=0.5,
        ),
    ),
}
CASES |= _RECURRENT_CASES
RECURRENT = frozenset(_RECURRENT_CASES)
# A convolution; the delta rule, also with a decay for each channel; state spaces of heads and of channels; fixed
# decays; gates; attention beside another mixer, and before it.
MIXERS = ["lfm2", "qwen3_next", "kimi_linear", "mamba2", "jamba", "minimax", "recurrent_gemma", "falcon_h1", "zamba2"]

_LLAMA4 = {
    **_LAYERS4,
    "intermediate_size_mlp": 56,
    "head_dim": 8,
    "num_local_experts": 4,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
CASES |= {
    "llama4_text": (
        "Llama4TextConfig",
        common(**_LLAMA4, interleave_moe_layer_step=2, **_LLAMA3),
    ),
    "llama4_text-plain": (
        "Llama4TextConfig",
        common(
            **_LLAMA4,
            num_experts_per_tok=2,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            attention_bias=True,
            no_rope_layers=[1, 0, 1, 1],
            moe_layers=[0, 3],
        ),
    ),
    "mistral4": (
        "Mistral4Config",
        common(**_MLA_ONLY, **_EXPERTS, n_group=2, topk_group=1, rope_parameters=_GROWING),
    ),
    "mistral4-dense": (
        "Mistral4Config",
        common(
            **_MLA_ONLY | {"q_lora_rank": None},
            **_EXPERTS,
            first_k_dense_replace=1,
            norm_topk_prob=False,
            routed_scaling_factor=1.5,
            rope_interleave=False,
            attention_bias=True,
            rope_parameters=_GROWING | {"llama_4_scaling_beta": 0.3},
        ),
    ),
    "ministral3-growing": ("Ministral3Config", common(head_dim=8, rope_parameters=_GROWING)),
    "phimoe": ("PhimoeConfig", common(num_local_experts=5, router_jitter_noise=0.4, lm_head_bias=True)),
    "phimoe-longrope": (
        "PhimoeConfig",
        common(
            num_local_experts=5,
            sliding_window=6,
            attention_bias=True,
            max_position_embeddings=60,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 60,
            },
        ),
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        common(
            **_LAYERS4,
            head_dim=8,
            sliding_window=5,
            num_experts=5,
            num_shared_experts=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=40,
        ),
    ),
    "cohere2_moe-sigmoid": (
        "Cohere2MoeConfig",
        common(
            **_LAYERS4,
            head_dim=8,
            sliding_window=5,
            num_experts=5,
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            expert_selection_fn="sigmoid",
            first_k_dense_replace=2,
            prefix_dense_sliding_window_pattern=2,
            rms_norm_eps=1e-5,
            attention_bias=True,
        ),
    ),
    "cohere2_moe-scores": (
        "Cohere2MoeConfig",
        common(head_dim=8, num_experts=5, expert_selection_fn="sigmoid", norm_topk_prob=False),
    ),
}


_GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}
_GEMMA3N = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 8,
    "intermediate_size": [72, 72, 72, 40, 40, 56],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "laurel_rank": 10,
    "altup_num_inputs": 4,
    "activation_sparsity_pattern": [0.8, 0.95, 0.3, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 3.0,
}
CASES |= {
    "gemma4_text": (
        "Gemma4TextConfig",
        common(
            **_GEMMA4,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=131,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            final_logit_softcapping=3.0,
        ),
    ),
    "youtu": ("YoutuConfig", common(**_MLA_ONLY)),
    "youtu-plain": (
        "YoutuConfig",
        common(**_MLA_ONLY | {"q_lora_rank": None}, rope_interleave=False, attention_bias=True),
    ),
    "mellum": (
        "MellumConfig",
        common(
            head_dim=8,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            sliding_window=5,
            layer_types=_WINDOWS,
            mlp_layer_types=["sparse", "dense"],
        ),
    ),
    "mellum-plain": (
        "MellumConfig",
        common(
            head_dim=12,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            attention_bias=True,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "gemma3n_text": ("Gemma3nTextConfig", common(**_GEMMA3N, num_kv_shared_layers=3)),
    "gemma3n_text-plain": (
        "Gemma3nTextConfig",
        common(
            **_GEMMA3N
            | {"altup_num_inputs": 2, "altup_correct_scale": False, "activation_sparsity_pattern": None}
            | {"intermediate_size": 72, "vocab_size_per_layer_input": 100},
            num_kv_shared_layers=0,
            attention_bias=True,
        ),
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        common(**_GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0),
    ),
    "gemma4_text-experts": (
        "Gemma4TextConfig",
        common(
            **_GEMMA4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
    ),
    "gemma4_text-alike": (
        "Gemma4TextConfig",
        common(**_GEMMA4 | {"global_head_dim": 8}, hidden_size_per_layer_input=0),
    ),
    "gemma4_text-large": (
        "Gemma4TextConfig",
        common(
            **_GEMMA4,
            hidden_size_per_layer_input=0,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            attention_bias=True,
        ),
    ),
}


# Architectures without a native decoder: CTRL and XGLM; RWKV has no attention at all; DiffLlama's norm goes across
# heads. MiniMax has buffers that must follow the dtype, XGLM embeddings that multiply, and JetMoe changes weights in
# forward. The columns of XGLM and MiniMax are in groups, as above.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctrl": (
        "CTRLConfig",
        {"vocab_size": 131, "n_embd": 48, "dff": 80, "n_layer": 2, "n_head": 6, "n_positions": 64, **_IDS},
    ),
    "xglm": (
        "XGLMConfig",
        {
            "vocab_size": 131,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 2,
            "attention_heads": 8,
            "max_position_embeddings": 64,
            **_IDS,
        },
    ),
    "jetmoe": (
        "JetMoeConfig",
        common("num_attention_heads", kv_channels=12, num_local_experts=4, num_experts_per_tok=2),
    ),
    "rwkv": (
        "RwkvConfig",
        {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 64, **_IDS},
    ),
    "diffllama": ("DiffLlamaConfig", common(num_key_value_heads=6)),
}


def build(case: str, seed: int = 0, positions: int = 0, attention: str = "eager") -> Any:
    """The case's causal LM in eval mode, float32, every parameter random, the same for the same seed.

    Args:
        positions: of models that have 64; 0 leaves them so.
        attention: transformers' implementation of it; "" is the one that it chooses itself.
    """
    import transformers

    name, arguments = copy.deepcopy(CASES[case] if case in CASES else OTHERS[case])  # configs change their arguments
    if positions:
        longer = ("max_position_embeddings", "n_positions", "max_seq_len")
        arguments = {key: positions if key in longer and value == 64 else value for key, value in arguments.items()}
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**arguments)
    if attention:
        # Falcon's plain attention adds ALiBi's bias twice; its fused one is right.
        config._attn_implementation = "sdpa" if case == "falcon-alibi" else attention
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    else:  # the language model of one of several modalities
        model = getattr(transformers.models, config.model_type)
        model = getattr(model, f"{name.removesuffix('Config')}ForCausalLM")._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large enough that no part of the result is negligible
                parameter.copy_(torch.randn_like(parameter) * 0.9 * parameter.shape[-1] ** -0.5)
            else:  # the families' own values, zeros and ones, would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.mul_(0.8)
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model

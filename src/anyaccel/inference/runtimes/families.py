# SPDX-License-Identifier: Apache-2.0
"""Which models the native runtime runs: one entry of FAMILIES for each `model_type`. Torch- and transformers-free.

A family says what the model computes (a builder: config -> DecoderSpec), how its weights are called (Names), and which
values transformers takes for what a config does not have. See docs/add-a-model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes import decoders as dense
from anyaccel.inference.runtimes import decoders_classic as classic
from anyaccel.inference.runtimes import decoders_experts as experts
from anyaccel.inference.runtimes import names
from anyaccel.inference.runtimes.mapping import Names, Part, Unsupported
from anyaccel.inference.runtimes.model_config import Config
from anyaccel.inference.runtimes.spec import DecoderSpec

__all__ = ["FAMILIES", "Family", "Part", "Unsupported", "family_of"]


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        models: what it is known by.
        build: config -> what it computes.
        names: of its weights.
        defaults: transformers' values for what a config.json lacks.
        aliases: other names of config values, as transformers' attribute_map (other name -> the one of `defaults`).
        text: the config of the language model is this entry of a config for several modalities; "": the config itself.
    """

    models: str
    build: Callable[[Config], DecoderSpec]
    names: Names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """What the model computes, before sharding.

        Args:
            config: config.json, or `config.to_dict()`.

        Raises:
            Unsupported: the runtime lacks a feature that the config asks for.
            ModelError: a value is missing or impossible.
        """
        values = config
        if self.text:
            values = config.get(self.text) or {}
            if not isinstance(values, Mapping):
                raise ModelError(f"config: {self.text}={values!r} is not an object")
            # These are the outer level's.
            own = ("quantization_config", "tie_word_embeddings")
            values = {name: value for name, value in values.items() if name not in own}
            values |= {name: config[name] for name in own if name in config}
        try:
            return self.build(Config(values, self.defaults, self.aliases))
        except ModelError:
            raise
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise ModelError(f"config: a value is of a wrong kind ({type(error).__name__}: {error})") from error

    def parts(self, spec: DecoderSpec, config: Mapping[str, Any], name: str) -> list[list[Part]]:
        """Where the rows of the native weight `name` are: alternatives, the first whose tensors all exist is taken."""
        return self.names.parts(spec, name)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.

    Raises:
        Unsupported: there is none.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise Unsupported(f"model_type {kind!r}")
    return family


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_MISTRAL = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = {
    **_QWEN,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
}
_GEMMA = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
}
_GRANITE = {
    **_LLAMA,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_OLMO = {**_LLAMA, "vocab_size": 50304}
_GLM = {
    **_LLAMA,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_COHERE = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_GPT2 = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}
_GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_DEEPSEEK_ALIASES = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 1/2/3, SmolLM2, Yi", dense.llama, names.LLAMA, _LLAMA),
    "mistral": Family("Mistral", dense.mistral, names.LLAMA, _MISTRAL),
    "ministral": Family("Ministral", dense.ministral, names.LLAMA, _MISTRAL),
    "ministral3": Family(
        "Ministral 3",
        dense.ministral3,
        names.LLAMA,
        {
            **_MISTRAL,
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        dense.smollm3,
        names.LLAMA,
        {
            **_LLAMA,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": Family("Qwen1.5, Qwen2, Qwen2.5", dense.qwen2, names.LLAMA, _QWEN),
    "qwen3": Family("Qwen3", dense.qwen3, names.LLAMA, {**_QWEN, "head_dim": 128}),
    "gemma": Family("Gemma 1", dense.gemma, names.GEMMA, _GEMMA),
    "gemma2": Family(
        "Gemma 2",
        dense.gemma2,
        names.GEMMA2,
        {**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family("Gemma 3 (text)", dense.gemma3, names.GEMMA2, _GEMMA3),
    "gemma3": Family("Gemma 3 (text part)", dense.gemma3, names.GEMMA2, _GEMMA3, text="text_config"),
    "phi": Family(
        "Phi-1, Phi-1.5, Phi-2",
        classic.phi,
        names.PHI,
        {
            **_LLAMA,
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3": Family(
        "Phi-3, Phi-3.5, Phi-4",
        dense.phi3,
        names.PHI3,
        {
            **_LLAMA,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "granite": Family("Granite 3", dense.granite, names.LLAMA, _GRANITE),
    "granitemoe": Family(
        "Granite 3 MoE",
        experts.granitemoe,
        names.GRANITE_MOE,
        {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmo": Family("OLMo 1", dense.olmo, names.LLAMA, _OLMO),
    "olmo2": Family("OLMo 2", dense.olmo2, names.OLMO2, {**_OLMO, "rms_norm_eps": 1e-5}),
    "olmo3": Family("OLMo 3", dense.olmo3, names.OLMO2, {**_OLMO, "rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "olmoe": Family(
        "OLMoE",
        experts.olmoe,
        names.QWEN_MOE,
        {
            **_OLMO,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        {"num_local_experts": "num_experts"},
    ),
    "starcoder2": Family(
        "StarCoder2",
        classic.starcoder2,
        names.STARCODER2,
        {
            **_LLAMA,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Family(
        "StableLM",
        classic.stablelm,
        names.STABLELM,
        {
            **_LLAMA,
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
    ),
    "cohere": Family("Command-R, Aya", dense.cohere, names.LLAMA, {**_COHERE, "rope_theta": 500000.0}),
    "cohere2": Family(
        "Command-R7B, Command-A",
        dense.cohere2,
        names.LLAMA,
        {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "glm": Family("GLM-4", dense.glm, names.GLM, _GLM),
    "glm4": Family("GLM-4-0414", dense.glm4, names.GLM4, _GLM),
    "glm4_moe": Family(
        "GLM-4.5, GLM-4.6",
        experts.glm4_moe,
        names.DEEPSEEK,
        {
            **_LLAMA,
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
        },
        _DEEPSEEK_ALIASES,
    ),
    "seed_oss": Family(
        "Seed-OSS",
        dense.seed_oss,
        names.LLAMA,
        {
            **_LLAMA,
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
        },
    ),
    "arcee": Family(
        "AFM (Arcee)",
        dense.arcee,
        names.ARCEE,
        {
            **_LLAMA,
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
    "ernie4_5": Family(
        "ERNIE 4.5",
        dense.ernie,
        names.LLAMA,
        {
            **_LLAMA,
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "helium": Family(
        "Helium",
        dense.helium,
        names.LLAMA,
        {
            **_LLAMA,
            "vocab_size": 48000,
            "hidden_size": 2560,
            "intermediate_size": 7040,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
    ),
    "hunyuan_v1_dense": Family(
        "Hunyuan (dense)",
        dense.hunyuan,
        names.HUNYUAN,
        {**_LLAMA, "vocab_size": 290943, "rms_norm_eps": 1e-5},
    ),
    "exaone4": Family(
        "EXAONE 4",
        dense.exaone4,
        names.OLMO2,
        {
            **_LLAMA,
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "nemotron": Family(
        "Nemotron 4, Minitron",
        classic.nemotron,
        names.NEMOTRON,
        {
            **_LLAMA,
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt2": Family("GPT-2", classic.gpt2, names.GPT2, _GPT2, _GPT_ALIASES),
    "gpt_bigcode": Family(
        "StarCoder, SantaCoder",
        classic.gpt_bigcode,
        names.GPT_BIGCODE,
        {**_GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
        _GPT_ALIASES,
    ),
    "gpt_neo": Family(
        "GPT-Neo, TinyStories",
        classic.gpt_neo,
        names.GPT_NEO,
        {
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "hidden_size": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "attention_types": [[["global", "local"], 12]],
            "window_size": 256,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ),
    "gptj": Family(
        "GPT-J",
        classic.gptj,
        names.GPTJ,
        {
            **_GPT2,
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
        _GPT_ALIASES,
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        classic.gpt_neox,
        names.GPT_NEOX,
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    ),
    "opt": Family(
        "OPT",
        classic.opt,
        names.OPT,
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon": Family(
        "Falcon",
        classic.falcon,
        names.FALCON,
        {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "max_position_embeddings": 2048,
            "activation": "gelu",
            "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size"},
    ),
    "bloom": Family(
        "BLOOM",
        classic.bloom,
        names.BLOOM,
        {
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    ),
    "mpt": Family(
        "MPT",
        classic.mpt,
        names.MPT,
        {
            "d_model": 2048,
            "n_heads": 16,
            "n_layers": 24,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "vocab_size": 50368,
            "layer_norm_epsilon": 1e-5,
            "no_bias": True,
            "tie_word_embeddings": True,
        },
        {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"},
    ),
    "mixtral": Family(
        "Mixtral",
        experts.mixtral,
        names.MIXTRAL,
        {
            **_MISTRAL,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
        },
        {"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": Family(
        "Qwen1.5-MoE, Qwen2-MoE",
        experts.qwen2_moe,
        names.QWEN_MOE,
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        experts.qwen3_moe,
        names.QWEN_MOE,
        {
            **_QWEN_MOE,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        {"num_local_experts": "num_experts"},
    ),
    "gpt_oss": Family(
        "GPT-OSS",
        experts.gpt_oss,
        names.GPT_OSS,
        {
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"num_experts": "num_local_experts"},
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        experts.deepseek_v2,
        names.DEEPSEEK,
        {
            **_LLAMA,
            "vocab_size": 102400,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "moe_intermediate_size": 1407,
        },
        _DEEPSEEK_ALIASES,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, DeepSeek-R1",
        experts.deepseek_v3,
        names.DEEPSEEK,
        {
            **_LLAMA,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rope_interleave": True,
        },
        _DEEPSEEK_ALIASES,
    ),
}

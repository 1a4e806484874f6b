# SPDX-License-Identifier: Apache-2.0
"""How the families call their weights: native name -> module of the checkpoint (see mapping.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anyaccel.inference.spec.decoder import Moe
from anyaccel.inference.spec.mapping import At, Base, Names, Part, Rule, plus_one, stacked, transposed

_TRANSFORMER = (Base("transformer."), Base(""))

LLAMA = Names(
    {
        "embed": "embed_tokens",
        "head": "/lm_head",
        "final_norm": "norm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    }
)
ARCEE = LLAMA.but(mlp__gate_up="mlp.up_proj")
NEMOTRON = ARCEE.but(
    attn_norm=plus_one("input_layernorm"), mlp_norm=plus_one("post_attention_layernorm"), final_norm=plus_one("norm")
)
HUNYUAN = LLAMA.but(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
PHI3 = LLAMA.but(qkv="self_attn.qkv_proj", mlp__gate_up="mlp.gate_up_proj")
GLM = LLAMA.but(mlp__gate_up="mlp.gate_up_proj")
GLM4 = GLM.but(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
GEMMA = LLAMA.but(
    final_norm=plus_one("norm"), attn_norm=plus_one("input_layernorm"), mlp_norm=plus_one("post_attention_layernorm")
)
GEMMA2 = GEMMA.but(
    attn_post_norm=plus_one("post_attention_layernorm"),
    mlp_norm=plus_one("pre_feedforward_layernorm"),
    mlp_post_norm=plus_one("post_feedforward_layernorm"),
    q_norm=plus_one("self_attn.q_norm"),
    k_norm=plus_one("self_attn.k_norm"),
)
OLMO2 = LLAMA.but(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
STARCODER2 = LLAMA.but(mlp__gate_up="mlp.c_fc", mlp__down="mlp.c_proj")


def _each_head(module: str, queries: bool) -> Rule:
    """A norm of its own for each head."""

    def parts(at: At) -> Sequence[Part]:
        heads = at.attention.heads if queries else at.attention.kv_heads
        return [Part(at.name(f"{module}.{head}")) for head in range(heads)]

    return parts


STABLELM = LLAMA.but(
    q_norm=_each_head("self_attn.q_layernorm.norms", queries=True),
    k_norm=_each_head("self_attn.k_layernorm.norms", queries=False),
)


PHI = LLAMA.but(
    final_norm="final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.dense",
    mlp__gate_up="mlp.fc1",
    mlp__down="mlp.fc2",
)


def _by_head(module: str) -> Callable[[At], Sequence[Part]]:
    """Fused queries, keys and values [KV heads, queries of the group + key + value, head_dim]."""

    def parts(at: At) -> Sequence[Part]:
        a = at.attention
        group = a.heads // a.kv_heads

        def pick(kinds: range) -> tuple[int, ...]:
            return tuple(
                ((head * (group + 2)) + kind) * a.head_dim + i
                for head in range(a.kv_heads)
                for kind in kinds
                for i in range(a.head_dim)
            )

        name = at.name(module)
        return [
            Part(name, order=pick(kinds))
            for kinds in (range(group), range(group, group + 1), range(group + 1, group + 2))
        ]

    return parts


GPT2 = Names(
    {
        "embed": "wte",
        "head": "/lm_head",
        "positions": "wpe",
        "final_norm": "ln_f",
        "attn_norm": "ln_1",
        "mlp_norm": "ln_2",
        "qkv": transposed("attn.c_attn"),
        "o": transposed("attn.c_proj"),
        "mlp.gate_up": transposed("mlp.c_fc"),
        "mlp.down": transposed("mlp.c_proj"),
    },
    layer="h.{layer}.",
    bases=_TRANSFORMER,
)


# With one KV head, "by head" is queries, key, value.
GPT_BIGCODE = GPT2.but(qkv=_by_head("attn.c_attn"), o="attn.c_proj", mlp__gate_up="mlp.c_fc", mlp__down="mlp.c_proj")
GPT_NEO = GPT2.but(
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o="attn.attention.out_proj",
    mlp__gate_up="mlp.c_fc",
    mlp__down="mlp.c_proj",
)
GPTJ = GPT2.but(
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    mlp__gate_up="mlp.fc_in",
    mlp__down="mlp.fc_out",
)
GPT_NEOX = Names(
    {
        "embed": "embed_in",
        "head": ["/embed_out", "/lm_head"],
        "final_norm": "final_layer_norm",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": _by_head("attention.query_key_value"),
        "o": "attention.dense",
        "mlp.gate_up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    bases=(Base("gpt_neox."), Base("")),
)
OPT = Names(
    {
        "embed": "embed_tokens",
        "head": "/lm_head",
        "positions": "embed_positions",
        "final_norm": "final_layer_norm",
        "attn_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.out_proj",
        "mlp.gate_up": "fc1",
        "mlp.down": "fc2",
    },
    bases=(Base("model.decoder."), Base("decoder.")),
)
BLOOM = Names(
    {
        "embed": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "head": "/lm_head",
        "final_norm": "ln_f",
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "qkv": _by_head("self_attention.query_key_value"),
        "o": "self_attention.dense",
        "mlp.gate_up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    layer="h.{layer}.",
    bases=_TRANSFORMER,
)
MPT = Names(
    {
        "embed": "wte",
        "head": "/lm_head",
        "final_norm": "norm_f",
        "attn_norm": "norm_1",
        "mlp_norm": "norm_2",
        "qkv": "attn.Wqkv",
        "o": "attn.out_proj",
        "mlp.gate_up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    layer="blocks.{layer}.",
    bases=_TRANSFORMER,
)


def _falcon_norm(shared: str, own: str) -> Rule:
    """Two norms side by side have names of their own."""

    def parts(at: At) -> Sequence[Part]:
        layer = at.of_layer
        return [Part(at.name(own if layer.parallel and layer.mlp_norm is not None else shared))]

    return parts


FALCON = BLOOM.but(
    attn_norm=_falcon_norm("input_layernorm", "ln_attn"), mlp_norm=_falcon_norm("post_attention_layernorm", "ln_mlp")
)

# Mixtures of experts: checkpoints have a tensor for each expert's matrix; transformers 5's modules stack them.
_GATE_UP = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
QWEN_MOE = LLAMA.but(
    router="mlp.gate",
    experts__gate_up=[_GATE_UP, stacked("=mlp.experts.gate_up_proj")],
    experts__down=["mlp.experts.{expert}.down_proj", stacked("=mlp.experts.down_proj")],
    shared__gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared__down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
MIXTRAL = LLAMA.but(
    router=["block_sparse_moe.gate", "mlp.gate"],
    experts__gate_up=[
        ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        stacked("=mlp.experts.gate_up_proj"),
    ],
    experts__down=["block_sparse_moe.experts.{expert}.w2", stacked("=mlp.experts.down_proj")],
)
GRANITE_MOE = LLAMA.but(
    router=["block_sparse_moe.router.layer", "block_sparse_moe.router"],
    experts__gate_up=[
        stacked("block_sparse_moe.input_linear"),
        stacked("=block_sparse_moe.experts.gate_up_proj"),
    ],
    experts__down=[stacked("block_sparse_moe.output_linear"), stacked("=block_sparse_moe.experts.down_proj")],
)
DEEPSEEK = QWEN_MOE.but(
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b=["self_attn.q_b_proj", "self_attn.q_proj"],
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
    router__choice_bias="=mlp.gate.e_score_correction_bias",
    shared__gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared__down="mlp.shared_experts.down_proj",
)


def _gpt_oss_gate_up(at: At) -> Sequence[Part]:
    """[experts, hidden, 2 * features], in which gates and ups alternate."""
    mlp = at.of_layer.mlp
    features = mlp.expert.features if isinstance(mlp, Moe) else 0
    bias = at.suffix == "bias"
    name = at.name("=mlp.experts.gate_up_proj" + ("_bias" if bias else ""))
    return [
        Part(name, order=tuple(range(first, 2 * features, 2)), transposed=not bias, index=at.expert) for first in (0, 1)
    ]


def _gpt_oss_down(at: At) -> Sequence[Part]:
    bias = at.suffix == "bias"
    name = at.name("=mlp.experts.down_proj" + ("_bias" if bias else ""))
    return [Part(name, transposed=not bias, index=at.expert)]


GPT_OSS = LLAMA.but(
    router="mlp.router",
    sinks="=self_attn.sinks",
    experts__gate_up=_gpt_oss_gate_up,
    experts__down=_gpt_oss_down,
)

# SPDX-License-Identifier: Apache-2.0
"""Gemma 1 to 4, VaultGemma."""

from __future__ import annotations

import dataclasses
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    MOST_EXPERTS,
    QKV,
    attention,
    decoder,
    gated,
    pre_norm,
    rms,
    windows,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import (
    GGUF_FOUR_NORMS,
    GGUF_LLAMA,
    GGUF_MODULES,
    GGUF_QK_NORM,
    Architecture,
    Metadata,
    sliding_layers,
)
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec, InputGate, Layer, LayerInputs, Mlp, Moe, Norm, QkNorm, Rope
from anyaccel.inference.spec.mapping import At, Part, Unsupported, plus_one, stacked
from anyaccel.validation import Fields, check_integer, check_mapping, short_repr


def _gemma(
    config: Config, layers: list[Layer], ropes: tuple[Rope, ...], softcap: float = 0.0, either_way: bool = False
) -> DecoderSpec:
    if not either_way:
        config.refuse("use_bidirectional_attention")  # an encoder
    scale = config.hidden**0.5
    return decoder(config, layers, rms(config), ropes, embedding_scale=scale, logits_softcap=softcap)


def gemma(config: Config) -> DecoderSpec:
    mlp = gated(config)
    if mlp.activation == "gelu":  # the first configs say "gelu" and mean its approximation
        mlp = dataclasses.replace(mlp, activation="gelu_tanh")
    layer = pre_norm(rms(config), attention(config, bias=config.get_bool("attention_bias")), mlp)
    return _gemma(config, [layer] * config.layers, (rope(config, config.head_dim),))


def _gemma_layer(config: Config, post_norms: bool = True, **more: Any) -> Layer:
    norm = rms(config)
    post = norm if post_norms else None
    scores = attention(
        config,
        bias=config.get_bool("attention_bias"),
        scale=config.number("query_pre_attn_scalar", above=0.0) ** -0.5,
        **more,
    )
    mlp = gated(config, act="hidden_activation")
    return pre_norm(norm, scores, mlp, attn_post_norm=post, mlp_post_norm=post)


def gemma2(config: Config, post_norms: bool = True) -> DecoderSpec:
    softcap = config.number("attn_logit_softcapping", 0.0, minimum=0.0)
    each_window = windows(config, config.layer_types(lambda index: index % 2 == 0))
    layers = [_gemma_layer(config, post_norms, window=window, softcap=softcap) for window in each_window]
    ropes = (rope(config, config.head_dim),)
    return _gemma(config, layers, ropes, config.number("final_logit_softcapping", 0.0, minimum=0.0))


def vaultgemma(config: Config) -> DecoderSpec:
    return gemma2(config, post_norms=False)


def gemma3(config: Config, either_way: bool = False) -> DecoderSpec:
    """Two kinds of rotary positions; transformers does not use `attn_logit_softcapping` here.

    Args:
        either_way: the tokens may see both ways, which is the caller's to add.
    """
    pattern = config.integer("sliding_window_pattern")
    each_window = windows(config, config.layer_types(lambda index: (index + 1) % pattern != 0))
    qk_norm = QkNorm(rms(config))
    layers = [_gemma_layer(config, window=window, rope=int(window > 0), qk_norm=qk_norm) for window in each_window]
    full = rope_parameters_of(config, "full_attention", config.number("rope_theta", 1e6), scaled=True)
    sliding = rope_parameters_of(config, "sliding_attention", config.number("rope_local_base_freq", 1e4), False)
    ropes = tuple(rope(config, config.head_dim, parameters=each) for each in (full, sliding))
    return _gemma(config, layers, ropes, config.number("final_logit_softcapping", 0.0, minimum=0.0), either_way)


def sharing(config: Config, kinds: list[str]) -> list[int]:
    """Of each layer the one whose keys and values it sees, the last of its kind before those that share; or -1."""
    shared = config.integer_or("num_kv_shared_layers", 0, minimum=0)
    first = config.layers - shared
    if shared and (first < 1 or not set(kinds[first:]) <= set(kinds[:first])):
        raise ModelError(f"config: num_kv_shared_layers={shared} of layers of which none before them is of their kind")
    before = kinds[: max(first, 0)]
    return [-1 if at < first else len(before) - 1 - before[::-1].index(kind) for at, kind in enumerate(kinds)]


def _own_sizes(config: Config, index: int, kind: str) -> tuple[int, int]:
    """Values of a head, and key/value heads, of one layer."""
    if config.has("per_layer_config"):  # where all layers are alike, it is empty
        own: Any = {}
        for key, value in config.mapping("per_layer_config").known().items():  # "05" of thirty layers
            if not str(key).isdecimal():
                raise ModelError(f"config: per_layer_config: {short_repr(key)} is not the number of a layer")
            own = value if int(key) == index else own
        given = Fields(check_mapping(own, "config: per_layer_config"), "config: per_layer_config: ")
        if unknown := sorted(given.known().keys() - {"head_dim", "num_key_value_heads"}):
            raise Unsupported(f"per_layer_config with {', '.join(map(str, unknown))}")
        dim = given.get_int("head_dim", config.head_dim, 1, 1 << 16)
        return dim, given.get_int("num_key_value_heads", config.kv_heads, 1, config.heads)
    if kind != "full_attention":
        return config.head_dim, config.kv_heads
    own_heads = config.get_bool("attention_k_eq_v") and config.has("num_global_key_value_heads")
    kv_heads = config.integer("num_global_key_value_heads", maximum=config.heads) if own_heads else config.kv_heads
    return config.integer("global_head_dim", maximum=1 << 16), kv_heads


def _gemma4_experts(config: Config, norm: Norm) -> Moe:
    """Beside the layer's MLP, with norms of their own before and after."""
    count = config.integer("num_experts", maximum=MOST_EXPERTS)
    return Moe(
        count,
        config.integer("top_k_experts", maximum=count),
        gated(config, features="moe_intermediate_size", act="hidden_activation"),
        router_norm=norm,
        experts_norm=norm,
        logit_scale=config.hidden**-0.5,
        expert_scale=True,
        post_norm=norm,
        shared_post_norm=norm,
    )


def layer_inputs(config: Config, features: int, norm: Norm) -> LayerInputs:
    """What each layer gets of a token beside the residual, as Gemma 3n and 4 have it."""
    return LayerInputs(
        layers=config.layers,
        features=features,
        vocab=config.integer("vocab_size_per_layer_input"),
        embed_scale=features**0.5,
        projection_scale=config.hidden**-0.5,
        scale=2.0**-0.5,
        norm=norm,
    )


def gemma4(config: Config) -> DecoderSpec:
    """Heads of another size where a layer sees everything; later layers see earlier ones' keys and values."""
    if config.text("use_bidirectional_attention", "") == "all":
        raise Unsupported("use_bidirectional_attention='all'")
    kinds = config.layer_types(lambda index: (index + 1) % 6 != 0)
    kinds[-1] = "full_attention"
    sources = sharing(config, kinds)
    norm = rms(config)
    features = config.integer_or("hidden_size_per_layer_input", 0, minimum=0)
    gate = InputGate(Mlp(features, config.activation("hidden_activation"), gated=True), norm) if features else None
    mlp = gated(config, act="hidden_activation")
    experts = _gemma4_experts(config, norm) if config.get_bool("enable_moe_block") else None
    wide = dataclasses.replace(mlp, features=2 * mlp.features) if config.get_bool("use_double_wide_mlp") else mlp
    ropes: dict[tuple[str, int], Rope] = {}
    layers = []
    for index, kind in enumerate(kinds):
        dim, kv_heads = _own_sizes(config, index, kind)
        if config.heads % kv_heads:
            raise ModelError(f"config: {config.heads} attention heads are not a multiple of {kv_heads} key/value heads")
        if (kind, dim) not in ropes:
            parameters = rope_parameters_of(config, kind, 1e6 if kind == "full_attention" else 1e4, scaled=False)
            ropes[kind, dim] = rope(config, dim, parameters=parameters)
        shares = sources[index] >= 0
        of_layer = wide if shares else mlp
        heads = attention(
            config,
            head_dim=dim,
            kv_heads=kv_heads,
            scale=1.0,
            rope=list(ropes).index((kind, dim)),
            window=config.window() if kind == "sliding_attention" else 0,
            bias=config.get_bool("attention_bias"),
            qk_norm=QkNorm(norm),
            value_norm=None if shares else dataclasses.replace(norm, weight=False),
            kv_layer=sources[index],
        )
        layers.append(
            pre_norm(
                norm,
                heads,
                of_layer if experts is None else dataclasses.replace(experts, shared=of_layer),
                attn_post_norm=norm,
                mlp_post_norm=norm,
                input_gate=gate,
                scaled=True,
            )
        )
    inputs = layer_inputs(config, features, norm) if features else None
    return decoder(
        config,
        layers,
        norm,
        tuple(ropes.values()),
        embedding_scale=config.hidden**0.5,
        logits_softcap=config.number("final_logit_softcapping", 0.0, minimum=0.0),
        layer_inputs=inputs,
    )


def _gemma4_qkv(at: At) -> list[Part]:
    modules = QKV if at.attention.kv_layer < 0 else QKV[:1]
    return [Part(at.name(module)) for module in modules]


GEMMA4 = LLAMA.but(
    qkv=[_gemma4_qkv, (QKV[0], QKV[1], QKV[1])],  # values may be the keys before their norm
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    layer_embed="embed_tokens_per_layer",
    layer_projection="per_layer_model_projection",
    layer_projection_norm="per_layer_projection_norm",
    input_gate="per_layer_input_gate",
    input_down="per_layer_projection",
    input_norm="post_per_layer_input_norm",
    layer_scale="=layer_scalar",
    router="router.proj",
    router_norm="=router.scale",
    router__expert_scale="=router.per_expert_scale",
    experts_norm="pre_feedforward_layernorm_2",
    experts__gate_up=stacked("=experts.gate_up_proj"),
    experts__down=stacked("=experts.down_proj"),
    experts_post_norm="post_feedforward_layernorm_2",
    shared__gate_up=("mlp.gate_proj", "mlp.up_proj"),
    shared__down="mlp.down_proj",
    shared_post_norm="post_feedforward_layernorm_1",
)


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


GEMMA_DEFAULTS = {
    **LLAMA_DEFAULTS,
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


GEMMA2_DEFAULTS = {
    **GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


GEMMA3_DEFAULTS = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
}


def gguf_gemma(values: Metadata, config: dict[str, Any]) -> None:
    config["head_dim"] = values.head_dim
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"


def gguf_gemma2(values: Metadata, config: dict[str, Any]) -> None:
    # Not in the file: llama.cpp knows the 27 B model by its number of layers, too.
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 30.0)
    config["layer_types"] = sliding_layers(values, 2)


def gguf_gemma3(values: Metadata, config: dict[str, Any]) -> None:
    large = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = config["hidden_size"] // values.heads if large else values.head_dim
    config["sliding_window"] = values.count("attention.sliding_window", 4096)
    config["attn_logit_softcapping"] = config["final_logit_softcapping"] = None
    config["layer_types"] = sliding_layers(values, 6)
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10000.0, above=0.0)}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


FAMILIES = {
    "gemma": Family("Gemma 1", gemma, GEMMA, GEMMA_DEFAULTS),
    "gemma2": Family(
        "Gemma 2",
        gemma2,
        GEMMA2,
        {**GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "vaultgemma": Family(
        "VaultGemma",
        vaultgemma,
        GEMMA.but(mlp_norm=plus_one("pre_feedforward_layernorm")),
        {**GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family("Gemma 3 (text)", gemma3, GEMMA2, GEMMA3_DEFAULTS),
    "gemma3": Family("Gemma 3 (text part)", gemma3, GEMMA2, GEMMA3_DEFAULTS, text="text_config"),
}
GEMMA4_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "global_head_dim": 512,
    "per_layer_config": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}


GEMMA4_UNIFIED_DEFAULTS = {
    **GEMMA4_DEFAULTS,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "use_bidirectional_attention": "vision",
}


def gguf_gemma4(values: Metadata, config: dict[str, Any]) -> None:
    """Layers that see everything have other heads; those that share keys and values may have a wider MLP."""
    kinds = config["layer_types"] = sliding_layers(values, 6)
    count = len(kinds)

    def each(name: str) -> list[int]:
        given = values.items(name) if values.is_list(name) else [values.count(name, minimum=1)] * count
        if len(given) < count:
            raise ModelError(f"{values.where}{name} is of {len(given)} layers, not of {count}")
        return [check_integer(value, values.where + name, 1, 1 << 24) for value in given[:count]]

    heads, features = each("attention.head_count_kv"), each("feed_forward_length")
    sliding = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    config["head_dim"] = values.count("attention.key_length_swa", minimum=1, maximum=1 << 16)
    config["num_key_value_heads"] = heads[sliding]
    config["per_layer_config"] = {
        str(index): {"head_dim": values.head_dim, "num_key_value_heads": heads[index]}
        for index, kind in enumerate(kinds)
        if kind == "full_attention"
    }
    shared = config["num_kv_shared_layers"] = values.count("attention.shared_kv_layers", 0)
    config["intermediate_size"] = features[0]
    config["use_double_wide_mlp"] = features[-1] == 2 * features[0]
    wanted = [features[0] * (2 if config["use_double_wide_mlp"] and at >= count - shared else 1) for at in range(count)]
    if features != wanted:
        raise Unsupported(f"layers of different sizes ({values.where}feed_forward_length)")
    config["sliding_window"] = values.count("attention.sliding_window", minimum=1)
    config["final_logit_softcapping"] = values.number("final_logit_softcapping", 0.0)
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["attention_bias"] = values.has_tensor("blk.0.attn_q.bias")
    if values.has_tensor("blk.0.ffn_gate_inp.weight"):
        config["enable_moe_block"] = True
        config["num_experts"] = values.features("expert_count")
        config["top_k_experts"] = values.features("expert_used_count")
        config["moe_intermediate_size"] = values.features("expert_feed_forward_length")
    config["hidden_size_per_layer_input"] = values.count("embedding_length_per_layer_input", 0)
    if values.has_tensor("per_layer_token_embd.weight"):
        config["vocab_size_per_layer_input"] = values.shape("per_layer_token_embd.weight")[0]
    # Where a layer sees everything, the first pairs of a head turn; the others have a divisor that stops them.
    name = "rope_freqs.weight"
    values.used.add(name)
    divisors = values.source.file_of(name).floats(name, (values.head_dim // 2,))
    turned = sum(divisor == 1.0 for divisor in divisors)
    if not turned or any(divisor < 1e20 for divisor in divisors[turned:]):
        raise Unsupported(f"divisors of rotary positions ({values.path}: tensor {name!r})")
    config["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": turned / len(divisors),
            "rope_theta": config.pop("rope_theta"),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": values.number("rope.freq_base_swa", 1e4, above=0.0),
        },
    }


FAMILIES |= {
    "gemma4_text": Family("Gemma 4 (text)", gemma4, GEMMA4, GEMMA4_DEFAULTS),
    "gemma4": Family("Gemma 4 (text part)", gemma4, GEMMA4, GEMMA4_DEFAULTS, text="text_config"),
    "gemma4_unified_text": Family("Gemma 4 12B (text)", gemma4, GEMMA4, GEMMA4_UNIFIED_DEFAULTS),
    "gemma4_unified": Family("Gemma 4 12B (text part)", gemma4, GEMMA4, GEMMA4_UNIFIED_DEFAULTS, text="text_config"),
}
ARCHITECTURES = {
    "gemma": Architecture("gemma", GGUF_MODULES, GGUF_LLAMA, norms_less_one=True, extra=(gguf_gemma,)),
    "gemma2": Architecture(
        "gemma2", GGUF_MODULES, {**GGUF_LLAMA, **GGUF_FOUR_NORMS}, norms_less_one=True, extra=(gguf_gemma, gguf_gemma2)
    ),
    "gemma3": Architecture(
        "gemma3_text",
        GGUF_MODULES,
        {**GGUF_LLAMA, **GGUF_FOUR_NORMS, **GGUF_QK_NORM},
        norms_less_one=True,
        extra=(gguf_gemma, gguf_gemma3),
        others=("gemma3",),
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **GGUF_MODULES,
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
        },
        {
            **GGUF_LLAMA,
            **GGUF_FOUR_NORMS,
            **GGUF_QK_NORM,
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "=layer_scalar": "layer_output_scale.weight",
            "router.proj": "ffn_gate_inp",
            "=router.scale": "ffn_gate_inp.scale",
            "=router.per_expert_scale": "ffn_down_exps.scale",
            "=experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "=experts.down_proj": "ffn_down_exps.weight",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
        },
        by_layer=True,
        extra=(gguf_gemma4,),
        others=("gemma4", "gemma4_unified_text", "gemma4_unified"),
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and what was made after it: StarCoder 1, GPT-Neo, GPT-J, CodeGen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    TRANSFORMER,
    attention,
    by_head,
    decoder,
    layer_norm,
    own_head_dim,
    plain,
    pre_norm,
)
from anyaccel.inference.families.family import Family
from anyaccel.inference.families.gguf import Architecture, Metadata
from anyaccel.inference.families.model_config import MOST_LAYERS, Config
from anyaccel.inference.families.rope import rope
from anyaccel.inference.spec.decoder import DecoderSpec, Layer
from anyaccel.inference.spec.mapping import At, Names, Part, transposed
from anyaccel.validation import check_integer, check_list, check_text, short_repr


def gpt2(config: Config) -> DecoderSpec:
    config.refuse("add_cross_attention")
    norm = layer_norm(config, "layer_norm_epsilon")
    dim = own_head_dim(config)
    mlp = plain(config, config.size("n_inner", 4 * config.hidden), "activation_function")
    layers = []
    for index in range(config.layers):
        scale = dim**-0.5 if config.get_bool("scale_attn_weights") else 1.0
        if config.get_bool("scale_attn_by_inverse_layer_idx"):
            scale /= index + 1
        heads = attention(config, rope=-1, kv_heads=config.heads, head_dim=dim, scale=scale, bias=True)
        layers.append(pre_norm(norm, heads, mlp))
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def _neo_kinds(config: Config) -> list[str]:
    """Which layers have a window: a list, or groups ([["global", "local"], 12])."""
    if config.has("attention_layers"):
        given = config.items("attention_layers")
        return [check_text(each, "config: attention_layers", ("global", "local")) for each in given]
    kinds: list[str] = []
    what = "config: attention_types"
    for group in config.items("attention_types"):
        given, times = check_list(group, what, 2)
        names = [check_text(each, what, ("global", "local")) for each in check_list(given, what)]
        kinds += names * check_integer(times, what, 1, MOST_LAYERS)
        if len(kinds) > MOST_LAYERS * 2:
            raise ModelError(f"{what}={short_repr(config.items('attention_types'))}: more than {MOST_LAYERS} layers")
    return kinds


def gpt_neo(config: Config) -> DecoderSpec:
    """GPT-2 without a scale of the scores; every other layer has a window."""
    kinds = _neo_kinds(config)
    if len(kinds) < config.layers:
        raise ModelError(f"config: attention_types of {len(kinds)} layers for {config.layers} layers")
    norm = layer_norm(config, "layer_norm_epsilon")
    mlp = plain(config, config.size("intermediate_size", 4 * config.hidden), "activation_function")
    layers = []
    for kind in kinds[: config.layers]:
        window = config.integer("window_size") if kind == "local" else 0
        heads = attention(
            config,
            rope=-1,
            kv_heads=config.heads,
            head_dim=own_head_dim(config),
            scale=1.0,
            window=window,
            out_bias=True,
        )
        layers.append(pre_norm(norm, heads, mlp))
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def gpt_bigcode(config: Config) -> DecoderSpec:
    config.refuse("add_cross_attention")
    norm = layer_norm(config, "layer_norm_epsilon")
    dim = own_head_dim(config)
    heads = attention(
        config,
        rope=-1,
        kv_heads=1 if config.get_bool("multi_query") else config.heads,
        head_dim=dim,
        scale=dim**-0.5 if config.get_bool("scale_attn_weights") else 1.0,
        bias=True,
    )
    mlp = plain(config, config.size("n_inner", 4 * config.hidden), "activation_function")
    layers = [pre_norm(norm, heads, mlp)] * config.layers
    return decoder(config, layers, norm, positions=config.integer("max_position_embeddings"))


def gptj(config: Config) -> DecoderSpec:
    dim = own_head_dim(config)
    rotated = rope(
        config,
        config.size("rotary_dim"),
        interleaved=True,
        parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )
    norm = layer_norm(config, "layer_norm_epsilon")
    layer = Layer(
        attention(config, kv_heads=config.heads, head_dim=dim),
        plain(config, config.size("n_inner", 4 * config.hidden), "activation_function"),
        attn_norm=norm,
        parallel=True,
    )
    return decoder(config, [layer] * config.layers, norm, (rotated,), head_bias=True)


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
    bases=TRANSFORMER,
)


# With one KV head, "by head" is queries, key, value.
GPT_BIGCODE = GPT2.but(qkv=by_head("attn.c_attn"), o="attn.c_proj", mlp__gate_up="mlp.c_fc", mlp__down="mlp.c_proj")


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


_BLOCKS = 4  # of CodeGen's projection, whatever the number of ranks


def codegen(config: Config) -> DecoderSpec:
    if config.heads % _BLOCKS:
        raise ModelError(f"config: {config.heads} heads are not a multiple of the {_BLOCKS} blocks of CodeGen")
    return gptj(config)


def _codegen_qkv(at: At) -> Sequence[Part]:
    """Blocks of queries, values and keys, in this order, each of a part of the heads."""
    rows = at.attention.heads * at.attention.head_dim // _BLOCKS
    name = at.name("attn.qkv_proj")
    return [Part(name, (3 * block + kind) * rows, rows) for kind in (0, 2, 1) for block in range(_BLOCKS)]


CODEGEN = GPTJ.but(qkv=_codegen_qkv)


GPT2_DEFAULTS = {
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


GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def gguf_gpt2(values: Metadata, config: dict[str, Any]) -> None:
    config["activation_function"] = "gelu_new"
    for name in ("rope_theta", "hidden_act", "head_dim", "num_key_value_heads"):
        config.pop(name, None)
    if config.pop("rope_scaling", None):
        raise ModelError(f"{values.path}: a scaling of rotary positions, which a 'gguf_gpt2' model has not")


GGUF_GPT2_LAYER = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


FAMILIES = {
    "gpt2": Family("GPT-2", gpt2, GPT2, GPT2_DEFAULTS, GPT_ALIASES),
    "gpt_bigcode": Family(
        "StarCoder, SantaCoder",
        gpt_bigcode,
        GPT_BIGCODE,
        {**GPT2_DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
        GPT_ALIASES,
    ),
    "gpt_neo": Family(
        "GPT-Neo, TinyStories",
        gpt_neo,
        GPT_NEO,
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
        gptj,
        GPTJ,
        {
            **GPT2_DEFAULTS,
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
        GPT_ALIASES,
    ),
    "codegen": Family(
        "CodeGen",
        codegen,
        CODEGEN,
        {
            **GPT2_DEFAULTS,
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
        GPT_ALIASES,
    ),
}


def _gguf_starcoder(values: Metadata, config: dict[str, Any]) -> None:
    # Files of both kinds say that they have one head.
    config["multi_query"] = values.shape("blk.0.attn_qkv.weight")[0] != 3 * values.hidden
    gguf_gpt2(values, config)
    config["activation_function"] = "gelu_pytorch_tanh"


_GGUF_GPT2 = Architecture(
    "gpt2",
    {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    },
    GGUF_GPT2_LAYER,
    prefix="transformer.h.{layer}.",
    conv1d=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    norm_eps="layer_norm_epsilon",
    extra=(gguf_gpt2,),
    renamed={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    },
)
ARCHITECTURES = {
    "gpt2": _GGUF_GPT2,
    "starcoder": dataclasses.replace(
        _GGUF_GPT2, model_type="gpt_bigcode", conv1d=frozenset(), extra=(_gguf_starcoder,)
    ),
}

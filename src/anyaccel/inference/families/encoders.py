# SPDX-License-Identifier: Apache-2.0
"""Encoders: BERT and what was made after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.families.common import (
    LLAMA,
    LLAMA_DEFAULTS,
    QKV,
    attention,
    decoder,
    gated,
    layer_norm,
    llama_like,
    own_head_dim,
    plain,
)
from anyaccel.inference.families.family import Dense, EncoderFamily
from anyaccel.inference.families.gemma import GEMMA2, GEMMA3_DEFAULTS, gemma3
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.rope import rope, rope_parameters_of
from anyaccel.inference.spec.decoder import DecoderSpec, Distances, Layer, Mlp, Norm, RelativeBias, Rope
from anyaccel.inference.spec.mapping import At, Base, Names, Part, Rule, Unsupported

_RELATIVE_DISTANCE = 128  # transformers' code has this number, no config does


def _refuse_other_positions(config: Config) -> None:
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise Unsupported(f"position_embedding_type {kind!r}")
    config.refuse("is_decoder", "add_cross_attention")


def _post_norm(
    config: Config,
    mlp: Mlp,
    norm: Norm,
    ropes: tuple[Rope, ...] = (),
    *,
    bias: bool = True,
    norm_of_embeddings: bool = True,
    positions: int = 0,
    offset: int = 0,
    **more: Any,
) -> DecoderSpec:
    """h = norm(h + attention(h)); h = norm(h + mlp(h)): the norm behind a layer is the next one's, or the last."""
    dim = own_head_dim(config)
    heads = attention(
        config, rope=0 if ropes else -1, kv_heads=config.heads, head_dim=dim, bias=bias, bidirectional=True
    )
    first = Layer(heads, mlp, mlp_norm=norm, residual_from_norm=True)
    layers = [first] + [replace(first, attn_norm=norm)] * (config.layers - 1)
    if positions:
        more["max_tokens"] = positions - offset
        if more["max_tokens"] < 1:
            raise ModelError(f"config: max_position_embeddings={positions}: positions begin at {offset}")
    return decoder(
        config,
        layers,
        norm,
        ropes,
        embedding_norm=norm if norm_of_embeddings else None,
        positions=positions,
        position_offset=offset,
        tied=True,
        **more,
    )


def bert(config: Config) -> DecoderSpec:
    _refuse_other_positions(config)
    return _post_norm(
        config,
        plain(config, config.size("intermediate_size"), "hidden_act"),
        layer_norm(config, "layer_norm_eps"),
        positions=config.size("max_position_embeddings"),
        token_types=config.size("type_vocab_size"),
    )


def roberta(config: Config) -> DecoderSpec:
    """BERT whose positions begin behind the padding token's number."""
    _refuse_other_positions(config)
    return _post_norm(
        config,
        plain(config, config.size("intermediate_size"), "hidden_act"),
        layer_norm(config, "layer_norm_eps"),
        positions=config.size("max_position_embeddings"),
        offset=config.integer("pad_token_id", minimum=0) + 1,
        token_types=config.size("type_vocab_size"),
    )


def ernie(config: Config) -> DecoderSpec:
    config.refuse("use_task_id")
    return bert(config)


def electra(config: Config) -> DecoderSpec:
    if (width := config.integer("embedding_size")) != config.hidden:
        raise Unsupported(f"embedding_size={width} other than hidden_size={config.hidden}")
    return bert(config)


def distilbert(config: Config) -> DecoderSpec:
    return _post_norm(
        config,
        plain(config, config.size("hidden_dim"), "activation"),
        Norm("layer", 1e-12, bias=True),
        positions=config.size("max_position_embeddings"),
    )


def mpnet(config: Config) -> DecoderSpec:
    return _post_norm(
        config,
        plain(config, config.size("intermediate_size"), "hidden_act"),
        layer_norm(config, "layer_norm_eps"),
        positions=config.size("max_position_embeddings"),
        offset=2,
        relative_bias=RelativeBias(
            config.integer("relative_attention_num_buckets", minimum=4), _RELATIVE_DISTANCE, config.heads
        ),
    )


def deberta(config: Config) -> DecoderSpec:
    """DeBERTa 2 and 3: BERT whose scores know how far apart two tokens are."""
    if config.integer("conv_kernel_size", minimum=0):
        raise Unsupported("convolution behind the first layer (conv_kernel_size)")
    if config.integer_or("embedding_size", config.hidden) != config.hidden:
        raise Unsupported(f"embedding_size other than hidden_size={config.hidden}")
    if config.integer_or("attention_head_size", config.hidden // config.heads) * config.heads != config.hidden:
        raise Unsupported(
            f"attention_head_size other than hidden_size / num_attention_heads={config.hidden // config.heads}"
        )
    listed = config.is_list("pos_att_type")
    given = config.items("pos_att_type") if listed else config.text("pos_att_type", "").split("|")
    kinds = {str(kind).strip().lower() for kind in given}
    positions = config.integer("max_position_embeddings")
    norm = layer_norm(config, "layer_norm_eps")
    distances = None
    if config.get_bool("relative_attention") and kinds & {"c2p", "p2c"}:
        if not config.get_bool("share_att_key"):
            raise Unsupported("share_att_key=False")
        buckets, longest = (config.integer(name, minimum=-1) for name in ("position_buckets", "max_relative_positions"))
        longest = positions if longest < 1 else longest
        span = buckets if buckets > 0 else longest
        if span < 2 or (buckets > 0 and longest < span // 2 + 2):
            raise Unsupported(f"position_buckets={buckets} with max_relative_positions={longest}")
        distances = Distances(
            span=span,
            max_distance=longest,
            logarithmic=buckets > 0,
            keys="c2p" in kinds,
            queries="p2c" in kinds,
            norm=norm if "layer_norm" in config.text("norm_rel_ebd").lower().split("|") else None,
        )
    absolute = config.get_bool("position_biased_input")
    mlp = plain(config, config.size("intermediate_size"), "hidden_act")
    more: dict[str, Any] = {"positions": positions} if absolute else {"max_tokens": 0}
    spec = _post_norm(
        config, mlp, norm, token_types=config.integer("type_vocab_size", minimum=0), distances=distances, **more
    )
    terms = 1 + len(kinds & {"c2p", "p2c"})
    layers = [
        replace(each, attention=replace(each.softmax, scale=(each.softmax.head_dim * terms) ** -0.5))
        for each in spec.layers
    ]
    alike = {layer: layer for layer in layers}
    return replace(spec, layers=tuple(alike[layer] for layer in layers))


def nomic_bert(config: Config) -> DecoderSpec:
    return _post_norm(
        config,
        gated(config),
        layer_norm(config, "layer_norm_eps"),
        (rope(config, own_head_dim(config)),),
        bias=False,
        token_types=config.size("type_vocab_size"),
    )


def modernbert(config: Config) -> DecoderSpec:
    norm = layer_norm(config, "norm_eps", config.get_bool("norm_bias"))
    every = config.integer_or("global_attn_every_n_layers", 3)
    dim = own_head_dim(config)
    thetas = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
    ropes = tuple(
        rope(config, dim, parameters=rope_parameters_of(config, kind, config.number(*theta), scaled=True))
        for kind, theta in thetas.items()
    )
    layers = []
    for index, kind in enumerate(config.layer_types(lambda index: index % every != 0)):
        local = kind == "sliding_attention"
        heads = attention(
            config,
            rope=int(local),
            kv_heads=config.heads,
            head_dim=dim,
            bias=config.get_bool("attention_bias"),
            window=config.integer("local_attention") // 2 + 1 if local else 0,
            bidirectional=True,
        )
        mlp = gated(config, config.get_bool("mlp_bias"), act="hidden_activation")
        layers.append(Layer(heads, mlp, attn_norm=norm if index else None, mlp_norm=norm))
    return decoder(config, layers, norm, ropes, embedding_norm=norm, tied=True)


def eurobert(config: Config) -> DecoderSpec:
    """Llama whose tokens see both ways."""
    mlp = gated(config, config.get_bool("mlp_bias"))
    return replace(llama_like(config, bias=config.get_bool("attention_bias"), mlp=mlp, bidirectional=True), tied=True)


def embedding_gemma(config: Config) -> DecoderSpec:
    """Gemma 3 whose tokens see both ways, through half of the window each."""
    layers = []
    spec = gemma3(config, either_way=True)
    for layer in spec.layers:
        window = layer.softmax.window // 2 + 1 if layer.softmax.window else 0
        layers.append(replace(layer, attention=replace(layer.softmax, bidirectional=True, window=window)))
    alike = {layer: layer for layer in layers}
    return replace(spec, layers=tuple(alike[layer] for layer in layers), tied=True)


def _place(module: str, suffixes: Mapping[str, str] | None = None) -> Rule:
    """A module by its name within the model, which may have numbers of layers in it."""

    def parts(at: At) -> Sequence[Part]:
        place = at.base.body + module.format(layer=at.layer, before=at.layer - 1, last=len(at.spec.layers) - 1)
        return (Part(f"{place}.{(suffixes or {}).get(at.suffix, at.suffix)}"),)

    return parts


def _placed(*modules: str) -> list[Rule | tuple[Rule, ...]]:
    """A module under one of these names."""
    return [_place(module) for module in modules]


def _norm(module: str) -> list[Rule | tuple[Rule, ...]]:
    """A norm, whose values have TensorFlow's names in BERT's own files."""
    return [_place(module), _place(module, {"weight": "gamma", "bias": "beta"})]


def _post_norm_names(layer: str, attention_norm: str, output_norm: str, rules: Mapping[str, Any], base: str) -> Names:
    """Names whose embeddings are BERT's."""
    return Names(
        {
            "embed": "embeddings.word_embeddings",
            "head": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "embed_norm": _norm("embeddings.LayerNorm"),
            "attn_norm": _norm(layer.replace("layer}", "before}") + output_norm),
            "mlp_norm": _norm(layer + attention_norm),
            "final_norm": _norm(layer.replace("layer}", "last}") + output_norm),
            **rules,
        },
        layer=layer,
        bases=(Base(f"{base}."), Base("")),
    )


def _bert_names(base: str) -> Names:
    rules = {
        "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "o": "attention.output.dense",
        "mlp.gate_up": "intermediate.dense",
        "mlp.down": "output.dense",
    }
    return _post_norm_names("encoder.layer.{layer}.", "attention.output.LayerNorm", "output.LayerNorm", rules, base)


_MPNET = _post_norm_names(
    "encoder.layer.{layer}.",
    "attention.LayerNorm",
    "output.LayerNorm",
    {
        "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "o": "attention.attn.o",
        "mlp.gate_up": "intermediate.dense",
        "mlp.down": "output.dense",
        "relative_bias": "encoder.relative_attention_bias",
    },
    "mpnet",
)
_DEBERTA = _post_norm_names(
    "encoder.layer.{layer}.",
    "attention.output.LayerNorm",
    "output.LayerNorm",
    {
        "qkv": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        "o": "attention.output.dense",
        "mlp.gate_up": "intermediate.dense",
        "mlp.down": "output.dense",
        "distances": "encoder.rel_embeddings",
        "distances_norm": "encoder.LayerNorm",
    },
    "deberta",
)
_DISTILBERT = _post_norm_names(
    "transformer.layer.{layer}.",
    "sa_layer_norm",
    "output_layer_norm",
    {
        "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "o": "attention.out_lin",
        "mlp.gate_up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
    },
    "distilbert",
)
# Files have the names of Nomic's own code, of which transformers makes others.
_NOMIC = Names(
    {
        "embed": "embeddings.word_embeddings",
        "head": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embed_norm": _placed("emb_ln", "embeddings.LayerNorm"),
        "attn_norm": _placed("encoder.layers.{before}.norm2", "layers.{before}.post_mlp_layernorm"),
        "mlp_norm": _placed("encoder.layers.{layer}.norm1", "layers.{layer}.post_attention_layernorm"),
        "final_norm": _placed("encoder.layers.{last}.norm2", "layers.{last}.post_mlp_layernorm"),
        "qkv": [*_placed("encoder.layers.{layer}.attn.Wqkv"), QKV],
        "o": [*_placed("encoder.layers.{layer}.attn.out_proj"), "self_attn.o_proj"],
        "mlp.gate_up": [
            (_place("encoder.layers.{layer}.mlp.fc12"), _place("encoder.layers.{layer}.mlp.fc11")),
            ("mlp.gate_proj", "mlp.up_proj"),
        ],
        "mlp.down": [*_placed("encoder.layers.{layer}.mlp.fc2"), "mlp.down_proj"],
    },
    bases=(Base("nomic_bert."), Base("")),
)
_MODERNBERT = Names(
    {
        "embed": "embeddings.tok_embeddings",
        "head": "embeddings.tok_embeddings",
        "embed_norm": "embeddings.norm",
        "attn_norm": "attn_norm",
        "mlp_norm": "mlp_norm",
        "final_norm": "final_norm",
        "qkv": "attn.Wqkv",
        "o": "attn.Wo",
        "mlp.gate_up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
    },
    bases=(Base("model."), Base("")),
)

_BERT_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
_ROBERTA_DEFAULTS = {**_BERT_DEFAULTS, "pad_token_id": 1}
_POOLER = Dense("pooler.dense", "tanh")
_POOLED = (_POOLER, Dense("/classifier"))
_TWO = (Dense("/classifier.dense", "tanh"), Dense("/classifier.out_proj"))

ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(
        "BERT", bert, _bert_names("bert"), _BERT_DEFAULTS, classifier=_POOLED, pooler=_POOLER, marks_texts=True
    ),
    "roberta": EncoderFamily(
        "RoBERTa",
        roberta,
        _bert_names("roberta"),
        {**_ROBERTA_DEFAULTS, "vocab_size": 50265},
        classifier=_TWO,
        pooler=_POOLER,
    ),
    "camembert": EncoderFamily(
        "CamemBERT", roberta, _bert_names("roberta"), _ROBERTA_DEFAULTS, classifier=_TWO, pooler=_POOLER
    ),
    "xlm-roberta": EncoderFamily(
        "XLM-RoBERTa (BGE-M3, E5)", roberta, _bert_names("roberta"), _ROBERTA_DEFAULTS, classifier=_TWO, pooler=_POOLER
    ),
    "data2vec-text": EncoderFamily(
        "data2vec", roberta, _bert_names("data2vec_text"), _ROBERTA_DEFAULTS, classifier=_TWO, pooler=_POOLER
    ),
    "ernie": EncoderFamily(
        "ERNIE", ernie, _bert_names("ernie"), _BERT_DEFAULTS, classifier=_POOLED, pooler=_POOLER, marks_texts=True
    ),
    "electra": EncoderFamily(
        "ELECTRA",
        electra,
        _bert_names("electra"),
        {**_BERT_DEFAULTS, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
        | {"embedding_size": 128},
        classifier=(Dense("/classifier.dense", "gelu"), Dense("/classifier.out_proj")),
        marks_texts=True,
    ),
    "distilbert": EncoderFamily(
        "DistilBERT",
        distilbert,
        _DISTILBERT,
        {
            "vocab_size": 30522,
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "activation": "gelu",
            "max_position_embeddings": 512,
        },
        {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        classifier=(Dense("/pre_classifier", "relu"), Dense("/classifier")),
    ),
    "mpnet": EncoderFamily(
        "MPNet",
        mpnet,
        _MPNET,
        {**_BERT_DEFAULTS, "vocab_size": 30527, "relative_attention_num_buckets": 32},
        classifier=_TWO,
        pooler=_POOLER,
    ),
    "deberta-v2": EncoderFamily(
        "DeBERTa 2 and 3",
        deberta,
        _DEBERTA,
        {
            "vocab_size": 128100,
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "intermediate_size": 6144,
            "hidden_act": "gelu",
            "max_position_embeddings": 512,
            "type_vocab_size": 0,
            "layer_norm_eps": 1e-7,
            "relative_attention": False,
            "max_relative_positions": -1,
            "position_buckets": -1,
            "position_biased_input": True,
            "norm_rel_ebd": "none",
            "share_att_key": False,
            "conv_kernel_size": 0,
            "pooler_hidden_act": "gelu",
        },
        classifier=(Dense("/pooler.dense", "=pooler_hidden_act"), Dense("/classifier")),
        marks_texts=True,
    ),
    "nomic_bert": EncoderFamily(
        "Nomic BERT",
        nomic_bert,
        _NOMIC,
        {
            **_BERT_DEFAULTS,
            "vocab_size": 30528,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        classifier=_POOLED,
        pooler=_POOLER,
        marks_texts=True,
    ),
    "modernbert": EncoderFamily(
        "ModernBERT",
        modernbert,
        _MODERNBERT,
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_activation": "gelu",
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
        },
        classifier=(Dense("/head.dense", "=classifier_activation", norm="/head.norm"), Dense("/classifier")),
        pooling="classifier_pooling",
        norm_eps="norm_eps",
    ),
    "gemma3_text": EncoderFamily(
        "EmbeddingGemma", embedding_gemma, GEMMA2, GEMMA3_DEFAULTS, only_with="use_bidirectional_attention"
    ),
    "eurobert": EncoderFamily("EuroBERT", eurobert, LLAMA, LLAMA_DEFAULTS),
}

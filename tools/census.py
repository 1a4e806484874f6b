#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a tiny model of every causal language model that transformers has, and compares it with transformers.

    python tools/census.py                 all of them, to tests/data/census.json; takes minutes
    python tools/census.py qwen3 mamba     some of them; the others stay in the file as they are
    python tools/census.py --texts         those that classify texts, and encoders, to tests/data/census_texts.json

For each `model_type` it says which way it runs: "native" and "own code" are those of docs/models.md. What cannot be
built that small, or fails in transformers' own code, is listed with the reason. `python tools/pages.py models` writes
docs/models.md and docs/encoders.md from the files.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "census.json"
TEXTS_FILE = ROOT / "tests" / "data" / "census_texts.json"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

import encoder_models  # noqa: E402
import family_cases  # noqa: E402

# Small values of what configurations call their sizes. A configuration gets those that it has.
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "attention_hidden_size")
_FEATURES = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "dff",
    "ffn_hidden_size",
    "hidden_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "intermediate_size_mlp",
    "shared_intermediate_size",
)
_DEPTH = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTH, 48),
    **dict.fromkeys(_FEATURES, 64),
    **dict.fromkeys(_DEPTH, 4),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 131,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# About 100 million parameters, for benchmarks/own_code.py.
MEDIUM: dict[str, Any] = {
    **_SMALL,
    **dict.fromkeys(_WIDTH, 768),
    **dict.fromkeys(_FEATURES, 2048),
    **dict.fromkeys(_DEPTH, 12),
    **dict.fromkeys(_HEADS, 12),
    **dict.fromkeys(_EXPERTS, 8),
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_channels": 64,
    "dim_head": 64,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 32000),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), 2048),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512),
    "kv_lora_rank": 256,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 64,
}
# About a billion, for benchmarks/own_code.py --native.
LARGE: dict[str, Any] = {
    **MEDIUM,
    **dict.fromkeys(_WIDTH, 2048),
    **dict.fromkeys(_FEATURES, 8192),
    **dict.fromkeys(_DEPTH, 16),
    **dict.fromkeys(_HEADS, 16),
    "head_dim": 128,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
# What no other model has. None: not given, as some take no such size.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_hidden_layers": 6, "layer_group_size": 3, "num_shared_experts": 1, "num_expert_group": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "first_k_dense_replace": 1,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "shared_experts_intermediate_size": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 10,
    },
    "longcat_flash": {
        "head_dim": 8,
        "qk_head_dim": 20,
        "num_key_value_heads": 4,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
    },
    "prophetnet": {"num_hidden_layers": None},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ple_embed_dim": 48,
        "ngram_vocab_size_base": 100,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "xlstm": {"v_head_dim": None, "hidden_size": 128, "embedding_dim": 128},
    "zamba": {"num_hidden_layers": 12, "attention_hidden_size": 96, "attention_head_dim": 24},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "esmc": {"head_dim": None, "num_key_value_heads": 4},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1, 1], "d_head": 12, "d_inner": 64},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 8, "input_size": 32},
    "luke": {"entity_vocab_size": 131, "entity_emb_size": 24},
    "neomme": {"head_dim": 16, "embedding_rank": 24},
    "perceiver": {"d_latents": 48, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4},
    "reformer": {"attention_head_size": 12, "axial_pos_embds": False, "feed_forward_size": 64, "hash_seed": 0},
    "roc_bert": {"shape_vocab_size": 131, "pronunciation_vocab_size": 131, "shape_embed_dim": 24},
    "t5": {"decoder_start_token_id": 0},
    "xlnet": {"max_position_embeddings": None, "d_inner": 64},
    "xmod": {"default_language": "en_XX"},
}
# The same, of medium sizes.
_OWN_MEDIUM: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 4, "num_shared_experts": 1, "num_expert_group": 2},
    "cohere_compass_text": _OWN["cohere_compass_text"],
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "first_k_dense_replace": 1,
        "index_topk": 256,
        "index_head_dim": 64,
        "index_n_heads": 8,
        "shared_experts_intermediate_size": 512,
        "swa_num_attention_heads": 12,
        "swa_num_key_value_heads": 12,
        "swa_q_lora_rank": 384,
        "swa_kv_lora_rank": 256,
        "swa_head_dim": 96,
        "swa_qk_nope_head_dim": 64,
        "swa_v_head_dim": 64,
    },
    "esmc": {"head_dim": None, "num_key_value_heads": 12},
    "funnel": {"num_hidden_layers": None, "block_sizes": [4, 4, 4], "d_head": 64, "d_inner": 2048},
    "gpt_neo": {"attention_types": [[["global", "local"], 6]]},
    "longcat_flash": {
        "num_layers": 4,
        "head_dim": 32,
        "qk_head_dim": 96,
        "num_key_value_heads": 12,
        "expert_ffn_hidden_size": 512,
        "zero_expert_num": 4,
    },
    "luke": {"entity_vocab_size": 32000, "entity_emb_size": 256},
    "mobilebert": {"num_attention_heads": 4},
    "neomme": {"head_dim": 64, "embedding_rank": 256},
    "perceiver": {
        "d_latents": 768,
        "num_latents": 64,
        "num_self_attends_per_block": 11,
        "num_self_attention_heads": 12,
    },
    "prophetnet": {"num_hidden_layers": None},
    "qwen4_exp_text": {
        "hc_lowrank": 64,
        "ple_embed_dim": 768,
        "ngram_vocab_size_base": 1000,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 256,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "attention_head_size": 64,
        "axial_pos_embds": False,
        "feed_forward_size": 2048,
        "hash_seed": 0,
        "attn_layers": ["local", "lsh"] * 6,
    },
    "roc_bert": {"shape_vocab_size": 32000, "pronunciation_vocab_size": 1000, "shape_embed_dim": 256},
    "t5": {"decoder_start_token_id": 0},
    "xlnet": {"max_position_embeddings": None, "d_inner": 2048},
    "xlstm": {"v_head_dim": None, "num_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 1536, "attention_head_dim": 128},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 256},
}
# Why others are not tried; what fails in transformers' code here for any other reason is listed with its error.
_UNTRIED = {
    "blt": "transformers' code asks its configuration for layers that it has not",
    "dots3_note": "pictures and sound have sizes of other names; its text part, `dots3_note_text`, is tried",
    "gemma4_assistant": "it drafts tokens for a Gemma 4, and reads that model's keys and values",
    "gemma4_unified_assistant": "it drafts tokens for a Gemma 4, and reads that model's keys and values",
    "layoutlmv2": "transformers' code needs detectron2, which is not on PyPI",
    "musicgen": "a model of sound: `AutoModelForCausalLM` does not build it from its configuration",
    "musicgen_melody": "a model of sound: `AutoModelForCausalLM` does not build it from its configuration",
}
_TOKENS = 12
_STEPS = 3


@dataclass(frozen=True)
class Found:
    """How a kind of model runs.

    Attributes:
        way: "native", "own code", "fails" (ours) or "untried" (transformers' own code fails with so small a model).
        why: what the native runtime lacks, or the error.
    """

    way: str
    why: str = ""


def _own(model_type: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy((_OWN if sizes is _SMALL else _OWN_MEDIUM).get(model_type, {}))


def _most(sizes: Mapping[str, Any]) -> int:
    """Parameters, beyond which a model has sizes of other names too."""
    return 10_000_000 if sizes is _SMALL else 700_000_000 if sizes is MEDIUM else 2_500_000_000


def _small(values: dict[str, Any], sizes: Mapping[str, Any] = _SMALL) -> dict[str, Any]:
    """Small sizes for those that a configuration has, and for the configurations in it."""
    small = {name: value for name, value in sizes.items() if name in values}
    if "kv_lora_rank" in values:  # heads of latent attention have sizes of their own
        small.pop("head_dim", None)
        small |= {name: sizes["num_attention_heads"] for name in ("num_key_value_heads",) if name in values}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            kind = value["model_type"]
            small[name] = {"model_type": kind, **_small(value, sizes), **_own(kind, sizes)}
    return small


def _shrunk(model_type: str, sizes: Mapping[str, Any]) -> Any:
    """A configuration with small sizes where it has names for them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    config = kind()
    aliases = {name: None for name in _SMALL if name not in config.to_dict() and hasattr(config, name)}
    values = _small(config.to_dict() | aliases, sizes) | _own(model_type, sizes)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _larger(model_type: str, values: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a tiny model with other sizes, its lists of layers repeated."""
    larger = copy.deepcopy(dict(values)) | _small(dict(values), sizes) | _own(model_type, sizes)
    layers, before = larger.get("num_hidden_layers"), values.get("num_hidden_layers")
    for name, value in values.items():
        if layers and isinstance(value, list) and len(value) == before:
            larger[name] = [value[at % len(value)] for at in range(layers)]
    return larger


def build(model_type: str, sizes: Mapping[str, Any] = _SMALL) -> Any:
    """A tiny model: as the parity tests have it, or one of the architecture's own configuration; or one of `sizes`."""
    import transformers

    known = family_cases.CASES | family_cases.OTHERS
    for case, (name, values) in known.items():
        kind = getattr(transformers, name)
        if kind.model_type == model_type:
            if sizes is _SMALL:
                return family_cases.build(case)
            larger = kind(**_larger(model_type, values, sizes))
            return _from_config(transformers.AutoModelForCausalLM, larger, _most(sizes))
    config = _shrunk(model_type, sizes)
    config.is_decoder = True
    return _from_config(transformers.AutoModelForCausalLM, config, _most(sizes))


def _from_config(kind: Any, config: Any, most: int) -> Any:
    with torch.device("meta"):
        parameters = sum(each.numel() for each in kind.from_config(copy.deepcopy(config)).parameters())
    if parameters > most:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters where its sizes are named as usual")
    torch.manual_seed(0)
    return kind.from_config(copy.deepcopy(config)).float().eval()


def build_of_texts(model_type: str, sizes: Mapping[str, Any] = _SMALL) -> Any:
    """A tiny model that classifies texts, or one of `sizes`; where transformers has none of the type, its encoder."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    kind = "AutoModelForSequenceClassification" if model_type in CLASSIFIERS else "AutoModel"
    small = sizes is _SMALL
    values: dict[str, Any] | None = None
    for case, each in encoder_models.CASES.items():
        if each["model_type"] == model_type and (model_type in CLASSIFIERS or "bidirectional" not in case):
            if small:
                return encoder_models.build(case, kind)
            values = values or {name: value for name, value in each.items() if name != "model_type"}
    for name, each in family_cases.CASES.values():
        if getattr(transformers, name).model_type == model_type:
            values = values or copy.deepcopy(each)
    if values is None:
        config = _shrunk(model_type, sizes)
    else:
        config = CONFIG_MAPPING[model_type](**(values if small else _larger(model_type, values, sizes)))
    config.num_labels = 3
    model = _from_config(getattr(transformers, kind), config, _most(sizes))
    if not small:
        return model
    with torch.no_grad():
        for value in model.parameters():  # larger than a new model's, so that a mistake shows
            if value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.05)
    return model


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a prompt, and of tokens after it one by one."""
    with torch.inference_mode():
        if model.config.model_type == "cpmant":  # which takes all tokens with each step
            return model(tokens, use_cache=False).logits
        output = model(tokens[:, :-_STEPS], use_cache=True)
        parts = [output.logits]
        for step in range(_STEPS, 0, -1):
            past = getattr(output, "past_key_values", None)
            past = past if past is not None else getattr(output, "cache_params", None)
            name = "past_key_values" if getattr(output, "past_key_values", None) is not None else "cache_params"
            if past is None:  # it keeps none, or to itself
                return model(tokens, use_cache=False).logits
            end = tokens.shape[1] - step
            more = {name: past}
            if model.config.model_type == "bamba":  # which counts cached positions from 0
                more["position_ids"] = torch.tensor([[end]])
            output = model(tokens[:, end : end + 1], use_cache=True, **more)
            parts.append(output.logits)
    return torch.cat(parts, 1)


def padded(config: Any, tokens: torch.Tensor, counts: Sequence[int]) -> dict[str, torch.Tensor]:
    """Arguments of a model for texts [texts, tokens] that are cut to so many tokens, and padded."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    tokens, mask, end = tokens.clone(), torch.ones_like(tokens), getattr(config, "eos_token_id", None)
    for row, count in enumerate(counts):
        tokens[row, count - 1 :] = config.pad_token_id
        tokens[row, count - 1] = end if isinstance(end, int) else 2  # BART's heads look for the end
        mask[row, count:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def of_texts(model: Any, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits of texts, or the hidden states of what is no padding."""
    with torch.inference_mode():
        output = model(**given)
    return output.logits if "logits" in output else output.last_hidden_state[given["attention_mask"].bool()]


def _of_texts(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return of_texts(model, padded(model.config, tokens, (_TOKENS, 5, 8)))


def take(model_type: str, texts: bool = False) -> tuple[Found, float]:
    """How it runs, and the largest difference of logits relative to the largest one."""
    import anyaccel
    from anyaccel.errors import AnyAccelError

    tokens = torch.randint(
        7 if texts else 3, 60, (3 if texts else 1, _TOKENS), generator=torch.Generator().manual_seed(0)
    )
    run = _of_texts if texts else _logits
    try:
        model = build_of_texts(model_type) if texts else build(model_type)
        ours = copy.deepcopy(model)
        wanted = run(model, tokens)
        if not wanted.isfinite().all():
            raise ValueError("logits that are no numbers")
    except Exception as error:  # noqa: BLE001 - transformers' code, with any configuration
        return Found("untried", _UNTRIED.get(model_type) or _short(error)), 0.0
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("anyaccel")
    log.addHandler(handler)
    try:
        engine = anyaccel.init_inference(ours, dtype="fp32")
        found = run(engine, tokens)
    except AnyAccelError as error:
        return Found("fails", _short(error)), 0.0
    finally:
        log.removeHandler(handler)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    lacks = next((each.partition("has no ")[2] for each in said if "has no " in each), "")
    return Found("own code" if lacks else "native", lacks), difference


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def names(texts: bool = False) -> list[str]:
    from transformers.models.auto import modeling_auto as known

    if texts:
        kinds = {*known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, *known.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
        return sorted(kinds | {each["model_type"] for each in encoder_models.CASES.values()})
    return sorted(known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all", metavar="TYPE")
    parser.add_argument("--texts", action="store_true", help="models that classify texts, and encoders")
    options = parser.parse_args(words)
    arguments, texts = options.model_types, options.texts
    file = TEXTS_FILE if texts else FILE
    if unknown := set(arguments) - set(names(texts)):
        parser.error(f"transformers has no such models of type {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("anyaccel").propagate = False
    taken = {}
    wrong = 0
    for name in arguments or names(texts):
        with contextlib.redirect_stderr(io.StringIO()):
            found, difference = take(name, texts)
        taken[name] = asdict(found)
        bad = difference > 1e-4 or found.way == "fails"
        wrong += bad
        print(f"{name:28} {found.way:9} {difference:8.1e} {'WRONG ' if bad else ''}{found.why}", flush=True)
    known = json.loads(file.read_text()) if arguments else {}
    file.write_text(json.dumps(dict(sorted((known | taken).items())), indent=1) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

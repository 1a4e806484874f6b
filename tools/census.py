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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
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
# Of models that classify texts or encode them, what no other has. None: not given, as some take no such size.
_OWN: dict[str, dict[str, Any]] = {
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
_MOST_PARAMETERS = 10_000_000  # of small sizes; of medium ones 50 times as many
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


def _small(values: dict[str, Any], sizes: Mapping[str, Any] = _SMALL) -> dict[str, Any]:
    """Small sizes for those that a configuration has, and for the configurations in it."""
    small = {name: value for name, value in sizes.items() if name in values}
    if "kv_lora_rank" in values:  # heads of latent attention have sizes of their own
        small.pop("head_dim", None)
        small |= {name: sizes["num_attention_heads"] for name in ("num_key_value_heads",) if name in values}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {"model_type": value["model_type"], **_small(value, sizes)}
    return small


def _shrunk(kind: type, own: Mapping[str, Any] = MappingProxyType({}), sizes: Mapping[str, Any] = _SMALL) -> Any:
    """A configuration with small sizes where it has names for them."""
    config: Any = kind()
    aliases = {name: None for name in _SMALL if name not in config.to_dict() and hasattr(config, name)}
    return kind(
        **{
            name: value
            for name, value in (_small(config.to_dict() | aliases, sizes) | own).items()
            if value is not None
        }
    )


def build(model_type: str, sizes: Mapping[str, Any] = _SMALL) -> Any:
    """A tiny model: as the parity tests have it, or one of the architecture's own configuration; or one of `sizes`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = family_cases.CASES | family_cases.OTHERS
    for case, (name, values) in known.items():
        kind = getattr(transformers, name)
        if kind.model_type == model_type:
            if sizes is _SMALL:
                return family_cases.build(case)
            larger = kind(**copy.deepcopy(values) | _small(values, sizes))
            return _from_config(transformers.AutoModelForCausalLM, larger, 50 * _MOST_PARAMETERS)
    config = _shrunk(CONFIG_MAPPING[model_type], sizes=sizes)
    config.is_decoder = True
    return _from_config(transformers.AutoModelForCausalLM, config, _MOST_PARAMETERS * (1 if sizes is _SMALL else 50))


def _from_config(kind: Any, config: Any, most: int = _MOST_PARAMETERS) -> Any:
    with torch.device("meta"):
        parameters = sum(each.numel() for each in kind.from_config(copy.deepcopy(config)).parameters())
    if parameters > most:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters where its sizes are named as usual")
    torch.manual_seed(0)
    return kind.from_config(copy.deepcopy(config)).float().eval()


def build_of_texts(model_type: str) -> Any:
    """A tiny model that classifies texts; where transformers has none of the type, its encoder."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

    kind = "AutoModelForSequenceClassification" if model_type in CLASSIFIERS else "AutoModel"
    for case, values in encoder_models.CASES.items():
        if values["model_type"] == model_type and (model_type in CLASSIFIERS or "bidirectional" not in case):
            return encoder_models.build(case, kind)
    of_decoders = [(getattr(transformers, name), values) for name, values in family_cases.CASES.values()]
    given = next((kind(**copy.deepcopy(values)) for kind, values in of_decoders if kind.model_type == model_type), None)
    config = given or _shrunk(CONFIG_MAPPING[model_type], _OWN.get(model_type, {}))
    config.num_labels = 3
    model = _from_config(getattr(transformers, kind), config)
    with torch.no_grad():
        for value in model.parameters():  # larger than a new model's, so that a mistake shows
            if value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.05)
    return model


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a prompt, and of tokens after it one by one."""
    with torch.inference_mode():
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


def _of_texts(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a batch of texts with padding: logits, or the hidden states of what is no padding."""
    config = model.config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    mask, end = torch.ones_like(tokens), getattr(config, "eos_token_id", None)
    for row, count in enumerate((_TOKENS, 5, 8)):
        tokens[row, count - 1 :] = config.pad_token_id
        tokens[row, count - 1] = end if isinstance(end, int) else 2  # BART's heads look for the end
        mask[row, count:] = 0
    with torch.inference_mode():
        output = model(input_ids=tokens, attention_mask=mask)
    return output.logits if "logits" in output else output.last_hidden_state[mask.bool()]


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
        return Found("untried", _short(error)), 0.0
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

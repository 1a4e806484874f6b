#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a tiny model of every causal language model that transformers has, and compares it with transformers.

    python tools/census.py                 all of them, to tests/data/census.json; takes minutes
    python tools/census.py qwen3 mamba     some of them; the others stay in the file as they are

For each `model_type` it says which way it runs: "native" and "own code" are those of docs/models.md. What cannot be
built that small, or fails in transformers' own code, is listed with the reason. `python tools/pages.py models` writes
docs/models.md from the file.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "census.json"
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

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
_MOST_PARAMETERS = 10_000_000
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


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for those that a configuration has, and for the configurations in it."""
    small = {name: value for name, value in _SMALL.items() if name in values}
    if "kv_lora_rank" in values:  # heads of latent attention have sizes of their own
        small.pop("head_dim", None)
        small |= {name: 4 for name in ("num_key_value_heads",) if name in values}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {"model_type": value["model_type"], **_small(value)}
    return small


def _shrunk(kind: type) -> Any:
    """A configuration with small sizes where it has names for them."""
    config: Any = kind()
    aliases = {name: None for name in _SMALL if name not in config.to_dict() and hasattr(config, name)}
    return kind(**_small(config.to_dict() | aliases))


def build(model_type: str) -> Any:
    """A tiny model: as the parity tests have it, or one of the architecture's own configuration."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = family_cases.CASES | family_cases.OTHERS
    for case, (name, _) in known.items():
        kind = getattr(transformers, name)
        if kind.model_type == model_type:
            return family_cases.build(case)
    config = _shrunk(CONFIG_MAPPING[model_type])
    config.is_decoder = True
    with torch.device("meta"):
        parameters = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters where its sizes are named as usual")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).float().eval()


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a prompt, and of tokens after it one by one."""
    with torch.inference_mode():
        output = model(tokens[:, :-_STEPS], use_cache=True)
        parts = [output.logits]
        for step in range(_STEPS, 0, -1):
            past = getattr(output, "past_key_values", None)
            past = past if past is not None else getattr(output, "cache_params", None)
            name = "past_key_values" if getattr(output, "past_key_values", None) is not None else "cache_params"
            if past is None:
                break
            end = tokens.shape[1] - step
            more = {name: past}
            if model.config.model_type == "bamba":  # which counts cached positions from 0
                more["position_ids"] = torch.tensor([[end]])
            output = model(tokens[:, end : end + 1], use_cache=True, **more)
            parts.append(output.logits)
    return torch.cat(parts, 1)


def take(model_type: str) -> tuple[Found, float]:
    """How it runs, and the largest difference of logits relative to the largest one."""
    import anyaccel
    from anyaccel.errors import AnyAccelError

    tokens = torch.randint(3, 60, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        model = build(model_type)
        ours = copy.deepcopy(model)
        wanted = _logits(model, tokens)
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
        found = _logits(engine, tokens)
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


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all", metavar="TYPE")
    arguments = parser.parse_args(words).model_types
    if unknown := set(arguments) - set(names()):
        parser.error(f"transformers has no causal language models of type {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("anyaccel").propagate = False
    taken = {}
    wrong = 0
    for name in arguments or names():
        with contextlib.redirect_stderr(io.StringIO()):
            found, difference = take(name)
        taken[name] = asdict(found)
        bad = difference > 1e-4 or found.way == "fails"
        wrong += bad
        print(f"{name:28} {found.way:9} {difference:8.1e} {'WRONG ' if bad else ''}{found.why}", flush=True)
    known = json.loads(FILE.read_text()) if arguments else {}
    FILE.write_text(json.dumps(dict(sorted((known | taken).items())), indent=1) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

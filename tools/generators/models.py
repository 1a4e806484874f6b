# SPDX-License-Identifier: Apache-2.0
"""Writes the table of model families in docs/models.md, from FAMILIES and the configs that the parity tests run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from anyaccel.inference.families.registry import ARCHITECTURES, FAMILIES
from anyaccel.inference.spec.decoder import (
    Attention,
    DecoderSpec,
    GatedLru,
    Layer,
    Mlp,
    Recurrent,
    SelectiveScan,
    ShortConv,
)
from generators import DOCS, ROOT, fill

PAGE = DOCS / "models.md"
CENSUS = ROOT / "tests" / "data" / "census.json"
SPEED = ROOT / "tests" / "data" / "own_code_speed.json"
NATIVE_SPEED = ROOT / "tests" / "data" / "native_speed.json"
COLUMNS = ("norms", "positions", "mixers", "MLP", "else")


def _norms(spec: DecoderSpec, layer: Layer) -> Iterator[str]:
    norm = layer.attn_norm or layer.attn_post_norm
    if norm is not None:
        kind = "RMS" if norm.kind == "rms" else "LayerNorm"
        yield kind if norm.weight else f"{kind} without weights"
    before, after = layer.attn_norm is not None, layer.attn_post_norm is not None
    if after:
        yield "before and after" if before else "after"
    if layer.parallel:
        yield "side by side" if layer.mlp_norm is None else "side by side with two norms"
    if spec.embedding_norm is not None:
        yield "embedding"
    if layer.residual_from_norm:
        yield "residual after the norm"


def _positions(spec: DecoderSpec, a: Attention | None) -> Iterator[str]:
    if a is None:
        return
    if spec.positions:
        yield "learned"
    elif a.alibi:
        yield "ALiBi"
    elif a.rope < 0:
        yield "none"
    else:
        rope = spec.ropes[a.rope]
        partial = 2 * len(rope.inv_freq) < a.head_dim and a.mla is None
        yield " ".join([*(["partial"] if partial else []), *(["interleaved"] if rope.interleaved else []), "rotary"])


def _mixer(mixer: Recurrent) -> str:
    if isinstance(mixer, ShortConv):
        return "short convolution"
    if isinstance(mixer, SelectiveScan):
        return "selective scan (Mamba)"
    if isinstance(mixer, GatedLru):
        return "gated linear recurrent unit"
    if mixer.delta:
        return "Kimi delta attention" if mixer.decay_rank else "gated delta rule"
    if mixer.slopes:
        return "lightning attention"
    return "state space (Mamba-2)"


def _attention(spec: DecoderSpec, layer: Layer) -> Iterator[str]:
    if layer.recurrent is not None:
        yield _mixer(layer.recurrent)
    a = layer.attention
    if a is None:
        return
    if a.mla is not None:
        yield "latent"
        if a.mla.q_rank:
            yield "latent queries"
        if a.indexer is not None:
            yield "sparse by an indexer" if a.indexer.own else "another layer's choice"
    else:
        yield "MHA" if a.kv_heads == a.heads else "MQA" if a.kv_heads == 1 else "GQA"
    features = {
        "biases": a.qkv_bias,
        "window": a.window,
        "soft cap": a.softcap,
        "sinks": a.sinks,
        "clipped": a.clip,
        "gated": a.gated,
        "Q/K norm": a.qk_norm is not None and not a.qk_norm.across,
        "Q/K norm over all heads": a.qk_norm is not None and a.qk_norm.across,
        "value norm": a.value_norm is not None,
        "chunks": a.chunk,
        "growing queries": a.growth,
        "earlier layers' keys and values": a.kv_layer >= 0,
        "norm of the result": a.out_norm is not None,
        "low-rank way beside it": layer.laurel is not None,
        "shared blocks beside the residual": layer.side_block is not None,
    }
    yield from (name for name, present in features.items() if present)


def _mlp(spec: DecoderSpec, layer: Layer) -> Iterator[str]:
    mlp = layer.mlp
    if mlp is None:
        return
    part = mlp if isinstance(mlp, Mlp) else mlp.expert
    yield f"gated {part.activation}" if part.gated else part.activation
    if part.bias:
        yield "biases"
    if part.norm is not None:
        yield "norm of the features"
    if part.cutoff is not None:
        yield "few gates"
    if not isinstance(mlp, Mlp):
        yield "experts"
        if mlp.shared is not None:
            yield "shared expert"
        if mlp.groups > 1:
            yield "groups"


def _else(spec: DecoderSpec, layer: Layer) -> Iterator[str]:
    features = {
        "embedding factor": spec.embedding_scale != 1.0,
        "residual factor": layer.residual_scale != 1.0,
        "logits factor": spec.logits_scale != 1.0,
        "logits soft cap": spec.logits_softcap,
        "head bias": spec.head_bias,
        "embeddings of each layer": spec.layer_inputs is not None,
        "layer factor": layer.scaled,
        "several residuals": spec.streams > 1,
    }
    yield from (name for name, present in features.items() if present)


def features(spec: DecoderSpec) -> dict[str, list[str]]:
    """Column -> what any of the layers has."""
    found: dict[str, dict[str, None]] = {column: {} for column in COLUMNS}
    for layer in spec.layers:
        for column, names in zip(
            COLUMNS,
            (
                _norms(spec, layer),
                _positions(spec, layer.attention),
                _attention(spec, layer),
                _mlp(spec, layer),
                _else(spec, layer),
            ),
            strict=True,
        ):
            found[column].update(dict.fromkeys(names))
    return {column: list(names) for column, names in found.items()}


def rows(specs: Mapping[str, list[DecoderSpec]]) -> Iterator[str]:
    """The lines of the generated part; what only some of a family's configs have is in parentheses."""
    yield ""
    yield f"| `model_type` | models | GGUF | {' | '.join(COLUMNS)} |"
    yield "| --- |" + " --- |" * (len(COLUMNS) + 2)
    for model_type, family in FAMILIES.items():
        each = [features(spec) for spec in specs[model_type]]
        cells = []
        for column in COLUMNS:
            names = dict.fromkeys(name for found in each for name in found[column])
            always = [name for name in names if all(name in found[column] for found in each)]
            sometimes = [name for name in names if name not in always]
            cells.append(", ".join(always) + (f" ({', '.join(sometimes)})" if sometimes else ""))
        files = ", ".join(
            f"`{name}`" for name, each in ARCHITECTURES.items() if model_type in (each.model_type, *each.others)
        )
        yield f"| `{model_type}` | {family.models} | {files} | {' | '.join(cell.strip() for cell in cells)} |"
    yield ""


def specs_of(cases: Mapping[str, tuple[str, Mapping[str, Any]]], types: Mapping[str, str]) -> dict[str, Any]:
    """model_type -> the specs of its cases; `types`: configuration class -> model_type."""
    found: dict[str, list[DecoderSpec]] = {model_type: [] for model_type in FAMILIES}
    for name, arguments in cases.values():
        found[types[name]].append(FAMILIES[types[name]].spec(arguments))
    return found | {name: found[f"{name}_text"] for name, family in FAMILIES.items() if family.text}


def census_rows(taken: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The lines of the list of all causal models of transformers, as tools/census.py found them."""

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    of_way: dict[str, list[str]] = {}
    for name, found in taken.items():
        of_way.setdefault("native" if name in FAMILIES else found["way"], []).append(name)
    heads = {
        "native": "In the native and the device runtime",
        "own code": "With their own code and packed linears",
        "fails": "Failing",
    }
    yield ""
    for way, head in heads.items():
        if of_way.get(way):
            yield f"**{head}** ({len(of_way[way])}): {listed(of_way[way])}."
            yield ""
    yield "Not in the census:"
    yield ""
    for name in of_way.get("untried", []):
        yield f"- `{name}`: {taken[name]['why']}."
    yield ""


def speed_rows(taken: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The table of benchmarks/own_code.py."""
    yield "| `model_type` | million parameters | prompt | step | prompts of 8 | step of 8 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, found in taken.items():
        if name in FAMILIES:  # by now
            continue
        ratios = (found[each] for each in ("prompt 1", "step 1", "prompt 8", "step 8"))
        yield f"| `{name}` | {found['parameters'] / 1e6:.0f} | {' | '.join(f'{each:.1f}' for each in ratios)} |"


def native_rows(taken: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """The table of benchmarks/own_code.py --native."""
    kinds = ("prompt 1", "step 1", "prompt 8", "step 8")
    yield "| `model_type` | runs | prompt | steps | prompts of 8 | steps of 8 |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, found in taken.items():
        for runtime, runs in (("native", "natively"), ("torch", "own code"), ("transformers", "transformers")):
            shown = []
            for each in kinds:
                rate, native = found[f"{runtime}, {each}"], found[f"native, {each}"]
                shown.append(f"{rate:.3g}" if runtime == "native" else f"{rate:.3g} ({rate / native:.2f})")
            yield f"| `{name}` | {runs} | {' | '.join(shown)} |"


def files() -> dict[Path, str]:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    import family_cases

    types = {name: model_type for model_type, name in CONFIG_MAPPING_NAMES.items() if model_type in FAMILIES}
    text = fill(PAGE.read_text(), "models", rows(specs_of(family_cases.CASES, types)))
    text = fill(text, "all models", census_rows(json.loads(CENSUS.read_text())))
    text = fill(text, "native beside own code", native_rows(json.loads(NATIVE_SPEED.read_text())))
    return {PAGE: fill(text, "own code", speed_rows(json.loads(SPEED.read_text())))}

# SPDX-License-Identifier: Apache-2.0
"""Sparse attention beside dense: one layer of GLM-5 (or DeepSeek-V3.2) with random weights, whose attention sees the
2,048 tokens that its indexer chooses, and the same layer without the indexer. The median step at each depth, both in
turn, and the prompt up to it. The layer's MLP has one feature in twelve: what differs is attention.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from _common import emit_json, machine, median, note, table

_VOCAB = 1000


def _spec(model_type: str, indexer: bool, top_k: int) -> Any:
    from anyaccel.inference.families.registry import FAMILIES

    config = {
        "model_type": model_type,
        "num_hidden_layers": 1,
        "vocab_size": _VOCAB,
        "intermediate_size": 1024,
        "index_topk": top_k,
    }
    spec = FAMILIES[model_type].spec(config)
    (layer,) = spec.layers
    if indexer:
        return spec
    return replace(spec, layers=(replace(layer, attention=replace(layer.attention, indexer=None)),))


def _model(spec: Any, cache: str, threads: int) -> Any:
    import torch

    from anyaccel import _llm
    from anyaccel.inference.native.formats import ALWAYS_FLOAT
    from anyaccel.inference.spec.decoder import weights

    matrices, vectors = weights(spec)
    formats = [
        replace(each, format="f32" if each.name.rsplit(".", 1)[-1] in ALWAYS_FLOAT else "i8") for each in matrices
    ]
    model = _llm.DecoderModel(
        spec, [each.entry() for each in formats], [(each.name, each.count) for each in vectors], threads, cache, 0
    )
    generator = torch.Generator().manual_seed(0)
    for matrix in matrices:
        values = torch.randn(matrix.rows, matrix.cols, generator=generator) * matrix.cols**-0.5
        model.set_rows(matrix.name, 0, matrix.rows, values.data_ptr(), "f32", 4 * matrix.cols)
    for vector in vectors:
        values = torch.ones(vector.count)
        model.set_vector(vector.name, 0, vector.count, values.data_ptr(), "f32")
    model.finish()
    return model


def _feed(model: Any, sequence: int, ids: Any) -> float:
    import torch

    ids, out = ids.contiguous(), torch.empty(1, _VOCAB)
    begin = time.perf_counter()
    model.forward([sequence], [len(ids)], ids.data_ptr(), out.data_ptr(), [len(ids) - 1])
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", default="glm_moe_dsa", choices=["glm_moe_dsa", "deepseek_v32"])
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--cache", default="bf16", choices=["f32", "bf16", "i8", "i4"])
    parser.add_argument("--depths", type=int, nargs="*", default=[2000, 4000, 8000, 16000])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch

    models = {
        name: _model(_spec(options.model_type, name == "sparse", options.top_k), options.cache, options.threads)
        for name in ("dense", "sparse")
    }
    sequences = {name: model.create() for name, model in models.items()}
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, _VOCAB, (max(options.depths) + options.steps,), generator=generator)
    found: list[dict[str, float]] = []
    fed, prompt = 0, dict.fromkeys(models, 0.0)
    for depth in options.depths:
        for name, model in models.items():
            for first in range(fed, depth, 1024):
                prompt[name] += _feed(model, sequences[name], ids[first : min(first + 1024, depth)])
        times: dict[str, list[float]] = {name: [] for name in models}
        for step in range(depth, depth + options.steps):
            for name, model in models.items():
                times[name].append(_feed(model, sequences[name], ids[step : step + 1]))
        for name, model in models.items():
            model.truncate(sequences[name], depth)
        row = {"depth": float(depth)} | {f"step_{name}": median(each) for name, each in times.items()}
        found.append(row | {f"prompt_{name}": each for name, each in prompt.items()})
        note(f"depth {depth}: {found[-1]}")
        fed = depth
    if options.json:
        emit_json({"machine": machine(), "rows": found})
        return 0
    print(machine())
    rows = [
        [
            f"{row['depth']:,.0f}",
            *(f"{1000 * row[name]:.1f}" for name in ("step_dense", "step_sparse")),
            f"{row['step_dense'] / row['step_sparse']:.2f}",
            f"{row['prompt_dense'] / row['prompt_sparse']:.2f}",
        ]
        for row in found
    ]
    print(table(["depth", "step, dense (ms)", "sparse (ms)", "times as fast", "prompt, times as fast"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

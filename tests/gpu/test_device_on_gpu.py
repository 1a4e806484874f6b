# SPDX-License-Identifier: Apache-2.0
"""The decoder in torch's operators on an NVIDIA GPU, its graphs included; `benchmarks/device.py --speed` times it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
import kernel_cases
from anyaccel._llm import Request
from anyaccel.accelerator.conformance.run import run_checks
from anyaccel.inference.device.executor import device_logits
from anyaccel.inference.device.kernels import choice

pytest.importorskip("transformers")
if not torch.cuda.is_available() or torch.version.cuda is None:
    pytest.skip("needs an NVIDIA GPU and a torch built for it", allow_module_level=True)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def test_the_conformance_kit_passes() -> None:
    results = run_checks(anyaccel.get_accelerator())
    failed = {result.check: result.detail for result in results if result.outcome == "fail"}
    assert not failed


@pytest.mark.parametrize("name", ["gated", "turn", "add_norm", "norm", "product", "attend"])
def test_tritons_kernels_give_what_torch_gives(name: str) -> None:
    cases = getattr(kernel_cases, name)
    device = torch.device("cuda", 0)
    kernels = choice.kernels_of(device)
    if kernels is None:
        pytest.skip("Triton does not run here, as a warning says")
    found = cases(kernels, device)
    assert {case: both for case, both in found.items() if not both[0] <= both[1]} == {}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", [name for name in family_cases.CASES if "-" not in name])
def test_logits_are_those_of_transformers(name: str, dtype: str) -> None:
    """As near to float32 on the CPU as transformers on the device is."""
    ids = torch.randint(3, 131, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = family_cases.build(name)(ids).logits
        engine = anyaccel.init_inference(family_cases.build(name), dtype=dtype)
        logits = engine(ids.to(engine.device)).logits
        assert (engine.runtime, logits.device.type) == ("device", "cuda")
        single = torch.cat([each.cpu() for each in _one_by_one(engine, ids)])[None]
        theirs = family_cases.build(name).to(engine.device, _DTYPES[dtype])(ids.to(engine.device)).logits
    own, alone, other = (_error(each.cpu().float(), expected, dtype) for each in (logits, single, theirs))
    bound = 1e-5 if dtype == "fp32" else max(0.015, 1.5 * other)
    assert own < bound and alone < bound, (own, alone, other)


def _error(logits: torch.Tensor, expected: torch.Tensor, dtype: str) -> float:
    """The relative error of the tokens' logits; in 16 bits the middle one's, as a few go to other experts."""
    each = ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()
    return float(each.max() if dtype == "fp32" else each.median())


def _one_by_one(engine: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits of each token, computed by itself with the cache of those before it."""
    model = engine.native.model
    sequence = model.create()
    for token in ids[0].tolist():
        yield device_logits(model, [sequence], [1], [token], [0])
    model.destroy(sequence)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_weights_run_by_operators_of_the_device(dtype: str, tmp_path: Path) -> None:
    """In bfloat16, beside the same whole numbers with arithmetic in float32, which has no such operators for int4."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.randint(3, 1000, (1, 20), generator=torch.Generator().manual_seed(1))
    logits = []
    for arithmetic in ("bf16", "fp32"):
        engine = anyaccel.init_inference(tmp_path, dtype=dtype, kv_cache=arithmetic)
        with torch.inference_mode():
            logits.append(engine(ids.to(engine.device)).logits.cpu().float())
        if arithmetic == "bf16":
            layer = engine.native.model.executor.decoder.layers[0]
            matrices = (layer.mixer.qkv.weight, layer.mixer.out.weight, layer.mlp.gate_up.weight)
            assert all(each._kernels is not None or each._product is not None for each in matrices)
    assert float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()) < 0.03


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "qwen3_next", "jamba"])
def test_replayed_graphs_give_the_tokens_of_eager_steps(name: str) -> None:
    model = anyaccel.init_inference(family_cases.build(name, positions=512), dtype="fp32").native.model
    graphs = model.executor.graphs
    assert graphs.usable
    answers = []
    for usable in (True, False):
        graphs.usable = usable
        requests = [Request(model, [3 + i for i in range(count)], {"max_new_tokens": 40}) for count in (5, 17, 40)]
        while not all(request.finished for request in requests):
            model.step([request for request in requests if not request.finished])
        answers.append([request.tokens for request in requests])
    assert graphs.taken >= 39
    assert answers[0] == answers[1]

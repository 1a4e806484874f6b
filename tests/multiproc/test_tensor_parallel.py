# SPDX-License-Identifier: Apache-2.0
"""Sharded models against the same models whole: logits, generation, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import families
import ranks
from anyaccel import comm
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import InferenceEngine, generate_tokens

PROMPT = [5, 17, 99, 3, 64, 28, 101]


def logits_of(model: Any, ids: list[int] = PROMPT) -> torch.Tensor:
    """Prefill and then two decoding steps through the cache, so that both paths are compared."""
    with torch.inference_mode():
        prefill = model(torch.tensor([ids]), use_cache=True)
        collected = [prefill.logits[0]]
        cache = prefill.past_key_values
        for token in (7, 77):
            step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            collected.append(step.logits[0])
    return torch.cat(collected)


def sharded_against_whole(family: str) -> tuple[float, int, int, dict[str, str]]:
    """Largest difference of the logits relative to their size, parameters of this rank, of the whole, what is whole."""
    want = logits_of(families.build(family))
    model = families.build(family)
    whole = sum(p.numel() for p in model.parameters())
    engine = anyaccel.init_inference(
        model, dtype="fp32", runtime="plain", tensor_parallel={"tp_size": comm.get_world_size()}
    )
    got = logits_of(engine)
    error = float((got - want).abs().max() / want.abs().max())
    return error, sum(p.numel() for p in engine.parameters()), whole, engine.plan.whole


@pytest.mark.parametrize("family", families.FAMILIES)
def test_two_ranks_give_the_logits_of_the_whole_model(family: str) -> None:
    for error, own, whole, whole_blocks in ranks.run(sharded_against_whole, 2, family):
        assert error < 1e-4
        assert own < whole
        part, word = families.WHOLE.get(family, ("", ""))
        if part:
            assert whole_blocks
            assert all(part in name and word in why for name, why in whole_blocks.items()), whole_blocks
        else:
            assert not whole_blocks


@pytest.mark.parametrize(("family", "world_size"), [("llama", 3), ("llama-9-heads", 4), ("phi3", 4), ("qwen3", 6)])
def test_uneven_heads_and_replicated_kv_heads(family: str, world_size: int) -> None:
    for error, _, _, whole_blocks in ranks.run(sharded_against_whole, world_size, family):
        assert error < 1e-4
        assert not whole_blocks


def another_runtime(family: str, runtime: str) -> tuple[float, float, bool]:
    """Relative errors of logits and of generated ids (0 or 1), and whether the reference has not changed."""
    want = logits_of(families.build(family))
    ids = torch.tensor([PROMPT, [0, 0, *PROMPT[2:]]])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": 6}
    theirs = families.build(family).generate(ids, **options, do_sample=False)
    engine = anyaccel.init_inference(
        families.build(family), dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": comm.get_world_size()}
    )
    assert engine.runtime == runtime
    error = float((logits_of(engine) - want).abs().max() / want.abs().max())
    beams = engine.generate(ids, **options, do_sample=False, num_beams=2)
    seeds = [engine.generate(ids, **options, do_sample=True, seed=seed).tolist() for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    return error, float(not torch.equal(engine.generate(ids, **options, do_sample=False), theirs)), beams.shape[0] == 2


@pytest.mark.parametrize("runtime", ["native", "torch"])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("llama-9-heads", 3), ("gpt2", 2)])
def test_native_and_packed_ranks_give_what_the_whole_model_gives(family: str, world_size: int, runtime: str) -> None:
    for logits, ids, beams in ranks.run(another_runtime, world_size, family, runtime):
        assert logits < 1e-4
        assert ids == 0
        assert beams


def save(folder: Path, family: str, **options: Any) -> None:
    families.build(family).save_pretrained(folder, **options)


def from_folder(folder: str, dtype: str, tp_size: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    engine = anyaccel.init_inference(
        folder,
        dtype=dtype,
        runtime="plain",
        tensor_parallel={"tp_size": tp_size},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert all(p.dtype == engine.dtype and p.is_contiguous() for p in engine.parameters())
    assert ".safetensors" not in Path("/proc/self/maps").read_text()  # nothing points into the file any more
    return logits_of(engine), seen


@pytest.mark.parametrize(
    ("family", "shard_size"),
    [
        *((family, "60KB") for family in ("llama-9-heads", "phi3", "gpt2", "opt", "mixtral")),
        ("llama-9-heads", "10GB"),
        *(pytest.param(family, "10GB", marks=pytest.mark.slow) for family in ("phi3", "gpt2", "opt", "mixtral")),
    ],
)
def test_loading_slices_from_files(family: str, shard_size: str, tmp_path: Path) -> None:
    save(tmp_path, family, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    want = logits_of(families.build(family))
    for got, seen in ranks.run(from_folder, 2, str(tmp_path), "fp32", 2):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert seen[-1][0] == seen[-1][1]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def groups_of_two(family: str) -> float:
    """Four ranks, two copies of the model with two ranks each."""
    want = logits_of(families.build(family))
    engine = anyaccel.init_inference(families.build(family), dtype=torch.float32, tensor_parallel={"tp_size": 2})
    assert (engine.tp_size, engine.tp_rank) == (2, comm.get_rank() % 2)
    return float((logits_of(engine) - want).abs().max())


def test_several_tensor_parallel_groups_in_one_job() -> None:
    assert max(ranks.run(groups_of_two, 4, "llama")) < 1e-4


def generated(family: str, runtime: str) -> dict[str, list[int]]:
    engine = anyaccel.init_inference(
        families.build(family), dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": comm.get_world_size()}
    )
    engine.module.generation_config.eos_token_id = None
    ids = torch.tensor(PROMPT)
    torch.manual_seed(comm.get_rank())  # ranks start from different random states
    sampled = engine.generate(ids[None], max_new_tokens=20, do_sample=True, temperature=1.5)
    greedy = engine.generate(ids[None], max_new_tokens=20, do_sample=False)
    loop = generate_tokens(engine, ids, max_new_tokens=20)
    nucleus = generate_tokens(engine, ids, max_new_tokens=20, temperature=1.5, top_p=0.9, seed=3)
    return {
        "sampled": sampled[0].tolist(),
        "greedy": greedy[0, len(PROMPT) :].tolist(),
        "loop": list(loop),
        "nucleus": list(nucleus),
    }


@pytest.mark.parametrize("runtime", ["native", "torch", "plain"])
def test_every_rank_generates_the_same_tokens(runtime: str) -> None:
    first, second = ranks.run(generated, 2, "llama", runtime)
    assert first == second
    assert first["greedy"] == first["loop"]
    assert first["nucleus"] != first["greedy"]
    (alone,) = ranks.run(generated, 1, "llama", runtime)
    assert alone["greedy"] == first["greedy"]
    assert alone["nucleus"] == first["nucleus"]


def bf16_logits(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in bf16 on this many ranks, and in fp32 from the same bf16 weights."""
    exact = families.build(family)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    engine: InferenceEngine = anyaccel.init_inference(
        families.build(family),
        dtype=torch.bfloat16,
        runtime="plain",
        tensor_parallel={"tp_size": comm.get_world_size()},
    )
    return logits_of(engine).float(), logits_of(exact)


@pytest.mark.parametrize("family", ["llama-9-heads", "qwen2"])
def test_bf16_logits_differ_by_no_more_than_rounding(family: str) -> None:
    """Sharding changes where partial sums are rounded, so it must not add to the error that bf16 has anyway.

    Both runs are compared with fp32 arithmetic on the same weights: the sharded run's error may be at most twice the
    single process's, plus one bf16 rounding (2^-8) of the largest logit, the last step of either.
    """
    (single, exact), *_ = ranks.run(bf16_logits, 1, family)
    scale = float(exact.abs().max())
    own_error = float((single - exact).abs().max())
    for sharded, _ in ranks.run(bf16_logits, 2, family):
        assert float((sharded - exact).abs().max()) <= 2 * own_error + 2**-8 * scale
        assert float((sharded - single).abs().max()) <= 3 * own_error + 2**-8 * scale


def refused(tp_size: int, family: str) -> str:
    try:
        anyaccel.init_inference(families.build(family), dtype="fp32", tensor_parallel={"tp_size": tp_size})
    except (UsageError, ModelError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_tp_size_that_does_not_fit() -> None:
    for text in ranks.run(refused, 3, 2, "llama"):
        assert text.startswith("UsageError")
        assert "does not divide the 3 ranks" in text

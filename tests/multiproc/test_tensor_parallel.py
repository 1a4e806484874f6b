# SPDX-License-Identifier: Apache-2.0
"""Sharded models against the same models whole: logits, generation, memory."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
import ranks
from anyaccel import comm
from anyaccel.comm import shm
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import InferenceEngine, generate_tokens

PROMPT = [5, 17, 99, 3, 64, 28, 101]
# With the attention that transformers chooses itself, as users have it.
build = functools.partial(family_cases.build, attention="")
FAMILIES = (
    "llama",
    "llama-9-heads",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "granite",
    "phi",
    "phi3",
    "stablelm",
    "starcoder2",
    "cohere-norms",
    "olmo2",
    "gpt_neox",
    "gpt2",
    "gptj",
    "opt",
    "bloom",
    "falcon-heads",
    "mixtral",
    "glm4_moe",
    "diffllama",
    "stablelm-norms",
    "gpt_oss",
)
# Families whose attention (or MLP) stays whole on every rank, and a word of the reason.
WHOLE = {
    "olmo2": ("attn", "across heads"),
    "bloom": ("attention", "ALiBi"),
    "falcon-heads": ("attention", "fused"),
    "diffllama": ("attn", "across heads"),
    "stablelm-norms": ("attn", "across heads"),
}


def several(function: Callable[..., Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """What `function` returns for each case, or the traceback of what it raises: many cases in one job."""
    results: list[Any] = []
    for case in cases:
        try:
            results.append(function(*case))
        except Exception:  # noqa: BLE001  each test shows its own
            results.append(traceback.format_exc())
    return results


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
    want = logits_of(build(family))
    model = build(family)
    whole = sum(p.numel() for p in model.parameters())
    engine = anyaccel.init_inference(
        model, dtype="fp32", runtime="plain", tensor_parallel={"tp_size": comm.get_world_size()}
    )
    got = logits_of(engine)
    error = float((got - want).abs().max() / want.abs().max())
    return error, sum(p.numel() for p in engine.parameters()), whole, engine.plan.whole


@pytest.fixture(scope="module")
def of_two_ranks() -> Callable[[str], list[Any]]:
    """What each of two ranks finds of a family; one job for all of them."""
    each = functools.cache(lambda: ranks.run(several, 2, sharded_against_whole, [(family,) for family in FAMILIES]))
    return lambda family: [found[FAMILIES.index(family)] for found in each()]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_logits_of_the_whole_model(family: str, of_two_ranks: Callable[[str], list[Any]]) -> None:
    for found in of_two_ranks(family):
        assert not isinstance(found, str), found
        error, own, whole, whole_blocks = found
        assert error < 1e-4
        assert own < whole
        part, word = WHOLE.get(family, ("", ""))
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


def another_runtime(family: str, runtime: str) -> tuple[float, bool]:
    """Relative error of the logits, and whether greedy and beam search give the ids that the whole model gives."""
    want = logits_of(build(family))
    ids = torch.tensor([PROMPT, [0, 0, *PROMPT[2:]]])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": 6}
    whole = build(family)
    engine = anyaccel.init_inference(
        build(family), dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": comm.get_world_size()}
    )
    assert engine.runtime == runtime
    error = float((logits_of(engine) - want).abs().max() / want.abs().max())
    seeds = [engine.generate(ids, **options, do_sample=True, seed=seed).tolist() for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    greedy, beams = (
        torch.equal(engine.generate(ids, **options, **how), whole.generate(ids, **options, **how))
        for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 2})
    )
    return error, greedy and beams


@pytest.mark.parametrize(("family", "world_size"), [("llama", 2), ("llama-9-heads", 3), ("gpt2", 2)])
def test_native_and_packed_ranks_give_what_the_whole_model_gives(family: str, world_size: int) -> None:
    for results in ranks.run(several, world_size, another_runtime, [(family, "native"), (family, "torch")]):
        for found in results:
            assert not isinstance(found, str), found
            error, same = found
            assert error < 1e-4
            assert same


def as_if_on_hosts(family: str) -> tuple[float, bool]:
    """`another_runtime` where each rank is told that it is alone on its host."""
    shm.host_identity = lambda: f"host {comm.get_rank()}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return another_runtime(family, "native")


def test_native_ranks_of_several_hosts_give_what_the_whole_model_gives() -> None:
    for error, same in ranks.run(as_if_on_hosts, 2, "llama"):
        assert error < 1e-4
        assert same


def save(folder: Path, family: str, **options: Any) -> None:
    build(family).save_pretrained(folder, **options)


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


def _load_slices(families: Sequence[str], shard_size: str, folder: Path) -> None:
    for family in families:
        save(folder / family, family, max_shard_size=shard_size)
        assert (folder / family / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    cases = [(str(folder / family), "fp32", 2) for family in families]
    for results in ranks.run(several, 2, from_folder, cases):
        for family, found in zip(families, results, strict=True):
            assert not isinstance(found, str), found
            got, seen = found
            torch.testing.assert_close(got, logits_of(build(family)), rtol=1e-4, atol=1e-4)
            assert seen[-1][0] == seen[-1][1]
            assert [done for done, _ in seen] == sorted(done for done, _ in seen)


_LOADED = ("llama-9-heads", "phi3", "gpt2", "opt", "mixtral")


def test_loading_slices_from_several_files(tmp_path: Path) -> None:
    _load_slices(_LOADED, "60KB", tmp_path)


def test_loading_slices_from_one_file(tmp_path: Path) -> None:
    _load_slices(_LOADED, "10GB", tmp_path)


def groups_of_two(family: str) -> float:
    """Four ranks, two copies of the model with two ranks each."""
    want = logits_of(build(family))
    engine = anyaccel.init_inference(build(family), dtype=torch.float32, tensor_parallel={"tp_size": 2})
    assert (engine.tp_size, engine.tp_rank) == (2, comm.get_rank() % 2)
    return float((logits_of(engine) - want).abs().max())


def test_several_tensor_parallel_groups_in_one_job() -> None:
    assert max(ranks.run(groups_of_two, 4, "llama")) < 1e-4


def generated(family: str, runtime: str) -> dict[str, list[int]]:
    engine = anyaccel.init_inference(
        build(family), dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": comm.get_world_size()}
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


def test_every_rank_generates_the_same_tokens() -> None:
    cases = [("llama", runtime) for runtime in ("native", "torch", "plain")]
    (alone,) = ranks.run(several, 1, generated, cases)
    for first, second, one in zip(*ranks.run(several, 2, generated, cases), alone, strict=True):
        for found in (first, second, one):
            assert not isinstance(found, str), found
        assert first == second
        assert first["greedy"] == first["loop"] == one["greedy"]
        assert first["nucleus"] == one["nucleus"] != first["greedy"]


def bf16_logits(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in bf16 on this many ranks, and in fp32 from the same bf16 weights."""
    exact = build(family)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    engine: InferenceEngine = anyaccel.init_inference(
        build(family),
        dtype=torch.bfloat16,
        runtime="plain",
        tensor_parallel={"tp_size": comm.get_world_size()},
    )
    return logits_of(engine).float(), logits_of(exact)


def test_bf16_logits_differ_by_no_more_than_rounding() -> None:
    """Sharding changes where partial sums are rounded, so it must not add to the error that bf16 has anyway.

    Both runs are compared with fp32 arithmetic on the same weights: the sharded run's error may be at most twice the
    single process's, plus one bf16 rounding (2^-8) of the largest logit, the last step of either.
    """
    cases = [("llama-9-heads",), ("qwen2",)]
    (alone,) = ranks.run(several, 1, bf16_logits, cases)
    for both in ranks.run(several, 2, bf16_logits, cases):
        for one, found in zip(alone, both, strict=True):
            assert not isinstance(one, str), one
            assert not isinstance(found, str), found
            (single, exact), (sharded, _) = one, found
            scale = float(exact.abs().max())
            own_error = float((single - exact).abs().max())
            assert own_error > 0
            assert float((sharded - exact).abs().max()) <= 2 * own_error + 2**-8 * scale
            assert float((sharded - single).abs().max()) <= 3 * own_error + 2**-8 * scale


def refused(tp_size: int, family: str) -> str:
    try:
        anyaccel.init_inference(build(family), dtype="fp32", tensor_parallel={"tp_size": tp_size})
    except (UsageError, ModelError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_tp_size_that_does_not_fit() -> None:
    for text in ranks.run(refused, 3, 2, "llama"):
        assert text.startswith("UsageError")
        assert "does not divide the 3 ranks" in text

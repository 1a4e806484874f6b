# SPDX-License-Identifier: Apache-2.0
"""Experts that do not fit in memory stay in the file of packed weights: the same answers, within the bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions

LAYERS, EXPERTS, HIDDEN, FEATURES = 4, 8, 64, 128
EXPERT_BYTES = 3 * HIDDEN * FEATURES * 4
PROMPT = [3, 7, 11, 19, 23]


def save(folder: Path, **changes: Any) -> Path:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        **{
            "vocab_size": 96,
            "hidden_size": HIDDEN,
            "intermediate_size": FEATURES,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            **changes,
        }
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options(memory: int = 0, **others: Any) -> ModelOptions:
    return ModelOptions("fp32", cache_bytes=1 << 20, memory=memory, threads=2, **others)


def bound(native: Any, slots: int) -> int:
    """The memory in which so many experts have room beside the rest."""
    return int(native.model.weight_bytes) - LAYERS * EXPERTS * EXPERT_BYTES + slots * EXPERT_BYTES + (1 << 20)


def answers(native: Any, prompts: list[list[int]], count: int = 12) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of all prompts at once, with their log-probabilities."""
    from anyaccel._llm import Request

    requests = [Request(native.model, prompt, {"max_new_tokens": count, "logprobs": 1}) for prompt in prompts]
    while not all(request.finished for request in requests):
        native.model.step([request for request in requests if not request.finished], exact=True)
    return [(list(each.tokens), [score for _, score, _ in each.take_scores()]) for each in requests]


@pytest.mark.parametrize("slots", [EXPERTS, 11, LAYERS * EXPERTS - 1])
def test_answers_are_the_same_bit_by_bit(folder: Path, slots: int) -> None:
    whole = load_native(folder, options())
    assert whole.model.expert_stats() is None and whole.resident_bytes == whole.model.weight_bytes
    prompts = [PROMPT, [5] * 40, list(range(3, 93)), [8, 9]]  # steps of few and of many tokens
    expected = answers(whole, prompts)
    native = load_native(folder, options(bound(whole, slots)))
    assert native.cached  # the file that the whole model left
    assert answers(native, prompts) == expected
    assert answers(native, [PROMPT]) == answers(whole, [PROMPT])
    stats = native.model.expert_stats()
    assert stats is not None
    assert native.resident_bytes == native.model.weight_bytes - (LAYERS * EXPERTS - slots) * EXPERT_BYTES
    assert 0 < stats["missed"] < stats["used"]
    assert 0 < stats["bytes"] <= (stats["missed"] + stats["ahead"]) * EXPERT_BYTES
    assert stats["ahead_used"] <= stats["ahead"]


def test_hot_experts_stay(folder: Path) -> None:
    whole = load_native(folder, options())
    native = load_native(folder, options(bound(whole, LAYERS * EXPERTS // 2)))
    answers(native, [[7] * 3], 30)
    before = native.model.expert_stats()
    answers(native, [[7] * 3], 30)
    after = native.model.expert_stats()
    assert before is not None and after is not None
    read = after["missed"] + after["ahead"] - before["missed"] - before["ahead"]
    assert read < 0.5 * (after["used"] - before["used"])  # half of them have room, and those in use are fewer


def test_packed_piece_by_piece(folder: Path, cache: Path) -> None:
    whole = load_native(folder, options())
    expected, size = answers(whole, [PROMPT]), whole.model.weight_bytes
    memory = bound(whole, EXPERTS + 3)
    (file,) = cache.glob("packed/*/weights")
    content = file.read_bytes()
    del whole
    file.parent.rename(cache / "other")
    native = load_native(folder, options(memory))
    assert answers(native, [PROMPT]) == expected
    assert file.stat().st_size == size and file.read_bytes() == content
    assert load_native(folder, options()).cached  # either makes what the other reads


def test_a_damaged_expert_is_an_error_of_the_step(folder: Path, cache: Path) -> None:
    whole = load_native(folder, options())
    memory = bound(whole, EXPERTS)
    (file,) = cache.glob("packed/*/weights")
    with file.open("r+b") as opened:
        opened.seek(-EXPERT_BYTES * EXPERTS, os.SEEK_END)  # of the last layer
        opened.write(b"\xff" * EXPERT_BYTES * EXPERTS)
    native = load_native(folder, options(memory))  # only what every token needs is checked now
    with pytest.raises(ModelError, match=r"checksum of expert .* damaged"):
        answers(native, [PROMPT])
    with pytest.raises(ModelError, match="damaged"):
        answers(native, [PROMPT])
    whole_again = load_native(folder, options())
    assert not whole_again.cached  # which checks all, and packs again
    assert answers(whole_again, [PROMPT]) == answers(whole, [PROMPT])


def test_what_cannot_be(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_native(folder, options())
    with pytest.raises(UsageError, match=r"memory=\d+: .* experts of one layer .* or more") as caught:
        load_native(folder, options(bound(whole, EXPERTS - 1)))
    least = int(str(caught.value).split("allow ")[1].split()[0])
    assert load_native(folder, options(least + (1 << 20))).model.expert_stats() is not None
    with pytest.raises(UsageError, match=r"memory=.*more than its part cache_bytes"):
        options(1 << 20)
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = tmp_path / "dense"
    LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128)).save_pretrained(dense)
    with pytest.raises(UsageError, match="every token needs all of them"):
        load_native(dense, options((1 << 20) + 5000))
    from transformers import AutoModelForCausalLM

    with pytest.raises(UsageError, match="models on disk alone"):
        load_native(AutoModelForCausalLM.from_pretrained(folder), options(bound(whole, EXPERTS)))
    memory = bound(whole, EXPERTS)
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "5000")
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "other"))
    with pytest.raises(UsageError, match="ANYACCEL_PACKED_CACHE_BYTES=5000 is less"):
        load_native(folder, options(memory))
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "0")
    with pytest.raises(UsageError, match="ANYACCEL_PACKED_CACHE_BYTES is not 0"):
        load_native(folder, options(memory))


@pytest.mark.parametrize("runtime", ["torch", "plain"])
def test_other_runtimes_refuse_what_they_cannot_hold(folder: Path, runtime: str) -> None:
    import anyaccel

    with pytest.raises(UsageError, match=f"only the native runtime leaves experts .*{runtime}"):
        anyaccel.init_inference(folder, runtime=runtime, memory=1 << 20)


_PEAK = """
import json, sys
from pathlib import Path
from anyaccel.host_memory import high_water_mark
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions
from anyaccel._llm import Request
import numpy
folder, memory = Path(sys.argv[1]), int(sys.argv[2])
before = high_water_mark()
native = load_native(folder, ModelOptions("bf16", cache_bytes=1 << 20, memory=memory, threads=2))
request = Request(native.model, [3, 7, 11] * 20, {"max_new_tokens": 20})
while not request.finished:
    native.model.step([request])
print(json.dumps([before, high_water_mark(), native.model.weight_bytes, native.cached]))
"""


def test_no_more_than_the_bound_is_ever_in_memory(tmp_path: Path) -> None:
    """Packing, loading and answering, of weights of five times the bound, most of which every prompt needs."""
    folder = save(
        tmp_path / "large", hidden_size=256, intermediate_size=1024, num_local_experts=16, num_hidden_layers=6
    )
    memory = 30 << 20
    for _ in range(2):  # packed, and from the cache
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, str(folder), str(memory)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        before, peak, weights, _ = json.loads(done.stdout)
        assert weights > 4.5 * memory
        assert peak - before < memory + (40 << 20)  # what is read at a time, activations, threads


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_the_commands_have_the_bound(command: str) -> None:
    import importlib

    from anyaccel.cli._model_options import model_of

    parser = importlib.import_module(f"anyaccel.cli.{command}").build_parser()
    given = ["--memory", "123456789", *(["a prompt"] if command == "generate" else [])]
    assert model_of(parser.parse_args(given)).memory == 123456789

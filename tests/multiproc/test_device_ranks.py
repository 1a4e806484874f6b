# SPDX-License-Identifier: Apache-2.0
"""The decoder in torch's operators on several processes: logits of one process, native's tokens, errors in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import family_cases
import quantised_cases
import ranks
from anyaccel import comm
from anyaccel._llm import Request
from anyaccel.errors import AnyAccelError, CommError, ModelError, PeerLostError
from recorded_graph import recording_accelerator

pytest.importorskip("transformers")

IDS_BT = torch.randint(3, 131, (2, 11), generator=torch.Generator().manual_seed(5))
MORE = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Grouped heads, heads that both ranks have, experts, latents, biases everywhere, norms across heads, a layer with one
# sum for attention and MLP, ALiBi, soft caps and windows, sinks, experts that all tokens go through, recurrent states.
FAMILIES = (
    "llama",
    "llama-mqa-biases",
    "llama-mha-tied",
    "llama-9-heads",
    "mixtral",
    "deepseek_v3",
    "gpt2",
    "olmo2",
    "gpt_neox",
    "bloom",
    "gemma2",
    "gpt_oss",
    "qwen2_moe",
    "qwen3_next",
    "kimi_linear",
    "mamba2",
    "jamba",
    "lfm2",
    "recurrent_gemma",
)


def _engine(name: str, folder: str, runtime: str, size: int) -> Any:
    return anyaccel.init_inference(f"{folder}/{name}", dtype="fp32", tensor_parallel={"tp_size": size}, runtime=runtime)


def on_a_rank(names: tuple[str, ...], folder: str) -> list[tuple[torch.Tensor, torch.Tensor, list[list[int]], int]]:
    results = []
    for name in names:
        engine = _engine(name, folder, "device", comm.get_world_size())
        assert (engine.runtime, engine.why) == ("device", "")
        logits = engine(IDS_BT).logits
        greedy = engine.generate(IDS_BT, max_new_tokens=16, **MORE)
        results.append((logits, greedy, _sampled(engine), engine.native.model.weight_bytes))
    return results


def _sampled(engine: Any) -> list[list[int]]:
    """Requests in company, one of them sampled and one with penalties."""
    model = engine.native.model
    options = ({}, {"do_sample": True, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.3, "logprobs": 2})
    requests = [
        Request(model, list(range(4, 9 + 9 * index)), {"max_new_tokens": 8, **more})
        for index, more in enumerate(options)
    ]
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a folder of each family's model."""
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        family_cases.build(name).save_pretrained(root / name)
    return str(root)


_QUICK = ("llama-9-heads", "mixtral", "deepseek_v3", "gpt_neox", "gemma2", "qwen3_next")


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, _QUICK),
        pytest.param(2, tuple(name for name in FAMILIES if name not in _QUICK), marks=pytest.mark.slow),
        (3, ("llama", "deepseek_v3", "olmo2")),
    ],
)
def test_ranks_have_the_logits_of_transformers_and_the_tokens_of_native(
    size: int, names: tuple[str, ...], folder: str
) -> None:
    results = ranks.run(on_a_rank, size, names, folder, timeout=300)
    for index, name in enumerate(names):
        with torch.inference_mode():
            expected = family_cases.build(name)(IDS_BT).logits
        native = _engine(name, folder, "native", 1)
        whole = _engine(name, folder, "device", 1).native.model.weight_bytes
        greedy, sampled = native.generate(IDS_BT, max_new_tokens=16, **MORE), _sampled(native)
        for logits, tokens, answers, weight_bytes in (of_rank[index] for of_rank in results):
            assert torch.equal(logits, results[0][index][0]), name
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4, msg=lambda text, name=name: name + text)
            assert torch.equal(tokens, greedy), name
            assert answers == sampled, name
            assert weight_bytes < 0.9 * whole, name


def _quantised(folder: str, name: str, size: int) -> torch.Tensor:
    engine = anyaccel.init_inference(
        f"{folder}/{name}", dtype="auto", kv_cache="fp32", tensor_parallel={"tp_size": size}, runtime="device"
    )
    assert engine.runtime == "device"
    logits: torch.Tensor = engine(IDS_BT % quantised_cases.VOCAB).logits
    return logits


def quantised_on_a_rank(folder: str, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [_quantised(folder, name, comm.get_world_size()) for name in names]


def test_ranks_share_quantised_weights(tmp_path: Path) -> None:
    """Rows and columns of whole numbers, with their scales and minima."""
    names = ("awq", "gptq-row", "gptq-8-asym", "compressed-8")
    for name in names:
        (tmp_path / name).mkdir()
        quantised_cases.make(name, tmp_path / name)
    results = ranks.run(quantised_on_a_rank, 2, str(tmp_path), names, timeout=300)
    for index, name in enumerate(names):
        expected = _quantised(str(tmp_path), name, 1)
        for of_rank in results:
            torch.testing.assert_close(of_rank[index], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def _request_of(model: Any, prompt: list[int], most: int = 0) -> Any:
    return Request(model, prompt, {"max_new_tokens": most})


def quantised(folder: str) -> list[list[torch.Tensor]]:
    """Logits on both executors."""
    return [
        [
            anyaccel.init_inference(
                f"{folder}/{name}", dtype=dtype, kv_cache="fp32", tensor_parallel={"tp_size": 2}, runtime=runtime
            )(IDS_BT).logits
            for runtime in ("device", "native")
        ]
        for name, dtype in (("llama", "int8"), ("llama", "int4"), ("mixtral", "int8"), ("gpt2", "int8"))
    ]


def test_quantised_weights_are_divided(folder: str) -> None:
    first, second = ranks.run(quantised, 2, folder, timeout=300)
    for (device, native), (other, _) in zip(first, second, strict=True):
        assert torch.equal(device, other)
        assert float((device - native).abs().max() / native.abs().max()) < 0.02  # native rounds activations to 8 bits


def with_graphs(folder: str, names: tuple[str, ...]) -> list[tuple[list[list[int]], list[list[int]], int, float]]:
    """Answers by replays, and by steps as they are called; how many replays, and how many graphs a step has."""
    found = []
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            accelerator = recording_accelerator(patch)
            engine = _engine(name, folder, "device", 2)
            replayed = _sampled(engine)
            graphs = engine.native.model.executor.graphs
            graphs.usable = False
            a_step = len(accelerator.graphs) / graphs.captured
            found.append((replayed, _sampled(engine), graphs.taken, a_step))
    return found


def test_a_step_whose_sums_no_graph_takes_is_captured_in_pieces(folder: str) -> None:
    # A sum of the embedding and two a layer; two more where norms are across heads; DeepSeek's has three layers.
    names = {"llama-9-heads": 5, "olmo2": 9, "mixtral": 5, "deepseek_v3": 7}
    first, second = ranks.run(with_graphs, 2, folder, tuple(names), timeout=300)
    assert first == second
    for (name, sums), (replayed, called, taken, a_step) in zip(names.items(), first, strict=True):
        assert replayed == called, name
        assert taken >= 7, name
        assert a_step == sums + 1, name


def that_disagree(folder: str) -> str:
    model = _engine("llama", folder, "device", 2).native.model
    good = _request_of(model, [5, 6, 7], 4)
    model.step([good])
    try:
        model.step([_request_of(model, [5, 6 + comm.get_rank()])])
    except CommError as error:
        text = str(error)
    else:
        text = ""
    model.step([good])  # all ranks go on together
    comm.barrier()
    return text


def test_a_rank_with_another_prompt_says_so(folder: str) -> None:
    assert "ranks disagree" in ranks.run(that_disagree, 2, folder)[1]


def with_little_room(folder: str) -> tuple[int, str, str, list[int]]:
    """Rank 0 may have less cache than rank 1, whose heads are fewer; then a device without memory."""
    engine = anyaccel.init_inference(
        f"{folder}/llama-9-heads",
        dtype="fp32",
        tensor_parallel={"tp_size": 2},
        runtime="device",
        cache_bytes=5 << 14,
    )
    model = engine.native.model
    told = []
    for full in (False, True):
        if full:
            model.executor.cache.limit_bytes = 1 << 40
            if comm.get_rank() == 0:
                model.executor.cache.layers[0] = _Full(model.executor.cache.layers[0])
        with pytest.raises(ModelError) as error:
            model.step([_request_of(model, list(range(3, 53)), 2) for _ in range(9)])
        told.append(str(error.value))
    if comm.get_rank() == 0:
        model.executor.cache.layers[0] = model.executor.cache.layers[0].tensor
    pages = len(model.executor.cache.layers[1])
    last = _request_of(model, [5, 6, 7], 3)
    model.step([last])
    return pages, told[0], told[1], last.tokens


class _Full:
    """A tensor of a device that has no memory for another one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape

    def __getitem__(self, key: Any) -> Any:
        return self if key == slice(None, self.shape[0]) else self.tensor[key]

    def new_zeros(self, *_shape: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")


def test_a_cache_that_is_full_on_one_rank_is_full_on_all(folder: str) -> None:
    (pages, room, memory, tokens), (pages_1, room_1, memory_1, tokens_1) = ranks.run(with_little_room, 2, folder)
    assert (pages, tokens) == (pages_1, tokens_1)
    for text in (room, room_1):
        assert "the key/value cache needs" in text
    assert "the device has no memory" in memory
    assert "the device of another rank has no memory" in memory_1


def that_lose_one(folder: str) -> None:
    engine = _engine("llama", folder, "device", 2)
    for count in range(100_000):
        if comm.get_rank() == 1 and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            engine(IDS_BT)
        except AnyAccelError as error:
            print(f"lost after {time.monotonic() - start:.0f} s: {type(error).__name__} {error}", flush=True)
            os._exit(7)


def test_a_rank_that_dies(folder: str, tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(that_lose_one, 2, (folder,), tmp_path), tmp_path)
    assert outcome[0][0] == 7, outcome[0][1]
    assert PeerLostError.__name__ in outcome[0][1]
    assert "rank 1" in outcome[0][1]
    assert outcome[1][0] == -signal.SIGKILL


def that_cannot_load(folder: str) -> str:
    path = f"{folder}/llama" if comm.get_rank() == 0 else f"{folder}/nothing"
    try:
        anyaccel.init_inference(path, dtype="fp32", tensor_parallel={"tp_size": 2}, runtime="device")
    except AnyAccelError as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_is_that_of_all(folder: str) -> None:
    first, second = ranks.run(that_cannot_load, 2, folder)
    assert first.startswith("rank 1: ")
    assert "nothing" in first
    assert "nothing" in second

# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism of the native decoder: the bits of one process, errors instead of waiting for ever."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import anyaccel
import native_models
import ranks
from anyaccel import _llm, comm
from anyaccel.errors import CommError, CommTimeoutError, ModelError, PeerLostError
from native_models import PROMPTS

pytest.importorskip("transformers")


def _connected(name: str, pp: int, timeout: float = 60.0, hosts: tuple[int, ...] = (), **options: Any) -> Any:
    model = native_models.rank_of(name, comm.get_rank(), comm.get_world_size(), pp=pp, **options)
    own = model.create_segment(timeout, False, list(hosts), ["127.0.0.1"] if hosts else [])
    everyone: list[Any] = [None] * comm.get_world_size()
    torch.distributed.all_gather_object(everyone, (own, os.getpid()))
    model.connect([each[0] for each in everyone], [each[1] for each in everyone])
    comm.barrier()
    model.unlink()
    return model


DEEP = "smollm3"  # with four layers
LONG = [index * 7 % 100 + 3 for index in range(90)]  # passes in several parts


def _logits(model: Any, vocab: int) -> torch.Tensor:
    """Of prompts at once, large and small steps, and of two tokens after each."""
    prompts = [*PROMPTS, LONG[:60]]
    sequences = [model.create() for _ in prompts]
    found = [native_models.logits_of(model, vocab, sequences, prompts)]
    for token in (7, 77):
        found.append(native_models.logits_of(model, vocab, sequences, [[token]] * len(prompts)))
    return torch.cat(found)


def _others(model: Any) -> list[Any]:
    """Everything beside plain answers: log-probabilities of answers and prompts, embeddings, and exact steps."""
    options = {"max_new_tokens": 3, "logprobs": 2}
    first = _llm.Request(model, PROMPTS[0], options | {"prompt_logprobs": 1})
    second = _llm.Request(model, PROMPTS[1], options)
    pooled = _llm.Request(model, PROMPTS[0], {"goal": "mean"})
    model.step([first, second, pooled])
    while not (first.finished and second.finished):
        model.step([first, second], [0, 0], True)
    return [first.tokens, first.take_scores(), first.prompt_scores(), second.take_scores(), pooled.embedding()]


def on_a_rank(cases: list[tuple[str, int, tuple[int, ...]]]) -> list[tuple[torch.Tensor, list[Any], list[Any]]]:
    results = []
    for name, pp, hosts in cases:
        model = _connected(name, pp, hosts=hosts)
        vocab = native_models.whole(name)[1].vocab
        results.append((_logits(model, vocab), native_models.answers_of(model), _others(model)))
    return results


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [("llama", 2, ()), ("gemma2", 2, (0, 1))]),
        pytest.param(2, [("deepseek_v3", 2, ()), ("gpt2", 2, (0, 1))], marks=pytest.mark.slow),
        pytest.param(
            4,
            [("llama", 2, ()), ("qwen3_moe", 2, (0, 0, 1, 1)), ("llama", 2, (0, 1, 1, 2)), (DEEP, 4, (0, 0, 1, 2))],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stages_have_the_bits_of_one_process(size: int, cases: list[tuple[str, int, tuple[int, ...]]]) -> None:
    """Cases: a model, its stages, and the hosts of the ranks, which talk through TCP where they are several."""
    results = ranks.run(on_a_rank, size, cases)
    for index, (name, pp, _) in enumerate(cases):
        model = native_models.native(name)
        vocab = native_models.whole(name)[1].vocab
        logits, answers, others = _logits(model, vocab), native_models.answers_of(model), _others(model)
        for found, tokens, more in (of_rank[index] for of_rank in results):
            # How many tokens an expert has depends on the micro-batches, and AVX-512 multiplies few and many otherwise.
            experts = name in ("deepseek_v3", "qwen3_moe")
            if size == pp and not experts:
                assert torch.equal(found, logits), name
                assert more == others, name
            else:
                assert torch.equal(found, results[0][index][0]), name
                assert float((found - logits).abs().max() / logits.abs().max()) < 1e-5, name
                assert more[0] == others[0], name
            assert tokens == answers, name


def that_disagree(hosts: tuple[int, ...]) -> list[str]:
    model = _connected("llama", 2, hosts=hosts)
    said = []
    for _ in range(2):
        with pytest.raises(CommError) as raised:
            model.step([_llm.Request(model, [5 + comm.get_rank(), 6, 7], {"max_new_tokens": 4})])
        said.append(str(raised.value))
    return said


SHARED = pytest.param((), marks=pytest.mark.slow)  # memory; what differs little from connections


@pytest.mark.parametrize("hosts", [SHARED, (0, 1)], ids=str)
def test_stages_that_disagree(hosts: tuple[int, ...]) -> None:
    _, last = ranks.run(that_disagree, 2, hosts)
    assert last[0] == "ranks disagree: rank 0 processes other tokens than rank 1"
    assert "broken by an earlier error" in last[1]


def with_a_request_that_fails() -> tuple[str, list[int]]:
    """Only the last stage sees that no logits are left; all of them say so, and go on as they were."""
    model = _connected("llama", 2, hosts=(0, 1))
    bad = _llm.Request(model, [5, 6, 7], {"max_new_tokens": 4})
    bad.set_mask(bytes(20))  # of 131 tokens none may come
    with pytest.raises(ModelError) as raised:
        model.step([bad])
    good = _llm.Request(model, [5, 6, 7], {"max_new_tokens": 4})
    while not good.finished:
        model.step([good])
    return str(raised.value), good.tokens


def test_an_error_of_the_last_stage_is_that_of_all() -> None:
    results = ranks.run(with_a_request_that_fails, 2)
    model = native_models.native("llama")
    good = _llm.Request(model, [5, 6, 7], {"max_new_tokens": 4})
    while not good.finished:
        model.step([good])
    for text, tokens in results:
        assert "NaN or infinite" in text
        assert tokens == good.tokens


def that_wait(hosts: tuple[int, ...]) -> str:
    model = _connected("llama", 2, timeout=1.0, hosts=hosts)
    text = ""
    if comm.get_rank() == 1:
        try:
            native_models.logits_of(model, 131, [model.create()], [[5]])
        except CommTimeoutError as error:
            text = str(error)
        with pytest.raises(CommError, match="broken"):
            native_models.logits_of(model, 131, [model.create()], [[5]])
    comm.barrier()
    return text


@pytest.mark.parametrize("hosts", [(), (0, 1)], ids=str)
def test_a_stage_that_does_not_come(hosts: tuple[int, ...]) -> None:
    _, text = ranks.run(that_wait, 2, hosts)
    assert re.search(r"rank 0 (\(pid \d+\)|on \S+) did not come within the timeout of 1 s", text)


def that_lose_one(hosts: tuple[int, ...]) -> str:
    model = _connected(DEEP, 3, hosts=hosts)
    sequence = model.create()
    try:
        for step in range(100_000):
            if comm.get_rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            native_models.logits_of(model, 131, [sequence], [[5]])
            model.truncate(sequence, 0)
    except CommError as error:
        print("lost:", type(error).__name__, error, flush=True)
        os._exit(7)
    return ""


@pytest.mark.parametrize("hosts", [SHARED, (0, 1, 2)], ids=str)
def test_a_stage_that_dies(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    outcome = ranks.finish(ranks.start(that_lose_one, 3, (hosts,), tmp_path), tmp_path)
    assert outcome[1][0] == -signal.SIGKILL
    for rank in (0, 2):
        assert outcome[rank][0] == 7
        assert "lost: " in outcome[rank][1] and "rank 1" in outcome[rank][1]
    assert PeerLostError.__name__ in outcome[0][1] + outcome[2][1]


def with_engines(folder: str) -> tuple[list[int], list[int], torch.Tensor, int]:
    ids = torch.tensor([LONG])
    options = {"dtype": "bf16", "runtime": "native", "threads": 1}
    engine = anyaccel.init_inference(folder, pipeline_parallel={"size": comm.get_world_size()}, **options)
    greedy = engine.generate(ids, max_new_tokens=5, do_sample=False)
    sampled = engine.generate(ids, max_new_tokens=5, do_sample=True, seed=3, output_scores=True)
    from transformers import AutoModelForCausalLM

    in_memory = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = anyaccel.init_inference(in_memory, pipeline_parallel={"size": comm.get_world_size()}, **options)
    assert torch.equal(other.generate(ids, max_new_tokens=5, do_sample=False), greedy)
    assert engine.native is not None
    assert engine.native.stage == comm.get_rank() and engine.tp_size == 1
    return greedy[0].tolist(), sampled[0].tolist(), engine(ids).logits, engine.native.model.weight_bytes


@pytest.mark.slow
def test_engines_on_stages(tmp_path: Path) -> None:
    native_models.whole("llama", 128)[0].save_pretrained(tmp_path)
    (alone,) = ranks.run(with_engines, 1, str(tmp_path))
    both = ranks.run(with_engines, 2, str(tmp_path))
    for found in both:
        assert found[:2] == alone[:2]
        assert torch.equal(found[2], alone[2])
        assert found[3] < alone[3]

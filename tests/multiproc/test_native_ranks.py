# SPDX-License-Identifier: Apache-2.0
"""The native decoder on several processes: the same logits on all of them, errors instead of waiting for ever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import native_models
import ranks
from anyaccel import comm
from anyaccel.errors import CommError, CommTimeoutError, PeerLostError

pytest.importorskip("transformers")

PROMPTS = [[5, 17, 99, 3, 64], list(range(3, 43)), [8]]


def _connected(name: str, timeout: float = 60.0, threads: int = 1) -> Any:
    model = native_models.rank_of(name, comm.get_rank(), comm.get_world_size(), threads)
    mine = (model.create_segment(timeout), os.getpid())
    everyone: list[Any] = [None] * comm.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    model.connect([each[0] for each in everyone], [each[1] for each in everyone])
    comm.barrier()
    model.unlink()
    return model


def _logits(model: Any, vocab: int) -> torch.Tensor:
    """Of prompts at once, large and small steps, and of two tokens after each."""
    sequences = [model.create() for _ in PROMPTS]
    found = [native_models.logits_of(model, vocab, sequences, PROMPTS)]
    for token in (7, 77):
        found.append(native_models.logits_of(model, vocab, sequences, [[token]] * len(PROMPTS)))
    return torch.cat(found)


def _generated(model: Any) -> list[list[int]]:
    from anyaccel import _llm

    requests = [
        _llm.Request(model, prompt, {"max_new_tokens": 6, "do_sample": index == 1, "seed": 3})
        for index, prompt in enumerate(PROMPTS)
    ]
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


def on_a_rank(name: str, threads: int) -> tuple[torch.Tensor, list[list[int]]]:
    model = _connected(name, threads=threads)
    vocab = native_models.whole(name)[1].vocab
    return _logits(model, vocab), _generated(model)


@pytest.mark.parametrize(
    ("name", "size", "threads"),
    [
        ("llama", 2, 1),
        ("llama", 3, 2),
        ("gpt_neox", 2, 2),
        ("olmo2", 3, 1),
        ("qwen3_moe", 2, 1),
        ("gemma2", 2, 1),
        ("deepseek_v3", 2, 1),
    ],
)
def test_ranks_have_the_logits_of_one_process(name: str, size: int, threads: int) -> None:
    model = native_models.native(name)
    vocab = native_models.whole(name)[1].vocab
    expected = _logits(model, vocab)
    results = ranks.run(on_a_rank, size, name, threads)
    for logits, tokens in results:
        assert torch.equal(logits, results[0][0])
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5
        assert tokens == _generated(model)


def that_disagree() -> str:
    model = _connected("llama", timeout=20.0)
    sequence = model.create()
    try:
        native_models.logits_of(model, 131, [sequence], [[5 + comm.get_rank()]])
    except CommError as error:
        return str(error)
    return ""


def test_ranks_that_disagree() -> None:
    for text in ranks.run(that_disagree, 2):
        assert "disagree" in text


def that_wait() -> tuple[str, float]:
    model = _connected("llama", timeout=1.0)
    start = time.monotonic()
    text = ""
    if comm.get_rank() == 0:
        try:
            native_models.logits_of(model, 131, [model.create()], [[5]])
        except CommTimeoutError as error:
            text = str(error)
        with pytest.raises(CommError, match="broken"):
            native_models.logits_of(model, 131, [model.create()], [[5]])
    comm.barrier()
    return text, time.monotonic() - start


def test_a_rank_that_does_not_come() -> None:
    (text, seconds), _ = ranks.run(that_wait, 2)
    assert "rank 1" in text
    assert seconds < 20


def that_lose_one() -> str:
    model = _connected("llama")
    sequence = model.create()
    try:
        for step in range(100_000):
            if comm.get_rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            native_models.logits_of(model, 131, [sequence], [[5]])
            model.truncate(sequence, 0)
    except PeerLostError as error:
        print("lost:", error, flush=True)
        os._exit(7)
    return ""


def test_a_rank_that_dies(tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(that_lose_one, 2, (), tmp_path), tmp_path, timeout=60)
    assert outcome[0][0] == 7
    assert "lost: rank 1" in outcome[0][1]
    assert outcome[1][0] == -signal.SIGKILL

# SPDX-License-Identifier: Apache-2.0
"""The native decoder on several processes: the same logits on all of them, errors instead of waiting for ever."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import native_models
import ranks
from anyaccel import comm
from anyaccel.errors import CommError, CommTimeoutError, PeerLostError
from native_models import PROMPTS

pytest.importorskip("transformers")


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


def on_a_rank(cases: list[tuple[str, int]]) -> list[tuple[torch.Tensor, list[list[int]]]]:
    results = []
    for name, threads in cases:
        model = _connected(name, threads=threads)
        results.append((_logits(model, native_models.whole(name)[1].vocab), native_models.answers_of(model)))
    return results


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [("llama", 1), ("gpt_neox", 2), ("qwen3_moe", 1), ("gemma2", 1), ("deepseek_v3", 1)]),
        (3, [("llama", 2), ("olmo2", 1)]),
    ],
)
def test_ranks_have_the_logits_of_one_process(size: int, cases: list[tuple[str, int]]) -> None:
    """Cases: a model and the threads of each rank."""
    results = ranks.run(on_a_rank, size, cases)
    for index, (name, _) in enumerate(cases):
        model = native_models.native(name)
        expected, answers = _logits(model, native_models.whole(name)[1].vocab), native_models.answers_of(model)
        for logits, tokens in (of_rank[index] for of_rank in results):
            assert torch.equal(logits, results[0][index][0]), name
            assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5, name
            assert tokens == answers, name


def that_disagree() -> str:
    model = _connected("llama", timeout=60.0)
    sequence = model.create()
    try:
        native_models.logits_of(model, 131, [sequence], [[5 + comm.get_rank()]])
    except CommError as error:
        return str(error)
    return ""


def test_ranks_that_disagree() -> None:
    for text in ranks.run(that_disagree, 2):
        assert "disagree" in text


def that_wait() -> str:
    model = _connected("llama", timeout=1.0)
    text = ""
    if comm.get_rank() == 0:
        try:
            native_models.logits_of(model, 131, [model.create()], [[5]])
        except CommTimeoutError as error:
            text = str(error)
        with pytest.raises(CommError, match="broken"):
            native_models.logits_of(model, 131, [model.create()], [[5]])
    comm.barrier()
    return text


def test_a_rank_that_does_not_come() -> None:
    text, _ = ranks.run(that_wait, 2)
    assert re.search(r"rank 1 \(pid \d+\) did not come within the timeout of 1 s", text)


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
    outcome = ranks.finish(ranks.start(that_lose_one, 2, (), tmp_path), tmp_path)
    assert outcome[0][0] == 7
    assert "lost: rank 1" in outcome[0][1]
    assert outcome[1][0] == -signal.SIGKILL

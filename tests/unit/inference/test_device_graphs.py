# SPDX-License-Identifier: Apache-2.0
"""Steps as graphs of the accelerator, on one that records operators and runs them again on the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anyaccel._llm import Request
from anyaccel.inference.device import graphs
from device_models import on_device
from recorded_graph import recording_accelerator

pytest.importorskip("transformers")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    recording_accelerator(monkeypatch)


def _answers(model: Any, counts: tuple[int, ...], most: int) -> list[list[int]]:
    requests = [Request(model, [3 + i % 100 for i in range(n)], {"max_new_tokens": most + 3 * (n % 3)}) for n in counts]
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope", "bloom", "qwen3_next", "jamba"]
)
def test_replayed_steps_give_the_same_tokens(name: str, recording: None) -> None:
    """Windows, soft caps, sinks, experts, latents, ALiBi, states; batches that shrink and contexts that grow."""
    model = on_device(name, positions=512)
    captured = model.executor.graphs
    answers = _answers(model, (5, 17, 40), 10)
    assert captured.taken > 10
    assert 1 <= captured.captured <= 8
    captured.usable = False
    assert _answers(model, (5, 17, 40), 10) == answers


class _Allocations(TorchDispatchMode):
    """Operators that make tensors, rather than views or what is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view and not op._schema.is_mutable:
            self.seen.append(op.__name__)
        return out


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt_oss", "bloom", "lfm2"])
def test_a_captured_step_allocates_nothing(name: str, recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what its graph holds: the inputs are written in place, and the result lies where it lay before."""
    model = on_device(name, positions=512)
    requests = [Request(model, list(range(3, 3 + count)), {"max_new_tokens": 20}) for count in (5, 9)]
    for _ in range(3):
        model.step(requests)
    captured = model.executor.graphs
    (step,) = captured._kept.values()
    (cache, taken, place) = (
        [each.data_ptr() for each in model.executor.cache.layers],
        captured.taken,
        step.captured.result.data_ptr(),
    )
    run, replay = captured.run, step.captured.replay
    allocations = _Allocations()

    def counted(*arguments: Any) -> Any:
        with allocations:
            return run(*arguments)

    def apart() -> None:  # the recorder runs operators again, which a device's graph does in its own memory
        with _disable_current_modes():
            replay()

    monkeypatch.setattr(captured, "run", counted)
    monkeypatch.setattr(step.captured, "replay", apart)
    for _ in range(3):
        model.step(requests)
    assert captured.taken == taken + 3
    assert not allocations.seen
    assert step.captured.result.data_ptr() == place
    assert [each.data_ptr() for each in model.executor.cache.layers] == cache


def test_few_graphs_are_kept_and_none_of_another_cache(recording: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model = on_device("llama", positions=1024)
    captured = model.executor.graphs
    for count in (1, 2, 3, 1):
        _answers(model, (9,) * count, 3)
        assert len(captured._kept) <= 2
        assert model.executor.graphs.bytes == 1000 * len(captured._kept)
    kept = dict(captured._kept)
    _answers(model, (700,), 3)  # the cache grows: its tensors are others
    assert not kept.keys() & {key for key, each in captured._kept.items() if each in kept.values()}


@pytest.mark.parametrize("sampled", [False, True])
def test_steps_begin_before_they_are_asked_for(sampled: bool, recording: None) -> None:
    """Whatever comes then: requests that end, one that joins, one that forgets tokens, and the end of a page."""
    options = {"do_sample": True, "seed": 3, "top_k": 20} if sampled else {}
    model, plain = on_device("llama", positions=512), on_device("llama", positions=512)
    plain.executor._looks_ahead = False
    passed, answers = [], []
    for each in (model, plain):
        passes, run = [], each.executor.graphs.run
        each.executor.graphs.run = lambda *given, run=run, passes=passes: passes.append(len(given)) or run(*given)
        requests = [
            Request(each, list(range(3, 3 + count)), {"max_new_tokens": 8 + count % 5, **options})
            for count in (5, 60, 9)
        ]
        for step in range(24):
            if step == 5:
                requests.append(Request(each, [7, 8, 9], {"max_new_tokens": 20, "repetition_penalty": 1.5}))
            if step == 7:
                requests[0].shrink(3)
            each.step([request for request in requests if not request.finished] or requests[:1])
        passed.append(passes)
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]
    assert 2 in passed[0]  # with tokens that are on the device
    assert passed[0].count(1) < passed[1].count(1)


def test_a_device_without_graphs_runs_as_it_is_called() -> None:
    model = on_device("llama")
    _answers(model, (5,), 4)
    assert not model.executor.graphs.usable
    assert model.executor.graphs.captured == 0

# SPDX-License-Identifier: Apache-2.0
"""The decoder in torch's operators: its requests, steps and cache are those of the native model."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import native_models
from anyaccel._llm import Request, TokenFeed
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.device.executor import device_logits
from anyaccel.inference.device.pages import PAGE
from anyaccel.serve.engine.slots import Slots
from anyaccel.serve.engine.step import CacheChange, MultiStep, StepInput
from device_models import on_device

pytest.importorskip("transformers")

VOCAB = 131


@pytest.fixture(scope="module")
def models() -> list[Any]:
    """Native and device."""
    return [native_models.native("llama", positions=1024), on_device("llama", positions=1024)]


def _prompt(count: int, seed: int = 5) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(count)]


def _finished(model: Any, *requests: Any) -> list[list[int]]:
    while not all(request.finished for request in requests):
        model.step([request for request in requests if not request.finished])
    return [request.tokens for request in requests]


def _same(models: list[Any], what: Callable[[Any], object]) -> None:
    native, device = (what(model) for model in models)
    assert device == native


_SAMPLED = {"do_sample": True, "temperature": 1.3}


@pytest.mark.parametrize(
    "options",
    [
        _SAMPLED,
        _SAMPLED | {"top_k": 7},
        _SAMPLED | {"top_p": 0.6},
        _SAMPLED | {"min_p": 0.1, "top_k": 50},
        _SAMPLED | {"typical_p": 0.5},
        _SAMPLED | {"typical_p": 0.9, "top_p": 0.9},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"no_repeat_ngram": 2},
        {"bias": {7: 2.0, 9: -3.0}},
        {"min_new_tokens": 6, "end_tokens": list(range(60))},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_sampling_give_the_tokens_of_the_native_model(models: list[Any], options: dict[str, Any]) -> None:
    """Native's own random numbers: the same seed is the same answer."""

    def answers(model: Any) -> list[list[int]]:
        requests = [
            Request(model, _prompt(9, seed), options | {"seed": seed, "max_new_tokens": 12}) for seed in range(4)
        ]
        return _finished(model, *requests, Request(model, _prompt(5), {"max_new_tokens": 12}))

    _same(models, answers)


def test_prompts_in_parts_and_shared_ones(models: list[Any]) -> None:
    def steps(model: Any) -> list[Any]:
        long, other = _prompt(150), _prompt(40, 6)
        first = Request(model, long, {"max_new_tokens": 3})
        told = [model.step([first], [64]), model.step([first], [64])]
        follower = Request(model, [*long[:130], *other], {"max_new_tokens": 4}, first)
        told += [model.step([first, follower]), model.step([first, follower]), follower.cached]
        shared = Request(model, [*long[:70], 9, 9], {"max_new_tokens": 4})
        shared.share(first, 70)
        told += [_finished(model, first, follower, shared)]
        told += [model.step([first]), first.finished, first.prompt_length]
        first.extend(other, 5)
        follower.shrink(20)
        told += [_finished(model, first), follower.cached, first.cached]
        first.finish()
        return [*told, first.finished, first.cached]

    _same(models, steps)


def test_a_prefix_of_the_same_step_is_computed_once(models: list[Any]) -> None:
    def steps(model: Any) -> list[Any]:
        leader = Request(model, _prompt(100), {"max_new_tokens": 2})
        others = [Request(model, [*_prompt(99), seed], {"max_new_tokens": 2}, leader) for seed in range(3, 6)]
        return [model.step([leader, *others]), [each.cached for each in others], _finished(model, leader, *others)]

    _same(models, steps)


def test_scores_and_hidden_states(models: list[Any]) -> None:
    found = []
    for model in models:
        options = {"max_new_tokens": 3, "logprobs": 3, "prompt_logprobs": 2}
        request = Request(model, _prompt(70), options)
        mean, last = (Request(model, _prompt(70), {"goal": goal}) for goal in ("mean", "last"))
        model.step([mean], [33])
        _finished(model, request, mean, last)
        found.append([request.take_scores(), request.prompt_scores(), mean.embedding(), last.embedding()])
    native, device = found
    for ours, theirs in zip(device[:2], native[:2], strict=True):
        assert [(each[0], [token for token, _ in each[2]]) for each in ours] == [
            (each[0], [token for token, _ in each[2]]) for each in theirs
        ]
        assert [each[1] for each in ours] == pytest.approx([each[1] for each in theirs], abs=1e-4)
    assert device[2] == pytest.approx(native[2], abs=1e-5)
    assert device[3] == pytest.approx(native[3], abs=1e-5)


def test_a_mask_and_kept_logits(models: list[Any]) -> None:
    def masked(model: Any) -> list[int]:
        request = Request(model, _prompt(8), {"max_new_tokens": 4}, None, True)
        for allowed in (5, 77, 130):
            request.set_mask(sum(1 << token for token in (allowed, 131)).to_bytes(20, "little"))
            model.step([request])
        kept = torch.empty(VOCAB)
        request.copy_logits(kept.data_ptr())
        return [*request.tokens, int(kept.argmax())]

    _same(models, masked)


def test_prompts_pass_in_runs(models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models[1].executor, "most_tokens", 48)

    def answers(model: Any) -> list[list[int]]:
        return _finished(model, *(Request(model, _prompt(count), {"max_new_tokens": 5}) for count in (100, 47, 1, 130)))

    _same(models, answers)


def test_sequences_share_pages_until_one_writes() -> None:
    model = on_device("llama", positions=1024)
    page = model.cache_bytes_per_token() * PAGE
    tokens = _prompt(80)
    first = model.create()
    device_logits(model, [first], [80], tokens, [])
    copy = model.fork(first, 70)
    assert model.cache_used_bytes == 2 * page
    alone = device_logits(model, [copy], [1], [9], [0])
    assert (model.length(first), model.length(copy), model.cache_used_bytes) == (80, 71, 3 * page)
    again = model.create()
    assert torch.allclose(device_logits(model, [again], [71], [*tokens[:70], 9], [70]), alone, atol=1e-5)
    rest = device_logits(model, [first], [1], [3], [0])
    model.truncate(first, 80)
    assert torch.allclose(device_logits(model, [first], [1], [3], [0]), rest, atol=1e-6)
    for sequence in (first, copy, again):
        model.destroy(sequence)
    assert model.cache_used_bytes == 0
    request = Request(model, tokens, {"max_new_tokens": 2})
    _finished(model, request)
    assert model.cache_used_bytes == 2 * page
    del request
    gc.collect()
    assert model.cache_used_bytes == 0
    with pytest.raises(UsageError, match="there is no sequence"):
        model.length(first)


def test_a_cache_without_room_leaves_all_as_it_was() -> None:
    model = on_device("llama", positions=1024)
    small = on_device("llama", positions=1024, cache_limit=2 * PAGE * model.cache_bytes_per_token())
    request = Request(small, _prompt(120), {"max_new_tokens": 60})
    small.step([request])
    with pytest.raises(ModelError, match="the key/value cache needs"):
        _finished(small, request)
    assert (request.cached, len(request.tokens)) == (128, 9)
    with pytest.raises(ModelError, match="needs"):
        small.step([Request(small, _prompt(5), {})])
    assert small.cache_reserved_bytes <= 3 * PAGE * model.cache_bytes_per_token()


def test_logits_that_are_no_numbers_are_said_and_leave_no_trace(models: list[Any]) -> None:
    model = on_device("llama", positions=1024)
    good, bad = (Request(model, _prompt(9, seed), {"max_new_tokens": 4}) for seed in (1, 2))
    head = model.executor.decoder.head.weight
    whole = head.clone()
    head.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite, for request 0"):
        model.step([bad, good])
    head.copy_(whole)
    assert _finished(model, good) == _finished(models[1], Request(models[1], _prompt(9, 1), {"max_new_tokens": 4}))


def test_wrong_requests_are_refused(models: list[Any]) -> None:
    model = models[1]
    for prompt, message in (([], "prompt is empty"), ([5, 999], "token 999 at position 1"), ([5] * 1024, "no room")):
        with pytest.raises(UsageError, match=message):
            Request(model, prompt, {})
    request = Request(model, [5, 6], {})
    with pytest.raises(UsageError, match="in the step twice"):
        model.step([request, request])
    with pytest.raises(UsageError, match="ascending"):
        device_logits(model, [model.create()], [2], [5, 6], [1, 0])
    request.finish()
    with pytest.raises(UsageError, match=r"finished with finish\(\)"):
        model.step([request])


def test_a_server_drives_it_as_the_native_model(models: list[Any]) -> None:
    """Prompts in parts, a shared prefix, one step ahead and a request that is dropped, in the scheduler's words."""

    def served(model: Any) -> list[Any]:
        slots = Slots(model)
        long, options = _prompt(90), {"max_new_tokens": 4, "logprobs": 0, "goal": "answer"}
        first, second = (long, dict(options)), ([*long[:80], 7], dict(options))
        found = [slots.apply(StepInput([CacheChange("start", 1)], {1: 64}, {1: first})).tokens]
        found.append(slots.apply(StepInput(run={1: 26})).tokens)
        share = CacheChange("start", 2, 64, 1)
        found.append(slots.apply(StepInput([share], {1: 1, 2: 17}, {2: second})).tokens)
        output = slots.apply(StepInput(run={1: 1, 2: 1}), MultiStep(1, TokenFeed(), 0))
        found += [output.tokens, output.before, sorted(output.scores)]
        found.append(slots.apply(StepInput([CacheChange("drop", 1)], {2: 1})).tokens)
        slots.clear()
        return found

    _same(models, served)


class _Kernels(TorchDispatchMode):
    """The operators that compute or copy: whose result is not a view of what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        given, made = (
            {each.untyped_storage().data_ptr() for each in tree_leaves(some) if isinstance(each, torch.Tensor)}
            for some in ((args, kwargs), out)
        )
        if op._schema.is_mutable or not made <= given:
            self.seen.append(op.__name__)
        return out


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama", 11),
        ("qwen3", 13),
        ("gemma2", 20),
        ("gpt_neox", 8),
        ("phi", 8),
        ("falcon", 8),
        ("gpt2", 10),
        ("olmo2", 16),
        ("mixtral", 17),
    ],
)
def test_a_layer_dispatches_few_operators(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a token: a third of transformers' at most but for GPT-2, which `benchmarks/device.py` counts beside them."""
    model = on_device(name)
    request = Request(model, _prompt(3), {})  # within all windows: masks are made once for all layers
    model.step([request])
    layer = model.executor.decoder.layers[0]
    run, kernels = layer.run, _Kernels()

    def counted(*args: Any) -> torch.Tensor:
        with kernels:
            return run(*args)

    monkeypatch.setattr(layer, "run", counted)
    model.step([request])
    assert len(kernels.seen) <= most, kernels.seen


class _Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that it reads, and shapes that depend on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if any(name.startswith(each) for each in self.NAMES):
            self.seen[name] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, _SAMPLED, _SAMPLED | {"top_k": 9, "top_p": 0.9}])
def test_a_step_waits_for_its_tokens_alone(
    models: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models[1]
    requests = [Request(model, _prompt(9, seed), options) for seed in range(3)]
    model.step(requests)
    reads: Counter[str] = Counter()

    def counted(name: str) -> None:
        own = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return own(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__iter__"):
        counted(name)
    with _Waits() as waits:
        model.step(requests)
    assert not waits.seen
    reads.pop("__iter__", None)  # of parameters of sampling: views of a few rows
    assert reads == {"tolist": 1}

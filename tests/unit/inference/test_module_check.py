# SPDX-License-Identifier: Apache-2.0
"""A model in memory that is not what its configuration says runs through its own code, and right."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference.native import runtime as cpu

IDS = torch.tensor([[5, 6, 7, 9, 11]])


def _llama(**more: Any) -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**family_cases.common(**more))).eval()


class _Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


class _LowRank(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def _wrapped(model: Any) -> None:
    model.model.layers[0].mlp = _Doubled(model.model.layers[0].mlp)


def _subclassed(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Own", (type(mlp),), {"forward": lambda self, x: super(type(self), self).forward(x) * 2})


def _patched(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * 2)


def _pruned(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def _adapted(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = _LowRank(layer.self_attn.q_proj)


def _untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def _with_bias(model: Any) -> None:
    linear = model.model.layers[0].mlp.down_proj
    linear.bias = nn.Parameter(torch.randn(linear.out_features))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_wrapped, "model.layers.0.mlp"),
        (_subclassed, "transformers.models.llama.modeling_llama.LlamaMLP"),
        (_patched, "a forward that was replaced"),
        (_hooked, "forward hooks"),
        (_pruned, "model.layers.1"),
        (_adapted, "q_proj"),
        (_with_bias, "model.layers.0.mlp.down_proj.bias"),
        (_untied, ""),
    ],
)
def test_a_changed_model_runs_as_it_was_changed(change: Callable[[Any], None], named: str) -> None:
    model = _llama(tie_word_embeddings=change is _untied)
    change(model)
    expected = copy.deepcopy(model)(IDS).logits
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == ("torch" if named else "native")
    assert named in engine.why
    torch.testing.assert_close(engine(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_other_heads_and_models_without_one_are_not_taken_for_causal_lms(tied: bool) -> None:
    config = transformers.LlamaConfig(**family_cases.common(tie_word_embeddings=tied, num_labels=3))
    classifier = transformers.LlamaForSequenceClassification(config).eval()
    expected = copy.deepcopy(classifier)(IDS).logits
    engine = anyaccel.init_inference(classifier, dtype="fp32")
    assert engine.runtime == "torch" and "no causal LM" in engine.why
    torch.testing.assert_close(engine(IDS).logits, expected, rtol=1e-4, atol=1e-4)

    body = transformers.LlamaModel(config).eval()
    states = copy.deepcopy(body)(IDS).last_hidden_state
    engine = anyaccel.init_inference(body, dtype="fp32")
    torch.testing.assert_close(engine(IDS).last_hidden_state, states, rtol=1e-4, atol=1e-4)


def test_asking_for_the_native_runtime_says_what_it_lacks() -> None:
    model = _llama()
    _hooked(model)
    with pytest.raises(anyaccel.errors.ModelError, match=r"the native runtime has no code for forward hooks \(module"):
        anyaccel.init_inference(model, dtype="fp32", runtime="native")
    assert model(IDS).logits.shape == (1, 5, 131)  # nothing was taken


def test_a_model_whose_loading_was_interrupted_says_so() -> None:
    expected = _llama()(IDS).logits

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    model = _llama()
    with pytest.raises(KeyboardInterrupt):
        anyaccel.init_inference(model, dtype="fp32", progress=stop)
    with pytest.raises(UsageError, match="interrupted while it took the weights over; load the model again"):
        model(IDS)

    def stop_at_once(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    model = _llama()
    with pytest.raises(KeyboardInterrupt):
        anyaccel.init_inference(model, dtype="fp32", progress=stop_at_once)
    assert torch.equal(model(IDS).logits, expected)  # nothing was taken yet


def test_engines_of_one_process_promise_the_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_models", weakref.WeakValueDictionary())  # other tests' models have their shares
    first = anyaccel.init_inference(_llama(), dtype="fp32")
    second = anyaccel.init_inference(_llama(), dtype="fp32")
    third = anyaccel.init_inference(_llama(), dtype="fp32")
    assert first.native is not None and second.native is not None and third.native is not None
    limits = [each.native.model.cache_limit_bytes / first.native.model.cache_limit_bytes for each in (second, third)]
    assert all(0.1 < limit < 0.5 for limit in limits), limits  # and none is left without


def test_too_many_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="threads=100000: this machine has"):
        anyaccel.init_inference(_llama(), dtype="fp32", threads=100000)

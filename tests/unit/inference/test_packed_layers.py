# SPDX-License-Identifier: Apache-2.0
"""Packed layers stand for torch's own code alone: what was replaced runs. Values of weights are an error, no NaN."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

import anyaccel
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference.generic.runtime import edited_layers, pack
from anyaccel.inference.modules.layers import PackedExperts, PackedLinear, PackedRMSNorm

IDS = torch.randint(3, 131, (2, 24), generator=torch.Generator().manual_seed(7))


@functools.cache
def _built(case: str) -> Any:
    return family_cases.build(case)


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits  # type: ignore[no-any-return]


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


@pytest.mark.parametrize(
    ("case", "place", "name", "told"),
    [
        ("llama", nn.Linear, "forward", "Linear"),
        ("llama", nn.Embedding, "forward", "Embedding"),
        ("llama", nn.functional, "linear", "Linear"),
        ("llama", nn.functional, "embedding", "Embedding"),
        ("gpt2", Conv1D, "forward", "Conv1D"),
        ("llama", nn.Module, "_call_impl", "Linear"),
    ],
)
def test_code_of_torch_that_was_replaced_runs(
    case: str, place: Any, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edited_layers() == ""
    monkeypatch.setattr(place, name, _twice(getattr(place, name)))
    if name == "_call_impl":  # it has no meaning for whole models
        assert edited_layers() == told
        return
    expected = _logits(_built(case))
    engine = anyaccel.init_inference(copy.deepcopy(_built(case)), dtype="fp32", runtime="torch")
    assert (engine.runtime, engine.why) == ("plain", f"code for what {told} computes here")
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-4, atol=1e-4)
    model = copy.deepcopy(_built(case))
    with pytest.raises(UsageError, match=f"dtype='int8' needs packed layers, and {told} computes something else"):
        anyaccel.init_inference(model, dtype="int8", runtime="torch")
    torch.testing.assert_close(_logits(model), expected)  # nothing was taken
    monkeypatch.undo()
    assert not torch.allclose(_logits(_built(case)), expected, rtol=1e-2, atol=1e-2)


def test_hooks_of_all_modules_run() -> None:
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _inputs, output: output * 2 if type(module) is nn.Linear else None
    )
    try:
        expected = _logits(_built("llama"))
        engine = anyaccel.init_inference(copy.deepcopy(_built("llama")), dtype="fp32")
        assert engine.runtime == "plain"
        torch.testing.assert_close(_logits(engine), expected, rtol=1e-4, atol=1e-4)
    finally:
        hook.remove()


def _of_the_class(kind: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda _, patch: patch.setattr(kind, "forward", _twice(kind.forward))


def _of_each(kind: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    def edit(model: Any, _: pytest.MonkeyPatch) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                module.forward = _twice(module.forward)

    return edit


def _registered(model: Any, patch: pytest.MonkeyPatch) -> None:
    name = model.config._experts_implementation
    patch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, _of_experts)


def _of_experts(self: Any, x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
    return x_TH * 0.3


@pytest.mark.parametrize(
    ("case", "edit", "packed"),
    [
        ("llama", _of_the_class(LlamaRMSNorm), PackedRMSNorm),
        ("llama", _of_each(LlamaRMSNorm), PackedRMSNorm),
        ("mixtral", _of_the_class(MixtralExperts), PackedExperts),
        ("mixtral", _of_each(MixtralExperts), PackedExperts),
        ("mixtral", _registered, PackedExperts),
    ],
    ids=["norm class", "each norm", "experts class", "each experts", "experts function"],
)
def test_layers_whose_code_was_replaced_stay(
    case: str, edit: Any, packed: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(_built(case))
    if edit is _registered:
        model.config._experts_implementation = "grouped_mm"
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "grouped_mm"
    plain = anyaccel.init_inference(copy.deepcopy(model), dtype="fp32", runtime="torch")
    assert any(isinstance(module, packed) for module in plain.modules())
    usual = _logits(plain)
    edit(model, monkeypatch)
    expected = _logits(model)
    assert not torch.allclose(expected, usual, rtol=1e-2, atol=1e-2)
    engine = anyaccel.init_inference(model, dtype="fp32", runtime="torch")
    assert engine.runtime == "torch"
    assert not any(isinstance(module, packed) for module in engine.modules())
    assert any(isinstance(module, PackedLinear) for module in engine.modules())
    torch.testing.assert_close(_logits(engine), expected, rtol=1e-4, atol=1e-4)


def _norm_of(linear: Any) -> torch.Tensor:
    return torch.linalg.vector_norm(vars(linear)["_parameters"]["weight"])


class _Reader(nn.Module):
    """Computes with its linear's weight in a way that its source does not tell."""

    def __init__(self, how: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) + self.how(self)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how",
    [
        lambda m: getattr(m.proj, "weig" + "ht").sum(),
        lambda m: _norm_of(m.proj),
        lambda m: sum(p.sum() for p in m.parameters()),
        lambda m: sum(p.float().mean() for p in m.proj.parameters()),
        lambda m: torch.stack([p.detach().abs().max() for p in m.parameters() if p.dim() == 2]).max(),
        lambda m: nn.functional.linear(torch.ones(4), getattr(m.proj, "weig" + "ht")),
        lambda m: torch.tensor(getattr(m.proj, "weig" + "ht").tolist()[0]),
        lambda m: m.state_dict()["proj.weig" + "ht"].sum(),
        lambda m: copy.deepcopy(getattr(m.proj, "weig" + "ht")).sum(),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_values_of_a_packed_weight_are_an_error_that_names_it(
    how: Callable[[Any], torch.Tensor], compiled: bool
) -> None:
    model: Any = nn.ModuleDict({"block": _Reader(how)}).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        want = model["block"](x)
        assert want.isfinite().all()
        assert pack(model, "fp32", 32).linears == 1
        run = torch.compile(model["block"], backend="eager") if compiled else model["block"]
        with pytest.raises(UsageError, match=r"block\.proj.*: its values are packed.*runtime='plain'"):
            run(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_packed_weight_is_like_can_be_asked(compiled: bool) -> None:
    def how(block: Any) -> torch.Tensor:
        weight = getattr(block.proj, "weig" + "ht")
        assert (weight.dtype, weight.device.type, tuple(weight.shape)) == (torch.float32, "cpu", (4, 4))
        assert weight.numel() == 16 and weight.dim() == 2 and weight.size(-1) == 4
        made = weight.new_zeros(4) + torch.zeros_like(weight)[0]
        return made.to(weight.dtype).to(weight.device).type_as(weight)

    model: Any = nn.ModuleDict({"block": _Reader(how)}).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        want = model["block"](x)
        assert pack(model, "fp32", 32).linears == 1
        run = torch.compile(model["block"], backend="eager") if compiled else model["block"]
        torch.testing.assert_close(run(x), want)


def _stays(name: str, dtype: str) -> Iterator[Any]:
    """A packed model, whose answers no test may change."""
    engine = anyaccel.init_inference(copy.deepcopy(_built(name)), dtype=dtype, runtime="torch")
    before = _logits(engine)
    yield engine.module
    assert torch.equal(_logits(engine), before)


@pytest.fixture
def packed() -> Iterator[Any]:
    yield from _stays("mixtral", "int8")


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.state_dict(),
        lambda m: m.load_state_dict(_built("mixtral").state_dict()),
        lambda m: m.lm_head.load_state_dict({"weight": torch.ones(131, 48)}),
        lambda m: m.model.layers[0].mlp.experts.state_dict(),
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.ones(131, 48))),
        lambda m: setattr(m.model.embed_tokens, "weight", nn.Parameter(torch.ones(131, 48))),
        lambda m: m.lm_head.weight.mul_(2),
        lambda m: m.lm_head.weight.data.zero_(),
        lambda m: anyaccel.init_inference(m, dtype="int8"),
    ],
)
def test_packed_weights_can_be_neither_saved_nor_changed(edit: Any, packed: Any) -> None:
    with torch.no_grad(), pytest.raises(UsageError, match="packed"):
        edit(packed)


def test_packed_weights_cannot_be_saved(packed: Any, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="packed"):
        packed.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    assert packed.num_parameters() > 0


@pytest.fixture
def packed_with_biases() -> Iterator[Any]:
    yield from _stays("qwen2", "fp32")


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.model.norm.weight.mul_(2),
        lambda m: m.model.layers[0].input_layernorm.weight.data.zero_(),
        lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(48))),
        lambda m: m.model.layers[0].self_attn.q_proj.bias.add_(1),
        lambda m: m.model.layers[0].self_attn.q_proj.bias.data.zero_(),
        lambda m: setattr(m.model.layers[0].self_attn.q_proj, "bias", None),
        lambda m: m.model.norm.weight.tolist(),
    ],
)
def test_norms_and_biases_are_packed_too(edit: Any, packed_with_biases: Any) -> None:
    """Native code has float32 copies of them: an edit that did nothing is refused."""
    with torch.no_grad(), pytest.raises(UsageError, match=r"(norm\.weight|q_proj\.bias): its values are packed"):
        edit(packed_with_biases)


def test_packed_norms_and_biases_say_what_they_are_like(packed_with_biases: Any) -> None:
    norm, linear = packed_with_biases.model.norm, packed_with_biases.model.layers[0].self_attn.q_proj
    assert isinstance(norm, PackedRMSNorm) and isinstance(linear, PackedLinear)
    assert norm.weight.dtype == linear.bias.dtype == torch.float32
    assert norm.weight.dim() == 1 and linear.bias.shape == (linear.out_features,)
    packed_with_biases.to("cpu")

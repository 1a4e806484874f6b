# SPDX-License-Identifier: Apache-2.0
"""A model in memory whose weights have other shapes than its configuration says runs as it is: pruned, widened."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyaccel
import family_cases
from anyaccel.errors import ModelError
from anyaccel.inference.generic.runtime import pack

IDS = torch.randint(3, 131, (2, 24), generator=torch.Generator().manual_seed(7))


@functools.cache
def _built(case: str) -> Any:
    return family_cases.build(case)


def _random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.2)


def _mlp(width: int, tell: bool) -> Callable[[Any], None]:
    """Another width in the second layer alone; `tell`: the linears know it."""

    def edit(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        for name, shape in {"gate_proj": (width, 48), "up_proj": (width, 48), "down_proj": (48, width)}.items():
            linear = getattr(mlp, name)
            linear.weight = _random(*shape)
            if tell:
                linear.out_features, linear.in_features = shape

    return edit


def _heads(model: Any) -> None:
    """All heads have keys and values of their own."""
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight, attention.v_proj.weight = _random(48, 48), _random(48, 48)
    attention.num_key_value_groups = 1


def _set(path: str, *shape: int) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, _random(*shape))

    return edit


def _set_bias(model: Any) -> None:
    """One value for all outputs, which torch repeats."""
    for layer in model.transformer.h:
        layer.mlp.c_fc.bias = _random(1)


def _gpt2_mlp(model: Any) -> None:
    mlp = model.transformer.h[0].mlp
    mlp.c_fc.weight, mlp.c_fc.bias, mlp.c_fc.nf = _random(48, 80), _random(80), 80
    mlp.c_proj.weight, mlp.c_proj.nx = _random(80, 48), 80


@pytest.mark.parametrize(
    ("case", "edit"),
    [
        ("llama", _mlp(96, tell=True)),
        ("llama", _mlp(96, tell=False)),
        ("llama", _mlp(40, tell=False)),
        ("llama", _heads),
        ("llama", _set("lm_head.weight", 200, 48)),
        ("llama", _set("lm_head.weight", 100, 48)),
        ("llama", _set("lm_head.weight", 0, 48)),
        ("llama", _set("model.norm.weight", 1)),
        ("llama", _set("model.layers.1.input_layernorm.weight")),
        ("llama", _set("model.embed_tokens.weight", 140, 48)),
        ("gpt2", _set("transformer.wpe.weight", 100, 48)),
        ("gpt2", _set_bias),
        ("gpt2", _gpt2_mlp),
        ("mixtral", _set("model.layers.1.mlp.gate.weight", 4, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_of_other_shapes_run_as_they_are(case: str, edit: Callable[[Any], None]) -> None:
    model = copy.deepcopy(_built(case))
    edit(model)
    try:
        with torch.inference_mode():
            expected = copy.deepcopy(model)(IDS).logits
    except RuntimeError:
        expected = None
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert engine.runtime == "torch"
    assert "which its configuration does not give" in engine.why or "where the configuration gives" in engine.why
    with torch.inference_mode():
        if expected is None:  # as the model itself
            with pytest.raises(RuntimeError):
                engine(IDS)
        else:
            torch.testing.assert_close(engine(IDS).logits, expected, rtol=1e-3, atol=1e-3)


def test_in_a_file_it_stays_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    model = copy.deepcopy(_built("llama"))
    _mlp(96, tell=True)(model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="wrong shape"):
        anyaccel.init_inference(tmp_path / "model", dtype="fp32")


def test_what_torch_repeats_is_not_packed() -> None:
    """A bias of one value for all outputs: packed, it would be read beyond its end."""
    model: Any = nn.Sequential(nn.Linear(32, 4096), nn.Linear(4096, 32)).eval()
    model[0].bias = nn.Parameter(torch.tensor([3.0]))
    x = torch.randn(2, 32)
    with torch.inference_mode():
        want = model(x)
        assert pack(model, "fp32", 32).linears == 1
        torch.testing.assert_close(model(x), want)

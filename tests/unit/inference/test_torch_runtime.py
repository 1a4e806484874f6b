# SPDX-License-Identifier: Apache-2.0
"""The generic path: architectures that the native decoder lacks, with packed linears and norms."""

from __future__ import annotations

import functools
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyaccel
import anyaccel.inference.generic.runtime as torch_runtime
import family_cases
from anyaccel.errors import UsageError
from anyaccel.inference import generate_tokens, optimize
from anyaccel.inference.generic.runtime import PackedEmbedding, PackedExperts, PackedLinear, PackedRMSNorm, pack
from anyaccel.inference.spec.mapping import Unsupported

IDS = torch.tensor([[5, 17, 99, 3, 64, 28, 101]])
# With the attention that transformers chooses itself, as users have it.
build = functools.partial(family_cases.build, attention="")


@pytest.mark.parametrize("name", family_cases.OTHERS)
def test_other_architectures_run_with_packed_linears(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        want = build(name)(IDS).logits
    with caplog.at_level(logging.WARNING, "anyaccel"):
        engine = anyaccel.init_inference(build(name), dtype="fp32")
    assert engine.runtime == "torch"
    assert engine.why
    assert engine.why in caplog.text
    assert any(isinstance(module, PackedLinear) for module in engine.modules())
    with torch.inference_mode():
        got = engine(IDS).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unsupported):
        anyaccel.init_inference(build(name), dtype="fp32", runtime="native")


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the middle token: rounding may send one to another expert."""
    return float((got.float() - want).abs().amax(-1).median() / want.abs().max())


@pytest.mark.parametrize("name", ["xglm", "minimax"])
def test_other_architectures_in_less_precision(name: str) -> None:
    errors = []
    with torch.inference_mode():
        want = build(name)(IDS).logits
        for dtype in ("fp32", "bf16", "int8", "int4"):
            errors.append(_error(anyaccel.init_inference(build(name), dtype=dtype)(IDS).logits, want))
    assert len(set(errors)) == 4  # each precision is one of its own
    assert all(error < bound for error, bound in zip(errors, (1e-5, 0.06, 0.06, 0.3), strict=True)), errors


@pytest.mark.parametrize(("family", "same"), [("gpt2", True), ("gemma2", True), ("llama", False)])
def test_a_tied_embedding_and_head_are_one_matrix(family: str, same: bool) -> None:
    with torch.inference_mode():
        want = build(family)(IDS).logits
    model = optimize(build(family), dtype="fp32", runtime="torch")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (getattr(embedding, "packed", None) is head.packed) == same
    assert isinstance(embedding, PackedEmbedding) == same
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-4)
    if same:
        with pytest.raises(UsageError, match="outside the vocabulary of 131"):
            model(torch.tensor([[131]]))
    quantised = optimize(build(family), dtype="int4", runtime="torch")
    assert isinstance(quantised.get_input_embeddings(), PackedEmbedding)
    shape = quantised.get_output_embeddings().weight.shape
    assert quantised.get_output_embeddings().packed.bytes >= shape.numel()  # 8 bits in int4, too


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_stacked_experts_are_packed(family: str) -> None:
    ids = torch.cat([IDS, IDS.flip(1)])
    with torch.inference_mode():
        want = build(family)(ids).logits
        model = optimize(build(family), dtype="fp32", runtime="torch")
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids[:, :1]).logits, want[:, :1], rtol=1e-4, atol=1e-4)
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(packed) == 2
    assert not any(parameter.dim() == 3 for parameter in model.parameters())


@pytest.mark.parametrize("name", ["xglm", "minimax"])
def test_generation_goes_through_the_model_s_own(name: str) -> None:
    reference = build(name)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    want = reference.generate(IDS, **options).tolist()
    engine = anyaccel.init_inference(build(name), dtype="fp32")
    assert engine.generate(IDS, **options).tolist() == want
    assert list(generate_tokens(engine, IDS[0], max_new_tokens=8)) == want[0][IDS.shape[1] :]
    sampled = [
        engine.generate(IDS, attention_mask=options["attention_mask"], max_new_tokens=8, do_sample=True, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "mixtral", "gpt_oss", "opt", "falcon", "cohere"])
def test_families_give_their_logits_on_the_generic_path_too(family: str) -> None:
    with torch.inference_mode():
        want = build(family)(IDS).logits
        engine = anyaccel.init_inference(build(family), dtype="fp32", runtime="torch")
        torch.testing.assert_close(engine(IDS).logits, want, rtol=1e-4, atol=1e-4)
    assert engine.runtime == "torch"
    assert engine.why == ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-64")
    build("llama-64").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bf16", 1e-3, 0.05), ("fp16", 1e-4, 0.03), ("int8", 1e-3, 0.06), ("int4", 0.06, 0.4)]
)
def test_precisions(dtype: str, least: float, most: float, saved: Path) -> None:
    with torch.inference_mode():
        want = build("llama-64")(IDS).logits
        got = anyaccel.init_inference(saved, dtype=dtype, runtime="torch")(IDS).logits.float()
    assert least < float((got - want).abs().max() / want.abs().max()) < most


def test_norms_are_replaced_only_by_what_computes_the_same() -> None:
    for family, kind in (("llama", "LlamaRMSNorm"), ("gemma2", "Gemma2RMSNorm"), ("granite", "GraniteRMSNorm")):
        model = optimize(build(family), dtype="fp32", runtime="torch")
        kinds = {type(module).__name__ for module in model.modules()}
        assert "PackedRMSNorm" in kinds
        assert kind not in kinds

    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.eps = 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight

    model = nn.Sequential(OddRMSNorm())
    assert pack(model, "fp32", 32).norms == 0
    assert not isinstance(model[0], PackedRMSNorm)


def test_linears_whose_weight_is_used_elsewhere_stay() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.typed = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.linear(x, self.up.weight, self.up.bias)
            return self.typed(self.down(y).to(self.typed.weight.dtype))  # type: ignore[no-any-return]

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.linear.register_forward_hook(lambda *_: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(Reads(), Hooked()).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        want = model(x)
        done = pack(model, "fp32", 32)
        torch.testing.assert_close(model(x), want)
    assert done.linears == 2
    assert list(done.kept) == ["0.up"]
    assert type(model[1].linear) is nn.Linear


def test_reading_a_weight_from_afar_counts_and_training_does_not() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.far, self.trained, self.twin = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and x.numel() > 1:
                return x @ self.trained.weight
            return self.twin(self.trained(self.far(x)))  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.again = self.block.twin  # one module in two places

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            block = self.block
            return self.again(block(x)) / (self.block.far.weight.norm() + 1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        want = model(x)
        done = pack(model, "fp32", 32)
        torch.testing.assert_close(model(x), want)
    assert list(done.kept) == ["block.far"]
    assert done.linears == 2


def test_packed_linear_takes_any_layout_and_refuses_other_dtypes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    linear = model[0]
    x = torch.randn(2, 6, 3).transpose(1, 2)
    with torch.inference_mode():
        want = linear(x)
        pack(model, "fp32", 32)
        torch.testing.assert_close(model(x), want)
        assert model(torch.empty(0, 6)).shape == (0, 5)
        with pytest.raises(ValueError, match="6 inputs"):
            model(torch.randn(2, 5))
        with pytest.raises(ValueError, match="float64"):
            model(torch.randn(2, 6, dtype=torch.float64))


def test_other_dtypes_do_not_unpack_what_is_packed() -> None:
    engine = anyaccel.init_inference(build("llama"), dtype="int8", runtime="torch")
    packed = [each for each in engine.modules() if isinstance(each, PackedLinear | PackedEmbedding)]
    assert packed
    engine.float()
    for layer in packed:
        assert layer.weight.dtype == torch.float32
        assert layer.weight.untyped_storage().nbytes() == 4
        assert layer.weight.shape[0] > 1
    assert engine(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_weights_exist_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear's own weight goes as soon as it is packed."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    own = [weakref.ref(layer.weight) for layer in model]
    there: list[int] = []

    def pack_one(*arguments: Any) -> Any:
        there.append(sum(each() is not None for each in own))
        return packed_matrix(*arguments)

    packed_matrix = torch_runtime._packed_matrix
    monkeypatch.setattr(torch_runtime, "_packed_matrix", pack_one)
    pack(model, "bf16", 32)
    assert there == [3, 2, 1]
    assert all(each() is None for each in own)
    assert all(each.untyped_storage().nbytes() <= 4 for each in model.parameters())
    assert all(buffer.untyped_storage().nbytes() <= 256 for buffer in model.buffers())


def test_plain_runtime_is_the_model_as_it_is() -> None:
    engine = anyaccel.init_inference(build("llama"), dtype="fp32", runtime="plain")
    assert engine.runtime == "plain"
    assert not any(isinstance(module, PackedLinear) for module in engine.modules())
    with pytest.raises(UsageError, match="packed weights"):
        anyaccel.init_inference(build("llama"), dtype="int8", runtime="plain")


def test_options_of_a_cache_of_ours_say_that_they_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    for runtime, option in (
        ("torch", {"kv_cache": "int8"}),
        ("plain", {"kv_cache": "int8"}),
        ("plain", {"cache_bytes": 1 << 20}),
    ):
        with pytest.raises(UsageError, match=f"{next(iter(option))}.*its own cache"):
            anyaccel.init_inference(build("xglm"), dtype="fp32", runtime=runtime, **option)
    assert anyaccel.init_inference(build("xglm"), dtype="fp32", kv_cache="int8").runtime == "torch"
    assert "kv_cache='int8' has no effect" in caplog.text


def test_a_runtime_that_lacks_a_model_is_named() -> None:
    for runtime in ("native", "device"):
        with pytest.raises(Unsupported, match=f"the {runtime} runtime has no"):
            anyaccel.init_inference(build("xglm"), dtype="fp32", runtime=runtime)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("runtime", ["torch", "plain"])
def test_auto_is_the_precision_of_the_file(dtype: torch.dtype, runtime: str, tmp_path: Path) -> None:
    model = build("llama").to(dtype)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        want = model(IDS).logits
    for source in (tmp_path, model):
        engine = anyaccel.init_inference(source, dtype="auto", runtime=runtime)
        assert engine.dtype == dtype
        with torch.inference_mode():
            got = engine(IDS).logits
        assert got.dtype == dtype
        assert _error(got, want) < (1e-5 if dtype == torch.float32 else 0.05)

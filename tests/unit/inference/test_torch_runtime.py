# SPDX-License-Identifier: Apache-2.0
"""The generic path: architectures that the native decoder lacks, with packed linears and norms."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyaccel
import families
from anyaccel.errors import UsageError
from anyaccel.inference import generate_tokens, optimize
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.inference.runtimes.torch import PackedEmbedding, PackedExperts, PackedLinear, PackedRMSNorm, pack

IDS = torch.tensor([[5, 17, 99, 3, 64, 28, 101]])
_SMALL: dict[str, Any] = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Architectures of their own: CTRL and XGLM; Bamba mixes Mamba with attention; Mamba 2 has no attention at all.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctrl": ("CTRLConfig", {"n_embd": 48, "dff": 80, "n_layer": 2, "n_head": 6, "n_positions": 64}),
    "xglm": (
        "XGLMConfig",
        {"d_model": 48, "ffn_dim": 80, "num_layers": 2, "attention_heads": 6, "max_position_embeddings": 64},
    ),
    "bamba": (
        "BambaConfig",
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "max_position_embeddings": 64,
        },
    ),
    # Buffers that must follow the dtype (minimax), embeddings that multiply (XGLM, too), weights changed in forward.
    "minimax": (
        "MiniMaxConfig",
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
    ),
    "jetmoe": (
        "JetMoeConfig",
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
        },
    ),
    "rwkv": ("RwkvConfig", {"hidden_size": 48, "num_hidden_layers": 2, "context_length": 64}),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 1},
    ),
}


def build(name: str) -> Any:
    import transformers

    kind, options = OTHERS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**_SMALL, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("name", OTHERS)
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


@pytest.mark.parametrize("name", ["xglm", "minimax"])
def test_other_architectures_in_less_precision(name: str) -> None:
    with torch.inference_mode():
        want = build(name)(IDS).logits
        for dtype, error in (("bf16", 0.05), ("int8", 0.1), ("int4", 0.3)):
            got = anyaccel.init_inference(build(name), dtype=dtype)(IDS).logits.float()
            assert float((got - want).abs().max() / want.abs().max()) < error


@pytest.mark.parametrize(("family", "same"), [("gpt2", True), ("gemma2", True), ("llama", False)])
def test_a_tied_embedding_and_head_are_one_matrix(family: str, same: bool) -> None:
    with torch.inference_mode():
        want = families.build(family)(IDS).logits
    model = optimize(families.build(family), dtype="fp32", runtime="torch")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (getattr(embedding, "packed", None) is head.packed) == same
    assert isinstance(embedding, PackedEmbedding) == same
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-4)
    if same:
        with pytest.raises(UsageError, match="outside the vocabulary of 128"):
            model(torch.tensor([[128]]))
    quantised = optimize(families.build(family), dtype="int4", runtime="torch")
    assert isinstance(quantised.get_input_embeddings(), PackedEmbedding)
    shape = quantised.get_output_embeddings().weight.shape
    assert quantised.get_output_embeddings().packed.bytes >= shape.numel()  # 8 bits in int4, too


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_stacked_experts_are_packed(family: str) -> None:
    ids = torch.cat([IDS, IDS.flip(1)])
    with torch.inference_mode():
        want = families.build(family)(ids).logits
        model = optimize(families.build(family), dtype="fp32", runtime="torch")
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids[:, :1]).logits, want[:, :1], rtol=1e-4, atol=1e-4)
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert len(packed) == 2
    assert not any(parameter.dim() == 3 for parameter in model.parameters())


@pytest.mark.parametrize("name", ["xglm", "bamba"])
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
        want = families.build(family)(IDS).logits
        engine = anyaccel.init_inference(families.build(family), dtype="fp32", runtime="torch")
        torch.testing.assert_close(engine(IDS).logits, want, rtol=1e-4, atol=1e-4)
    assert engine.runtime == "torch"
    assert engine.why == ""


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.05), ("fp16", 0.03), ("int8", 0.06), ("int4", 0.4)])
def test_precisions(dtype: str, error: float, tmp_path: Path) -> None:
    families.build("llama").save_pretrained(tmp_path)
    with torch.inference_mode():
        want = families.build("llama")(IDS).logits
        got = anyaccel.init_inference(tmp_path, dtype=dtype, runtime="torch")(IDS).logits.float()
    assert float((got - want).abs().max() / want.abs().max()) < error


def test_norms_are_replaced_only_by_what_computes_the_same() -> None:
    for family, kind in (("llama", "LlamaRMSNorm"), ("gemma2", "Gemma2RMSNorm"), ("granite", "GraniteRMSNorm")):
        model = optimize(families.build(family), dtype="fp32", runtime="torch")
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
    engine = anyaccel.init_inference(families.build("llama"), dtype="int8", runtime="torch")
    packed = [each for each in engine.modules() if isinstance(each, PackedLinear | PackedEmbedding)]
    assert packed
    engine.float()
    for layer in packed:
        assert layer.weight.dtype == torch.float32
        assert layer.weight.untyped_storage().nbytes() == 4
        assert layer.weight.shape[0] > 1
    assert engine(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_weights_exist_once() -> None:
    """Each linear's own weight goes as soon as it is packed."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    storages = [layer.weight.untyped_storage() for layer in model]
    sizes = [storage.data_ptr() for storage in storages]
    del storages
    pack(model, "bf16", 32)
    gc.collect()
    assert sizes
    assert sum(p.numel() for p in model.parameters()) == 0
    assert all(buffer.untyped_storage().nbytes() <= 256 for buffer in model.buffers())


def test_plain_runtime_is_the_model_as_it_is() -> None:
    engine = anyaccel.init_inference(families.build("llama"), dtype="fp32", runtime="plain")
    assert engine.runtime == "plain"
    assert not any(isinstance(module, PackedLinear) for module in engine.modules())
    with pytest.raises(UsageError, match="packed weights"):
        anyaccel.init_inference(families.build("llama"), dtype="int8", runtime="plain")

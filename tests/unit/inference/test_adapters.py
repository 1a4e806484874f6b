# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of PEFT that are added to the weights as these are read: logits are PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyaccel
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.adapters import CONFIG, WEIGHTS

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it

IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("lora") / "model"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapter(model: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Save an adapter with values that change the logits; returns PEFT's own logits."""
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    options = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    adapted = peft.get_peft_model(network, peft.LoraConfig(**options)).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if "lora_" in name:
                values.copy_(torch.randn(values.shape, generator=random) * 0.1)
        logits: torch.Tensor = adapted(IDS).logits
    adapted.save_pretrained(folder)
    return logits


@pytest.mark.parametrize("runtime", ["native", "device"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3, r"layers\.1\.mlp\.up_proj": 5}},
    ],
    ids=["all", "rslora", "patterns"],
)
def test_logits_are_those_of_peft(model: Path, tmp_path: Path, options: dict[str, Any], runtime: str) -> None:
    wanted = adapter(model, tmp_path, **options)
    plain = anyaccel.init_inference(str(model), dtype="fp32", runtime=runtime)(IDS).logits
    assert (plain - wanted).abs().max() > 0.1
    for _ in range(2):  # the second time from the packed weights, which are those with the adapter
        engine = anyaccel.init_inference(str(model), dtype="fp32", runtime=runtime, lora=str(tmp_path))
        torch.testing.assert_close(engine(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    again = anyaccel.init_inference(str(model), dtype="fp32", runtime=runtime)(IDS).logits
    torch.testing.assert_close(again, plain)


@pytest.mark.slow
def test_rows_of_a_gguf_file_are_in_an_order_of_their_own(tmp_path: Path) -> None:
    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.generic.loading import model_folder

    file = Path(default_model_file())
    folder = model_folder(file, print)
    adapter(folder, tmp_path)
    both = [anyaccel.init_inference(str(path), dtype="fp32", lora=str(tmp_path))(IDS).logits for path in (folder, file)]
    plain = anyaccel.init_inference(str(file), dtype="fp32")(IDS).logits
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-4)
    assert (both[1] - plain).abs().max() > 0.1


def test_another_alpha_is_another_model(model: Path, tmp_path: Path) -> None:
    adapter(model, tmp_path)
    first = anyaccel.init_inference(str(model), dtype="fp32", lora=str(tmp_path))(IDS).logits
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "lora_alpha": 1}))
    second = anyaccel.init_inference(str(model), dtype="fp32", lora=str(tmp_path))(IDS).logits
    assert (first - second).abs().max() > 0.1


def test_what_cannot_be_merged_is_named(model: Path, tmp_path: Path) -> None:
    def fails(match: str, error: type[Exception] = ModelError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            anyaccel.init_inference(str(model), dtype="fp32", lora=str(tmp_path / "a"), **options)

    fails("is no adapter of PEFT")
    adapter(model, tmp_path / "a")
    fails("merge the adapter with PEFT", UsageError, runtime="torch")
    config, weights = tmp_path / "a" / CONFIG, tmp_path / "a" / WEIGHTS
    before, tensors = config.read_text(), load_file(weights)
    for change, words in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' has changed the model's own weights"),
    ):
        config.write_text(json.dumps({**json.loads(before), **change}))
        fails(words)
    config.write_text(before)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed, words in (
        ({**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, "no part of a LoRA adapter"),
        ({**tensors, name: torch.zeros(4, 60)}, "the adapter is of another model$"),
        ({key: value for key, value in tensors.items() if key != name}, "has one matrix of two"),
        ({key.replace("layers.1", "layers.7"): value for key, value in tensors.items()}, r"'model\.layers\.7"),
    ):
        save_file(changed, weights)
        fails(words)

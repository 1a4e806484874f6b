# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose config.json ties the head to the embedding, and that have both: the weights are believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import anyaccel
import ranks
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.quantize import quantize

IDS = torch.tensor([[5, 17, 42, 3, 64, 28, 101]])
SIZES = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SIZES
)
GPT2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **SIZES)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


@pytest.fixture(scope="module", autouse=True)
def _server(rank_server: None) -> None:
    """Ranks are started below."""


def make(folder: Path, kind: str = "llama", form: str = "safetensors", head: str = "own") -> Path:
    """A checkpoint whose head is one of its "own", or the embedding "twice", in one of the forms of checkpoints."""
    torch.manual_seed(0)
    config = CONFIGS[kind]
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    with torch.no_grad():
        weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
        embedding = model.get_input_embeddings().weight
        weights["lm_head.weight"] = embedding.clone()
        if head == "own":
            weights["lm_head.weight"][-1, -1] += 3.0  # at the very end, which is compared too
    (folder / "model.safetensors").unlink()
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif form == "sharded":
        files = {name: f"part{int(name == 'lm_head.weight')}.safetensors" for name in weights}
        for file in set(files.values()):
            save_file(
                {name: each for name, each in weights.items() if files[name] == file}, folder / file, {"format": "pt"}
            )
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@torch.inference_mode()
def expected(folder: Path) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize(
    ("kind", "form"), [("llama", "safetensors"), ("llama", "bin"), ("llama", "sharded"), ("gpt2", "safetensors")]
)
def test_a_head_of_its_own_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    folder = make(tmp_path / "model", kind, form)
    want = expected(folder)
    for runtime in ("native", "torch", "plain", "native"):  # the last one reads what the first has packed
        engine = anyaccel.init_inference(folder, dtype="fp32", runtime=runtime)
        with torch.inference_mode():
            torch.testing.assert_close(engine(IDS).logits, want, rtol=1e-4, atol=1e-4)
        assert engine.module.lm_head.weight is not engine.module.get_input_embeddings().weight
    assert engine.native is not None
    assert engine.native.cached
    notes = [each.getMessage() for each in caplog.records if "different values" in each.getMessage()]
    assert sum("lm_head.weight" in each for each in notes if "each is used as it is" in each) == 3


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
def test_an_embedding_stored_twice_stays_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str) -> None:
    folder = make(tmp_path / "model", form=form, head="twice")
    with caplog.at_level(logging.WARNING, "anyaccel"):
        assert load_native(folder).whole_spec.tied
        engine = anyaccel.init_inference(folder, dtype="fp32", runtime="plain")
    assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    assert not caplog.records


def test_a_quantised_copy_says_what_its_weights_are(tmp_path: Path) -> None:
    for head in ("own", "twice"):
        folder = make(tmp_path / head, head=head)
        quantize(folder, tmp_path / f"{head}-int8", dtype="int8")
        copied = json.loads((tmp_path / f"{head}-int8" / "config.json").read_text())
        assert copied["tie_word_embeddings"] is (head == "twice")
        assert load_native(tmp_path / f"{head}-int8").whole_spec.tied is (head == "twice")
    assert "lm_head.weight" in load_file(tmp_path / "own-int8" / "model.safetensors")


def _on_a_rank(folder: str) -> list[torch.Tensor]:
    found = []
    for runtime in ("native", "torch"):
        engine = anyaccel.init_inference(folder, dtype="fp32", runtime=runtime, tensor_parallel={"tp_size": 2})
        with torch.no_grad():
            found.append(engine(IDS).logits)
    return found


def test_ranks_divide_a_head_of_its_own(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    want = expected(folder)
    for each in ranks.run(_on_a_rank, 2, str(folder), ANYACCEL_CACHE_DIR=str(tmp_path / "cache")):
        for logits in each:
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)

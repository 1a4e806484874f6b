# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: slices, damage, files that lead elsewhere, GGUF files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import anyaccel
import family_cases
import fuzz_models
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import generate_tokens
from anyaccel.inference.checkpoints.slices import Slice
from anyaccel.inference.checkpoints.torch_files import Checkpoint
from anyaccel.inference.generic.gguf_conversion import converted
from anyaccel.inference.generic.loading import model_folder, skeleton
from anyaccel.inference.generic.tp.plan import make_plan

MATRIX = torch.arange(60.0).view(10, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"m": MATRIX, "v": torch.arange(10.0)}, tmp_path / "model.safetensors")
    return tmp_path


def test_slices_of_safetensors_and_bin_are_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("bin")
    torch.save({"m": MATRIX, "v": torch.arange(10.0)}, other / "pytorch_model.bin")
    for checkpoint in (Checkpoint(folder), Checkpoint(other)):
        size = MATRIX.shape
        assert torch.equal(checkpoint.read("m", size, None), MATRIX)
        rows = checkpoint.read("m", size, Slice(0, (range(1, 3), range(7, 10))))
        assert torch.equal(rows, MATRIX[[1, 2, 7, 8, 9]])
        columns = checkpoint.read("m", size, Slice(1, (range(2, 5),)))
        assert torch.equal(columns, MATRIX[:, 2:5])
        assert torch.equal(checkpoint.read("v", torch.Size([10]), Slice(0, (range(4, 6),))), torch.tensor([4.0, 5.0]))
        with pytest.raises(ModelError, match="no tensor 'w'"):
            checkpoint.read("w", size, None)
        with pytest.raises(ModelError, match=r"'m' is \(10, 6\).*needs \(12, 6\)"):
            checkpoint.read("m", torch.Size([12, 6]), Slice(0, (range(6),)))


def test_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"model\.safetensors.*cut off: .* is the download complete"):
        Checkpoint(folder)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights found"):
        Checkpoint(tmp_path)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("code from the checkpoint ran",))

    torch.save({"w": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": {"m": "../secret.safetensors"}}, "outside the folder"),
        ({"weight_map": {"m": "absent.safetensors"}}, "missing"),
        ({"weight_map": {"m": "x" * 5000}}, "missing"),
        ({"weights": {}}, "weight_map is missing"),
        ([], "not a JSON object"),
    ],
)
def test_bad_index(index: object, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=text):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 something else"])
def test_file_that_is_no_gguf(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="not a GGUF file"):
        model_folder(tmp_path / "x.gguf")


def test_damaged_gguf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    with pytest.raises(ModelError, match=r"x\.gguf"):
        converted(tmp_path / "x.gguf")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_any_rank_of_a_job_converts_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers saves nothing in other ranks than the first, and the rank that gets the lock first may be any."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(fuzz_models.healthy_gguf("llama").content())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _group=None: 1)
    folder = converted(tmp_path / "x.gguf")
    assert {"config.json", "model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert skeleton(folder, torch.float32).config.model_type == "llama"


def test_model_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder or file"):
        model_folder("org/model-name")
    with pytest.raises(ModelError, match=r"config\.json"):
        model_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ModelError, match="cannot build"):
        skeleton(tmp_path, torch.float32)


def test_skeleton_takes_no_memory_and_has_real_buffers(tmp_path: Path) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    model = skeleton(tmp_path, torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    model = family_cases.build("llama")
    model.save_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        anyaccel.init_inference(tmp_path, dtype="fp32")


def test_meta_model_is_refused(tmp_path: Path) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="meta device"):
        anyaccel.init_inference(skeleton(tmp_path, torch.float32), dtype="fp32")


def test_single_process_engine_is_the_model(tmp_path: Path) -> None:
    family_cases.build("qwen2").save_pretrained(tmp_path)
    engine = anyaccel.init_inference(tmp_path, dtype="fp32")
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(engine(ids).logits, family_cases.build("qwen2")(ids).logits)


@pytest.mark.parametrize(
    ("ids", "options", "text"),
    [
        ([], {"max_new_tokens": 4}, "at least one token"),
        ([1, 500], {"max_new_tokens": 4}, "token 500 is outside"),
        ([-1], {"max_new_tokens": 4}, "outside"),
        ([1], {"max_new_tokens": 64}, "context of 64"),
        ([1], {"max_new_tokens": 4, "temperature": -1.0}, "temperature"),
        ([1], {"max_new_tokens": 4, "top_p": 0.0}, "top_p"),
    ],
)
def test_generation_arguments_are_checked_before_anything_runs(
    ids: list[int], options: dict[str, float], text: str
) -> None:
    engine = anyaccel.init_inference(family_cases.build("llama"), dtype="fp32")
    with pytest.raises(UsageError, match=text):
        generate_tokens(engine, torch.tensor(ids, dtype=torch.int64), **options)  # type: ignore[arg-type]


def test_plan_needs_no_weights_and_says_what_it_leaves_whole() -> None:
    model = family_cases.build("olmo2").to("meta")
    plan = make_plan(model, 0, 2)
    assert "model.layers.0.mlp.down_proj" in plan.row_parallel
    assert "across heads" in plan.whole["model.layers.0.self_attn"]
    plan = make_plan(torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2)])), 0, 2)
    assert plan.whole == {"0": "no block of Sequential has linears that can be divided"}
    plan = make_plan(torch.nn.Linear(2, 2), 0, 2)
    assert plan.whole == {"": "Linear has no list of layers with plain linears"}
    assert not plan.slices and not plan.row_parallel


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    with pytest.raises(ModelError):
        anyaccel.init_inference(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["glm4_moe", "gemma3"])
def test_buffers_of_the_checkpoint_are_read(family: str, tmp_path: Path) -> None:
    model = family_cases.build(family)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    engine = anyaccel.init_inference(tmp_path, dtype="fp32")
    ids = torch.tensor([[3, 4, 5, 9, 11]])
    with torch.inference_mode():
        torch.testing.assert_close(engine(ids).logits, model(ids).logits)


def test_fp32_buffers_do_not_take_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    family_cases.build("gemma2").to(torch.bfloat16).save_pretrained(tmp_path)
    buffers = dict(skeleton(tmp_path, torch.float32).named_buffers())
    scale = next(buffer for name, buffer in buffers.items() if name.endswith("embed_scale"))
    assert float(scale) == pytest.approx(48**0.5, rel=1e-6)


def test_subclassed_linears_are_not_cut() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = family_cases.build("llama")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Scaled
    plan = make_plan(model, 0, 2)
    assert not [name for name in plan.slices if ".mlp." in name]


def test_logits_that_are_not_finite_are_an_error() -> None:
    model = family_cases.build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    engine = anyaccel.init_inference(model, dtype="fp32")
    with pytest.raises(ModelError, match="NaN"):
        list(generate_tokens(engine, torch.tensor([1, 2]), max_new_tokens=3))


def test_model_without_key_value_cache_generates_as_transformers_does() -> None:
    import transformers

    config = transformers.Mamba2Config(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, head_dim=8, num_heads=8, state_size=8, n_groups=1
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([5, 6, 7, 8])
    want = model.generate(ids[None], attention_mask=torch.ones(1, 4), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    engine = anyaccel.init_inference(model, dtype="fp32")
    assert list(generate_tokens(engine, ids, max_new_tokens=8)) == want


@pytest.mark.parametrize("runtime", ["native", "plain"])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path, name: str, runtime: str) -> None:
    family_cases.build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {name: "nonsense"}))
    with pytest.raises(ModelError, match=rf"config\.json: {name}='nonsense': torch has no such dtype"):
        anyaccel.init_inference(tmp_path, dtype="fp32", runtime=runtime)

# SPDX-License-Identifier: Apache-2.0
"""Weights from files into the native decoder: damage is found and named, ranks get their parts, memory stays low."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.inference.checkpoints.identity import identity, weights_of
from anyaccel.inference.checkpoints.sources import SafetensorsSource
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.in_memory import checkpoint_in_memory
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.shard import shard, slices
from anyaccel.inference.spec.decoder import weights
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.safetensors.header import TensorEntry, read_header
from recorded_model import RecordedModel

HIDDEN, FEATURES, VOCAB, LAYERS = 48, 80, 100, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def entries_of(content: bytes) -> dict[str, TensorEntry]:
    header = read_header(lambda begin, length: content[begin : begin + length], "file", len(content))
    return {entry.name: entry for entry in header.entries}


def llama_tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in {"q": HIDDEN, "k": 16, "v": 16, "o": HIDDEN}.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        for name, shape in {"gate": (FEATURES, HIDDEN), "up": (FEATURES, HIDDEN), "down": (HIDDEN, FEATURES)}.items():
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def packed(folder: Path, dtype: str | None = "fp32", rank: int = 0, size: int = 1) -> RecordedModel:
    plan = Plan(read_checkpoint(folder), Precision(dtype), rank, size)
    model = RecordedModel(plan.shapes())
    plan.fill(model, lambda done, total: None)  # type: ignore[arg-type]
    model.check_full()
    return model


def test_weights_are_put_together(folder: Path) -> None:
    model, tensors = packed(folder), llama_tensors()
    attention = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(model.matrices["layers.1.qkv"], np.concatenate(attention))
    biases = [tensors[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(model.vectors["layers.1.qkv.bias"], np.concatenate(biases))
    np.testing.assert_array_equal(model.matrices["head"], tensors["lm_head.weight"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_have_the_whole(folder: Path, size: int) -> None:
    whole = packed(folder)
    ranks = [packed(folder, rank=rank, size=size) for rank in range(size)]
    for name in ("embed", "head"):
        np.testing.assert_array_equal(np.concatenate([each.matrices[name] for each in ranks]), whole.matrices[name])
    for name in ("layers.0.o", "layers.0.mlp.down"):
        both = np.concatenate([each.matrices[name] for each in ranks], axis=1)
        np.testing.assert_array_equal(both, whole.matrices[name])
    # A sum over ranks adds a bias once.
    assert all((each.vectors["layers.0.o.bias"] == 0).all() for each in ranks[1:])
    np.testing.assert_array_equal(ranks[0].vectors["layers.0.o.bias"], whole.vectors["layers.0.o.bias"])
    spec = Plan(read_checkpoint(folder), Precision("fp32"), 0, 1).whole
    rows = [sum(map(len, slices(spec, rank, size)["layers.0.qkv"].rows)) for rank in range(size)]
    heads = [
        (s.layers[0].attention.heads, s.layers[0].attention.kv_heads)
        for s in (shard(spec, r, size) for r in range(size))
    ]
    assert rows == [8 * (queries + 2 * keys) for queries, keys in heads]
    assert sum(queries for queries, _ in heads) == 6
    for rank in range(size):
        own = shard(spec, rank, size)
        assert own.vocab_first % 16 == 0
        assert {m.name: (m.rows, m.cols) for m in weights(own)[0]} == {
            name: value.shape for name, value in ranks[rank].matrices.items()
        }


def test_too_many_ranks(folder: Path) -> None:
    with pytest.raises(UsageError, match="tp_size=7"):
        Plan(read_checkpoint(folder), Precision("fp32"), 0, 7)


def test_sharded_files(folder: Path) -> None:
    tensors = llama_tensors()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    whole = packed(folder).matrices
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    parts = packed(folder).matrices
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    weight_map["absent"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"has no tensor 'absent', which model\.safetensors\.index\.json says"):
        read_checkpoint(folder)
    for name in ("../elsewhere.safetensors", "w/../../elsewhere.safetensors", "/elsewhere.safetensors", "..", ""):
        weight_map["absent"] = name
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match="outside the folder"):
            read_checkpoint(folder)


def test_files_in_a_folder_of_the_folder(folder: Path) -> None:
    whole = packed(folder).matrices
    tensors = llama_tensors()
    (folder / "w").mkdir()
    (folder / "model.safetensors").rename(folder / "w" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "w/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = packed(folder).matrices
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    before = identity(folder)
    assert "w/model.safetensors" in weights_of(folder)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "w" / "model.safetensors")
    assert identity(folder) != before


def test_missing_tensor_and_wrong_shape_are_named(folder: Path) -> None:
    tensors = llama_tensors()
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: .*no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        packed(folder)
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": gone[:-1]}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"wrong shape.*up_proj\.weight \(79, 48\).*160 x 48"):
        packed(folder)


def test_what_a_checkpoint_has_too_much_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "num_hidden_layers": CONFIG["num_hidden_layers"] - 1}
    config["architectures"] = ["LlamaModel"]
    (folder / "config.json").write_text(json.dumps(config))
    from anyaccel.inference.native.runtime import load_native

    load_native(folder)
    last = CONFIG["num_hidden_layers"] - 1
    assert any(f"for example model.layers.{last}." in message for message in caplog.messages)
    assert any("LlamaModel; it runs as a causal LM" in message for message in caplog.messages)
    caplog.clear()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    load_native(folder)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("dtype", "error", "said"),
    [
        ("F8_E4M3", Unsupported, "weights of dtype F8_E4M3"),
        ("I8", ModelError, r"tensor '.*' has integers \(I8\), and config\.json has no quantization_config"),
    ],
)
def test_weights_of_other_dtypes_are_told(folder: Path, dtype: str, error: type[Exception], said: str) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for entry in header.values():
        entry["dtype"], entry["shape"] = dtype, [*entry["shape"][:-1], entry["shape"][-1] * 4]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(error, match=said):
        packed(folder)


@pytest.mark.parametrize("kind", ["zip", "legacy", "sharded"])
def test_bin_files_are_read(folder: Path, kind: str) -> None:
    import torch
    from safetensors.torch import load_file

    whole, want = packed(folder).matrices, load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(want)
    if kind == "sharded":
        files = {f"pytorch_model-{number}-of-2.bin": names[number::2] for number in range(2)}
        index = {name: file for file, inside in files.items() for name in inside}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    else:
        files = {"pytorch_model.bin": names}
    for file, inside in files.items():
        torch.save(
            {name: want[name] for name in inside}, folder / file, _use_new_zipfile_serialization=kind != "legacy"
        )
    got = packed(folder).matrices
    assert got.keys() == whole.keys()
    for name, matrix in whole.items():
        np.testing.assert_array_equal(got[name], matrix)
    file = folder / next(iter(files))
    good = file.read_bytes()
    for bad in (good[:100], good[: len(good) // 2]):
        file.write_bytes(bad)
        with pytest.raises(ModelError, match=file.name):
            read_checkpoint(folder)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="no weights found"):
        read_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="empty"):
        read_checkpoint(tmp_path)


def test_truncated_and_damaged_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut in (1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors: .*(cut off|too few)"):
            SafetensorsSource(folder)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ModelError, match="has more than its tensors"):
        SafetensorsSource(folder)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_no_header_leads_outside_the_file(data: st.DataObject) -> None:
    header: Any = {f"t{i}": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]} for i in range(3)}
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", ""]))
    strange = st.one_of(
        st.none(),
        st.integers(-10, 1 << 70),
        st.text(max_size=5),
        st.lists(st.integers(-5, 1 << 66), max_size=3),
        st.floats(),
    )
    if field:
        header[name][field] = data.draw(strange)
    else:
        header[name] = data.draw(strange)
    text = json.dumps(header).encode()
    content = struct.pack("<Q", data.draw(st.sampled_from([len(text), len(text) + 1, 1 << 40]))) + text + bytes(72)
    try:
        entries = entries_of(content)
    except ModelError as error:
        assert str(error).startswith("file: ")
        return
    for entry in entries.values():
        assert 0 <= entry.begin <= entry.end <= len(content)


@pytest.mark.parametrize(
    "dtype, size",
    [
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("F8_E8M0", 8),
        ("F8_E4M3FNUZ", 8),
        ("BOOL", 8),
        ("U16", 16),
        ("C64", 64),
    ],
)
def test_every_dtype_of_safetensors_has_its_size(dtype: str, size: int, tmp_path: Path) -> None:
    """A checkpoint may have such tensors beside the weights."""
    header = {"a": {"dtype": dtype, "shape": [3, 4], "data_offsets": [0, 12 * size // 8]}}
    content = struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + bytes(12 * size // 8)
    (tmp_path / "m").write_bytes(content)
    with safe_open(tmp_path / "m", "np") as file:
        assert list(file.keys()) == ["a"]
    entries = entries_of(content)
    assert (entries["a"].dtype, entries["a"].end - entries["a"].begin) == (dtype, 12 * size // 8)
    header["a"]["shape"] = [3, 3]
    content = struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + bytes(12 * size // 8)
    with pytest.raises(ModelError, match=r"do(es)? not fit"):
        entries_of(content)


def test_names_that_appear_twice_are_found() -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f'{{"a":{entry},"a":{entry}}}'.encode()
    content = struct.pack("<Q", len(text)) + text + bytes(4)
    with pytest.raises(ModelError, match="twice"):
        entries_of(content)


def test_a_module_in_memory_is_packed_and_released() -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    )
    wanted = model.model.layers[1].mlp.down_proj.weight.detach().numpy().copy()
    checkpoint = checkpoint_in_memory(model, None, release=True)
    plan = Plan(checkpoint, Precision("bf16"), 0, 1)
    recorded = RecordedModel(plan.shapes())
    plan.fill(recorded, lambda done, total: None)  # type: ignore[arg-type]
    recorded.check_full()
    np.testing.assert_array_equal(recorded.matrices["layers.1.mlp.down"], wanted)
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    with pytest.raises(AnyAccelError, match="no tensor"):
        checkpoint.source.tensor("model.absent.weight")


CHECK = """
import os
import sys
from pathlib import Path
from anyaccel.host_memory import high_water_mark as peak
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.options import ModelOptions

os.environ["ANYACCEL_PACKED_CACHE_BYTES"] = "0"
before = peak()
native = load_native(sys.argv[1], ModelOptions(sys.argv[2]))
assert native.model.weight_bytes > 50 << 20
print((peak() - before) / native.model.weight_bytes)
assert not {"torch", "transformers"} & sys.modules.keys()
assert "numpy" not in sys.modules
"""


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_peak_memory_is_that_of_the_packed_weights(tmp_path: Path, dtype: str) -> None:
    config = {**CONFIG, "hidden_size": 768, "intermediate_size": 4096, "num_attention_heads": 12, "head_dim": 64}
    config |= {"num_key_value_heads": 4, "vocab_size": 40000, "num_hidden_layers": 4, "attention_bias": False}
    at = "model.layers.{}."
    shapes = {"model.embed_tokens.weight": (40000, 768), "lm_head.weight": (40000, 768), "model.norm.weight": (768,)}
    for layer in range(4):
        rows = {"q": (768, 768), "k": (256, 768), "v": (256, 768), "o": (768, 768)}
        shapes |= {f"{at.format(layer)}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        rows = {"gate": (4096, 768), "up": (4096, 768), "down": (768, 4096)}
        shapes |= {f"{at.format(layer)}mlp.{name}_proj.weight": shape for name, shape in rows.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{at.format(layer)}{name}.weight": (768,) for name in norms}
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path), dtype], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.15

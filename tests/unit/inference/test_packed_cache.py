# SPDX-License-Identifier: Apache-2.0
"""Packed models are kept and read again; damage is found and repaired, and what is out of date goes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anyaccel.inference.checkpoints import cache_lock
from anyaccel.inference.native import packed_cache, runtime
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace, load_native
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.spec.mapping import Unsupported

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    folder.mkdir()
    write(folder, seed=0)
    return folder


def write(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, 64)
        for name, shape in {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}.items():
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (64,)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def logits(native: NativeModel) -> Any:
    tokens = np.array([3, 5, 8, 13], np.int64)
    result = np.empty((4, 64), np.float32)
    sequence = native.model.create()
    native.model.forward([sequence], [4], tokens.ctypes.data, result.ctypes.data, [0, 1, 2, 3])
    native.model.destroy(sequence)
    return result


def entries(model: Path) -> list[Path]:
    root = model.parent / "cache" / "packed"
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4", "auto"])
def test_a_model_is_packed_once(model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(dtype)
    first = load_native(model, options)
    second = load_native(model, options)
    assert (first.cached, second.cached) == (False, True)
    np.testing.assert_array_equal(logits(first), logits(second))
    assert (second.spec, second.whole_spec) == (first.spec, first.whole_spec)
    assert (second.config, second.generation_config) == (first.config, first.generation_config)
    assert second.generation_config == {"eos_token_id": 2}
    [entry] = entries(model)
    assert entry.stat().st_mode & 0o777 == 0o700
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "0")
    np.testing.assert_array_equal(logits(load_native(model, options)), logits(second))


def test_each_precision_and_rank_has_its_own(model: Path) -> None:
    for dtype, group, rank, tp in (("bf16", 32, 0, 1), ("int4", 32, 0, 1), ("int4", 64, 0, 1), ("bf16", 32, 1, 2)):
        native = load_native(model, ModelOptions(dtype, group, tp=tp), RankPlace(rank))
        assert not native.cached
        assert native.spec.rank == rank
    assert len(entries(model)) == 4
    assert load_native(model, ModelOptions(tp=2), RankPlace(1)).spec.vocab_first == 32


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "one bit":
        content[len(content) // 2] ^= 4
    elif how == "cut off":
        content = content[:-1]
    elif how == "longer":
        content += b"\0"
    else:
        content = bytearray(len(content))
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["weights", "model.json"])
@pytest.mark.parametrize("how", ["one bit", "cut off", "longer", "zeros"])
def test_damage_is_found_and_repaired(model: Path, file: str, how: str) -> None:
    expected = logits(load_native(model))
    [entry] = entries(model)
    damage(entry / file, how)
    again = load_native(model)
    assert not again.cached
    np.testing.assert_array_equal(logits(again), expected)
    assert load_native(model).cached
    (entry / file).unlink()
    assert not load_native(model).cached
    assert load_native(model).cached


def test_a_changed_model_is_packed_again_and_the_old_entry_goes(model: Path) -> None:
    before = logits(load_native(model))
    old = entries(model)
    write(model, seed=1)
    os.utime(model / "model.safetensors", ns=(1, 1))  # whatever the clock's resolution is
    changed = load_native(model)
    assert not changed.cached
    assert not np.array_equal(logits(changed), before)
    assert len(entries(model)) == 1
    assert entries(model) != old
    other = model.with_name("other")
    shutil.copytree(model, other)
    load_native(other)
    assert len(entries(model)) == 2
    shutil.rmtree(model)
    load_native(other, ModelOptions("int8"))  # prunes what has no source any more
    assert {entry.name.split("-")[0] for entry in entries(model)} == {"other"}


def test_the_least_recently_used_go_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = load_native(model, ModelOptions("bf16")).model.weight_bytes
    [bf16] = entries(model)
    load_native(model, ModelOptions("int8"))
    [int8] = set(entries(model)) - {bf16}
    os.utime(int8 / "model.json", ns=(1, 1))
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", str(2 * size + 1000))
    load_native(model, ModelOptions("fp16"))
    assert bf16 in entries(model)
    assert int8 not in entries(model)
    assert len(entries(model)) == 2
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", str(size // 2))
    assert not load_native(model, ModelOptions("fp32")).cached  # larger than the bound: not kept
    assert len(entries(model)) == 2
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "0")
    assert not load_native(model, ModelOptions("bf16")).cached


def test_without_a_place_the_model_still_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (model.parent / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert not load_native(model).cached
    assert "packed weights are not kept" in caplog.text
    (model.parent / "cache").unlink()

    def full(self: packed_cache.PackedModel, *args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache.PackedModel, "save", full)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert logits(load_native(model)).shape == (4, 64)
    assert "No space left" in caplog.text
    assert entries(model) == []


def test_what_a_killed_process_left_is_cleaned_up(model: Path) -> None:
    load_native(model)
    [entry] = entries(model)
    left = entry.with_name(f".{entry.name}-abc")
    left.mkdir()
    shutil.rmtree(entry)
    load_native(model)
    assert not left.exists()


def test_processes_at_once(model: Path) -> None:
    code = (
        "import sys; from anyaccel.inference.native.runtime import load_native; print(load_native(sys.argv[1]).cached)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    results = [process.communicate(timeout=100)[0].strip() for process in started]
    assert sorted(results) == ["False", "True", "True"]
    assert len(entries(model)) == 1


def test_a_model_of_another_family(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "model_type": "rwkv"}))
    with pytest.raises(Unsupported, match="rwkv"):
        load_native(model)


def test_progress_ends_at_the_size(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    for cached in (False, True):
        seen.clear()
        native = load_native(model, callbacks=Callbacks(lambda done, total: seen.append((done, total))))
        assert native.cached == cached
        assert seen.index((native.model.weight_bytes, native.model.weight_bytes)) == len(seen) - 1
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes beside the work wait for it; so small a model is written beside it, too."""
    monkeypatch.setattr(runtime, "_LEAST_BESIDE", 0)
    opened = threading.Event()
    save = packed_cache.PackedModel.save
    monkeypatch.setattr(packed_cache.PackedModel, "save", lambda *given: opened.wait(60) and save(*given))
    return opened


def test_weights_are_written_beside_the_work(model: Path, gate: threading.Event) -> None:
    first = load_native(model)
    assert first.saving is not None
    first.saving.begin()
    expected = logits(first)  # while it is written
    assert entries(model) == []
    gate.set()
    first.saving.finish()
    assert len(entries(model)) == 1
    second = load_native(model)
    assert (second.cached, second.saving) == (True, None)
    np.testing.assert_array_equal(logits(second), expected)


def test_another_process_waits_for_what_is_written_beside_the_work(model: Path, gate: threading.Event) -> None:
    first = load_native(model)
    assert first.saving is not None

    assert load_native(model, callbacks=Callbacks(check=gate.set)).cached
    first.saving.finish()


def test_a_write_beside_the_work_can_be_given_up(model: Path, gate: threading.Event) -> None:
    native = load_native(model)
    assert native.saving is not None
    gate.set()
    native.saving.finish(stop=True)
    assert entries(model) == []
    assert not load_native(model).cached
    assert load_native(model).cached


def test_an_interrupted_wait_gives_the_write_up(
    model: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = load_native(model).saving
    assert saving is not None
    wait = saving._ended.wait

    def interrupted() -> None:
        monkeypatch.setattr(saving._ended, "wait", wait)
        gate.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(saving._ended, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saving.finish()
    assert not load_native(model).cached


def test_few_weights_are_written_at_once(model: Path) -> None:
    assert load_native(model).saving is None
    assert len(entries(model)) == 1


def test_the_end_of_a_process_waits_for_what_is_written(model: Path) -> None:
    script = (
        "import sys; from anyaccel.inference.native import runtime; runtime._LEAST_BESIDE = 0;"
        "assert runtime.load_native(sys.argv[1]).saving"
    )
    subprocess.run([sys.executable, "-c", script, str(model)], check=True, timeout=100)
    assert load_native(model).cached


def test_a_lock_whose_file_is_removed_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that has just removed the entry."""
    path = tmp_path / "model.lock"
    flock = cache_lock.fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        path.touch()
        flock(file, how)

    monkeypatch.setattr(cache_lock.fcntl, "flock", late)
    with cache_lock.locked(path), cache_lock.locked_if_free(path) as free:
        assert not free
    with cache_lock.locked_if_free(path) as free:
        assert free

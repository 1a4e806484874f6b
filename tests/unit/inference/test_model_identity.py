# SPDX-License-Identifier: Apache-2.0
"""What is kept of a model is that of the files that are there, however another file came into the place of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_packed_cache import CONFIG, entries, logits, model, write

from anyaccel.inference.checkpoints import conversions, identity
from anyaccel.inference.native.runtime import load_native
from anyaccel.inference.text import gguf_conversion as gguf

__all__ = ["model"]  # the fixture


def _in_place(file: Path, other: Path) -> None:
    """As rsync --inplace -t does it."""
    file.write_bytes(other.read_bytes())


def _over(file: Path, other: Path) -> None:
    """As cp -p does it."""
    shutil.copy2(other, file)


def _renamed(file: Path, other: Path) -> None:
    """As rsync -t, tar and mv do it."""
    shutil.copy2(other, file.with_name("beside"))
    file.with_name("beside").rename(file)


def _linked(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


REPLACE = [_in_place, _over, _renamed, _linked]


def _put(file: Path, other: Path, replace: Callable[[Path, Path], None]) -> None:
    """The content of `other`, which has the same size, where `file` was, with its modification time."""
    before = file.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    replace(file, other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("replace", REPLACE)
def test_weights_of_the_same_size_and_time_are_packed_again(
    model: Path, replace: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other, seed=1)
    before = logits(load_native(model))
    _put(model / "model.safetensors", other / "model.safetensors", replace)
    again = load_native(model)
    assert not again.cached
    assert load_native(model).cached
    assert len(entries(model)) == 1  # what was made of the other ones is gone
    monkeypatch.setenv("ANYACCEL_PACKED_CACHE_BYTES", "0")
    wanted = logits(load_native(model))
    np.testing.assert_array_equal(logits(again), wanted)
    assert not np.array_equal(wanted, before)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_configurations_of_the_same_size_and_time_count(model: Path, name: str) -> None:
    load_native(model)
    file = model / name
    before = file.stat()
    content = json.loads(file.read_text()) | {"eos_token_id": 3}
    file.write_text(json.dumps(content))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    again = load_native(model)
    assert not again.cached
    assert (again.config if name == "config.json" else again.generation_config)["eos_token_id"] == 3


def test_a_configuration_that_is_written_again_is_the_same(model: Path) -> None:
    load_native(model)
    content = (model / "config.json").read_bytes()
    (model / "config.json").unlink()
    (model / "config.json").write_bytes(content)
    assert load_native(model).cached


def test_what_a_link_of_a_cache_leads_to_counts(model: Path, tmp_path: Path) -> None:
    """Hugging Face's cache: snapshots of links to blobs."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in list(model.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    other = tmp_path / "other"
    other.mkdir()
    write(other, seed=1)
    before = logits(load_native(model))
    assert load_native(model).cached
    _put(blobs / "model.safetensors", other / "model.safetensors", _renamed)
    assert not np.array_equal(logits(load_native(model)), before)


def test_content_counts_where_a_file_system_has_neither_numbers_nor_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of read-only file systems and object stores say the same of every file of a size."""
    monkeypatch.setattr(identity, "_status", lambda path: [path.name, path.stat().st_size])
    file = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    for size in (0, 1, 4095, 4096, 10_000, 3_000_000):
        file.write_bytes(rng.bytes(size))
        before = identity.identity(file)
        assert identity.identity(file) == before
        file.write_bytes(rng.bytes(size))
        assert (identity.identity(file) == before) is (size == 0)
        file.write_bytes(file.read_bytes()[:-1] + b"\0")  # the last block is among them
        assert size == 0 or identity.identity(file) != before


@pytest.mark.parametrize(
    "name", ["state-of-the-art.gguf", "a[1]*-00001-of-00002.gguf", "model-00002-of-00002.gguf", "plain.gguf"]
)
def test_every_name_of_a_file_has_an_identity(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF" * 10)
    before = identity.identity(file)
    assert [each[0] for each in before["files"]] == [name]
    assert not identity.has_changed(before)
    file.write_bytes(b"FUGG" * 10)
    assert identity.has_changed(before)
    assert identity.identity(file) != before


def test_all_files_of_a_split_model_count_behind_links(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        (tmp_path / f"blob{number}").write_bytes(b"GGUF" * 10)
        (tmp_path / name).symlink_to(tmp_path / f"blob{number}")
    before = identity.identity(tmp_path / names[0])
    assert [each[0] for each in before["files"]] == names
    _put(tmp_path / "blob1", _other(tmp_path), _renamed)
    assert identity.has_changed(before)


def _other(folder: Path) -> Path:
    other = folder / "other"
    other.write_bytes(b"FUGG" * 10)
    return other


def test_files_that_an_index_names_count_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "weights.st").write_bytes(b"1")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "weights.st", "b": "../elsewhere", "c": 7 * "gone"}}))
    before = identity.identity(tmp_path)
    assert [each[0] for each in before["files"]] == ["config.json", index.name, "weights.st"]
    (tmp_path / "weights.st").write_bytes(b"2")
    assert identity.identity(tmp_path) != before
    maps = ("3", "[1]", '{"a": [1]}', '{"a": "\\u0000"}')
    for damaged in ("[" * 100_000, "[]", "{}", *(f'{{"weight_map": {each}}}' for each in maps)):
        index.write_text(damaged)
        assert len(identity.identity(tmp_path)["files"]) == 2


@pytest.mark.parametrize("replace", REPLACE)
def test_a_tokenizer_of_the_same_size_and_time_is_converted_again(
    replace: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    made: list[bytes] = []

    def convert(source: Path, folder: Path, _announce: object = None) -> None:
        made.append(source.read_bytes())
        (folder / "tokenizer.json").write_bytes(made[-1])

    monkeypatch.setattr(gguf, "convert_tokenizer", convert)
    file, other = tmp_path / "m.gguf", tmp_path / "other"
    file.write_bytes(b"GGUF one")
    other.write_bytes(b"GGUF two")
    for _ in range(2):
        assert (gguf.converted_tokenizer(file) / "tokenizer.json").read_bytes() == b"GGUF one"
    _put(file, other, replace)
    for _ in range(2):
        folder = gguf.converted_tokenizer(file)
        assert (folder / "tokenizer.json").read_bytes() == b"GGUF two"
    assert made == [b"GGUF one", b"GGUF two"]
    if replace is not _linked:  # which is another file's place
        assert [each for each in folder.parent.iterdir() if each.is_dir()] == [folder]


def test_hosts_that_share_the_caches_keep_what_others_made_of_their_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host's file has the same path and other numbers, as of a package that each host has on its own disk."""
    monkeypatch.setenv("ANYACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "convert_tokenizer", lambda _source, folder, _announce=None: (folder / "a").touch())
    file = tmp_path / "m.gguf"
    made = []
    for host in ("one", "two", "two"):
        file.write_bytes(f"GGUF {host} {len(made)}".encode())
        monkeypatch.setattr(conversions.socket, "gethostname", lambda host=host: host)
        made.append(gguf.converted_tokenizer(file))
    assert [folder.exists() for folder in made] == [True, False, True]


def test_a_file_that_cannot_be_read_only_costs_the_cache(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "optimizer.bin").symlink_to("gone")
    assert not load_native(model).cached
    assert "packed weights are not kept" in caplog.text
    assert "optimizer.bin" in caplog.text

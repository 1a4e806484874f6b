# SPDX-License-Identifier: Apache-2.0
"""save() and load(), against safetensors' own code in both directions."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import anyaccel
from anyaccel.errors import AioError, ModelError, UsageError
from anyaccel.io import load, save
from anyaccel.io import reading as reading_module
from anyaccel.ops.aio import handle as handle_module
from anyaccel.safetensors.tensors import DTYPES

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk: tmp_path may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="io-test-") as name:
        yield Path(name)


def random(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    tensor = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return tensor.view(dtype).view(shape)


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        left, right = (t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(left, right), name


def drop_pages(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


MODEL = {
    "wide": random(torch.float32, (300, 1000), 1),
    "half": random(torch.bfloat16, (257, 129), 2),
    "odd": random(torch.uint8, (1_000_003,), 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 7),
    "flags": random(torch.bool, (13,), 4),
    "größe": random(torch.int64, (5,), 5),
}


def test_safetensors_reads_what_we_save(folder: Path) -> None:
    save(MODEL, folder / "m.safetensors", metadata={"format": "pt", "note": "größe"})
    same(load_file(folder / "m.safetensors"), MODEL)
    with safe_open(folder / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "größe"}


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("mmap", [None, True, False])
def test_we_read_what_safetensors_saves(cold: bool, mmap: bool | None, folder: Path) -> None:
    file = folder / "m.safetensors"
    save_file(MODEL, file)
    if cold:
        drop_pages(file)
    same(load(file, mmap=mmap), MODEL)
    same(load(str(file)), MODEL)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_goes_both_ways(name: str, folder: Path) -> None:
    tensors = {"t": random(DTYPES[name], (3, 5))}
    save(tensors, folder / "ours")
    same(load(folder / "ours"), tensors)
    same(load(folder / "ours", mmap=False), tensors)
    try:
        save_file(tensors, folder / "theirs")
    except KeyError:
        return  # safetensors.torch does not know it
    same(load(folder / "theirs"), tensors)
    same(load_file(folder / "ours"), tensors)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.bool]),
            st.lists(st.integers(0, 300), max_size=2),
        ),
        max_size=12,
    ),
    st.booleans(),
    st.sampled_from([None, True, False]),
)
@settings(max_examples=60)
def test_any_tensors_go_both_ways(specs: list[tuple[torch.dtype, list[int]]], cold: bool, mmap: bool | None) -> None:
    tensors = {str(index): random(dtype, tuple(shape), index) for index, (dtype, shape) in enumerate(specs)}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        ours, theirs = Path(name) / "ours", Path(name) / "theirs"
        save(tensors, ours)
        save_file(tensors, theirs)
        if cold:
            drop_pages(ours)
            drop_pages(theirs)
        for file in (ours, theirs):
            same(load(file, mmap=mmap), tensors)
            same(load_file(file), tensors)
            targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            same(load(file, tensors=targets), tensors)


def test_tensors_are_filled_in_place(folder: Path) -> None:
    file = folder / "m"
    save(MODEL, file)
    for cold in (True, False):
        if cold:
            drop_pages(file)
        targets = {name: torch.zeros_like(MODEL[name]) for name in ("odd", "half", "scalar")}
        targets["wide"] = torch.zeros(1000, 300).t()
        found = load(file, tensors=targets)
        same(found, {name: MODEL[name] for name in targets})
        assert all(found[name] is targets[name] for name in targets)


def test_a_model_is_filled(folder: Path) -> None:
    model, other = torch.nn.Linear(100, 30), torch.nn.Linear(100, 30)
    save(model.state_dict(), folder / "m")
    load(folder / "m", tensors=other.state_dict())
    same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"other": torch.zeros(1)}, "there is no tensor 'other'"),
        ({"wide": torch.zeros(300, 999)}, r"float32 \[300, 1000\] in the file, and the one to fill is torch.float32"),
        ({"wide": torch.zeros(300, 1000, dtype=torch.float16)}, "the one to fill is torch.float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(targets: Tensors, message: str, folder: Path) -> None:
    save(MODEL, folder / "m")
    with pytest.raises(ModelError, match=message):
        load(folder / "m", tensors=targets)


def test_values_of_four_bits_need_pairs(folder: Path) -> None:
    for shape, size in (([3], 2), ([2, 3], 3), ([], 1)):
        header = json.dumps({"a": {"dtype": "F4", "shape": shape, "data_offsets": [0, size]}}).encode()
        (folder / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        with pytest.raises(ModelError, match=r"'a': (shape .* has no even last dimension|.* do not fit whole bytes)"):
            load(folder / "m")
    with pytest.raises(ModelError, match=r"'a' of torch.float4_e2m1fn_x2 has no dimension"):
        save({"a": random(torch.float4_e2m1fn_x2, ())}, folder / "m")
    with pytest.raises(ModelError, match="there is no tensor 'b'"):
        save({"a": random(torch.float4_e2m1fn_x2, (2, 0)), "c": random(torch.float4_e2m1fn_x2, (2, 5))}, folder / "m")
        load(folder / "m", tensors={"b": torch.zeros(1)})
    same(load_file(folder / "m"), load(folder / "m"))


@pytest.mark.parametrize("where", ["name", "key", "value"])
def test_half_characters_are_refused(where: str, folder: Path) -> None:
    name, key, value = ("a\ud800b" if where == each else "ab" for each in ("name", "key", "value"))
    with pytest.raises(ModelError, match="surrogate"):
        save({name: torch.zeros(1)}, folder / "m", metadata={key: value})
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"__metadata__": {key: value}, name: entry}).encode()
    (folder / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(ModelError, match="surrogate"):
        load(folder / "m")


def test_names_that_no_file_can_have_are_refused(folder: Path) -> None:
    for call in (load, lambda path: save({"a": torch.zeros(1)}, path)):
        for name, message in (("a\0b", "zero byte"), ("a\ud800", "surrogate")):
            with pytest.raises(UsageError, match=message):
                call(f"{folder}/{name}")
    assert not list(folder.iterdir())


def test_metadata_is_a_dict(folder: Path) -> None:
    with pytest.raises(UsageError, match="metadata= must be a dict of text, not a list"):
        save({"a": torch.ones(1)}, folder / "m", metadata=["a"])  # type: ignore[arg-type]
    assert not list(folder.iterdir())


def test_ctrl_c_while_a_handle_is_made_leaves_no_descriptor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = handle_module.native()

    class Interrupted:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def anyaccel_aio_create(self, *arguments: object) -> None:
            assert library.anyaccel_aio_create(*arguments) == 0
            raise KeyboardInterrupt

    save({"a": torch.ones(1)}, folder / "m")
    gc.collect()
    before = sorted(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(handle_module, "native", Interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            load(folder / "m", mmap=False)
    gc.collect()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_options_that_exclude_each_other(folder: Path) -> None:
    save(MODEL, folder / "m")
    with pytest.raises(UsageError, match="leave out device= and mmap="):
        load(folder / "m", tensors={}, mmap=True)


def test_loaded_tensors_are_the_callers(folder: Path) -> None:
    file = folder / "m"
    save(MODEL, file)
    for mmap in (True, False):
        found = load(file, mmap=mmap)
        for tensor in found.values():
            tensor.zero_()
        same(load(file), MODEL)
        torch.save(found["scalar"], folder / "scalar.pt")
        assert (folder / "scalar.pt").stat().st_size < 10_000


def test_a_loaded_tensor_outlives_file_and_others(folder: Path) -> None:
    save(MODEL, folder / "m")
    odd = load(folder / "m")["odd"]
    (folder / "m").unlink()
    assert torch.equal(odd, MODEL["odd"])


def test_views_whose_memory_has_other_values_than_they_are_filled_and_saved_by_value(folder: Path) -> None:
    path = folder / "views.safetensors"
    z = torch.randn(4, dtype=torch.complex64)
    save({"z": z, "x": torch._neg_view(z.real.clone())}, path)
    found = {"z": torch.zeros_like(z).conj(), "x": torch._neg_view(torch.zeros(4))}
    load(path, tensors=found)
    assert torch.equal(found["z"], z)
    assert torch.equal(found["x"], -z.real)


def test_strided_and_shared_tensors(folder: Path) -> None:
    base = torch.randn(20, 30)
    save({"t": base.t(), "c": torch.randn(5, dtype=torch.complex64).conj()}, folder / "m")
    assert torch.equal(load(folder / "m")["t"], base.t())
    with pytest.raises(ModelError, match="tensors 'a' and 'b' share memory"):
        save({"a": base, "b": base[3:]}, folder / "m")
    save({"a": base[:3], "b": base[3:]}, folder / "m")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, 2]}, "'a' is a list"),
        ({1: torch.zeros(1)}, "1 cannot be the name"),
        ({"__metadata__": torch.zeros(1)}, "cannot be the name"),
        ({"a": torch.zeros(1, device="meta")}, "'a' is meta"),
        ({"a": torch.eye(2).to_sparse()}, "'a' is torch.sparse_coo"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "dtype torch.complex128"),
    ],
)
def test_what_cannot_be_saved_is_refused(state: Tensors, message: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=message):
        save(state, folder / "m")
    with pytest.raises(ModelError, match="must be text"):
        save({}, folder / "m", metadata={"a": 1})  # type: ignore[dict-item]
    assert not list(folder.iterdir())


def test_a_save_that_fails_leaves_the_old_file(folder: Path) -> None:
    save(MODEL, folder / "m")
    code = (
        "import resource, sys, torch; from anyaccel.io import save; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "save({'x': torch.zeros(1 << 20)}, sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "m"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "AioError" in done.stderr and "File too large" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["m"]
    same(load(folder / "m"), MODEL)


def test_the_file_loads_onto_a_device(folder: Path) -> None:
    save({"a": torch.ones(3)}, folder / "m")
    assert load(folder / "m", device="meta")["a"].device.type == "meta"


# Damaged files ----------------------------------------------------------------------------------------------------


def test_missing_files_and_folders(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(folder / "missing")
    with pytest.raises(IsADirectoryError):
        load(folder)
    with pytest.raises(AioError):
        save(MODEL, folder / "missing" / "m")


@pytest.mark.parametrize("name", ["loop", "loop/m", "new/", "m/", "folder/", "folder", "missing/m", ""])
def test_a_name_that_no_file_can_have_is_the_same_error_as_for_open(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    Path("m").write_bytes(b"old")
    with pytest.raises(OSError) as expected, open(name, "ab"):
        pass
    with pytest.raises(AioError) as found:
        save({"a": torch.ones(1)}, name)
    assert found.value.errno == expected.value.errno
    assert str(folder) not in str(found.value) or name
    assert sorted(each.name for each in folder.iterdir()) == ["folder", "loop", "m"]
    assert Path("loop").is_symlink() and Path("m").read_bytes() == b"old"


def test_a_link_to_nothing_becomes_one_to_the_file(folder: Path) -> None:
    (folder / "link").symlink_to("new")
    save({"a": torch.ones(1)}, folder / "link")
    assert (folder / "link").is_symlink() and torch.equal(load(folder / "new")["a"], torch.ones(1))


def test_a_file_that_is_cut_off_anywhere_is_refused(folder: Path) -> None:
    file = folder / "m"
    save(MODEL, file)
    whole = file.read_bytes()
    for size in (0, 1, 7, 8, 20, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut off|too few"):
            load(file)
    file.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="has more than its tensors"):
        load(file)


# Progress ---------------------------------------------------------------------------------------------------------


def test_the_progress_bar_reaches_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anyaccel.io.progress._DELAY_SECONDS", 0.0)
    for options in ({"mmap": False}, {"tensors": {"wide": torch.zeros(300, 1000)}}):
        save(MODEL, folder / "m", progress=True)
        load(folder / "m", progress=True, **options)  # type: ignore[arg-type]
    assert "m: " in capsys.readouterr().err
    save(MODEL, folder / "m", progress=False)
    load(folder / "m", progress=False, mmap=False)
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_no_bar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    save(MODEL, folder / "m", progress=True)
    same(load(folder / "m", progress=True), MODEL)


# Which way ----------------------------------------------------------------------------------------------------------


def test_a_cold_file_is_read_and_a_warm_one_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(MODEL, folder / "m")
    calls: list[str] = []
    read, mapped = reading_module._read, reading_module.mapping.mmap
    monkeypatch.setattr(reading_module, "_read", lambda *a: (calls.append("read"), read(*a))[1])
    monkeypatch.setattr(reading_module.mapping, "mmap", lambda *a, **o: (calls.append("map"), mapped(*a, **o))[1])
    for cached, mmap in itertools.product((-1, 0, 1 << 40), (None, True, False)):
        monkeypatch.setattr(reading_module, "cached_bytes", lambda *a, cached=cached: cached)
        calls.clear()
        same(load(folder / "m", mmap=mmap), MODEL)
        assert calls == ["map" if mmap or (mmap is None and cached > 0) else "read"]


def test_importing_anyaccel_io_does_not_import_torch() -> None:
    code = "import anyaccel, sys; anyaccel.io; assert 'torch' not in sys.modules; dir(anyaccel.io)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert anyaccel.io.load is load
    with pytest.raises(AttributeError):
        anyaccel.io.nothing  # noqa: B018

# SPDX-License-Identifier: Apache-2.0
"""Matrices that other libraries have quantised and stored are read as what those libraries say that they stand for.

tests/data/quantised has both, as tools/record_quantised.py wrote them.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.quantised import folder_config, quantised_source
from anyaccel.inference.checkpoints.quantised_layout import StoredMatrix
from anyaccel.inference.checkpoints.sources import SafetensorsSource, entry_of
from anyaccel.inference.spec.packed_formats import FORMATS, QUANTISED

DATA = Path(__file__).parents[2] / "data" / "quantised"
CASES = sorted(path.stem for path in DATA.glob("*.safetensors"))
# How the last bit of a value comes about differs where the library computes in 16 bits, as hqq and bitsandbytes do.
FORMS = {
    "auto-round-gptq-2": ("i2", 16, True),
    "auto-round-gptq-3": ("i4", 32, True),
    "auto-round-gptq-4": ("i4", 32, True),
    "auto-round-gptq-8": ("i8", 32, True),
    "auto-round-own-4": ("i4", 32, True),
    "awq-gemm-32": ("i4", 32, True),
    "awq-gemv-32": ("i4", 32, True),
    "awq-gemv-64": ("i4", 64, True),
    "bitnet-autobitlinear": ("i4", 128, False),
    "bnb-int8": ("i8", 0, False),
    "bnb-nf4-double": ("bf16", 0, False),
    "compressed-fp8-block": ("bf16", 0, False),
    "compressed-int8-channel": ("i8", 0, False),
    "compressed-int8-tensor": ("i8", 0, False),
    "compressed-mxfp4": ("fp4", 32, False),
    "compressed-nvfp4": ("i6", 16, False),
    "compressed-pack-w3": ("i4", 32, False),
    "compressed-pack-w4-asym": ("i4", 64, True),
    "hqq-2-axis1": ("i2", 16, True),
    "hqq-3-axis1": ("i4", 64, True),
    "hqq-4-axis0": ("bf16", 0, False),
    "mxfp4-experts": ("fp4", 32, False),
    "torchao-int8": ("i8", 0, False),
    "torchao-intx4": ("i8", 32, False),
}


def opened(name: str, folder: Path) -> tuple[Any, Any]:
    """The one matrix of a case, and what its library says of it, [..., out, in] as it is stored."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        tensors = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118  it is no dict
        metadata = file.metadata()
    wanted = tensors.pop("wanted").float().numpy()
    config = {"quantization_config": json.loads(metadata.pop("config"))}
    save_file(tensors, folder / "model.safetensors", metadata)
    source = quantised_source(SafetensorsSource(folder), config)
    (plain,) = source.names()
    tensor = source.tensor(plain)
    return tensor, wanted.swapaxes(-1, -2) if tensor.transposed else wanted


def packed_values(tensor: Any, rows: Any, cols: range) -> Any:
    """What the packed format of these columns makes of them, its scales being halves."""
    form, group, minimum = tensor.format(cols)
    if form not in QUANTISED:
        return tensor.floats(rows, cols)
    q, scales, minima = tensor.values(rows, cols, group)
    kind = FORMATS[form]
    assert q.dtype == (np.int8 if kind.bits == 8 else np.uint8)
    assert kind.bits == 8 or q.max() < 1 << kind.bits
    of = np.arange(len(cols)) // (group or len(cols))
    if group:
        scales = scales.astype(np.float16).astype(np.float32)
    if kind.codes is not None:
        return np.array(kind.codes, np.float32)[q] * scales[:, of]
    if minimum:
        return q * scales[:, of] + minima.astype(np.float16).astype(np.float32)[:, of]
    return (q.astype(np.float32) - kind.zero) * scales[:, of]


def test_every_kind_is_recorded() -> None:
    assert set(FORMS) <= set(CASES)
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    tensor, wanted = opened(name, tmp_path)
    assert tensor.shape == wanted.shape
    if wanted.ndim == 3:
        stack, index = tensor, 1
        tensor, wanted = entry_of(stack, index), wanted[index]
    rows, cols = wanted.shape
    whole = range(cols)
    # Of 16 bits, where a library rounds to them in between; float8 and powers of two are exact.
    tolerance = np.abs(wanted).max() * 2.0**-8
    np.testing.assert_allclose(tensor.floats(range(rows), whole), wanted, rtol=2.0**-7, atol=tolerance * 0.5)
    if name in FORMS:
        assert tensor.format(whole) == FORMS[name]
    np.testing.assert_allclose(
        packed_values(tensor, range(rows), whole), tensor.floats(range(rows), whole), rtol=0, atol=tolerance / 4
    )
    # Some rows and a rank's columns, aligned with every group and with none.
    some = [5, 0, 31, 6]
    for part in (range(64, cols), range(24, min(104, cols))):
        exact = tensor.floats(range(rows), whole)[some, part.start : part.stop]
        np.testing.assert_array_equal(tensor.floats(some, part), exact)
        np.testing.assert_allclose(packed_values(tensor, some, part), exact, rtol=0, atol=tolerance / 4)
    assert tensor.stored_bytes < wanted.size * 4


@pytest.mark.parametrize(
    "name", ["compressed-fp8-channel", "compressed-mxfp4", "mxfp4-experts", "bitnet-autobitlinear"]
)
def test_values_are_exact_where_the_library_rounds_nothing(name: str, tmp_path: Path) -> None:
    tensor, wanted = opened(name, tmp_path)
    if wanted.ndim == 3:
        tensor, wanted = entry_of(tensor, 0), wanted[0]
    found = packed_values(tensor, range(len(wanted)), range(wanted.shape[1]))
    np.testing.assert_array_equal(torch.from_numpy(found).bfloat16().float().numpy(), wanted)


@pytest.mark.parametrize("cols", [range(32), range(16, 48), range(48, 64)])
def test_powers_of_two_are_scales_of_whole_groups_only(cols: range, tmp_path: Path) -> None:
    """Of ranks whose columns begin within a group of MXFP4, scales are halves."""
    tensor, wanted = opened("compressed-mxfp4", tmp_path)
    found = tensor.with_own_scales(cols)
    assert (found is not None) == (cols.start == 0) == (tensor.format(cols)[0] == "fp4")
    if found is None:
        np.testing.assert_array_equal(packed_values(tensor, range(8), cols), wanted[:8, cols.start : cols.stop])


def test_modelopt_has_compressed_tensors_values_under_other_names(tmp_path: Path) -> None:
    """NVFP4 as modelopt stores it: the values in `weight`, and the inverse of the whole matrix's scale."""
    tensor, wanted = opened("compressed-nvfp4", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (stem,) = (name.removesuffix("_packed") for name in stored if name.endswith("_packed"))
    stored[stem] = stored.pop(f"{stem}_packed")
    stored[f"{stem}_scale_2"] = (1 / stored.pop(f"{stem}_global_scale").double()).float().reshape(())
    (tmp_path / "other").mkdir()
    save_file(stored, tmp_path / "other" / "model.safetensors")
    (tmp_path / "other" / "config.json").write_text("{}")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "other" / "hf_quant_config.json").write_text(json.dumps(said))
    source = quantised_source(SafetensorsSource(tmp_path / "other"), folder_config(tmp_path / "other"))
    found = source.tensor(stem)
    assert found.format(range(128)) == tensor.format(range(128)) == ("i6", 16, False)
    exact = tensor.floats(range(32), range(128))
    np.testing.assert_allclose(found.floats(range(32), range(128)), exact, rtol=1e-6, atol=0)
    np.testing.assert_allclose(exact, wanted, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize(
    ("file", "said", "settings"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32}, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            {"quant_method": "awq", "bits": 4, "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
        ),
    ],
)
def test_settings_beside_the_configuration(
    file: str, said: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(said))
    assert folder_config(tmp_path) == {"quantization_config": settings}
    own = {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert folder_config(tmp_path) == own


@pytest.mark.parametrize("name", CASES)
def test_damaged_parts_are_an_error_of_ours(name: str, tmp_path: Path) -> None:
    """Each tensor beside the values: missing, empty, cut, or of another dtype."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        tensors = {each: file.get_tensor(each) for each in file.keys() if each != "wanted"}  # noqa: SIM118
        metadata = file.metadata()
    config = {"quantization_config": json.loads(metadata.pop("config"))}
    for each, value in tensors.items():
        damages: list[Any] = [None, value.reshape(-1)[:0], torch.zeros(3, 5, 7, dtype=torch.int64)]
        if value.dim():
            damages.append(value[: len(value) // 2])
        for damage in damages:
            changed = {key: other for key, other in tensors.items() if key != each}
            if damage is not None:
                changed[each] = damage.contiguous()
            if not changed:
                continue
            save_file(changed, tmp_path / "model.safetensors", metadata)
            with contextlib.suppress(ModelError):
                source = quantised_source(SafetensorsSource(tmp_path), config)
                for plain in source.names():
                    tensor = source.tensor(plain)
                    tensor = entry_of(tensor, 0) if len(tensor.shape) == 3 else tensor
                    if isinstance(tensor, StoredMatrix):
                        packed_values(tensor, range(min(8, tensor.shape[0])), range(tensor.shape[1]))

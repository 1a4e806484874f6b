# SPDX-License-Identifier: Apache-2.0
"""benchmarks/isa.py: who takes part, which variant counts as the chosen one, and where its block goes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def isa(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("bench_isa", ROOT / "benchmarks" / "isa.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_variants_of_integers_take_no_part_in_bf16(isa: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ov").mkdir()
    variants = ["avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16"]
    found = isa.contenders("/m", ["bf16", "int8"], variants, [f"int8:openvino={tmp_path}/ov"], {})
    assert [contender.name for _, _, contender in found] == [
        *(f"anyaccel bf16, {name}" for name in ("avx2", "avx512", "avx512_bf16")),
        *(f"anyaccel int8, {name}" for name in variants), "openvino ov",
    ]  # fmt: skip


def test_rates_are_compared_with_the_variant_that_is_chosen(isa: ModuleType) -> None:
    found = isa.contenders("/m", ["int8"], ["avx2", "avx512"], [], {})
    middle = {contender.name: {"decode": 10.0 * (place + 1)} for place, (_, _, contender) in enumerate(found)}
    assert isa.rows(found, middle, "avx512_vnni") == [
        ["anyaccel int8, avx2", "10 (2.00)", "-", "-"], ["anyaccel int8, avx512 (chosen)", "20", "-", "-"],
    ]  # fmt: skip
    assert [row[0] for row in isa.rows(found, middle, "avx2")] == [
        "anyaccel int8, avx2 (chosen)",
        "anyaccel int8, avx512",
    ]


def test_a_processor_has_one_block_on_the_page(isa: ModuleType) -> None:
    page = f"before\n\n{isa.SECTION}\nafter\n"
    page = isa.put_block(page, "A (R)", "old")
    page = isa.put_block(page, "B", "other")
    page = isa.put_block(page, "A (R)", "new")
    assert page == (
        f"before\n\n{isa.SECTION}\n<!-- isa: A (R) -->\nnew\n<!-- end of isa -->\n"
        "\n<!-- isa: B -->\nother\n<!-- end of isa -->\n\nafter\n"
    )
    assert (ROOT / "benchmarks" / "results" / "variants.md").read_text().count(isa.SECTION) == 1

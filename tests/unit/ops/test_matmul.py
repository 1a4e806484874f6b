# SPDX-License-Identifier: Apache-2.0
"""use_onednn_matmul(): where it is of use, and that products stay those of float32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anyaccel.ops import matmul, use_onednn_matmul

precision = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = precision.fp32_precision
    yield
    precision.fp32_precision = before


def test_products_are_as_exact_as_before() -> None:
    if not use_onednn_matmul():
        pytest.skip("this processor multiplies float32 as fast with MKL, or oneDNN would round")
    assert precision.fp32_precision == "bf16"
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((1, 64, 64), (7, 300, 5), (64, 768, 512), (256, 256, 1000)):
        one = torch.randn(rows, inner, generator=generator, requires_grad=True)
        other = torch.randn(columns, inner, generator=generator, requires_grad=True)
        product = one @ other.t()
        product.sum().backward()  # type: ignore[no-untyped-call]
        exact = one.double() @ other.double().t()
        torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-6 * inner**0.5 * 5)
        assert one.grad is not None
        torch.testing.assert_close(one.grad[0].double(), other.double().sum(0), rtol=1e-4, atol=1e-4)


def test_what_the_program_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_mkl_is_slow", lambda: True)
    precision.fp32_precision = "ieee"
    assert not use_onednn_matmul()
    assert precision.fp32_precision == "ieee"


def test_nothing_changes_where_onednn_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_mkl_is_slow", lambda: True)
    monkeypatch.setattr(matmul, "_is_exact", lambda: False)
    assert not use_onednn_matmul()
    assert precision.fp32_precision == "none"


def test_products_in_bfloat16_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul._is_exact()
    whole = torch.full
    monkeypatch.setattr(torch, "full", lambda *given: whole(*given).bfloat16().float())
    assert not matmul._is_exact()

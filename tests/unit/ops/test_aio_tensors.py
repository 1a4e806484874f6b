# SPDX-License-Identifier: Apache-2.0
"""What may be given as a buffer, and what is only like one: its bytes are elsewhere, or nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyaccel.errors import AioError, ModelError, UsageError
from anyaccel.io import load, save
from anyaccel.ops.aio import aio_handle


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(8)


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: Wrapped(torch.ones(8)), "a Wrapped: give the tensor inside it"),
        (fake, "a FakeTensor"),
        (freed, "without its memory: its storage has 0 bytes"),
        (lambda: torch._efficientzerotensor(8), "a zero tensor without memory"),
        (lambda: torch.ones(8, device="meta"), "meta"),
        (lambda: torch.ones(8).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["wrapped", "fake", "freed", "zero", "meta", "sparse"],
)
def test_tensors_without_memory_are_refused(make: Callable[[], torch.Tensor], kind: str, tmp_path: Path) -> None:
    save({"a": torch.ones(8)}, tmp_path / "m")
    handle, tensor = aio_handle(), make()
    for call in (handle.sync_pread, handle.sync_pwrite, handle.async_pread, handle.async_pwrite):
        with pytest.raises(UsageError, match=kind):
            call(tensor, tmp_path / "m")
    with pytest.raises(ModelError, match=kind):
        save({"a": tensor}, tmp_path / "m")
    with pytest.raises(UsageError, match=kind):
        load(tmp_path / "m", tensors={"a": tensor})
    assert handle.wait() == 0
    assert torch.equal(load(tmp_path / "m")["a"], torch.ones(8))


def test_subclasses_with_memory_work(tmp_path: Path) -> None:
    handle, one, other = aio_handle(), torch.randn(9).as_subclass(Named), torch.zeros(9).as_subclass(Named)
    handle.sync_pwrite(one, tmp_path / "f")
    handle.sync_pread(other, tmp_path / "f")
    assert torch.equal(one, other)
    save({"a": one}, tmp_path / "m")
    load(tmp_path / "m", tensors={"a": other.zero_()})
    assert torch.equal(one, other)


@pytest.mark.parametrize("buffer", [None, 5, b"abc", [1.0], numpy.ones(3)], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_named(buffer: object, tmp_path: Path) -> None:
    for call in (aio_handle().sync_pread, aio_handle().sync_pwrite):
        with pytest.raises(UsageError, match=f"a {type(buffer).__name__}: the buffer must be a tensor"):
            call(buffer, tmp_path / "f")
    with pytest.raises(UsageError, match=r"must be a dict of tensors, not a list"):
        save([("a", torch.ones(1))], tmp_path / "f")  # type: ignore[arg-type]


def test_autograd_notices_what_was_read(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "m")
    handle = aio_handle()
    handle.sync_pwrite(torch.ones(3), tmp_path / "f")
    for read in (
        lambda to: handle.sync_pread(to, tmp_path / "f"),
        lambda to: load(tmp_path / "m", tensors={"a": to}),
    ):
        weight, data = torch.ones(3, requires_grad=True), torch.zeros(3)
        loss = (weight * data).sum()
        read(data)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            data = torch.zeros(3)
        read(data)
        assert data.sum() == 3


def test_names_offsets_and_settings_of_other_types(tmp_path: Path) -> None:
    handle, name = aio_handle(numpy.int64(4096)), tmp_path / "f"
    handle.sync_pwrite(torch.ones(3), os.fsencode(name), numpy.int64(4))
    save({"a": torch.ones(3)}, os.fsencode(tmp_path / "m"))
    assert load(os.fsencode(tmp_path / "m"))["a"].sum() == 3
    for offset in (1.5, None, "0"):
        with pytest.raises(UsageError, match=rf"file_offset={offset!r} .* must be a whole number"):
            handle.sync_pread(torch.ones(3), name, offset)  # type: ignore[arg-type]
    with pytest.raises(AioError, match="of '' failed"):
        handle.sync_pread(torch.ones(3), "")
    with pytest.raises(UsageError, match="block_size='1' must be from 1"):
        aio_handle("1")  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""Which devices there are, how they are called, and that tensors land on the one that was asked for."""

from __future__ import annotations

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_none, expect_type


@check("identity", "probe", "is_available", "device_count")
def check_the_device_is_there(accelerator: Accelerator) -> None:
    """It can be used, so it is to say so."""
    expect_equal("probe() to return", type(accelerator).probe(), None)
    expect_type("is_available()", accelerator.is_available(), bool)
    expect(accelerator.is_available(), "is_available() True", False)
    count = accelerator.device_count()
    expect_type("device_count()", count, int)
    expect(count >= 1, "device_count() of 1 or more", count)


@check("identity", "device_name", "device", "current_device_name")
def check_device_names_are_what_torch_takes(accelerator: Accelerator) -> None:
    """Names and `torch.device` say the same, of the type that the spec gives."""
    kind = accelerator.spec.device_type
    for index in (None, *range(accelerator.device_count())):
        name = accelerator.device_name(index)
        expect_type(f"device_name({index})", name, str)
        device = accelerator.device(index)
        expect_type(f"device({index})", device, torch.device)
        expect_equal(f"device({index}) to be torch.device(device_name({index})),", device, torch.device(name))
        expect_equal(f"device_name({index}) to have type", device.type, kind)
        expect(device.index in (None, index), f"device_name({index}) without an index or with this one", name)
    current = accelerator.current_device_name()
    expect_type("current_device_name()", current, str)
    expect_equal("current_device_name() to have type", torch.device(current).type, kind)
    expect(
        torch.device(current).index in (None, accelerator.current_device()),
        f"current_device_name() with index {accelerator.current_device()} or none",
        current,
    )


@check("identity", "current_device", "set_device")
def check_set_device_is_what_current_device_returns(accelerator: Accelerator) -> None:
    """For each device, and back. Devices whose names have no index are one device to torch."""
    before = accelerator.current_device()
    expect_type("current_device()", before, int)
    expect(before >= 0, "current_device() of 0 or more", before)
    try:
        for index in range(accelerator.device_count()):
            expect_none(f"set_device({index})", accelerator.set_device, index)
            now = accelerator.current_device()
            if accelerator.device(index).index is None:
                expect(now in (before, index), f"current_device() {before} after set_device({index})", now)
                continue
            expect_equal(f"after set_device({index}), current_device()", now, index)
            tensor = torch.ones(2, device=accelerator.device_name())
            found = tensor.device.index
            expect(found in (None, index), f"after set_device({index}), a tensor on that device", tensor.device)
    finally:
        accelerator.set_device(before)
    expect_equal("after setting it back, current_device()", accelerator.current_device(), before)


@check("identity", "device_guard")
def check_a_guard_restores_the_current_device(accelerator: Accelerator) -> None:
    """For every device, and for None, which leaves it as it is."""
    before = accelerator.current_device()
    for index in (None, *range(accelerator.device_count())):
        with accelerator.device_guard(index):
            pass
        expect_equal(f"after device_guard({index}), current_device()", accelerator.current_device(), before)


@check("identity", "on_accelerator")
def check_tensors_land_where_asked(accelerator: Accelerator) -> None:
    """On every device, with their values, and on_accelerator knows them."""
    values = torch.arange(1000, dtype=torch.float32, device=HOST)
    for index in range(accelerator.device_count()):
        asked = accelerator.device(index)
        tensor = values.to(accelerator.device_name(index))
        expect_equal(f"a tensor on {asked} to have device type", tensor.device.type, asked.type)
        expect(asked.index in (None, tensor.device.index), f"a tensor on {asked}", tensor.device)
        expect(torch.equal(tensor.to(HOST), values), f"values that come back from {asked} unchanged", tensor)
        answer = accelerator.on_accelerator(tensor)
        expect_type("on_accelerator()", answer, bool)
        expect(answer, f"on_accelerator() True for a tensor on {tensor.device}", answer)
    for other in (values, torch.empty(1, device="meta")):
        same = other.device.type == accelerator.spec.device_type
        expect_equal(f"on_accelerator() of a tensor on {other.device}", accelerator.on_accelerator(other), same)


@check("identity", "synchronize")
def check_synchronize_waits_for_the_work(accelerator: Accelerator) -> None:
    """With and without an index; a result is complete afterwards."""
    value = torch.full((64, 64), 2.0, device=accelerator.current_device_name())
    product = value @ value
    for index in (None, accelerator.current_device()):
        expect_none(f"synchronize({index})", accelerator.synchronize, *([] if index is None else [index]))
    expect(bool((product.to(HOST) == 256.0).all()), "a matrix of 256.0", product)

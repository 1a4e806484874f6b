# SPDX-License-Identifier: Apache-2.0
"""Random numbers: states round-trip, seeds reproduce."""

from __future__ import annotations

from types import ModuleType

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_none, expect_type

# Enough numbers that two draws are equal by chance never.
_DRAWN = 64


def _draw(accelerator: Accelerator, index: int | None = None) -> torch.Tensor:
    name = accelerator.current_device_name() if index is None else accelerator.device_name(index)
    return torch.rand(_DRAWN, device=name).to(HOST)


@check("random numbers", "random")
def check_random_is_the_torch_module(accelerator: Accelerator) -> None:
    """`torch.random`, or the module that stands for it."""
    module = accelerator.random()
    expect(isinstance(module, ModuleType), "random() a module", module)
    expect(hasattr(module, "fork_rng"), "random() with fork_rng, as torch.random", module)


@check("random numbers", "get_rng_state", "set_rng_state")
def check_a_state_brings_the_same_numbers_again(accelerator: Accelerator) -> None:
    """With and without an index, on every device."""
    for index in (None, *range(accelerator.device_count())):
        state = accelerator.get_rng_state() if index is None else accelerator.get_rng_state(index)
        expect(isinstance(state, torch.Tensor), f"get_rng_state({index}) a tensor", state)
        expect_equal(f"get_rng_state({index}) of dtype", state.dtype, torch.uint8)
        expect_equal(f"get_rng_state({index}) on", state.device.type, HOST.type)
        saved = state.clone()
        first = _draw(accelerator, index)
        second = _draw(accelerator, index)
        expect(not torch.equal(first, second), "two draws that differ", first)
        where = () if index is None else (index,)
        expect_none("set_rng_state()", accelerator.set_rng_state, saved, *where)
        expect(torch.equal(accelerator.get_rng_state(*where), saved), "get_rng_state() what was set", "another state")
        again = _draw(accelerator, index)
        expect(torch.equal(again, first), f"the same numbers after set_rng_state, device {index}", again)


@check("random numbers", "get_rng_state_all", "set_rng_state_all")
def check_the_states_of_all_devices_bring_the_same_numbers_again(accelerator: Accelerator) -> None:
    """One state a device."""
    states = [state.clone() for state in accelerator.get_rng_state_all()]
    expect_equal("the number of states of get_rng_state_all()", len(states), accelerator.device_count())
    first = _draw(accelerator, 0)
    expect_none("set_rng_state_all()", accelerator.set_rng_state_all, states)
    expect(torch.equal(_draw(accelerator, 0), first), "the same numbers after set_rng_state_all()", "others")


@check("random numbers", "manual_seed", "initial_seed")
def check_a_seed_brings_the_same_numbers_again(accelerator: Accelerator) -> None:
    """On the current device."""
    expect_none("manual_seed(7)", accelerator.manual_seed, 7)
    seed = accelerator.initial_seed()
    expect_type("initial_seed()", seed, int)
    expect_equal("after manual_seed(7), initial_seed()", seed, 7)
    first = _draw(accelerator)
    accelerator.manual_seed(8)
    expect(not torch.equal(_draw(accelerator), first), "other numbers after another seed", first)
    accelerator.manual_seed(7)
    expect(torch.equal(_draw(accelerator), first), "the same numbers after manual_seed(7)", "others")


@check("random numbers", "manual_seed_all")
def check_manual_seed_all_seeds_every_device(accelerator: Accelerator) -> None:
    """Each device starts again where it did."""
    expect_none("manual_seed_all(11)", accelerator.manual_seed_all, 11)
    for index in range(accelerator.device_count()):
        accelerator.manual_seed_all(11)
        first = _draw(accelerator, index)
        accelerator.manual_seed_all(12)
        other = _draw(accelerator, index)
        accelerator.manual_seed_all(11)
        expect(torch.equal(_draw(accelerator, index), first), f"device {index}: the same numbers again", "others")
        expect(not torch.equal(other, first), f"device {index}: other numbers after another seed", "the same")


@check("random numbers", "default_generator")
def check_default_generator_is_the_one_that_is_seeded(accelerator: Accelerator) -> None:
    """A `torch.Generator` of the device, which draws the numbers that the device draws without one."""
    index = accelerator.current_device()
    generator = accelerator.default_generator(index)
    expect(isinstance(generator, torch.Generator), "default_generator() a torch.Generator", generator)
    expect_equal("default_generator() on", generator.device.type, accelerator.spec.device_type)
    accelerator.manual_seed(21)
    expect_equal("after manual_seed(21), default_generator().initial_seed()", generator.initial_seed(), 21)
    drawn = torch.rand(_DRAWN, device=accelerator.current_device_name(), generator=generator).to(HOST)
    accelerator.manual_seed(21)
    expect(torch.equal(_draw(accelerator), drawn), "the generator to draw the device's numbers", drawn)

# SPDX-License-Identifier: Apache-2.0
"""What an accelerator declares absent, and that its methods say so with the one documented error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import Check, ConformanceError, expect, expect_equal
from anyaccel.accelerator.spec import CAPABILITY_OF, METHODS_OF, Capability
from anyaccel.errors import CapabilityError

logger = logging.getLogger(__name__)

# On a synchronous device these are objects that do nothing, where they are absent.
_INERT = {Capability.STREAMS, Capability.EVENTS, Capability.GRAPHS}

# What these methods of an absent capability may answer, instead of raising the error.
_ANSWERS: Mapping[str, object] = {"register_host_memory": False, "unregister_host_memory": None}

# A device that keeps no peak may answer with what its driver holds now, as programs print it after every epoch.
_FIGURES = METHODS_OF[Capability.PEAK_MEMORY]

# How each method that can be absent is called.
_CALLS: Mapping[str, Callable[[Accelerator], Any]] = {
    "Stream": lambda accelerator: accelerator.Stream,
    "stream": lambda accelerator: accelerator.stream(None),
    "Event": lambda accelerator: accelerator.Event,
    "capture_to_graph": lambda accelerator: accelerator.capture_to_graph(object()),
    "set_rng_state": lambda accelerator: accelerator.set_rng_state(torch.zeros(16, dtype=torch.uint8)),
    "set_rng_state_all": lambda accelerator: accelerator.set_rng_state_all([torch.zeros(16, dtype=torch.uint8)]),
    "manual_seed": lambda accelerator: accelerator.manual_seed(1),
    "manual_seed_all": lambda accelerator: accelerator.manual_seed_all(1),
    "create_op_builder": lambda accelerator: accelerator.create_op_builder("NoSuchBuilder"),
    "register_host_memory": lambda accelerator: accelerator.register_host_memory(1 << 20, 1 << 12),
    "unregister_host_memory": lambda accelerator: accelerator.unregister_host_memory(1 << 20),
}


def lacking(check: Check, accelerator: Accelerator) -> tuple[set[Capability], set[str]]:
    """The capabilities that the check needs and the accelerator does not have; the methods that these are."""
    capabilities = {capability for capability in check.needs if not accelerator.has(capability)}
    methods = {name for capability in capabilities for name in METHODS_OF.get(capability, ())}
    methods |= set(check.methods) & set(accelerator.spec.capabilities.absent)
    return capabilities, methods


def does_nothing(accelerator: Accelerator, capabilities: set[Capability]) -> bool:
    """Whether what is absent is there all the same, as objects that do nothing."""
    if not capabilities:
        return False
    if accelerator.spec.capabilities.synchronous:
        return capabilities <= _INERT
    # A device with one queue may hand that out as its only stream.
    return capabilities == {Capability.STREAMS} and _error_of(accelerator, "Stream") is None


def verify_absent(accelerator: Accelerator, method: str) -> str:
    """The words of the CapabilityError that the method raises, or what it answers instead.

    Raises:
        ConformanceError: it raises nothing, or something else.
    """
    error = _error_of(accelerator, method)
    if error is None and method in (*_ANSWERS, *_FIGURES):
        answer = _CALLS[method](accelerator) if method in _CALLS else getattr(accelerator, method)()
        if method in _ANSWERS or method.startswith("reset"):
            wanted = _ANSWERS.get(method)
            expect(answer is wanted, f"{method}() of an absent capability to be {wanted}", answer)
        else:
            expect(isinstance(answer, int) and answer >= 0, f"{method}() of an absent peak to be bytes", answer)
        capability = CAPABILITY_OF[method]
        why = accelerator.spec.capabilities.why_absent(capability) or "this backend does not provide it"
        return str(CapabilityError(accelerator._name, str(capability), why))
    if error is None:
        raise ConformanceError(f"{method} is declared absent: expected it to raise CapabilityError, it returned")
    if not isinstance(error, CapabilityError):
        text = f"{type(error).__name__}: {error}"
        raise ConformanceError(f"{method} is declared absent: expected it to raise CapabilityError, got {text}")
    expect_equal(f"the CapabilityError of {method} to name the accelerator", error.accelerator, accelerator._name)
    expect(str(error).rpartition(": ")[2].strip(), f"the CapabilityError of {method} to give a reason", str(error))
    return str(error)


def is_declared(accelerator: Accelerator, error: CapabilityError) -> bool:
    """Whether the accelerator declares the absence that this error tells of."""
    if accelerator.spec.capabilities.why_absent(error.capability):
        return True
    name = CAPABILITY_OF.get(error.capability, error.capability)
    return name in set(Capability) and not accelerator.has(name)


def _error_of(accelerator: Accelerator, method: str) -> BaseException | None:
    try:
        if method in _CALLS:
            _CALLS[method](accelerator)
        else:
            getattr(accelerator, method)()
    except (Exception, SystemExit) as error:  # the caller judges it
        logger.debug("%s raised", method, exc_info=True)
        return error
    return None

# SPDX-License-Identifier: Apache-2.0
"""What the accelerator says about itself: its declaration, its policies, and that it is one object."""

from __future__ import annotations

import copy
import pickle

from anyaccel.accelerator import select
from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_error, expect_type
from anyaccel.accelerator.spec import API_VERSION, BackendSpec, Capability


@check("declaration")
def check_the_spec_is_complete(accelerator: Accelerator) -> None:
    """The data that a backend declares, and the two attributes that DeepSpeed's code reads."""
    spec = accelerator.spec
    expect(isinstance(spec, BackendSpec), "spec a BackendSpec", spec)
    for field in ("name", "device_type", "torch_module"):
        expect(getattr(spec, field), f"spec.{field} not empty", getattr(spec, field))
    expect(spec.api_version <= API_VERSION, f"spec.api_version up to {API_VERSION}", spec.api_version)
    expect_equal("_name", accelerator._name, spec.name)
    expect_type("_communication_backend_name", accelerator._communication_backend_name, str)


@check("declaration", "has")
def check_has_answers_for_every_capability(accelerator: Accelerator) -> None:
    """A bool for each, by member and by name; what is declared absent is not there."""
    for capability in Capability:
        answer = accelerator.has(capability)
        expect_type(f"has({capability.value!r})", answer, bool)
        expect_equal(f"has({capability.value!r}) as for the member,", accelerator.has(capability.value), answer)
        if capability in accelerator.spec.capabilities.absent:
            expect_equal(f"has({capability.value!r}), which is declared absent,", answer, False)
    expect_error("has('no_such_capability')", lambda: accelerator.has("no_such_capability"), ValueError)


@check(
    "declaration",
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
)
def check_policies_are_bools(accelerator: Accelerator) -> None:
    """And agree with what is declared: a synchronous device has no order of work to care for."""
    for name in (
        "is_synchronized_device",
        "use_host_timers",
        "resolves_data_dependency",
        "handles_memory_backpressure",
    ):
        expect_type(f"{name}()", getattr(accelerator, name)(), bool)
    synchronous = accelerator.spec.capabilities.synchronous
    expect_equal("is_synchronized_device(), as declared,", accelerator.is_synchronized_device(), synchronous)
    if synchronous:
        expect(accelerator.resolves_data_dependency(), "resolves_data_dependency() True", False)


@check("declaration")
def check_copies_are_the_accelerator(accelerator: Accelerator) -> None:
    """A module that keeps its accelerator is copied and sent to other processes."""
    expect(copy.copy(accelerator) is accelerator, "copy.copy() to return the same object", "another")
    expect(copy.deepcopy([accelerator])[0] is accelerator, "copy.deepcopy() to return the same object", "another")
    data = pickle.dumps(accelerator)
    # Loading it chooses the accelerator of a process that has none yet.
    if select._accelerator is accelerator:
        expect(pickle.loads(data) is accelerator, "a pickle to be loaded as the same object", "another")

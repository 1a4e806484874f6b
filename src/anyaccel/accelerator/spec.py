# SPDX-License-Identifier: Apache-2.0
"""What a backend declares about itself: plain data, readable without importing torch.

Small records are named tuples: defining a dataclass takes a millisecond or two, at each start of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

# Version of the interface that an extension is written against. It grows only when an existing method changes
# its meaning: a new method has a default in base.Accelerator and needs no new version.
API_VERSION = 1


class Capability(StrEnum):
    """What an accelerator may lack. The value is the name that CapabilityError carries."""

    STREAMS = "streams"
    EVENTS = "events"
    GRAPHS = "graphs"
    RNG = "rng"
    MEMORY_STATS = "memory_stats"
    PEAK_MEMORY = "peak_memory"
    RESERVED_MEMORY = "reserved_memory"
    MEMORY_SIZE = "memory_size"
    COLLECTIVES = "collectives"
    PINNED_MEMORY = "pinned_memory"
    HOST_REGISTRATION = "register_host_memory"
    FP64 = "fp64"
    OP_BUILDERS = "op_builders"


# The methods that need a capability: where it is absent they raise CapabilityError, except streams, events and
# graphs of a synchronous device, which are objects that do nothing, and register_host_memory, which answers
# False. PINNED_MEMORY and FP64 are asked, not called.
METHODS_OF: Mapping[Capability, tuple[str, ...]] = {
    Capability.STREAMS: ("Stream", "stream", "current_stream", "default_stream"),
    Capability.EVENTS: ("Event",),
    Capability.GRAPHS: ("create_graph", "capture_to_graph"),
    Capability.RNG: (
        "default_generator",
        "get_rng_state",
        "set_rng_state",
        "get_rng_state_all",
        "set_rng_state_all",
        "manual_seed",
        "manual_seed_all",
        "initial_seed",
    ),
    Capability.MEMORY_STATS: ("memory_allocated", "memory_stats", "memory_summary"),
    Capability.PEAK_MEMORY: (
        "max_memory_allocated",
        "max_memory_reserved",
        "max_memory_cached",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
    ),
    Capability.RESERVED_MEMORY: ("memory_reserved", "memory_cached"),
    Capability.MEMORY_SIZE: (
        "total_memory",
        "available_memory",
        "device_properties",
        "device_capability",
        "mem_get_info",
    ),
    Capability.COLLECTIVES: ("communication_backend_name",),
    Capability.HOST_REGISTRATION: ("register_host_memory", "unregister_host_memory"),
    Capability.OP_BUILDERS: ("op_builder_dir", "create_op_builder"),
}
# The capability that a method needs.
CAPABILITY_OF = {method: capability for capability, methods in METHODS_OF.items() for method in methods}


@dataclass(frozen=True)
class Capabilities:
    """What the device can do: all that the backend implements and that is not declared absent.

    Attributes:
        synchronous: every operation is complete when its call returns. Streams, events and graphs of such a
            device are objects that do nothing, so code written for a queueing device runs unchanged.
        absent: what is lacking, with the reason that its error gives: a Capability, or the name of one method
            where the rest of its capability is there.

    Raises:
        ValueError: a key that is no capability and no name of a method, or an absence without a reason.
    """

    synchronous: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {*Capability, *CAPABILITY_OF, "is_current_stream_capturing"}
        for name, reason in self.absent.items():
            if name not in known:
                raise ValueError(f"{str(name)!r} is declared absent but is no capability: {', '.join(Capability)}")
            if not reason:
                raise ValueError(f"capability {str(name)!r} is declared absent without a reason")

    def why_absent(self, name: str) -> str:
        """Reason that the declaration gives for a capability or method; empty for what is there."""
        return self.absent.get(name, "")


class CollectiveBackend(NamedTuple):
    """A `torch.distributed` backend for tensors of the device.

    Attributes:
        name: as `init_process_group(backend=)` takes it.
        package: must import before the backend exists; empty for a part of torch.
        why_not: "module:function" that says, before that, why it cannot be used here; the empty text when it can.
        in_graphs: its calls may be captured into a graph of the device. Where they may not, or it is not known, a step
            of tensor-parallel ranks is captured in pieces, between which the calls are made.
    """

    name: str
    package: str = ""
    why_not: str = ""
    in_graphs: bool = False


class HostRegistration(NamedTuple):
    """How a vendor's runtime page-locks existing host memory; each function answers with an error code, 0 is good.

    Attributes:
        runtime: function of the torch module that returns the runtime's bindings.
        register: takes (address, bytes, flags).
        unregister: takes (address).
        flags: for `register`.
    """

    runtime: str
    register: str
    unregister: str
    flags: int = 0


class WithoutTorch(NamedTuple):
    """What those parts of anyaccel that never import torch know of a backend: launcher, report and porting tool.

    tools/pages.py vendors writes it into vendors.py, for the backends of anyaccel's own.

    Attributes:
        choice: what DS_ACCELERATOR calls the backend, where several drive devices of one name; "" for the spec's name.
        place: the launcher looks for devices of low places first, and by name where they are equal.
        device_files: how the kernel shows the devices: the folder, how the name of each one's file begins (a number
            follows), and the PCI vendor, "" where it is not known. None where there are no such files, or where
            launch/plan/devices.py has code that finds them.
        of_a_host: variables beside `visible_devices` that hold for the devices of one host.
        environment: variables that begin like this go to the workers on other hosts, as `export_prefixes` do.
        distributions: packages that change which accelerator is chosen, as package indexes call them.
    """

    choice: str = ""
    place: int = 50
    device_files: tuple[str, str, str] | None = None
    of_a_host: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()


class Unavailable(NamedTuple):
    """Why an accelerator cannot be used.

    Attributes:
        reason: completes the sentence "cuda cannot be used: ...".
        installed: something for this accelerator is installed all the same, so the user expects it to work
            and passing it over deserves a warning.
    """

    reason: str
    installed: bool


@dataclass(frozen=True)
class BackendSpec:
    """One backend.

    Attributes:
        name: what users type in DS_ACCELERATOR; also `get_accelerator()._name`.
        device_type: the `torch.device` type.
        torch_module: dotted name of the torch device module, such as ``"torch.cuda"``.
        package: must import before that module exists; empty for a part of torch.
        install: what a user does to get it, as a sentence.
        order: detection tries low numbers first; an extension that says nothing comes before all of ours.
        why: why it has this place in the order.
        yields_to: accelerators that detection prefers to this one wherever they have a device.
        probe_deadline_s: seconds after which detection passes over a candidate that has not answered.
        collectives: in order of preference; the first whose package imports is used.
        visible_devices: environment variables by which the vendor's runtime narrows the devices of a process.
        export_prefixes: variables with these prefixes are passed on to the other nodes of a job.
        graph_class: class in `torch_module` that holds a captured graph; empty when there is none.
        range_module: submodule of `torch_module` with range_push and range_pop for the vendor's profiler; empty
            for ranges of `torch.profiler`.
        host_registration: how existing host memory is page-locked; None when it cannot be.
        triton_backend: folder in triton/backends that drives the device; empty when there is none.
        compile_backend: default backend of `torch.compile`.
        op_builders: package that holds the op builders; empty when there are none.
        capabilities: see Capabilities.
        without_torch: see WithoutTorch; for anyaccel's own backends.
        api_version: interface version that the backend was written against.
    """

    name: str
    device_type: str
    torch_module: str
    package: str = ""
    install: str = ""
    order: int = 0
    why: str = "an extension was installed to be used"
    yields_to: tuple[str, ...] = ()
    probe_deadline_s: float = 60.0
    collectives: tuple[CollectiveBackend, ...] = ()
    visible_devices: tuple[str, ...] = ()
    export_prefixes: tuple[str, ...] = ()
    graph_class: str = ""
    range_module: str = ""
    host_registration: HostRegistration | None = None
    triton_backend: str = ""
    compile_backend: str = "inductor"
    op_builders: str = ""
    capabilities: Capabilities = Capabilities()
    without_torch: WithoutTorch = field(default=WithoutTorch())
    api_version: int = API_VERSION

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
    GRAPHS = "graphs"
    RNG = "rng"
    MEMORY_STATS = "memory_stats"
    MEMORY_SIZE = "memory_size"
    PINNED_MEMORY = "pinned_memory"
    HOST_REGISTRATION = "register_host_memory"
    FP64 = "fp64"
    OP_BUILDERS = "op_builders"


@dataclass(frozen=True)
class Capabilities:
    """What the device can do: all that the backend implements and that is not declared absent.

    Attributes:
        synchronous: every operation is complete when its call returns. Streams, events and graphs of such a
            device are objects that do nothing, so code written for a queueing device runs unchanged.
        absent: each capability that is lacking, with the reason that its error gives.

    Raises:
        ValueError: an unknown capability, or one that is absent without a reason.
    """

    synchronous: bool = False
    absent: Mapping[Capability, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for capability, reason in self.absent.items():
            if Capability(capability) and not reason:
                raise ValueError(f"capability {str(capability)!r} is declared absent without a reason")

    def has(self, capability: Capability | str) -> bool:
        """Whether `capability` is not declared absent; `Accelerator.has` also looks at what is implemented.

        Raises:
            ValueError: no capability of that name.
        """
        return Capability(capability) not in self.absent

    def why_absent(self, capability: str) -> str:
        """Reason that the declaration gives; empty for what is there or is no capability at all."""
        return next((reason for name, reason in self.absent.items() if name == capability), "")


class CollectiveBackend(NamedTuple):
    """A `torch.distributed` backend for tensors of the device.

    Attributes:
        name: as `init_process_group(backend=)` takes it.
        package: must import before the backend exists; empty for a part of torch.
    """

    name: str
    package: str = ""


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
        collectives: in order of preference; the first whose package imports is used.
        visible_devices: environment variables by which the vendor's runtime narrows the devices of a process.
        export_prefixes: variables with these prefixes are passed on to the other nodes of a job.
        graph_class: class in `torch_module` that holds a captured graph; empty when there is none.
        compile_backend: default backend of `torch.compile`.
        op_builders: package that holds the op builders; empty when there are none.
        capabilities: see Capabilities.
        api_version: interface version that the backend was written against.
    """

    name: str
    device_type: str
    torch_module: str
    package: str = ""
    install: str = ""
    order: int = 0
    why: str = "an extension was installed to be used"
    collectives: tuple[CollectiveBackend, ...] = ()
    visible_devices: tuple[str, ...] = ()
    export_prefixes: tuple[str, ...] = ()
    graph_class: str = ""
    compile_backend: str = "inductor"
    op_builders: str = ""
    capabilities: Capabilities = Capabilities()
    api_version: int = API_VERSION

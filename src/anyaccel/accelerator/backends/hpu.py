# SPDX-License-Identifier: Apache-2.0
"""Intel Gaudi (Habana), through habana_frameworks. One process drives one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class HpuAccelerator(TorchDeviceAccelerator):
    """habana_frameworks.torch.hpu, in lazy and in eager mode (PT_HPU_LAZY_MODE)."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="hpu",
        device_type="hpu",
        torch_module="habana_frameworks.torch.hpu",
        package="habana_frameworks.torch.hpu",
        install="install the Habana SynapseAI software with its build of torch",
        order=70,
        why="a vendor package that works beside torch",
        collectives=(CollectiveBackend("hccl"),),
        visible_devices=("HABANA_VISIBLE_MODULES",),
        export_prefixes=("HABANA", "HCCL", "PT_HPU", "LD_LIBRARY", "PATH"),
        graph_class="HPUGraph",
        compile_backend="hpu_backend",
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.RESERVED_MEMORY: "the vendor's function returns the size of the device",
                "max_memory_reserved": "the vendor's function returns the size of the device",
            }
        ),
        without_torch=WithoutTorch(of_a_host=("HABANA_VISIBLE_DEVICES",), distributions=("habana-torch-plugin",)),
    )

    def _provides(self, capability: Capability) -> bool:
        if capability is Capability.GRAPHS:  # the vendor brings them in lazy mode only
            return hasattr(importlib.import_module(self.spec.torch_module), self.spec.graph_class)
        return super()._provides(capability)

    def _lacks_graphs(self) -> None:
        if not self.has(Capability.GRAPHS):
            self._lacks(Capability.GRAPHS, "habana_frameworks has graphs in lazy mode only: set PT_HPU_LAZY_MODE=1")

    def resolves_data_dependency(self) -> bool:
        return True  # the graph compiler orders operations by their data

    def handles_memory_backpressure(self) -> bool:
        return True  # the runtime waits for memory by itself

    def device_name(self, device_index: DeviceIndex = None) -> str:
        self._named_index(device_index)
        return "hpu"  # a process has one device, chosen by set_device

    def current_device_name(self) -> str:
        return f"hpu:{self.current_device()}"

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        self._vendor("synchronize")()  # takes no device: a process has one

    # Random numbers: a submodule, with one generator, that refuses every index but 0.

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        generator: torch.Generator = self._vendor("random").default_generators[0]
        return generator

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        self._vendor("random").set_rng_state(new_state)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        state: torch.Tensor = self._vendor("random").get_rng_state()
        return state

    def manual_seed(self, seed: int) -> None:
        self._vendor("random").manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._vendor("random").manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(self._vendor("random").initial_seed())

    # Memory: no caching allocator to empty, and the size of the device is one of the statistics.

    def empty_cache(self) -> None:
        return

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        """The vendor's counters under its own names, and those that torch.cuda also has under these names too."""
        stats = super().memory_stats(device_index)
        names = {"allocated_bytes.all.current": "InUse", "allocated_bytes.all.peak": "MaxInUse"}
        return stats | {name: stats[theirs] for name, theirs in names.items()}

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("memory_stats")(device_index)["Limit"])

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True  # its native type

    def is_fp16_supported(self) -> bool:
        # Gaudi 1 has none; only the vendor's experimental module tells.
        return bool(importlib.import_module("habana_frameworks.torch.utils.experimental")._is_fp16_supported())

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()  # the vendor has no queue of calls for later

    def create_graph(self) -> Any:
        self._lacks_graphs()
        return super().create_graph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        self._lacks_graphs()
        context: AbstractContextManager[Any] = self._vendor("graph")(graph, stream=stream)  # has no memory pools
        return context

# SPDX-License-Identifier: Apache-2.0
"""Devices of torch_xla: TPUs, and AWS Neuron of before torch.neuron. On a CPU it is a way to test, if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from anyaccel import env
from anyaccel.accelerator.base import DeviceIndex
from anyaccel.accelerator.spec import (
    BackendSpec,
    Capabilities,
    Capability,
    CollectiveBackend,
    Unavailable,
    WithoutTorch,
)
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator, find_module
from anyaccel.errors import UsageError

_ORDER = "XLA orders work by its data; torch_xla has no such objects"
_SEED = "torch_xla has a running seed in place of a generator"
_PEAK = "torch_xla keeps no peak that can be reset"


def _client() -> str | None:
    """What torch_xla runs on: "TPU", "NEURON", "CPU"; without opening it."""
    kind: str | None = find_module("torch_xla.runtime").device_type()
    return kind


class XlaAccelerator(TorchDeviceAccelerator):
    """torch_xla. Operations are gathered, and compiled and run when somebody asks for their results."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="xla",
        device_type="xla",
        torch_module="torch_xla",
        package="torch_xla",
        install="install torch_xla for this version of torch, with the plugin of the device (torch_xla[tpu] for a TPU)",
        order=130,
        why="behind all that torch drives by itself",
        collectives=(CollectiveBackend("xla", "torch_xla.distributed.xla_backend"),),
        visible_devices=("TPU_VISIBLE_DEVICES",),
        export_prefixes=("PJRT_", "XLA_", "TPU_", "LIBTPU_", "NEURON", "LD_LIBRARY", "PATH"),
        compile_backend="openxla",
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.STREAMS: _ORDER,
                Capability.EVENTS: _ORDER,
                Capability.GRAPHS: "XLA compiles and keeps graphs by itself",
                Capability.PEAK_MEMORY: _PEAK,
                Capability.RESERVED_MEMORY: "torch_xla tells what is in use, and not what it holds",
                Capability.PINNED_MEMORY: "torch_xla copies from any host memory",
                "default_generator": _SEED,
            }
        ),
        without_torch=WithoutTorch(place=95, of_a_host=("NEURON_RT_VISIBLE_CORES",), distributions=("torch-xla",)),
    )

    def __init__(self) -> None:
        super().__init__()
        self._chosen: int | None = None
        self._model = find_module("torch_xla.core.xla_model")

    @classmethod
    def probe(cls) -> Unavailable | None:
        missing = cls._probe_package()
        if missing:
            return missing
        kind = _client()  # importing torch_xla has chosen it; to count devices would open them
        if kind not in (None, "CPU") or env.DS_ACCELERATOR.get() == cls.spec.name:
            return None
        return Unavailable(f"torch_xla is there but would run on {kind or 'nothing'} (PJRT_DEVICE)", installed=False)

    # Identity: torch_xla has a default device, and no public way for a process to change it.

    def device_name(self, device_index: DeviceIndex = None) -> str:
        index = self._named_index(device_index)
        return super().device_name(self._chosen if index is None else index)

    def set_device(self, device_index: DeviceIndex) -> None:
        index = self._index(device_index)
        if index not in range(self.device_count()):
            raise UsageError(f"there is no device xla:{index}: torch_xla has {self.device_count()}")
        self._chosen = index

    def current_device(self) -> int:
        return int(self._vendor("device")().index) if self._chosen is None else self._chosen

    def is_available(self) -> bool:
        return self.device_count() > 0

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        self._vendor("sync")(wait=True)  # compiles and runs what was gathered
        self._model.wait_device_ops()  # of all devices: it takes them by the names of the PJRT client only

    def use_host_timers(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return True

    # Random numbers: the state of a device is one running seed.

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        seed = int(self._model.get_rng_state(self._device_text(device_index)))
        return torch.tensor([seed & (1 << 64) - 1], dtype=torch.uint64).view(torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        self._model.set_rng_state(int(new_state.view(torch.int64).item()), self._device_text(device_index))

    def manual_seed(self, seed: int) -> None:
        self._vendor("manual_seed")(seed, self._device_text(None))

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._vendor("manual_seed")(seed, self._device_text(index))

    def initial_seed(self) -> int:
        return int(self._model.get_rng_state(self._device_text(None)))

    def _device_text(self, device_index: DeviceIndex) -> str:
        return f"xla:{self._index(device_index)}"

    # Memory: as the PJRT client keeps account of it; the one of a CPU does not.

    def _provides(self, capability: Capability) -> bool:
        if capability in (Capability.MEMORY_STATS, Capability.MEMORY_SIZE) and _client() == "CPU":
            return False
        return super()._provides(capability)

    def _figures(self, device_index: DeviceIndex, needs: Capability) -> dict[str, Any]:
        if not self.has(needs):
            self._lacks(needs, "the PJRT client of a CPU keeps no account of memory")
        return dict(self._model.get_memory_info(torch.device(self._device_text(device_index))))

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        return int(self._figures(device_index, Capability.MEMORY_STATS)["bytes_used"])

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        stats = self._figures(device_index, Capability.MEMORY_STATS)
        return stats | {"allocated_bytes.all.current": int(stats["bytes_used"])}

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        return int(self._figures(device_index, Capability.MEMORY_SIZE)["bytes_limit"])

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        figures = self._figures(device_index, Capability.MEMORY_SIZE)
        return int(figures["bytes_limit"]) - int(figures["bytes_used"])

    def empty_cache(self) -> None:
        return  # memory goes back to the client with its tensor

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return bool(find_module("torch_xla.runtime").is_bf16_supported())

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()

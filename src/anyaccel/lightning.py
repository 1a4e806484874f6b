# SPDX-License-Identifier: Apache-2.0
"""An accelerator and a strategy for Lightning's Fabric and Trainer."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import CompatError, UsageError

__all__ = ["use_in_lightning"]

NAME = "anyaccel"
# Lightning comes as one package and as two: where Fabric is, and where Trainer is.
_PACKAGES = (("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning"))
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def use_in_lightning() -> None:
    """Let Fabric and Trainer take `accelerator="anyaccel", strategy="anyaccel"`; the second call changes nothing.

    The accelerator is that of `anyaccel.get_accelerator()`. The strategy is DDP, on a CPU by our backend `shm`; it
    takes the ranks that `anyaccel run` or torchrun has started, else starts them itself, and `precision="bf16-mixed"`
    is that of the device.

    Raises:
        CompatError: Lightning is not installed, or cannot be imported.
    """
    found = [(fabric, trainer) for fabric, trainer in map(_import_both, _PACKAGES) if fabric is not None]
    if not found:
        raise CompatError("Lightning is not installed: pip install lightning")
    for fabric, trainer in found:
        _register(fabric, fabric.accelerators.ACCELERATOR_REGISTRY, fabric.strategies.STRATEGY_REGISTRY, fabric)
        if trainer is not None:
            _register(trainer, trainer.accelerators.AcceleratorRegistry, trainer.strategies.StrategyRegistry, fabric)


def _import_both(names: tuple[str, str]) -> tuple[ModuleType | None, ModuleType | None]:
    fabric, trainer = map(_import, names)
    return fabric, trainer


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name == error.name or name.startswith(f"{error.name}."):
            return None
        raise CompatError(f"{name} cannot be imported: {error}") from error


def _register(package: Any, accelerators: Any, strategies: Any, fabric: Any) -> None:
    if NAME in accelerators:
        return
    from anyaccel.comm import backends

    backends.register()
    accelerators.register(
        NAME, _accelerator_class(package), description="the accelerator of anyaccel.get_accelerator()"
    )
    strategies.register(NAME, _strategy_class(package, fabric), description="DDP on it, by shm on a CPU")


def _accelerator_class(package: Any) -> type[Any]:
    """Lightning's accelerator, which is another base class for Fabric than for Trainer."""

    class AnyAccelerator(package.accelerators.Accelerator):  # type: ignore[misc]
        """The accelerator of `anyaccel.get_accelerator()`."""

        def setup_device(self, device: torch.device) -> None:
            ours = get_accelerator()
            if device.type != ours.spec.device_type:
                raise UsageError(f"device {device} is not of the accelerator {ours._name!r}")
            ours.set_device(device.index)

        def teardown(self) -> None:
            get_accelerator().empty_cache()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return get_accelerator().memory_stats(torch.device(device).index)

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            """Indices; an int or its text is how many."""
            if isinstance(devices, list | tuple):
                return [int(index) for index in devices]
            try:
                count = int(devices)
            except (TypeError, ValueError):
                raise UsageError(f"devices={devices!r}: give a number of devices, or a list of indices") from None
            if count == -1:
                count = get_accelerator().device_count()
            if count < 1:
                raise UsageError(f"devices={devices!r}: there must be one at least")
            return list(range(count))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [get_accelerator().device(index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return get_accelerator().device_count()

        @staticmethod
        def is_available() -> bool:
            return get_accelerator().is_available()

        @staticmethod
        def name() -> str:
            return NAME

    return AnyAccelerator


def _strategy_class(package: Any, fabric: Any) -> type[Any]:
    class AnyAccelStrategy(package.strategies.DDPStrategy):  # type: ignore[misc]
        """DDP whose ranks and collectives are ours."""

        def __init__(self, **options: Any) -> None:
            from anyaccel.comm import backends

            ours = get_accelerator()
            on_host = ours.spec.device_type == backends.TENSORS_IN
            backend = "shm" if on_host else ours.communication_backend_name()
            super().__init__(**{"process_group_backend": backend, **options})

        def _configure_launcher(self) -> None:
            if all(name in os.environ for name in _OF_A_LAUNCHER):  # also where there are several hosts
                self.cluster_environment = fabric.plugins.environments.TorchElasticEnvironment()
            self._keep_to_device()
            super()._configure_launcher()

        def _keep_to_device(self) -> None:
            """Let mixed precision be that of our device: Lightning takes each name that it does not know for CUDA."""
            precision: Any = getattr(self, "_precision_plugin", None) or getattr(self, "_precision", None)
            if hasattr(precision, "device"):
                precision.device = get_accelerator().spec.device_type

    return AnyAccelStrategy

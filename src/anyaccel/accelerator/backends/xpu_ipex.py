# SPDX-License-Identifier: Apache-2.0
"""Intel GPUs, through torch.xpu with Intel's extension for PyTorch (IPEX) on top of it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, ClassVar

from torch.torch_version import TorchVersion

from anyaccel.accelerator import torch_device
from anyaccel.accelerator.backends.xpu import XpuAccelerator
from anyaccel.accelerator.spec import BackendSpec, Capability, Unavailable

_IPEX = "intel_extension_for_pytorch"


class IpexAccelerator(XpuAccelerator):
    """torch.xpu with intel_extension_for_pytorch."""

    spec: ClassVar[BackendSpec] = replace(
        XpuAccelerator.spec,
        package=_IPEX,
        install="install intel_extension_for_pytorch with XPU support for this version of torch",
        order=20,
        why="installed on top of torch to drive an Intel GPU",
        yields_to=(),
        without_torch=XpuAccelerator.spec.without_torch._replace(
            choice="xpu.ipex", distributions=("intel-extension-for-pytorch", "oneccl-bind-pt")
        ),
    )

    @classmethod
    def probe(cls) -> Unavailable | None:
        missing = cls._probe_package()
        if missing:
            return missing
        has_xpu = getattr(getattr(importlib.import_module(_IPEX), "_C", None), "_has_xpu", None)
        if has_xpu is not None and not has_xpu():
            # The CPU wheel, which is there to be used with the CPU.
            return Unavailable(f"{cls._title()} requires {_IPEX} with XPU support, this is its CPU build", False)
        return cls._probe_module()

    @classmethod
    def _is_built(cls) -> bool:
        return True  # IPEX brings what torch lacks

    def _provides(self, capability: Capability) -> bool:
        if capability is Capability.GRAPHS and not hasattr(
            torch_device.find_module(self.spec.torch_module), self.spec.graph_class
        ):
            return False  # an IPEX that puts its own torch.xpu in the place of torch's, as older ones did
        return super()._provides(capability)

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return not hasattr(self._module, "is_bf16_supported") or super().is_bf16_supported()

    def use_host_timers(self) -> bool:
        # Events of IPEX before 2.6 measure wrongly.
        version = importlib.import_module(_IPEX).__version__
        return bool(TorchVersion(version) < "2.6")  # as versions: 2.10 is newer

    def build_extension(self) -> type[Any]:
        command: type[Any] = importlib.import_module(f"{_IPEX}.xpu.cpp_extension").DpcppBuildExtension
        return command

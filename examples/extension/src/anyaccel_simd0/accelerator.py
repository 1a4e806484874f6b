# SPDX-License-Identifier: Apache-2.0
"""What anyaccel needs to know of the device: this is all, since torch.simd has the functions that are forwarded to."""

# [spec]
from typing import ClassVar

from anyaccel.accelerator import BackendSpec, Capabilities, Capability, TorchDeviceAccelerator


class Simd0Accelerator(TorchDeviceAccelerator):
    spec: ClassVar[BackendSpec] = BackendSpec(
        name="simd0",
        device_type="simd",
        torch_module="torch.simd",
        package="anyaccel_simd0",
        install="pip install ./examples/extension",
        order=5,
        why="whoever installs a simulated device wants to use it",
        visible_devices=("SIMD0_VISIBLE_DEVICES",),
        export_prefixes=("SIMD0",),
        op_builders="anyaccel_simd0.op_builder",
        capabilities=Capabilities(
            absent={
                Capability.GRAPHS: "operators run as they are called, so there is nothing to capture",
                Capability.COLLECTIVES: "no torch.distributed backend moves this device's tensors",
                Capability.HOST_REGISTRATION: "its runtime has no call for it",
            }
        ),
        api_version=1,
    )


# [/spec]

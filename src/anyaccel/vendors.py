# SPDX-License-Identifier: Apache-2.0
"""Whose accelerators are known, and by which names: of backends, packages and environment variables. Torch-free.

Detection, the launcher, the report, the porting tool and the commands' choice without torch all read this one table.
How a device behaves is its backend's (accelerator/backends/), and where the kernel shows it is launch/devices.py's.
"""

from __future__ import annotations

# Extensions bring accelerators under this group of entry points.
ENTRY_POINTS = "anyaccel.accelerators"


class Vendor:  # plain: a frozen dataclass takes 1.4 ms of each launch
    """A device type of torch.

    Attributes:
        backends: what detection knows it as -> its class in accelerator/backends/ and the package that this needs
            beside torch ("" for none); several are several ways to the same devices.
        distributions: packages that change which accelerator is chosen, as package indexes call them.
        visible: variables by which its runtime narrows the devices of a process, the one that wins first.
        of_a_host: further variables that hold for the devices of one host.
        environment: variables that begin like this go to the workers on other hosts.
    """

    __slots__ = ("backends", "distributions", "environment", "of_a_host", "visible")

    def __init__(
        self,
        backends: dict[str, tuple[str, str]],
        visible: tuple[str, ...] = (),
        environment: tuple[str, ...] = (),
        distributions: tuple[str, ...] = (),
        of_a_host: tuple[str, ...] = (),
    ) -> None:
        self.backends, self.visible, self.environment = backends, visible, environment
        self.distributions, self.of_a_host = distributions, of_a_host

    @property
    def package(self) -> str:
        """The package of a vendor with one backend."""
        ((_, package),) = self.backends.values()
        return package


# In the order in which the launcher looks for devices: a processor's own graphics unit may be an xpu, so that is late.
VENDORS = {
    "cuda": Vendor(
        {"cuda": ("cuda:CudaAccelerator", "")},
        ("CUDA_VISIBLE_DEVICES",),
        ("CUDA_", "HIP_", "ROCM_", "HSA_"),
        of_a_host=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    ),
    "npu": Vendor(
        {"npu": ("npu:NpuAccelerator", "torch_npu")},
        ("ASCEND_RT_VISIBLE_DEVICES",),
        ("ASCEND", "HCCL"),
        ("torch-npu",),
        ("ASCEND_VISIBLE_DEVICES",),
    ),
    "hpu": Vendor(
        {"hpu": ("hpu:HpuAccelerator", "habana_frameworks.torch.hpu")},
        ("HABANA_VISIBLE_MODULES",),
        ("HABANA", "PT_HPU"),
        ("habana-torch-plugin",),
        ("HABANA_VISIBLE_DEVICES",),
    ),
    "mlu": Vendor(
        {"mlu": ("mlu:MluAccelerator", "torch_mlu")}, ("MLU_VISIBLE_DEVICES",), ("NEUWARE_HOME", "CNCL"), ("torch-mlu",)
    ),
    "musa": Vendor(
        {"musa": ("musa:MusaAccelerator", "torch_musa")}, ("MUSA_VISIBLE_DEVICES",), ("MCCL", "MUSA"), ("torch-musa",)
    ),
    "sdaa": Vendor(
        {"sdaa": ("sdaa:SdaaAccelerator", "torch_sdaa")}, ("SDAA_VISIBLE_DEVICES",), ("TCCL", "SDAA"), ("torch-sdaa",)
    ),
    "supa": Vendor(
        {"supa": ("supa:SupaAccelerator", "torch_supa")},
        ("SUPA_VISIBLE_DEVICES",),
        ("BCCL", "BIREN", "SUPA"),
        ("torch-supa",),
    ),
    "xpu": Vendor(
        {
            "xpu.external": ("xpu_external:ExternalXpuAccelerator", "intel_extension_for_deepspeed"),
            "xpu.ipex": ("xpu_ipex:IpexAccelerator", "intel_extension_for_pytorch"),
            "xpu.native": ("xpu:XpuAccelerator", ""),
        },
        ("ZE_AFFINITY_MASK",),
        ("ONEAPI", "SYCL", "ZE_", "IPEX_"),
        ("intel-extension-for-pytorch", "oneccl-bind-pt"),
    ),
    "mps": Vendor({"mps": ("mps:MpsAccelerator", "")}),
    "mtia": Vendor({"mtia": ("mtia:MtiaAccelerator", "")}),
    "cpu": Vendor({"cpu": ("cpu:CpuAccelerator", "")}),
}
# Names that DS_ACCELERATOR takes for the first of several ways to the same device.
FAMILIES = {"xpu": ("xpu.ipex", "xpu.native")}

HOST = "cpu"
# The device whose names the porting tool replaces.
PORTED = "cuda"
# The devices beside these two, and those for which there is no backend here: code that asks for them is not for CUDA.
OTHERS = tuple(name for name in VENDORS if name not in (HOST, PORTED))
WITHOUT_BACKEND = ("neuron", "tpu", "xla")

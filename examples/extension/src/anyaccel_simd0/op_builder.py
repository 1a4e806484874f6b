# SPDX-License-Identifier: Apache-2.0
"""The op builders of simd0: anyaccel finds this module by `BackendSpec.op_builders`."""

# [builder]
from typing import ClassVar

from anyaccel.ops import OpBuilder


class FusedScaleAddBuilder(OpBuilder):
    """y += alpha * x. Built when it is first loaded: a vendor's compiler would be called in the same way."""

    NAME: ClassVar[str] = "simd0_scale_add"
    BUILD_VAR: ClassVar[str] = "SIMD0_BUILD_SCALE_ADD"  # 0 switches the op off
    ACCELERATOR: ClassVar[str] = "simd0"

    def absolute_name(self) -> str:
        return f"anyaccel_simd0.prebuilt.{self.NAME}"

    def sources(self) -> list[str]:
        return ["scale_add.cpp"]

    def simd_kernel_path(self, code_path: str) -> str:
        return f"csrc/kernels/{code_path}"  # beside this module


# [/builder]

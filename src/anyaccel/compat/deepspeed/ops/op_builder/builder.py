# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.op_builder.builder: base classes of op builders, with what other packages take from them."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from anyaccel import env, ops
from anyaccel.errors import OpBuildError
from anyaccel.ops import toolchains
from anyaccel.ops.builder import CPUOpBuilder as _CPUOpBuilder

from ..._cover import cover

__all__ = ["TORCH_MAJOR", "TORCH_MINOR", "CPUOpBuilder", "OpBuilder"]

logger = logging.getLogger("anyaccel.ops")

TORCH_MAJOR, TORCH_MINOR = map(int, torch.__version__.split(".")[:2])


class OpBuilder(ops.OpBuilder):
    """`anyaccel.ops.OpBuilder` with the helpers of DeepSpeed's.

    Sources and include folders may also be relative to `deepspeed_src_path("")`, to which some packages copy theirs.
    """

    error_log: str | None = None
    jit_mode = False

    @staticmethod
    def strip_empty_entries(args: Iterable[Any]) -> list[Any]:
        """Those that are not empty."""
        return [arg for arg in args if arg]

    @staticmethod
    def deepspeed_src_path(code_path: str) -> str:
        """An absolute path for one that is relative to the folder of DeepSpeed's ops: here a folder of the user's."""
        # Two folders deep: packages link to what is two above.
        return str(code_path if Path(code_path).is_absolute() else _sources() / code_path)

    @staticmethod
    def command_exists(cmd: str | list[str]) -> bool:
        """Whether one of the commands is found."""
        return any(shutil.which(name) is not None for name in ([cmd] if isinstance(cmd, str) else cmd))

    def warning(self, msg: str) -> None:
        """Keep the text as `error_log`, and log it."""
        self.error_log = msg
        logger.warning("op %s: %s", self.name, msg)

    @staticmethod
    def cpu_arch() -> str:
        """The compiler's flag for this machine's instructions."""
        return "-mcpu=native" if platform.machine() == "ppc64le" else "-march=native"

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch is built for ROCm."""
        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Whether torch is built for SYCL devices."""
        version = getattr(torch.version, "xpu", None)
        return version is not None

    def nvcc_args(self) -> list[str]:
        """Flags for CUDA sources: none."""
        return []

    def why_not(self) -> str:
        """The op is switched off, or there is no compiler; `error_log` has it then.

        As in DeepSpeed, nothing is said of the sources: a builder with a load() of its own may have none.
        """
        reason = self._switched_off()
        if not reason and not self._find_prebuilt():
            try:
                toolchains.find_compiler()
            except OpBuildError as error:
                reason = str(error).partition("\n")[0]
        if reason:
            self.error_log = reason
        return reason

    def _resolve(self, entry: str, hook: str) -> Path:
        found = super()._resolve(entry, hook)
        copied = Path(self.deepspeed_src_path(entry))
        return copied if not found.exists() and copied.exists() else found


class CPUOpBuilder(_CPUOpBuilder, OpBuilder):
    """`OpBuilder` for ops that run on the CPU: compiled and linked with OpenMP."""


def _sources() -> Path:
    folder = env.cache_dir() / "deepspeed" / "packages" / "deepspeed" / "ops"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


cover(globals())

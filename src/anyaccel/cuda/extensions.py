# SPDX-License-Identifier: Apache-2.0
"""Extensions with CUDA sources cannot be built: an error that names them, and that programs with a fallback expect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyaccel.cuda.imports import when_imported
from anyaccel.cuda.report import ABSENT, note
from anyaccel.errors import CapabilityError

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator


class CudaExtensionError(CapabilityError, ImportError):
    """An extension needs CUDA's compiler; an ImportError, which programs catch that can do without the extension."""


def install(accelerator: Accelerator) -> None:
    """Refuse CUDA sources in torch.utils.cpp_extension, when it is imported."""
    when_imported("torch.utils.cpp_extension", lambda module: _refuse_in(module, accelerator))


def _refuse_in(module: Any, accelerator: Accelerator) -> None:
    def refuse(extension: object) -> CudaExtensionError:
        note(f"CUDA extension {extension}", ABSENT)
        return CudaExtensionError(
            accelerator.device_name(),
            f"the CUDA extension {extension}",
            "its sources are CUDA's; use the program's own fallback in torch",
        )

    def extension(name: str, *_args: Any, **_kwargs: Any) -> Any:
        raise refuse(name)

    module.CUDAExtension = functools.wraps(module.CUDAExtension)(extension)
    module.load = _checked(module.load, refuse)
    module.load_inline = _checked(module.load_inline, refuse)


def _checked(original: Callable[..., Any], refuse: Callable[[object], Exception]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        sources = [*args[:1], kwargs.get("sources", ())]
        named = [each for some in sources for each in ([some] if isinstance(some, str) else some)]
        if any(str(each).endswith(".cu") for each in named) or kwargs.get("cuda_sources") or kwargs.get("with_cuda"):
            raise refuse(name)
        return original(name, *args, **kwargs)

    return load

# SPDX-License-Identifier: Apache-2.0
"""torch's shorthands for `to`, for modules that override `to`."""

from __future__ import annotations

from typing import Any

import torch


class PrecisionMethods:
    """Routes half(), bfloat16(), float(), double() and cpu() to `to`, as nn.Module's would convert submodules."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def half(self) -> Any:
        return self.to(torch.float16)

    def bfloat16(self) -> Any:
        return self.to(torch.bfloat16)

    def float(self) -> Any:
        return self.to(torch.float32)

    def double(self) -> Any:
        return self.to(torch.float64)

    def cpu(self) -> Any:
        return self.to("cpu")

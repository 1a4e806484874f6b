# SPDX-License-Identifier: Apache-2.0
"""torch's short names for `to`, for modules that decide in `to` what may be moved or converted."""

from __future__ import annotations

from typing import Any

import torch


class PrecisionMethods:
    """Sends half(), bfloat16(), float(), double() and cpu() to `to`: nn.Module's own would convert what is below."""

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

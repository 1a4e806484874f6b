# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops: optimizers, file I/O and op builders."""

from __future__ import annotations

from .._cover import cover

cover(globals(), {}, ("adagrad", "adam", "aio", "lion", "op_builder"))

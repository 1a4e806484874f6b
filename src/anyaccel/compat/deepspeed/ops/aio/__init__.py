# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.aio: the builder of asynchronous file I/O; its load() has `aio_handle`."""

from __future__ import annotations

from anyaccel.ops.builders.aio import AsyncIOBuilder

from ..._cover import cover

__all__ = ["AsyncIOBuilder"]

cover(globals())

# SPDX-License-Identifier: Apache-2.0
"""deepspeed.constants."""

from __future__ import annotations

from datetime import timedelta

from anyaccel import env

from ._cover import cover

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"

cover(globals())

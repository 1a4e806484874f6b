# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher: the command `deepspeed`, on `anyaccel run`. It does not import torch."""

from __future__ import annotations

from .._cover import cover

cover(globals(), {}, ("constants", "multinode_runner", "runner"))

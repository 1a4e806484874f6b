# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime: what is not the training engine's."""

from __future__ import annotations

from .._cover import cover

cover(globals(), packages=("utils",))

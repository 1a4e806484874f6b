# SPDX-License-Identifier: Apache-2.0
"""Where process groups report what they did."""

from __future__ import annotations

from anyaccel.comm.log import active, record

__all__ = ["active", "record"]

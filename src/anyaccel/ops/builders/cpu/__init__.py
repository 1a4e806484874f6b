# SPDX-License-Identifier: Apache-2.0
"""Builders of the CPU's ops.

A package with its builders in a module, as DeepSpeed wants what `op_builder_dir()` names.
"""

from anyaccel.ops.builders.cpu.ops import *  # noqa: F403

# SPDX-License-Identifier: Apache-2.0
"""Builders of the ops that run on the host, whatever the accelerator; names are DeepSpeed's.

A package with its builders in a module, as DeepSpeed wants what `op_builder_dir()` names.
"""

from anyaccel.ops.builders.host.ops import *  # noqa: F403

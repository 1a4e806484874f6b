# SPDX-License-Identifier: Apache-2.0
"""CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, text_of
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC402",
    title="CUDA_VISIBLE_DEVICES",
    tier=Tier.REPORT,
    why="Each vendor has its own variable, in its own format: `visible_devices_envs()` has their names and "
    "`set_visible_devices_envs(environment, indices)` writes them. CUDA's has no effect on other devices.",
    left='os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
)


@RULE.on_node(cst.SimpleString)
def find(module: Module, node: cst.SimpleString) -> Iterator[Match]:
    """The variable's name in a string."""
    if text_of(node) == "CUDA_VISIBLE_DEVICES":
        advice = "visible_devices_envs() has the accelerator's variables, set_visible_devices_envs() writes them"
        yield Match(node, f"`CUDA_VISIBLE_DEVICES`: not fixed: {advice}")

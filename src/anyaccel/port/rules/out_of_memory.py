# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.OutOfMemoryError."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC107",
    title="torch.cuda.OutOfMemoryError",
    tier=Tier.SAFE,
    why="torch has the same class under a name of no device.",
    before="try:\n    step()\nexcept torch.cuda.OutOfMemoryError:\n    pass",
    after="try:\n    step()\nexcept torch.OutOfMemoryError:\n    pass",
)


@RULE.on_name("torch.cuda.OutOfMemoryError")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """The class, whatever is done with it."""
    yield Match(
        node,
        f"`{full}`; use `torch.OutOfMemoryError`",
        (module.replace(node, "torch.OutOfMemoryError"),),
        imports_torch=True,
    )

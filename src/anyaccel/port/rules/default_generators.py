# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.default_generators[i]."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC103",
    title="torch.cuda.default_generators",
    tier=Tier.SAFE,
    why="The tuple is empty until CUDA is initialised; `default_generator(i)` initialises the device.",
    before="g = torch.cuda.default_generators[i]",
    after="g = get_accelerator().default_generator(i)",
    left="for g in torch.cuda.default_generators:\n    g.manual_seed(0)",
)


@RULE.on_name("torch.cuda.default_generators")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """One generator of the tuple, or another use of it."""
    match module.parent(node):
        case (
            cst.Subscript(value=value, slice=[cst.SubscriptElement(slice=cst.Index(value=index, star=None))]) as item
        ) if value is node and not module.is_stored(item):
            opening = Edit(module.span(node)[0], module.span(index)[0], f"{module.accelerator}().default_generator(")
            closing = Edit(module.span(index)[1], module.span(item)[1], ")")
            if "#" not in module.source(item) and not index.lpar:
                use = "use `get_accelerator().default_generator(...)`"
                yield Match(node, f"`{full}`; {use}", (opening, closing))
                return
    yield Match(node, f"`{full}`: not fixed: default_generator(i) gives one of them; use it for each index")

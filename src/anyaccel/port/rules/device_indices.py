# SPDX-License-Identifier: Apache-2.0
"""Whole numbers where a device is wanted, which torch takes for CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import is_index

RULE = Rule(
    code="ACC202",
    title="the index of a CUDA device where a device is wanted",
    tier=Tier.SAFE,
    why="torch takes a whole number for the device with this index. What is one is seen by its name (`rank`, "
    "`gpu_id`) or by what the file assigns to it.",
    before="model.to(local_rank)\nx = torch.zeros(2, device=0)\nd = torch.device(rank)",
    after="""\
model.to(get_accelerator().device_name(local_rank))
x = torch.zeros(2, device=get_accelerator().device_name(0))
d = torch.device(get_accelerator().device_name(rank))""",
)


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """torch.device(0), device=0 of torch's functions, x.to(0) and x.to(rank)."""
    full = module.full_name(node.func)
    by_keyword = (
        {"device", "map_location"} if full.startswith("torch.") and not full.startswith("torch.cuda.") else set()
    )
    by_position = full == "torch.device" or (last_name(node.func) == "to" and isinstance(node.func, cst.Attribute))
    for number, arg in enumerate(node.args):
        named = arg.keyword is not None and (
            arg.keyword.value in by_keyword or (arg.keyword.value == "device" and last_name(node.func) == "to")
        )
        if (named or (by_position and number == 0 and arg.keyword is None and not arg.star)) and is_index(
            module, arg.value
        ):
            edits = (module.before(arg.value, module.device_name), module.after(arg.value, ")"))
            yield Match(arg.value, "the index of a CUDA device; use `get_accelerator().device_name(...)`", edits)

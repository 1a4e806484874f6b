# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC302",
    title="pin_memory() of tensors",
    tier=Tier.SAFE,
    why="`pin_memory(x)` gives the tensor itself where the device has no use for page-locked memory, and "
    "torch raises an error. `pin_memory=True` of a DataLoader is only a warning there, and stays.",
    before="""\
x = torch.randn(2).pin_memory()
y = torch.empty(2, pin_memory=True)
z = torch.empty(2, pin_memory=pinned)""",
    after="""\
x = get_accelerator().pin_memory(torch.randn(2))
y = torch.empty(2, pin_memory=get_accelerator().device_name() != "cpu")
z = torch.empty(2, pin_memory=pinned and get_accelerator().device_name() != "cpu")""",
)


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """The methods pin_memory and is_pinned, and the argument of torch's functions that make tensors."""
    match node:
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name("pin_memory" | "is_pinned") as name), args=[]):
            if module.code(value) not in (f"{module.accelerator}()", "super()"):
                begin = module.before(value, module.method(name.value)[:-1])
                edits: tuple[Edit, ...] = (begin, Edit(module.end(value), module.span(node)[1], ")"))
                edits = () if "#" in module.source(node)[len(module.source(value)) :] else edits
                yield Match(node, f"`.{name.value}()`; use `get_accelerator().{name.value}(...)`", edits)
        case cst.Call(func=func, args=args) if (
            module.full_name(func).count(".") == 1 and module.full_name(func)[:6] == "torch."
        ):
            for arg in args:
                match arg:
                    case cst.Arg(keyword=cst.Name("pin_memory"), value=value):
                        yield from _argument(module, value)


def _argument(module: Module, value: cst.BaseExpression) -> Iterator[Match]:
    condition = f'{module.method("device_name")} != "cpu"'
    match value:
        case cst.Name("False" | "None"):
            return
        case cst.Name("True"):
            yield Match(value, "`pin_memory=True`; use it where there is a device", (module.replace(value, condition),))
        case cst.Name() | cst.Attribute() | cst.Call():
            end = module.end(value)
            message = f"`pin_memory={module.code(value)}`; use it where there is a device"
            yield Match(value, message, (Edit(end, end, f" and {condition}"),))

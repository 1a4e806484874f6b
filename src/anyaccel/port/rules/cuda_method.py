# SPDX-License-Identifier: Apache-2.0
"""x.cuda()."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import device_text, use_of

RULE = Rule(
    code="ACC301",
    title=".cuda() of tensors and modules",
    tier=Tier.SAFE,
    why="`.to(device)` is the same for any device. `device_name()` takes what `.cuda()` takes: an index, a "
    "name or a torch.device. Where a class of the project has a method `cuda` of its own, a reader has to "
    "see whether it has a `to`.",
    before="""\
x = x.cuda()
model.cuda(args.gpu)
y = y.cuda(non_blocking=True)
torch.load(path, map_location=lambda storage, loc: storage.cuda(rank))""",
    after="""\
x = x.to(get_accelerator().device_name())
model.to(get_accelerator().device_name(args.gpu))
y = y.to(get_accelerator().device_name(), non_blocking=True)
torch.load(path, map_location=get_accelerator().device_name(rank))""",
    left="move = model.cuda",
)
_MESSAGE = "`.cuda()`; use `.to(get_accelerator().device_name(...))`"
_OTHERS = re.compile(r"(?:numba|cupy|cupyx|pycuda|jax|warp)\b")


@RULE.on_node(cst.Lambda)
def find_map_location(module: Module, node: cst.Lambda) -> Iterator[Match]:
    """`lambda storage, loc: storage.cuda(i)`, since a storage has no `to`."""
    match node:
        case cst.Lambda(
            params=cst.Parameters(params=[cst.Param(name=cst.Name(first)), cst.Param()]),
            body=cst.Call(func=cst.Attribute(value=cst.Name(moved), attr=cst.Name("cuda")), args=args) as call,
        ) if first == moved and len(args) <= 1:
            start, end = module.span(node)
            if not args:
                yield Match(call, _MESSAGE, (Edit(start, end, module.method("device_name")),))
            else:
                first_byte, last_byte = module.span(args[0].value)
                edits = (Edit(start, first_byte, module.device_name), Edit(last_byte, end, ")"))
                yield Match(call, _MESSAGE, edits)


@RULE.on_node(cst.Call)
def find(module: Module, node: cst.Call) -> Iterator[Match]:
    """A call of the method."""
    if not isinstance(node.func, cst.Attribute) or node.func.attr.value != "cuda":
        return
    if _OTHERS.match(module.full_name(node.func)):
        return
    edits = [module.replace(node.func.attr, "to")]
    device = "device=" if _is_storage(node.func.value) else ""
    for number, arg in enumerate(node.args):
        keyword = (
            arg.keyword.value
            if arg.keyword is not None
            else ("device", "non_blocking", "memory_format")[min(number, 2)]
        )
        if arg.star or keyword == "async":
            yield Match(node, "`.cuda()`: not fixed: its arguments cannot be told apart", needs_cuda=True)
            return
        if keyword == "device" and device and arg.keyword is None:
            edits.append(module.before(arg.value, device))
        if keyword == "device" and not _is_named_here(module, arg.value):
            edits += [module.before(arg.value, module.device_name), module.after(arg.value, ")")]
        elif arg.keyword is None and number:
            edits.append(module.before(arg.value, f"{keyword}="))
    if not node.args or (node.args[0].keyword is not None and all(_keyword(arg) != "device" for arg in node.args)):
        edits.append(module.first_argument(node, device + module.method("device_name")))
    tier = Tier.UNSAFE if module.own_cuda else None
    yield Match(node, _MESSAGE + (", if the object has it" if module.own_cuda else ""), tuple(edits), tier)


def _is_storage(node: cst.BaseExpression) -> bool:
    """Whether a call makes or gives a storage, whose `to` takes its arguments by keyword alone."""
    return isinstance(node, cst.Call) and last_name(node.func).lower().endswith("storage")


def _keyword(arg: cst.Arg) -> str:
    return arg.keyword.value if arg.keyword is not None else ""


def _is_named_here(module: Module, value: cst.BaseExpression) -> bool:
    """Whether another rule names the accelerator's device in this argument."""
    if isinstance(value, cst.Call):
        return module.full_name(value.func) in ("torch.device", "torch.cuda.current_device")
    return device_text(value) is not None


@RULE.on_node(cst.Attribute)
def find_unbound(module: Module, node: cst.Attribute) -> Iterator[Match]:
    """The method as a value."""
    use = use_of(module, node)
    if node.attr.value == "cuda" and use.kind in ("Arg", "Assign", "Return") and not module.full_name(node):
        if isinstance(node.value, cst.Name) and node.value.value.lower() in (
            "args",
            "opt",
            "opts",
            "config",
            "cfg",
            "self",
            "flags",
        ):
            return
        yield Match(node, "`.cuda` as a value: not fixed: call `.to(get_accelerator().device_name())` there")

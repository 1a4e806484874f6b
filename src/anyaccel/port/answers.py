# SPDX-License-Identifier: Apache-2.0
"""What the answer to "is CUDA there" is wanted for: CUDA itself, or any accelerator."""

from __future__ import annotations

import re

import libcst as cst
from libcst.metadata.scope_provider import GlobalScope

from anyaccel.port import usage
from anyaccel.port.context import SKIPS, Context
from anyaccel.port.literals import is_device_value
from anyaccel.port.syntax import OTHER_DEVICE, dotted, text_of

# A variable that says whether CUDA itself is there; use_cuda is about what to use.
_FACT = re.compile(r"_*(?:(?:is|has|have)_)?(?:torch_)?(?:cuda|gpu)(?:_available|_is_available)?_*", re.IGNORECASE)
_KERNEL = re.compile("fused|flash|apex|kernel", re.IGNORECASE)
ANY_WILL_DO = 'two readings: leave it where CUDA itself is meant, else `get_accelerator().device_name() != "cpu"`'
PRINTS = {"print", ".info", ".debug", ".warning", ".warn", ".error", ".write", ".log", ".append", ".format", "str"}
# Arguments that say what to do for a device.
_OPTIONS_OF_DEVICES = {"enabled", "non_blocking", "pin_memory"}
_OF_KERNELS = re.compile(r"(?<![a-z])(?:trt|tensorrt|cupy|apex|flash\w*|cudf|cuml|triton|nccl)(?![a-z])", re.IGNORECASE)


def means_cuda(ctx: Context, node: cst.CSTNode) -> str:
    """Why this answer to "is CUDA there" is wanted for CUDA itself; empty where it may be about any accelerator."""
    if ctx.chooses_vendor(node):
        return "the code chooses between vendors by itself"
    if ctx.says_so(node):
        return "a text there is about CUDA"
    if _OF_KERNELS.search(_condition(ctx, node)):
        return "the condition is about kernels or libraries of CUDA"
    if _asks_for_another_device(ctx, node):
        return "it asks whether this machine lacks the device of something else"
    if re.search(r"['\"]cuda\b", _condition(ctx, node)):
        return "the condition names CUDA's device as well"
    if _cpu_goes_elsewhere(ctx, node):
        return "the CPU is treated in its own way there"
    if _wanted_as_cuda(ctx, node):
        return "a condition around it asks for CUDA by name"
    return _of_value(ctx, node)


def _asks_for_another_device(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether it is `not is_available() and x.device.type != "cpu"`: a device that is named or met, but not here.

    `device == "cpu" or is_available()` asks that of each device of a list.
    """
    child, parent, negated, either = node, ctx.tree.parent(node), False, False
    beside: list[cst.BaseExpression] = []
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation):
        if isinstance(parent, cst.UnaryOperation):
            negated = negated != isinstance(parent.operator, cst.Not)
        else:
            either = either or isinstance(parent.operator, cst.Or)
            beside.append(parent.right if parent.left is child else parent.left)
        child, parent = parent, ctx.tree.parent(parent)
    return (negated or either) and any(_asks_for_a_device(each) for each in beside)


def _asks_for_a_device(node: cst.BaseExpression) -> bool:
    """Whether a condition, or one of its parts, compares a device with the name of one."""
    match node:
        case cst.BooleanOperation():
            return _asks_for_a_device(node.left) or _asks_for_a_device(node.right)
        case cst.UnaryOperation():
            return _asks_for_a_device(node.expression)
        case cst.Comparison(comparisons=[only]):
            sides = (node.left, only.comparator)
            texts = [text_of(each) or "" for each in sides]
            return any(map(is_device_value, sides)) and any(map(OTHER_DEVICE.fullmatch, texts))
        case cst.Call(func=cst.Attribute(attr=cst.Name("startswith"), value=value)):
            return is_device_value(value)
    return False


def _cpu_goes_elsewhere(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether without CUDA "cpu" is given to something, in another way than a choice between two devices."""
    negated, child, parent = False, node, ctx.tree.parent(node)
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation):
        negated = negated != (isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not))
        child, parent = parent, ctx.tree.parent(parent)
    if isinstance(parent, cst.IfExp):
        spelled = [ctx.is_device_spelling(each) for each in (parent.body, parent.orelse)]
        return any(spelled) and not all(spelled)
    if isinstance(parent, cst.If) and parent.test is child and negated:
        cpu = (each for each in ctx.tree.nodes if (text_of(each) or "").startswith("cpu"))
        return any(parent.body in ctx.tree.parents(each) for each in cpu)
    return False


def _wanted_as_cuda(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether it stands below a condition whose name says that CUDA is asked for, such as `if needs_cuda:`."""
    child = node
    for around in ctx.tree.parents(node):
        if isinstance(around, cst.If) and around.body is child:
            test = ctx.tree.module.code_for_node(around.test).replace("torch.cuda", "").replace(".is_cuda", "")
            if "cuda" in test.lower():
                return True
        child = around
    return False


def _of_value(ctx: Context, node: cst.CSTNode) -> str:
    """Why the answer may be wanted for CUDA itself, from where it goes; empty where it only guards something."""
    choice = ctx.tree.enclosing(node, cst.IfExp, cst.BaseStatement)
    if isinstance(choice, cst.IfExp) and all(_is_word(ctx, each) for each in (choice.body, choice.orelse)):
        return "it chooses between words about CUDA"
    if is_test(ctx, node):
        return ""
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget):
        child, parent = parent, ctx.tree.parent(parent)
    if isinstance(parent, cst.Arg):
        found = usage.role(ctx.tree, child)
        if found.callee in PRINTS:
            return "it is printed or kept as a fact about CUDA"
        return "what it is given to may mean CUDA"
    if isinstance(parent, cst.Return):
        return "callers of the function may mean CUDA"
    if not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
        return "it is kept as a fact about CUDA"
    target = parent.targets[0].target
    name = usage.last_name(dotted(target) or "")
    if _FACT.fullmatch(name) and isinstance(target, cst.Name):
        return f"{name} may stand for CUDA itself"
    if _KERNEL.search(name):
        return f"{name} may be about kernels of CUDA"
    if isinstance(target, cst.Name):
        if isinstance(ctx.tree.scope(parent), GlobalScope) and name in ctx.project.imported:
            return f"other files take {name} for what it says"
        uses: list[cst.CSTNode] = list(ctx.uses(target))
    else:
        if (dotted(target) or "self").startswith(("self.", "cls.")) or dotted(target) is None:
            return f"other code may take {name} for CUDA"
        uses = ctx.uses_of_attribute(target)
    uses = [each for each in uses if parent not in ctx.tree.parents(each)]  # args.cuda = args.cuda and ...
    if not uses:
        return f"other files may take {name} for CUDA"
    if not all(is_test(ctx, each) for each in uses):
        return f"{name} is passed on, and may mean CUDA there"
    return ""


def _condition(ctx: Context, node: cst.CSTNode) -> str:
    """The code of the condition that the node is a part of."""
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation):
        child, parent = parent, ctx.tree.parent(parent)
    return ctx.tree.module.code_for_node(child)


def _is_word(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether it is a text other than the name of a device or of a backend."""
    text = text_of(node)
    return text is not None and OTHER_DEVICE.fullmatch(text) is None and text not in ("nccl", "gloo", "mpi")


def is_test(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether the value of this expression only decides what runs."""
    child, parent = node, ctx.tree.parent(node)
    while True:
        negation = isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not)
        if not negation and not isinstance(parent, cst.BooleanOperation):
            break
        child, parent = parent, ctx.tree.parent(parent)
    match parent:
        case cst.If() | cst.IfExp() | cst.While() | cst.Assert() | cst.CompIf():
            return parent.test is child
        case cst.Arg():
            found = usage.role(ctx.tree, child)
            if found.names:
                return found.names[0] in _OPTIONS_OF_DEVICES
            return found.position == 0 and usage.last_name(found.callee) in SKIPS
    return False

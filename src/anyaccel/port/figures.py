# SPDX-License-Identifier: Apache-2.0
"""What the numbers of CUDA code are for: the index of a device or the device, a figure that is compared, a seed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.context import Context
from anyaccel.port.syntax import dotted
from anyaccel.port.usage import last_name

# Statements that may stand between two that seed.
_OF_SEEDING = re.compile("seed|determin|benchmark|environ")
# What these call; of other functions nobody knows whether they draw random numbers.
_DRAWS_NOTHING = {
    *("seed", "manual_seed", "manual_seed_all", "set_random_seed", "is_available", "device_count", "empty_cache"),
    *("use_deterministic_algorithms", "set_deterministic", "is_initialized", "synchronize"),
    *("str", "int", "print", "info", "debug", "warning", "get", "setdefault", "putenv", "update", "format"),
}
_CHANGING = (cst.Call, cst.NamedExpr, cst.Await, cst.Yield)


def device_or_index(ctx: Context, node: cst.CSTNode) -> str:
    """Whether the value serves as a "device" or as an "index"; empty when it cannot be told."""
    found = usage.role(ctx.tree, node)
    if found.callee.startswith("torch.cuda.") and usage.is_index(ctx.tree, found):
        return "index"
    if usage.is_device(ctx.tree, found):
        return _of_uses(ctx, node, found) if found.kind == "assigned" else "device"
    if found.kind == "assigned":
        return _of_uses(ctx, node, found)
    return "index" if usage.is_index(ctx.tree, found) else ""


def _of_uses(ctx: Context, node: cst.CSTNode, found: usage.Role) -> str:
    assign = ctx.tree.parent(node)
    by_name = "index" if usage.is_index(ctx.tree, found) else ""
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return by_name
    target = assign.targets[0].target
    if isinstance(target, cst.Name):
        if len(ctx.tree.scope(target)[target.value]) != 1:
            return by_name
        uses: Iterable[cst.CSTNode] = ctx.uses(target)
    else:
        uses = ctx.uses_of_attribute(target)
    kinds = {_of_use(ctx, each) for each in uses} - {"either"}
    if len(kinds) == 1:
        return kinds.pop()
    return by_name if not kinds else ""


def _of_use(ctx: Context, node: cst.CSTNode) -> str:
    found = usage.role(ctx.tree, node)
    if found.callee == ".cuda" and found.position == 0:
        return "either"
    if found.kind == "assigned":
        return "index" if usage.is_index(ctx.tree, found) else ""
    if usage.is_device(ctx.tree, found):
        return "device"
    return "index" if usage.is_index(ctx.tree, found) else ""


def is_compared(ctx: Context, node: cst.CSTNode, follow: bool = True) -> bool:
    """Whether a number is compared, itself, after some arithmetic or by the name that it is assigned to."""
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, cst.BinaryOperation | cst.UnaryOperation):
        child, parent = parent, ctx.tree.parent(parent)
    if isinstance(parent, cst.Comparison | cst.ComparisonTarget):
        return True
    if isinstance(parent, cst.Arg):
        return "assert" in usage.role(ctx.tree, child).callee.lower()
    if not follow or not isinstance(parent, cst.Assign) or not isinstance(parent.targets[0].target, cst.Name):
        return False
    return any(is_compared(ctx, each, follow=False) for each in ctx.uses(parent.targets[0].target))


def has_another_seed(ctx: Context, node: cst.Call) -> bool:
    """Whether torch's generator is seeded in the same function, else in the file, and never with this number."""
    seeds = _seeds(ctx)
    around = ctx.tree.enclosing(node, cst.FunctionDef) or ctx.tree.module
    code = ctx.tree.module.code_for_node
    own = [code(arg.value) for arg in node.args]
    beside = [each for each in seeds if around in ctx.tree.parents(each)] or seeds
    return bool(beside) and all([code(arg.value) for arg in each.args] != own for each in beside)


def is_behind_a_gpu(ctx: Context, node: cst.Call) -> bool:
    """Whether it stands below a condition about GPUs, which a CPU meets only where its user asks for it."""
    code = ctx.tree.module.code_for_node
    return any(
        isinstance(each, cst.If) and re.search("cuda|gpu|device|accelerator", code(each.test), re.IGNORECASE)
        for each in ctx.tree.parents(node)
    )


def is_repeated(ctx: Context, node: cst.Call) -> bool:
    """Whether torch's generator, on a CPU the same one, is seeded just before with this number, or just after.

    Nothing but seeds and settings may stand between: what draws numbers there would draw the same ones again.
    """
    code = ctx.tree.module.code_for_node
    own = [code(arg.value) for arg in node.args]
    if any(isinstance(each, _CHANGING) for arg in node.args for each in _within(arg)):
        return False
    statement = ctx.tree.enclosing(node, cst.SimpleStatementLine, cst.SimpleStatementSuite)
    while statement is not None:
        block = getattr(ctx.tree.parent(statement), "body", None)
        body = list(block) if isinstance(block, list | tuple) else []
        at = next((i for i, each in enumerate(body) if each is statement), 0)
        for beside, before in ((reversed(body[:at]), True), (body[at + 1 :], False)):
            for each in beside:
                # A seed below a condition or in a loop may not be set.
                plain = isinstance(each, cst.SimpleStatementLine)
                seeds = [seed for seed in _seeds(ctx) if plain and each in ctx.tree.parents(seed)]
                if any(not before or [code(arg.value) for arg in seed.args] == own for seed in seeds):
                    return True
                if not _only_seeds(ctx, each, own):
                    break
        statement = ctx.tree.enclosing(statement, cst.If, cst.FunctionDef, cst.For, cst.While, cst.Try, cst.With)
        if not isinstance(statement, cst.If):
            return False
    return False


def _within(part: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in part.children:
        yield child
        yield from _within(child)


def _only_seeds(ctx: Context, statement: cst.CSTNode, own: Sequence[str]) -> bool:
    """Whether a statement draws no random numbers, and leaves the numbers `own` (their code) as they are."""
    code = ctx.tree.module.code_for_node
    if not _OF_SEEDING.search(code(statement)):
        return False
    roots = {name for each in own for name in re.findall(r"[A-Za-z_]\w*", each)}
    for each in _within(statement):
        match each:
            case cst.Call():
                called = last_name(dotted(each.func) or "")
                seeded = isinstance(each.func, cst.Name) and own == [code(arg.value) for arg in each.args]
                if called not in _DRAWS_NOTHING and not (seeded and "seed" in called):
                    return False
            case cst.AssignTarget() | cst.AugAssign() | cst.AnnAssign() | cst.NamedExpr():
                if roots & set(re.findall(r"[A-Za-z_]\w*", code(each.target))):
                    return False
    return True


def _seeds(ctx: Context) -> list[cst.Call]:
    """Where torch's own generator is seeded."""
    names = ("torch.manual_seed", "torch.random.manual_seed")
    return [each for found in ctx.calls.values() for each in found if ctx.tree.imported(each.func) in names]

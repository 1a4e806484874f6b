# SPDX-License-Identifier: Apache-2.0
"""What a question such as `torch.cuda.is_available()` guards: if that still needs CUDA, the question stays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.context import VENDORS, Context
from anyaccel.port.syntax import dotted

_NOT_ONLY_OTHERS = re.compile(r"cuda|gpu|\bnot\b|!=", re.IGNORECASE)
_SETTINGS = re.compile(r"torch\.backends\.(?:cudnn|cuda)\b")


def guarded(ctx: Context, node: cst.CSTNode, follow: bool = True) -> Iterator[cst.CSTNode]:
    """What runs only when the answer at this node is yes, or once for each device that it counts."""
    tree = ctx.tree
    child, parent, negated = node, tree.parent(node), False
    while True:
        if isinstance(parent, cst.UnaryOperation):
            negated = negated != isinstance(parent.operator, cst.Not)
        elif isinstance(parent, cst.BooleanOperation):
            yield parent
        elif not isinstance(parent, cst.Comparison | cst.ComparisonTarget):
            break
        child, parent = parent, tree.parent(parent)
    match parent:
        case cst.If() | cst.While() if parent.test is child:
            yield parent.test
            if not negated:
                yield parent.body
            elif parent.orelse is not None:
                yield parent.orelse
            if negated and _ends(parent.body):
                yield tree.enclosing(parent, cst.FunctionDef) or tree.module
        case cst.IfExp() if parent.test is child:
            yield parent.orelse if negated else parent.body
        case cst.Assert():
            yield tree.enclosing(parent, cst.FunctionDef) or tree.module
        case cst.Arg() | cst.Decorator():
            decorator = (
                parent
                if isinstance(parent, cst.Decorator)
                else tree.enclosing(parent, cst.Decorator, cst.BaseStatement)
            )
            if isinstance(decorator, cst.Decorator):
                yield tree.parent(decorator)
            loop = tree.parent(tree.parent(parent))
            if isinstance(loop, cst.For):
                yield loop.body
            elif isinstance(loop, cst.CompFor):
                yield tree.parent(loop)
        case cst.Assign() if follow and isinstance(parent.targets[0].target, cst.Attribute):
            for use in ctx.uses_of_attribute(parent.targets[0].target):
                yield from guarded(ctx, use, follow=False)
        case cst.Assign() if follow and isinstance(parent.targets[0].target, cst.Name):
            for use in ctx.uses(parent.targets[0].target):
                yield from guarded(ctx, use, follow=False)
    # A mark such as `needs_cuda = pytest.mark.skipif(not available)` guards wherever it decorates.
    if follow:
        assign = tree.enclosing(node, cst.Assign, cst.BaseStatement)
        if isinstance(assign, cst.Assign) and assign is not parent and isinstance(assign.targets[0].target, cst.Name):
            for use in ctx.uses(assign.targets[0].target):
                yield from guarded(ctx, use, follow=False)


def _ends(body: cst.BaseSuite) -> bool:
    """Whether what follows the block is not reached from it: it ends by raise, return, continue or exit."""
    last = body.body[-1] if body.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
        return usage.last_name(dotted(last.value.func) or "") in ("exit", "_exit", "skip", "skipTest", "abort", "quit")
    return isinstance(last, cst.Raise | cst.Return | cst.Continue | cst.Break)


def leaves_quietly(body: cst.BaseSuite) -> bool:
    """Whether the block ends its function or one turn of a loop: what follows is not run, and nobody is told."""
    last = body.body[-1] if body.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, cst.Return | cst.Continue | cst.Break)


def governed(ctx: Context, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What stands below a condition, and is run only when the answer at this node is yes."""
    tree = ctx.tree
    child, parent, negated, alone = node, tree.parent(node), False, True
    while True:
        if isinstance(parent, cst.UnaryOperation):
            negated = negated != isinstance(parent.operator, cst.Not)
        elif isinstance(parent, cst.BooleanOperation):
            if isinstance(parent.operator, cst.And) and parent.left is child and not negated:
                yield parent.right
            alone = alone and isinstance(parent.operator, cst.Or) == negated
        elif isinstance(parent, cst.Comparison):
            operators = [each.operator for each in parent.comparisons]
            negated = negated != any(isinstance(each, cst.NotEqual | cst.NotIn | cst.IsNot) for each in operators)
        elif isinstance(parent, cst.Arg):
            asking = tree.parent(parent)
            loop = tree.parent(asking)
            if isinstance(loop, cst.Decorator):
                yield tree.parent(loop)
            if isinstance(loop, cst.For) and loop.iter is asking:
                yield loop.body
            elif isinstance(loop, cst.CompFor) and loop.iter is asking:
                yield tree.parent(loop)
            name = dotted(asking.func) if isinstance(asking, cst.Call) else None
            method = (
                asking.func.attr.value
                if isinstance(asking, cst.Call) and isinstance(asking.func, cst.Attribute)
                else ""
            )
            if name != "hasattr" and method != "startswith":
                break
        elif not isinstance(parent, cst.ComparisonTarget | cst.Call):
            break
        child, parent = parent, tree.parent(parent)
    match parent:
        case cst.If() | cst.While() if parent.test is child:
            if not negated:
                yield parent.body
            elif parent.orelse is not None:
                yield parent.orelse
            elif alone and leaves_quietly(parent.body):
                block = getattr(tree.parent(parent), "body", ())
                yield from block[block.index(parent) + 1 :] if parent in block else ()
        case cst.IfExp() if parent.test is child:
            yield parent.orelse if negated else parent.body
        case cst.Assert() if parent.test is child and alone:  # assert torch.cuda.device_count() > rank
            line = tree.parent(parent)
            block = getattr(tree.parent(line), "body", ())
            yield from block[block.index(line) + 1 :] if line in block else ()


def ends_with_demand(body: cst.BaseSuite, well: bool = True) -> bool:
    """Whether the block ends the program or raises: so code says that it cannot go on without a GPU.

    Args:
        body: the block.
        well: count an end that tells the shell of no failure, exit() and exit(0).
    """
    last = body.body[-1] if body.body else None
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
        code = last.value.args[0].value if last.value.args else None
        fails = not (
            code is None or (isinstance(code, cst.Integer | cst.Name) and code.value in ("0", "None", "False"))
        )
        name = usage.last_name(dotted(last.value.func) or "")
        return name == "abort" or (name in ("exit", "_exit", "quit") and (well or fails))
    return isinstance(last, cst.Raise)


def is_for_another_vendor(ctx: Context, node: cst.CSTNode, is_name: bool) -> bool:
    """Whether this place is one of a choice between vendors, which the accelerator has made already.

    Args:
        ctx: of the file.
        node: the place.
        is_name: it names a device or a backend. Such a name is compared with others of that choice, so it stays in
            every branch; all else stays only in the branch of another vendor.
    """
    tree = ctx.tree
    child = node
    if is_name and ctx.chooses_vendor(node):
        return True
    for around in tree.parents(node):
        if isinstance(around, cst.FunctionDef | cst.ClassDef):
            return False
        if isinstance(around, cst.If) and around.test is not child:
            if around.body is child and _names_only_others(ctx, around.test):
                return True
            if is_name and ctx.beside_vendors(_first_of_chain(ctx, around).test):
                return True
        child = around
    return False


def _first_of_chain(ctx: Context, node: cst.If) -> cst.If:
    while isinstance(parent := ctx.tree.parent(node), cst.If) and parent.orelse is node:
        node = parent
    return node


def _names_only_others(ctx: Context, test: cst.BaseExpression) -> bool:
    text = ctx.tree.module.code_for_node(test)
    return VENDORS.search(text) is not None and _NOT_ONLY_OTHERS.search(text) is None


def has_newer_way(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether this is the way of an older torch, beside a branch that uses torch.amp already."""
    child = node
    for around in ctx.tree.parents(node):
        others: list[cst.CSTNode] = []
        match around:
            case cst.FunctionDef() | cst.ClassDef():
                return False
            case cst.If() if around.orelse is not None and around.test is not child:
                others = [around.body if around.orelse is child else around.orelse]
            case cst.IfExp() if around.test is not child:
                others = [around.body if around.orelse is child else around.orelse]
            case cst.Try() if around.body is not child:
                others = [around.body]
        for other in others:
            names = (ctx.tree.imported(each) or "" for each in _names_in(ctx, other))
            if any(name.startswith("torch.amp.") for name in names):
                return True
        child = around
    return False


def only_sets_cuda(ctx: Context, regions: Sequence[cst.CSTNode], ported: set[cst.CSTNode]) -> bool:
    """Whether what is guarded is settings of cuDNN or torch.backends.cuda, and nothing that is ported."""
    inside = [region for region in regions if not isinstance(region, cst.FunctionDef | cst.Module)]
    names = [each for region in inside for each in _names_in(ctx, region)]
    settings = [each for each in names if _SETTINGS.match(ctx.tree.imported(each) or dotted(each) or "")]
    return bool(settings) and not any(region in (each, *ctx.tree.parents(each)) for region in inside for each in ported)


def _names_in(ctx: Context, part: cst.CSTNode) -> Iterator[cst.CSTNode]:
    return (each for each in ctx.tree.nodes if type(each) is cst.Attribute and part in ctx.tree.parents(each))

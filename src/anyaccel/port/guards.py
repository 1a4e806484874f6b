# SPDX-License-Identifier: Apache-2.0
"""What a question such as `torch.cuda.is_available()` guards: if that still needs CUDA, the question stays."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.context import Context
from anyaccel.port.syntax import dotted


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

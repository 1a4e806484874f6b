# SPDX-License-Identifier: Apache-2.0
"""Rules on conditionals that pick a device or a backend by asking what is there."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.literals import is_device_value
from anyaccel.port.syntax import call, device_index, is_simple, same_parentheses, text_of


def device(ctx: Context, node: cst.IfExp) -> Candidate | None:
    """`"cuda" if torch.cuda.is_available() else "cpu"` and its kin: one call; None for another conditional."""
    leaves = _leaves(ctx, node) or _by_name(ctx, node)
    if leaves is None:
        return None
    by_name = not ctx.is_availability(_plain(node.test), "torch.cuda") and not ctx.is_availability(
        _plain(node.test), ""
    )
    cuda = [leaf for leaf in leaves if _spelled(ctx, leaf) is not False]
    used = usage.role(ctx.tree, node)
    if len(cuda) != 1:
        return None
    if used.kind in ("text", "comparison", "key") or usage.is_beside_foreign(ctx.tree, node, used):
        message = "a device is picked for a text, a comparison or another package; not fixed"
        return Candidate(node, "ACC202", message, breaks=False)
    chosen = cuda[0]
    if by_name and not isinstance(chosen, cst.SimpleString):
        return None
    is_object = not isinstance(chosen, cst.SimpleString) and _device_call(ctx, chosen) is not None
    index = _spelled(ctx, chosen)
    if not isinstance(index, bool) and index is not None and not is_simple(index):
        return None  # what is inside may have fixes of its own; the parts are fixed one by one

    def fix_both(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.IfExp) and isinstance(old.test, cst.Comparison)
        name = call(ctx.method("device_name"))
        test = old.test
        if isinstance(test.comparisons[0].operator, cst.In):
            test = test.with_changes(left=same_parentheses(name, test.left))
        else:
            target = test.comparisons[0]
            asked = same_parentheses(name, target.comparator)
            test = test.with_changes(comparisons=[target.with_changes(comparator=asked)])
        return old.with_changes(body=same_parentheses(name, old.body), test=test)

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        if by_name:
            return fix_both(old)
        name = call(ctx.method("device_name"), *([index] if isinstance(index, cst.BaseExpression) else []))
        if is_object:
            assert isinstance(chosen, cst.Call)
            name = call(chosen.func, name)
        return same_parentheses(name, old)

    ctx.claim(node)
    return Candidate(
        node, "ACC111", "a device is picked by hand; use `get_accelerator().device_name(...)`", fix, drops=True
    )


def backend(ctx: Context, node: cst.IfExp) -> Candidate | None:
    """`"nccl" if torch.cuda.is_available() else "gloo"`: one call."""
    if not ctx.is_availability(node.test, "torch.cuda") or (text_of(node.body), text_of(node.orelse)) != (
        "nccl",
        "gloo",
    ):
        return None
    if not usage.is_backend(ctx.tree, usage.role(ctx.tree, node)):
        return None
    ctx.claim(node)

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        return same_parentheses(call(ctx.method("communication_backend_name")), old)

    use = "get_accelerator().communication_backend_name()"
    return Candidate(node, "ACC401", f"a backend is picked by hand; use `{use}`", fix, drops=True)


def _leaves(ctx: Context, node: cst.IfExp) -> Sequence[cst.BaseExpression] | None:
    """The devices among which a conditional chooses by asking what is there; None for another conditional."""
    test: cst.BaseExpression = node.test
    body, orelse = node.body, node.orelse
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        test, body, orelse = test.expression, orelse, body
    cuda = ctx.is_availability(test, "torch.cuda")
    if not cuda and not ctx.is_availability(test, ""):
        return None
    rest: Sequence[cst.BaseExpression] | None = [orelse]
    if isinstance(orelse, cst.IfExp):
        rest = _leaves(ctx, orelse)
    leaves = None if rest is None else [body, *rest]
    if leaves is None or not all(ctx.is_device_spelling(leaf) for leaf in leaves):
        return None
    return leaves if (_spelled(ctx, body) is not False) == cuda else None


def _plain(test: cst.BaseExpression) -> cst.BaseExpression:
    return test.expression if isinstance(test, cst.UnaryOperation) else test


def _by_name(ctx: Context, node: cst.IfExp) -> Sequence[cst.BaseExpression] | None:
    """The two of `"cuda" if "cuda" in device else "cpu"`, which takes the kind of a device from its name."""
    if (text_of(node.body), text_of(node.orelse)) != ("cuda", "cpu"):
        return None
    match node.test:
        case cst.Comparison(left=left, comparisons=[cst.ComparisonTarget(operator=cst.In(), comparator=device)]):
            asked = left
        case cst.Comparison(left=device, comparisons=[cst.ComparisonTarget(operator=cst.Equal(), comparator=asked)]):
            pass
        case _:
            return None
    if isinstance(device, cst.Attribute) and device.attr.value in ctx.choices:
        return None
    return [node.body, node.orelse] if text_of(asked) == "cuda" and is_device_value(device) else None


def _device_call(ctx: Context, node: cst.CSTNode) -> cst.Call | None:
    if isinstance(node, cst.Call) and ctx.tree.imported(node.func) == "torch.device" and len(node.args) == 1:
        return node if node.args[0].keyword is None and not node.args[0].star else None
    return None


def _spelled(ctx: Context, node: cst.CSTNode) -> cst.BaseExpression | bool | None:
    inner = _device_call(ctx, node)
    return device_index(node if inner is None else inner.args[0].value)

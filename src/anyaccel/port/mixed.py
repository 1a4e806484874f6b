# SPDX-License-Identifier: Apache-2.0
"""Mixed precision for CUDA is off where there is no CUDA, whatever the code asks for; ported it stays off on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.syntax import both, call, device_index, dotted, keyword

# What takes the name of a device -> which positional argument says whether it is on.
_SWITCHES = {"autocast": 2, "GradScaler": 5}
_OF_CPUS = re.compile(r"autocast\(\s*(?:device_type\s*=\s*)?[\"']cpu[\"']|torch\.cpu\.amp")
WHY_CPUS = "the file has mixed precision for CPUs as well, which this would change inside it"
# A condition that is about the device already.
_ABOUT_DEVICES = re.compile(r"is_available\(|\.is_cuda\b|['\"](?:cpu|cuda)\b|device_name\(|on_accelerator\(")


def has_cpus_own(ctx: Context) -> bool:
    """Whether the file has mixed precision for CPUs too: a ported region inside it would change it."""
    return _OF_CPUS.search(ctx.tree.module.code) is not None


def kept_off(ctx: Context, node: cst.CSTNode, args: Sequence[cst.Arg], original: cst.Arg | None) -> Sequence[cst.Arg]:
    """The arguments of autocast() or GradScaler() so that it is off where the CPU is the accelerator.

    Args:
        ctx: of the file.
        node: the call as it was.
        args: of the ported call, the device among them.
        original: the argument of the call as it was that says whether it is on; None without one.
    """
    other = cst.ComparisonTarget(cst.NotEqual(), cst.SimpleString('"cpu"'))
    asked = cst.Comparison(call(ctx.method("device_name")), [other])
    if _is_guarded(ctx, node):
        return args
    if original is None:
        *rest, last = args
        comma = rest[-1].comma if rest else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        new = keyword("enabled", asked).with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return [*rest, last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")), new]
    if _is_off(ctx, original.value):
        return args
    return [_with_condition(each, asked) if each is _same(args, original) else each for each in args]


def _is_guarded(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether it stands below `if torch.cuda.is_available()`, which a CPU does not pass."""
    child = node
    for around in ctx.tree.parents(node):
        if isinstance(around, cst.FunctionDef | cst.Lambda):
            return False
        if isinstance(around, cst.If | cst.IfExp) and around.body is child:
            asked: list[cst.BaseExpression] = [around.test]
            while asked:
                each = asked.pop()
                if ctx.is_availability(each, "torch.cuda"):
                    return True
                if isinstance(each, cst.BooleanOperation) and isinstance(each.operator, cst.And):
                    asked += [each.left, each.right]
        child = around
    return False


def _same(args: Sequence[cst.Arg], original: cst.Arg) -> cst.Arg | None:
    """The argument that this one has become: by keyword it stands where it stood."""
    named = [each for each in args if each.keyword is not None and each.keyword.value == "enabled"]
    return named[0] if named else next((each for each in args if each.value.deep_equals(original.value)), None)


def _with_condition(arg: cst.Arg, asked: cst.Comparison) -> cst.Arg:
    value = arg.value
    if isinstance(value, cst.Name) and value.value == "True":
        return arg.with_changes(value=asked)
    return arg.with_changes(value=both(value, asked))


def _is_off(ctx: Context, value: cst.BaseExpression) -> bool:
    """Whether it is False, or asks for the device itself, also by a variable that is assigned such a condition."""
    if isinstance(value, cst.Name) and value.value == "False":
        return True
    if _asks_alone(ctx, value):
        return True
    assigned = list(assignments(ctx, value))
    return bool(assigned) and all(each is not None and _asks_alone(ctx, each) for each in assigned)


def _asks_alone(ctx: Context, value: cst.BaseExpression) -> bool:
    """Whether a condition asks for the device so that nothing else in it makes it true on a CPU."""
    match value:
        case cst.BooleanOperation(operator=cst.Or()):
            return _asks_alone(ctx, value.left) and _asks_alone(ctx, value.right)
        case cst.BooleanOperation():
            return _asks_alone(ctx, value.left) or _asks_alone(ctx, value.right)
        case cst.UnaryOperation(operator=cst.Not()):
            return False
        case cst.Call(func=cst.Name("bool"), args=[cst.Arg(keyword=None, star="")]):
            return _asks_alone(ctx, value.args[0].value)
    return asks_for_devices(ctx, value)


def asks_for_devices(ctx: Context, value: cst.BaseExpression) -> bool:
    """Whether a condition is about what device there is, by how it is spelled."""
    return _ABOUT_DEVICES.search(ctx.tree.module.code_for_node(value)) is not None


def assignments(ctx: Context, target: cst.CSTNode) -> Iterator[cst.BaseExpression | None]:
    """What a file assigns to this variable or `a.b`; None for an assignment whose value cannot be told."""
    if isinstance(target, cst.Name):
        for assignment in ctx.tree.scope(target)[target.value]:
            node = getattr(assignment, "node", None)
            statement = ctx.tree.enclosing(node, cst.Assign, cst.BaseStatement) if node is not None else None
            yield statement.value if isinstance(statement, cst.Assign) else None
    elif (name := dotted(target)) is not None:
        for each in ctx.tree.attributes:
            if dotted(each) == name and ctx.is_stored(each):
                statement = ctx.tree.enclosing(each, cst.Assign, cst.BaseStatement)
                yield statement.value if isinstance(statement, cst.Assign) else None


def is_switch(found: usage.Role) -> bool:
    """Whether a device's name goes to autocast() or GradScaler() of torch."""
    name = usage.last_name(found.callee)
    return name in _SWITCHES and found.callee.startswith("torch.") and "cuda" not in found.callee


def by_name(ctx: Context, node: cst.BaseExpression, found: usage.Role) -> Candidate:
    """`torch.autocast("cuda", ...)` and `torch.amp.GradScaler("cuda")`."""
    outer = found.call
    assert outer is not None
    if any(each.star for each in outer.args) or not isinstance(device_index(node), type(None)):
        why = "enabled= cannot be told: where the CPU is the accelerator it has to be off, as it was"
        return Candidate(node, "ACC201", f"a CUDA device's name: not fixed: {why}")
    if has_cpus_own(ctx):
        return Candidate(node, "ACC201", f"a CUDA device's name: not fixed: {WHY_CPUS}")
    place = next(i for i, each in enumerate(outer.args) if each.value is node)
    at = _SWITCHES[usage.last_name(found.callee)]
    enabled = next((each for each in outer.args if each.keyword is not None and each.keyword.value == "enabled"), None)
    if enabled is None and len(outer.args) > at and all(each.keyword is None for each in outer.args[: at + 1]):
        enabled = outer.args[at]

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call)
        device = call(ctx.method("device_name"))
        args = [each.with_changes(value=device) if i == place else each for i, each in enumerate(old.args)]
        return old.with_changes(args=kept_off(ctx, outer, args, enabled))

    use = "get_accelerator().device_name()"
    return Candidate(node, "ACC201", f"a CUDA device's name; use `{use}`, off on a CPU as it was", fix, outer)

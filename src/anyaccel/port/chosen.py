# SPDX-License-Identifier: Apache-2.0
"""A device that is picked or named and then compared with "cuda": where that choice stays, the device stays as well."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import libcst as cst

from anyaccel.port import mixed, tables, usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.guards import leaves_quietly
from anyaccel.port.syntax import device_index, dotted, text_of

_SAYS = {"print", ".print", ".info", ".debug", ".warning", ".warn", ".log", ".write", ".error"}
_WORDS = {"cuda", "cpu", "nccl", "gloo"}


def leave_picked(ctx: Context, candidates: Sequence[Candidate], by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Leave a device that is picked or named where its name chooses between CUDA and another way, and goes on doing so.

    On another accelerator the CPU's way would be taken with that accelerator's tensors.
    """
    stays = (each.node for each in candidates if each.fix is None and each.breaks)
    stuck = {around for node in stays for around in ctx.tree.parents(node)}
    left = False
    for each in candidates:
        if each.fix is None or not (each.code in ("ACC111", "ACC201") or isinstance(each.node, cst.IfExp)):
            continue
        uses = list(_uses(ctx, each.node))
        if any(usage.is_foreign(ctx.tree, usage.role(ctx.tree, use)) for use in uses):
            each.unfixed("it is given to a package whose devices are its own affair")
            left = True
            continue
        taker = next((name for use in (_whole(ctx, each.node), *uses) for name in [_doubtful(ctx, use)] if name), "")
        if taker:
            each.unfixed(
                f"{taker} may take cuda and cpu only, or go the CPU's way with other devices; look there first"
            )
            left = True
            continue
        if _is_default(ctx, each) and any(_meets_cpu(ctx, use) for use in (ctx.tree.parent(each.node), *uses)):
            each.unfixed('a default that is compared with "cpu": without a GPU it would take the CPU\'s way now')
            left = True
            continue
        chooses = functools.partial(_chooses, ctx, named=each.code == "ACC201", by_node=by_node, stuck=stuck)
        if any(_stays_and_chooses(ctx, use, by_node, chooses) for use in uses):
            each.unfixed('what is compared with "cuda" below stays and chooses another way; port both by hand')
            each.breaks = each.code == "ACC201"
            left = True
    branches = [branch for branch in _of_every_device(ctx) if branch in stuck]
    for each in candidates if branches else ():
        if each.fix is not None and any(branch in ctx.tree.parents(each.node) for branch in branches):
            each.unfixed("what every device but the CPU does here needs CUDA, by something else that stays")
            left = True
    return left


def _of_every_device(ctx: Context) -> Iterator[cst.CSTNode]:
    """What every device but the CPU does: if device.type != "cpu": ..."""
    for each in ctx.tree.nodes:
        if type(each) is not cst.SimpleString or text_of(each) != "cpu":
            continue
        test = ctx.tree.enclosing(each, cst.Comparison, cst.BaseStatement)
        parent = ctx.tree.parent(test) if isinstance(test, cst.Comparison) else None
        if isinstance(parent, cst.If) and parent.test is test and isinstance(test, cst.Comparison):
            same = isinstance(test.comparisons[0].operator, cst.Equal)
            branch = parent.orelse if same else parent.body
            if branch is not None:
                yield branch


def _whole(ctx: Context, picked: cst.CSTNode) -> cst.CSTNode:
    """The picked device with the torch.device() around it."""
    found = usage.role(ctx.tree, picked)
    return found.call if found.callee == "torch.device" and found.call is not None else picked


def _doubtful(ctx: Context, use: cst.CSTNode) -> str:
    """What takes this device as an argument without it being sure that it takes any; empty for nothing."""
    found = usage.role(ctx.tree, use)
    if found.kind != "argument" or found.call is None:
        return ""
    full = ctx.tree.imported(found.call.func) or ""
    name = usage.last_name(full or found.callee)
    if full.startswith("torch.") or name in ("to", "cuda"):
        return ""
    if name in ctx.project.demanding or usage.last_name(found.callee) in ctx.project.demanding:
        return name
    if not full and name in ("match", "fullmatch", "search"):  # of a pattern; what it has to be is not here to be read
        return name
    root = full.split(".")[0]
    known = not root or root in tables.TAKES_ANY | ctx.project.roots
    return "" if known or not (found.names or found.plural or found.position >= 0) else full


def _uses(ctx: Context, picked: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Where the file reads what the picked device is assigned to: a variable, an attribute, a key, an option."""
    value = picked
    found = usage.role(ctx.tree, value)
    while found.call is not None and (
        found.callee in ("torch.device", "str") or usage.LOOKUPS.get(usage.last_name(found.callee)) == found.position
    ):
        value = found.call  # os.environ.get("DEVICE", "cuda")
        found = usage.role(ctx.tree, value)
    if found.kind == "assigned":
        assign = ctx.tree.enclosing(value, cst.Assign, cst.AnnAssign, cst.BaseStatement)
        targets = [each.target for each in assign.targets] if isinstance(assign, cst.Assign) else []
        targets += [assign.target] if isinstance(assign, cst.AnnAssign) else []
        for target in targets:
            if isinstance(target, cst.Name):
                yield from ctx.uses(target)
            elif isinstance(target, cst.Subscript):
                yield from _uses_of_key(ctx, found.names)
            else:
                yield from ctx.uses_of_attribute(target)
    elif found.kind == "value":
        yield from _uses_of_key(ctx, found.names)
    elif found.kind == "argument" and found.names == ("default",) and found.call is not None:
        options = [text_of(each.value) or "" for each in found.call.args if each.keyword is None]
        names = {each.lstrip("-").replace("-", "_") for each in options}
        read = (each for each in ctx.tree.attributes if each.attr.value in names and not ctx.is_stored(each))
        yield from (each for each in read if _holds_options(ctx, each.value))
    elif usage.last_name(found.callee) in usage.LOOKUPS and found.position == 0:
        yield value  # {"cuda": 1}.get("cuda" if torch.cuda.is_available() else "cpu")


def _is_default(ctx: Context, each: Candidate) -> bool:
    """Whether a name stands for what is not given: kwargs.get("device", "cuda"), device or "cuda"."""
    around = ctx.tree.parent(each.node)
    if isinstance(around, cst.BooleanOperation):
        return each.code == "ACC201" and isinstance(around.operator, cst.Or) and around.right is each.node
    found = usage.role(ctx.tree, each.node)
    return each.code == "ACC201" and usage.LOOKUPS.get(usage.last_name(found.callee)) == found.position


def _meets_cpu(ctx: Context, use: cst.CSTNode) -> bool:
    """Whether this use, or the look-up whose argument it is, is compared with the CPU's name."""
    comparison = _comparison(ctx, ctx.tree.parent(use) if isinstance(use, cst.Arg) else use)
    return comparison is not None and _is_with_cpu(comparison)


def _holds_options(ctx: Context, node: cst.BaseExpression) -> bool:
    """Whether it is what a parser of options gave, by its name or by what it is assigned."""
    if usage.last_name(dotted(node) or "") in tables.OPTIONS - {"self", "cls"}:
        return True
    values = mixed.assignments(ctx, node)
    return any(each is not None and "parse" in ctx.tree.module.code_for_node(each) for each in values)


def _uses_of_key(ctx: Context, keys: Sequence[str]) -> Iterator[cst.CSTNode]:
    """Every `x["key"]` and `x.get("key")`."""
    for each in ctx.tree.nodes:
        key = each if isinstance(each, cst.SimpleString) and text_of(each) in keys else None
        if key is None or not any(keys):
            continue
        parent = ctx.tree.parent(key)
        item = ctx.tree.enclosing(key, cst.Subscript, cst.BaseStatement)
        if isinstance(parent, cst.Index) and item is not None and not ctx.is_stored(item):
            yield item
        elif isinstance(parent, cst.Arg) and usage.last_name(usage.role(ctx.tree, key).callee) in usage.LOOKUPS:
            yield ctx.tree.parent(parent)


def _stays_and_chooses(
    ctx: Context,
    use: cst.CSTNode,
    by_node: Mapping[cst.CSTNode, Candidate],
    chooses: Callable[[cst.CSTNode], bool],
) -> bool:
    """Whether this use goes one way for the name of a CUDA device and another for the CPU's, and is not ported."""
    found = usage.role(ctx.tree, use)
    if found.kind == "key" or (usage.last_name(found.callee) in usage.LOOKUPS and found.position == 0):
        return _has_key_of_cuda(ctx)  # else what is looked up has no names of its own, as in streams[device]
    subject = use
    while isinstance(ctx.tree.parent(subject), cst.Attribute):
        subject = ctx.tree.parent(subject)
    if isinstance(match := ctx.tree.parent(subject), cst.Match):
        return any(
            device_index(each) is not False and match in ctx.tree.parents(each)
            for each in ctx.tree.nodes
            if isinstance(each, cst.SimpleString) and isinstance(ctx.tree.parent(each), cst.MatchValue)
        )
    comparison = _comparison(ctx, use)
    return comparison is not None and not _is_ported(ctx, comparison, by_node) and chooses(comparison)


def _has_key_of_cuda(ctx: Context) -> bool:
    """Whether the file writes the name of a CUDA device as a key."""
    names = (each for each in ctx.tree.nodes if isinstance(each, cst.SimpleString) and device_index(each) is not False)
    return any(usage.role(ctx.tree, each).kind == "key" for each in names)


def _comparison(ctx: Context, use: cst.CSTNode) -> cst.CSTNode | None:
    """The comparison of `device`, `device.type` or `str(device)` with a CUDA device; None for another use."""
    tree = ctx.tree
    node, parent = use, tree.parent(use)
    while True:
        if isinstance(parent, cst.Attribute) and parent.attr.value in ("type", "startswith"):
            node, parent = parent, tree.parent(parent)
        elif isinstance(parent, cst.Arg) and dotted(getattr(tree.parent(parent), "func", parent)) == "str":
            node, parent = tree.parent(parent), tree.parent(tree.parent(parent))
        else:
            break
    if isinstance(parent, cst.Call) and parent.func is node and len(parent.args) == 1:
        return parent if (text_of(parent.args[0].value) or "").startswith("cuda") else None
    comparison = tree.parent(parent) if isinstance(parent, cst.ComparisonTarget) else parent
    if not isinstance(comparison, cst.Comparison) or len(comparison.comparisons) != 1:
        return None
    other = comparison.comparisons[0].comparator if comparison.left is node else comparison.left
    if isinstance(other, cst.Call) and ctx.tree.imported(other.func) == "torch.device" and other.args:
        other = other.args[0].value
    named = device_index(other) is not False or text_of(other) in ("nccl", "cpu")
    return comparison if named else None


def _is_ported(ctx: Context, comparison: cst.CSTNode, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Whether something in the comparison is replaced, or the whole conditional that it is the test of."""
    around = by_node.get(ctx.tree.parent(comparison))
    return (around is not None and around.code == "ACC111") or any(
        comparison in (node, *ctx.tree.parents(node)) for node in by_node
    )


def _chooses(
    ctx: Context,
    comparison: cst.CSTNode,
    named: bool,
    by_node: Mapping[cst.CSTNode, Candidate],
    stuck: Container[cst.CSTNode],
) -> bool:
    """Whether it chooses between a way of CUDA and one of the CPU, other than what is said to people.

    Args:
        ctx: of the file.
        comparison: with the name of a CUDA device.
        named: the device is "cuda" whatever there is, so the comparison was true on a machine without a GPU as well.
        by_node: what is ported.
        stuck: in which something that stays needs CUDA.
    """
    tree = ctx.tree
    child, parent = comparison, tree.parent(comparison)
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation):
        child, parent = parent, tree.parent(parent)
    alone = tree.parent(comparison) is parent
    if _is_with_cpu(comparison):  # what every device but the CPU does next may be for CUDA only
        return isinstance(parent, cst.If) and parent.test is child and (parent.body in stuck or parent.orelse in stuck)
    if not alone and any(child in tree.parents(each) for each in _availabilities(ctx, by_node)):
        return True
    if named:
        lines = getattr(parent.body, "body", []) if isinstance(parent, cst.If) and parent.orelse is None else []
        aside = (only_says(ctx, cst.IndentedBlock([each])) or sets_cuda(ctx, each) for each in lines)
        return not (lines and all(aside)) and not isinstance(parent, cst.Arg)
    match parent:
        case cst.IfExp() if parent.test is child:
            return bool({text_of(parent.body), text_of(parent.orelse)} & _WORDS)
        case cst.If() if parent.test is child:
            if parent.orelse is None:
                return leaves_quietly(parent.body)
            other = parent.orelse.body if isinstance(parent.orelse, cst.Else) else None
            return other is None or not (only_says(ctx, parent.body) and only_says(ctx, other))
    return False


def _is_with_cpu(comparison: cst.CSTNode) -> bool:
    if not isinstance(comparison, cst.Comparison):
        return False
    both = (comparison.left, comparison.comparisons[0].comparator)
    sides = [each.args[0].value if isinstance(each, cst.Call) and each.args else each for each in both]
    return any(text_of(each) == "cpu" for each in sides)


def _availabilities(ctx: Context, by_node: Mapping[cst.CSTNode, Candidate]) -> Iterator[cst.CSTNode]:
    """Every `torch.cuda.is_available()` that stays."""
    for each in ctx.tree.nodes:
        if (
            isinstance(each, cst.Call)
            and ctx.is_availability(each, "torch.cuda")
            and not _is_ported(ctx, each, by_node)
        ):
            yield each


def only_says(ctx: Context, body: cst.BaseSuite) -> bool:
    """Whether a block only prints."""
    lines: list[cst.CSTNode] = []
    for line in body.body:
        lines += line.body if isinstance(line, cst.SimpleStatementLine) else [line]
    return all(
        isinstance(each, cst.Expr) and isinstance(each.value, cst.Call) and _callee(each.value) in _SAYS
        for each in lines
    )


def sets_cuda(ctx: Context, statement: cst.CSTNode) -> bool:
    """Whether it is a setting of cuDNN or of torch.backends.cuda."""
    return (
        re.match(r"\s*(?:torch\.)?(?:backends\.)?(?:cudnn|cuda)\.", ctx.tree.module.code_for_node(statement))
        is not None
    )


def _callee(node: cst.Call) -> str:
    return "." + node.func.attr.value if isinstance(node.func, cst.Attribute) else dotted(node.func) or ""

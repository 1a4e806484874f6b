# SPDX-License-Identifier: Apache-2.0
"""Decides on guards and what they guard together: which question each becomes, and what stays with one that stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import libcst as cst

from anyaccel.port import tables, usage
from anyaccel.port.answers import ANY_WILL_DO
from anyaccel.port.candidate import Candidate
from anyaccel.port.chosen import leave_picked
from anyaccel.port.context import Context
from anyaccel.port.guards import ends_with_demand, governed, guarded, only_sets_cuda
from anyaccel.port.halves import leave_halves, leave_switches
from anyaccel.port.pretended import leave_pretended
from anyaccel.port.syntax import dotted, text_of
from anyaccel.port.together import leave_waiting
from anyaccel.port.tries import is_caught, leave_tried
from anyaccel.port.whole import leave_parts_of_files

_TENSOR_HAS_TWO = (
    "two readings: `get_accelerator().on_accelerator(x)`, true on a CPU that is the accelerator, "
    'or `x.device.type != "cpu"`, as it was'
)
_DEVICE_HAS_TWO = (
    "two readings: CUDA itself (leave it), or any accelerator (compare with `get_accelerator().device_name()`, "
    'or `!= "cpu"` where the CPU has a way of its own)'
)
_COUNT_HAS_TWO = (
    "without CUDA it is 0, and an accelerator has at least 1: get_accelerator().device_count() where it is a number "
    'of processes or stands behind `device_name() != "cpu"`'
)
_MEASURE_HAS_TWO = (
    "it is compared: without CUDA it is 0, and a CPU that is the accelerator has the memory of the process; compare it "
    'behind `get_accelerator().device_name() != "cpu"`'
)


def settle(ctx: Context, candidates: Sequence[Candidate]) -> None:
    """Leave guards of what still needs CUDA, leave what such guards govern, and choose the form of the others.

    On a machine without a GPU every branch that was taken before is taken afterwards; where the CPU as accelerator may
    take a branch that was meant for GPUs, nothing in it changes what is computed.
    """
    _leave_others(candidates)
    leave_pretended(ctx, candidates)
    leave_tried(ctx, candidates)
    settled = False
    while not settled:
        settled = not (
            _leave_guards(ctx, candidates)
            or _leave_guarded(ctx, candidates)
            or _leave_counts(ctx, candidates)
            or _leave_followers(candidates)
            or _leave_states(ctx, candidates)
            or _leave_arguments(ctx, candidates)
            or leave_picked(ctx, candidates, _by_node(candidates))
            or leave_halves(ctx, candidates)
            or leave_switches(ctx, candidates)
            or leave_parts_of_files(ctx, candidates)
            or leave_waiting(ctx, candidates)
        )
    by_node = _by_node(candidates)
    for candidate in candidates:
        if candidate.exact is None or candidate.fix is None or _may_be_taken(ctx, candidate, by_node):
            continue
        candidate.fix = candidate.exact
        asked = "==" if candidate.replaced is not candidate.answer else "!="
        use = f'`get_accelerator().device_name() {asked} "cpu"`'
        candidate.message = f"{candidate.message.partition('; use ')[0]}; use {use}"


def _by_node(candidates: Sequence[Candidate]) -> dict[cst.CSTNode, Candidate]:
    return {node: each for each in candidates if each.fix is not None for node in (each.node, each.replaced)}


def _leave_others(candidates: Sequence[Candidate]) -> None:
    """Where one use of CUDA_VISIBLE_DEVICES or of CUDA's graphs stays, the others go on speaking of the same thing."""
    for code in ("ACC402", "ACC107"):
        own = [each for each in candidates if each.code == code]
        if any(each.fix is None for each in own):
            for each in own:
                if each.fix is not None:
                    each.unfixed("the file uses it in another way too, which stays")


def _leave_guards(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    breaking: set[cst.CSTNode] = set()
    for candidate in candidates:
        if candidate.fix is None and (candidate.breaks or _is_demanded(ctx, candidate)):
            breaking |= {candidate.node, *ctx.tree.parents(candidate.node)}
    fixed = [candidate for candidate in candidates if candidate.fix is not None]
    replaced = {node for candidate in fixed for node in (candidate.node, candidate.replaced)}
    by_node = _by_node(candidates)
    left = False
    for candidate in candidates:
        if not candidate.guard or candidate.fix is None:
            continue
        why = _why_left(ctx, candidate, breaking, replaced, fixed, by_node)
        if why:
            candidate.unfixed(why)
            candidate.breaks = candidate.breaks and candidate.question in ("", "tensor")
            candidate.asks = True
            left = True
    return left


def _is_demanded(ctx: Context, candidate: Candidate) -> bool:
    """Whether a comparison with "cuda" is what an assertion demands, which fails on another accelerator."""
    return candidate.code == "ACC202" and candidate.asks and ctx.tree.enclosing(candidate.node, cst.Assert) is not None


def _leave_states(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Where one use of the state of CUDA's generator stays, the others do: what is saved has to fit what reads it."""
    own = [each for each in candidates if "rng_state" in usage.last_name(ctx.tree.imported(each.node) or "")]
    other = any("cuda" in name and "rng_state" in name for name in ctx.calls)  # _set_cuda_rng_state(state)
    left = [each for each in own if each.fix is not None] if other or any(each.fix is None for each in own) else []
    for each in left:
        each.unfixed("the file saves or restores it in another place too, which stays")
    return bool(left)


def _leave_arguments(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """What is given to a function of torch.cuda that stays is meant for CUDA: half of a call helps no other device."""
    calls = {
        parent
        for each in candidates
        if each.fix is None and (ctx.tree.imported(each.node) or "").startswith("torch.cuda.")
        for parent in [ctx.tree.parent(each.node)]
        if isinstance(parent, cst.Call) and parent.func is each.node
    }
    left = [each for each in candidates if each.fix is not None and calls.intersection(ctx.tree.parents(each.replaced))]
    for each in left if calls else ():
        each.unfixed("the function of torch.cuda that it is given to stays")
    return bool(left)


def _why_left(
    ctx: Context,
    candidate: Candidate,
    breaking: set[cst.CSTNode],
    replaced: set[cst.CSTNode],
    fixed: Sequence[Candidate],
    by_node: Mapping[cst.CSTNode, Candidate],
) -> str:
    regions = list(guarded(ctx, candidate.answer))
    two = {"tensor": _TENSOR_HAS_TWO, "device": _DEVICE_HAS_TWO, "device_there": ANY_WILL_DO}.get(
        candidate.question, ""
    )
    if any(region in breaking or ctx.calls_cuda(region, replaced) for region in regions):
        return f"it guards code that still needs CUDA{f'; {two}' if two else ''}"
    if only_sets_cuda(ctx, regions, {each.replaced for each in fixed if each is not candidate}):
        return "it guards settings of CUDA only"
    if candidate.question in ("tensor", "device") and not _may_be_taken(ctx, candidate, by_node):
        return f"the CPU has a way of its own there; {two}"
    return ""


def _leave_guarded(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """What a question that stays about CUDA guards stays CUDA's: half of a branch ported helps no other device."""
    asking: list[cst.CSTNode] = [each.answer for each in candidates if each.fix is None and each.asks]
    for each in candidates:  # n = torch.cuda.device_count(); for i in range(n): ...
        assign = ctx.tree.parent(each.answer)
        if each.count and each.fix is None and isinstance(assign, cst.Assign) and len(assign.targets) == 1:
            target = assign.targets[0].target
            asking += list(ctx.uses(target)) if isinstance(target, cst.Name) else []
    for each in candidates:  # is_cuda = device.type == "cuda"; if is_cuda: ...
        if each.fix is None and each.asks:
            asking += _named(ctx, each.answer)
    asking += ctx.questions(
        {node for each in candidates if each.fix is not None for node in (each.node, each.replaced)}
    )
    regions = {region for node in asking for region in governed(ctx, node)}
    for each in candidates:  # if weight.device.type != "cuda": weight = weight.to("cuda")
        if each.fix is None and each.asks and each.code in ("ACC202", "ACC302"):
            regions |= _both_ways(ctx, each.answer)
    for each in candidates:  # with torch.cuda.device(i): ...
        item = (
            ctx.tree.enclosing(each.node, cst.WithItem, cst.BaseStatement) if each.fix is None and each.breaks else None
        )
        if isinstance(item, cst.WithItem):
            regions.add(ctx.tree.parent(item))
    left = False
    if regions:
        for candidate in candidates:
            around = (candidate.replaced, *ctx.tree.parents(candidate.node))
            if candidate.fix is not None and any(each in regions for each in around):
                candidate.unfixed("the condition around it asks for CUDA itself, and stays")
                left = True
    return left


def _both_ways(ctx: Context, node: cst.CSTNode) -> set[cst.CSTNode]:
    """The branches of the `if` that asks where something is: what is done in either is done with CUDA's kernels."""
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget):
        child, parent = parent, ctx.tree.parent(parent)
    if not isinstance(parent, cst.If) or parent.test is not child:
        return set()
    return {parent.body} | ({parent.orelse} if isinstance(parent.orelse, cst.Else) else set())


def _named(ctx: Context, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Where the variable is read that a comparison is assigned to, by itself or as a part of a condition."""
    operations = cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget
    parent = ctx.tree.parent(node)
    if isinstance(parent, cst.Call) and parent.func is node:
        parent = ctx.tree.parent(parent)
    while isinstance(parent, operations):
        parent = ctx.tree.parent(parent)
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
        target = parent.targets[0].target
        yield from ctx.uses(target) if isinstance(target, cst.Name) else ctx.uses_of_attribute(target)


def _leave_counts(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Numbers of devices stay where a CPU would meet them with 1 instead of 0."""
    counts = [each for each in candidates if each.count and each.fix is not None]
    if not counts:
        return False
    by_node = _by_node(candidates)
    safe: set[cst.CSTNode] = set()
    for each in candidates:
        if each.question == "device_there" and each.fix is not None and not _may_be_taken(ctx, each, by_node):
            safe |= {region for region in guarded(ctx, each.answer) if not isinstance(region, cst.Module)}
    left = False
    for each in counts:
        if not any(around in safe for around in ctx.tree.parents(each.node)):
            each.unfixed(_COUNT_HAS_TWO if each.guard else _MEASURE_HAS_TWO)
            each.breaks = True
            each.asks = each.guard
            left = True
    return left


def _leave_followers(candidates: Sequence[Candidate]) -> bool:
    """What is compared with a device keeps its name where that device keeps it."""
    by_node = _by_node(candidates)
    left = [each for each in candidates if each.fix is not None and not all(node in by_node for node in each.follows)]
    for each in left:
        each.unfixed("the device that it is compared with stays")
    return bool(left)


def _may_be_taken(ctx: Context, candidate: Candidate, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Whether a CPU as accelerator may go where the answer is yes, and compute the same as before."""
    assign = ctx.tree.parent(candidate.answer)
    if candidate.question == "device_there" and isinstance(assign, cst.Assign) and len(assign.targets) == 1:
        target = assign.targets[0].target
        uses = list(ctx.uses(target)) if isinstance(target, cst.Name) else []
        return bool(uses) and all(_may_go_along(ctx, candidate, each, by_node) for each in uses)
    return _may_go_along(ctx, candidate, candidate.answer, by_node)


def _may_go_along(
    ctx: Context, candidate: Candidate, node: cst.CSTNode, by_node: Mapping[cst.CSTNode, Candidate]
) -> bool:
    tree = ctx.tree
    child, parent, negated = node, tree.parent(node), False
    while isinstance(parent, cst.UnaryOperation | cst.BooleanOperation):
        if isinstance(parent, cst.UnaryOperation):
            negated = not negated
        elif not isinstance(parent.operator, cst.And) or negated:
            return False
        child, parent = parent, tree.parent(parent)
    match parent:
        case cst.Assert() if parent.test is child and not negated and candidate.question != "device":
            return _is_ported_beside(ctx, candidate, by_node) and not is_caught(ctx, parent)
        case cst.If() if parent.test is child:
            if negated:
                demand = parent.orelse is None and ends_with_demand(parent.body, well=False)
                demand = demand and not is_caught(ctx, parent)
                return demand and candidate.question == "device_there" and _is_ported_beside(ctx, candidate, by_node)
            is_elif = isinstance(tree.parent(parent), cst.If)
            return parent.orelse is None and not is_elif and _is_harmless(parent.body, by_node)
        case cst.IfExp() if parent.test is child and not negated:
            same = dotted(parent.orelse) is not None and dotted(parent.orelse) == _moved(parent.body, by_node)
            cpu = _spells_cpu(parent.orelse) and _spells_accelerator(parent.body, by_node)
            return same or cpu
    return False


def _is_ported_beside(ctx: Context, candidate: Candidate, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Whether the function that demands a GPU puts something on the accelerator; else it may call a kernel of CUDA."""
    function = ctx.tree.enclosing(candidate.node, cst.FunctionDef) or ctx.tree.module
    moves = (each for each in by_node.values() if each is not candidate and each.question == "")
    return any(function in ctx.tree.parents(each.node) for each in moves)


def _spells_cpu(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Call) and len(node.args) == 1:
        node = node.args[0].value
    return text_of(node) == "cpu"


def _spells_accelerator(node: cst.BaseExpression, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Whether it is the ported name of a device, alone or as the argument of torch.device()."""
    if isinstance(node, cst.Call) and len(node.args) == 1 and node not in by_node:
        node = node.args[0].value
    return node in by_node and by_node[node].code == "ACC201"


def _is_harmless(body: cst.BaseSuite, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    """Whether the statements only move data to the accelerator, or do what has no effect on results."""
    only = body.body[0] if len(body.body) == 1 else None
    if isinstance(only, cst.SimpleStatementLine) and isinstance(only.body[0], cst.Pass):
        return False
    for statement in body.body:
        match statement:
            case cst.If(orelse=None):
                if not _is_harmless(statement.body, by_node):
                    return False
            case cst.SimpleStatementLine():
                if not all(_is_harmless_part(each, by_node) for each in statement.body):
                    return False
                comment = statement.trailing_whitespace.comment
                if comment is not None and comment.value.startswith(tables.MAGIC_MARK):  # it may do anything
                    return False
            case cst.BaseSmallStatement():
                if not _is_harmless_part(statement, by_node):
                    return False
            case _:
                return False
    return True


def _is_harmless_part(part: cst.BaseSmallStatement, by_node: Mapping[cst.CSTNode, Candidate]) -> bool:
    match part:
        case cst.Pass():
            return True
        case cst.Expr(value=value):
            return (value in by_node and by_node[value].harmless) or _moved(value, by_node) is not None
        case cst.Assign(targets=[cst.AssignTarget(target=target)], value=value):
            if "cudnn." in (name := dotted(target) or "") or name.startswith("torch.backends.cuda."):
                return True
            if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
                pairs = zip(target.elements, value.elements, strict=False)
                same = len(target.elements) == len(value.elements)
                return same and all(_moved(b.value, by_node) == dotted(a.value) is not None for a, b in pairs)
            return _moved(value, by_node) is not None
    return False


def _moved(node: cst.BaseExpression, by_node: Mapping[cst.CSTNode, Candidate]) -> str | None:
    """What an expression moves to the accelerator or to the CPU: `x` of x.cuda(), x.to("cuda") and x.cpu()."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    ported = by_node.get(node)
    name, receiver = node.func.attr.value, node.func.value
    moves = ported is not None and ported.code == "ACC301"
    if name == "cpu" and not node.args:
        moves = True
    elif name == "to" and node.args and node.args[0].keyword is None:
        device = node.args[0].value
        moves = text_of(device) == "cpu" or _spells_accelerator(device, by_node)
        # A dtype, a copy or another layout would be the CPU's as well.
        names = [each.keyword.value if each.keyword is not None else "" for each in node.args[1:]]
        moves = moves and set(names) <= {"non_blocking"}
    # x.clone().cuda() is another tensor on a CPU too, and x.detach().cuda() one without gradients.
    return dotted(receiver) if moves else None

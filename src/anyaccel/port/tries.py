# SPDX-License-Identifier: Apache-2.0
"""A failure as the choice of a device: `try: x.cuda()` with a handler that goes another way where there is no CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port import mixed, usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.guards import ends_with_demand, governed, guarded
from anyaccel.port.syntax import dotted

_TRIES = (cst.Try, cst.TryStar)
# What torch raises without CUDA: an AssertionError where it was built without, else a RuntimeError; more in places.
_RAISED = {"Exception", "BaseException", "RuntimeError", "AssertionError", "AcceleratorError"}
_RAISED_BY = {
    "ACC103": {"IndexError", "LookupError"},
    "ACC106": {"TypeError"},
    "ACC401": {"ValueError"},
    "ACC101": {"AttributeError"},
}
_FAIL = {"ACC102", "ACC103", "ACC105", "ACC107", "ACC109", "ACC301", "ACC303", "ACC401"}
# Functions of torch.cuda that do nothing, or say 0, without CUDA.
_QUIET = re.compile(r"is_available|device_count|empty_cache|manual_seed(?:_all)?|_lazy_call|stream|set_rng_state")
_FIGURES = re.compile(r"(?:max_)?memory_(?:allocated|reserved|cached|stats)")
_SUPPRESSES = {"suppress"}
_EXPECTS = {"raises", "assertRaises", "assertRaisesRegex"}
_MIXED_PRECISION = {"autocast", "GradScaler"}
_PROBE = 8  # lines of a function that may be called to see whether there is CUDA
_TWO_READINGS = (
    "without CUDA it fails, and what catches that goes another way; two readings: CUDA itself is tried (leave it), or "
    'any accelerator (ask `get_accelerator().device_name() != "cpu"` instead)'
)
_BESIDE = "what is tried beside it stays, since its failure chooses what is done"


def leave_tried(ctx: Context, candidates: Sequence[Candidate]) -> None:
    """Leave what fails without CUDA where that is caught: ported it would not fail, and another branch be taken."""
    regions: set[cst.CSTNode] = set()
    failing = [each for each in candidates if each.fix is not None and _may_fail(ctx, each)]
    guards = [each for each in candidates if each.question]
    for each in failing:
        for node in _places(ctx, each):
            for region in _caught(ctx, node, each):
                if not any(_is_not_reached(ctx, node, guard, region) for guard in guards):
                    regions |= {region, each.node}
                    if each.fix is not None:
                        each.unfixed(_TWO_READINGS)
                    around = ctx.tree.parent(region)
                    if isinstance(around, _TRIES) and around.orelse is not None:
                        regions.add(around.orelse)
    for each in candidates if regions else ():
        if each.fix is not None and any(around in regions for around in ctx.tree.parents(each.node)):
            each.unfixed(_BESIDE)


def is_caught(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether an error that is raised here may be caught in the same file, so that another way is gone."""
    return next(_caught(ctx, node, None), None) is not None


def _may_fail(ctx: Context, candidate: Candidate) -> bool:
    """Whether it raises on a machine without CUDA."""
    if candidate.code in ("ACC201", *_FAIL):
        return True
    name = usage.last_name(ctx.tree.imported(candidate.node) or "")
    if candidate.code == "ACC101":
        return _QUIET.fullmatch(name) is None and _FIGURES.fullmatch(name) is None
    called = ctx.tree.parent(candidate.node)
    return candidate.code in ("ACC106", "ACC108") and isinstance(called, cst.Call) and called.func is candidate.node


def _places(ctx: Context, candidate: Candidate) -> Iterator[cst.CSTNode]:
    """Where it may fail: for a device's name where it is used, also under the name that it is assigned to."""
    if candidate.code != "ACC201":
        yield candidate.node
        return
    waiting, seen = [candidate.node], {candidate.node}
    while waiting:
        node = waiting.pop()
        found = usage.role(ctx.tree, node)
        uses: list[cst.CSTNode] = []
        if found.callee == "torch.device" and found.call is not None:
            uses = [found.call]
        elif found.kind == "assigned":
            assign = ctx.tree.enclosing(node, cst.Assign, cst.AnnAssign, cst.BaseStatement)
            targets = [each.target for each in assign.targets] if isinstance(assign, cst.Assign) else []
            targets += [assign.target] if isinstance(assign, cst.AnnAssign) else []
            for target in targets:
                uses += ctx.uses(target) if isinstance(target, cst.Name) else ctx.uses_of_attribute(target)
        elif found.kind in ("argument", "other") and usage.last_name(found.callee) not in _MIXED_PRECISION:
            yield node
        waiting += [each for each in uses if each not in seen]
        seen.update(uses)


def _caught(ctx: Context, node: cst.CSTNode, candidate: Candidate | None, follow: bool = True) -> Iterator[cst.CSTNode]:
    """The blocks around a place in which its failure is caught, also those that call the short function it is in.

    Args:
        candidate: what fails; None for any error at all.
        follow: look where the function around the place is called.
    """
    tree = ctx.tree
    child = node
    for around in tree.parents(node):
        match around:
            case cst.Try() | cst.TryStar() if around.body is child:
                handlers = (each for each in around.handlers if _catches(ctx, each.type, candidate))
                if any(not _raises_again(ctx, each.body) for each in handlers) or _leaves(around.finalbody):
                    yield around.body
            case cst.With() if around.body is child:
                if any(_is_catcher(ctx, each.item, candidate, _SUPPRESSES | _EXPECTS) for each in around.items):
                    yield around.body
            case cst.Call() if around.func is not child and _is_catcher(ctx, around, candidate, _EXPECTS):
                yield around
            case cst.Lambda() if not isinstance(tree.parent(around), cst.Arg):
                return
            case cst.FunctionDef():
                uses = _calls_of(ctx, around, candidate is None) if follow else ()
                for use in uses if candidate is None or _is_short(ctx, around) else ():
                    yield from _caught(ctx, use, candidate, follow=False)
                return
        child = around


def _calls_of(ctx: Context, function: cst.FunctionDef, any_owner: bool) -> Iterator[cst.Call]:
    """Where the file calls this function: f(), self.f(), C() for __init__ of C; x.f() with any owner."""
    around = ctx.tree.enclosing(function, cst.ClassDef, cst.FunctionDef)
    if function.name.value == "__init__" and isinstance(around, cst.ClassDef):
        yield from ctx.calls.get(around.name.value, ())
        return
    for each in ctx.calls.get(function.name.value, ()):
        owner = (dotted(each.func) or ".").rpartition(".")[0]
        if any_owner or owner in ("self", "cls") or isinstance(each.func, cst.Name):
            yield each


def _is_short(ctx: Context, function: cst.FunctionDef) -> bool:
    """Whether it may be called to see if it fails; what a long function does is wanted for itself."""
    return len(re.findall(r"\S.*\n", ctx.tree.module.code_for_node(function.body))) <= _PROBE


def _catches(ctx: Context, kinds: cst.BaseExpression | None, candidate: Candidate | None) -> bool:
    """Whether a handler of these exceptions catches what is raised."""
    if kinds is None or candidate is None:
        return True
    texts = [ctx.tree.module.code_for_node(kinds)]
    if dotted(kinds) is not None:  # ERRORS = (RuntimeError, OSError)
        texts += [ctx.tree.module.code_for_node(each) for each in mixed.assignments(ctx, kinds) if each is not None]
    names = {usage.last_name(name) for text in texts for name in re.findall(r"[\w.]+", text)}
    return bool(names & (_RAISED | _RAISED_BY.get(candidate.code, set())))


def _is_catcher(ctx: Context, node: cst.CSTNode, candidate: Candidate | None, names: set[str]) -> bool:
    """Whether it is suppress(...) or raises(...) with exceptions among which is what is raised."""
    if not isinstance(node, cst.Call):
        return False
    name = ctx.tree.imported(node.func) or dotted(node.func) or ""
    kinds = node.args if usage.last_name(name) in _SUPPRESSES else node.args[:1]
    return usage.last_name(name) in names and any(_catches(ctx, each.value, candidate) for each in kinds)


def _raises_again(ctx: Context, handler: cst.BaseSuite) -> bool:
    """Whether a handler ends in an error or the program's end, for all but a lack of memory, which this is not."""
    for statement in handler.body:
        test = ctx.tree.module.code_for_node(statement.test) if isinstance(statement, cst.If) else ""
        if isinstance(statement, cst.If) and "memory" in test.lower():
            other = statement.body if re.search(r"\bnot\b", test) else statement.orelse
            if isinstance(other, cst.Else):
                other = other.body
            if isinstance(other, cst.BaseSuite) and ends_with_demand(other):
                return True
            if _leaves(other):
                return False
        elif _leaves(statement):
            return False
    return ends_with_demand(handler)


def _leaves(part: cst.CSTNode | None) -> bool:
    """Whether there is a return, break or continue in it."""
    if part is None or isinstance(part, cst.FunctionDef | cst.Lambda):
        return False
    if isinstance(part, cst.Return | cst.Break | cst.Continue):
        return True
    return any(_leaves(each) for each in part.children)


def _is_not_reached(ctx: Context, node: cst.CSTNode, guard: Candidate, region: cst.CSTNode) -> bool:
    """Whether a guard keeps a machine without CUDA from this place, within the block or around it."""
    around = [node, *ctx.tree.parents(node)]
    parts = {*guarded(ctx, guard.answer), *governed(ctx, guard.answer)}
    if region in ctx.tree.parents(guard.answer):  # a failing guard ends the block; what is before it is done
        parts = {each for each in parts if region in ctx.tree.parents(each)}
        parts.update(_after_demand(ctx, guard))
    return any(each in around and not isinstance(each, cst.BooleanOperation) for each in parts)


def _after_demand(ctx: Context, guard: Candidate) -> Sequence[cst.CSTNode]:
    """The statements after `assert torch.cuda.is_available()` or `if not torch.cuda.is_available(): raise ...`."""
    tree = ctx.tree
    parent = tree.parent(guard.answer)
    negated = isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not)
    if negated:
        parent = tree.parent(parent)
    statement: cst.CSTNode | None = None
    if isinstance(parent, cst.Assert) and not negated:
        statement = tree.parent(parent)
    elif isinstance(parent, cst.If) and negated and parent.orelse is None and ends_with_demand(parent.body):
        statement = parent
    block = getattr(tree.parent(statement), "body", ()) if statement is not None else ()
    return block[block.index(statement) + 1 :] if statement in block else ()

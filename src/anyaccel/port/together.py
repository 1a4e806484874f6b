# SPDX-License-Identifier: Apache-2.0
"""Files that work together are ported together: where something of CUDA stays in one, the others wait for it.

What is right by itself may still be half a port: a device that is picked here is asked for in another file, a tensor
that is placed here meets one that a caller left on the CPU. So what places or asks is fixed only where all that it can
meet is fixed too. What has no company (caches, seeds, errors of memory) is fixed in any case.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.guards import guarded
from anyaccel.port.halves import only_tells
from anyaccel.port.silence import is_silenced
from anyaccel.port.syntax import dotted

_ALONE = {"empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all"}
_BEFORE_FIGURES = {"empty_cache", "ipc_collect", "synchronize"}
_FIGURES = re.compile(
    r"\bcuda\.(?:(?:max_)?memory_(?:allocated|reserved|cached|stats|summary|snapshot)|reset_\w*memory\w*|mem_get_info)\b"
)
# In a function that starts as many workers as CUDA has devices no other device gets anything to free.
_COUNTS = re.compile(r"\bcuda\.device_count\(\)(?!\s*>)")
_SETTINGS = "ACC504"  # CUDA's own switches, without effect elsewhere
_ABOUT_GPUS = re.compile("cuda|gpu|nvidia|nccl", re.IGNORECASE)
_JUMPS = (cst.Return, cst.Raise, cst.Continue, cst.Break)
# A pattern or a list of names in one text: r"^(cuda(:[0-9]+)?|cpu)$"; no text for people, and no part of a name.
_PATTERN = re.compile(r"(?<![\w-])cuda(?![\w-])|\bnvidia-smi\b")
_FP64 = re.compile(
    r"\w\.double\(\)|\btorch\.DoubleTensor\b|set_default_dtype\(\s*torch\.(?:float64|double)\b"
    r"|\bdtype\s*=\s*torch\.(?:float64|double)\b(?!\s+if)|\.to\(\s*torch\.(?:float64|double)\b|\.type\(\s*\w+(?:\[\d\])?\.type\(\)"
)
# An array of NumPy that goes to a device as it is, in a file that makes some of float64.
_OF_FLOAT64 = re.compile(r"\b(?:np|numpy)\.(?:float64|double)\b")
_ARRAY = re.compile(r"\bfrom_numpy\([\w.]+\)\.(?:to\(\s*(?:device|\w+\.device)\b|cuda\()")
_OF_CUDA = re.compile(r"torch\.cuda|cuda\.(?:device|stream|graph)")
_OF_TESTS = re.compile(r"(?:^|/)tests?/|(?:^|/)(?:test_[^/]*|[^/]*_test|conftest)\.py$")


@dataclass(frozen=True)
class Holder:
    """What other files wait for: the line and what stands there."""

    line: int
    code: str


def is_test(path: str) -> bool:
    """Whether a file is of tests: they run what others define, and nothing depends on them."""
    return _OF_TESTS.search(path) is not None


def holder(ctx: Context, candidates: Sequence[Candidate]) -> Holder | None:
    """The first place of the file that stays, and that decides where things are or for which device something is."""
    for each in candidates:
        if each.fix is None and not each.allowed and not each.waits and _holds(ctx, each):
            line = ctx.tree.position(ctx.tree.locate({each.node})[each.node][0])[0]
            return Holder(line, " ".join(ctx.tree.module.code_for_node(each.node).split())[:60])
    return _given_default(ctx, candidates)


def _holds(ctx: Context, each: Candidate) -> bool:
    if each.code == _SETTINGS or each.count or isinstance(each.node, cst.FunctionDef):
        return False
    if ctx.tree.enclosing(each.node, cst.Annotation) is not None:
        return False
    if each.asks and only_tells(ctx, each):
        return False
    return each.asks or each.breaks or each.code == "ACC402"


def left_in_text(text: str) -> Holder | None:
    """What no rule is about, and what still is for CUDA only, or for a device that has float64, in a file."""
    lines = text.split("\n")
    array = _ARRAY.search(text) if _OF_FLOAT64.search(text) else None
    if array is not None:
        return Holder(text.count("\n", 0, array.start()) + 1, array[0])
    for match in _FP64.finditer(text):
        line = text.count("\n", 0, match.start())
        if "#" not in lines[line].partition(match[0].split("\n")[0])[0] and not is_silenced(lines[line], "ACC2"):
            return Holder(line + 1, match[0])
    if "cuda" not in text and "nvidia-smi" not in text:
        return None
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            told = value in ("cuda", "nvidia-smi") or value.startswith(("cuda:", "torch.cuda", "-"))  # a rule's affair
            pattern = not told and not re.search(r"\s", value) and _PATTERN.search(value)
            if pattern and not is_silenced(lines[node.lineno - 1], "ACC2"):
                return Holder(node.lineno, repr(value)[:60])
    return None


def _given_default(ctx: Context, candidates: Sequence[Candidate]) -> Holder | None:
    """A device that is picked where none was given, in a function that puts nothing there.

    `def score(net, device=None): device = device or pick()`: the caller has put net where CUDA is, or on the CPU.
    """
    for each in candidates:
        if each.fix is None or each.code not in ("ACC111", "ACC201"):
            continue
        name = _default_of(ctx, each)
        function = ctx.tree.enclosing(each.node, cst.FunctionDef)
        if not name or not isinstance(function, cst.FunctionDef):
            continue
        params = function.params
        listed = [one.name.value for one in (*params.posonly_params, *params.params, *params.kwonly_params)]
        if name not in listed or len([one for one in listed if one not in ("self", "cls")]) < 2:
            continue
        around = ctx.tree.enclosing(function, cst.ClassDef) or function
        if not re.search(rf"\.to\(\s*(?:device\s*=\s*)?(?:self\.)?_?{name}\b", ctx.tree.module.code_for_node(around)):
            line = ctx.tree.position(ctx.tree.locate({each.node})[each.node][0])[0]
            return Holder(line, f"a default for {name} where nothing is put on it")
    return None


def _default_of(ctx: Context, each: Candidate) -> str:
    """The name of the parameter for which a device is picked where it is not given."""
    node: cst.CSTNode | None = each.node
    while node is not None and not isinstance(node, cst.FunctionDef | cst.Module):
        node = ctx.tree.parent(node)
        match node:
            case cst.If(test=cst.Comparison(left=cst.Name(value=name), comparisons=[one])) if isinstance(
                one.operator, cst.Is
            ):
                return name
            case cst.BooleanOperation(left=cst.Name(value=name), operator=cst.Or()):
                return name
            case cst.IfExp(test=cst.Comparison(left=cst.Name(value=name), comparisons=[one])) if isinstance(
                one.operator, cst.Is | cst.IsNot
            ):
                return name
    return ""


def leave_waiting(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave what works together with what stays in this file or in others of its group; whether anything was."""
    if not ctx.held:
        return False
    alone = _alone(ctx, candidates)
    left = False
    for each in candidates:
        if each.fix is None or each in alone:
            continue
        each.unfixed(
            f"it waits for {ctx.held}; settle that first (by hand, or `# ignore-cuda` where CUDA itself is meant), "
            "or use --partial"
        )
        each.waits = left = True
        if each.guard:
            each.asks, each.breaks = True, False
    return left


def _alone(ctx: Context, candidates: Sequence[Candidate]) -> list[Candidate]:
    """What means the same beside code for CUDA and beside code for any accelerator, and guards of nothing else."""
    fixed = [each for each in candidates if each.fix is not None]
    stays = [each for each in candidates if each.fix is None and not each.allowed and each.breaks]
    calls = [each for each in fixed if _is_alone(ctx, each, stays)]
    guards = [each for each in fixed if each.question == "device_there" and _guards_only(ctx, each, candidates, calls)]
    questions = {id(each.answer) for each in guards}
    calls = [each for each in calls if not _is_reached_by_cuda(ctx, each, questions)]
    alone = [*calls, *(each for each in guards if _guards_only(ctx, each, candidates, calls))]
    if all(each in alone or each.allowed or not (each.fix or each.breaks or each.asks) for each in candidates):
        return alone
    # Waits are for times of what is done on CUDA, where anything else of the file stays or waits.
    calls = [each for each in calls if usage.last_name(ctx.tree.imported(each.node) or "") != "synchronize"]
    return [*calls, *(each for each in guards if _guards_only(ctx, each, candidates, calls))]


def _guards_only(ctx: Context, guard: Candidate, candidates: Sequence[Candidate], calls: Sequence[Candidate]) -> bool:
    """Whether all that is about CUDA where the guard says yes is one of these calls."""
    regions = list(guarded(ctx, guard.answer))
    inside = [
        other
        for other in candidates
        if other is not guard and any(one in (other.replaced, *ctx.tree.parents(other.node)) for one in regions)
    ]
    return bool(inside) and all(other in calls for other in inside) and all(_does_no_more(one) for one in regions)


def _is_alone(ctx: Context, each: Candidate, stays: Sequence[Candidate]) -> bool:
    if each.code == "ACC110":
        return True
    name = usage.last_name(ctx.tree.imported(each.node) or "")
    if each.code != "ACC101" or (name in _BEFORE_FIGURES and _is_measured(ctx, each, name)):
        return False
    if name in _BEFORE_FIGURES:
        around = ctx.tree.enclosing(each.node, cst.FunctionDef)
        if around is not None and _COUNTS.search(ctx.tree.module.code_for_node(around)):
            return False
    call = ctx.tree.parent(each.node)
    if name == "synchronize" and isinstance(call, cst.Call) and not call.args:
        function = ctx.tree.enclosing(each.node, cst.FunctionDef)
        return not any(ctx.tree.enclosing(other.node, cst.FunctionDef) is function for other in stays)
    return name in _ALONE


def _is_measured(ctx: Context, each: Candidate, name: str) -> bool:
    """Whether a cache is freed, or work awaited, for figures of memory: beside it, or in a method of its class."""
    function = ctx.tree.enclosing(each.node, cst.FunctionDef)
    around = ctx.tree.enclosing(each.node, cst.ClassDef) if name == "synchronize" else None
    if isinstance(around, cst.ClassDef):
        code = ctx.tree.module.code_for_node(around)
    elif isinstance(function, cst.FunctionDef):
        code = "\n".join(
            ctx.tree.module.code_for_node(line)
            for line in function.body.body
            if isinstance(line, cst.BaseStatement | cst.BaseSmallStatement)
            and not isinstance(line, cst.BaseCompoundStatement)
        )
    else:
        return False
    return _FIGURES.search(code) is not None


def _does_no_more(region: cst.CSTNode) -> bool:
    """Whether a guarded block keeps nothing under a name about GPUs, and leaves its function nowhere."""
    if not isinstance(region, cst.BaseSuite):
        return True
    for statement in region.body:
        parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
        for part in parts:
            if isinstance(part, _JUMPS):
                return False
            if isinstance(part, cst.Assign):
                name = dotted(part.targets[0].target) or ""
                if _ABOUT_GPUS.search(name) and "backends" not in name:
                    return False
    return True


def _is_reached_by_cuda(ctx: Context, each: Candidate, questions: set[int]) -> bool:
    """Whether a condition around it, or an early leave above it, goes by something of CUDA that stays."""
    child: cst.CSTNode = each.replaced
    for parent in ctx.tree.parents(each.node):
        match parent:
            case cst.FunctionDef():
                break
            case cst.If(test=test) | cst.While(test=test) if child is not test:
                asked = _is_asked(ctx, test, questions)
            case cst.With(items=items) if child is parent.body:
                asked = not any(_OF_CUDA.search(ctx.tree.module.code_for_node(item)) for item in items)
            case cst.IndentedBlock(body=body):
                above = itertools.takewhile(lambda one, child=child: one is not child, body)  # type: ignore[misc]
                tests = [one.test for one in above if isinstance(one, cst.If) and not one.orelse and _leaves(one.body)]
                asked = all(_is_asked(ctx, one, questions) for one in tests)
            case _:
                asked = True
        if not asked:
            return True
        child = parent
    return False


def _is_asked(ctx: Context, test: cst.BaseExpression, questions: set[int]) -> bool:
    """Whether a condition says nothing about GPUs, or is one that is ported."""
    if not _ABOUT_GPUS.search(ctx.tree.module.code_for_node(test)):
        return True
    return any(id(node) in questions for node in _nodes(test))


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _leaves(body: cst.BaseSuite) -> bool:
    last = body.body[-1] if body.body else None
    return isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], _JUMPS)

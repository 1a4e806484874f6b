# SPDX-License-Identifier: Apache-2.0
"""Pairs of which one half stays: an answer that is kept under a name, the parts of a call, the way of a rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port import answers, mixed, usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.chosen import only_says, sets_cuda
from anyaccel.port.context import Context
from anyaccel.port.guards import ends_with_demand, guarded
from anyaccel.port.syntax import dotted, text_of

PLACES = {"ACC102", "ACC106", "ACC111", "ACC201", "ACC301", "ACC401"}
_OPERATIONS = cst.BooleanOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget
_FLAG = re.compile(r"cuda|gpu", re.IGNORECASE)
_PRECISION = re.compile(r"float16|bfloat16|\bhalf\b|fp16|bf16|float32", re.IGNORECASE)
_ASSERTS = re.compile(r"\.?assert\w*|\.?skip\w*|\.?fail\w*")
_OF_CUDA_ONLY = re.compile(
    r"#.*cudnn|#.*\b(?:requir|need|only|support|nvidia|triton|kernel|flash).*\b(?:cuda|gpus?|nvidia)\b"
    r"|#.*\b(?:cuda|nvidia)\b.*\b(?:requir|need|only|support|kernel)",
    re.IGNORECASE,
)
_HAS_TWO = (
    "two readings: leave all of it, or port it together with what keeps the answer "
    '(`get_accelerator().device_name() != "cpu"`)'
)


def leave_halves(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave what works together with something that stays; whether anything was left now."""
    return (
        _leave_told(ctx, candidates)
        or _leave_beside_kept(ctx, candidates)
        or _leave_parts(ctx, candidates)
        or _leave_ranks(ctx, candidates)
        or _leave_unknown(ctx, candidates)
        or _leave_questions(ctx, candidates)
        or _leave_passed_counts(ctx, candidates)
    )


def kept_under(ctx: Context, node: cst.CSTNode) -> str:
    """The name under which other code may ask for this answer; empty where it only decides what runs here."""
    if isinstance(called := ctx.tree.parent(node), cst.Call) and called.func is node:
        node = called
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, _OPERATIONS):
        child, parent = parent, ctx.tree.parent(parent)
    code = ctx.tree.module.code_for_node
    match parent:
        case cst.Assign():
            return code(parent.targets[0].target)
        case cst.AnnAssign() | cst.NamedExpr():
            return code(parent.target)
        case cst.Return():
            function = ctx.tree.enclosing(parent, cst.FunctionDef)
            return f"{function.name.value}()" if isinstance(function, cst.FunctionDef) else "a return"
        case cst.DictElement():
            return code(parent.key)
        case cst.Arg():
            found = usage.role(ctx.tree, child)
            if answers.is_test(ctx, child) or found.callee in answers.PRINTS or _ASSERTS.fullmatch(found.callee):
                return ""
            return "" if found.kind != "argument" else f"{found.callee.lstrip('.')}(...)"
        case cst.If() if parent.test is child:
            return _flag_in(ctx, parent)
    return ""


def _flag_in(ctx: Context, node: cst.If) -> str:
    """The name of a flag about GPUs that a branch of this `if` sets: self.use_gpu = True."""
    lines = [each for each in node.body.body if isinstance(each, cst.SimpleStatementLine)]
    for line in (each for one in lines for each in one.body):
        match line:
            case cst.Assign(value=cst.Name(value="True" | "False")):
                name = ctx.tree.module.code_for_node(line.targets[0].target)
                if _FLAG.search(name):
                    return name
    return ""


def _leave_told(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave what other files, or calls of the same one, were told by: a second run has to find what the first found."""
    left = False
    for each in candidates:
        names = []
        for around in ctx.tree.parents(each.node):
            if isinstance(around, cst.FunctionDef | cst.ClassDef):
                names.append(around.name.value)
        if each.fix is None or not names:
            continue
        why = ""
        if each.code == "ACC202" and each.question == "device" and ctx.project.demanding.intersection(names):
            why = "the device that the function is given stays where it is called"
        elif each.question == "device_there" and f"{names[0]}()" in ctx.project.keeps:
            why = f"callers of {names[0]}() may mean CUDA"
        elif usage.last_name(ctx.tree.imported(each.node) or "") == "device_count":
            assign = ctx.tree.enclosing(each.node, cst.Assign, cst.BaseStatement)
            target = dotted(assign.targets[0].target) if isinstance(assign, cst.Assign) else ""
            why = f"other code may take {target} for CUDA" if target in ctx.project.keeps else ""
        if why:
            each.unfixed(why)
            each.breaks = False
            left = True
    return left


def _is_answer(each: Candidate) -> bool:
    return each.code == "ACC101" and (each.question == "device_there" or each.asks) and not each.count


def _leave_beside_kept(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave guards that place something, and devices picked by hand, beside an answer that is kept and stays.

    What is placed by that answer stays on the CPU of a machine with another accelerator, and would meet the rest.
    """
    questions = [each for each in candidates if _is_answer(each)]
    left = False
    for each in questions:
        if each.fix is not None and (flag := _flag_of(ctx, each)):
            each.unfixed(f"{flag} says by it what others do with CUDA; {_HAS_TWO}")
            each.breaks = False
            left = True
    kept = next((name for each in questions if each.fix is None for name in [kept_under(ctx, each.answer)] if name), "")
    where = f"the answer stays under {kept}" if kept else ""
    if not kept and (others := ctx.kept_elsewhere):
        where = f"other files ask {others[0]}"
    if not where:
        return left
    for each in candidates:
        picked = each.code == "ACC111" and (kept or goes_elsewhere(ctx, each))
        if each.fix is None or not (picked or (each.question == "device_there" and _places(ctx, each, candidates))):
            continue
        each.unfixed(f"{where}, and what goes by it would stay on the CPU; {_HAS_TWO}")
        each.breaks = False
        left = True
    return left


def goes_elsewhere(ctx: Context, each: Candidate) -> bool:
    """Whether other code gets a picked device: by an attribute, a name of the module, a return or a default."""
    found = usage.role(ctx.tree, each.node)
    if found.callee == "torch.device" and found.call is not None:
        found = usage.role(ctx.tree, found.call)
    if found.kind in ("returned", "default", "value"):
        return True
    assign = ctx.tree.enclosing(each.node, cst.Assign, cst.AnnAssign, cst.BaseStatement)
    targets = [one.target for one in assign.targets] if isinstance(assign, cst.Assign) else []
    targets += [assign.target] if isinstance(assign, cst.AnnAssign) else []
    outside = ctx.tree.enclosing(each.node, cst.FunctionDef) is None and not ctx.runs
    named = [one for one in targets if isinstance(one, cst.Name)]
    if not targets or outside or len(named) < len(targets):
        return bool(targets)
    return any(isinstance(ctx.tree.parent(use), cst.Return) for one in named for use in ctx.uses(one))


def _flag_of(ctx: Context, each: Candidate) -> str:
    """The flag that is set where this question is answered yes."""
    child, parent = each.answer, ctx.tree.parent(each.answer)
    while isinstance(parent, _OPERATIONS):
        child, parent = parent, ctx.tree.parent(parent)
    return _flag_in(ctx, parent) if isinstance(parent, cst.If) and parent.test is child else ""


def _regions(ctx: Context, each: Candidate) -> list[cst.CSTNode]:
    """What the answer guards, without what a whole function or module is about."""
    found = (region for region in guarded(ctx, each.answer))
    return [region for region in found if not isinstance(region, cst.FunctionDef | cst.Module | cst.ClassDef)]


def _places(ctx: Context, each: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether something below this question is put on a device, other than by a demand for one."""
    regions = _regions(ctx, each)
    placed = (other for other in candidates if other.fix is not None and other.code in PLACES)
    return any(region in (other.replaced, *ctx.tree.parents(other.node)) for other in placed for region in regions)


def _leave_parts(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave the whole of a device's name, or of a call that takes an index, where a part of it stays, and the parts."""
    left = False
    for outer in candidates:
        if outer.code not in ("ACC101", "ACC109", "ACC201", "ACC202", "ACC301") or outer.question:
            continue
        for inner in candidates:
            if inner is outer or (outer.fix is None) == (inner.fix is None) or not _is_part(ctx, inner, outer):
                continue
            one, other = (outer, inner) if inner.fix is None else (inner, outer)
            if other.breaks or other.count or other.asks:
                one.unfixed("a part of the same expression stays; port both by hand")
                left = True
    return left


def _is_part(ctx: Context, inner: Candidate, outer: Candidate) -> bool:
    """Whether one is in the arguments of the other; what a method is called on is no part."""
    around = [inner.replaced, *ctx.tree.parents(inner.node)]
    if outer.replaced not in around or inner.replaced is outer.replaced:
        return False
    if isinstance(outer.replaced, cst.Call) and outer.code != "ACC201":
        return any(each in around for each in outer.replaced.args)
    return True


def _leave_ranks(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Where set_device() or a number of devices by which a rank is divided stays, the other does in that function."""
    groups: dict[cst.CSTNode, list[Candidate]] = {}
    for each in candidates:
        name = usage.last_name(ctx.tree.imported(each.node) or "")
        if name == "set_device" or (name == "device_count" and not each.count and each.code == "ACC101"):
            groups.setdefault(ctx.tree.enclosing(each.node, cst.FunctionDef) or ctx.tree.module, []).append(each)
    left = False
    for group in groups.values():
        if any(each.fix is None for each in group):
            for each in group:
                if each.fix is not None:
                    each.unfixed("the other half, set_device() or the number of devices, stays in this function")
                    left = True
    return left


def _leave_unknown(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave guards of what is not known here, and choices of a precision for a device that is not ported."""
    left = False
    fixed = [each for each in candidates if each.fix is not None]
    for each in fixed:
        if each.question != "device_there":
            continue
        regions = _regions(ctx, each)
        mine = [
            other
            for other in fixed
            if other is not each and any(r in (other.replaced, *ctx.tree.parents(other.node)) for r in regions)
        ]
        why = ""
        if _raises_with_cuda(ctx, each.answer):
            why = "it raises where CUDA is, which no other device asked for"
        elif _is_part_of_text(ctx, _top(ctx, each.answer)):
            why = "it chooses a part of a text"
        elif any(_says_gpu(ctx, region) for region in regions):
            why = "a text in what it guards says GPU to something else"
        elif _says_cuda_only(ctx, each.answer):
            why = "a comment there is about CUDA"
        elif not mine and any(_loads_or_names_cpu(ctx, region) for region in [*regions, *_otherwise(ctx, each.answer)]):
            why = "without CUDA something is loaded for, or put on, the CPU there"
        elif not mine and any(_calls_unknown(ctx, region) for region in regions):
            why = "what it guards is not known to be for any accelerator"
        elif _chooses_precision(ctx, each.answer) and not _is_placed_beside(ctx, each, fixed):
            why = "it chooses a precision for a device, and nothing beside it is put on the accelerator"
        if why:
            each.unfixed(f"{why}; {answers.ANY_WILL_DO}")
            each.breaks = False
            left = True
    return left


def _top(ctx: Context, node: cst.CSTNode) -> cst.CSTNode:
    """The conditional that the answer is the test of, else the answer."""
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, _OPERATIONS):
        child, parent = parent, ctx.tree.parent(parent)
    return parent if isinstance(parent, cst.IfExp) and parent.test is child else child


def _leave_questions(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave the questions of a function that go together with one that stays: what they choose belongs together."""
    stay = [each for each in candidates if _is_answer(each) and each.fix is None and not only_tells(ctx, each)]
    functions = {ctx.tree.enclosing(each.node, cst.FunctionDef) for each in stay} - {None}
    left = False
    for each in candidates:
        around = ctx.tree.enclosing(each.node, cst.FunctionDef)
        asks = each.question == "device_there" or each.code == "ACC111"
        if each.fix is None or not asks or around not in functions:
            continue
        regions = _regions(ctx, each) if each.question else []
        inside = [other for other in candidates if any(region in ctx.tree.parents(other.node) for region in regions)]
        if inside and all(other.harmless and other.code != "ACC301" for other in inside):
            continue
        if isinstance(each.target, cst.UnaryOperation) or ctx.tree.enclosing(each.node, cst.Assert) is not None:
            continue  # a demand
        each.unfixed(f"the same question stays in this function, and what they choose belongs together; {_HAS_TWO}")
        each.breaks = False
        left = True
    return left


def only_tells(ctx: Context, each: Candidate) -> bool:
    """Whether what stays only tells people what there is, or sets CUDA's own switches."""
    node: cst.CSTNode = each.answer
    if isinstance(called := ctx.tree.parent(node), cst.Call) and called.func is node:
        node = called
    child, parent = node, ctx.tree.parent(node)
    while isinstance(parent, _OPERATIONS):
        child, parent = parent, ctx.tree.parent(parent)
    if isinstance(parent, cst.If) and parent.test is child:
        lines = [line for line in parent.body.body if isinstance(line, cst.BaseStatement)]
        return all(only_says(ctx, cst.IndentedBlock([line])) or sets_cuda(ctx, line) for line in lines)
    if isinstance(parent, cst.Assert) and each.code == "ACC101":
        return False  # whoever comes by without CUDA gets no further
    return not kept_under(ctx, each.answer) and not isinstance(parent, cst.IfExp)


def _is_part_of_text(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether it chooses between words in a text, such as the name of a package to be installed."""
    words = isinstance(node, cst.IfExp) and text_of(node.body) is not None
    return words and usage.role(ctx.tree, node).kind == "text"


def _says_gpu(ctx: Context, region: cst.CSTNode) -> bool:
    """Whether a text such as "gpu" is assigned or passed there: Lightning's accelerator="gpu" is CUDA or mps."""
    for each in ctx.tree.nodes:
        says = type(each) is cst.SimpleString and (text_of(each) or "").lower() in ("gpu", "gpus")
        if says and region in (each, *ctx.tree.parents(each)):
            return True
    return False


def _leave_passed_counts(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave a number of devices that is passed on under a name about GPUs: nobody here knows what is done for each."""
    left = False
    for each in candidates:
        name = usage.last_name(ctx.tree.imported(each.node) or "")
        assign = ctx.tree.enclosing(each.node, cst.Assign, cst.BaseStatement)
        if each.fix is None or name != "device_count" or not isinstance(assign, cst.Assign):
            continue
        target = assign.targets[0].target
        if not isinstance(target, cst.Name) or not _FLAG.search(target.value):
            continue
        known = {"range", "int", "str", "min", "max", "len", *answers.PRINTS}
        found = (usage.role(ctx.tree, use) for use in ctx.uses(target))
        if any(one.kind == "argument" and one.callee not in known for one in found):
            each.unfixed("a number of GPUs is passed on, and what is done for each may be for CUDA only")
            left = True
    return left


def _says_cuda_only(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether a comment above an `if`, or at its begin, says that CUDA is needed there."""
    around = ctx.tree.enclosing(node, cst.If, cst.BaseSmallStatement, cst.FunctionDef)
    while isinstance(around, cst.If) and isinstance(above := ctx.tree.parent(around), cst.If):
        around = above  # an elif
    if not isinstance(around, cst.If):
        return False
    comments = [line.comment.value for line in around.leading_lines if line.comment is not None]
    if isinstance(around.body, cst.IndentedBlock):
        header = around.body.header.comment
        comments += [header.value] if header is not None else []
        first = around.body.body[0] if around.body.body else None
        comments += [line.comment.value for line in getattr(first, "leading_lines", ()) if line.comment is not None]
        comments += [line.comment.value for line in around.body.footer if line.comment is not None]
    return any(_OF_CUDA_ONLY.search(each) for each in comments)


def _raises_with_cuda(ctx: Context, node: cst.CSTNode) -> bool:
    """Whether the answer yes ends in an error: if torch.cuda.is_available() and ...: raise."""
    child, parent, negated = node, ctx.tree.parent(node), False
    while isinstance(parent, _OPERATIONS):
        negated = negated != (isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not))
        child, parent = parent, ctx.tree.parent(parent)
    asked = isinstance(parent, cst.If) and parent.test is child and not negated
    return asked and isinstance(parent, cst.If) and ends_with_demand(parent.body)


def _otherwise(ctx: Context, node: cst.CSTNode) -> list[cst.CSTNode]:
    """What is done where the answer is no: the `else` of the `if` that asks."""
    around = ctx.tree.enclosing(node, cst.If, cst.BaseSmallStatement)
    return [around.orelse] if isinstance(around, cst.If) and around.orelse is not None else []


def _loads_or_names_cpu(ctx: Context, region: cst.CSTNode) -> bool:
    """Whether a checkpoint is read there, which may be of tensors on CUDA, or the CPU is named."""
    if not isinstance(region, cst.BaseSuite | cst.Else | cst.If):
        return False
    reads = (each for each in ctx.calls.get("load", ()) if ctx.tree.imported(each.func) == "torch.load")
    names = (each for each in ctx.tree.nodes if type(each) is cst.SimpleString and text_of(each) == "cpu")
    return any(region in ctx.tree.parents(each) for each in (*reads, *names))


def _calls_unknown(ctx: Context, region: cst.CSTNode) -> bool:
    """Whether something is called there that is neither torch's nor says something to people."""
    if not isinstance(region, cst.BaseSuite | cst.Else):
        return False
    for each in (call for found in ctx.calls.values() for call in found):
        if region not in ctx.tree.parents(each):
            continue
        full = ctx.tree.imported(each.func) or ""
        callee = f".{each.func.attr.value}" if isinstance(each.func, cst.Attribute) else dotted(each.func) or ""
        if full.startswith(("torch.", "os.", "warnings.", "random.", "time.", "numpy.", "logging.")):
            continue
        if callee in answers.PRINTS or callee in ("int", "float", "str", "len", "min", "max", "exit", "range", ".get"):
            continue
        return True
    return False


def _chooses_precision(ctx: Context, node: cst.CSTNode) -> bool:
    around = ctx.tree.enclosing(node, cst.IfExp, cst.If, cst.BaseSmallStatement)
    if isinstance(around, cst.If):
        parts: Iterator[cst.CSTNode] = iter(around.body.body if not ends_with_demand(around.body) else ())
        simple = [each for each in parts if isinstance(each, cst.SimpleStatementLine)]
        return any(_PRECISION.search(ctx.tree.module.code_for_node(each)) for each in simple)
    return isinstance(around, cst.IfExp) and bool(_PRECISION.search(ctx.tree.module.code_for_node(around)))


def _is_placed_beside(ctx: Context, each: Candidate, fixed: Sequence[Candidate]) -> bool:
    function = ctx.tree.enclosing(each.node, cst.FunctionDef) or ctx.tree.module
    return any(other.code in PLACES and function in ctx.tree.parents(other.node) for other in fixed)


def leave_switches(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave mixed precision that goes by a name under which an answer about CUDA stays."""
    asked = [each.answer for each in candidates if each.fix is None and each.asks]
    left = False
    for each in candidates if asked else ():
        if each.fix is None or not isinstance(each.replaced, cst.Call):
            continue
        for arg in each.replaced.args:
            if arg.keyword is None or arg.keyword.value != "enabled":
                continue
            values = [value for value in mixed.assignments(ctx, arg.value) if value is not None]
            if any(value in (one, *ctx.tree.parents(one)) for value in values for one in asked):
                each.unfixed("its switch goes by an answer about CUDA that stays")
                left = True
    return left

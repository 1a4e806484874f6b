# SPDX-License-Identifier: Apache-2.0
"""Ports the text of one module: what the rules find, and the text with the fixes made."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst

from anyaccel.port import cuda_names, integers, literals, packages, pickers, processes, tables, tensors, usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.fstrings import free_quotes, shows_code
from anyaccel.port.guards import has_newer_way, is_for_another_vendor
from anyaccel.port.halves import PLACES
from anyaccel.port.imports import Imports
from anyaccel.port.project import Project, join, outline
from anyaccel.port.settle import settle
from anyaccel.port.silence import is_silenced
from anyaccel.port.together import Holder, holder
from anyaccel.port.transform import apply
from anyaccel.port.tree import AMBIGUOUS, Tree
from anyaccel.port.whole import asks_where

_OF_TENSORS = {"ACC301", "ACC303"}
_NAMES = {"ACC102", "ACC201", "ACC401"}
_DEVICES = PLACES - {"ACC401"}  # without the backend, which is no device
_METHODS = {"cuda", "pin_memory"}
_ATTRIBUTES = {*_METHODS, "is_cuda", "cpp_extension", "CUDA"}
_NO_USE = {cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.NameItem}
_NAMED = {cst.Param, cst.FunctionDef, cst.ClassDef}
_DEEPEST = 150  # brackets; Python itself takes 200
_PROGRAMS = re.compile(
    r"(?:\w+:\w+,)*cuda(?::|$)|nccl$|CUDA_VISIBLE_DEVICES$|torch\.cuda\.\w+Tensor$|(?:/usr/bin/)?nvidia-smi"
)


@dataclass(frozen=True)
class Found:
    """A finding in a text; offsets are of characters, `end_line` is the last line of the code that it is about.

    `waits`: it could be fixed, and is left for something else that stays (`partial` fixes it).
    """

    start: int
    line: int
    column: int
    code: str
    message: str
    fixable: bool
    end_line: int = 0
    waits: bool = False


@dataclass(frozen=True)
class Ported:
    """What came of a text: the findings, and the text with all fixes made.

    Attributes:
        suppressed: findings that a comment silences.
        asks: a question stays whether something is on CUDA.
        holder: what other files of the same project wait for.
    """

    findings: tuple[Found, ...]
    text: str
    suppressed: int = 0
    asks: bool = False
    holder: Holder | None = None


class NotPythonError(Exception):
    """The text cannot be read as Python; the message says where."""


def port_text(
    text: str,
    wanted: Callable[[str], bool] = lambda code: True,
    removes_imports: bool = True,
    project: Project | None = None,
    partial: bool = False,
    held: str = "",
) -> Ported:
    """Look at a module, and make the fixes.

    Args:
        text: of the module, without a byte-order mark.
        wanted: whether a rule, by its code, is to be applied.
        removes_imports: drop imports from torch.cuda that have no use any more.
        project: the files that are ported together; None for this one alone.
        partial: also fix single places of a file in which a question about CUDA stays.
        held: what stays in a file that this one works together with; what may meet it waits.

    Raises:
        NotPythonError: it cannot be parsed, or not be written back exactly.
    """
    if not tables.WORDS.search(text) or not _may_have_findings(text):
        return Ported((), text)
    try:
        tree = Tree(text)
    except cst.ParserSyntaxError as error:
        raise NotPythonError(_place_of(text) or f"{error.raw_line}:1: {_first_line(error.message)}") from None
    except RecursionError:
        raise NotPythonError("1:1: nested too deeply to be read") from None
    ctx = Context(tree, project if project is not None else join([outline(text)]), partial, held)
    candidates = list(_unique(_candidates(ctx)))
    if not candidates:
        return Ported((), text)
    try:
        spans = tree.locate({candidate.node for candidate in candidates} | {each.replaced for each in candidates})
    except ValueError:
        why = "mixed or unusual line ends, or tabs and blanks in one indentation"
        raise NotPythonError(f"1:1: would not be written back as it is ({why})") from None
    kept, suppressed = [], 0
    limited = usage.of_cuda_and_cpu(tree, ctx.project.roots)
    for candidate in candidates:
        first, last = (tree.position(offset)[0] for offset in spans[candidate.node])
        if not wanted(candidate.code) or any(
            is_silenced(tree.line(number), candidate.code) for number in {first, last}
        ):
            candidate.fix = None
            candidate.allowed = wanted(candidate.code)
            suppressed += wanted(candidate.code)
        else:
            kept.append(candidate)
        if candidate.fix is not None:
            start, end = spans[candidate.replaced]
            own = ctx.about_cuda(candidate.node)
            at_import = ctx.at_import(candidate.node) if candidate.needs_accelerator else ""
            if ctx.is_scripted(candidate.node):
                candidate.unfixed("TorchScript compiles this function and knows no get_accelerator()")
            elif at_import:
                candidate.unfixed(f"as {at_import} it would choose an accelerator at import; choose where it is used")
            elif raw := ctx.raw_cuda(candidate.node):
                candidate.unfixed(f"the function uses {raw}, which only CUDA has")
            elif ctx.in_own_cuda(candidate.node):
                candidate.unfixed("a class's own cuda() says CUDA to its callers; let it have to(device)")
            elif own and candidate.code not in _OF_TENSORS:
                candidate.unfixed(f"by its name {own} is about CUDA")
            elif is_for_another_vendor(ctx, candidate.node, candidate.code in _NAMES):
                candidate.unfixed("the code chooses between vendors by itself")
            elif candidate.code == "ACC111" and ctx.names_vendors_beside(candidate.node):
                candidate.unfixed("the function names devices of other vendors too")
            elif candidate.code in ("ACC111", "ACC201") and usage.is_within_foreign(tree, candidate.node):
                candidate.unfixed("what is around it uses a package whose devices are its own affair")
            elif candidate.code in _DEVICES and (
                package := next((limited[each] for each in tree.parents(candidate.node) if each in limited), "")
            ):
                candidate.unfixed(f"{package}, which is used here, knows CUDA, and at most the CPU")
            elif candidate.code == "ACC104" and has_newer_way(ctx, candidate.node):
                candidate.unfixed("it is for older torch; another branch has torch.amp")
            elif candidate.drops and "#" in text[start:end]:
                candidate.unfixed("a comment stands inside")
            elif not free_quotes(tree, candidate.replaced):
                candidate.unfixed("the f-strings around it leave no quotes for a fix; take it out of them")
            elif shows_code(tree, candidate.node):
                candidate.unfixed("the f-string shows the code itself, by its `=`")
    settle(ctx, candidates)
    holds = None if partial else holder(ctx, candidates)
    fixed = [candidate for candidate in kept if candidate.fix is not None]
    ported = text
    if fixed:
        ported = apply(tree, fixed, Imports(ctx, fixed, removes_imports), spans)
        _check(text, ported)
    findings = []
    for candidate in kept:
        start, end = spans[candidate.node]
        line, column = tree.position(start)
        last, _ = tree.position(end)
        told = (candidate.code, candidate.message, candidate.fix is not None)
        findings.append(Found(start, line, column, *told, last, candidate.waits and candidate.fix is None))
    findings.sort(key=lambda each: (each.start, each.code))
    return Ported(tuple(findings), ported, suppressed, asks_where(ctx, candidates), holds)


def _place_of(text: str) -> str:
    """Where Python itself says that the mistake is; empty when it finds none."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"{error.lineno or 1}:{error.offset or 1}: {_first_line(error.msg)}"
    except ValueError as error:
        return f"1:1: {_first_line(str(error))}"
    return ""


def _first_line(message: str) -> str:
    return " ".join(message.split())[:120]


def _may_have_findings(text: str) -> bool:
    """A quick look with Python's own parser: whether anything but comments and prose is about CUDA."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # LibCST says what is wrong, or knows a syntax that this Python does not; deep nesting would crash it.
        if _depth(text) > _DEEPEST:
            raise NotPythonError("1:1: nested too deeply to be read") from None
        return True
    for node in ast.walk(module):
        match node:
            case ast.Attribute(attr=name) if name in _ATTRIBUTES:
                return True
            case ast.Import(names=names):
                if any(_is_watched(alias.name) for alias in names):
                    return True
            case ast.ImportFrom(module=str(name), names=names, level=0):
                if _is_watched(name) or any(_is_watched(f"{name}.{alias.name}") for alias in names):
                    return True
            case ast.FunctionDef(name="cuda") | ast.keyword(arg="device_ids"):
                return True
            case ast.Call(func=ast.Attribute(attr="to" | "device"), args=[ast.Constant(int()) | ast.Name(), *_]):
                return True
            case ast.keyword(arg="device", value=ast.Constant(int())):
                return True
            case ast.Constant(value=str(value)) if _PROGRAMS.match(value):
                return True
    return False


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in re.finditer(r"[()\[\]{}]", text):
        depth += 1 if match[0] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _is_watched(module: str) -> bool:
    """Whether an import of this module or name is something that a rule is about."""
    root, _, rest = module.partition(".")
    if root in ("torch", "numba"):
        return rest.partition(".")[0] in ("cuda", "backends", "version") or rest.startswith("utils.cpp_extension")
    return root == "triton" or root in tables.CUDA_ONLY or root in tables.MANAGEMENT


def _unique(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """One fix a node: the first rule that speaks for it."""
    seen = set()
    for candidate in candidates:
        if candidate.replaced not in seen:
            seen.add(candidate.replaced)
            yield candidate


def _candidates(ctx: Context) -> Iterator[Candidate]:
    tree = ctx.tree
    for node in tree.nodes:  # first what speaks for all that is in it
        if type(node) is cst.IfExp and not ctx.is_claimed(node):
            found = pickers.device(ctx, node) or pickers.backend(ctx, node)
            if found is not None:
                yield found
        elif type(node) is cst.Lambda and not ctx.is_claimed(node):
            yield from tensors.find_map_location(ctx, node)
    for node in tree.nodes:
        find = _FINDERS.get(type(node))
        if find is not None:
            yield from find(ctx, node)


def _calls(ctx: Context, node: cst.Call) -> Iterator[Candidate]:
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in _METHODS:
        if not ctx.is_claimed(node):
            yield from tensors.find_call(ctx, node)
    else:
        yield from integers.find(ctx, node)
        yield from processes.find_wrapper(ctx, node)
        yield from _strings(ctx, node)


def _strings(ctx: Context, node: cst.BaseExpression) -> Iterator[Candidate]:
    if _is_about_strings(node) and not ctx.is_claimed(node):
        yield from literals.find_device(ctx, node)
        if isinstance(node, cst.SimpleString):
            yield from literals.find_text(ctx, node)


def _is_about_strings(node: cst.CSTNode) -> bool:
    match node:
        case cst.SimpleString():
            return _PROGRAMS.match(node.raw_value) is not None
        case cst.Call(func=cst.Attribute(attr=cst.Name("format"))):
            return True
        case cst.Call():
            return False
    return True


def _names(ctx: Context, node: cst.Name | cst.Attribute) -> Iterator[Candidate]:
    tree = ctx.tree
    if type(node) is cst.Name and node.value not in tree.imported_names:
        return
    if type(node) is cst.Attribute and node.attr.value == "is_cuda":
        yield from tensors.find_attribute(ctx, node)
    elif type(node) is cst.Attribute and node.attr.value == "cuda":
        yield from tensors.find_method(ctx, node)
    parent = tree.parent(node)
    kind = type(parent)
    # The longest a.b.c that begins an expression; what comes after a call or subscript is another node.
    if kind is cst.Attribute or kind in _NO_USE:
        return
    if kind is cst.Arg and parent.keyword is node:  # type: ignore[attr-defined]
        return
    if kind in _NAMED and parent.name is node:  # type: ignore[attr-defined]
        return
    full = tree.imported(node)
    if full is None or ctx.is_claimed(node):
        return
    if full == AMBIGUOUS:
        message = "it has several imports, one of them from torch.cuda: not fixed: import it in one way"
        yield Candidate(node, "ACC501", f"`{tree.module.code_for_node(node)}`: {message}", breaks=False)
    elif full == "torch.cuda" or full.startswith("torch.cuda."):
        yield from cuda_names.find(ctx, node, full)
    else:
        yield from packages.find_name(ctx, node, full)


# Looked up by class: isinstance() on LibCST's abstract base classes costs ten times as much.
_FINDERS: dict[type[cst.CSTNode], Callable[[Context, Any], Iterator[Candidate]]] = {
    cst.Name: _names,
    cst.Attribute: _names,
    cst.Call: _calls,
    cst.SimpleString: _strings,
    cst.FormattedString: _strings,
    cst.BinaryOperation: _strings,
    cst.Import: packages.find_import,
    cst.ImportFrom: packages.find_import,
    cst.FunctionDef: tensors.find_definition,
}


def _check(before: str, after: str) -> None:
    """What Python could read before, it can read after."""
    try:
        ast.parse(before)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        cst.parse_module(after)
        return
    try:
        ast.parse(after)
    except SyntaxError as error:
        raise NotPythonError(f"{error.lineno or 1}:1: a fix would break it (please report this file)") from None

# SPDX-License-Identifier: Apache-2.0
"""Ports the text of one module in one pass: what the rules find, and the text with the fixes made."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import libcst as cst

from anyaccel.port.imports import imports
from anyaccel.port.module import Edit, Module, dotted, last_name
from anyaccel.port.rule import Match, NameFinder, Rule, Tier
from anyaccel.port.rules import BY_KIND, BY_NAME, WORDS
from anyaccel.port.silence import is_silenced

_SUBMODULES = re.compile(r"torch\.cuda\.(?:memory|random|streams|graphs)\.(?=\w)")
# Calls that by their name run a kernel of CUDA, in a block that runs only on CUDA.
_KERNEL = re.compile(
    r"(?!(?:test|is|has|use|to|move|require)_)\w+_cuda|cuda_(?!is_|available|device)\w+|\w*triton\w*|\w+_kernel"
)
_OWN_CUDA = re.compile(r"^[ \t]+def cuda\(\s*self", re.MULTILINE)
_NO_USE = cst.ImportAlias | cst.ImportFrom | cst.AsName | cst.NameItem | cst.Attribute | cst.Annotation
_DEEPEST = 150  # brackets; Python itself takes 200


@dataclass(frozen=True)
class TextFinding:
    """A finding in a text: line and column from 1; `end_line` is the last line of the code that it is about."""

    line: int
    column: int
    end_line: int
    code: str
    message: str
    tier: Tier
    fixed: bool


@dataclass(frozen=True)
class PortedText:
    """What came of a text: the findings, the text with the fixes made, and how many findings a comment silences."""

    findings: tuple[TextFinding, ...]
    text: str
    suppressed: int = 0


class NotPythonError(Exception):
    """The text cannot be read as Python; the message is `line:column: why`."""


def port_text(
    text: str,
    wanted: Callable[[str], bool] = lambda code: True,
    unsafe: bool = False,
    removes_imports: bool = True,
    own_cuda: bool = False,
) -> PortedText:
    """Look at a module, and make the fixes.

    Args:
        text: of the module, without a byte-order mark.
        wanted: whether a rule, by its code, is to be applied.
        unsafe: also make the fixes that need a reader.
        removes_imports: drop imports from torch.cuda that have no use any more.
        own_cuda: a class in another file of the project defines a method `cuda` itself.

    Raises:
        NotPythonError: it cannot be parsed, or not be written back exactly.
    """
    if not WORDS.search(text):
        return PortedText((), text)
    module = _parsed(text, own_cuda or defines_cuda(text))
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n?|\n", module.data))]
    lines = text.splitlines()
    found: list[TextFinding] = []
    edits: list[Edit] = []
    fixed: list[Match] = []
    suppressed = 0
    for rule, place in _unguarded(module, list(_places(module, wanted))):
        start, end = module.span(place.node)
        first, last = bisect.bisect_right(starts, start), bisect.bisect_right(starts, end)
        if not wanted(rule.code):
            continue
        if any(is_silenced(lines[number - 1], rule.code) for number in {first, last} if number <= len(lines)):
            suppressed += 1
            continue
        tier = (place.tier or rule.tier) if place.edits else Tier.REPORT
        made = tier is Tier.SAFE or (unsafe and tier is Tier.UNSAFE)
        made = made and not any(_overlap(one, other) for one in place.edits for other in edits)
        if made:
            edits += place.edits
            fixed.append(place)
        column = len(module.data[starts[first - 1] : start].decode("utf-8")) + 1
        found.append(TextFinding(first, column, last, rule.code, place.message, tier, made))
    found.sort(key=lambda each: (each.line, each.column, each.code))
    ported = text
    if edits:
        ported = _edited(module.data, [*imports(module, fixed, removes_imports), *edits])
        _check(text, ported)
    return PortedText(tuple(found), ported, suppressed)


def defines_cuda(text: str) -> bool:
    """Whether a class in this text has a method `cuda` of its own, so that `.cuda()` may be a call of it."""
    return _OWN_CUDA.search(text) is not None


def _parsed(text: str, own_cuda: bool) -> Module:
    if _depth(text) > _DEEPEST:
        raise NotPythonError("1:1: nested too deeply to be read")
    try:
        module = Module(text, own_cuda)
    except cst.ParserSyntaxError as error:
        raise NotPythonError(_place_of(text) or f"{error.raw_line}:1: {_first_line(error.message)}") from None
    except cst.CSTValidationError as error:
        raise NotPythonError(f"1:1: LibCST cannot read it: {_first_line(str(error))}") from None
    except RecursionError:
        raise NotPythonError("1:1: nested too deeply to be read") from None
    if module.tree.code != text:
        why = "mixed or unusual line ends, or tabs and blanks in one indentation"
        raise NotPythonError(f"1:1: would not be written back as it is ({why})")
    return module


def _places(module: Module, wanted: Callable[[str], bool]) -> Iterator[tuple[Rule, Match]]:
    """All places in the order of the text; where two are about one node, the first wanted rule speaks for it."""
    seen: set[cst.CSTNode] = set()
    removed: list[tuple[int, int]] = []
    for node in module.nodes:
        for rule, place in _places_at(module, node):
            start, end = module.span(place.node)
            if place.node in seen or any(first <= start and end <= last for first, last in removed):
                continue
            if _shows_code(module, place.node) or _is_scripted(module, place.node):
                place.message, place.edits = place.message.partition("; use")[0] + ": its code is read as it stands", ()
            elif module.enclosing(place.node, cst.MatchPattern) is not None:
                place.message, place.edits = place.message.partition("; use")[0] + ": a pattern can hold no call", ()
            elif any(isinstance(each, cst.FormattedString) and '"' in each.end for each in module.parents(place.node)):
                # Before Python 3.12 the quotes of an f-string cannot stand within its braces.
                place.edits = tuple(replace(each, text=each.text.replace('"', "'")) for each in place.edits)
            if wanted(rule.code):
                seen.update((place.node, *place.covers))
            if wanted(rule.code) and (place.tier or rule.tier) is Tier.SAFE:
                removed += [(each.start, each.end) for each in place.edits if each.end > each.start]
            yield rule, place


def _places_at(module: Module, node: cst.CSTNode) -> Iterator[tuple[Rule, Match]]:
    for rule, finder in BY_KIND.get(type(node), ()):
        for place in finder(module, node):
            yield rule, place
    if not isinstance(node, cst.Name | cst.Attribute) or isinstance(module.parent(node), _NO_USE):
        return
    parent = module.parent(node)
    if (
        isinstance(parent, cst.Arg | cst.Param)
        and (getattr(parent, "keyword", None) or getattr(parent, "name", None)) is node
    ):
        return
    full = module.full_name(node)
    if f"{full}.".partition("torch.cuda.")[:2] != ("", "torch.cuda."):
        return
    if module.enclosing(node, cst.Annotation) is not None:
        return  # it holds on every device, since torch.cuda can be imported
    rule, named = BY_NAME["torch.cuda."] if module.is_stored(node) else _rule_of(_SUBMODULES.sub("torch.cuda.", full))
    yield from ((rule, place) for place in named(module, node, full))


def _rule_of(name: str) -> tuple[Rule, NameFinder]:
    """The rule for a name of torch.cuda, else the one for the longest beginning of it."""
    if name in BY_NAME:
        return BY_NAME[name]
    while f"{name}." not in BY_NAME:
        name = name.rpartition(".")[0]
    return BY_NAME[f"{name}."]


def _unguarded(module: Module, places: list[tuple[Rule, Match]]) -> list[tuple[Rule, Match]]:
    """The places, with guards left where what they guard stays with CUDA: no other device can run it."""
    stays = [place.node for _, place in places if place.needs_cuda and not place.edits]
    calls = [each for each in module.nodes if isinstance(each, cst.Call) and _KERNEL.fullmatch(last_name(each.func))]
    stays += [each for each in calls if not module.full_name(each.func).startswith("torch.")]
    found = []
    for rule, place in places:
        if place.guards is not None and any(module.is_within(each, place.guards) for each in stays):
            place = replace(
                place, edits=(), message=f"{place.message.partition('; use')[0]}: it guards what only CUDA has"
            )
        found.append((rule, place))
    return found


def _shows_code(module: Module, node: cst.CSTNode) -> bool:
    """Whether an f-string has the code of this node in its text: f"{x.is_cuda=}"."""
    return any(isinstance(each, cst.FormattedStringExpression) and each.equal for each in module.parents(node))


def _is_scripted(module: Module, node: cst.CSTNode) -> bool:
    """Whether TorchScript, which knows no get_accelerator(), compiles the function around this node."""
    for around in module.parents(node):
        if isinstance(around, cst.FunctionDef | cst.ClassDef):
            for each in around.decorators:
                name = module.full_name(each.decorator.func if isinstance(each.decorator, cst.Call) else each.decorator)
                if name.startswith("torch.jit.") and not name.endswith((".ignore", ".unused")):
                    return True
            if around.name.value in _scripted(module):
                return True
    return False


def _scripted(module: Module) -> set[str]:
    """What the file gives to torch.jit.script()."""
    if "_scripted" not in module.__dict__:
        module.__dict__["_scripted"] = {
            dotted(node.args[0].value)
            for node in module.nodes
            if isinstance(node, cst.Call) and node.args and module.full_name(node.func) == "torch.jit.script"
        }
    found: set[str] = module.__dict__["_scripted"]
    return found


def _edited(data: bytes, edits: list[Edit]) -> str:
    """The text with the edits made; a name that would touch another one gets a blank."""
    parts: list[bytes] = []
    position = 0
    for edit in sorted(edits, key=lambda each: (each.start, each.end)):
        before = data[position : edit.start]
        parts.append(before)
        text = edit.text.encode("utf-8")
        if edit.start < edit.end and edit.start and _joins(data[edit.start - 1 : edit.start], text[:1]):
            text = b" " + text
        parts.append(text)
        position = edit.end
    parts.append(data[position:])
    return b"".join(parts).decode("utf-8")


def _overlap(one: Edit, other: Edit) -> bool:
    return one.start < other.end and other.start < one.end


def _joins(left: bytes, right: bytes) -> bool:
    return all(re.fullmatch(rb"\w", each) for each in (left, right))


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


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in re.finditer(r"[()\[\]{}]", text):
        depth += 1 if match[0] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


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

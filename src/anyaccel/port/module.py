# SPDX-License-Identifier: Apache-2.0
"""One parsed file: its nodes with their parents, what names mean, where nodes are, and edits of the text there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import libcst as cst
from libcst.metadata import (
    ByteSpanPositionProvider,
    ImportAssignment,
    MetadataWrapper,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

GET_ACCELERATOR = "get_accelerator"
PACKAGE = "anyaccel"
SEVERAL = "torch.cuda.several imports"
_OURS = {f"{module}.{GET_ACCELERATOR}" for module in (PACKAGE, f"{PACKAGE}.accelerator", "deepspeed.accelerator")}


def dotted(node: cst.CSTNode | None) -> str:
    """`a.b.c` of such an expression; empty for every other."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    return ".".join([node.value, *reversed(parts)])


def last_name(node: cst.CSTNode | None) -> str:
    """`c` of a.b.c, f(x).c and a[i].c; empty for what has no name."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def text_of(node: cst.CSTNode | None) -> str | None:
    """The value of a plain string literal; None for everything else, bytes and f-strings included."""
    if not isinstance(node, cst.SimpleString) or "b" in node.prefix.lower():
        return None
    value = node.evaluated_value
    return value if isinstance(value, str) else None


# Fields in the order of the source, where LibCST's class has them in another.
_FIRST: dict[str, tuple[str, ...]] = {
    "FunctionDef": ("decorators",),
    "ClassDef": ("decorators",),
    "IfExp": ("body",),
    "Arg": ("keyword",),
}
_LAYOUT = (
    "whitespace",
    "lpar",
    "rpar",
    "lbracket",
    "rbracket",
    "leading_lines",
    "comma",
    "semicolon",
    "header",
    "footer",
)


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The fields of a class of nodes in which other nodes may be, without those of layout."""
    names = [each.name for each in fields(kind)]
    first = _FIRST.get(kind.__name__, ())
    return tuple(name for name in (*first, *(n for n in names if n not in first)) if not name.startswith(_LAYOUT))


@dataclass(frozen=True)
class Edit:
    """Text in the place of `start` to `end`, in bytes of the UTF-8 text; equal ones insert."""

    start: int
    end: int
    text: str


class Module:
    """A file with what the rules ask about it.

    Args:
        text: of the module.
        own_cuda: a class of the project defines a method `cuda` itself.

    Raises:
        libcst.ParserSyntaxError: the text is no Python.
    """

    def __init__(self, text: str, own_cuda: bool = False) -> None:
        # The parser's tree has no node twice, so the deep copy that the wrapper would make is not needed.
        self._wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.text = text
        self.data = text.encode("utf-8")
        self.tree = self._wrapper.module
        self.own_cuda = own_cuda
        self._parent: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes = list(self._walk())
        self._scopes = self._wrapper.resolve(ScopeProvider)
        self.scopes: set[Scope] = {scope for scope in self._scopes.values() if scope is not None}
        self._bound = {each.name.split(".")[0] for scope in self.scopes for each in scope.assignments}
        self.accelerator, self.has_accelerator = self._spelling()

    def _walk(self) -> Iterator[cst.CSTNode]:
        """All nodes in the order of the source; a visitor of LibCST takes five times as long."""
        waiting: list[cst.CSTNode] = [self.tree]
        while waiting:
            node = waiting.pop()
            yield node
            below: list[cst.CSTNode] = []
            for name in _fields(type(node)):
                value = getattr(node, name)
                below += [each for each in (value if isinstance(value, list | tuple) else (value,)) if _is_node(each)]
            self._parent.update(dict.fromkeys(below, node))
            waiting += reversed(below)

    def _spelling(self) -> tuple[str, bool]:
        """The name of get_accelerator in this file, and whether the file imports it already."""
        for name, assignment in self.imported():
            full = {each.name for each in assignment.get_qualified_names_for(name)}
            if full <= _OURS and assignment.scope is assignment.scope.globals:
                return name, True
        return ("get_anyaccel_accelerator" if self.is_bound(GET_ACCELERATOR) else GET_ACCELERATOR), False

    # The tree ---------------------------------------------------------------------------------------------------

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node around this one; the module is its own."""
        return self._parent.get(node, self.tree)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around this one, from the nearest to the module."""
        while node is not self.tree:
            node = self.parent(node)
            yield node

    def enclosing(self, node: cst.CSTNode, *kinds: Any) -> Any:
        """The nearest node around this one of one of these kinds; None where there is none."""
        return next((parent for parent in self.parents(node) if isinstance(parent, kinds)), None)

    def is_within(self, node: cst.CSTNode, outer: cst.CSTNode | None) -> bool:
        return outer is not None and (node is outer or outer in self.parents(node))

    def is_stored(self, node: cst.CSTNode) -> bool:
        """Whether this expression is the target of an assignment or of `del`."""
        parent = self.parent(node)
        if isinstance(parent, cst.AnnAssign | cst.AugAssign | cst.For | cst.CompFor | cst.NamedExpr):
            return parent.target is node
        return isinstance(parent, cst.AssignTarget | cst.Del | cst.AsName)

    def code(self, node: cst.CSTNode) -> str:
        return self.tree.code_for_node(node)

    # Names ------------------------------------------------------------------------------------------------------

    def full_name(self, node: cst.CSTNode | None) -> str:
        """The full name of what `a.b.c` is by the file's imports; empty when it is not imported.

        A relative import's begins with a dot. SEVERAL where it may be a part of torch.cuda, or something else.
        """
        name = dotted(node)
        if node is None or not name:
            return ""
        if not self.is_bound("torch") and name.split(".")[0] == "torch":
            return name  # it came with a `from x import *`, or is another file's
        found = {each.name: each.source for each in self.scope(node).get_qualified_names_for(name)}
        if len(found) == 1 and QualifiedNameSource.IMPORT in found.values():
            return next(iter(found))
        return SEVERAL if any(each.startswith("torch.cuda.") for each in found) and name not in found else ""

    def is_bound(self, name: str) -> bool:
        """Whether anything in the file gives this name a meaning."""
        return name in self._bound

    def is_global(self, name: str) -> bool:
        """Whether the module itself gives this name a meaning, so that every function has it."""
        return any(each.name.split(".")[0] == name for each in self.scope(self.tree).assignments)

    def imported(self) -> Iterator[tuple[str, ImportAssignment]]:
        """Every name that the file imports."""
        for scope in self.scopes:
            for each in scope.assignments:
                if isinstance(each, ImportAssignment):
                    yield each.name, each

    def scope(self, node: cst.CSTNode) -> Scope:
        """The scope that this node's names are looked up in."""
        for each in (node, *self.parents(node)):
            scope: Scope | None = self._scopes.get(each)
            if scope is not None:
                return scope
        raise AssertionError("a module has a scope")

    # The text ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _spans(self) -> Any:
        return self._wrapper.resolve(ByteSpanPositionProvider)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Where a node begins and ends in `data`, without its parentheses."""
        found = self._spans[node]
        return found.start, found.start + found.length

    def source(self, node: cst.CSTNode) -> str:
        """The text of a node as it stands in the file, without its parentheses."""
        start, end = self.span(node)
        return self.data[start:end].decode("utf-8")

    def replace(self, node: cst.CSTNode, text: str) -> Edit:
        """The node's text replaced, its parentheses kept."""
        return Edit(*self.span(node), text)

    def before(self, node: cst.CSTNode, text: str) -> Edit:
        """Text inserted before a node and its parentheses."""
        start = self.span(node)[0] - sum(self._length(each) for each in getattr(node, "lpar", ()))
        return Edit(start, start, text)

    def after(self, node: cst.CSTNode, text: str) -> Edit:
        """Text inserted after a node and its parentheses."""
        end = self.end(node)
        return Edit(end, end, text)

    def end(self, node: cst.CSTNode) -> int:
        """Where a node ends in `data`, its parentheses included."""
        return self.span(node)[1] + sum(self._length(each) for each in getattr(node, "rpar", ()))

    def _length(self, layout: cst.CSTNode) -> int:
        return len(self.code(layout).encode("utf-8"))

    def opened(self, call: cst.Call) -> int:
        """Where the first argument of a call begins: after its parenthesis and what of layout follows it."""
        return (
            self.end(call.func)
            + 1
            + self._length(call.whitespace_after_func)
            + self._length(call.whitespace_before_args)
        )

    def first_argument(self, call: cst.Call, text: str) -> Edit:
        """Text inserted as the first argument of a call."""
        start = self.opened(call)
        return Edit(start, start, f"{text}, " if call.args else text)

    def method(self, name: str, *arguments: str) -> str:
        """`get_accelerator().name(arguments)` in this file's spelling."""
        return f"{self.accelerator}().{name}({', '.join(arguments)})"

    @property
    def device_name(self) -> str:
        """`get_accelerator().device_name(` without arguments and parenthesis, to be put around an expression."""
        return f"{self.accelerator}().device_name("


def _is_node(value: object) -> bool:
    return isinstance(value, cst.CSTNode)

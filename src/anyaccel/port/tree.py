# SPDX-License-Identifier: Apache-2.0
"""One parsed file: its nodes with their parents, what names mean, and where nodes are in the text."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst._nodes.internal import CodegenState
from libcst.metadata import ExpressionContextProvider, MetadataWrapper, QualifiedNameSource, Scope, ScopeProvider
from libcst.metadata.scope_provider import ImportAssignment

from anyaccel.port.syntax import dotted

AMBIGUOUS = "?"

# LibCST's classes are abstract base classes: isinstance() costs ten times what these look-ups do.
_LAYOUT = {
    cst.SimpleWhitespace,
    cst.ParenthesizedWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Newline,
    cst.Comment,
}
_LAYOUT |= {
    cst.Comma,
    cst.Dot,
    cst.AssignEqual,
    cst.LeftParen,
    cst.RightParen,
    cst.LeftSquareBracket,
    cst.RightSquareBracket,
}
_TOLD = {cst.Name, cst.Attribute, cst.Call, cst.SimpleString, cst.FormattedString, cst.BinaryOperation, cst.IfExp}
_TOLD |= {cst.Import, cst.ImportFrom, cst.FunctionDef, cst.Lambda}


# Fields in the order of the source, where the class has them in another.
_ORDER: dict[type[cst.CSTNode], tuple[str, ...]] = {
    cst.FunctionDef: ("decorators",),
    cst.ClassDef: ("decorators",),
    cst.IfExp: ("body",),
    cst.Arg: ("keyword",),
}


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The fields of a class of nodes in which other nodes may be, without those of layout."""
    names = [field.name for field in dataclasses.fields(kind)]
    first = _ORDER.get(kind, ())
    names = [*first, *(name for name in names if name not in first)]
    layout = ("whitespace", "lpar", "rpar", "lbracket", "rbracket", "leading_lines", "comma", "semicolon", "header")
    return tuple(name for name in names if not name.startswith(layout) and name not in ("footer", "equal", "dot"))


@functools.cache
def _is_node(kind: type[object]) -> bool:
    return issubclass(kind, cst.CSTNode) and kind not in _LAYOUT


def _walk(module: cst.Module) -> tuple[dict[cst.CSTNode, cst.CSTNode], list[cst.CSTNode]]:
    """Every node's parent, and in order the nodes that rules look at; a visitor of LibCST takes five times as long."""
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    told: list[cst.CSTNode] = []
    waiting: list[cst.CSTNode] = [module]
    while waiting:
        node = waiting.pop()
        kind: Any = type(node)
        if kind in _TOLD:
            told.append(node)
        below: list[cst.CSTNode] = []
        for name in _fields(kind):
            value = getattr(node, name)
            if _is_node(type(value)):  # type: ignore[arg-type]  # mypy takes classes for unhashable
                below.append(value)
            elif type(value) is list or type(value) is tuple:
                below += [each for each in value if _is_node(type(each))]  # type: ignore[arg-type]
        for each in below:
            parents[each] = node
        waiting += reversed(below)
    return parents, told


def _resolve_scopes(wrapper: MetadataWrapper) -> Any:
    """What `wrapper.resolve(ScopeProvider)` gives, without the walk over all nodes that it makes for nothing."""
    for provider in (ExpressionContextProvider(), ScopeProvider()):
        with provider.resolve(wrapper):
            provider.visit_Module(wrapper.module)
        wrapper._metadata[type(provider)] = provider._computed
    return wrapper._metadata[ScopeProvider]


class Tree:
    """A module with what the rules ask about it.

    Raises:
        libcst.ParserSyntaxError: the text is no Python.
    """

    def __init__(self, text: str) -> None:
        # The parser's tree has no node twice, so the wrapper's deep copy is not needed.
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.text = text
        self.module = wrapper.module
        self._scopes = _resolve_scopes(wrapper)
        self._parent, self.nodes = _walk(self.module)
        self.scopes: set[Scope] = {scope for scope in self._scopes.values() if scope is not None}
        self.imported_names = {
            assignment.name.split(".")[0]
            for scope in self.scopes
            for assignment in scope.assignments
            if isinstance(assignment, ImportAssignment)
        }
        stars = [each for each in self.nodes if type(each) is cst.ImportFrom and isinstance(each.names, cst.ImportStar)]
        # `torch` that nothing in the file binds came with one of its `from x import *`.
        self.torch_by_star = bool(stars) and not self.is_bound("torch")
        if self.torch_by_star:
            self.imported_names.add("torch")
        self._starts = [0, *(match.end() for match in re.finditer(r"\r\n?|\n", text))]

    @functools.cached_property
    def attributes(self) -> list[cst.Attribute]:
        """Every `x.y`, in order."""
        return [each for each in self.nodes if type(each) is cst.Attribute]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node around this one; the module is its own."""
        return self._parent.get(node, self.module)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around this one, from the nearest to the module."""
        while node is not self.module:
            node = self.parent(node)
            yield node

    def enclosing(self, node: cst.CSTNode, *kinds: Any) -> cst.CSTNode | None:
        """The nearest node around this one of one of these kinds."""
        return next((parent for parent in self.parents(node) if isinstance(parent, kinds)), None)

    def scope(self, node: cst.CSTNode) -> Scope:
        """The scope that this node's names are looked up in."""
        for around in (node, *self.parents(node)):
            scope = self._scopes.get(around)
            if scope is not None:
                return scope  # type: ignore[no-any-return]
        raise AssertionError("a module has a scope")

    def imported(self, node: cst.CSTNode) -> str | None:
        """The full name of what `a.b.c` is by the file's imports; AMBIGUOUS when there are several.

        None when it is not imported; a relative import begins with a dot.
        """
        name = dotted(node)
        if name is None or name.split(".")[0] not in self.imported_names:
            return None
        if self.torch_by_star and name.split(".")[0] == "torch":
            return name
        found = self.scope(node).get_qualified_names_for(name)
        names = {each.name for each in found}
        if any(each.source is not QualifiedNameSource.IMPORT for each in found):
            # An assignment beside an import of the same name, or a name of another kind.
            return AMBIGUOUS if any(name.startswith("torch.cuda") for name in names) else None
        if len(names) != 1:
            return AMBIGUOUS if any(name.startswith("torch.cuda") for name in names) else None
        return names.pop()

    def name_of(self, full: str, node: cst.CSTNode) -> str | None:
        """A name by which the module `full` can be reached at `node`; None when there is none."""
        scope = self.scope(node)
        candidates = [full, *sorted(self.imported_names)]
        for name in candidates:
            if name in self.imported_names:
                found = scope.get_qualified_names_for(name)
                if {(each.name, each.source) for each in found} == {(full, QualifiedNameSource.IMPORT)}:
                    return name
        return None

    def is_bound(self, name: str) -> bool:
        """Whether anything in the file gives this name a meaning."""
        return any(name in scope._assignments for scope in self.scopes)

    def locate(self, nodes: Iterable[cst.CSTNode]) -> dict[cst.CSTNode, tuple[int, int]]:
        """Where these nodes begin and end in the text, without their parentheses.

        Raises:
            ValueError: the tree does not give the text again.
        """
        state = _Spans(self.module.default_indent, self.module.default_newline, wanted=set(nodes))
        self.module._codegen(state)
        if "".join(state.tokens) != self.text:
            raise ValueError("the tree does not give the text again")
        offsets = [0]
        for token in state.tokens:
            offsets.append(offsets[-1] + len(token))
        return {node: (offsets[start], offsets[end]) for node, (start, end) in state.spans.items()}

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column, both from 1."""
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """A line of the text, from 1."""
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[self._starts[number - 1] : end]


@dataclass
class _Spans(CodegenState):
    """Generates the text and notes at which tokens the wanted nodes begin and end."""

    wanted: set[cst.CSTNode] = field(default_factory=set)
    spans: dict[cst.CSTNode, tuple[int, int]] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    def before_codegen(self, node: cst.CSTNode) -> None:
        if node in self.wanted:
            self._open.append(len(self.tokens))

    def after_codegen(self, node: cst.CSTNode) -> None:
        if node in self.wanted:
            start = self._open.pop()
            self.spans.setdefault(node, (start, len(self.tokens)))

    @contextmanager
    def record_syntactic_position(
        self,
        node: cst.CSTNode,
        *,
        start_node: cst.CSTNode | None = None,
        end_node: cst.CSTNode | None = None,
    ) -> Generator[None]:
        start = len(self.tokens)
        yield
        if node in self.wanted and start_node is None and end_node is None:
            self.spans[node] = (start, len(self.tokens))

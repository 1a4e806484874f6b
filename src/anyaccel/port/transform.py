# SPDX-License-Identifier: Apache-2.0
"""Makes the fixes: replaces nodes of the tree, inner ones first, and writes the text again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import libcst as cst

from anyaccel.port.candidate import Candidate, Fix
from anyaccel.port.fstrings import free_quotes
from anyaccel.port.tree import Tree

if TYPE_CHECKING:
    from anyaccel.port.imports import Imports


class _Requote(cst.CSTTransformer):
    """Gives the strings of a fix other quotes than those of the f-string that it stands in."""

    def __init__(self, quote: str, old: cst.CSTNode) -> None:
        super().__init__()
        self._quote = quote
        self._kept = set(_strings(old))

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        if original_node in self._kept:
            return updated_node
        return updated_node.with_changes(value=f"{self._quote}{updated_node.raw_value}{self._quote}")


class _Replace(cst.CSTTransformer):
    def __init__(
        self, fixes: Mapping[cst.CSTNode, Fix], padded: set[cst.CSTNode], quotes: Mapping[cst.CSTNode, str]
    ) -> None:
        super().__init__()
        self._fixes = fixes
        self._padded = padded
        self._quotes = quotes

    def on_visit(self, node: cst.CSTNode) -> bool:
        return True

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        fix = self._fixes.get(original_node)
        if fix is None:
            return updated_node
        new: cst.CSTNode | cst.RemovalSentinel = fix(updated_node)
        if original_node in self._quotes and isinstance(new, cst.CSTNode):
            requoted = new.visit(_Requote(self._quotes[original_node], updated_node))
            assert isinstance(requoted, cst.CSTNode)
            new = requoted
        if original_node in self._padded and isinstance(new, cst.BaseExpression) and not new.lpar:
            return new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return new


def apply(
    tree: Tree, candidates: Sequence[Candidate], imports: Imports, spans: Mapping[cst.CSTNode, tuple[int, int]]
) -> str:
    """The text with these fixes and the imports that they need."""
    fixes = {each.replaced: each.fix for each in candidates if each.fix is not None}
    padded = {node for node in fixes if node in spans and _touches(tree.text, *spans[node])}
    quotes = {node: free for node in fixes if '"' not in (free := free_quotes(tree, node))}
    module = tree.module.visit(_Replace({**fixes, **imports.removals()}, padded, quotes))
    assert isinstance(module, cst.Module)
    return imports.insert(module).code


def _strings(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.SimpleString):
        yield node
    for child in node.children:
        yield from _strings(child)


def _touches(text: str, start: int, end: int) -> bool:
    """Whether a keyword stands at a quote without a blank, as in `return'cuda'`: a name there would join it."""
    before, after = text[start - 1 : start], text[end : end + 1]
    return (text[start : start + 1] in "'\"" and _joins(before)) or (text[end - 1 : end] in "'\"" and _joins(after))


def _joins(character: str) -> bool:
    return character.isalnum() or character == "_"

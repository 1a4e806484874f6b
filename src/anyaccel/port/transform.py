# SPDX-License-Identifier: Apache-2.0
"""Makes the fixes: replaces nodes of the tree, inner ones first, and writes the text again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import libcst as cst

from anyaccel.port.candidate import Candidate, Fix
from anyaccel.port.tree import Tree

if TYPE_CHECKING:
    from anyaccel.port.imports import Imports


class _Replace(cst.CSTTransformer):
    def __init__(self, fixes: Mapping[cst.CSTNode, Fix], padded: set[cst.CSTNode]) -> None:
        super().__init__()
        self._fixes = fixes
        self._padded = padded

    def on_visit(self, node: cst.CSTNode) -> bool:
        return True

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        fix = self._fixes.get(original_node)
        if fix is None:
            return updated_node
        new: cst.CSTNode | cst.RemovalSentinel = fix(updated_node)
        if original_node in self._padded and isinstance(new, cst.BaseExpression) and not new.lpar:
            return new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return new


def apply(
    tree: Tree, candidates: Sequence[Candidate], imports: Imports, spans: Mapping[cst.CSTNode, tuple[int, int]]
) -> str:
    """The text with these fixes and the imports that they need."""
    fixes = {each.replaced: each.fix for each in candidates if each.fix is not None}
    padded = {node for node in fixes if node in spans and _touches(tree.text, *spans[node])}
    module = tree.module.visit(_Replace({**fixes, **imports.removals()}, padded))
    assert isinstance(module, cst.Module)
    return imports.insert(module).code


def _touches(text: str, start: int, end: int) -> bool:
    """Whether a keyword stands at a quote without a blank, as in `return'cuda'`: a name there would join it."""
    before, after = text[start - 1 : start], text[end : end + 1]
    return (text[start : start + 1] in "'\"" and _joins(before)) or (text[end - 1 : end] in "'\"" and _joins(after))


def _joins(character: str) -> bool:
    return character.isalnum() or character == "_"

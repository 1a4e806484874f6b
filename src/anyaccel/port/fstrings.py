# SPDX-License-Identifier: Apache-2.0
"""What the braces of an f-string do not allow."""

from __future__ import annotations

import libcst as cst

from anyaccel.port.tree import Tree


def free_quotes(tree: Tree, node: cst.CSTNode) -> str:
    """The quotes that a string at this node can have: before Python 3.12 none of those of the f-strings around it."""
    taken = {each.end for each in tree.parents(node) if isinstance(each, cst.FormattedString)}
    return "".join(quote for quote in "\"'" if quote not in taken)


def shows_code(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether an f-string has the code of this node in its text: f"{x.is_cuda=}"."""
    return any(isinstance(each, cst.FormattedStringExpression) and each.equal for each in tree.parents(node))

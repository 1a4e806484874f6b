# SPDX-License-Identifier: Apache-2.0
"""Lines that merely name CUDA: a variable such as use_cuda, a text for people. No rule is about them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Container, Iterator

_CUDA = re.compile("cuda", re.IGNORECASE)
_TYPE = re.compile(r"#\s*type:.*cuda", re.IGNORECASE)


def mentions(text: str, told: Container[int]) -> tuple[int, ...]:
    """Lines whose code has "cuda" in a name, a text or the comment of a type, other than those of findings.

    Args:
        text: of a module; without lines where Python cannot read it, which is told as an error.
        told: lines with a finding.
    """
    if not _CUDA.search(text):
        return ()
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    docstrings = set(_docstrings(module))
    lines = {
        node.lineno  # type: ignore[attr-defined]
        for node in ast.walk(module)
        if id(node) not in docstrings and any(_CUDA.search(each) for each in _words(node))
    }
    lines.update(_typed_by_comment(text))
    return tuple(sorted(line for line in lines if line not in told))


def _typed_by_comment(text: str) -> Iterator[int]:
    """Lines with a comment that says a type: `# type: (torch.Tensor) -> torch.cuda.FloatTensor`."""
    if not _TYPE.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _TYPE.match(token.string):
            yield token.start[0]


def _words(node: ast.AST) -> Iterator[str]:
    """Every text and every name in a node itself: of variables, attributes, arguments, imports, functions, patterns."""
    for _, value in ast.iter_fields(node):
        yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


def _docstrings(module: ast.Module) -> Iterator[int]:
    """Texts that are statements: documentation, by which nothing is done."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)

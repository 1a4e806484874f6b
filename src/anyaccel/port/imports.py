# SPDX-License-Identifier: Apache-2.0
"""The imports of a ported file: get_accelerator once and in its sorted place; none that lost its use."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port.module import GET_ACCELERATOR, PACKAGE, SEVERAL, Edit, Module, dotted
from anyaccel.port.notebook import CELL_MARK
from anyaccel.port.rule import Match


def imports(module: Module, fixed: Sequence[Match], removes: bool) -> list[Edit]:
    """The edits of the imports that these fixed places need.

    Args:
        module: the file.
        fixed: the places whose edits are made.
        removes: drop imports from torch.cuda that have no use any more.
    """
    edits = list(_removals(module, fixed)) if removes else []
    lines = []
    if any(each.imports_torch for each in fixed) and not module.is_global("torch"):
        lines.append("import torch")
    written = any(f"{module.accelerator}()" in edit.text for each in fixed for edit in each.edits)
    if written and not module.has_accelerator:
        renamed = "" if module.accelerator == GET_ACCELERATOR else f" as {module.accelerator}"
        lines.append(f"from {PACKAGE} import {GET_ACCELERATOR}{renamed}")
    if lines:
        edits += _insertions(module, lines, min(edit.start for each in fixed for edit in each.edits))
    return edits


def _removals(module: Module, fixed: Sequence[Match]) -> Iterator[Edit]:
    """Names imported from torch.cuda go when every use of them was replaced."""
    replaced = {each.node for each in fixed}
    gone: dict[cst.CSTNode, set[str]] = {}
    torch_stays = any(isinstance(each, cst.Import) and _binds_torch(each) for each, _ in _imports(module))
    for name, assignment in module.imported():
        if "." in name and not torch_stays:
            continue  # `import torch.cuda` is also what gives the file its `torch`
        uses = [access.node for access in assignment.references]
        full = {module.full_name(use) for use in uses}
        if (
            uses
            and all(each.startswith("torch.cuda") and each != SEVERAL for each in full)
            and all(any(node in replaced for node in (use, module.parent(use))) for use in uses)
        ):
            gone.setdefault(assignment.node, set()).add(name)
    for statement, names in gone.items():
        line = module.parent(statement)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        start, end = module.span(line)
        commented = b"#" in module.data[start : _after_line(module, end)]
        if not alone or not isinstance(module.parent(line), cst.Module) or commented:
            continue
        assert isinstance(statement, cst.Import | cst.ImportFrom)
        kept = [each for each in statement.names if (each.evaluated_alias or each.evaluated_name) not in names]  # type: ignore[union-attr]
        if not kept:
            start, end = module.span(statement)
            yield Edit(start, _after_line(module, end), "")
        elif isinstance(statement, cst.ImportFrom) and not statement.lpar:
            first, last = statement.names[0], statement.names[-1]  # type: ignore[index]
            text = ", ".join(module.source(each) for each in kept)
            yield Edit(module.span(first)[0], module.span(last)[1], re.sub(r",\s*$", "", re.sub(r",\s*,", ",", text)))


def _binds_torch(statement: cst.Import) -> bool:
    return any(each.evaluated_name == "torch" and each.asname is None for each in statement.names)


def _after_line(module: Module, offset: int) -> int:
    end = module.data.find(b"\n", offset)
    return len(module.data) if end < 0 else end + 1


def _insertions(module: Module, lines: Sequence[str], first_use: int) -> Iterator[Edit]:
    newline = module.tree.default_newline
    text = "".join(line + newline for line in lines)
    place, lead, tail = _place(module, first_use)
    yield Edit(place, place, lead * newline + text + tail * newline)
    if CELL_MARK in module.text:  # cells are run in any order: each that imports torch brings the name too
        done = {module.data.count(CELL_MARK.encode(), 0, place)}
        for statement, line in _imports(module):
            apart = len(line.body) > 1  # what follows in the same line may use the name
            at = _line_start(module, line) if apart else _after_line(module, module.span(line)[1])
            cell = module.data.count(CELL_MARK.encode(), 0, at)
            if _root(statement) == "torch" and cell not in done:
                done.add(cell)
                yield Edit(at, at, text)


def _place(module: Module, first_use: int) -> tuple[int, int, int]:
    """Where the import goes, and the blank lines before and after it: among the first imports of other packages.

    As isort and ruff sort them, `import x` stands before `from x import y`, these by their names.
    """
    group: list[tuple[cst.Import | cst.ImportFrom, cst.SimpleStatementLine]] = []
    previous: cst.SimpleStatementLine | None = None
    for statement, line in _imports(module):
        if module.span(line)[1] > first_use:  # `import torch; x = torch.zeros(2).cuda()` is one line
            break
        if _root(statement) == "__future__":
            continue
        apart = any(each.comment is None for each in line.leading_lines) or _follows(module, previous) is not line
        if group and apart and any(_is_third_party(each) for each, _ in group):
            break
        group = [(statement, line)] if apart and _is_third_party(statement) else [*group, (statement, line)]
        previous = line
    third_party = [(statement, line) for statement, line in group if _is_third_party(statement)]
    for statement, line in third_party:
        if isinstance(statement, cst.ImportFrom) and _name(statement).lower() > PACKAGE:
            return _line_start(module, line), 0, 0
    if third_party:
        return _after_line(module, module.span(third_party[-1][1])[1]), 0, 0
    if group:
        return _after_line(module, module.span(group[-1][1])[1]), 1, 0
    start = _after_docstring(module)
    return start, int(start > 0), 1


def _follows(module: Module, line: cst.SimpleStatementLine | None) -> cst.CSTNode | None:
    """The statement after this line."""
    if line is None:
        return None
    body = module.tree.body
    index = body.index(line) + 1
    return body[index] if index < len(body) else None


def _imports(module: Module) -> Iterator[tuple[cst.Import | cst.ImportFrom, cst.SimpleStatementLine]]:
    """The imports at the top level of the module, each in a line of its own."""
    for line in module.tree.body:
        if isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.Import | cst.ImportFrom):
            yield line.body[0], line


def _line_start(module: Module, line: cst.SimpleStatementLine) -> int:
    return module.span(line.body[0])[0]


def _after_docstring(module: Module) -> int:
    """Where the first statement after the docstring and `from __future__` begins, its comments included."""
    end = 0
    for number, line in enumerate(module.tree.body):
        if not isinstance(line, cst.SimpleStatementLine):
            break
        first = line.body[0]
        future = isinstance(first, cst.ImportFrom) and _root(first) == "__future__"
        docstring = number == 0 and module.tree.get_docstring(clean=False) is not None
        if not future and not docstring:
            break
        end = _after_line(module, module.span(line)[1])
    if not end:  # after the comments at the top: the interpreter, the encoding, the licence
        for each in module.tree.header:
            end += len(module.tree.code_for_node(each).encode("utf-8"))
    return end


def _name(statement: cst.Import | cst.ImportFrom) -> str:
    if isinstance(statement, cst.Import):
        return dotted(statement.names[0].name)
    return "." * len(statement.relative) + dotted(statement.module)


def _root(statement: cst.Import | cst.ImportFrom) -> str:
    return _name(statement).split(".")[0]


def _is_third_party(statement: cst.Import | cst.ImportFrom) -> bool:
    root = _root(statement)
    return bool(root) and root not in sys.stdlib_module_names

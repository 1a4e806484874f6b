# SPDX-License-Identifier: Apache-2.0
"""The imports of a ported file: get_accelerator once and in its sorted place; none that lost its use."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import libcst as cst
from libcst.metadata.scope_provider import ImportAssignment

from anyaccel.port.candidate import Candidate, Fix
from anyaccel.port.context import GET_ACCELERATOR, Context
from anyaccel.port.syntax import dotted
from anyaccel.port.tables import CELL_MARK

PACKAGE = "anyaccel"


class Imports:
    """What the fixes of one file mean for its imports."""

    def __init__(self, ctx: Context, fixed: Sequence[Candidate], removes: bool) -> None:
        self._ctx = ctx
        self._fixed = fixed
        self._removes = removes
        self._wants_accelerator = any(each.needs_accelerator for each in fixed) and not ctx.has_accelerator
        self._wants_torch = any(each.needs_torch for each in fixed) and not ctx.tree.is_bound("torch")
        self._wants_torch = self._wants_torch and not ctx.tree.torch_by_star

    # Removing -----------------------------------------------------------------------------------------------

    def removals(self) -> dict[cst.CSTNode, Fix]:
        """Fixes that take away names imported from torch.cuda when every use of them was replaced."""
        if not self._removes:
            return {}
        tree = self._ctx.tree
        replaced = {each.replaced for each in self._fixed} | {each.node for each in self._fixed}
        gone: dict[cst.CSTNode, set[cst.CSTNode]] = {}
        for scope in tree.scopes:
            for assignment in scope.assignments:
                if isinstance(assignment, ImportAssignment) and self._is_unused(assignment, replaced):
                    gone.setdefault(assignment.node, set()).add(assignment.as_name)
        fixes: dict[cst.CSTNode, Fix] = {}
        for statement, names in gone.items():
            line = tree.parent(statement)
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1 or not self._may_go(line):
                continue
            assert isinstance(statement, cst.Import | cst.ImportFrom)
            if isinstance(statement.names, cst.ImportStar):
                continue
            left = [each for each in statement.names if _bound(each) not in {_text(name) for name in names}]
            if not left:
                fixes[line] = _remove_line
                self._keep_blank(line, fixes)
            elif not isinstance(statement, cst.ImportFrom) or not statement.lpar:
                fixes[statement] = _keep_names(left)
        return fixes

    def _keep_blank(self, line: cst.SimpleStatementLine, fixes: dict[cst.CSTNode, Fix]) -> None:
        """Give the blank line before a line that goes to the one after it, which begins the group of imports then."""
        block = self._ctx.tree.parent(line)
        body = list(block.body) if isinstance(block, cst.Module | cst.IndentedBlock) else []
        index = next((at for at, each in enumerate(body) if each is line), len(body))
        following = body[index + 1] if index + 1 < len(body) else None
        lead = getattr(following, "leading_lines", None)
        if index == 0 or following is None or lead is None or not line.leading_lines or following in fixes:
            return
        if any(each.comment is None for each in lead):
            return

        def fix(node: cst.CSTNode) -> cst.CSTNode:
            return node.with_changes(leading_lines=[*line.leading_lines, *node.leading_lines])  # type: ignore[attr-defined]

        fixes[following] = fix

    def _is_unused(self, assignment: ImportAssignment, replaced: set[cst.CSTNode]) -> bool:
        full = {name.name for name in assignment.get_qualified_names_for(assignment.name)}
        if len(full) != 1 or not next(iter(full)).startswith("torch.cuda") or "." in assignment.name:
            return False
        if len(assignment.scope[assignment.name]) != 1:
            return False
        uses = [access.node for access in assignment.references]
        return bool(uses) and all(self._is_within(use, replaced) for use in uses)

    def _is_within(self, node: cst.CSTNode, replaced: set[cst.CSTNode]) -> bool:
        return any(
            each in replaced
            for each in (node, *self._ctx.tree.parents(node))
            if not isinstance(each, cst.BaseStatement)
        )

    def _may_go(self, line: cst.SimpleStatementLine) -> bool:
        """Not from a try or if, where it may be the point, and not when it is the only statement of a block."""
        block = self._ctx.tree.parent(line)
        if isinstance(line.trailing_whitespace.comment, cst.Comment) or any(
            each.comment for each in line.leading_lines
        ):
            return False
        if isinstance(block, cst.Module):
            return True
        return (
            isinstance(block, cst.IndentedBlock)
            and isinstance(self._ctx.tree.parent(block), cst.FunctionDef)
            and len(block.body) > 1
        )

    # Inserting ----------------------------------------------------------------------------------------------

    def insert(self, module: cst.Module) -> cst.Module:
        """The module with what the fixes need imported."""
        statements = []
        if self._wants_torch:
            statements.append("import torch")
        if self._wants_accelerator:
            as_name = "" if self._ctx.accelerator == GET_ACCELERATOR else f" as {self._ctx.accelerator}"
            statements.append(f"from {PACKAGE} import {GET_ACCELERATOR}{as_name}")
        first_fix = self._first_fixed(module)
        for statement in statements:
            module = _insert(module, statement, first_fix)
            first_fix += 1
        if self._wants_accelerator:
            module = _beside_torch(module, statements[-1])
        return module

    def _first_fixed(self, module: cst.Module) -> int:
        """The first statement of the new module that differs from the old one's."""
        for index, (old, new) in enumerate(zip(self._ctx.tree.module.body, module.body, strict=False)):
            if old is not new and not old.deep_equals(new):
                return index
        return len(module.body)


def _remove_line(_node: cst.CSTNode) -> cst.RemovalSentinel:
    return cst.RemovalSentinel.REMOVE


def _keep_names(left: Sequence[cst.ImportAlias]) -> Fix:
    def fix(node: cst.CSTNode) -> cst.CSTNode:
        last = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=[*left[:-1], last])

    return fix


def _bound(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name


def _text(node: cst.CSTNode) -> str:
    if isinstance(node, cst.AsName):
        node = node.name
    return dotted(node) or ""


def _imports(statement: cst.CSTNode) -> cst.Import | cst.ImportFrom | None:
    """The import of a line that holds just one."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    only = statement.body[0]
    return only if isinstance(only, cst.Import | cst.ImportFrom) else None


def _module_name(statement: cst.Import | cst.ImportFrom) -> str:
    if isinstance(statement, cst.Import):
        return dotted(statement.names[0].name) or ""
    dots = "." * len(statement.relative)
    return dots + ((dotted(statement.module) or "") if statement.module is not None else "")


def _is_third_party(statement: cst.Import | cst.ImportFrom) -> bool:
    name = _module_name(statement)
    return not name.startswith(".") and name.split(".")[0] not in sys.stdlib_module_names


def _insert(module: cst.Module, text: str, first_fix: int) -> cst.Module:
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    new = _imports(line)
    assert new is not None
    start = _after_docstring(module)
    # Only what runs before the first use counts.
    block = [
        (index, found)
        for index, statement in enumerate(module.body)
        if start <= index < max(first_fix, start)
        for found in [_imports(statement)]
        if found is not None
    ]
    index = _sorted_place(module, block, new) if block else start
    return _place(module, line, index)


def _beside_torch(module: cst.Module, text: str) -> cst.Module:
    """A notebook with the import also in all other cells that import torch: cells are run in any order, or left out.

    Whoever has come to a place that needs the name has run one of those, since the place needed torch before.
    """
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    name = dotted(cst.ensure_type(line.body[0], cst.ImportFrom).module or cst.Name(PACKAGE))
    cells: list[list[int]] = []
    for index, statement in enumerate(module.body):
        above = module.header if index == 0 else ()
        if any(_is_mark(each) for each in (*above, *getattr(statement, "leading_lines", ()))):
            cells.append([])
        if cells:
            cells[-1].append(index)
    body = list(module.body)
    for cell in reversed(cells):
        imports = [(index, found) for index in cell if (found := _imports(module.body[index])) is not None]
        torch = next((index for index, found in imports if _module_name(found).split(".")[0] == "torch"), None)
        if torch is not None and all(_module_name(found) != name for _, found in imports):
            body.insert(torch + 1, line)
    return module.with_changes(body=body)


def _after_docstring(module: cst.Module) -> int:
    """Where the first statement after the docstring and `from __future__` is."""
    index = 0
    if module.body and module.get_docstring(clean=False) is not None:
        index = 1
    for position, statement in enumerate(module.body):
        found = _imports(statement)
        if isinstance(found, cst.ImportFrom) and _module_name(found) == "__future__":
            index = position + 1
    return index


def _key(statement: cst.Import | cst.ImportFrom) -> tuple[bool, str]:
    return isinstance(statement, cst.ImportFrom), _module_name(statement).lower()


def _sorted_place(
    module: cst.Module, block: list[tuple[int, cst.Import | cst.ImportFrom]], new: cst.Import | cst.ImportFrom
) -> int:
    """Where isort and ruff would have it: among the first third-party imports, `import x` before `from x import y`."""
    section = _section(module, block)
    third_party = [(index, each) for index, each in section if _is_third_party(each)]
    if not third_party:
        return section[-1][0] + 1
    names = [_module_name(each).lower() for _, each in third_party]
    keys = [_key(each) for _, each in third_party]
    if [plain for plain, _ in keys] == sorted(plain for plain, _ in keys):
        before = [index for (index, _), key in zip(third_party, keys, strict=True) if key < _key(new)]
    elif names == sorted(names):
        before = [
            index for (index, _), name in zip(third_party, names, strict=True) if name < _module_name(new).lower()
        ]
    else:  # in no order: after the first run of plain imports
        runs = itertools.takewhile(lambda each: isinstance(each[1], cst.Import), third_party)
        before = [index for index, _ in runs]
    return max(before) + 1 if before else third_party[0][0]


def _section(
    module: cst.Module, block: list[tuple[int, cst.Import | cst.ImportFrom]]
) -> list[tuple[int, cst.Import | cst.ImportFrom]]:
    """The group of imports, ended by a blank line, with the first third-party import; else the last one."""
    groups: list[list[tuple[int, cst.Import | cst.ImportFrom]]] = []
    for index, found in block:
        statement = module.body[index]
        assert isinstance(statement, cst.SimpleStatementLine)
        blank = any(each.comment is None or _is_mark(each) for each in statement.leading_lines)
        if not groups or blank or groups[-1][-1][0] != index - 1:
            groups.append([])
        groups[-1].append((index, found))
    third_party = [group for group in groups if any(_is_third_party(each) for _, each in group)]
    if third_party:
        return third_party[0]
    stdlib = [group for group in groups if any(not _module_name(each).startswith(".") for _, each in group)]
    return stdlib[-1] if stdlib else groups[0]


def _place(module: cst.Module, line: cst.SimpleStatementLine, index: int) -> cst.Module:
    """Insert the line before the statement at `index`; comments stay with the statement that they precede."""
    body = list(module.body)
    gap = cst.EmptyLine(indent=False)
    following = body[index] if index < len(body) else None
    lead: list[cst.EmptyLine] = list(getattr(following, "leading_lines", ()))
    following_is_apart = following is None or not _is_third_party_line(following) or bool(lead)
    if index == 0 or not _is_third_party_line(body[index - 1]):
        moved = _own_lines(lead)
        first = index == 0 and not module.header
        above = [each for each in lead[:moved] if not first or each.comment is not None]
        joined = index and _imports(body[index - 1]) is not None and following is not None and not following_is_apart
        line = line.with_changes(leading_lines=above or ([gap] if index and not joined else []))
        lead = lead[moved:]
        if following is not None:
            if not _is_third_party_line(following) and not (lead and lead[0].comment is None):
                lead = [gap] * (2 if isinstance(following, cst.FunctionDef | cst.ClassDef) else 1) + lead
            body[index] = following.with_changes(leading_lines=lead)
    body.insert(index, line)
    return module.with_changes(body=body)


def _is_third_party_line(statement: cst.CSTNode) -> bool:
    found = _imports(statement)
    return found is not None and _is_third_party(found)


def _own_lines(lead: Sequence[cst.EmptyLine]) -> int:
    """How many of the lines before a statement go before what is inserted there: blanks, and a notebook's cell mark."""
    marks = [position for position, each in enumerate(lead) if _is_mark(each)]
    if marks:
        return marks[-1] + 1
    count = 0
    while count < len(lead) and lead[count].comment is None:
        count += 1
    return count


def _is_mark(line: cst.EmptyLine) -> bool:
    return line.comment is not None and line.comment.value.startswith(CELL_MARK)

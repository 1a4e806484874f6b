# SPDX-License-Identifier: Apache-2.0
"""Devices that a test only speaks of: it passes on a machine without a GPU, since it puts nothing on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context

_TEST = re.compile(r"test_\w+|test[A-Z]\w*")
# What a mark, a name or a function is called where a test is run with a GPU only.
_WANTS_A_GPU = re.compile(r"cuda|gpu|nvidia|skip|requires?_(?!grad)|accelerator|available", re.IGNORECASE)
_PRETENDS = re.compile(r"\b(?:patch|setattr)(?:\.\w+)*\([^)]*torch\.cuda")
_STRINGS = re.compile(r"('{3}|\"{3}).*?\1|'[^'\n]*'|\"[^\"\n]*\"|#[^\n]*", re.DOTALL)
_TWO_READINGS = (
    "this test puts nothing on it for sure, so it may pass without a GPU; two readings: a name among others (leave "
    "it), or the device that is tested (use `get_accelerator().device_name(...)`, and compare with it)"
)


def leave_pretended(ctx: Context, candidates: Sequence[Candidate]) -> None:
    """Leave the devices of tests that need none: what such a test expects would no longer be what it gets."""
    by_test: dict[cst.FunctionDef, list[Candidate]] = {}
    for each in candidates:
        test = next((around for around in _functions(ctx, each.node) if _TEST.fullmatch(around.name.value)), None)
        if test is not None:
            by_test.setdefault(test, []).append(each)
    for test, own in by_test.items():
        named = [each for each in own if each.code == "ACC201" and each.fix is not None]
        text = ctx.tree.module.code_for_node(test) if named else ""
        # Where a part of torch.cuda is replaced, there only seems to be a GPU.
        pretends = _PRETENDS.search(text) is not None
        if named and (pretends or not (_needs_one(ctx, own) or _is_for_gpus(ctx, test, text, candidates))):
            for each in named:
                each.unfixed(_TWO_READINGS)
                each.breaks = False


def _functions(ctx: Context, node: cst.CSTNode) -> Iterator[cst.FunctionDef]:
    return (each for each in ctx.tree.parents(node) if isinstance(each, cst.FunctionDef))


def _needs_one(ctx: Context, own: Sequence[Candidate]) -> bool:
    """Whether something in the test fails, or is not run, without a GPU."""
    for each in own:
        if each.code == "ACC201":
            if any(_is_put_on(found) for found in _roles(ctx, each)):
                return True
        elif each.code != "ACC202" and not each.harmless and (each.guard or each.breaks or each.fix is not None):
            return True
    return False


def _roles(ctx: Context, candidate: Candidate) -> Iterator[usage.Role]:
    """How the device is used, also under the name of a variable and as a torch.device."""
    nodes = [candidate.node]
    while nodes:
        node = nodes.pop()
        found = usage.role(ctx.tree, node)
        if found.callee == "torch.device" and found.call is not None:
            nodes.append(found.call)
            continue
        yield found
        parent = ctx.tree.parent(node)
        if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
            target = parent.targets[0].target
            nodes += ctx.uses(target) if isinstance(target, cst.Name) else []


def _is_put_on(found: usage.Role) -> bool:
    return found.callee.startswith("torch.") or found.callee in (".to", ".cuda") or found.kind == "other"


def _is_for_gpus(ctx: Context, test: cst.FunctionDef, text: str, candidates: Sequence[Candidate]) -> bool:
    """Whether the test, its class or its file says that it needs a GPU, or asks for something before it runs."""
    classes = [each for each in ctx.tree.parents(test) if isinstance(each, cst.ClassDef)]
    around: list[cst.FunctionDef | cst.ClassDef] = [test, *classes]
    texts = [ctx.tree.module.code_for_node(mark) for each in around for mark in each.decorators]
    texts += [_STRINGS.sub("", text), *(each.name.value for each in around)]
    for line in ctx.tree.module.body:
        text = ctx.tree.module.code_for_node(line) if isinstance(line, cst.SimpleStatementLine) else ""
        texts += [text] if "pytestmark" in text else []
    return any(_WANTS_A_GPU.search(text) for text in texts) or any(
        each.guard and _runs_before(ctx, each, classes) for each in candidates
    )


def _runs_before(ctx: Context, guard: Candidate, classes: Sequence[cst.CSTNode]) -> bool:
    """Whether a guard stands where the module or the class of a test is set up and may end it."""
    function = next(_functions(ctx, guard.node), None)
    if function is not None:
        mine = any(each in classes for each in ctx.tree.parents(function))
        return mine and "setup" in function.name.value.lower().replace("_", "")
    # `if not torch.cuda.is_available(): pytest.skip(...)`; an assignment is asked by its name.
    return ctx.tree.enclosing(guard.node, cst.If) is not None

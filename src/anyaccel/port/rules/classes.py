# SPDX-License-Identifier: Apache-2.0
"""Classes of torch.cuda that the accelerator has: streams, events, and typed tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.cuda_names import CLASSES, TYPED_TENSORS
from anyaccel.port.module import Module, text_of
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import is_text

RULE = Rule(
    code="ACC106",
    title="torch.cuda.Stream, Event, FloatTensor and the like",
    tier=Tier.SAFE,
    why="The accelerator has them under the same names; streams and events of a synchronous device have nothing to "
    "wait for. Typed tensors make tensors, are known to isinstance(), and are the texts that `x.type()` gives and "
    "takes.",
    before="""\
start, s = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
x = torch.cuda.FloatTensor(2, 3)
if y.type() == 'torch.cuda.HalfTensor':
    y = y.type('torch.cuda.LongTensor')""",
    after="""\
start, s = get_accelerator().Event(enable_timing=True), get_accelerator().Stream()
x = get_accelerator().FloatTensor(2, 3)
if y.type() == get_accelerator().HalfTensor:
    y = y.type(get_accelerator().LongTensor)""",
)
_TYPE = re.compile(rf"torch\.cuda\.({'|'.join(TYPED_TENSORS)})")


@RULE.on_name(*(f"torch.cuda.{name}" for name in (*CLASSES, *TYPED_TENSORS)))
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """A class, whatever is done with it."""
    name = full.rpartition(".")[2]
    yield Match(
        node, f"`{full}`; use `get_accelerator().{name}`", (module.replace(node, f"{module.accelerator}().{name}"),)
    )


@RULE.on_node(cst.SimpleString)
def find_text(module: Module, node: cst.SimpleString) -> Iterator[Match]:
    """The name of a typed tensor in a string."""
    found = _TYPE.fullmatch(text_of(node) or "")
    if found is not None and not is_text(module, node):
        new = f"{module.accelerator}().{found[1]}"
        yield Match(node, f"`{found[0]}`; use `get_accelerator().{found[1]}`", (module.replace(node, new),))

# SPDX-License-Identifier: Apache-2.0
"""What a rule found in a file while it is being ported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst

# What a node is replaced with, from the node with its inner fixes made.
Fix = Callable[[cst.CSTNode], Any]


@dataclass
class Candidate:
    """One place that a rule is about.

    Attributes:
        node: is what is reported and where `# noqa` counts.
        code: of the rule.
        message: what is there, and what it becomes or what to do.
        fix: None for what is only reported.
        target: the node that the fix replaces, when it is not `node`.
        breaks: without a fix, the code cannot run on another device, so a guard around it must stay as it is.
        needs_torch: the fix writes `torch`.
        guard: the value says whether CUDA is there, so it must stay when what it guards stays.
        drops: the fix does not keep comments and layout inside the node.
        asks: left alone, it asks for CUDA itself, so what it guards stays as well.
        harmless: done on a CPU as well, the fixed statement changes nothing that its program computes.
        question: what kind of guard it is; "" for none of those that have several forms.
        start: the expression whose value is the answer, when it is not what the fix replaces.
        exact: a fix whose answer is "no" where the CPU is the accelerator.
        follows: names of devices; it is left where one of them is.
        allowed: a comment of the file says that it is to stay, so nothing else has to wait for it.
        waits: it is left for another place that stays.
        count: a number that is 0 without CUDA and at least 1 on every accelerator, used in a way where that matters.
    """

    node: cst.CSTNode
    code: str
    message: str
    fix: Fix | None = None
    target: cst.CSTNode | None = None
    breaks: bool = True
    needs_torch: bool = False
    needs_accelerator: bool = True
    guard: bool = False
    drops: bool = False
    asks: bool = False
    harmless: bool = False
    question: str = ""
    start: cst.CSTNode | None = None
    exact: Fix | None = None
    count: bool = False
    allowed: bool = False
    waits: bool = False
    follows: tuple[cst.CSTNode, ...] = ()

    @property
    def replaced(self) -> cst.CSTNode:
        return self.node if self.target is None else self.target

    @property
    def answer(self) -> cst.CSTNode:
        """The expression whose value is used."""
        return self.replaced if self.start is None else self.start

    def unfixed(self, reason: str) -> None:
        """Only report it, for this reason."""
        self.fix = None
        self.message = f"{self.message.partition('; use ')[0]}; not fixed: {reason}"

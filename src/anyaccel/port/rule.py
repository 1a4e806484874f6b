# SPDX-License-Identifier: Apache-2.0
"""What a rule is: its code, its tier, why it is so, examples, and the functions that find its places.

Two tiers, in ruff's words. A *safe* fix does, where CUDA is the accelerator, exactly what the line did, which the
place alone shows; elsewhere it takes the accelerator's way. An *unsafe* one needs a reader. A rule may also only
report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import libcst as cst

from anyaccel.port.module import Edit, Module


class Tier(StrEnum):
    """Which option makes a fix: --write, --unsafe-fixes beside it, or none."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    REPORT = "report"


@dataclass
class Match:
    """One place that a rule is about.

    Attributes:
        node: what is reported, and on whose first or last line `# ignore-cuda` counts.
        message: what is there, and what it becomes or what to do.
        edits: that port it; they never touch each other, so that places within places are ported too.
        tier: of these edits, where it is not the rule's.
        needs_cuda: without an edit this fails on every other device, so a guard around it stays.
        guards: code that runs only where the place says that CUDA is there.
        imports_torch: the edits write `torch`.
        covers: nodes within it that these edits port, so that no other rule speaks for them.
    """

    node: cst.CSTNode
    message: str
    edits: tuple[Edit, ...] = ()
    tier: Tier | None = None
    needs_cuda: bool = False
    guards: cst.CSTNode | None = None
    imports_torch: bool = False
    covers: tuple[cst.CSTNode, ...] = ()


NodeFinder = Callable[[Module, Any], Iterator[Match]]
NameFinder = Callable[[Module, cst.Name | cst.Attribute, str], Iterator[Match]]


@dataclass
class Rule:
    """A rule, with what docs/porting-rules.md says about it; each example is a test.

    Attributes:
        code: such as ACC101; the first digit says what it is about: 1 torch.cuda, 2 names of devices, 3 tensors,
            4 processes, 5 what is only reported.
        title: of a few words.
        tier: of its fixes.
        why: whole sentences: what the fix does, and why it is safe or not.
        before, after: an example that `tier` fixes; both empty for a rule that only reports.
        left: code that it reports and does not change.
    """

    code: str
    title: str
    tier: Tier
    why: str
    before: str = ""
    after: str = ""
    left: str = ""
    node_finders: list[tuple[tuple[type, ...], NodeFinder]] = field(default_factory=list, repr=False)
    name_finders: dict[str, NameFinder] = field(default_factory=dict, repr=False)

    def on_node(self, *kinds: type) -> Callable[[NodeFinder], NodeFinder]:
        """Marks a function that is called with every node of these classes of LibCST."""

        def mark(finder: NodeFinder) -> NodeFinder:
            self.node_finders.append((kinds, finder))
            return finder

        return mark

    def on_name(self, *names: str) -> Callable[[NameFinder], NameFinder]:
        """Marks a function that is called with every use of these names of torch.cuda, however they were imported.

        "torch.cuda.memory." with a dot at its end stands for all names that begin so and have no rule of their own.
        """

        def mark(finder: NameFinder) -> NameFinder:
            self.name_finders.update(dict.fromkeys(names, finder))
            return finder

        return mark

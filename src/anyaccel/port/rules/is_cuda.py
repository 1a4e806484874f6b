# SPDX-License-Identifier: Apache-2.0
"""x.is_cuda."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import guarded

RULE = Rule(
    code="ACC303",
    title=".is_cuda of tensors",
    tier=Tier.SAFE,
    why="`on_accelerator(x)` is the same question about any device; on a CPU it is true. It stays where it "
    "chooses a kernel of CUDA.",
    before="assert x.is_cuda\nif not self.weight.is_cuda:\n    y = y.cpu()",
    after="assert get_accelerator().on_accelerator(x)\n"
    "if not get_accelerator().on_accelerator(self.weight):\n    y = y.cpu()",
    left="if x.is_cuda:\n    return scan_cuda(x)",
)
# Objects whose attribute is a setting of the program.
_SETTINGS = re.compile(r"self|cls|args?|opts?|options|config|cfg|conf|flags|params|hparams|settings", re.IGNORECASE)


@RULE.on_node(cst.Attribute)
def find(module: Module, node: cst.Attribute) -> Iterator[Match]:
    """The attribute, where it is read."""
    if node.attr.value != "is_cuda" or module.is_stored(node) or _SETTINGS.fullmatch(last_name(node.value)):
        return
    edits = (
        module.before(node.value, f"{module.accelerator}().on_accelerator("),
        Edit(module.end(node.value), module.span(node)[1], ")"),
    )
    yield Match(node, "`.is_cuda`; use `get_accelerator().on_accelerator(...)`", edits, guards=guarded(module, node))

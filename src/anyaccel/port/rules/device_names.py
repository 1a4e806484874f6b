# SPDX-License-Identifier: Apache-2.0
"""Names of CUDA devices: "cuda", "cuda:0", f"cuda:{i}" and the like."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import device_text, guarded, is_key, is_listed, is_text, name_edits, use_of

RULE = Rule(
    code="ACC201",
    title="the name of a CUDA device",
    tier=Tier.SAFE,
    why="`device_name()` and `device_name(i)` are the accelerator's names, on CUDA the same texts. In a "
    "comparison the branch for CUDA becomes the accelerator's. Keys that are looked up, and lists that "
    "name the CPU as well, need a reader: on a CPU both names would be the same. Texts for people stay.",
    before="""\
x = torch.zeros(2, device='cuda')
y = x.to(f"cuda:{rank}")
device = torch.device("cuda", rank)
if x.device.type == "cuda":
    y = 1""",
    after="""\
x = torch.zeros(2, device=get_accelerator().device_name())
y = x.to(get_accelerator().device_name(rank))
device = torch.device(get_accelerator().device_name(rank))
if x.device.type == get_accelerator().device_name():
    y = 1""",
    left="""\
kernels = {"cuda": run_on_cuda, "cpu": run_on_cpu}
for device in ["cpu", "cuda"]:
    test(device)""",
)
# Parameters and variables that choose something else than a device, such as the way in which a kernel is written.
_OTHER_CHOICE = re.compile(r"impl|implementation|engine|kernel|mode|provider")
# In a list with these it is beside the CPU's name, or is itself the name of a method of tensors.
_OTHERS = ("cpu", "to", "half", "float", "double")
_MESSAGE = "a CUDA device's name; use `get_accelerator().device_name(...)`"


@RULE.on_node(cst.SimpleString, cst.FormattedString, cst.BinaryOperation, cst.Call)
def find(module: Module, node: cst.BaseExpression) -> Iterator[Match]:
    """Such a name, in all its spellings."""
    if device_text(node) is None:
        return
    if is_text(module, node):
        if is_key(module, node):
            yield Match(
                node,
                f"{_MESSAGE} where it is no key",
                name_edits(module, node),
                Tier.UNSAFE,
            )
        return
    if _asks_for_cuda(module, node):
        return
    use = use_of(module, node)
    tier = Tier.UNSAFE if is_listed(module, node, *_OTHERS) or _is_other_choice(module, node) else None
    guards = guarded(module, node) if use.kind in ("Comparison", "ComparisonTarget") else None
    edits = name_edits(module, node, use.call)
    yield Match(node, _MESSAGE, edits, tier, guards=guards)


def _is_other_choice(module: Module, node: cst.BaseExpression) -> bool:
    """Whether it is given to, or compared with, what by its name is no device."""
    if _OTHER_CHOICE.fullmatch(use_of(module, node).name):
        return True
    comparison = module.enclosing(node, cst.Comparison, cst.BaseStatement)
    if not isinstance(comparison, cst.Comparison):
        return False
    operands = [comparison.left, *(each.comparator for each in comparison.comparisons)]
    return any(_OTHER_CHOICE.fullmatch(last_name(each)) for each in operands)


def _asks_for_cuda(module: Module, node: cst.BaseExpression) -> bool:
    """Whether it is compared with the accelerator's own name, by which code asks for CUDA itself."""
    comparison = module.enclosing(node, cst.Comparison)
    return use_of(module, node).kind in ("Comparison", "ComparisonTarget") and ".device_name()" in module.code(
        comparison
    )

# SPDX-License-Identifier: Apache-2.0
"""Functions of torch.cuda that the accelerator has."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.cuda_names import CONTEXTS, FUNCTIONS
from anyaccel.port.module import Module
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import guarded

RULE = Rule(
    code="ACC101",
    title="a function of torch.cuda that every accelerator has",
    tier=Tier.SAFE,
    why="The accelerator's method does the same, and on CUDA calls that very function. Other keywords follow: "
    "`device=` becomes `device_index=`. `is_available()` is true where the CPU is the accelerator, so a "
    "guard or an assertion lets the code behind it run; a guard stays where what it guards is left with "
    "CUDA by this tool's own report.",
    before="""\
assert torch.cuda.is_available(), "needs a GPU"
torch.cuda.synchronize(device=1)
with torch.cuda.device(1):
    free, total = torch.cuda.mem_get_info()
peak = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(0).total_memory""",
    after="""\
assert get_accelerator().is_available(), "needs a GPU"
get_accelerator().synchronize(device_index=1)
with get_accelerator().device_guard(1):
    free, total = get_accelerator().mem_get_info()
peak = get_accelerator().max_memory_allocated() / get_accelerator().device_properties(0).total_memory""",
    left="""\
if torch.cuda.is_available():
    scores = fused_softmax_cuda(scores)""",
)
_METHODS = FUNCTIONS | CONTEXTS


@RULE.on_name(*(f"torch.cuda.{name}" for name in _METHODS))
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """A call or another use of such a function."""
    name = full.rpartition(".")[2]
    method = _METHODS[name]
    edits = [module.replace(node, f"{module.accelerator}().{method.name}")]
    parent = module.parent(node)
    guards = None
    if isinstance(parent, cst.Call) and parent.func is node:
        keywords = dict(method.parameters)
        for arg in parent.args:
            if arg.keyword is not None and keywords.get(arg.keyword.value, arg.keyword.value) != arg.keyword.value:
                edits.append(module.replace(arg.keyword, keywords[arg.keyword.value]))
        if name == "is_bf16_supported" and not parent.args:
            edits.append(module.first_argument(parent, "including_emulation=True"))  # CUDA's default
        if name == "is_available":
            guards = guarded(module, parent)
    yield Match(node, f"`{full}`; use `get_accelerator().{method.name}`", tuple(edits), guards=guards)


@RULE.on_name("torch.cuda.get_device_name")
def find_title(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """get_device_name(i), which is a property of the device."""
    call = module.parent(node)
    if not isinstance(call, cst.Call) or call.func is not node:
        yield Match(node, f"`{full}`: not fixed: only its calls can be replaced")
        return
    edits = [module.replace(node, f"{module.accelerator}().device_properties"), module.after(call, ".name")]
    edits += [module.replace(arg.keyword, "device_index") for arg in call.args if arg.keyword is not None]
    yield Match(node, f"`{full}`; use `get_accelerator().device_properties(...).name`", tuple(edits))

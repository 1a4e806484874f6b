# SPDX-License-Identifier: Apache-2.0
"""The rest of torch.cuda: what the accelerator does not have."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import SEVERAL, Module
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC501",
    title="a part of torch.cuda that accelerators do not share",
    tier=Tier.UNSAFE,
    why="Where the module itself is a value, or is assigned to, only its reader knows what for; given on, the "
    "accelerator takes its place, whose methods have the same names. The rest is reported, with what to "
    "do.",
    before="backend = torch.cuda",
    after="backend = get_accelerator()",
    left="used = torch.cuda.utilization()",
)
_ADVICE = {
    "device_of": "`with get_accelerator().device_guard(x.device):`",
    "seed": "draw a seed and pass it to manual_seed()",
    "seed_all": "draw a seed and pass it to manual_seed_all()",
    "get_arch_list": "ask for what you need: is_bf16_supported(), is_fp16_supported(), is_triton_supported()",
    "set_stream": "use `with get_accelerator().stream(s):`",
    "StreamContext": "use `with get_accelerator().stream(s):`",
    "memory_snapshot": "print memory_stats()",
    "is_initialized": "the accelerator starts by itself",
    "CUDAGraph": "where a device has no graphs a replay does nothing: write the way without a graph behind "
    '`get_accelerator().has("graphs")`, then create_graph() and capture_to_graph()',
    "graph": "as for CUDAGraph: capture_to_graph()",
    "make_graphed_callables": "capture with create_graph() and capture_to_graph()",
    "nccl": "torch.distributed has the collectives of every device",
    "comm": "torch.distributed has the collectives of every device",
}


@RULE.on_name("torch.cuda", "torch.cuda.")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """A use of the module or of one of its parts."""
    part = full.removeprefix("torch.cuda").lstrip(".").partition(".")[0]
    if full == SEVERAL:
        yield Match(
            node, f"`{module.source(node)}` has several imports, one of them from torch.cuda: import it in one way"
        )
    elif module.is_stored(node):
        yield Match(node, f"`{full}`: it is assigned to; patch the accelerator's method instead")
    elif part:
        advice = _ADVICE.get(part, 'no accelerator has it; guard it by `get_accelerator().device_name() == "cuda"`')
        if "device_name() ==" not in _condition(module, node):
            yield Match(node, f"`{full}`: not fixed: {advice}", needs_cuda=True)
    elif isinstance(module.parent(node), cst.Arg | cst.Assign | cst.Return | cst.IfExp):
        yield Match(
            node, f"`{full}` as a value; use `get_accelerator()`", (module.replace(node, module.accelerator + "()"),)
        )


def _condition(module: Module, node: cst.CSTNode) -> str:
    around = module.enclosing(node, cst.If, cst.IfExp)
    return "" if around is None else module.code(around.test)

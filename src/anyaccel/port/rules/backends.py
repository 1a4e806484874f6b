# SPDX-License-Identifier: Apache-2.0
"""NCCL, as the backend of torch.distributed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, text_of
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import is_key, is_listed, is_text, use_of

RULE = Rule(
    code="ACC401",
    title="the backend nccl",
    tier=Tier.SAFE,
    why="`communication_backend_name()` is the accelerator's backend, on CUDA `nccl`. A list that names other backends "
    "too needs a reader.",
    before='dist.init_process_group("nccl", rank=rank)\nif args.backend == "nccl":\n    y = 1',
    after="""\
dist.init_process_group(get_accelerator().communication_backend_name(), rank=rank)
if args.backend == get_accelerator().communication_backend_name():
    y = 1""",
    left='dist.init_process_group("cpu:gloo,cuda:nccl")',
)
_SEVERAL = re.compile(r"(?:\w+:\w+,)*cuda:\w+(?:,\w+:\w+)*")


@RULE.on_node(cst.SimpleString)
def find(module: Module, node: cst.SimpleString) -> Iterator[Match]:
    """The backend's name in a string."""
    text = text_of(node) or ""
    if text.lower() == "nccl" and (is_key(module, node) or not is_text(module, node)):
        # Only torch takes "NCCL" for "nccl": what it is compared with, or kept for, may not.
        unlike = text != "nccl" and use_of(module, node).kind != "Arg"
        unsafe = unlike or is_key(module, node) or is_listed(module, node, "gloo", "mpi")
        tier = Tier.UNSAFE if unsafe else None
        edit = module.replace(node, module.method("communication_backend_name"))
        yield Match(node, "`'nccl'`; use `get_accelerator().communication_backend_name()`", (edit,), tier)
    elif _SEVERAL.fullmatch(text) and not text.removeprefix("cuda:").isdecimal():
        advice = "name the accelerator's device and communication_backend_name() instead, or leave the backend out"
        yield Match(node, f"`{text!r}`: not fixed: {advice}")

# SPDX-License-Identifier: Apache-2.0
"""Rules that only report: packages, kernels and parts of torch that are CUDA's alone."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port import tables
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.syntax import dotted


def find_import(ctx: Context, node: cst.Import | cst.ImportFrom) -> Iterator[Candidate]:
    """Imports of packages that need CUDA, of Triton, and `from torch.cuda import *`."""
    if isinstance(node, cst.ImportFrom):
        if node.relative or node.module is None:
            return
        name = dotted(node.module) or ""
        if isinstance(node.names, cst.ImportStar):
            if name.split(".")[:2] == ["torch", "cuda"]:
                yield Candidate(
                    node, "ACC501", f"`from {name} import *`: name what is imported, so that its uses are seen"
                )
                return
            names = [name]
        else:
            names = [name if name.split(".")[0] != "numba" else f"{name}.{dotted(each.name)}" for each in node.names][
                :1
            ]
    else:
        names = [dotted(each.name) or "" for each in node.names]
    for name in names:
        yield from _package(node, name)


def _package(node: cst.CSTNode, name: str) -> Iterator[Candidate]:
    root = name.split(".")[0]
    if root == "triton":
        advice = "Triton kernels: not fixed: guard them by get_accelerator().is_triton_supported()"
        yield Candidate(node, "ACC503", f"`import {name}`: {advice}")
    elif root in tables.MANAGEMENT:
        yield Candidate(node, "ACC506", f"`import {name}`: {tables.MANAGEMENT_ADVICE}")
    elif root in tables.CUDA_ONLY:
        yield Candidate(node, "ACC507", f"`import {name}`: it needs CUDA; {tables.CUDA_ONLY[root]}")
    elif name.startswith("numba.cuda"):
        yield Candidate(node, "ACC507", "`numba.cuda`: it needs CUDA; write the kernel with torch")


def find_name(ctx: Context, node: cst.Name | cst.Attribute, full: str) -> Iterator[Candidate]:
    """Uses of torch.backends.cuda, torch.version.cuda, and of what builds CUDA sources."""
    if full == "torch.backends.cuda" or full.startswith("torch.backends.cuda."):
        advice = "settings of CUDA alone; without effect elsewhere, guard what asks for their values"
        yield Candidate(node, "ACC504", f"`{full}`: {advice}", breaks=False)
    elif full == "torch.version.cuda":
        advice = "None without CUDA; runtime_versions() has the versions of every accelerator's software"
        yield Candidate(node, "ACC505", f"`{full}`: {advice}", breaks=False)
    elif full.endswith("ProfilerActivity.CUDA") and full.startswith("torch."):
        advice = "it is CUDA's alone: torch.profiler.supported_activities() has those of this machine"
        yield Candidate(node, "ACC508", f"`{full}`: {advice}")
    elif full in tables.EXTENSIONS:
        advice = "CUDA sources: not fixed: build_extension() and op builders compile for other devices"
        yield Candidate(node, "ACC502", f"`{full}`: {advice}")
    elif full in tables.EXTENSION_LOADERS:
        call = ctx.tree.parent(node)
        if isinstance(call, cst.Call) and _is_cuda_build(ctx, call):
            advice = "CUDA sources: not fixed: write an op builder, see docs/ops.md"
            yield Candidate(node, "ACC502", f"`{full}`: {advice}")


def _is_cuda_build(ctx: Context, call: cst.Call) -> bool:
    text = ctx.tree.module.code_for_node(call)
    return "cuda" in text.lower() or ".cu'" in text or '.cu"' in text

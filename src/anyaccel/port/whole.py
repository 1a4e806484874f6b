# SPDX-License-Identifier: Apache-2.0
"""Keeps a file whole: where it goes on asking for CUDA, what it puts on a device stays with that.

What is put on another accelerator meets what the question that stays has put on, or left on, the CPU. Looking at one
function finds most such pairs (see halves.py), but not those that meet through an attribute, a caller or a test.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import libcst as cst

from anyaccel.port import usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.guards import guarded
from anyaccel.port.halves import PLACES, goes_elsewhere, only_tells

# What is the same beside code for CUDA and beside code for any accelerator: it puts nothing anywhere.
_APART = {
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
}
_WHERE = {"ACC202", "ACC302"}  # device.type == "cuda", x.is_cuda
_SETTLE = "settle that first (by hand, or `# ignore-cuda` where CUDA itself is meant), or use --partial"


def leave_parts_of_files(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Leave what is put on a device in a file, function or package that goes on asking for CUDA; whether any was."""
    if ctx.partial or not any(each.fix is not None for each in candidates):
        return False
    stay = [each for each in candidates if each.fix is None and not each.allowed]
    stay.sort(key=lambda each: each.waits)  # the report names what the others wait for
    of_file = next((each for each in stay if _holds_file(ctx, each)), None)
    failing = {
        ctx.tree.enclosing(each.node, cst.FunctionDef): each
        for each in reversed(stay)
        if each.breaks and not each.count
    }
    apart = _apart(ctx, candidates)
    left = False
    for each in candidates:
        if each.fix is None or each in apart:
            continue
        function = ctx.tree.enclosing(each.node, cst.FunctionDef)
        held = of_file or (failing.get(function) if function is not None else None)
        if held is not None:
            shown = " ".join(ctx.tree.module.code_for_node(held.node).split())
            where = "file" if held is of_file else "function"
            each.unfixed(f"it waits for `{shown[:60]}`, which stays in this {where}; {_SETTLE}")
        elif each.code in ("ACC111", "ACC201") and ctx.project.asking and goes_elsewhere(ctx, each):
            each.unfixed(
                "other code gets this device, and other files ask whether something is on CUDA (`is_cuda`, "
                '`== "cuda"`); port those first, or use --partial'
            )
        else:
            continue
        each.waits = True
        if each.guard:
            each.asks, each.breaks = True, False
        left = True
    return left


def asks_where(ctx: Context, candidates: Sequence[Candidate]) -> bool:
    """Whether the file goes on asking whether something is on CUDA."""
    return any(
        each.code in _WHERE and each.fix is None and not each.allowed and _holds_file(ctx, each) for each in candidates
    )


def _holds_file(ctx: Context, each: Candidate) -> bool:
    """Whether what stays here decides where things are: by a question, or by a device for CUDA only."""
    if (
        each.count
    ):  # what several devices are for, such as DataParallel, is for CUDA only, and one device does without it
        return False
    return (each.asks and not only_tells(ctx, each)) or (each.breaks and each.code in PLACES)


def _apart(ctx: Context, candidates: Sequence[Candidate]) -> Container[Candidate]:
    """What can be ported beside anything, and the guards of nothing else."""
    fixed = [each for each in candidates if each.fix is not None]
    calls = [each for each in fixed if each.code == "ACC110" or _is_apart(ctx, each)]
    guards = []
    for each in fixed:
        if each.question != "device_there":
            continue
        regions = list(guarded(ctx, each.answer))
        inside = [
            other
            for other in fixed
            if other is not each
            and any(region in (other.replaced, *ctx.tree.parents(other.node)) for region in regions)
        ]
        if inside and all(other in calls for other in inside):
            guards.append(each)
    return [*calls, *guards]


def _is_apart(ctx: Context, each: Candidate) -> bool:
    return each.code == "ACC101" and usage.last_name(ctx.tree.imported(each.node) or "") in _APART

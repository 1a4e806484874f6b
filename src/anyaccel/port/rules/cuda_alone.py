# SPDX-License-Identifier: Apache-2.0
"""Statements that set up what only CUDA has."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Edit, Module, last_name
from anyaccel.port.rule import Match, Rule, Tier

RULE = Rule(
    code="ACC108",
    title="a statement that sets up what only CUDA has",
    tier=Tier.SAFE,
    why="Limits of CUDA's allocator, its initialisation, its profilers, and the life of memory between "
    "streams: a condition keeps the statement for the device that has it.",
    before="""\
torch.cuda.set_per_process_memory_fraction(0.5)
batch.record_stream(torch.cuda.current_stream())""",
    after="""\
if get_accelerator().device_name() == "cuda":
    torch.cuda.set_per_process_memory_fraction(0.5)
if not get_accelerator().is_synchronized_device():
    batch.record_stream(get_accelerator().current_stream())""",
)
_NAMES = (
    *("init", "_lazy_init", "ipc_collect", "set_per_process_memory_fraction", "set_sync_debug_mode"),
    *(
        "reset_accumulated_memory_stats",
        "_record_memory_history",
        "_dump_snapshot",
        "nvtx.mark",
        "profiler.start",
        "profiler.stop",
    ),
)


@RULE.on_name(*(f"torch.cuda.{name}" for name in _NAMES))
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """A call that is a statement, or another use."""
    line = _alone(module, module.parent(node))
    asked = f'{module.method("device_name")} == "cuda"'
    if line is None:
        yield Match(node, f"`{full}`: not fixed: only CUDA has it; guard it by `{asked}`", needs_cuda=True)
    elif not _is_asked(module, line, "device_name() =="):
        yield Match(node, f"`{full}`; use it behind `if {asked}:`", _behind(module, line, asked))


@RULE.on_node(cst.Call)
def find_record(module: Module, node: cst.Call) -> Iterator[Match]:
    """x.record_stream(s), which the CPU does not have."""
    if last_name(node.func) != "record_stream":
        return
    line = _alone(module, node)
    asked = f"not {module.method('is_synchronized_device')}"
    if line is None:
        yield Match(
            node, f"`record_stream`: not fixed: a synchronous device has none; guard it by `{asked}`", needs_cuda=True
        )
    elif not _is_asked(module, line, "is_synchronized_device()"):
        yield Match(node, f"`record_stream`; use it behind `if {asked}:`", _behind(module, line, asked))


def _alone(module: Module, call: cst.CSTNode) -> cst.SimpleStatementLine | None:
    """The line of a call that is its only statement."""
    line = module.parent(module.parent(call))
    alone = isinstance(call, cst.Call) and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    return line if alone else None  # type: ignore[return-value]


def _is_asked(module: Module, line: cst.CSTNode, question: str) -> bool:
    around = module.enclosing(line, cst.If)
    return around is not None and question in module.code(around.test)


def _behind(module: Module, line: cst.SimpleStatementLine, asked: str) -> tuple[Edit, ...]:
    """The line after an `if` of its own, indented by one step more."""
    start, _ = module.span(line.body[0])
    indent = module.data[module.data.rfind(b"\n", 0, start) + 1 : start].decode("utf-8")
    return (Edit(start, start, f"if {asked}:{module.tree.default_newline}{indent}{module.tree.default_indent}"),)

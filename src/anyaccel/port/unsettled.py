# SPDX-License-Identifier: Apache-2.0
"""What a file does with devices that no rule can vouch for: its group waits, however plain each place is by itself.

A place is right on another accelerator only where all that its values meet is. So devices are placed only in programs
of one process and one device, whose packages take any device or none, and which hand no float64
and nothing sparse to a device.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator

from anyaccel.port import tables
from anyaccel.port.links import Import
from anyaccel.port.silence import is_silenced
from anyaccel.port.together import Holder

_KNOWN = (tables.TAKES_ANY - tables.HAS_ITS_OWN_WAYS) | tables.WITHOUT_DEVICES | sys.stdlib_module_names
_OF_TORCH = re.compile(r"\btorch\b")
# Several processes or several devices, of which a CPU and Metal have one, and a module that torch splits for CUDA only.
_SEVERAL = {
    *("init_process_group", "DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "fully_shard"),
    *("spawn", "DataParallel", "init_device_mesh", "data_parallel", "replicate", "DataParallelCriterion"),
}
# Code that nobody here has read: from a hub, compiled elsewhere, named by a variable.
_FETCHES = {"torch.hub.load", "hub.load", "torch.jit.load", "jit.load", "torch.ops.load_library", "__import__"}
_FETCHES |= {"torch.compile"}  # what it makes of the code for another device
# What other devices have in part, or not at all: scales of mixed precision are float64 for a moment, which Metal lacks.
_NOT_EVERYWHERE = {"GradScaler", "set_default_device", "set_default_tensor_type"}
_OF_CUDA = {"Event", "Stream", "CUDAGraph", "graph", "stream", "current_stream", "default_stream", "nvtx"}
_MEMORY = re.compile(r"(?:max_)?memory_(?:allocated|reserved|cached|stats)|reset_\w*memory\w*|mem_get_info")
_QUANTISED = {"load_in_4bit", "load_in_8bit", "BitsAndBytesConfig", "GPTQConfig", "AwqConfig"}
_QUANTISED |= {"enable_xformers_memory_efficient_attention", "set_use_memory_efficient_attention_xformers"}
# Kernels, strategies and one of several devices, by their names.
_CHOSEN = re.compile(r"flash_attention|flash_attn|xformers|gptq|awq|cudagraphs$|inductor$|ddp$|fsdp$|cuda:(?!0$)")
# Tensors that are sparse, whose operators some devices lack.
_SPARSE = re.compile(r"(?:.*\.)?(?:to_sparse\w*|sparse_\w+_tensor|spmm|hspmm|sspaddmm)|torch\.sparse\..*")
# What an array or a list becomes; its type is the array's, which may be float64.
_TAKES_ARRAYS = {"from_numpy", "as_tensor", "tensor", "asarray", "from_dlpack"}
_CASTS = {"float", "half", "bfloat16", "long", "int", "bool", "short", "byte", "type", "char", "type_as"}
_NARROW = re.compile(
    r"float32|float16|\bint(?:8|16|32|64)\b|\buint8\b|bfloat16|\blong\b|\bbool_?\b|np\.single|torch\.float\b"
)


def unsettled(text: str, here: Callable[[Import], bool]) -> Holder | None:
    """The first place of a module that leaves open what its values meet on another accelerator.

    Args:
        text: of the module.
        here: whether an import is of a module that is looked at as well.
    """
    if not _OF_TORCH.search(text):
        return None
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Holder(1, "a module that cannot be parsed")
    above = {id(child): node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
    lines = text.split("\n")
    found = sorted(_places(module, above, here), key=lambda each: each.line)
    return next((each for each in found if not is_silenced(lines[each.line - 1], "ACC2")), None)


def _places(module: ast.Module, above: dict[int, ast.AST], here: Callable[[Import], bool]) -> Iterator[Holder]:
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                for each in names:
                    if not _is_known(each.name) and not here(Import(0, each.name)):
                        yield Holder(node.lineno, f"import {each.name}")
            case ast.ImportFrom(module=name, level=level, names=names):
                taken = tuple((each.name, each.asname or each.name) for each in names)
                if name == "torch" or (name or "").startswith("torch."):
                    special = (_SEVERAL | _NOT_EVERYWHERE) | (_OF_CUDA if ".cuda" in (name or "") else set())
                    strange = any(each.name in special for each in names) or not _is_known(name or "")
                else:
                    strange = bool(level) or not _is_known(name or "")
                if strange and not here(Import(level, name or "", taken)):
                    yield Holder(node.lineno, f"from {'.' * level}{name or ''} import {names[0].name}")
            case ast.Call():
                yield from _of_call(node, above)
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)) if name in _QUANTISED:
                yield Holder(node.value.lineno, f"{name}=True")
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                yield Holder(node.value.lineno, "trust_remote_code=True")
            case ast.Assert(test=test) if _demands(test):
                yield Holder(node.lineno, f"assert {ast.unparse(test)}")
            case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=asked), body=body) if _demands(asked) and _ends(body):
                yield Holder(node.lineno, f"if {ast.unparse(node.test)}: {ast.unparse(body[-1])}")
            case ast.Constant(value=str(value)) if _CHOSEN.match(value):
                yield Holder(node.lineno, repr(value))


def _is_known(name: str) -> bool:
    return name.split(".")[0] in _KNOWN and not name.startswith("torch.utils.cpp_extension")


def _of_call(node: ast.Call, above: dict[int, ast.AST]) -> Iterator[Holder]:
    name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    last = name.rpartition(".")[2]
    of_cuda = "cuda." in name and (last in _OF_CUDA or "nvtx." in name or _MEMORY.fullmatch(last))
    by_name = last == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant))
    if (
        of_cuda
        or by_name
        or name in _FETCHES
        or _SPARSE.fullmatch(name)
        or last in _SEVERAL | _NOT_EVERYWHERE | _QUANTISED
    ):
        yield Holder(node.lineno, name)
    elif last in _TAKES_ARRAYS and name.startswith(("torch.", "from_numpy")) and not _is_narrow(node, above):
        yield Holder(node.lineno, f"{ast.unparse(node)}, which may be float64")


def _is_narrow(node: ast.Call, above: dict[int, ast.AST]) -> bool:
    """Whether a tensor that is made of values elsewhere is sure to be of another type than float64."""
    values = node.args[0] if node.args else None
    if any(each.arg == "dtype" for each in node.keywords) or len(node.args) > 1:
        return True
    if values is None or _is_written_out(values) or _NARROW.search(ast.unparse(values)):
        return True
    given = _given(node, ast.unparse(values), above)
    if given and all(_NARROW.search(ast.unparse(each)) for each in given):
        return True
    one: ast.AST = node
    while isinstance(outer := above.get(id(one)), ast.Attribute | ast.Call | ast.Subscript | ast.BinOp):
        if isinstance(outer, ast.Attribute) and outer.attr in ("cuda", "to"):
            call = above.get(id(outer))
            return outer.attr == "to" and isinstance(call, ast.Call) and _NARROW.search(ast.unparse(call)) is not None
        if isinstance(outer, ast.Attribute) and outer.attr in _CASTS:
            return True
        if isinstance(outer, ast.Call) and one is not outer.func:
            return False
        one = outer
    return False


def _is_written_out(values: ast.expr) -> bool:
    """Whether they are numbers of Python's in the code itself, of which torch makes float32 or int64."""
    kinds = ast.Constant | ast.List | ast.Tuple | ast.UnaryOp | ast.unaryop | ast.expr_context
    return all(isinstance(each, kinds) for each in ast.walk(values))


def _given(node: ast.AST, name: str, above: dict[int, ast.AST]) -> list[ast.expr]:
    """What is assigned to a name in the function or module around, or to an attribute; nothing to a parameter."""
    kinds = (ast.ClassDef, ast.Module) if "." in name else (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    around: ast.AST | None = above.get(id(node))
    while around is not None:
        if isinstance(around, kinds):
            found = [each for each in ast.walk(around) if isinstance(each, ast.Assign)]
            given = [each.value for each in found if any(ast.unparse(target) == name for target in each.targets)]
            if given or any(isinstance(each, ast.arg) and each.arg == name for each in ast.walk(around)):
                return given
        around = above.get(id(around))
    return []


def _demands(test: ast.expr) -> bool:
    """Whether a condition asks that CUDA is there, or that something is on it."""
    return any(
        isinstance(node, ast.Attribute)
        and (node.attr == "is_cuda" or (node.attr == "is_available" and "cuda" in ast.unparse(node.value)))
        for node in ast.walk(test)
    )


def _ends(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.Raise):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in ("exit", "quit", "_exit", "skip")

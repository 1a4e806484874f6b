# SPDX-License-Identifier: Apache-2.0
"""What a file says to the others: answers about CUDA that it keeps, functions that take cuda or cpu only."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from anyaccel.port import tables
from anyaccel.port.silence import is_silenced

_WORTH_PARSING = re.compile(r"cuda.*device|device.*cuda|cuda\.is_available", re.DOTALL)
# if x.is_cuda:, on_gpu = device.type == "cuda"
_ASKS = re.compile(
    r"""(?:\b(?:if|and|or|assert|not|while|return)\s|=\s)[^\n#]*(?:\.is_cuda\b|[!=]=\s*["']cuda["']|startswith\(["']cuda["']\))"""
)
_OWN_DEVICE = re.compile(r"self\._?device(?:_type|_name)?")
_PORTABLE = {*tables.FUNCTIONS, *tables.CLASSES, "amp", "current_device", "nvtx", "mem_get_info", "graph", "CUDAGraph"}
_ABOUT_DEVICES = re.compile("cuda|gpu|device|accel", re.IGNORECASE)
_OF_KERNELS = re.compile("graph|kernel|fused|numba|info|memory|usage|_str|log|stat", re.IGNORECASE)
_PRECISION = re.compile(r"float16|float32|half|fp16|bf16")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Facts:
    """Of one file.

    Attributes:
        keeps: attributes and functions that hold whether CUDA is there, for others to ask.
        named: variables of the module that do.
        demands: functions and classes that know the devices "cuda" and "cpu" only, or go another way for others.
        passes: functions and classes -> what they call with the device that they were given.
        asks: it asks whether something is on CUDA, which may be ported.
    """

    keeps: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    demands: frozenset[str] = frozenset()
    passes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    asks: bool = False


NO_FACTS = Facts()


def facts(text: str) -> Facts:
    """The facts of a module; none where it cannot be parsed, or is about no device of CUDA."""
    if "cuda" not in text:
        return NO_FACTS
    asks = any(not _is_settled(text, each.start(), each.end()) for each in _ASKS.finditer(text))
    if not _WORTH_PARSING.search(text):
        return Facts(asks=asks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Facts(asks=asks)
    demands: set[str] = set()
    passes: dict[str, set[str]] = {}
    for function, owner in _functions(module):
        names = {function.name} if owner is None or function.name != "__init__" else {owner}
        devices = _devices(function)
        names |= {owner} if owner is not None and _is_of_self(function) else set()
        if _demands(function, devices):
            demands |= names
        called = _called_with(function, devices)
        for name in names:
            passes.setdefault(name, set()).update(called - {name})
    keeps, named = _kept(module)
    passing = {name: frozenset(each) for name, each in passes.items() if each}
    return Facts(keeps, named, frozenset(demands), passing, asks)


def _is_settled(text: str, start: int, end: int) -> bool:
    """Whether a comment in the line of a question says that it is to stay."""
    rest = text.find("\n", end)
    line = text[start : rest if rest >= 0 else len(text)]
    return is_silenced(line, "ACC202") and is_silenced(line, "ACC302")


def demanding(all_facts: Iterable[Facts]) -> frozenset[str]:
    """What demands "cuda" or "cpu", or passes the device that it is given on to what does."""
    found: set[str] = set()
    passes: dict[str, set[str]] = {}
    for each in all_facts:
        found |= each.demands
        for name, called in each.passes.items():
            for one in called:
                passes.setdefault(one, set()).add(name)
    waiting = list(found)
    while waiting:
        for name in passes.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return frozenset(found)


def _functions(
    node: ast.AST, owner: str | None = None
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield child, owner
        yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else owner)


def _devices(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters that are devices by their names."""
    args = function.args
    return {
        each.arg
        for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)
        if tables.DEVICE_NAME.fullmatch(each.arg) or each.arg == "accelerator"
    }


def _is_of_self(function: ast.AST) -> bool:
    """Whether the device of its object is what the function asks about."""
    return any(isinstance(each, ast.Attribute) and _OWN_DEVICE.fullmatch(_code(each)) for each in ast.walk(function))


def _code(node: ast.AST) -> str:
    return ast.unparse(node)


def _is_device(node: ast.AST, devices: set[str]) -> bool:
    """Whether it is a device that was given: by its name, as a text, its kind, or in an attribute of the object."""
    match node:
        case ast.Name(id=name):
            return name in devices
        case ast.Attribute(attr="type" | "value", value=value):
            return _is_device(value, devices)
        case ast.Attribute():
            return _OWN_DEVICE.fullmatch(_code(node)) is not None
        case ast.Call(func=ast.Name(id="str"), args=[only]):
            return _is_device(only, devices)
        case ast.Call(func=ast.Attribute(attr="lower" | "strip" | "split" | "startswith", value=value)):
            return _is_device(value, devices)
        case ast.Subscript(value=value):
            return _is_device(value, devices)
    return False


def _names(node: ast.AST, device: str) -> bool:
    """Whether it is the name of such a device, torch.device() of one or a list with one."""
    match node:
        case ast.Constant(value=str(value)):
            return re.fullmatch(rf"{device}(?::\d+)?", value) is not None
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return any(_names(each, device) for each in elements)
        case ast.Call(args=[first, *_]):
            return _code(node.func).endswith("device") and _names(first, device)
    return False


def _demands(function: ast.FunctionDef | ast.AsyncFunctionDef, devices: set[str]) -> bool:
    """Whether the function knows "cuda" and "cpu" only, or what it does for others is not what it does for CUDA."""
    for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        annotation = _code(each.annotation) if each.arg in devices and each.annotation is not None else ""
        if "Literal" in annotation and "cuda" in annotation:
            return True
    for node in ast.walk(function):
        match node:
            case ast.Assert(test=test):
                if _asks(test, devices, "cuda"):
                    return True
            case ast.If(test=test, orelse=orelse) if _asks(test, devices, "cuda"):
                if orelse or any(isinstance(each, ast.Raise | ast.Return) for each in ast.walk(node)):
                    return True
            case ast.If(test=test) if _asks(test, devices, "cpu"):
                if _uses_cuda(node):
                    return True
            case ast.IfExp(test=test) if _asks(test, devices, "cuda"):
                kinds = _names(node.body, "cuda") and _names(node.orelse, "cpu")  # which is ported as a whole
                if not kinds and not _PRECISION.search(_code(node)):
                    return True
            case ast.Assign(value=value) | ast.Return(value=value) if value is not None:
                if not isinstance(value, ast.IfExp) and _asks(value, devices, "cuda"):
                    return True
    return False


def _asks(test: ast.AST, devices: set[str], device: str) -> bool:
    """Whether a condition compares a given device with the name of this one."""
    for node in ast.walk(test):
        match node:
            case ast.Compare(left=left, comparators=[right]):
                sides = (left, right)
                if any(_is_device(each, devices) for each in sides) and any(_names(each, device) for each in sides):
                    return True
            case ast.Call(func=ast.Attribute(attr="startswith"), args=[first]):
                if _is_device(node, devices) and _names(first, device):
                    return True
    return False


def _uses_cuda(node: ast.AST) -> bool:
    """Whether a function of torch.cuda is called in it that other accelerators do not have."""
    called = (_code(each.func) for each in ast.walk(node) if isinstance(each, ast.Call))
    found = (re.match(r"torch\.cuda\.(\w+)", each) for each in called)
    return any(each is not None and each[1] not in _PORTABLE for each in found)


def _called_with(function: ast.AST, devices: set[str]) -> set[str]:
    """The last names of what is called with a device that was given."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and not (called := _code(node.func)).startswith("torch."):
            values = [*node.args, *(each.value for each in node.keywords)]
            if any(_is_device(each, devices) for each in values):
                found.add(called.rpartition(".")[2])
    return found - {"to", "cuda", "device", "str", "print", "isinstance", "len", "format"}


def _kept(module: ast.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes and functions, and variables of the module, that hold whether CUDA is there."""
    keeps, named = set(), set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            keeps |= {name for each in node.body for name in _counted(each)}
        if isinstance(node, ast.Assign):
            keeps |= {name for name in _counted(node) if name.startswith("self.")}
        if isinstance(node, ast.If) and any(_is_answer(each) for each in ast.walk(node.test)):
            keeps |= {name for each in node.body for name in _flags(each)}
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if value is not None and _is_answer(value):
            keeps |= {_code(each) for each in targets if isinstance(each, ast.Attribute)}
            named |= {each.id for each in targets if isinstance(each, ast.Name) and node in module.body}
        if isinstance(node, _FUNCTIONS) and (_returns_answer(node) or _tells_of_gpus(node)):
            keeps.add(f"{node.name}()")
    return frozenset(each for each in keeps if _ABOUT_DEVICES.search(each) and not _OF_KERNELS.search(each)), frozenset(
        named
    )


def _counted(node: ast.AST) -> Iterator[str]:
    """An attribute that holds how many GPUs there are: total_visible_gpus = torch.cuda.device_count()."""
    value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if value is None or "torch.cuda.device_count()" not in _code(value):
        return
    for each in targets:
        if isinstance(each, ast.Name | ast.Attribute) and re.search("cuda|gpu", _code(each), re.IGNORECASE):
            yield _code(each)


def _returns_answer(function: ast.AST) -> bool:
    """Whether a function gives its callers the answer, itself or by the name of a variable."""
    inside = list(ast.walk(function))
    names = {
        target.id
        for each in inside
        if isinstance(each, ast.Assign) and _is_answer(each.value)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    for each in inside:
        if isinstance(each, ast.Return) and each.value is not None:
            values = each.value.elts if isinstance(each.value, ast.Tuple) else [each.value]
            if any(_is_answer(one) or (isinstance(one, ast.Name) and one.id in names) for one in values):
                return True
    return False


def _tells_of_gpus(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function by its name tells what GPUs there are, and says that there is none where CUDA is not."""
    if not re.search("cuda|gpu", function.name, re.IGNORECASE):
        return False
    for node in ast.walk(function):
        if isinstance(node, ast.If) and _is_answer(node.test):
            ends = [each.value for each in (*node.body, *node.orelse) if isinstance(each, ast.Return)]
            none = (ast.Constant, ast.Dict, ast.List, ast.Tuple)
            if any(isinstance(each, none) or (isinstance(each, ast.Call) and not each.args) for each in ends):
                return True
    return False


def _flags(node: ast.AST) -> Iterator[str]:
    """An attribute about GPUs that a statement sets to True or False: self.use_gpu = True."""
    match node:
        case ast.Assign(targets=[ast.Attribute(attr=name) as target], value=ast.Constant(value=bool())):
            # One that is called cuda alone is for its own class; what others ask is more explicit.
            if re.search("cuda|gpu", name, re.IGNORECASE) and name != "cuda":
                yield _code(target)


def _is_answer(node: ast.AST) -> bool:
    match node:
        case ast.BoolOp(values=values):
            return any(_is_answer(each) for each in values)
        case ast.UnaryOp(operand=operand):
            return _is_answer(operand)
        case ast.Call(func=function, args=[]):
            return _code(function) == "torch.cuda.is_available"
        case ast.Compare(left=ast.Call(func=function, args=[]), comparators=[ast.Constant()]):
            return _code(function) == "torch.cuda.device_count"
    return False

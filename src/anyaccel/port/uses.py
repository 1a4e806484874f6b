# SPDX-License-Identifier: Apache-2.0
"""What an expression's value is used for, as far as its place shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from anyaccel.port.module import Edit, Module, dotted, last_name, text_of

_PASSES_ON = cst.IfExp | cst.BooleanOperation | cst.NamedExpr | cst.Await
_CUDA_TEXT = re.compile(r"cuda(?::(\d+))?")
# Calls whose arguments are texts for people, names of attributes, keys or paths.
_TEXT = re.compile(
    r"print|info|warn|warning|debug|error|exception|critical|log|write|(?:has|get|set|del)attr|get|pop|setdefault|"
    r"add_argument|join|replace|split|find|index|count|format|exists|import_module|register\w*|skip\w*|\w+(?:Error|Warning|Exception)"
)
_TEXT_KEYWORDS = {"help", "choices", "description", "title", "label", "msg", "message", "reason", "name", "prefix"}
# Where torch takes a device: keywords of any call, and the first argument of these.
_DEVICE_KEYWORDS = {"device", "map_location", "output_device", "src_device"}
_TAKES_DEVICE = {"to", "cuda", "to_empty", "set_default_device", "Generator"}
# What programs call the index of their device.
_INDEX_NAME = re.compile(
    r"(?:local_?)?rank|gpu|gpu_?(?:id|rank|index|idx)|local_gpu|device_?(?:id|idx|index)|cuda_?(?:id|idx)"
)


@dataclass(frozen=True)
class Use:
    """Where a value goes: `kind` is the class of the node that takes it, such as "Arg" or "Assign".

    Attributes:
        call: of an argument.
        name: of the argument's keyword or the function's parameter, or of what it is assigned to.
        position: of an argument without a keyword, from 0; else -1.
    """

    kind: str
    node: cst.CSTNode
    call: cst.Call | None = None
    name: str = ""
    position: int = -1


def use_of(module: Module, node: cst.CSTNode) -> Use:
    """What takes this expression's value, through choices such as `a if b else c` and `a or b`."""
    child, parent = node, module.parent(node)
    while isinstance(parent, _PASSES_ON) and getattr(parent, "test", None) is not child:
        child, parent = parent, module.parent(parent)
    kind = type(parent).__name__
    match parent:
        case cst.Arg():
            call = module.parent(parent)
            if isinstance(call, cst.Call):
                if parent.keyword is not None:
                    return Use(kind, parent, call, parent.keyword.value)
                return Use(kind, parent, call, position=call.args.index(parent) if not parent.star else -1)
        case cst.Assign():
            return Use(kind, parent, name=last_name(parent.targets[0].target))
        case cst.AnnAssign():
            return Use(kind, parent, name=last_name(parent.target))
        case cst.Param():
            return Use(kind, parent, name=parent.name.value)
    return Use(kind, parent)


def is_text(module: Module, node: cst.CSTNode) -> bool:
    """Whether a string is for people, a key, or a name of something else than a device."""
    use = use_of(module, node)
    if use.kind in ("Expr", "ConcatenatedString", "Annotation", "Index", "Subscript", "FormattedStringExpression"):
        return True
    if use.kind == "DictElement":
        return isinstance(use.node, cst.DictElement) and module.is_within(node, use.node.key)
    if use.kind == "Arg" and use.call is not None:
        if use.name:
            return use.name in _TEXT_KEYWORDS
        return _TEXT.fullmatch(last_name(use.call.func)) is not None
    return False


def is_key(module: Module, node: cst.CSTNode) -> bool:
    """Whether a string is a key that is looked up: d["cuda"], {"cuda": x}."""
    use = use_of(module, node)
    types = module.enclosing(node, cst.Annotation, cst.Subscript)
    if isinstance(types, cst.Annotation) or last_name(getattr(types, "value", None)) == "Literal":
        return False
    return use.kind == "Index" or (isinstance(use.node, cst.DictElement) and module.is_within(node, use.node.key))


def is_listed(module: Module, node: cst.CSTNode, *others: str) -> bool:
    """Whether one of these texts stands in the same list, tuple or set, other than as a choice: ["cpu", "cuda"][x]."""
    element = module.parent(node)
    around = module.parent(element)
    if not isinstance(element, cst.Element) or not isinstance(around, cst.List | cst.Tuple | cst.Set):
        return False
    chosen = getattr(module.parent(around), "value", None) is around and isinstance(
        module.parent(around), cst.Subscript
    )
    return not chosen and any(text_of(each.value) in others for each in around.elements)


def is_device(module: Module, node: cst.CSTNode) -> bool:
    """Whether torch takes this value as a device."""
    use = use_of(module, node)
    if use.kind != "Arg" or use.call is None:
        return False
    if use.name == "device_id":  # init_process_group takes an index or a torch.device, and others an index
        return last_name(use.call.func) in ("FSDP", "FullyShardedDataParallel")
    if use.name:
        return use.name in _DEVICE_KEYWORDS
    takes = last_name(use.call.func) in _TAKES_DEVICE or module.full_name(use.call.func) == "torch.device"
    return use.position == 0 and takes


def device_text(node: cst.CSTNode) -> cst.BaseExpression | str | None:
    """The index in a CUDA device's name: "0" of "cuda:0", `i` of f"cuda:{i}"; "" without one, None for no such name."""
    match node:
        case cst.SimpleString():
            found = _CUDA_TEXT.fullmatch(text_of(node) or "")
            return None if found is None else found[1] or ""
        case cst.FormattedString(
            parts=[
                cst.FormattedStringText(value="cuda:"),
                cst.FormattedStringExpression(
                    expression=index,
                    conversion=None,
                    format_spec=None | [cst.FormattedStringText(value="d")],
                    equal=None,
                ),
            ]
        ):
            return index
        case cst.FormattedString(parts=[cst.FormattedStringText(value=text)]) if found := _CUDA_TEXT.fullmatch(text):
            return found[1] or ""
        case cst.BinaryOperation(operator=cst.Add(), left=left, right=right) if text_of(left) == "cuda:":
            return _inside_str(right)
        case cst.BinaryOperation(operator=cst.Modulo(), left=left, right=right) if text_of(left) in (
            "cuda:%d",
            "cuda:%s",
        ):
            if not isinstance(right, cst.Tuple):
                return right
            return right.elements[0].value if len(right.elements) == 1 else None
        case cst.Call(
            func=cst.Attribute(value=text, attr=cst.Name("format")), args=[cst.Arg(keyword=None, star="") as arg]
        ):
            return arg.value if text_of(text) in ("cuda:{}", "cuda:{0}", "cuda:{:d}") else None
    return None


def name_edits(module: Module, node: cst.BaseExpression, call: cst.Call | None = None) -> tuple[Edit, ...]:
    """A CUDA device's name, perhaps an argument of this call, becomes the accelerator's; empty if it has no fix."""
    index = device_text(node)
    if isinstance(index, cst.BaseExpression):
        if "#" in module.source(node):
            return ()
        start, end = module.span(node)
        return Edit(start, module.before(index, "").start, module.device_name), Edit(module.end(index), end, ")")
    if not index and call is not None and module.full_name(call.func) == "torch.device" and len(call.args) == 2:
        name, number = call.args  # torch.device("cuda", i) has the index beside the name
        if name.value is node:
            opening = Edit(module.span(name)[0], module.span(number.value)[0], module.device_name)
            return opening, module.after(number.value, ")")
    return (module.replace(node, module.method("device_name", *([index] if index else []))),)


def _inside_str(node: cst.BaseExpression) -> cst.BaseExpression:
    match node:
        case cst.Call(func=cst.Name("str"), args=[cst.Arg(keyword=None, star="") as arg]):
            return arg.value
    return node


def is_index(module: Module, node: cst.BaseExpression) -> bool:
    """Whether an expression is by its name, or by what the file assigns to it, the index of a device."""
    if isinstance(node, cst.Integer):
        return True
    if isinstance(node, cst.Subscript):
        node = node.value
    if module.full_name(node).startswith("torch."):
        return False
    return _INDEX_NAME.fullmatch(last_name(node).lower()) is not None or dotted(node) in _assigned_indices(module)


def _assigned_indices(module: Module) -> set[str]:
    """Names to which the file assigns the index of a device, and nothing else."""
    cached: set[str] | None = module.__dict__.get("_indices")
    if cached is None:
        indices: set[str] = set()
        others: set[str] = set()
        for node in module.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    (indices if _gives_index(module, node.value) else others).add(dotted(target.target))
        cached = module.__dict__["_indices"] = indices - others
    return cached


def _gives_index(module: Module, value: cst.BaseExpression) -> bool:
    match value:
        case cst.BinaryOperation(operator=cst.Modulo(), left=left):
            return isinstance(left, cst.Name | cst.Attribute | cst.Call)
        case cst.Call(func=cst.Name("int"), args=[cst.Arg(value=inner)]):
            return "LOCAL_RANK" in module.code(inner)
        case cst.Call(func=func):
            return module.full_name(func) in ("torch.distributed.get_rank", "torch.cuda.current_device")
        case cst.Name() | cst.Attribute():
            return _INDEX_NAME.fullmatch(last_name(value).lower()) is not None
    return False


def guarded(module: Module, question: cst.CSTNode) -> cst.CSTNode | None:
    """What runs only where a question is answered with yes: the block of an `if`, or the value of a choice."""
    child, negated = question, False
    for parent in module.parents(question):
        match parent:
            case cst.UnaryOperation(operator=cst.Not()):
                negated = not negated
            case cst.BooleanOperation() | cst.Comparison() | cst.ComparisonTarget():
                pass
            case cst.If() if parent.test is child:
                return parent.orelse if negated else parent.body
            case cst.IfExp() if parent.test is child:
                return parent.orelse if negated else parent.body
            case _:
                return None
        child = parent
    return None


def uses_of_variable(module: Module, assign: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Where the file reads the single name that this statement assigns."""
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return
    target = dotted(assign.targets[0].target)
    for node in module.nodes:
        if (
            target
            and isinstance(node, cst.Name | cst.Attribute)
            and dotted(node) == target
            and not module.is_stored(node)
        ):
            yield node

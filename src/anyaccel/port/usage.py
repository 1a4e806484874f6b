# SPDX-License-Identifier: Apache-2.0
"""What the value of an expression is used for, told from where it stands: as a device, an index, a backend, a key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from anyaccel.port import tables
from anyaccel.port.syntax import OTHER_DEVICE, device_index, dotted, names_in_target, text_of
from anyaccel.port.tree import Tree

_OPTION_FUNCTIONS = {"add_argument", "option", "Option", "Argument", "argument"}
# What looks up by a key or name -> the position of the default.
LOOKUPS = {"get": 1, "pop": 1, "setdefault": 1, "getenv": 1, "getattr": 2}


@dataclass(frozen=True)
class Role:
    """How a value is used.

    Attributes:
        kind: argument, assigned, default, returned, value (of a dict), key, comparison, text, annotation,
            arithmetic, test or other.
        names: what the receiver is called: keyword, target, parameter, function, key.
        callee: of an argument: the function's full name where it is imported, else its last name after a dot.
        position: of an argument without keyword.
        plural: the value is an element of a list or the like.
        call: of an argument.
    """

    kind: str
    names: tuple[str, ...] = ()
    callee: str = ""
    position: int = -1
    plural: bool = False
    call: cst.Call | None = None


def role(tree: Tree, node: cst.CSTNode) -> Role:
    """How the value of this expression is used."""
    plural = mixed = False
    child = node
    for parent in tree.parents(node):
        found = _role_in(tree, parent, child, plural)
        if found is not None:
            # A mixed list may be of the devices that something supports.
            return Role("value", plural=True) if mixed and found.kind not in ("comparison", "key", "text") else found
        mixed = mixed or (isinstance(parent, cst.List | cst.Tuple | cst.Set) and not _all_cuda(parent))
        plural = plural or isinstance(parent, cst.List | cst.Tuple | cst.Set)
        child = parent
    return Role("other")


def _all_cuda(collection: cst.List | cst.Tuple | cst.Set) -> bool:
    texts = [text_of(element.value) for element in collection.elements]
    return all(text is None or text.startswith("cuda") for text in texts)


def _role_in(tree: Tree, parent: cst.CSTNode, child: cst.CSTNode, plural: bool) -> Role | None:
    """The role that this parent gives, or None where the parent's own value is what counts."""
    match parent:
        case cst.IfExp():
            if parent.test is child:
                return Role("test")
            other = text_of(parent.orelse if parent.body is child else parent.body)
            # "device" or "cuda" is a choice between words, not between devices.
            return Role("text") if other is not None and OTHER_DEVICE.fullmatch(other or "cpu") is None else None
        case cst.BooleanOperation():
            return Role("test") if isinstance(parent.operator, cst.And) and parent.left is child else None
        case cst.List() | cst.Tuple() | cst.Set() | cst.Element() | cst.NamedExpr():
            return None
        case cst.Arg():
            found = _argument(tree, parent, plural)
            asked = found.callee in (".startswith", "hasattr") and not found.names
            return Role("comparison", callee=found.callee, plural=plural, call=found.call) if asked else found
        case cst.DictElement():
            if parent.key is child:
                return Role("key", plural=plural)
            return Role("value", (text_of(parent.key) or "",), plural=plural)
        case cst.Assign():
            names = [name for target in parent.targets for name in names_in_target(target.target)]
            return Role("assigned", tuple(names), plural=plural)
        case cst.AnnAssign():
            annotation = tree.module.code_for_node(parent.annotation.annotation)
            kind = "other" if "Literal" in annotation else "assigned"
            return Role(kind, tuple(names_in_target(parent.target)), plural=plural)
        case cst.Param():
            literal = parent.annotation is not None and "Literal" in tree.module.code_for_node(
                parent.annotation.annotation
            )
            return Role("other" if literal else "default", (parent.name.value,), plural=plural)
        case cst.Return():
            function = tree.enclosing(parent, cst.FunctionDef)
            return Role(
                "returned", (function.name.value,) if isinstance(function, cst.FunctionDef) else (), plural=plural
            )
        case cst.Comparison() | cst.ComparisonTarget():
            return Role("comparison", plural=plural)
        case cst.Index() | cst.Slice():
            return Role("key")
        case cst.FormattedStringExpression() | cst.ConcatenatedString():
            return Role("text")
        case cst.Attribute():
            return Role("text")
        case cst.Annotation():
            return Role("annotation")
        case cst.BinaryOperation() | cst.UnaryOperation():
            return Role("arithmetic")
        case cst.If() | cst.While() | cst.Assert():
            return Role("test")
    return Role("other", plural=plural)


def _argument(tree: Tree, arg: cst.Arg, plural: bool) -> Role:
    call = tree.parent(arg)
    if not isinstance(call, cst.Call):
        return Role("other", plural=plural)  # a base or keyword of a class
    callee = tree.imported(call.func)
    if callee is None:
        callee = "." + call.func.attr.value if isinstance(call.func, cst.Attribute) else dotted(call.func) or ""
    if arg.star:
        return Role("other", callee=callee, call=call)
    if arg.keyword is not None:
        return Role("argument", (arg.keyword.value,), callee, plural=plural, call=call)
    return Role("argument", (), callee, call.args.index(arg), plural, call)


def _called(pattern: re.Pattern[str], names: Sequence[str]) -> bool:
    return bool(names) and all(pattern.fullmatch(name) for name in names)


def last_name(callee: str) -> str:
    return callee.rpartition(".")[2]


def is_foreign(tree: Tree, found: Role) -> bool:
    """Whether the value goes to a package whose devices are its own affair."""
    if found.call is None:
        return False
    root = found.callee.split(".")[0]
    if root in tables.FOREIGN or found.callee.startswith("torch.utils.cpp_extension."):
        return True  # what is compiled is not for the device in use
    if isinstance(found.call.func, cst.Attribute) and not root:
        base: cst.CSTNode = found.call.func
        while isinstance(base, cst.Attribute | cst.Call | cst.Subscript):
            base = base.func if isinstance(base, cst.Call) else base.value
        imported = tree.imported(base) or ""
        return imported.split(".")[0] in tables.FOREIGN
    return False


def is_beside_foreign(tree: Tree, node: cst.CSTNode, found: Role) -> bool:
    """Whether a value of a dict stands in a class or function that uses such a package, to which it may be given."""
    function = None
    if found.kind == "value":
        function = tree.enclosing(node, cst.ClassDef) or tree.enclosing(node, cst.FunctionDef)
    named = (each for each in tree.nodes if isinstance(each, cst.Name) and each.value in tree.imported_names)
    return function is not None and any(
        (tree.imported(each) or "").split(".")[0] in tables.FOREIGN and function in tree.parents(each) for each in named
    )


def is_within_foreign(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether the method or class around a place uses such a package, and nothing of torch."""
    around = tree.enclosing(node, cst.ClassDef) or tree.enclosing(node, cst.FunctionDef)
    if around is None:
        return False
    roots = {
        (tree.imported(each) or "").split(".")[0]
        for each in tree.nodes
        if isinstance(each, cst.Name) and each.value in tree.imported_names and around in tree.parents(each)
    }
    return bool(roots & tables.FOREIGN) and ("torch" not in roots or _is_assigned_to_self(tree, node))


def of_cuda_and_cpu(tree: Tree, own: frozenset[str]) -> dict[cst.CSTNode, str]:
    """Where a package that knows CUDA and the CPU only may get what is placed: the file, a class, a function, a call.

    Args:
        tree: of the file.
        own: the names of the packages and modules that are ported, which are no others.
    """
    found: dict[cst.CSTNode, str] = {}
    for node in tree.nodes:
        names: list[str] = []
        if type(node) is cst.Import:
            names = [dotted(each.name) or "" for each in node.names]
        elif type(node) is cst.ImportFrom and node.module is not None and not node.relative:
            module = dotted(node.module) or ""
            parts = () if isinstance(node.names, cst.ImportStar) else node.names
            names = [module, *(f"{module}.{dotted(each.name)}" for each in parts)]
        elif type(node) is cst.Name and tables.OF_DGL.fullmatch(node.value):
            found[tree.module] = "dgl"  # Graph.atom_dgl_multigraph(...)
        elif type(node) is cst.Call and last_name(dotted(node.func) or "") == "fromDlpack":
            found[node] = "cupy"
        for name in names:
            package = next((each for each in tables.CUDA_OR_CPU if f"{name}.".startswith(f"{each}.")), "")
            if package and name.split(".")[0] not in own:
                function = tree.enclosing(node, cst.FunctionDef) or tree.module
                found[tree.enclosing(function, cst.ClassDef) or function] = package
    return found


def _is_assigned_to_self(tree: Tree, node: cst.CSTNode) -> bool:
    assign = tree.enclosing(node, cst.Assign, cst.BaseStatement)
    return isinstance(assign, cst.Assign) and (dotted(assign.targets[0].target) or "").startswith("self.")


def is_enumerated(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether it stands in a list of devices that has the CPU as well, as its name or in torch.device()."""
    for child in (node, tree.parent(tree.parent(node))):
        element = tree.parent(child)
        around = tree.parent(element)
        if isinstance(element, cst.Element) and isinstance(around, cst.List | cst.Tuple | cst.Set):
            assign = tree.parent(around)
            if isinstance(assign, cst.Assign) and isinstance(assign.targets[0].target, cst.Tuple | cst.List):
                return False  # cuda, cpu = torch.device("cuda"), torch.device("cpu")
            values = [each.value for each in around.elements]
            values += [arg.value for each in values if isinstance(each, cst.Call) for arg in each.args[:1]]
            return any(text_of(each) == "cpu" for each in values)
    return False


def is_supported(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether it is alone in a list that is passed as `devices=` or `device_types=`: register(devices=("cuda",))."""
    element = tree.parent(node)
    around = tree.parent(element)
    if not isinstance(element, cst.Element) or not isinstance(around, cst.List | cst.Tuple | cst.Set):
        return False
    arg = tree.parent(around)
    named = isinstance(arg, cst.Arg) and arg.keyword is not None and arg.keyword.value in ("devices", "device_types")
    return named and len(around.elements) == 1 and device_index(node) is None


def _is_named(tree: Tree, found: Role, single: re.Pattern[str], option: re.Pattern[str], part: str) -> bool:
    """Whether the receiver's name, or the option or key beside the value, says what the value is."""
    if found.kind in ("assigned", "default", "returned", "value"):
        return _called(single, found.names)
    if found.kind != "argument" or found.call is None or is_foreign(tree, found):
        return False
    function = last_name(found.callee)
    strings = [text for arg in found.call.args if arg.keyword is None for text in [text_of(arg.value)] if text]
    if found.names == ("default",):
        keywords = {arg.keyword.value for arg in found.call.args if arg.keyword is not None}
        named = function in _OPTION_FUNCTIONS and any(option.search(text) for text in strings)
        return (
            named
            and not keywords & {"choices", "nargs", "action"}
            and "Choice" not in tree.module.code_for_node(found.call)
        )
    if found.names:
        return _called(single, found.names)
    if LOOKUPS.get(function) == found.position:
        name = text_of(found.call.args[found.position - 1].value)
        return name is not None and part in name.lower() and single.fullmatch(name) is not None
    return False


def is_device(tree: Tree, found: Role) -> bool:
    """Whether a value in this role is a device for sure."""
    if found.kind == "argument" and not found.names and not found.plural:
        if is_foreign(tree, found):
            return False
        if found.position == 0 and found.callee in (".to", ".cuda"):
            return True
        if tables.DEVICE_POSITIONS.get(found.callee) == found.position:
            return True
    pattern = tables.DEVICES_NAME if found.plural else tables.DEVICE_NAME
    if found.plural and not any(name.lower().endswith("devices") for name in found.names):
        return False
    if found.kind == "argument" and found.names == ("device_type",) and last_name(found.callee) == "device":
        return False
    return _is_named(
        tree, found, _RETURNS_DEVICE if found.kind == "returned" else pattern, tables.DEVICE_OPTION, "device"
    )


_RETURNS_DEVICE = re.compile(
    r"_*(?:get|default|pick|choose|select|current|target|infer)?_?(?:\w+_)?device(?:_type|_name|_str|_string)?"
)


def is_backend(tree: Tree, found: Role) -> bool:
    """Whether a string in this role is the name of a process group's backend for sure."""
    if starts_processes(found):
        return True
    return not found.plural and _is_named(tree, found, tables.BACKEND_NAME, re.compile("backend"), "backend")


def starts_processes(found: Role) -> bool:
    """Whether the value goes to what starts a process group with this backend."""
    if found.kind != "argument" or last_name(found.callee) not in (
        "init_process_group",
        "init_distributed",
        "new_group",
    ):
        return False
    first = last_name(found.callee) != "new_group" and not found.names and found.position == 0
    return first or found.names in (("backend",), ("dist_backend",))


def is_divisor(tree: Tree, node: cst.CSTNode) -> bool:
    """Whether another number is divided by it, as in `rank % n`, which fails where it is 0."""
    parent = tree.parent(node)
    if not isinstance(parent, cst.BinaryOperation) or parent.right is not node:
        return False
    return isinstance(parent.operator, cst.Modulo | cst.FloorDivide)


_INDEX_FUNCTIONS = {"int", "str", "print", "range", "hash", "set_device", "append_index"}


def is_index(tree: Tree, found: Role) -> bool:
    """Whether a value in this role is the index of a device for sure."""
    if found.kind in ("comparison", "arithmetic", "text", "key"):
        return True
    if found.kind == "argument":
        if found.names:
            return _called(tables.INDEX_NAME, found.names) or found.names == ("output_device",)
        if found.callee == "torch.device":
            return found.position == 1
        torch_cuda = found.callee.startswith("torch.cuda.") and last_name(found.callee) not in tables.CLASSES
        return torch_cuda or found.callee in _INDEX_FUNCTIONS
    return found.kind in ("assigned", "default", "returned", "value") and _called(tables.INDEX_NAME, found.names)

# SPDX-License-Identifier: Apache-2.0
"""Rules on methods of tensors and modules: .cuda(), .is_cuda and .pin_memory()."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port import mixed, tables, usage
from anyaccel.port.candidate import Candidate
from anyaccel.port.context import Context
from anyaccel.port.syntax import bind, call, device_index, dotted, is_simple, keyword, same_parentheses, text_of

_STORAGE = ("storage", "untyped_storage", "typed_storage")


def find_call(ctx: Context, node: cst.Call) -> Iterator[Candidate]:
    """x.cuda(...) and x.pin_memory(...)."""
    function = node.func
    if not isinstance(function, cst.Attribute) or ctx.tree.imported(function.value) is not None:
        return
    if function.attr.value == "cuda":
        yield _cuda(ctx, node, function)
    elif function.attr.value == "pin_memory" and not _is_accelerator(ctx, function.value):
        yield _pin_memory(ctx, node, function)


def _cuda(ctx: Context, node: cst.Call, function: cst.Attribute) -> Candidate:
    def report(why: str) -> Candidate:
        return Candidate(node, "ACC301", f"`.cuda(...)`: not fixed: {why}")

    receiver = function.value
    if _is_super(receiver):
        return report("a class overrides cuda(); let it override to()")
    if _is_storage(receiver):
        return report("a storage has no to(device); copy the tensor")
    if dotted(receiver) in ("self", "cls") and _own_method(ctx, node, "cuda"):
        return report("the class has its own cuda(); let it have to()")
    own = ctx.own_class(receiver, ctx.project.own_cuda)
    if own:
        return report(
            f"{own} has its own cuda() and no to(): a tensor has two readings here, to(device_name()) or that method"
        )
    if _is_replaced(ctx, receiver):
        return report("the file gives it a cuda() of its own")
    package = _cuda_only(ctx, receiver)
    if package:
        return report(f"it comes from {package}, whose cuda() may do more than to()")
    bound = bind(node.args, ("device", "non_blocking", "memory_format"))
    if bound is None:
        return report("its arguments cannot be told apart")
    device = bound.pop("device", None)
    value = device.value if device is not None else None
    index: cst.BaseExpression | None = None
    as_it_is = False
    if value is not None and not (isinstance(value, cst.Name) and value.value == "None"):
        kind = _argument_kind(ctx, value)
        if not kind:
            shown = ctx.tree.module.code_for_node(value)
            return report(f"{shown} may be an index or a device: to(device_name(i)) or to(device)")
        as_it_is = kind == "device"
        index = value

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call) and isinstance(old.func, cst.Attribute)
        changed = bind(old.args, ("device", "non_blocking", "memory_format")) or {}
        place = changed.pop("device", None)
        if place is None or index is None:
            name: cst.BaseExpression = call(ctx.method("device_name"))
        elif as_it_is:
            name = place.value
        else:
            name = call(ctx.method("device_name"), place.value)
        rest = [
            keyword(key, arg.value).with_changes(comma=arg.comma, whitespace_after_arg=arg.whitespace_after_arg)
            if arg.keyword is None
            else arg
            for key, arg in changed.items()
        ]
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        if place is not None:
            layout = place.comma if rest or isinstance(place.comma, cst.Comma) else cst.MaybeSentinel.DEFAULT
            first = cst.Arg(name, comma=layout, whitespace_after_arg=place.whitespace_after_arg)
        else:
            first = cst.Arg(name, comma=comma if rest else cst.MaybeSentinel.DEFAULT)
        to = old.func.with_changes(attr=cst.Name("to"))
        return old.with_changes(func=to, args=[first, *rest])

    use = ".to(get_accelerator().device_name(...))" if not as_it_is else ".to(...)"
    return Candidate(node, "ACC301", f"`.cuda(...)`; use `{use}`", fix, needs_accelerator=not as_it_is, harmless=True)


def _is_replaced(ctx: Context, receiver: cst.CSTNode) -> bool:
    """Whether the file assigns something to cuda of what has this name, as in `model.cuda = lambda: model`."""
    name = dotted(receiver)
    stored = (each for each in ctx.tree.attributes if each.attr.value == "cuda" and ctx.is_stored(each))
    return name is not None and any(dotted(each.value) == name for each in stored)


def _cuda_only(ctx: Context, receiver: cst.CSTNode) -> str:
    """The package that needs CUDA of which one of its classes made this value; empty for none."""
    for value in mixed.assignments(ctx, receiver):
        name = (ctx.tree.imported(value.func) or "") if isinstance(value, cst.Call) else ""
        if (root := name.split(".")[0]) in tables.CUDA_ONLY:
            return root
    return ""


def find_map_location(ctx: Context, node: cst.Lambda) -> Iterator[Candidate]:
    """`map_location=lambda storage, location: storage.cuda(i)`: storages take another path than tensors do."""
    found = usage.role(ctx.tree, node)
    if found.names != ("map_location",) and not (found.callee == "torch.load" and found.position == 1):
        return
    if not any(node in ctx.tree.parents(each) and each.attr.value == "cuda" for each in ctx.tree.attributes):
        return
    ctx.claim(node)
    index: cst.BaseExpression | None = None
    body = node.body
    fits = isinstance(body, cst.Call) and len(body.args) <= 1 and len(node.params.params) == 2
    if fits and isinstance(body, cst.Call):
        storage = node.params.params[0].name.value
        fits = dotted(body.func) == f"{storage}.cuda" and not any(each.keyword or each.star for each in body.args)
        index = body.args[0].value if body.args else None
        kind = "" if index is None else _argument_kind(ctx, index)
        fits = fits and (index is None or (kind == "index" and is_simple(index)))
    if not fits:
        why = "a storage is moved; give map_location the name of a device"
        yield Candidate(node, "ACC301", f"`.cuda(...)`: not fixed: {why}")
        return

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        return same_parentheses(call(ctx.method("device_name"), *([] if index is None else [index])), old)

    use = "get_accelerator().device_name(...)"
    yield Candidate(node, "ACC301", f"storages moved by `.cuda(...)`; use `{use}`", fix, drops=True)


def _argument_kind(ctx: Context, value: cst.BaseExpression) -> str:
    """Whether the argument of cuda() is an "index" or a "device"; empty when it cannot be told."""
    if isinstance(value, cst.Integer):
        return "index"
    if device_index(value) is not False:
        return "device"  # the rule on device strings writes device_name(...)
    if isinstance(value, cst.Call):
        called = ctx.tree.imported(value.func)
        return {"torch.device": "device", "torch.cuda.current_device": "device"}.get(called or "", "")
    name = dotted(value) or ""
    if isinstance(value, cst.Subscript):
        name = dotted(value.value) or ""
    last = name.rpartition(".")[2]
    if isinstance(value, cst.Attribute) and last == "device" and name.split(".")[0] not in tables.OPTIONS:
        return "device"
    if tables.INDEX_NAME.fullmatch(last) and last.lower() not in ("id",):
        return "index"
    return ""


def _is_super(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and dotted(node.func) == "super"


def _is_storage(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in _STORAGE
    return (dotted(node) or "").rpartition(".")[2].lower().endswith("storage")


def _own_method(ctx: Context, node: cst.CSTNode, name: str) -> bool:
    around = ctx.tree.enclosing(node, cst.ClassDef)
    return isinstance(around, cst.ClassDef) and any(
        isinstance(each, cst.FunctionDef) and each.name.value == name for each in around.body.body
    )


def find_definition(ctx: Context, node: cst.FunctionDef) -> Iterator[Candidate]:
    """A class's own cuda()."""
    around = ctx.tree.enclosing(node, cst.ClassDef, cst.FunctionDef)
    if node.name.value == "cuda" and isinstance(around, cst.ClassDef) and node.params.params[:1]:
        yield Candidate(
            node.name, "ACC301", "a class defines cuda(); not fixed: let it define to(device)", breaks=False
        )


def find_method(ctx: Context, node: cst.Attribute) -> Iterator[Candidate]:
    """`x.cuda` that is not called: the method itself, a module of another package, or an option."""
    parent = ctx.tree.parent(node)
    called = isinstance(parent, cst.Call) and parent.func is node
    option = isinstance(node.value, cst.Attribute) or usage.last_name(dotted(node.value) or "") in tables.OPTIONS
    if called or option or (ctx.tree.imported(node) or "").startswith("torch."):
        return
    if ctx.tree.enclosing(node, cst.Import, cst.ImportFrom, cst.BaseStatement).__class__ in (
        cst.Import,
        cst.ImportFrom,
    ):
        return
    if ctx.is_stored(node):
        assign = ctx.tree.enclosing(node, cst.Assign, cst.BaseStatement)
        if not isinstance(assign, cst.Assign) or not isinstance(assign.value, cst.Lambda):
            return
        why = "cuda() is replaced; let it be to(device)"
    else:
        why = "it is not called: a method as a value, an option or another package's module"
    yield Candidate(node, "ACC301", f"`{ctx.tree.module.code_for_node(node)}`: not fixed: {why}", breaks=False)


def find_attribute(ctx: Context, node: cst.Attribute) -> Iterator[Candidate]:
    """x.is_cuda."""
    if node.attr.value != "is_cuda" or ctx.is_stored(node):
        return

    def report(why: str) -> Candidate:
        return Candidate(node, "ACC302", f"`.is_cuda`: not fixed: {why}", asks=True)

    parent = ctx.tree.parent(node)
    name = dotted(node.value) or ""
    last = name.rpartition(".")[2]
    if isinstance(parent, cst.Call) and parent.func is node:
        yield report("it is called, so it is not a tensor's")
    elif last in tables.OPTIONS or "packed" in name.lower():
        yield report(f"{name} need not be a tensor")
    elif _kept_as_cuda(ctx, node):
        yield report("it is kept under a name that says CUDA, so it may choose something of CUDA")
    elif ctx.says_so(node):
        yield report("a text there is about CUDA")
    elif ctx.beside_vendors(node):
        yield report("the code chooses between vendors by itself")
    elif name.split(".")[0] in ctx.tree.imported_names and ctx.tree.imported(node.value) is not None:
        yield report(f"{name} is no tensor")
    else:

        def fix(old: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(old, cst.Attribute)
            return same_parentheses(call(ctx.method("on_accelerator"), old.value), old)

        message = "`.is_cuda`; use `get_accelerator().on_accelerator(...)`"
        yield Candidate(node, "ACC302", message, fix, drops=True, guard=True, asks=True, question="tensor")


def _is_accelerator(ctx: Context, node: cst.CSTNode) -> bool:
    name = dotted(node.func) if isinstance(node, cst.Call) else dotted(node)
    return name is not None and (name == ctx.accelerator or "accelerator" in name.lower())


def _kept_as_cuda(ctx: Context, node: cst.Attribute) -> bool:
    """Whether the value goes to a variable or argument called after CUDA."""
    found = usage.role(ctx.tree, node)
    if found.kind in ("assigned", "argument", "value") and any("cuda" in name.lower() for name in found.names):
        return True
    assign = ctx.tree.enclosing(node, cst.Assign, cst.BaseStatement)
    if found.kind != "assigned" or not isinstance(assign, cst.Assign):
        return False
    return any("cuda" in ctx.tree.module.code_for_node(target).lower() for target in assign.targets)


def _is_asked_for(ctx: Context, receiver: cst.BaseExpression, name: str) -> bool:
    """Whether the file asks hasattr(receiver, name)."""
    asked = dotted(receiver)
    found = (each.args for each in ctx.calls.get("hasattr", ()) if len(each.args) == 2)
    return any(text_of(key.value) == name and dotted(value.value) == asked is not None for value, key in found)


def _annotation(ctx: Context, receiver: cst.CSTNode) -> str:
    """The code of the annotation of the parameter that the receiver is; empty for none."""
    function = ctx.tree.enclosing(receiver, cst.FunctionDef)
    if not isinstance(receiver, cst.Name) or not isinstance(function, cst.FunctionDef):
        return ""
    for each in (*function.params.params, *function.params.kwonly_params):
        if each.name.value == receiver.value and each.annotation is not None:
            return ctx.tree.module.code_for_node(each.annotation.annotation)
    return ""


def _pin_memory(ctx: Context, node: cst.Call, function: cst.Attribute) -> Candidate:
    def report(why: str) -> Candidate:
        return Candidate(node, "ACC303", f"`.pin_memory(...)`: not fixed: {why}", breaks=False)

    if node.args:
        return report("the accelerator chooses the device; leave its arguments out")
    if _is_super(function.value) or dotted(function.value) in ("self", "cls"):
        return report("a class has its own pin_memory()")
    if _is_asked_for(ctx, function.value, "pin_memory"):
        return report("hasattr() asks for it there, so it may be anything that has one")
    annotated = _annotation(ctx, function.value)
    if annotated and not re.search(r"\bTensor\b|\bAny\b", annotated):
        return report(f"by its annotation it is {annotated}, whose pin_memory() may do something else")
    own = ctx.own_class(function.value, ctx.project.own_pinning)
    if own:
        return report(f"{own} has its own pin_memory(), which get_accelerator().pin_memory() does not call")

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call) and isinstance(old.func, cst.Attribute)
        return same_parentheses(call(ctx.method("pin_memory"), old.func.value), old)

    return Candidate(node, "ACC303", "`.pin_memory()`; use `get_accelerator().pin_memory(...)`", fix, drops=True)

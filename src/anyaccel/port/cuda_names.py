# SPDX-License-Identifier: Apache-2.0
"""Rules on names of torch.cuda, however they were imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst

from anyaccel.port import answers, figures, mixed, tables, usage
from anyaccel.port.candidate import Candidate, Fix
from anyaccel.port.context import Context
from anyaccel.port.syntax import (
    attribute,
    bind,
    both,
    call,
    is_simple,
    keyword,
    renamed,
    same_parentheses,
    with_first,
)

Expression = cst.BaseExpression
_ASKS_FOR_GRAPHS = re.compile(r"""\.has\(["']graphs["']\)""")


def find(ctx: Context, node: cst.Name | cst.Attribute, full: str) -> Iterator[Candidate]:
    """What is to be said about a use of `full`, which begins with torch.cuda."""
    tail = full.removeprefix("torch.cuda").lstrip(".")
    first, _, rest = tail.partition(".")
    if first in tables.SUBMODULES and rest:
        first, _, rest = rest.partition(".")
    place = _Place(ctx, node, f"torch.cuda.{tail}" if tail else "torch.cuda")
    if ctx.is_stored(node):
        yield place.report("ACC501", "it is assigned to; patch the accelerator's method instead")
    elif not first:
        yield place.report(
            "ACC501", "the module itself is used as a value; pass get_accelerator() where its methods do"
        )
    elif first == "OutOfMemoryError" and not rest:
        yield place.torch_name("ACC110", "torch.OutOfMemoryError", "OutOfMemoryError")
    elif first == "amp":
        yield _amp(place, rest)
    elif first == "nvtx" and rest in tables.NVTX:
        yield _range(place, rest)
    elif rest:
        yield place.report("ACC501", _advice(first))
    elif place.in_annotation:
        yield place.report(
            "ACC501", "an annotation; it holds on every device, since torch.cuda can be imported", breaks=False
        )
    elif first == "current_device":
        yield _current_device(place)
    elif first == "default_generators":
        yield _default_generator(place)
    elif first in tables.TYPED_TENSORS:
        yield _typed_tensor(place, first)
    elif first in tables.CLASSES:
        yield _class(place, first)
    elif first in tables.GRAPH_FUNCTIONS:
        yield _graph(place, first)
    elif first in ("mem_get_info", "get_device_properties"):
        yield _memory_size(place, first)
    elif first == "is_bf16_supported":
        yield _bf16(place)
    elif first in tables.FUNCTIONS:
        yield _function(place, first)
    else:
        found = place.report("ACC501", _advice(first))
        found.asks = first == "is_initialized"
        yield found


def _graph(place: _Place, name: str) -> Candidate:
    """A graph: on a device without them a replay does nothing, so the program has to ask whether there are some."""
    found = place.method_call("ACC107", tables.GRAPH_FUNCTIONS[name])
    if found.fix is not None and not _ASKS_FOR_GRAPHS.search(place.tree.text):
        found.unfixed(
            "where a device has no graphs a replay does nothing, and the values of the capture stay: write the way "
            'without a graph behind `if get_accelerator().has("graphs"):` and run again'
        )
    return found


def _advice(name: str) -> str:
    return tables.ADVICE.get(name, tables.NO_COUNTERPART)


class _Place:
    """Where a name of torch.cuda stands, with the usual ways to deal with it."""

    def __init__(self, ctx: Context, node: cst.Name | cst.Attribute, shown: str) -> None:
        self.ctx = ctx
        self.tree = ctx.tree
        self.node = node
        self.shown = shown
        self.parent = ctx.tree.parent(node)
        self.call = self.parent if isinstance(self.parent, cst.Call) and self.parent.func is node else None
        self.in_annotation = ctx.tree.enclosing(node, cst.Annotation) is not None

    def report(self, code: str, advice: str, breaks: bool = True) -> Candidate:
        return Candidate(self.node, code, f"`{self.shown}`: {advice}", breaks=breaks)

    def fixed(self, code: str, use: str, fix: Fix, target: cst.CSTNode | None = None, **more: Any) -> Candidate:
        return Candidate(self.node, code, f"`{self.shown}`; use `{use}`", fix, target, **more)

    def method(self, name: str) -> Callable[[cst.CSTNode], Expression]:
        """Replaces the name by the accelerator's method."""
        return lambda old: same_parentheses(self.ctx.method(name), old)

    def method_call(self, code: str, method: tables.Method) -> Candidate:
        """A call whose arguments are the method's, with other keywords."""
        if self.call is None:
            return self.report(code, "only its calls can be replaced")
        names = dict(method.parameters)
        if bind(self.call.args, list(names)) is None:
            return self.report(code, f"{method.name}() does not take these arguments")

        def fix(old: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(old, cst.Call)
            return old.with_changes(func=self.ctx.method(method.name), args=renamed(old.args, names))

        return self.fixed(code, f"get_accelerator().{method.name}(...)", fix, self.call)

    def torch_name(self, code: str, shown: str, *names: str) -> Candidate:
        """The same thing under a name of torch that holds for every device."""
        torch = self.ctx.torch_at(self.node)
        if torch is None:
            return self.report(code, "the name `torch` is something else here")

        def fix(old: cst.CSTNode) -> cst.CSTNode:
            return same_parentheses(attribute(cst.Name(torch), *names), old)

        return self.fixed(code, shown, fix, needs_torch=True, needs_accelerator=False)


_ASK = {
    "hasattr",
    "getattr",
    "setattr",
    "isinstance",
    "callable",
    "signature",
    ".signature",
    "patch",
    ".patch",
    ".object",
}


def _function(place: _Place, name: str) -> Candidate:
    method = tables.FUNCTIONS[name]
    if name == "is_available":
        return _availability(place)
    if place.call is None:
        asked = usage.role(place.tree, place.node).callee in _ASK
        if asked or isinstance(place.parent, cst.Attribute):
            return place.report("ACC501", "the function itself is looked at; look at the accelerator's instead")
        return place.fixed("ACC101", f"get_accelerator().{method.name}", place.method(method.name))
    around = place.tree.parent(place.call)
    if isinstance(around, cst.Attribute) and around.attr.value in ("cuda_stream", "_as_parameter_"):
        return place.report("ACC501", "a raw CUDA stream is wanted; guard it")
    if isinstance(around, cst.Arg) and usage.role(place.tree, place.call).callee == ".record_stream":
        return place.report(
            "ACC501", "record_stream() wants a stream of the tensor's device; skip it where is_synchronized_device()"
        )
    if name == "device_count" and place.ctx.says_so(place.call):
        found = place.report("ACC101", "not fixed: a text there is about CUDA", breaks=False)
        found.asks = True
        return found
    if name == "device_count" and place.ctx.beside_vendors(place.call):
        return place.report("ACC101", "not fixed: the code chooses between vendors by itself", breaks=False)
    seeds = name in ("manual_seed", "manual_seed_all")
    if seeds and figures.has_another_seed(place.ctx, place.call):
        why = "on a CPU it is torch's own generator, which the file seeds with another number"
        return place.report("ACC101", f"not fixed: {why}", breaks=False)
    repeated = seeds and figures.is_repeated(place.ctx, place.call)
    if seeds and not repeated and not figures.is_behind_a_gpu(place.ctx, place.call):
        why = "on a CPU it is torch's own generator, which is not seeded with this number just before"
        return place.report("ACC101", f"not fixed: {why}", breaks=False)
    found = place.method_call("ACC101", method)
    found.guard = name == "device_count"
    # As a number of processes it is 0 without CUDA, and none was started.
    processes = usage.is_divisor(place.tree, place.call) or _only_divides(place)
    found.count = name == "device_count" and not processes
    found.count = found.count or ("memory" in name and figures.is_compared(place.ctx, place.call))
    found.harmless = repeated or (name in tables.HARMLESS and not seeds)
    return found


def _only_divides(place: _Place) -> bool:
    """Whether a number of devices is assigned to a variable that only says which device a rank has: rank % n."""
    assign = place.tree.parent(place.call) if place.call is not None else None
    if not isinstance(assign, cst.Assign) or not isinstance(assign.targets[0].target, cst.Name):
        return False
    uses = list(place.ctx.uses(assign.targets[0].target))
    return bool(uses) and all(usage.is_divisor(place.tree, each) for each in uses)


def _availability(place: _Place) -> Candidate:
    if place.call is None:
        return place.report("ACC101", "only its calls can be replaced")
    why = answers.means_cuda(place.ctx, place.call)
    if why:
        found = place.report("ACC101", f"not fixed: {why}; {answers.ANY_WILL_DO}", breaks=False)
        found.asks = True
        return found
    found = place.method_call("ACC101", tables.FUNCTIONS["is_available"])
    if found.fix is None:
        return found
    around = place.tree.parent(place.call)
    negated = isinstance(around, cst.UnaryOperation) and isinstance(around.operator, cst.Not)
    if negated:
        found.target = around

    def available(old: cst.CSTNode) -> cst.CSTNode:
        asked = call(place.ctx.method("is_available"))
        if isinstance(old, cst.UnaryOperation):
            return old.with_changes(expression=same_parentheses(asked, old.expression))
        return same_parentheses(asked, old)

    def exact(old: cst.CSTNode) -> cst.CSTNode:
        other = cst.ComparisonTarget(cst.Equal() if negated else cst.NotEqual(), cst.SimpleString('"cpu"'))
        asked = cst.Comparison(call(place.ctx.method("device_name")), [other])
        return same_parentheses(asked, old)

    found.fix, found.exact, found.start = available, exact, place.call
    found.guard, found.asks, found.question = True, True, "device_there"
    return found


def _bf16(place: _Place) -> Candidate:
    bound = bind(place.call.args, ["including_emulation"]) if place.call is not None else None
    value = bound.get("including_emulation") if bound is not None else None
    if place.call is None or value is None or not _is_false(value.value):
        return place.report("ACC501", _advice("is_bf16_supported"))
    old_call = place.call

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call)
        other = cst.ComparisonTarget(cst.NotEqual(), cst.SimpleString('"cpu"'))
        asked = both(
            cst.Comparison(call(place.ctx.method("device_name")), [other]), call(place.ctx.method("is_bf16_supported"))
        )
        if not isinstance(place.tree.parent(old_call), cst.Assign | cst.Arg | cst.If | cst.Return):
            return asked.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return same_parentheses(asked, old)

    use = 'get_accelerator().device_name() != "cpu" and get_accelerator().is_bf16_supported()'
    return place.fixed("ACC101", use, fix, place.call, drops=True)


def _is_false(node: Expression) -> bool:
    return isinstance(node, cst.Name) and node.value == "False"


def _current_device(place: _Place) -> Candidate:
    if place.call is None or place.call.args:
        return place.report("ACC102", _advice("current_device"))
    found = usage.role(place.tree, place.call)
    if found.names == ("device_id",) and usage.last_name(found.callee) in ("FullyShardedDataParallel", "FSDP"):
        torch = place.ctx.torch_at(place.node)
        if torch is None:
            return place.report("ACC102", _advice("current_device"))

        def device(old: cst.CSTNode) -> cst.CSTNode:
            name = call(place.ctx.method("current_device_name"))
            return same_parentheses(call(attribute(cst.Name(torch), "device"), name), old)

        use = "torch.device(get_accelerator().current_device_name())"
        return place.fixed("ACC102", use, device, place.call, needs_torch=True)
    kind = figures.device_or_index(place.ctx, place.call)
    if not kind:
        return place.report("ACC102", _advice("current_device"))
    if kind == "joined":  # 'cuda:' before it: the rule on device strings writes current_device_name()
        return place.fixed("ACC102", "get_accelerator().current_device()", place.method("current_device"))
    name = "current_device_name" if kind == "device" else "current_device"
    return place.fixed("ACC102", f"get_accelerator().{name}()", place.method(name))


def _default_generator(place: _Place) -> Candidate:
    item = place.parent
    if not isinstance(item, cst.Subscript) or item.value is not place.node or len(item.slice) != 1:
        return place.report("ACC103", "default_generator(i) gives one of them; use it for each index")
    index = item.slice[0].slice
    if not isinstance(index, cst.Index) or index.star or place.ctx.is_stored(item):
        return place.report("ACC103", "default_generator(i) gives one of them; use it for each index")

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Subscript)
        inner = old.slice[0].slice
        assert isinstance(inner, cst.Index)
        return same_parentheses(call(place.ctx.method("default_generator"), inner.value), old)

    return place.fixed("ACC103", "get_accelerator().default_generator(...)", fix, item, drops=True)


def _amp(place: _Place, rest: str) -> Candidate:
    name = rest.rpartition(".")[2]
    if name not in tables.AMP or rest not in (name, f"autocast_mode.{name}", f"grad_scaler.{name}"):
        return place.report("ACC104", "torch.amp has the parts of it that hold for every device")
    if mixed.has_cpus_own(place.ctx):
        return place.report("ACC104", f"not fixed: {mixed.WHY_CPUS}")
    if place.call is None:
        return _amp_reference(place, name)
    parameters = tables.AMP[name]
    bound = bind(place.call.args, parameters)
    torch = place.ctx.torch_at(place.node)
    if bound is None or torch is None:
        return place.report("ACC104", f"torch.amp.{name} takes device_type first; these arguments cannot be told apart")
    if name.startswith("custom_") and parameters[0] in bound:
        return place.report("ACC104", f"torch.amp.{name} needs device_type=")

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call)
        args = list(old.args)
        if name == "autocast":  # its parameters have another order in torch.amp
            args = [_named(arg, parameters[i]) for i, arg in enumerate(args)]
        device: cst.Arg = cst.Arg(call(place.ctx.method("device_name")))
        if name.startswith("custom_"):
            device = keyword("device_type", device.value)
        args = with_first(old.with_changes(args=args), device)
        if not name.startswith("custom_"):
            args = list(mixed.kept_off(place.ctx, place.node, args, bound.get("enabled")))
        return old.with_changes(func=attribute(cst.Name(torch), "amp", name), args=args)

    use = f"torch.amp.{name}(get_accelerator().device_name(), ...)"
    return place.fixed("ACC104", use, fix, place.call, needs_torch=True)


def _named(arg: cst.Arg, name: str) -> cst.Arg:
    if arg.keyword is not None:
        return arg
    return keyword(name, arg.value).with_changes(comma=arg.comma, whitespace_after_arg=arg.whitespace_after_arg)


def _amp_reference(place: _Place, name: str) -> Candidate:
    """`@custom_fwd`, an annotation or an isinstance; anything else cannot be told."""
    torch = place.ctx.torch_at(place.node)
    if torch is None:
        return place.report("ACC104", "the name `torch` is something else here")
    if name.startswith("custom_") and isinstance(place.parent, cst.Decorator):

        def fix(old: cst.CSTNode) -> cst.CSTNode:
            device = keyword("device_type", call(place.ctx.method("device_name")))
            return call(attribute(cst.Name(torch), "amp", name), device)

        return place.fixed("ACC104", f"torch.amp.{name}(device_type=...)", fix, needs_torch=True)
    checked = usage.role(place.tree, place.node)
    if name == "GradScaler" and (place.in_annotation or (checked.callee == "isinstance" and checked.position == 1)):
        return place.torch_name("ACC104", "torch.amp.GradScaler", "amp", "GradScaler")
    return place.report(
        "ACC104", f"torch.amp.{name} needs the device as its first argument", breaks=not place.in_annotation
    )


def _range(place: _Place, name: str) -> Candidate:
    if place.call is None:
        return place.fixed("ACC105", f"get_accelerator().{name}", place.method(name))
    if not isinstance(place.tree.parent(place.call), cst.Expr):
        return place.report("ACC105", "the depth that it returns is used; the accelerator's method returns nothing")
    found = place.method_call("ACC105", tables.NVTX[name])
    found.harmless = True
    return found


def _typed_tensor(place: _Place, name: str) -> Candidate:
    checked = usage.role(place.tree, place.node)
    if place.call is None and not (checked.callee == "isinstance" and checked.position == 1):
        return place.report(
            "ACC106", f"a tensor type as a value; use dtype= and device=, get_accelerator().{name} only makes tensors"
        )
    if place.call is not None and any(arg.keyword is not None for arg in place.call.args):
        return place.report("ACC106", f"get_accelerator().{name} takes no keywords")
    found = place.fixed("ACC106", f"get_accelerator().{name}", place.method(name))
    if place.call is None:  # it asks for the tensor's device as well, as x.is_cuda does
        found.guard, found.asks, found.question, found.start = True, True, "tensor", checked.call
    return found


def _class(place: _Place, name: str) -> Candidate:
    checked = usage.role(place.tree, place.node)
    instance_of = checked.callee == "isinstance" and checked.position == 1
    if place.call is None and not instance_of:
        return place.report(
            "ACC108", f"get_accelerator().{name} depends on the device at run time; only calls are replaced"
        )
    return place.fixed("ACC108", f"get_accelerator().{name}", place.method(name))


def _memory_size(place: _Place, name: str) -> Candidate:
    """get_device_properties(i).total_memory, mem_get_info(i)[0] and [1], or both taken apart."""
    outer = place.tree.parent(place.call) if place.call is not None else None
    if place.call is None or bind(place.call.args, ["device"]) is None:
        return place.report("ACC501", _advice(name))
    if name == "get_device_properties" and isinstance(outer, cst.Attribute) and outer.attr.value == "total_memory":
        return place.fixed(
            "ACC109", "get_accelerator().total_memory(...)", _sized(place, "total_memory"), outer, drops=True
        )
    if name == "mem_get_info" and isinstance(outer, cst.Subscript) and len(outer.slice) == 1:
        index = outer.slice[0].slice
        if isinstance(index, cst.Index) and isinstance(index.value, cst.Integer) and index.value.value in "01":
            method = ("available_memory", "total_memory")[int(index.value.value)]
            return place.fixed("ACC109", f"get_accelerator().{method}(...)", _sized(place, method), outer, drops=True)
    if name == "mem_get_info" and isinstance(outer, cst.Assign) and len(outer.targets) == 1:
        target = outer.targets[0].target
        if (
            isinstance(target, cst.Tuple)
            and len(target.elements) == 2
            and all(is_simple(a.value) for a in place.call.args)
        ):
            return place.fixed("ACC109", "get_accelerator().available_memory(...)", _both_sizes(place), place.call)
    return place.report("ACC501", _advice(name))


def _sized(place: _Place, method: str) -> Fix:
    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Attribute | cst.Subscript)
        inner = old.value
        assert isinstance(inner, cst.Call)
        args = renamed(inner.args, {"device": "device_index"})
        return same_parentheses(inner.with_changes(func=place.ctx.method(method), args=args), old)

    return fix


def _both_sizes(place: _Place) -> Fix:
    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call)
        args = renamed(old.args, {"device": "device_index"})
        sizes = [old.with_changes(func=place.ctx.method(m), args=args) for m in ("available_memory", "total_memory")]
        return cst.Tuple([cst.Element(size.with_changes(lpar=[], rpar=[])) for size in sizes], lpar=[], rpar=[])

    return fix

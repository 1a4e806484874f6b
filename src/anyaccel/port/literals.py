# SPDX-License-Identifier: Apache-2.0
"""Rules on strings: devices, the backend of a process group, CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from anyaccel.port import mixed, tables, usage
from anyaccel.port.candidate import Candidate, Fix
from anyaccel.port.context import Context
from anyaccel.port.syntax import bind, call, device_index, dotted, same_parentheses, text_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_ROCM = re.compile("(?:ROCR|HIP)_VISIBLE_DEVICES")
_UNCLEAR = {
    "comparison": "a comparison may mean CUDA itself; ask on_accelerator(tensor) or has(...)",
    "key": "a key has to be what others look up",
    "value": "it is not clear that this is a device",
    "text": "it is part of a text",
}
_COMPARED = (
    "a comparison has two readings: CUDA itself (leave it), or any accelerator "
    '(compare with `get_accelerator().device_name()`, or `!= "cpu"` where the CPU has a way of its own)'
)
_BACKENDS = re.compile(r"(?:\w+:\w+,)*cuda:\w+(?:,\w+:\w+)*")
_TENSOR_TYPE = re.compile(r"torch\.cuda\.\w+Tensor")
_ENVIRONMENTS = re.compile(r"(?:os\.)?environ|(?:\w+_)?env(?:iron)?(?:_vars|_copy)?", re.IGNORECASE)


def find_device(ctx: Context, node: cst.BaseExpression) -> Iterator[Candidate]:
    """'cuda', 'cuda:0', f'cuda:{i}' and the like."""
    index = device_index(node)
    if index is False:
        return
    parent = ctx.tree.parent(node)
    if isinstance(parent, cst.Expr | cst.ConcatenatedString):
        return
    found = usage.role(ctx.tree, node)
    if usage.is_enumerated(ctx.tree, node):
        why = "the CPU is listed beside it, so it is one of the devices that there may be"
        yield Candidate(node, "ACC202", f"a CUDA device's name: not fixed: {why}")
        return
    if usage.is_supported(ctx.tree, node):
        why = "a list that is called devices may say what is supported"
        yield Candidate(node, "ACC202", f"a CUDA device's name: not fixed: {why}", breaks=False)
        return
    if found.callee == "torch.device" and found.names in ((), ("type",)) and found.position <= 0:
        yield _device_object(ctx, node, found)
        return
    if found.kind == "comparison":
        yield _compared(ctx, node)
        return
    if not usage.is_device(ctx.tree, found) or usage.is_beside_foreign(ctx.tree, node, found):
        why = _UNCLEAR.get(found.kind, "it is not clear that this is a device")
        quiet = found.kind in ("key", "text", "annotation")
        yield Candidate(node, "ACC202", f"a CUDA device's name: not fixed: {why}", breaks=not quiet)
        return
    if mixed.is_switch(found) and isinstance(ctx.tree.parent(node), cst.Arg):
        yield mixed.by_name(ctx, node, found)
        return

    use = "get_accelerator().device_name(...)"
    yield Candidate(node, "ACC201", f"a CUDA device's name; use `{use}`", _named_device(ctx), drops=True)


def _compared(ctx: Context, node: cst.BaseExpression) -> Candidate:
    """`device.type == "cuda"` and its kin: the accelerator's name where all that it guards may be done on a CPU too."""
    report = Candidate(node, "ACC202", f"a CUDA device's name: not fixed: {_COMPARED}", breaks=False, asks=True)
    parent = ctx.tree.parent(node)
    test = ctx.tree.enclosing(node, cst.Comparison)
    if not isinstance(parent, cst.Comparison | cst.ComparisonTarget) or not isinstance(test, cst.Comparison):
        return report
    if len(test.comparisons) != 1 or ctx.beside_vendors(test):
        return report
    first = isinstance(parent, cst.Comparison)
    other = test.comparisons[0].comparator if first else test.left
    operator = test.comparisons[0].operator
    if text_of(node) != "cuda":
        spelled = _spelled_here(ctx, other) if isinstance(operator, cst.Equal | cst.NotEqual) else ()
        if spelled and isinstance(device_index(node), cst.BaseExpression):
            report.fix, report.follows, report.asks, report.drops = _named_device(ctx), spelled, False, True
            report.code = "ACC201"
            report.message = "compared with a device that is named here; use `get_accelerator().device_name(...)`"
        return report
    if isinstance(other, cst.Attribute) and other.attr.value in ctx.choices:
        return report
    fits = isinstance(operator, cst.Equal) or (first and isinstance(operator, cst.In))
    if not fits or not is_device_value(other):
        return report

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        return same_parentheses(call(ctx.method("device_name")), old)

    report.fix, report.guard, report.question, report.start = fix, True, "device", test
    report.message = "compared with a CUDA device's name; use `get_accelerator().device_name()`"
    return report


def _spelled_here(ctx: Context, other: cst.BaseExpression) -> tuple[cst.BaseExpression, ...]:
    """The CUDA devices by whose names the file assigns this variable or attribute; empty when it may be another."""
    leaves = list(mixed.assignments(ctx, other))
    found: list[cst.BaseExpression] = []
    while leaves:
        each = leaves.pop()
        if isinstance(each, cst.IfExp):
            leaves += [each.body, each.orelse]
        elif each is not None and device_index(each) is not False:
            found.append(each)
        elif each is None or text_of(each) != "cpu":
            return ()
    return tuple(found)


def _named_device(ctx: Context) -> Fix:
    """Replaces the name of a CUDA device by the accelerator's."""

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        inner = device_index(old)
        arguments = [inner] if isinstance(inner, cst.BaseExpression) else []
        return same_parentheses(call(ctx.method("device_name"), *arguments), old)

    return fix


def is_device_value(node: cst.BaseExpression) -> bool:
    """Whether an expression is by its name a device or the name of one: device, x.device.type, str(device)."""
    if isinstance(node, cst.Call) and dotted(node.func) == "str" and len(node.args) == 1:
        return is_device_value(node.args[0].value)
    if isinstance(node, cst.Attribute) and node.attr.value == "type":
        return is_device_value(node.value)
    name = dotted(node)
    if name is None and isinstance(node, cst.Attribute):
        name = node.attr.value
    return name is not None and tables.DEVICE_NAME.fullmatch(usage.last_name(name)) is not None


def _device_object(ctx: Context, node: cst.BaseExpression, found: usage.Role) -> Candidate:
    """torch.device('cuda', i) and its kin."""
    outer: cst.CSTNode | None = found.call
    assert isinstance(outer, cst.Call)
    value: cst.CSTNode = outer
    while isinstance(ctx.tree.parent(value), cst.Attribute):
        value = ctx.tree.parent(value)  # torch.device("cuda").type
    if value is not outer or usage.role(ctx.tree, outer).kind == "comparison":
        return Candidate(node, "ACC202", f"a CUDA device: not fixed: {_COMPARED}", breaks=False, asks=True)
    bound = bind(outer.args, ("type", "index"))
    if bound is None:
        return Candidate(node, "ACC202", "a CUDA device: not fixed: the arguments of torch.device cannot be told apart")
    direct = ctx.tree.parent(node) is bound["type"]
    if "index" not in bound:
        if bound["type"].keyword is not None:
            return Candidate(node, "ACC202", "torch.device(type=...): not fixed: write torch.device(name)")
        use = "get_accelerator().device_name(...)"
        return Candidate(node, "ACC201", f"a CUDA device's name; use `{use}`", _named_device(ctx), drops=True)
    if not direct or text_of(node) != "cuda":
        return Candidate(
            node, "ACC202", "a CUDA device with an index: not fixed: write torch.device(device_name(index))"
        )

    def fix_call(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Call)
        changed = bind(old.args, ("type", "index")) or {}
        return old.with_changes(args=[cst.Arg(call(ctx.method("device_name"), changed["index"].value))])

    use = "torch.device(get_accelerator().device_name(...))"
    return Candidate(node, "ACC201", f"a CUDA device; use `{use}`", fix_call, outer, drops=True)


def find_text(ctx: Context, node: cst.SimpleString) -> Iterator[Candidate]:
    """'nccl', 'CUDA_VISIBLE_DEVICES', 'torch.cuda.FloatTensor', commands of nvidia-smi."""
    text = text_of(node)
    if text is None or isinstance(ctx.tree.parent(node), cst.Expr | cst.ConcatenatedString):
        return
    if text == "nccl":
        yield _backend(ctx, node)
    elif _BACKENDS.fullmatch(text) and device_index(node) is False:
        advice = "name the accelerator's device and communication_backend_name() instead, or leave the backend out"
        yield Candidate(node, "ACC401", f"`{text!r}`: not fixed: {advice}", breaks=False)
    elif text == VISIBLE:
        yield _visible(ctx, node)
    elif _TENSOR_TYPE.fullmatch(text):
        yield Candidate(
            node, "ACC106", f"`{text}`: not fixed: compare or set dtype and device instead of a tensor type"
        )
    elif text.startswith(("nvidia-smi", "/usr/bin/nvidia-smi")):
        found = usage.role(ctx.tree, node)
        if found.kind in ("argument", "assigned", "default", "value") and found.callee not in (
            "print",
            ".info",
            ".warning",
        ):
            yield Candidate(
                node, "ACC506", "a call of nvidia-smi: use device_count(), total_memory() and available_memory()"
            )


def _backend(ctx: Context, node: cst.SimpleString) -> Candidate:
    found = usage.role(ctx.tree, node)
    if not usage.is_backend(ctx.tree, found):
        why = "a comparison may mean NCCL itself" if found.kind == "comparison" else "it is not clear what it is for"
        advice = f"communication_backend_name() names the accelerator's; not fixed: {why}"
        asks = found.kind == "comparison"
        return Candidate(node, "ACC401", f"`'nccl'`: {advice}", breaks=not asks and found.kind != "key", asks=asks)

    if not _goes_to_a_group(ctx, node, found):
        why = "an accelerator without collectives raises; call communication_backend_name() where a group is started"
        return Candidate(node, "ACC401", f"`'nccl'`: not fixed: {why}")

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        return same_parentheses(call(ctx.method("communication_backend_name")), old)

    return Candidate(node, "ACC401", "`'nccl'`; use `get_accelerator().communication_backend_name()`", fix)


def _goes_to_a_group(ctx: Context, node: cst.CSTNode, found: usage.Role) -> bool:
    """Whether the value is given to what starts a process group, at once or through a variable, and to nobody else."""
    if usage.starts_processes(found):
        return True
    assign = ctx.tree.enclosing(node, cst.Assign, cst.BaseStatement)
    if found.kind != "assigned" or not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return False
    target = assign.targets[0].target
    if not isinstance(target, cst.Name) or ctx.tree.enclosing(node, cst.FunctionDef) is None:
        return False
    uses = [usage.role(ctx.tree, each) for each in ctx.uses(target)]
    return bool(uses) and all(usage.starts_processes(each) for each in uses)


def _environment(ctx: Context, node: cst.BaseExpression) -> bool:
    """Whether it is os.environ, or by its name a copy of it."""
    name = dotted(node) or ""
    full = ctx.tree.imported(node)
    return full == "os.environ" or (full is None and _ENVIRONMENTS.fullmatch(name.rpartition(".")[2]) is not None)


def _is_of_this_process(ctx: Context, node: cst.BaseExpression) -> bool:
    """Whether it is os.environ itself, under its own or another name."""
    if ctx.tree.imported(node) == "os.environ" or (dotted(node) == "os.environ" and not ctx.tree.is_bound("os")):
        return True  # `os` that nothing in the file binds came with `from x import *`
    if not isinstance(node, cst.Name):
        return False
    for assignment in ctx.tree.scope(node)[node.value]:
        statement = ctx.tree.enclosing(getattr(assignment, "node", node), cst.Assign, cst.BaseStatement)
        if isinstance(statement, cst.Assign) and ctx.tree.imported(statement.value) == "os.environ":
            return True
    return False


def _visible(ctx: Context, node: cst.SimpleString) -> Candidate:
    """Writes through set_visible_devices_envs(), reads through visible_devices_envs()."""
    message = f"`{VISIBLE}`"
    advice = "not fixed: visible_devices_envs() has the accelerator's variables, set_visible_devices_envs() writes them"
    parent = ctx.tree.parent(node)
    if isinstance(parent, cst.Arg):
        return _lookup(ctx, node, parent) or Candidate(node, "ACC402", f"{message}: {advice}", breaks=False)
    if isinstance(parent, cst.Comparison) and len(parent.comparisons) == 1:
        test = parent.comparisons[0]
        if isinstance(test.operator, cst.In) and _environment(ctx, test.comparator) and parent.left is node:
            return _any_set(ctx, node, parent)
    if isinstance(parent, cst.Index):
        item = ctx.tree.enclosing(node, cst.Subscript)
        assert isinstance(item, cst.Subscript)
        if len(item.slice) == 1 and _environment(ctx, item.value):
            statement = ctx.tree.parent(ctx.tree.parent(item))
            if ctx.is_stored(item):
                if _is_of_this_process(ctx, item.value):
                    why = "get_accelerator() would choose before it is written; set it before the process starts, or"
                    return Candidate(
                        node, "ACC402", f"{message}: not fixed: {why} in a child's environment", breaks=False
                    )
                if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
                    return _written(ctx, node, item, statement)
            else:
                return _first(ctx, node)
    return Candidate(node, "ACC402", f"{message}: {advice}", breaks=False)


def _first(ctx: Context, node: cst.SimpleString) -> Candidate:
    """A read: the variables of other vendors are written in other ways, so that what takes them apart has to know."""
    why = "not fixed: visible_devices_envs() has the accelerator's variables; each vendor writes them in its own way"
    return Candidate(node, "ACC402", f"`{VISIBLE}` is read: {why}", breaks=False)


def _lookup(ctx: Context, node: cst.SimpleString, arg: cst.Arg) -> Candidate | None:
    outer = ctx.tree.parent(arg)
    if not isinstance(outer, cst.Call) or outer.args[0] is not arg or arg.keyword is not None:
        return None
    if ctx.tree.imported(outer.func) in ("os.getenv", "os.environ.get", "os.environ.pop"):
        return _first(ctx, node)
    reads = isinstance(outer.func, cst.Attribute) and outer.func.attr.value in ("get", "pop")
    if reads and isinstance(outer.func, cst.Attribute) and _environment(ctx, outer.func.value):
        return _first(ctx, node)
    return None


def _any_set(ctx: Context, node: cst.SimpleString, test: cst.Comparison) -> Candidate:
    if _OF_ROCM.search(ctx.tree.text):
        why = "not fixed: it stands beside a variable of ROCm, and the two may be told apart"
        return Candidate(node, "ACC402", f"`{VISIBLE}` is looked for: {why}", breaks=False, asks=True)

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Comparison)
        each = old.with_changes(left=cst.Name("name"), lpar=[], rpar=[])
        loop = cst.CompFor(cst.Name("name"), call(ctx.method("visible_devices_envs")))
        return same_parentheses(call(cst.Name("any"), cst.GeneratorExp(each, loop, lpar=[], rpar=[])), old)

    use = "get_accelerator().visible_devices_envs()"
    return Candidate(node, "ACC402", f"`{VISIBLE}` is looked for; use `{use}`", fix, test, drops=True, guard=True)


def _written(ctx: Context, node: cst.SimpleString, item: cst.Subscript, statement: cst.Assign) -> Candidate:
    literal = text_of(statement.value)
    environment = item.value

    def fix(old: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(old, cst.Assign)
        value = old.value
        if literal is not None and re.fullmatch(r"(\d+(,\d+)*)?", literal):
            numbers = [cst.Element(cst.Integer(str(int(each)))) for each in literal.split(",") if each]
            devices: cst.BaseExpression = cst.List(numbers)
        else:
            if (
                not isinstance(value, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.SimpleString)
                and not value.lpar
            ):
                value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            devices = call(cst.Attribute(value, cst.Name("split")), cst.SimpleString('","'))
        return cst.Expr(call(ctx.method("set_visible_devices_envs"), environment, devices), semicolon=old.semicolon)

    use = "get_accelerator().set_visible_devices_envs(...)"
    return Candidate(node, "ACC402", f"`{VISIBLE}` is written; use `{use}`", fix, statement, drops=True)

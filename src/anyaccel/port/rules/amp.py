# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.amp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from anyaccel.port.module import Edit, Module, last_name
from anyaccel.port.rule import Match, Rule, Tier
from anyaccel.port.uses import device_text

RULE = Rule(
    code="ACC104",
    title="torch.cuda.amp",
    tier=Tier.SAFE,
    why="torch.amp does the same for every device, which is its first argument; parameters without a keyword get one. "
    "Mixed precision stays off on a CPU, as CUDA's is there: take the condition away to compute in bfloat16.",
    before="""\
with torch.cuda.amp.autocast(use_amp):
    pass
scaler = torch.cuda.amp.GradScaler()
@torch.cuda.amp.custom_bwd
def backward(ctx, g):
    return g""",
    after="""\
with torch.amp.autocast(get_accelerator().device_name(), enabled=use_amp and get_accelerator().device_name() != "cpu"):
    pass
scaler = torch.amp.GradScaler(get_accelerator().device_name(), enabled=get_accelerator().device_name() != "cpu")
@torch.amp.custom_bwd(device_type=get_accelerator().device_name())
def backward(ctx, g):
    return g""",
    left="make = torch.cuda.amp.autocast",
)
_PARAMETERS = {
    "autocast": ("enabled", "dtype", "cache_enabled"),
    "GradScaler": ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "custom_fwd": ("fwd",),
    "custom_bwd": ("bwd",),
}
# Those of torch.amp, which have the device before them.
_PARAMETERS_OF_ANY = {
    "autocast": ("device_type", "dtype", "enabled", "cache_enabled"),
    "GradScaler": ("device", *_PARAMETERS["GradScaler"]),
}
_FOR_ANY_DEVICE = {"torch.autocast", "torch.amp.autocast", "torch.amp.GradScaler"}
# What `and` binds less tightly than.
_LOOSE = cst.IfExp | cst.NamedExpr | cst.Lambda


@RULE.on_name("torch.cuda.amp.")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Match]:
    """One of the names of torch.cuda.amp or its two modules."""
    name = full.rpartition(".")[2]
    call = module.parent(node)
    if name not in _PARAMETERS:
        yield Match(node, f"`{full}`: not fixed: torch.amp has the parts of it that hold for every device")
        return
    torch = f"torch.amp.{name}"
    device = module.method("device_name")
    checked = module.enclosing(node, cst.Call)
    if checked is not call and last_name(getattr(checked, "func", None)) in ("isinstance", "issubclass"):
        edits = [module.replace(node, torch)]  # what torch.cuda.amp has is a subclass of it
    elif isinstance(call, cst.Decorator) and name.startswith("custom_"):
        edits = [module.replace(node, f"{torch}(device_type={device})")]
    elif not isinstance(call, cst.Call) or call.func is not node or any(arg.star for arg in call.args):
        yield Match(node, f"`{full}`: not fixed: only its calls can be replaced; {torch} takes the device first")
        return
    else:
        first = f"device_type={device}"
        more: list[Edit] = []
        if not name.startswith("custom_"):
            enabled, more = _off_on_a_cpu(module, call, _PARAMETERS[name])
            first = f"{device}{enabled}"
        edits = [module.replace(node, torch), module.first_argument(call, first)]
        edits += [*_with_keywords(module, call, _PARAMETERS[name]), *more]
    yield Match(node, f"`{full}`; use `{torch}` with the device first", tuple(edits), imports_torch=True)


@RULE.on_node(cst.Call)
def find_named(module: Module, node: cst.Call) -> Iterator[Match]:
    """torch.amp's own, for a device of CUDA that is named there; the name is another rule's."""
    full = module.full_name(node.func)
    device = next((arg.value for arg in node.args if device_text(arg.value) is not None), None)
    if full not in _FOR_ANY_DEVICE or device is None or any(arg.star for arg in node.args):
        return
    enabled, edits = _off_on_a_cpu(module, node, _PARAMETERS_OF_ANY[full.rpartition(".")[2]])
    if enabled:
        edits = [module.after(node.args[-1].value, enabled)]
    if edits:
        yield Match(node.func, f"`{full}` of CUDA; use it off on a CPU", tuple(edits))


def _with_keywords(module: Module, call: cst.Call, parameters: Sequence[str]) -> list[Edit]:
    named = zip(call.args, parameters, strict=False)
    return [module.before(arg.value, f"{keyword}=") for arg, keyword in named if arg.keyword is None]


def _off_on_a_cpu(module: Module, call: cst.Call, parameters: Sequence[str]) -> tuple[str, list[Edit]]:
    """The argument that switches it off on a CPU, or the edits of the one that is there."""
    asked = f'{module.method("device_name")} != "cpu"'
    for number, arg in enumerate(call.args):
        keyword = arg.keyword.value if arg.keyword is not None else dict(enumerate(parameters)).get(number)
        if keyword == "enabled":
            value = arg.value
            if module.source(value) == "False" or ".device_name()" in module.code(value):
                return "", []
            if module.source(value) == "True":
                return "", [module.replace(value, asked)]
            loose = isinstance(value, _LOOSE) or (
                isinstance(value, cst.BooleanOperation) and isinstance(value.operator, cst.Or)
            )
            if loose and not value.lpar:
                return "", [module.before(value, "("), module.after(value, f") and {asked}")]
            return "", [module.after(value, f" and {asked}")]
    return f", enabled={asked}", []

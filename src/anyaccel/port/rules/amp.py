# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.amp."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from anyaccel.port.module import Module, last_name
from anyaccel.port.rule import Place, Rule, Tier

RULE = Rule(
    code="ACC104",
    title="torch.cuda.amp",
    tier=Tier.SAFE,
    why="torch.amp does the same for every device, which is its first argument. The other parameters of "
    "`autocast` have another order there, so those without a keyword get one. On a CPU mixed precision is "
    "bfloat16.",
    before="""\
with torch.cuda.amp.autocast(use_amp):
    pass
scaler = torch.cuda.amp.GradScaler()
@torch.cuda.amp.custom_bwd
def backward(ctx, g):
    return g""",
    after="""\
with torch.amp.autocast(get_accelerator().device_name(), enabled=use_amp):
    pass
scaler = torch.amp.GradScaler(get_accelerator().device_name())
@torch.amp.custom_bwd(device_type=get_accelerator().device_name())
def backward(ctx, g):
    return g""",
    left="make = torch.cuda.amp.autocast",
)
_PARAMETERS = {"autocast": ("enabled", "dtype", "cache_enabled"), "GradScaler": (), "custom_fwd": (), "custom_bwd": ()}


@RULE.on_name("torch.cuda.amp.")
def find(module: Module, node: cst.Name | cst.Attribute, full: str) -> Iterator[Place]:
    """One of the names of torch.cuda.amp or its two modules."""
    name = full.rpartition(".")[2]
    call = module.parent(node)
    if name not in _PARAMETERS:
        yield Place(node, f"`{full}`: not fixed: torch.amp has the parts of it that hold for every device")
        return
    torch = f"torch.amp.{name}"
    device = module.method("device_name")
    checked = module.enclosing(node, cst.Call)
    if checked is not call and last_name(getattr(checked, "func", None)) in ("isinstance", "issubclass"):
        edits = [module.replace(node, torch)]  # what torch.cuda.amp has is a subclass of it
    elif isinstance(call, cst.Decorator) and name.startswith("custom_"):
        edits = [module.replace(node, f"{torch}(device_type={device})")]
    elif not isinstance(call, cst.Call) or call.func is not node or any(arg.star for arg in call.args):
        yield Place(node, f"`{full}`: not fixed: only its calls can be replaced; {torch} takes the device first")
        return
    elif name.startswith("custom_"):
        edits = [module.replace(node, torch), module.first_argument(call, f"device_type={device}")]
        edits += [
            module.before(arg.value, "fwd=" if name == "custom_fwd" else "bwd=") for arg in call.args if not arg.keyword
        ]
    else:
        edits = [module.replace(node, torch), module.first_argument(call, device)]
        edits += [
            module.before(arg.value, f"{keyword}=")
            for arg, keyword in zip(call.args, _PARAMETERS[name], strict=False)
            if arg.keyword is None
        ]
    yield Place(node, f"`{full}`; use `{torch}` with the device first", tuple(edits), imports_torch=True)

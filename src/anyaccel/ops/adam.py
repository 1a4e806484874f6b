# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW: `CPUAdam` on parameters in host memory, `FusedAdam` wherever the parameters are."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import anyaccel._needs_torch  # noqa: F401

# isort: split
import torch

from anyaccel.errors import UsageError
from anyaccel.ops._checks import check_range, read_betas
from anyaccel.ops._optimizer import MASTER, AnyDevice, HostOptimizer, Params
from anyaccel.ops.builders.host import CPUAdamBuilder
from anyaccel.ops.builders.in_tree import InTreeBuilder

__all__ = ["CPUAdam", "FusedAdam", "from_torch", "to_torch"]


class CPUAdam(HostOptimizer):
    """AdamW, or with ``adamw_mode=False`` Adam, in native code. Arguments are those of DeepSpeedCPUAdam.

    The results equal torch's to fp32 rounding. State is that of torch.optim.AdamW.
    """

    MOMENTS: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    BUILDER: ClassVar[type[InTreeBuilder]] = CPUAdamBuilder
    OWN_OPTIONS: ClassVar[tuple[str, ...]] = ("bias_correction", "amsgrad", "decoupled_weight_decay")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        """Args:
            params: parameters or parameter groups; float32, bfloat16 or float16.
            amsgrad: must be False.
            adamw_mode: decay weights apart from the gradient; else add the decay to the gradient.
            fp32_optimizer_states: False keeps the state of a float32 parameter in float32, that of others in bfloat16.
            state_dtype: of both moments, float32 (default) or bfloat16, which takes half the memory.
            master_weights: keep a float32 copy of each parameter in bf16 or fp16, update that, and round it to the
                parameter in the same pass.

        Raises:
            UsageError: an argument or a parameter is one that the kernels cannot take.
        """
        check_range(type(self).__name__, lr=lr, eps=eps, weight_decay=weight_decay)
        read_betas(type(self).__name__, betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": adamw_mode,
        }
        super().__init__(params, defaults, state_dtype, master_weights, fp32_optimizer_states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ``adamw_mode`` (or FusedAdam's ``adam_w_mode``) may differ between groups.

        Raises:
            UsageError: as HostOptimizer's.
        """
        for name in ("adamw_mode", "adam_w_mode"):
            if name in param_group:
                param_group = {**param_group, "decoupled_weight_decay": param_group[name]}
                del param_group[name]
        super().add_param_group(param_group)

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = read_betas(type(self).__name__, self._option(group, "betas"))
        return (
            self._number(group, "lr"), beta1, beta2, self._number(group, "eps"), self._number(group, "weight_decay"),
            bool(self._option(group, "decoupled_weight_decay")), bool(self._option(group, "bias_correction")),
        )  # fmt: skip


class FusedAdam(AnyDevice, CPUAdam):
    """AdamW or Adam in the accelerator's fused implementation: torch's on devices that have one, ours on the CPU.

    Arguments are those of DeepSpeed's FusedAdam. On a device, moments are in the parameters' dtype.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Args: as of CPUAdam; set_grad_none: what zero_grad() does."""
        self._set_grad_none = set_grad_none
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode=adam_w_mode)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if not self._option(group, "bias_correction") and not all(param.is_cpu for param in group["params"]):
            raise UsageError("FusedAdam: torch's fused Adam always corrects the bias; use bias_correction=True")

    @torch.no_grad()
    def _step_on_device(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        from torch.optim.adam import adam

        states = self._states_for(group, params)
        _, beta1, beta2, eps, weight_decay, decoupled, _ = self._hyper(group)
        adam(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=all(_has_fused(device) for device in {param.device for param in params}),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self._option(group, "lr"),
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
            decoupled_weight_decay=bool(decoupled),
        )


@functools.cache
def _has_fused(device: torch.device) -> bool:
    """Whether torch has a fused Adam for this device, found out by a step on one element."""
    param = torch.nn.Parameter(torch.zeros(1, device=device))
    param.grad = torch.zeros_like(param)
    try:
        torch.optim.AdamW([param], fused=True).step()
    except RuntimeError:  # NotImplementedError too
        return False
    return True


def to_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert CPUAdam's state_dict() for torch.optim.AdamW (or Adam, for groups with ``adamw_mode=False``).

    With fp32 parameters, training in torch continues equally, up to rounding. For parameters in bf16 or fp16, torch has
    no float32 master, and rounds the moments to the parameter's dtype when it loads them.

    Raises:
        UsageError: a group has ``bias_correction=False``, which torch does not have.
    """
    extra = {
        "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None
    }  # fmt: skip
    groups = []
    for group in state_dict["param_groups"]:
        if not group.get("bias_correction", True):
            raise UsageError("torch's Adam always corrects the bias, so it cannot go on with bias_correction=False")
        groups.append({**extra, **{name: value for name, value in group.items() if name != "bias_correction"}})
    state = {
        key: {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in of.items()
            if name != MASTER
        }
        for key, of in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def from_torch(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert the state_dict() of torch.optim.Adam or AdamW for CPUAdam.

    CPUAdam.load_state_dict() accepts torch's directly; this function is for state dicts that are written to a file.

    Raises:
        UsageError: a group has amsgrad or maximize.
    """
    groups = []
    for group in state_dict["param_groups"]:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UsageError(f"CPUAdam does not have {option}, so it cannot go on with this state")
        theirs = ("maximize", "foreach", "capturable", "differentiable", "fused")
        ours = {name: value for name, value in group.items() if name not in theirs}
        groups.append({"bias_correction": True, "amsgrad": False, **ours})
    state = {
        key: {
            name: torch.as_tensor(value, dtype=torch.float32 if name == "step" else None) for name, value in of.items()
        }
        for key, of in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}

# SPDX-License-Identifier: Apache-2.0
"""The base class of optimizers whose step is native code on tensors in host memory."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from operator import is_, is_not
from typing import Any, ClassVar, cast

import torch

from anyaccel.errors import UsageError
from anyaccel.ops._checks import check_complete, check_place, check_values, step_tensor, to_float
from anyaccel.ops._dense import any_distributed, local_parts, redistribute_like
from anyaccel.ops._native_step import COPIES, STATE_DTYPES, NativeStep, TensorBatch, check_dense
from anyaccel.ops.builders.in_tree import InTreeBuilder

# The state entry for the float32 master weight of a parameter in bf16 or fp16.
MASTER = "master"

Params = Iterable[Any]


class _Plan:
    """The checked tensors of a group, cached for the next step."""

    def __init__(
        self, params: list[torch.Tensor], states: list[dict[str, Any]], names: Iterable[str], batch: TensorBatch
    ) -> None:
        self._states = states
        self._names = tuple(names)
        self._distributed = any_distributed(params)
        self._seen = self._tensors(params)
        self.batch = batch

    def _tensors(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        found = [*params, *self._entries()]
        # What a DTensor has on this rank may be replaced without it.
        return found if not self._distributed else [t if t is None else local_parts([t])[0] for t in found]

    def _entries(self) -> list[torch.Tensor | None]:
        return [state.get(name) for name in self._names for state in self._states]

    def fits(self, params: list[torch.Tensor]) -> bool:
        """Whether the parameters and the tensors in their states are the same as before."""
        return len(params) == len(self._states) and all(map(is_, self._tensors(params), self._seen))


def _is_immutable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return value is None or type(value) in (bool, int, float, str)


class HostOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that updates all parameters of a group in one native call.

    State of a parameter: ``step`` (a float32 tensor, as torch has it), the moments in `state_dtype`, and with
    `master_weights` the float32 ``master`` of a parameter in bf16 or fp16.

    Attributes:
        MOMENTS: the names of the moments in the state.
        BUILDER: the builder of the native step.
        OWN_OPTIONS: options that the groups of torch's or DeepSpeed's optimizers may lack.
    """

    MOMENTS: ClassVar[tuple[str, ...]]
    BUILDER: ClassVar[type[InTreeBuilder]]
    OWN_OPTIONS: ClassVar[tuple[str, ...]] = ()
    _native: NativeStep
    _copies: dict[torch.Tensor, torch.Tensor]
    _plans: dict[int, _Plan]
    # For each group at the last step: names and values of its options, and the hyper-parameters made of them.
    _options: dict[int, tuple[tuple[str, ...], tuple[Any, ...], tuple[float, ...]]]
    _versions: dict[torch.Tensor, int]  # versions of parameters with a master weight, after the last step
    _states: list[dict[str, Any]]  # the states of all parameters after the last step

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Args: as in the subclasses, which have checked `defaults`."""
        if state_dtype is None and fp32_optimizer_states:
            state_dtype = torch.float32
        if state_dtype is not None and state_dtype not in STATE_DTYPES:
            raise UsageError(f"state_dtype must be torch.float32 or torch.bfloat16, not {state_dtype}")
        self._state_dtype = state_dtype
        self._master_weights = master_weights
        self._reset()
        super().__init__(params, defaults)

    # Overridden by subclasses -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters that the native function takes after the tensors."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise UsageError for options that the kernels do not support."""
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise UsageError(f"{type(self).__name__} does not have {option}: use torch.optim, or {option}=False")

    def _option(self, group: dict[str, Any], name: str) -> Any:
        """The present value of an option of a group; the optimizer's default where it was deleted."""
        return group[name] if name in group else self.defaults[name]

    def _number(self, group: dict[str, Any], name: str) -> float:
        """A numeric option."""
        value = self._option(group, name)
        return value if type(value) is float else to_float(type(self).__name__, name, value)

    # torch's interface --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.

        Raises:
            UsageError: a parameter is not dense, in host memory and in float32, bfloat16 or float16, or is there twice,
                or an option is of all groups.
        """
        for option in ("state_dtype", "fp32_optimizer_states", "master_weights"):
            if option in param_group:
                raise UsageError(f"{type(self).__name__}: {option} is for all groups: give it to the optimizer")
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            params = self.param_groups[-1]["params"]
            if len(set(map(id, params))) < len(params):  # the threads of a step would both write to it
                raise UsageError(f"{type(self).__name__}: a parameter is in a group twice")
            for param in params:
                self._check_param(param)
        except UsageError:
            self.param_groups.pop()
            raise

    def _check_param(self, param: torch.Tensor) -> None:
        name = type(self).__name__
        if not param.is_cpu:
            raise UsageError(f"{name} works on parameters in host memory, and one is on {param.device}")
        if param.layout is not torch.strided:
            raise UsageError(f"{name} works on dense parameters, and one is {param.layout}")
        if param.dtype not in COPIES:
            raise UsageError(f"{name} works on parameters in float32, bfloat16 or float16, and one is {param.dtype}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: calculates the loss and the gradients again.

        Returns:
            What `closure` returned.

        Raises:
            UsageError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        states = list(self.state.values())
        if len(states) != len(self._states) or not all(map(is_, states, self._states)):
            self._plans.clear()
        for index, group in enumerate(self.param_groups):
            params, grads = group["params"], [param.grad for param in group["params"]]
            if not all(map(is_not, grads, repeat(None))):
                params = [param for param in params if param.grad is not None]
                grads = [grad for grad in grads if grad is not None]
            if grads:
                self._step_params(index, params, grads)
        if len(states) != len(self.state) or not self._states:
            states = list(self.state.values())
        self._states = states
        return loss

    def _step_params(self, index: int, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        group = self.param_groups[index]
        hyper = self._checked_hyper(index, group)
        if self._master_weights:
            self._update_masters(params)
        plan = self._plans.get(index)
        if any_distributed(params):
            grads = local_parts(map(redistribute_like, grads, params))
        if plan is None or not plan.fits(params) or not plan.batch.refresh(grads):
            plan = self._plans[index] = self._plan(params, grads, group)
        self._native.run(plan.batch, *hyper)
        torch.autograd.graph.increment_version(params)
        self._remember_versions(params)

    def _checked_hyper(self, index: int, group: dict[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters of a group's options, which are checked again only if one is another object.

        Mutable options, such as a tensor or a list, are read at each step.
        """
        names, values = tuple(group), tuple(group.values())
        seen = self._options.get(index)
        if seen is not None and seen[0] == names and all(map(is_, values, seen[1])):
            return seen[2]
        self._options.pop(index, None)
        self._check_group(group)
        hyper = self._hyper(group)
        options = [value for name, value in group.items() if name != "params"]
        if self.defaults.keys() <= group.keys() and all(map(_is_immutable, options)):
            self._options[index] = (names, values, hyper)
        return hyper

    def _plan(self, params: list[torch.Tensor], grads: list[torch.Tensor], group: dict[str, Any]) -> _Plan:
        for grad in grads:
            check_dense(grad)
        states = [self._prepared_state(param, group) for param in params]
        steps = [state["step"] for state in states]
        moments = [[state[name] for state in states] for name in self.MOMENTS]
        targets: list[torch.Tensor] = params
        copies: list[torch.Tensor | None] = [self._copies.get(param) for param in params] if self._copies else []
        if self._master_weights:
            targets = [state.get(MASTER, param) for param, state in zip(params, states, strict=True)]
            own = [None if target is param else param for target, param in zip(targets, params, strict=True)]
            copies = (
                [other if mine is None else mine for mine, other in zip(own, copies, strict=True)] if copies else own
            )
        if any_distributed(params):
            targets, moments = local_parts(targets), list(map(local_parts, moments))
            copies = [copy if copy is None else local_parts([copy])[0] for copy in copies]
        batch = TensorBatch(targets, grads, moments, steps, copies or None)
        return _Plan(list(params), states, ("step", *self.MOMENTS, MASTER), batch)

    def _prepared_state(self, param: torch.Tensor, group: dict[str, Any], key: Any = None) -> dict[str, Any]:
        """The state of a parameter in host memory (or of `key`), checked and converted for the kernels."""
        name, state = type(self).__name__, cast("dict[str, Any]", self.state[param if key is None else key])
        needed = ("step", *self.MOMENTS)
        if not any(entry in state for entry in needed):
            self._initialise(param, state, group)
            return state
        check_complete(name, needed, state)
        step = state["step"]
        if not isinstance(step, torch.Tensor) or step.dtype != torch.float32 or step.numel() != 1 or not step.is_cpu:
            state["step"] = step_tensor(name, state)
        for entry in (*self.MOMENTS, MASTER):
            if entry in state:
                values = check_values(name, param, entry, state[entry])
                check_place(name, entry, values, (torch.float32,) if entry == MASTER else STATE_DTYPES)
        return state

    def _initialise(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Initialise a parameter's state in one update, so that Ctrl-C or a lack of memory cannot leave half of it."""
        new: dict[str, Any] = {}
        self._initial_state(param, new, group)
        state.update(new)

    def _initial_state(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Fill the state of a parameter before its first step."""
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in self.MOMENTS:
            state[name] = torch.zeros_like(param, dtype=self._dtype_of_moments(param), requires_grad=False)
        self._add_master(param, state)

    def _add_master(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        if self._master_weights and MASTER not in state and param.dtype != torch.float32:
            state[MASTER] = param.detach().to(torch.float32)

    def _remember_versions(self, params: Iterable[torch.Tensor]) -> None:
        """Remember the versions of these parameters after the step, to notice later writes by others."""
        if self._master_weights:
            self._versions.update((param, param._version) for param in params)

    def _update_masters(self, params: Iterable[torch.Tensor]) -> None:
        """Copy values that were written into parameters since the last step (a loaded checkpoint) to master weights."""
        for param in params:
            master = self.state[param].get(MASTER)
            if master is not None and self._versions.get(param, param._version) != param._version:
                with torch.no_grad():
                    values = param.detach()
                    master.copy_(torch.where(values == master.to(param.dtype), master, values.to(torch.float32)))

    def write_copies(self, copies: Mapping[torch.Tensor, torch.Tensor] | None) -> None:
        """From now on, let each step also write the new parameters to second buffers, in the same pass over memory.

        Args:
            copies: parameter -> bf16 or fp16 tensor of its shape in host memory, such as pinned memory that goes to a
                device next; None to end it.

        Raises:
            UsageError: a key is not a parameter of this optimizer, or its buffer does not fit.
        """
        copies = dict(copies or {})
        known = {param for group in self.param_groups for param in group["params"]}
        for param, copy in copies.items():
            if param not in known:
                raise UsageError("write_copies(): a key is not a parameter of this optimizer")
            if self._master_weights and param.dtype != torch.float32:
                raise UsageError(
                    f"write_copies(): with master_weights the parameter in {param.dtype} is the second buffer already"
                )
            shape = local_parts([param])[0].shape  # a buffer of a DTensor is for this rank's part
            if copy.shape != shape or not copy.is_cpu or not copy.is_contiguous():
                raise UsageError(
                    f"write_copies(): a buffer must be contiguous, in host memory and of shape {tuple(shape)}, "
                    f"not {tuple(copy.shape)} on {copy.device}"
                )
            if copy.dtype not in COPIES[param.dtype]:
                kinds = " or ".join(str(kind) for kind in COPIES[param.dtype])
                raise UsageError(
                    f"write_copies(): for a parameter in {param.dtype} a buffer is {kinds}, not {copy.dtype}"
                )
        self._copies = copies
        self._plans.clear()

    # Saving and loading -------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but no tensor is shared with `state_dict`, and moments get `state_dtype`, not the parameter's.

        State dicts of torch's optimizer of the same name, and of DeepSpeed's, whose steps are ints, can be loaded too.

        Raises:
            UsageError: it has amsgrad or maximize, or a state that is not one of this optimizer.
        """
        # Hooks may change the state dict; this last one records the result.
        final: dict[str, Any] = {}
        hook = self.register_load_state_dict_pre_hook(lambda _, found: final.update(found))
        before = self.param_groups, self.state
        try:
            super().load_state_dict(state_dict)
            self._load_states(final)
            self._plans.clear()
            self._versions.clear()
        except BaseException:
            self.param_groups, self.state = before
            raise
        finally:
            hook.remove()

    def _load_states(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            self._check_group(group)
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                if saved.get(key):
                    self.state[param] = self._converted(param, saved[key])

    def _converted(self, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        name = f"{type(self).__name__}.load_state_dict()"
        check_complete(name, ("step", *self.MOMENTS), saved)
        state = {entry: value for entry, value in saved.items() if entry != MASTER}
        state["step"] = step_tensor(name, saved)
        if self._master_weights and MASTER in saved and param.dtype != torch.float32:
            state[MASTER] = saved[MASTER]
        for entry in (*self.MOMENTS, MASTER):
            if entry not in state:
                continue
            values = redistribute_like(check_values(name, param, entry, state[entry]).detach(), param)
            dtype = torch.float32 if entry == MASTER else self._dtype_of_moments(param)
            # With the memory layout of the parameter.
            state[entry] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(values)
        self._add_master(param, state)
        return state

    def _dtype_of_moments(self, param: torch.Tensor) -> torch.dtype:
        if self._state_dtype is None:
            # As DeepSpeed without fp32_optimizer_states; the kernels have no moments in float16.
            return torch.float32 if param.dtype == torch.float32 else torch.bfloat16
        return self._state_dtype

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy.deepcopy, without the library and the buffers of write_copies()."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_state_dtype": self._state_dtype, "_master_weights": self._master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Counterpart of __getstate__; torch's load_state_dict() calls it too."""
        super().__setstate__(state)
        if "_native" not in self.__dict__:
            self._reset()
        for group in self.param_groups:
            for name in self.OWN_OPTIONS:
                group.setdefault(name, self.defaults[name])

    def _reset(self) -> None:
        """Initialise the attributes that are not pickled."""
        self._native = self.BUILDER().load().native_step
        self._copies = {}
        self._plans = {}
        self._options = {}
        self._states = []
        self._versions = {}


class AnyDevice(HostOptimizer):
    """A mixin for parameters on devices, where torch does the step and moments have the parameters' dtype."""

    _set_grad_none = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in torch; the default is `set_grad_none`."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    def _check_param(self, param: torch.Tensor) -> None:
        if param.is_cpu:
            super()._check_param(param)

    def _initial_state(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._initial_state(param, state, group)
        if not param.is_cpu:
            state["step"] = state["step"].to(param.device)

    def _dtype_of_moments(self, param: torch.Tensor) -> torch.dtype:
        return super()._dtype_of_moments(param) if param.is_cpu else param.dtype

    def _converted(self, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        state = super()._converted(param, saved)
        if not param.is_cpu:
            state["step"] = state["step"].to(param.device)
        return state

    def _step_params(self, index: int, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        on_device = [param for param in params if not param.is_cpu]
        if on_device:
            self._step_on_device(self.param_groups[index], on_device)
            params = [param for param in params if param.is_cpu]
            grads = [grad for grad in grads if grad.is_cpu]
        if params:
            super()._step_params(index, params, grads)

    def _states_for(self, group: dict[str, Any], params: list[torch.Tensor]) -> list[dict[str, Any]]:
        """The states of parameters on devices, initialised if they are new; checks the group's options."""
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                self._initialise(param, state, group)
        self._check_group(group)
        return states

    @abc.abstractmethod
    def _step_on_device(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Update the parameters on devices that have a gradient, by torch."""

    def __getstate__(self) -> dict[str, Any]:
        """The state of the base class, and `set_grad_none`."""
        return {**super().__getstate__(), "_set_grad_none": self._set_grad_none}

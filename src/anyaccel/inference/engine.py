# SPDX-License-Identifier: Apache-2.0
"""`init_inference`: an unmodified causal LM on native kernels, divided among ranks, in the precision asked for."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.config import QUANTISED, InferenceConfig, parse_precision
from anyaccel.inference.generic.loading import (
    check_dtype,
    model_folder,
    native_skeleton,
    skeleton,
    stored_dtype,
    weights_for,
)
from anyaccel.inference.generic.tp.apply import LoadedWeights, WeightSource, apply
from anyaccel.inference.generic.tp.plan import TensorParallelPlan, make_plan
from anyaccel.inference.hf.group import hosts_of, in_step, together, tp_group
from anyaccel.inference.hf.later import Later, MadeLater
from anyaccel.inference.hf.precision import PrecisionMethods
from anyaccel.inference.modules.adapters import MERGE, has_adapters, refuse_adapters
from anyaccel.inference.modules.stand_in import StandIn

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], object]

# torch's threads do not live in a child of fork(), and GCC's OpenMP waits for them for ever: one thread is left, as in
# the workers of torch's data loaders. The native runtime starts threads of its own.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class InferenceEngine(PrecisionMethods, nn.Module):
    """A model that is ready for inference on this rank; call it as the Hugging Face model.

    Whatever it does not have itself is the model's: it can be a pipeline's model, or another one's assistant.

    Attributes:
        module: the Hugging Face model; its layers run natively, or hold this rank's shards. Of a native engine from a
            path it is made when it is asked for first.
        plan: which parts of its own weights those are; nothing is planned where the native runtime divides them.
        dtype: of the logits, and of the weights unless those are quantised.
        settings: what was asked for.
        runtime: what runs the model: "native", "device", "torch" or "plain", see InferenceConfig.
        why: what the native runtime, or on a device the device's, lacks for this model; empty when it runs it or was
            not asked to.
        native: the model of "native" or "device"; None when another runtime runs it.
    """

    def __init__(
        self,
        module: nn.Module | Later,
        plan: TensorParallelPlan,
        settings: InferenceConfig,
        group: dist.ProcessGroup | None,
        runtime: str = "plain",
        why: str = "",
        native: NativeModel | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.settings = settings
        self.dtype = settings.torch_dtype
        self.group = group
        self.runtime = runtime
        self.why = why
        self.native = native
        if isinstance(module, Later):
            vars(self)["_later"] = module
            self.__class__ = _waiting_as(module.name)
        else:
            self._arrive(module)

    def _arrive(self, module: nn.Module) -> None:
        super().__setattr__("module", module)
        self.__class__ = _named_as(type(module).__name__)
        vars(self).pop("_later", None)

    @property
    def waits(self) -> bool:
        """Whether the Hugging Face model is still to be made."""
        return "_later" in vars(self)

    def _get_name(self) -> str:
        return InferenceEngine.__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_blank, (), *made[2:])  # the class has no place of its own, where pickle could find it

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__class__ = _named_as(type(self.module).__name__)

    def __getattr__(self, name: str) -> Any:
        """The model's, for names that are not the engine's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """The model's, too: what is put there has its effect on what the model computes, or is the model's error."""
        own = name in vars(self) or hasattr(type(self), name) or "native" not in vars(self)  # all are in __init__
        module: Any = None if own or name in self._modules else self._modules.get("module")
        if module is not None and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self.plan.size

    @property
    def tp_rank(self) -> int:
        """This rank's place among them."""
        return self.plan.rank

    @property
    def config(self) -> Any:
        """The Hugging Face configuration, unchanged."""
        return self.module.config

    @property
    def generation_config(self) -> Any:
        """The defaults of `generate`, which may be changed."""
        return self.module.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.module.generation_config = value

    @property
    def device(self) -> torch.device:
        """Where inputs go and results come from."""
        return get_accelerator().device() if self.native else next(self.module.parameters()).device

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own: packed weights stay as they are, or it is an error."""
        self.module.to(*args, **kwargs)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own forward; every rank of the group must call it with the same input."""
        return self.module(*args, **kwargs)

    @torch.no_grad()  # as in transformers, whose paged caches may not be inference tensors
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own `generate`; every rank must call it with the same arguments and gets the same tokens.

        Runs in the native loop where that knows all arguments. Rank 0's random state counts, so that sampling cannot
        drift apart. `seed=` or `generator=` may be given.
        """
        if self.native is not None:
            return self.module.generate(*args, **kwargs)
        from anyaccel.inference.hf.generate_checks import check_arguments
        from anyaccel.inference.hf.kept import configurations_kept
        from anyaccel.inference.hf.native_generate import seeded

        check_arguments({name: value for name, value in kwargs.items() if name != "attention_mask"})
        seed, generator = kwargs.pop("seed", None), kwargs.pop("generator", None)
        in_step(kwargs, self.group)
        with seeded(seed, generator), configurations_kept(self.module, kwargs.get("assistant_model")):
            return self.module.generate(*args, **kwargs)


def _blank() -> InferenceEngine:
    return InferenceEngine.__new__(InferenceEngine)


@functools.cache
def _named_as(name: str) -> type[InferenceEngine]:
    """A subclass of the engine that has the name of the model's class: pipelines look models up by that name."""
    return type(name, (InferenceEngine,), {"__module__": __name__, "__doc__": InferenceEngine.__doc__})


@functools.cache
def _waiting_as(name: str) -> type[InferenceEngine]:
    """The same for an engine whose model is still to be made."""
    return type(name, (MadeLater, InferenceEngine), {"__module__": __name__, "__doc__": InferenceEngine.__doc__})


def init_inference(
    model: nn.Module | str | Path,
    config: Mapping[str, object] | None = None,
    *,
    progress: Progress | None = None,
    **options: object,
) -> InferenceEngine:
    """Make a causal LM ready for inference, tensor- and pipeline-parallel over the ranks of this job.

    Args:
        model: a Hugging Face causal LM, or the path of a model folder or `.gguf` file. From a path each rank reads only
            its own shards; the weights of a model in memory are taken over: afterwards they exist once, packed,
            and after an error on the way the model has to be loaded again.
        config: options as a dict; keyword arguments go before it.
        progress: called with (bytes loaded, bytes in all) of this rank while weights load.
        dtype: torch.bfloat16 (default), torch.float16, torch.float32, or a name: bf16, fp16, fp32, int8, int4.
        tensor_parallel: `{"tp_size": n}`; consecutive ranks form a group of n. Default 1. `"wire_dtype"`: "bf16" or
            "int8" for fewer bytes between hosts, see TensorParallelConfig.
        pipeline_parallel: `{"size": n}`; consecutive groups of tp_size ranks are the n stages of a model. Default 1.
        group_size, kv_cache, cache_bytes, threads, runtime: see InferenceConfig.
        draft: path of a smaller model, or an engine of one, that guesses tokens: the same answers, sooner. From a path
            it runs in int4, of a GGUF file as what the file has.

    Returns:
        The engine; `engine(input_ids, ...)` and `engine.generate(...)` are the model's own.

    Raises:
        UsageError: an option is wrong, or there are fewer ranks than tp_size.
        ModelError: the model cannot be read or divided.
    """
    settings = InferenceConfig.from_options({**(config or {}), **options})
    stages = settings.pipeline_parallel.size
    on_host = torch.empty(0, device=get_accelerator().device()).is_cpu
    if not on_host and settings.runtime in ("native", "torch"):
        raise UsageError(
            f"runtime={settings.runtime!r} is for the CPU; this accelerator is {get_accelerator().device_name()}"
        )
    if not on_host and stages > 1:
        raise UsageError(f"pipeline_parallel is for the CPU; this accelerator is {get_accelerator().device_name()}")
    if isinstance(model, nn.Module) and any(isinstance(p, StandIn) for p in model.parameters()):
        raise UsageError(f"{type(model).__name__}: its weights have been packed before; load the model again")
    if isinstance(model, nn.Module) and settings.runtime != "plain" and has_adapters(model):
        if settings.runtime != "auto" or settings.dtype in QUANTISED:
            raise UsageError(f"{type(model).__name__}: {MERGE}")
        logger.warning("%s: %s; until then its own code runs as it is", type(model).__name__, MERGE)
        settings = dataclasses.replace(settings, runtime="plain")
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        raise UsageError("the model is on the meta device: give init_inference the path of its checkpoint instead")
    why = ""
    executor = ("native" if on_host else "device") if settings.runtime == "auto" else settings.runtime
    if executor in ("native", "device"):
        from anyaccel.inference.spec.mapping import Unsupported

        try:
            return _decoder_engine(model, settings, progress, executor)
        except Unsupported as lack:
            if settings.runtime == executor or stages > 1 or settings.draft is not None:
                raise Unsupported(lack.feature, executor) from lack
            if settings.dtype in QUANTISED and not on_host:
                raise UsageError(
                    f"dtype={settings.dtype!r} needs the device runtime, which has no {lack.feature}; use bf16"
                ) from lack
            why = lack.feature
            packed = " with packed linears" if on_host else ""
            logger.warning("the %s runtime has no %s: using the model's own code%s", executor, why, packed)
    return _torch_engine(model, settings, progress, on_host and settings.runtime != "plain", why)


def optimize(
    model: nn.Module | str | Path,
    dtype: torch.dtype | str = "bf16",
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """The Hugging Face model itself, made fast: `init_inference` for one process, without an engine around it.

    Args:
        model, dtype, options: as for `init_inference`. A model in memory is changed in place and returned.

    Returns:
        The model: its call, its `generate` and pipelines on it go through native kernels.
    """
    return init_inference(model, dtype=dtype, progress=progress, **options).module


def _model_group(settings: InferenceConfig) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks that have a part of the model, and this rank's place among them.

    Raises:
        UsageError: the ranks of the job cannot be divided into such groups.
    """
    tp_size, stages = settings.tensor_parallel.tp_size, settings.pipeline_parallel.size
    asked = f"tensor_parallel tp_size={tp_size}"
    return tp_group(tp_size * stages, f"{asked} with pipeline_parallel size={stages}" if stages > 1 else asked)


def _decoder_engine(
    model: nn.Module | str | Path,
    settings: InferenceConfig,
    progress: Progress | None,
    executor: str,
) -> InferenceEngine:
    """The engine on one of the two executors of DecoderSpec.

    Raises:
        Unsupported: it lacks something that the model needs.
    """
    from anyaccel.inference.device.loading import load_decoder

    tp_size = settings.tensor_parallel.tp_size
    group, rank = _model_group(settings)
    hosts = hosts_of(group)
    shapes: dict[int, torch.Size] = {}
    if isinstance(model, nn.Module):
        from anyaccel.inference.hf.snapshot import shapes_of

        shapes = shapes_of(model)
    on_host = hosts.count(hosts[rank]) if hosts else 1
    try:
        native = together(
            group,
            lambda told: load_decoder(model, settings, rank, on_host, told, executor, group),
            hosts,
            None if isinstance(model, nn.Module) else Path(model).expanduser(),
            settings.tensor_parallel.wire_dtype,
            progress,
        )
        if settings.draft is not None:
            from anyaccel.inference.hf.drafting import draft_for

            draft_for(
                native,
                model,
                settings,
                lambda load, path: together(group, lambda told: load(rank, on_host, told), hosts, path),
            )
    except BaseException:
        if isinstance(model, nn.Module):
            _forbid_use(model, shapes)
        raise
    module: nn.Module | Later
    if isinstance(model, nn.Module) or group is not None:
        module = _native_module(model, native, settings, group, shapes)
    else:
        check_dtype(native.config, f"{Path(model) / 'config.json'}: ")
        kinds = native.config.get("architectures") or [InferenceEngine.__name__]
        module = Later(lambda: _native_module(model, native, settings, group, shapes), str(kinds[0]))
    return InferenceEngine(module, TensorParallelPlan(rank % tp_size, tp_size), settings, group, executor, "", native)


def _native_module(
    model: nn.Module | str | Path,
    native: NativeModel,
    settings: InferenceConfig,
    group: dist.ProcessGroup | None,
    shapes: Mapping[int, torch.Size],
) -> nn.Module:
    """The Hugging Face model that `native` computes."""
    from anyaccel.inference.hf.model import make_native, untie_head

    if isinstance(model, nn.Module):
        module: Any = model
    else:
        module = native_skeleton(Path(model).expanduser(), native, settings.torch_dtype)
        untie_head(module, native)
    return make_native(module, native, settings.torch_dtype, group, shapes)


def _forbid_use(model: nn.Module, shapes: Mapping[int, torch.Size]) -> None:
    """After an error: a model some of whose weights have been taken over says so when it is called."""
    if any(p.shape != shapes[id(p)] for p in model.parameters()):
        model.register_forward_pre_hook(_refuse)
        model.to_empty(device="meta")  # init_inference refuses such a model


def _refuse(model: nn.Module, _args: object) -> NoReturn:
    raise UsageError(
        f"{type(model).__name__}: init_inference was interrupted while it took the weights over; load the model again"
    )


def _torch_engine(
    model: nn.Module | str | Path,
    settings: InferenceConfig,
    progress: Progress | None,
    packed: bool,
    why: str,
) -> InferenceEngine:
    """The engine on the model's own code: divided among ranks, and with packed linears where they fit."""
    _check_cache_options(settings)
    group, rank = _model_group(settings)
    folder = None if isinstance(model, nn.Module) else model_folder(model)
    # Of a model with quantised linears: what is not quantised, and arithmetic.
    dtype = torch.bfloat16 if settings.dtype in QUANTISED else settings.torch_dtype
    if settings.dtype == "auto":
        dtype = stored_dtype(model if isinstance(model, nn.Module) else Path(model).expanduser())
    if packed and (edited := _edited_layers(settings)):
        packed, why = False, why or f"code for what {edited} computes here"
    source: WeightSource
    if folder is None:
        assert isinstance(model, nn.Module)
        module, source = model.eval(), LoadedWeights(model)
    else:
        module = skeleton(folder, dtype)
        source = weights_for(module, folder, keep=packed and settings.dtype == "auto")
    plan = make_plan(module, rank, settings.tensor_parallel.tp_size)
    for name, reason in plan.whole.items():
        logger.info("%s stays whole on every rank: %s", name or "all of it", reason)
    if plan.size > 1 and not plan.row_parallel:
        logger.warning(
            "%s: nothing of it can be divided, each of %d ranks has all of it (%s)",
            *(type(module).__name__, plan.size, next(iter(plan.whole.values()))),
        )
    total = sum(_local_bytes(plan, name, p, dtype) for name, p in module.named_parameters())
    done = 0

    def report(loaded: int) -> None:
        nonlocal done
        done += loaded
        if progress is not None:
            progress(done, total)

    apply(module, plan, source, dtype, get_accelerator().device(), group, report)
    engine = InferenceEngine(module, plan, settings, group, "plain", why)
    engine.dtype = dtype
    if packed:
        from anyaccel.inference.generic.runtime import pack

        pack(module, parse_precision(dtype) if settings.dtype == "auto" else settings.dtype, settings.group_size)
        engine.runtime = "torch"
        refuse_adapters(module)
    return engine


def _check_cache_options(settings: InferenceConfig) -> None:
    """Say that options of a cache of ours have no effect on the model's own.

    Raises:
        UsageError: the runtime was chosen, too.
    """
    for name, default in (("kv_cache", "auto"), ("cache_bytes", 0)):
        value = getattr(settings, name)
        if value == default:
            continue
        if settings.runtime != "auto":
            raise UsageError(
                f"{name}={value!r}: with runtime={settings.runtime!r} the model's own code has its own cache"
            )
        logger.warning("%s=%r has no effect: the model's own code has its own cache", name, value)


def _edited_layers(settings: InferenceConfig) -> str:
    """Which of torch's layers compute something of their own here, so that no packed ones may take their places."""
    from anyaccel.inference.generic.runtime import edited_layers

    edited = edited_layers()
    if edited and settings.dtype in QUANTISED:
        raise UsageError(
            f"dtype={settings.dtype!r} needs packed layers, and {edited} computes something else here; undo that, or "
            "choose dtype='bf16'"
        )
    if edited:
        logger.warning("%s computes something else here than torch's: all layers stay as they are", edited)
    return edited


def _local_bytes(plan: TensorParallelPlan, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> int:
    part = plan.slices.get(name)
    count = parameter.numel()
    if part is not None:
        count = count // parameter.shape[part.dim] * len(part)
    return count * (dtype.itemsize if parameter.is_floating_point() else parameter.element_size())

# SPDX-License-Identifier: Apache-2.0
"""`init_inference`: an unmodified causal LM on native kernels, divided among ranks, in the precision asked for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from anyaccel.accelerator import get_accelerator
from anyaccel.errors import UsageError
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
from anyaccel.inference.hf.group import group_place, synchronise_sampling
from anyaccel.inference.hf.precision import PrecisionMethods
from anyaccel.inference.hf.snapshot import parameter_shapes
from anyaccel.inference.modules.adapters import MERGE, has_adapters, refuse_adapters
from anyaccel.inference.modules.stand_in import StandIn
from anyaccel.inference.native.runtime import Callbacks, NativeModel, Progress, RankPlace
from anyaccel.inference.opening import OwnCode, accelerator_is_cpu, open_model
from anyaccel.inference.options import QUANTISED, ModelOptions, dtype_name
from anyaccel.inference.spec.mapping import Unsupported

if TYPE_CHECKING:
    from anyaccel.inference.hf.native_loop import Job

logger = logging.getLogger(__name__)

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# torch's threads do not live in a child of fork(), and GCC's OpenMP waits for them for ever: one thread is left, as in
# the workers of torch's data loaders. The native runtime starts threads of its own.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class LazyModule:
    """The Hugging Face model of a native engine, made when it is asked for, as importing transformers takes seconds.

    The native runtime computes without it; it shows structure and configuration, and has their `generate`.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._module: nn.Module | None = None

    def module(self) -> nn.Module:
        """The model, which is made once."""
        with self._lock:
            if self._module is None:
                with torch.inference_mode(False):  # torch would mark tensors that are created in inference mode
                    self._module = self._make()
            return self._module


class InferenceEngine(PrecisionMethods, nn.Module):
    """A model that is ready for inference on this rank; call it as the Hugging Face model.

    Whatever it does not have itself is the model's: it can be a pipeline's model, or another one's assistant.

    Attributes:
        module: the Hugging Face model; its layers run natively, or hold this rank's shards. Of a native engine from a
            path it is made when it is asked for first.
        plan: which parts of its own weights those are; nothing is planned where the native runtime divides them.
        dtype: of the logits, and of the weights unless those are quantised.
        settings: what was asked for.
        runtime: what runs the model: "native", "device", "torch" or "plain", see ModelOptions.
        why: what the native runtime, or on a device the device's, lacks for this model; empty when it runs it or was
            not asked to.
        native: the model of "native" or "device"; None when another runtime runs it.
        packed_bytes: of the weights of "torch" that are packed.
    """

    module: Any
    packed_bytes = 0

    def __init__(
        self,
        module: nn.Module | LazyModule,
        plan: TensorParallelPlan,
        settings: ModelOptions,
        group: dist.ProcessGroup | None,
        runtime: str = "plain",
        why: str = "",
        native: NativeModel | None = None,
    ) -> None:
        vars(self)["_lazy"] = None
        super().__init__()
        self.plan = plan
        self.settings = settings
        self.dtype = _FLOATS[settings.arithmetic]
        self.group = group
        self.runtime = runtime
        self.why = why
        self.native = native
        if isinstance(module, LazyModule):
            vars(self)["_lazy"] = module
        else:
            self.module = module

    @property
    def is_lazy(self) -> bool:
        """Whether the Hugging Face model is still to be made."""
        return vars(self)["_lazy"] is not None

    def _make_module(self) -> None:
        lazy = vars(self)["_lazy"]
        if lazy is not None:
            vars(self)["_modules"]["module"] = lazy.module()
            vars(self)["_lazy"] = None

    # torch.nn.Module's methods read submodules here: whichever of them is called, the model is there then.
    @property
    def _modules(self) -> dict[str, Any]:
        self._make_module()
        return vars(self)["_modules"]  # type: ignore[no-any-return]

    @_modules.setter
    def _modules(self, modules: dict[str, Any]) -> None:
        vars(self)["_modules"] = modules

    def _get_name(self) -> str:
        return InferenceEngine.__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._make_module()
        made: Any = super().__reduce_ex__(protocol)
        return (_blank, (type(self).__name__,), *made[2:])  # pickle could not find the class, which has no name here

    def __getattr__(self, name: str) -> Any:
        """The model's, for names that are not the engine's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module") if "native" in vars(self) else None
            if module is None:
                raise
            return module if name == "module" else getattr(module, name)

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
        from anyaccel.inference.generic.requests import computed_together
        from anyaccel.inference.hf.generate_checks import check_arguments
        from anyaccel.inference.hf.native_generate import preserve_configurations, seeded
        from anyaccel.inference.hf.native_loop import run

        check_arguments({name: value for name, value in kwargs.items() if name != "attention_mask"})
        seed, generator = kwargs.pop("seed", None), kwargs.pop("generator", None)
        together = computed_together(self)
        job = None if together is None else self._job(together, args, kwargs, seed, generator)
        if together is not None and job is not None:
            return run(together, job)
        synchronise_sampling(kwargs, self.group)
        with seeded(seed, generator), preserve_configurations(self.module, kwargs.get("assistant_model")):
            return self.module.generate(*args, **kwargs)

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        max_new_tokens: int | None = None,
        **of_the_manager: Any,
    ) -> dict[str, Any]:
        """As the model's own `generate_batch`, on what computes sequences together where the model allows that."""
        from anyaccel.inference.generic.requests import computed_together
        from anyaccel.inference.hf.generate_batch import generate_batch

        given = (generation_config, continuous_batching_config, record_timestamps, progress_bar)
        together = None if self.native is not None else computed_together(self)
        if together is None:
            own: dict[str, Any] = self.module.generate_batch(
                inputs, *given, max_new_tokens=max_new_tokens, **of_the_manager
            )
            return own
        return generate_batch(
            self, together, inputs, generation_config, max_new_tokens, record_timestamps, progress_bar
        )

    def _job(
        self, together: NativeModel, args: tuple[Any, ...], kwargs: dict[str, Any], seed: Any, generator: Any
    ) -> Job | None:
        """A call of `generate` for the loop that computes sequences together; None where transformers' has to run.

        That has drafts, and returns caches that the model's own code can go on with.
        """
        from anyaccel.inference.hf.native_generate import find_job

        named = inspect.signature(self.module.generate).bind_partial(*args, **kwargs).arguments
        arguments = named.pop("kwargs", {}) | named
        if any(each._forward_hooks or each._forward_pre_hooks for each in self.module.modules()):
            return None
        tokenizer = arguments.pop("tokenizer", None)
        job = find_job(self.module, together, self.group, arguments, seed, generator, tokenizer)
        if isinstance(job, str) or job.as_dict or job.options["draft_tokens"]:
            return None
        return job


@functools.cache
def _engine_class(name: str) -> type[InferenceEngine]:
    """The engine under the name of the model's class: transformers' pipelines look models up by that name."""
    return type(name, (InferenceEngine,), {"__module__": __name__, "__doc__": InferenceEngine.__doc__})


def _blank(name: str) -> InferenceEngine:
    kind = _engine_class(name)
    return kind.__new__(kind)


def init_inference(
    model: nn.Module | str | Path,
    config: Mapping[str, object] | None = None,
    *,
    progress: Progress | None = None,
    **options: object,
) -> InferenceEngine:
    """Make a causal LM, tensor- and pipeline-parallel over the ranks of this job, or an encoder ready for inference.

    Args:
        model: a Hugging Face causal LM, encoder or classifier of texts, or the path of a model folder or `.gguf` file.
            From a path each rank reads only its own shards; the weights of a causal LM in memory are taken over:
            afterwards they exist once, packed, and after an error on the way the model has to be loaded again.
        config: options as a dict; keyword arguments go before it.
        progress: called with (bytes loaded, bytes in all) of this rank while weights load.
        dtype: torch.bfloat16 (default), torch.float16, torch.float32, or a name: bf16, fp16, fp32, int8, int4.
        tensor_parallel: `{"tp_size": n}`; consecutive ranks form a group of n. Default 1. `"wire_dtype"`: "bf16" or
            "int8" for fewer bytes between hosts, see ModelOptions.
        pipeline_parallel: `{"size": n}`; consecutive groups of tp_size ranks are the n stages of a model. Default 1.
        group_size, kv_cache, cache_bytes, threads, runtime: see ModelOptions.
        draft: path of a smaller model, or an engine of one, that guesses tokens: the same answers, sooner. From a path
            it runs in int4, of a GGUF file as what the file has.

    Returns:
        The engine; `engine(input_ids, ...)` and `engine.generate(...)` are the model's own.

    Raises:
        UsageError: an option is wrong, or there are fewer ranks than tp_size.
        ModelError: the model cannot be read or divided.
    """
    settings = ModelOptions.from_arguments({**(config or {}), **options})
    if isinstance(model, nn.Module):
        settings = _check_module(model, settings)
    if (encoder := _encoder_engine(model, settings, progress)) is not None:
        return encoder
    place = group_place(settings, accelerator_is_cpu())
    shapes = parameter_shapes(model) if isinstance(model, nn.Module) else {}
    opened: NativeModel | OwnCode | None = None
    try:
        opened = open_model(model, settings, place, Callbacks(progress))
    finally:
        if isinstance(model, nn.Module) and not isinstance(opened, NativeModel):
            _forbid_use(model, shapes)
    if isinstance(opened, OwnCode):
        if opened.feature:
            logger.warning("%s", opened)
        return own_code_engine(model, settings, place, opened, progress)
    return _native_engine(model, opened, settings, place, shapes)


def _encoder_engine(
    model: nn.Module | str | Path, settings: ModelOptions, progress: Progress | None
) -> InferenceEngine | None:
    """The engine of an encoder or of one that classifies texts; None where the model is no such one, or not native."""
    from anyaccel.inference.encoders.opening import is_encoder

    if settings.runtime not in ("auto", "native") or not accelerator_is_cpu() or not is_encoder(model):
        return None
    from anyaccel.inference.encoders.model import Encoder
    from anyaccel.inference.encoders.module import NativeEncoderModel

    try:
        encoder = Encoder(model, settings, head=True, progress=progress)
    except Unsupported as lack:
        if settings.runtime == "native":
            raise
        logger.warning("%s", OwnCode("torch", lack.feature, "native"))
        return None
    if isinstance(model, nn.Module):
        config, name = model.config, type(model).__name__
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(Path(model).expanduser())
        name = str((encoder.native.config.get("architectures") or ["EncoderModel"])[0])
    module = NativeEncoderModel(encoder, config)
    return _engine_class(name)(module, TensorParallelPlan(0, 1), settings, None, "native", native=encoder.native)


def _check_module(model: nn.Module, settings: ModelOptions) -> ModelOptions:
    """Refuse a model in memory that has no weights to take over; with adapters, only its own code runs.

    Raises:
        UsageError: it has been packed before, has no values, or has adapters and its own code was not allowed.
    """
    if any(isinstance(p, StandIn) for p in model.parameters()):
        raise UsageError(f"{type(model).__name__}: its weights have been packed before; load the model again")
    if any(p.is_meta for p in model.parameters()):
        raise UsageError("the model is on the meta device: give init_inference the path of its checkpoint instead")
    if settings.runtime == "plain" or not has_adapters(model):
        return settings
    if settings.runtime != "auto" or settings.dtype in QUANTISED:
        raise UsageError(f"{type(model).__name__}: {MERGE}")
    logger.warning("%s: %s; until then its own code runs as it is", type(model).__name__, MERGE)
    return dataclasses.replace(settings, runtime="plain")


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


def _native_engine(
    model: nn.Module | str | Path,
    native: NativeModel,
    settings: ModelOptions,
    place: RankPlace,
    shapes: Mapping[int, torch.Size],
) -> InferenceEngine:
    """The engine of a native model.

    Args:
        shapes: `parameter_shapes` of a model in memory.
    """

    def make() -> nn.Module:
        from anyaccel.inference.hf.model import make_native, untie_head

        dtype = _FLOATS[settings.arithmetic]
        module: Any = model
        if not isinstance(model, nn.Module):
            module = native_skeleton(Path(model).expanduser(), native, dtype)
            untie_head(module, native)
        return make_native(module, native, dtype, place.group, shapes)

    if isinstance(model, nn.Module) or place.group is not None:
        module: nn.Module | LazyModule = make()
        name = type(module).__name__
    else:
        check_dtype(native.config, f"{Path(model) / 'config.json'}: ")
        module = LazyModule(make)
        name = str((native.config.get("architectures") or [InferenceEngine.__name__])[0])
    plan = TensorParallelPlan(place.rank % settings.tp, settings.tp)
    return _engine_class(name)(module, plan, settings, place.group, native.runtime, native=native)


def _forbid_use(model: nn.Module, shapes: Mapping[int, torch.Size]) -> None:
    """After an error: a model some of whose weights have been taken over says so when it is called."""
    if any(p.shape != shapes[id(p)] for p in model.parameters()):
        model.register_forward_pre_hook(_refuse)
        model.to_empty(device="meta")  # init_inference refuses such a model


def _refuse(model: nn.Module, _args: object) -> NoReturn:
    raise UsageError(
        f"{type(model).__name__}: init_inference was interrupted while it took the weights over; load the model again"
    )


def own_code_engine(
    model: nn.Module | str | Path, settings: ModelOptions, place: RankPlace, code: OwnCode, progress: Progress | None
) -> InferenceEngine:
    """The engine on the model's own code: divided among ranks, and with packed linears where they fit."""
    _check_cache_options(settings)
    folder = None if isinstance(model, nn.Module) else model_folder(model)
    # Of a model with quantised linears: what is not quantised, and arithmetic.
    dtype = torch.bfloat16 if settings.dtype in QUANTISED else _FLOATS[settings.arithmetic]
    if settings.dtype == "auto":
        dtype = stored_dtype(model if isinstance(model, nn.Module) else Path(model).expanduser())
    packed, why = code.runtime == "torch", code.feature
    if packed and (edited := _edited_layers(settings)):
        packed, why = False, why or f"code for what {edited} computes here"
    source: WeightSource
    if folder is None:
        assert isinstance(model, nn.Module)
        module, source = model.eval(), LoadedWeights(model)
    else:
        module = skeleton(folder, dtype)
        source = weights_for(module, folder, keep=packed and settings.dtype == "auto")
    plan = make_plan(module, place.rank, settings.tp)
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

    apply(module, plan, source, dtype, get_accelerator().device(), place.group, report)
    engine = _engine_class(type(module).__name__)(module, plan, settings, place.group, "plain", why)
    engine.dtype = dtype
    if packed:
        from anyaccel.inference.generic.runtime import pack

        form = dtype_name(dtype) if settings.dtype == "auto" else settings.dtype
        engine.packed_bytes = pack(module, form, settings.group_size).bytes
        engine.runtime = "torch"
        refuse_adapters(module)
    return engine


def _check_cache_options(settings: ModelOptions) -> None:
    """Say that options of a cache of ours have no effect on the model's own.

    Raises:
        UsageError: the runtime was chosen, too.
    """
    names = {
        "kv_cache": settings.kv_cache != "auto",
        "cache_bytes": settings.runtime == "plain" and settings.cache_bytes,
    }
    for name in (name for name, is_given in names.items() if is_given):
        value = getattr(settings, name)
        if settings.runtime != "auto":
            raise UsageError(
                f"{name}={value!r}: with runtime={settings.runtime!r} the model's own code has its own cache"
            )
        logger.warning("%s=%r has no effect: the model's own code has its own cache", name, value)


def _edited_layers(settings: ModelOptions) -> str:
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

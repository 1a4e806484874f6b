# SPDX-License-Identifier: Apache-2.0
"""From a model's files, or a model in memory, to the native decoder with packed weights. Torch-free from files.

Weights exist once: they are packed a few rows at a time from mapped files, whose pages are given back as they are read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from anyaccel import env, host_memory
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.identity import identity
from anyaccel.inference.checkpoints.model_path import check_model_path
from anyaccel.inference.checkpoints.quantised_layout import cost_of
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packed_cache import PackedModel
from anyaccel.inference.native.saving import Saving
from anyaccel.inference.options import DEFAULTS, ModelOptions
from anyaccel.inference.spec.decoder import PAGE, DecoderSpec
from anyaccel.inference.spec.stored import with_specs
from anyaccel.validation import Fields, check_text, one_line

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.inference.native.checkpoint import Checkpoint
    from anyaccel.inference.native.packing import Plan

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], object]

_CACHE_FORMATS = {"fp32": "f32", "bf16": "bf16", "int8": "i8", "int4": "i4"}
_THREADS_A_CPU = 4  # a real run has one; tests have more
_CAUSAL_LMS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CACHE_SHARE = 8  # of a bound on memory, an eighth is for keys and values where `cache_bytes` does not say how much
_LEAST_BESIDE = 64 << 20  # bytes of packed weights; fewer are written at once
SHARE_OF_MEMORY = 0.75  # of what is available beside the weights: the most that the key/value cache may grow to

# The models of this process, by id(): their caches may grow yet.
_models: weakref.WeakValueDictionary[int, NativeModel] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_models.clear)  # a child of fork() cannot use its parent's models


@dataclass
class NativeModel:
    """A decoder that is ready, and what it was made from.

    Attributes:
        model: the native decoder, of this rank.
        spec: of this rank; `whole_spec` of the whole model.
        config: config.json, or the same made from a GGUF file's metadata.
        generation_config: generation_config.json, {} without one.
        dtype: that was asked for; None: the file's own.
        forms: types that matrices are stored as -> what those run as, in words.
        cached: the packed weights came from the cache.
        saving: writes them there meanwhile; `begin` it after the first token, `finish` it at the end.
        rank, size: of tensor parallelism, within one of the `stages`.
        draft: the model that guesses for it, see `native.draft.attach`.
        runtime: "native", or "device" where `model` is one of inference/device.
    """

    model: _llm.Model
    spec: DecoderSpec
    whole_spec: DecoderSpec
    config: dict[str, Any]
    generation_config: dict[str, Any]
    dtype: str | None
    forms: dict[str, list[str]]
    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1
    cached: bool = False
    saving: Saving | None = None
    draft: NativeModel | None = None
    runtime: str = "native"

    def __post_init__(self) -> None:
        _models[id(self)] = self

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return self.size * self.stages

    @property
    def resident_bytes(self) -> int:
        """The bytes of weights that are in memory: all, but for experts that stay in a file."""
        return getattr(self.model, "resident_bytes", self.model.weight_bytes)


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands among those that share a model.

    Attributes:
        rank: among all of the model's ranks, which are numbered stage by stage.
        on_host: ranks that share this host's memory; 0: all.
        on_cpu: whether the accelerator is the host's own processor.
        group: the process group of torch.distributed that has these ranks; None without one.
        connect: loads on all ranks and connects them; None for a model of one rank.
    """

    rank: int = 0
    on_host: int = 0
    on_cpu: bool = True
    group: Any = None
    connect: Connect | None = None

    def part(self, options: ModelOptions) -> dict[str, Any]:
        """Which part of the model this rank has."""
        stage, rank = divmod(self.rank, options.tp)
        return {"rank": rank, "size": options.tp, "stage": stage, "stages": options.pp}


@dataclass(frozen=True)
class Callbacks:
    """What is called while a model loads.

    Attributes:
        progress: with (bytes done, bytes in all) of this rank.
        check: between the steps of the work, in its thread; what it raises ends the work.
        line: with a line for the user.
    """

    progress: Progress | None = None
    check: Callable[[], object] | None = None
    line: Callable[[str], object] = logger.warning

    def raise_if_cancelled(self) -> None:
        """Raise what `check` raises."""
        if self.check is not None:
            self.check()

    def report(self, done: int, total: int) -> None:
        """Call both."""
        self.raise_if_cancelled()
        if self.progress is not None:
            self.progress(done, total)


ALONE = RankPlace()
LOGGED = Callbacks()


class Connect(Protocol):
    """Loads this rank's part and connects the ranks; an error of one is the error of all."""

    def __call__(
        self,
        load: Callable[[Callbacks], NativeModel],
        callbacks: Callbacks,
        source: Path | None,
        wire_dtype: str,
    ) -> NativeModel:
        """Call `load` with callbacks that notice lost ranks, too; `source` is the model's folder or file."""


def load_native(
    model: Any,
    options: ModelOptions = DEFAULTS,
    place: RankPlace = ALONE,
    callbacks: Callbacks = LOGGED,
    config: Mapping[str, Any] | None = None,
    encoder: bool = False,
    headless: bool = False,
    draft_head: int = 0,
) -> NativeModel:
    """Make the native decoder of a model; of a model on several ranks, this rank's part.

    The packed weights of files are kept in the user's cache folder and read from there; one process alone writes many
    in a thread, after this call (see `NativeModel.saving`). The weights of a module in memory are given up as they are
    packed.

    Args:
        model: path of a Hugging Face folder or a GGUF file, a Hugging Face model in memory, or a TensorSource.
        config: of a TensorSource or a model in memory that has none; as config.json.
        encoder: the model's encoder is wanted, which makes hidden states and predicts no token.
        headless: no logits are wanted of a decoder, which may have no head then.
        draft_head: the layer that drafts for a model of so many layers is wanted, of its checkpoint or of its own; it
            computes once it has borrowed from the model.

    Raises:
        Unsupported: the native runtime lacks something that this model needs: its `feature`.
        ModelError: a file is damaged, a weight missing or of the wrong shape.
        UsageError: the model is too small for so many ranks, or `threads` are too many.
    """
    if options.threads > _THREADS_A_CPU * (os.cpu_count() or 1):
        raise UsageError(
            f"threads={options.threads}: this machine has {os.cpu_count()} CPUs, and threads wait by spinning; "
            "0 takes as many as there are"
        )
    if not isinstance(model, str | Path):
        return _pack(open_checkpoint(model, config, encoder, lora=options.lora), options, place, callbacks)[0]
    path = Path(model).expanduser()
    check_model_path(path)
    kinds: dict[str, Any] = {"encoder": encoder, "headless": headless, "draft_head": draft_head}
    if options.lora:
        from anyaccel.inference.checkpoints.adapters import check_adapter

        check_adapter(Path(options.lora).expanduser())
        kinds["lora"] = options.lora
    entry = None
    if env.ANYACCEL_PACKED_CACHE_BYTES.get() != 0:
        try:
            kind = {name: asked for name, asked in kinds.items() if asked}
            if options.lora:
                kind["lora"] = identity(Path(options.lora).expanduser())
            precision = asdict(Precision.from_options(options))
            entry = PackedModel(path, {"precision": precision, **place.part(options), **kind})
        except OSError as error:  # of a file that the model can be loaded without
            logger.warning("%s: packed weights are not kept (%s)", path, error)
    checkpoint = functools.partial(open_checkpoint, path, **kinds)
    if entry is None:
        return _pack(checkpoint(), options, place, callbacks)[0]
    native = _from_cache(entry, options, place, callbacks)
    if native is not None:
        return native
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(entry.locked(callbacks.raise_if_cancelled))
        except OSError as error:
            logger.warning("%s: packed weights are not kept (%s)", entry.root, error)
            return _pack(checkpoint(), options, place, callbacks)[0]
        native = _from_cache(entry, options, place, callbacks)  # another process may have made it meanwhile
        if native is None:
            native, shapes = _pack(checkpoint(), options, place, callbacks, entry)
            if native.cached:
                return native
            # Ranks of a command end with it, possibly before all is written.
            if options.ranks == 1 and native.model.weight_bytes >= _LEAST_BESIDE:
                native.saving = Saving(_writer(entry, native, shapes), held.pop_all().close)
            else:
                _writer(entry, native, shapes)(callbacks.raise_if_cancelled)
        return native


class MemoryBoundError(UsageError):
    """A model cannot run in the memory that it may take."""


def cache_limit(ranks: int) -> int:
    """The most bytes that keys and values of one of these ranks on a host may take, where nobody says how many."""
    promised = sum(each.model.cache_limit_bytes - each.model.cache_reserved_bytes for each in _models.values())
    available = host_memory.available()
    free = max(available - promised, available // 4)  # most models never use all that they were promised
    return max(1 << 20, int(free * SHARE_OF_MEMORY) // ranks)


def _make(spec: DecoderSpec, shapes: Mapping[str, Any], options: ModelOptions, place: RankPlace) -> _llm.DecoderModel:
    from anyaccel import _llm

    limit = options.cache_bytes
    memory = options.memory // (place.on_host or options.ranks)
    if limit == 0 and memory:
        limit = max(memory // _CACHE_SHARE, 1)
    if limit == 0:
        limit = cache_limit(place.on_host or options.ranks)
    cache = _CACHE_FORMATS[options.cache_dtype]
    try:
        left = max(memory - limit, 1) if memory else 0
        return _llm.DecoderModel(spec, shapes["matrices"], shapes["vectors"], options.threads, cache, limit, left)
    except UsageError as error:
        if not memory:
            raise
        raise MemoryBoundError(f"memory={options.memory}: {error}; the key/value cache takes {limit} beside") from error
    except (MemoryError, ValueError, RuntimeError) as error:
        if isinstance(error, ModelError | UsageError):
            raise
        raise ModelError(f"the native runtime cannot hold this model ({error or 'out of memory'})") from error


def _from_cache(
    entry: PackedModel, options: ModelOptions, place: RankPlace, callbacks: Callbacks
) -> NativeModel | None:
    """The model that the entry has; None where there is none, and where it is damaged, which removes it."""
    saved = with_specs(entry.load())
    if saved is None:
        return None
    try:
        file = entry.weights.open("rb")
    except OSError:
        return None
    damage = ""
    with file:
        try:
            model = _make(saved["spec"], saved["shapes"], options, place)
            total = model.weight_bytes
            if total != saved["weight_bytes"]:
                damage = "its size is another one"
            elif not model.read(file.fileno(), 0, saved["checksums"], lambda done: callbacks.report(done, total)):
                damage = "its checksum is another one"
            else:
                model.finish()
        except (OSError, ModelError, UsageError) as error:
            if isinstance(error, MemoryBoundError):
                raise
            damage = str(error) or type(error).__name__
    if damage:
        logger.warning("%s: %s; packing again", entry.weights, damage)
        entry.remove()
        return None
    return NativeModel(
        model,
        saved["spec"],
        saved["whole_spec"],
        saved["config"],
        saved["generation_config"],
        Precision.from_options(options).dtype,
        saved["forms"],
        **place.part(options),
        cached=True,
    )


def open_checkpoint(
    model: Any,
    config: Mapping[str, Any] | None = None,
    encoder: bool = False,
    headless: bool = False,
    draft_head: int = 0,
    lora: str = "",
) -> Checkpoint:
    """What weights are read from: `load_native` and `ModelOptions` say what the arguments are."""
    if lora:
        from anyaccel.inference.checkpoints.adapters import AdapterSource

        whole = open_checkpoint(model, config, encoder, headless, draft_head)
        return replace(whole, source=AdapterSource(whole.source, Path(lora).expanduser()))
    if encoder and isinstance(model, str | Path):
        from anyaccel.inference.native.checkpoint import read_encoder

        return read_encoder(Path(model).expanduser())
    if not isinstance(model, str | Path):
        from anyaccel.inference.native.in_memory import checkpoint_in_memory, encoder_in_memory

        if encoder:
            return encoder_in_memory(model)
        return checkpoint_in_memory(model, config, release=True)
    from anyaccel.inference.native.checkpoint import check_head, of_draft_head, read_checkpoint

    path = Path(model).expanduser()
    checkpoint = read_checkpoint(path)
    if headless:
        return replace(checkpoint, headless=True)
    if draft_head:
        return of_draft_head(path, checkpoint, draft_head)
    given = Fields(checkpoint.config, f"{path}: config: ").items("architectures")
    kinds = [check_text(kind, f"{path}: config: architectures") for kind in given]
    if kinds and not any(kind.endswith(_CAUSAL_LMS) for kind in kinds):
        check_head(path, checkpoint, one_line(kinds[0]))
        logger.warning("%s: its config.json says %s; it runs as a causal LM here", path, one_line(", ".join(kinds)))
    return checkpoint


def make_plan(checkpoint: Checkpoint, options: ModelOptions, place: RankPlace) -> Plan:
    """How a checkpoint becomes the weights of a rank; warns of what in it is not used."""
    from anyaccel.inference.native.packing import Plan

    plan = Plan(checkpoint, Precision.from_options(options), **place.part(options))
    if unread := plan.unread():
        logger.warning(
            "%d weights of the checkpoint are not part of the model that its configuration describes, for example %s",
            len(unread),
            unread[0],
        )
    if (cost := cost_of(plan.dequantised())) and place.rank == 0:
        logger.warning(cost)
    if plan.untied and place.rank == 0:
        logger.warning(
            "config.json ties %s to %s, but the checkpoint has both with different values: each is used as it is; "
            "tie_word_embeddings=false there says so",
            *reversed(plan.untied),
        )
    return plan


def _pack(
    checkpoint: Checkpoint,
    options: ModelOptions,
    place: RankPlace,
    callbacks: Callbacks,
    entry: PackedModel | None = None,
) -> tuple[NativeModel, dict[str, Any]]:
    """The model, and the shapes of its weights.

    Args:
        entry: where the weights go, and are read from again, when experts do not fit in memory.
    """
    callbacks.raise_if_cancelled()
    plan = make_plan(checkpoint, options, place)
    plan.fit_to_llm(Precision.from_options(options))
    callbacks.raise_if_cancelled()
    shapes = plan.shapes()
    model = _make(plan.spec, shapes, options, place)
    native = native_model(model, plan, checkpoint, options, place)
    if model.resident_bytes < model.weight_bytes:
        entry = _pack_to_file(plan, native, shapes, entry, options, callbacks)
        del model, native, plan
        native_again = _from_cache(entry, options, place, callbacks)
        if native_again is None:
            raise ModelError(f"{entry.weights}: the packed weights cannot be read again")
        return native_again, shapes
    plan.fill(model, callbacks.report)
    model.finish()
    return native, shapes


def _pack_to_file(
    plan: Plan,
    native: NativeModel,
    shapes: Mapping[str, Any],
    entry: PackedModel | None,
    options: ModelOptions,
    callbacks: Callbacks,
) -> PackedModel:
    """Pack a model of which not all fits in memory: its experts go to the file one by one.

    Raises:
        MemoryBoundError: there is no such file, or no room for it.
    """
    model = cast("_llm.DecoderModel", native.model)
    size = model.weight_bytes
    what = f"memory={options.memory}: the packed weights take {size} bytes"
    if entry is None:
        raise MemoryBoundError(
            f"{what}, and what does not fit stays in a file of the cache, which there is for models on disk alone, and "
            f"where {env.ANYACCEL_PACKED_CACHE_BYTES.name} is not 0"
        )
    if not entry.has_room(size):
        raise MemoryBoundError(
            f"{what}, and what does not fit stays in a file of the cache: {entry.root} has no room for it, or "
            f"{env.ANYACCEL_PACKED_CACHE_BYTES.name}={env.ANYACCEL_PACKED_CACHE_BYTES.get()} is less"
        )

    def write(descriptor: int) -> Sequence[int]:
        model.stream_to(descriptor, 0)
        plan.fill(model, callbacks.report)
        return model.write(descriptor, 0, lambda _: callbacks.raise_if_cancelled())

    try:
        entry.save(_saved(native, shapes), size, write)
    except OSError as error:
        raise ModelError(f"{entry.root}: experts that do not fit in memory cannot be kept there ({error})") from error
    return entry


def native_model(
    model: _llm.Model,
    plan: Plan,
    checkpoint: Checkpoint,
    options: ModelOptions,
    place: RankPlace,
    runtime: str = "native",
) -> NativeModel:
    """The model with what it was made from."""
    return NativeModel(
        model,
        plan.spec,
        plan.whole,
        checkpoint.config,
        checkpoint.generation_config,
        Precision.from_options(options).dtype,
        plan.forms(),
        **place.part(options),
        runtime=runtime,
    )


def _writer(
    packed: PackedModel, native: NativeModel, shapes: Mapping[str, Any]
) -> Callable[[Callable[[], object]], None]:
    """What keeps a model in the cache; it calls its argument again and again."""
    model = cast("_llm.DecoderModel", native.model)  # not all of it, which holds what is made of this
    size, saved = model.weight_bytes, _saved(native, shapes)

    def write(raise_if_cancelled: Callable[[], object]) -> None:
        try:
            if packed.has_room(size):
                packed.save(saved, size, lambda descriptor: model.write(descriptor, 0, lambda _: raise_if_cancelled()))
        except OSError as error:  # the model is loaded all the same
            logger.warning("%s: packed weights are not kept (%s)", packed.root, error)

    return write


def _saved(native: NativeModel, shapes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "spec": asdict(native.spec),
        "whole_spec": asdict(native.whole_spec),
        "shapes": shapes,
        "config": native.config,
        "generation_config": native.generation_config,
        "forms": native.forms,
    }


def logits_error(dtype: object) -> ModelError:
    """The error for logits from which no token can be sampled."""
    return ModelError(f"the model's logits are NaN or infinite in {dtype}; try another dtype, such as fp32")


def cache_bytes(native: NativeModel, prompts: Sequence[int], copies: int, new: int) -> int:
    """The bytes of keys, values and states of a batch: `copies` answers of `new` tokens to prompts of these lengths."""
    model = native.model
    pages = sum(-(-(length + new) // PAGE) + (copies - 1) * (-(-new // PAGE) + 1) for length in prompts)
    return pages * PAGE * model.cache_bytes_per_token() + len(prompts) * copies * model.cache_bytes_per_state()


def check_memory(native: NativeModel, prompts: Sequence[int], copies: int, new: int) -> None:
    """Raise UsageError, with the bytes, when the cache of a batch cannot fit."""
    model, needed = native.model, cache_bytes(native, prompts, copies, new)
    if needed > model.cache_limit_bytes:
        from anyaccel import _llm

        own_cache = isinstance(model, _llm.DecoderModel)  # runtime="device" has neither
        smaller = "kv_cache='int8' or 'int4', " if own_cache else ""
        raise UsageError(
            f"{len(prompts) * copies} sequences of up to {max(prompts) + new} tokens need {needed / 2**20:.0f} MiB of "
            f"key/value cache ({needed} bytes), its limit is {model.cache_limit_bytes / 2**20:.0f} MiB: use a smaller "
            f"batch, fewer new tokens, {smaller}or a larger cache_bytes"
        )

# SPDX-License-Identifier: Apache-2.0
"""From a model's files, or a model in memory, to the native decoder with packed weights. Torch-free from files.

Weights exist once: they are packed a few rows at a time from mapped files, whose pages are given back as they are read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anyaccel import env, host_memory
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints.model_path import check_model_path
from anyaccel.inference.checkpoints.quantised_layout import cost_of
from anyaccel.inference.native.formats import DEFAULT_GROUP, Precision
from anyaccel.inference.native.packed_cache import Entry
from anyaccel.inference.native.saving import Saving
from anyaccel.inference.spec.decoder import DecoderSpec
from anyaccel.inference.spec.stored import with_specs
from anyaccel.outside import Values, line, text

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.inference.native.checkpoint import Checkpoint
    from anyaccel.inference.native.packing import Plan

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], object]

_CACHE_FORMATS = {"fp32": "f32", "f32": "f32", "bf16": "bf16", "int8": "i8", "i8": "i8", "int4": "i4", "i4": "i4"}
_THREADS_A_CPU = 4  # a real run has one; tests have more
_CAUSAL_LMS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_LEAST_BESIDE = 64 << 20  # bytes of packed weights; fewer are written at once
_SHARE_OF_MEMORY = 0.75  # of the available memory: the most that the key/value cache may grow to


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

    def __post_init__(self) -> None:
        _models[id(self)] = self

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return self.size * self.stages


def load_native(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = "bf16",
    group: int = DEFAULT_GROUP,
    asymmetric: bool = True,
    rank: int = 0,
    size: int = 1,
    stage: int = 0,
    stages: int = 1,
    on_host: int = 0,
    threads: int = 0,
    cache_dtype: str = "bf16",
    cache_limit: int = 0,
    progress: Progress | None = None,
    use_cache: bool = True,
    beside: bool = False,
    release: bool = False,
    check: Callable[[], object] | None = None,
) -> NativeModel:
    """Make the native decoder of a model; on `stages` times `size` ranks each has a part.

    Args:
        model: path of a Hugging Face folder or a GGUF file, a Hugging Face model in memory, or a TensorSource.
        config: of a TensorSource or a model in memory that has none; as config.json.
        dtype: fp32, bf16, fp16, int8, int4; None or "auto": the precision that the file has.
        group, asymmetric: of int4: columns that share a scale; a minimum beside it.
        rank, size: of tensor parallelism.
        stage, stages: of pipeline parallelism.
        on_host: ranks that share this host's memory; 0: all.
        threads: 0 for the CPUs of this process.
        cache_dtype: of keys and values: bf16, int8, int4, fp32.
        cache_limit: most bytes of keys and values; 0: three quarters of what memory is available then and not promised
            to other models of this process.
        progress: called with (bytes done, bytes in all) while weights are read or packed.
        use_cache: keep the packed weights of files in the user's cache folder, and read them from there.
        beside: write them there in a thread, after this call; see `NativeModel.saving`.
        release: give up each of the module's weights once it is packed.
        check: called between the steps of the work, in its thread; what it raises ends the work.

    Raises:
        Unsupported: the native runtime lacks something that this model needs: its `feature`.
        ModelError: a file is damaged, a weight missing or of the wrong shape.
        UsageError: an argument is wrong, or the model is too small for so many ranks.
    """
    most = _THREADS_A_CPU * (os.cpu_count() or 1)
    if not 0 <= cache_limit < 2**63:
        raise UsageError(f"cache_limit={cache_limit}: must be 0 or above, and fit 64 bits")
    if threads > most:
        raise UsageError(
            f"threads={threads}: this machine has {os.cpu_count()} CPUs, and threads wait by spinning; "
            "0 takes as many as there are"
        )
    precision = Precision(None if dtype == "auto" else dtype, group, asymmetric)
    if cache_dtype not in _CACHE_FORMATS:
        raise UsageError(f"cache_dtype={cache_dtype!r}: must be bf16, int8, int4 or fp32")
    cache_format = _CACHE_FORMATS[cache_dtype]
    place = Place(rank, size, stage, stages, on_host or size * stages)
    settings = _Settings(precision, place, threads, cache_format, cache_limit, progress, check)
    if not isinstance(model, str | Path):
        return _packed(settings, open_checkpoint(model, config, release))[0]
    path = Path(model).expanduser()
    check_model_path(path)
    entry = None
    if use_cache and env.ANYACCEL_PACKED_CACHE_BYTES.get() != 0:
        try:
            entry = Entry(path, {"precision": asdict(precision), **place.key()})
        except OSError as error:  # of a file that the model can be loaded without
            logger.warning("%s: packed weights are not kept (%s)", path, error)
    if entry is None:
        return _from_files(path, settings)[0]
    found = _from_cache(entry, with_specs(entry.load()), settings)
    if found is not None:
        return found
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(entry.locked(settings.go_on))
        except OSError as error:
            logger.warning("%s: packed weights are not kept (%s)", entry.root, error)
            return _from_files(path, settings)[0]
        found = _from_cache(entry, with_specs(entry.load()), settings)  # another process may have made it meanwhile
        if found is None:
            found, shapes = _from_files(path, settings)
            if beside and found.model.weight_bytes >= _LEAST_BESIDE:
                found.saving = Saving(_writer(entry, found, shapes), held.pop_all().close)
            else:
                _writer(entry, found, shapes)(settings.go_on)
        return found


@dataclass(frozen=True)
class Place:
    """Of this rank among those that share the model."""

    rank: int
    size: int
    stage: int = 0
    stages: int = 1
    on_host: int = 1

    def key(self) -> dict[str, Any]:
        """What packed weights depend on."""
        return {"rank": self.rank, "size": self.size, "stage": self.stage, "stages": self.stages}


@dataclass(frozen=True)
class _Settings:
    precision: Precision
    place: Place
    threads: int
    cache_format: str
    cache_limit: int
    progress: Progress | None
    check: Callable[[], object] | None

    def go_on(self) -> None:
        if self.check is not None:
            self.check()

    def report(self, done: int, total: int) -> None:
        self.go_on()
        if self.progress is not None:
            self.progress(done, total)


def _make(spec: DecoderSpec, shapes: Mapping[str, Any], settings: _Settings) -> _llm.DecoderModel:
    from anyaccel import _llm

    limit = settings.cache_limit
    if limit == 0:
        promised = sum(each.model.cache_limit_bytes - each.model.cache_reserved_bytes for each in _models.values())
        available = host_memory.available()
        free = max(available - promised, available // 4)  # most models never use all that they were promised
        limit = max(1 << 20, int(free * _SHARE_OF_MEMORY) // settings.place.on_host)
    try:
        return _llm.DecoderModel(
            spec, shapes["matrices"], shapes["vectors"], settings.threads, settings.cache_format, limit
        )
    except (MemoryError, ValueError, RuntimeError) as error:
        if isinstance(error, ModelError | UsageError):
            raise
        raise ModelError(f"the native runtime cannot hold this model ({error or 'out of memory'})") from error


def _from_cache(entry: Entry, saved: Mapping[str, Any] | None, settings: _Settings) -> NativeModel | None:
    """The model that `saved`, which the entry has loaded, describes; None without one, and where it is damaged.

    A damaged entry is removed.
    """
    if saved is None:
        return None
    try:
        file = entry.weights.open("rb")
    except OSError:
        return None
    damage = ""
    with file:
        try:
            made = _make(saved["spec"], saved["shapes"], settings)
            total = made.weight_bytes
            if total != saved["weight_bytes"]:
                damage = "its size is another one"
            elif made.read(file.fileno(), 0, lambda done: settings.report(done, total)) != saved["checksum"]:
                damage = "its checksum is another one"
            else:
                made.finish()
        except (OSError, ModelError, UsageError) as error:
            damage = str(error) or type(error).__name__
    if damage:
        logger.warning("%s: %s; packing again", entry.weights, damage)
        entry.remove()
        return None
    return NativeModel(
        made,
        saved["spec"],
        saved["whole_spec"],
        saved["config"],
        saved["generation_config"],
        settings.precision.dtype,
        saved["forms"],
        **settings.place.key(),
        cached=True,
    )


def open_checkpoint(model: Any, config: Mapping[str, Any] | None = None, release: bool = False) -> Checkpoint:
    """What weights are read from: `load_native` says what `model`, `config` and `release` are."""
    if not isinstance(model, str | Path):
        from anyaccel.inference.native.in_memory import checkpoint_in_memory

        return checkpoint_in_memory(model, config, release)
    from anyaccel.inference.native.checkpoint import check_head, checkpoint_of

    path = Path(model).expanduser()
    checkpoint = checkpoint_of(path)
    given = Values(checkpoint.config, f"{path}: config: ").items("architectures")
    kinds = [text(kind, f"{path}: config: architectures") for kind in given]
    if kinds and not any(kind.endswith(_CAUSAL_LMS) for kind in kinds):
        check_head(path, checkpoint, line(kinds[0]))
        logger.warning("%s: its config.json says %s; it runs as a causal LM here", path, line(", ".join(kinds)))
    return checkpoint


def _from_files(path: Path, settings: _Settings) -> tuple[NativeModel, dict[str, Any]]:
    return _packed(settings, open_checkpoint(path))


def plan_of(checkpoint: Checkpoint, precision: Precision, place: Place) -> Plan:
    """How a checkpoint becomes the weights of a rank; what in it is not used is said."""
    from anyaccel.inference.native.packing import Plan

    plan = Plan(checkpoint, precision, **place.key())
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


def _packed(settings: _Settings, checkpoint: Checkpoint) -> tuple[NativeModel, dict[str, Any]]:
    """The model, and the shapes of its weights."""
    settings.go_on()
    plan = plan_of(checkpoint, settings.precision, settings.place)
    settings.go_on()
    shapes = plan.shapes()
    made = _make(plan.spec, shapes, settings)
    plan.fill(made, settings.report)
    made.finish()
    native = NativeModel(
        made,
        plan.spec,
        plan.whole,
        checkpoint.config,
        checkpoint.generation_config,
        settings.precision.dtype,
        plan.forms(),
        **settings.place.key(),
    )
    return native, shapes


def _writer(entry: Entry, made: NativeModel, shapes: Mapping[str, Any]) -> Callable[[Callable[[], object]], None]:
    """What makes the entry; it calls its argument again and again."""
    model = cast("_llm.DecoderModel", made.model)  # not the whole: it holds what is made of this
    size = model.weight_bytes
    saved = {
        "spec": asdict(made.spec),
        "whole_spec": asdict(made.whole_spec),
        "shapes": shapes,
        "config": made.config,
        "generation_config": made.generation_config,
        "forms": made.forms,
    }

    def write(go_on: Callable[[], object]) -> None:
        try:
            if entry.has_room(size):
                entry.save(saved, size, lambda descriptor: model.write(descriptor, 0, lambda _: go_on()))
        except OSError as error:  # the model is loaded all the same
            logger.warning("%s: packed weights are not kept (%s)", entry.root, error)

    return write


def check_memory(native: NativeModel, prompts: Sequence[int], copies: int, new: int) -> None:
    """Raise UsageError, with the bytes, when the cache of a batch cannot fit."""
    page = 64
    model = native.model
    tokens = sum(-(-(length + new) // page) * page + (copies - 1) * (-(-new // page) + 1) * page for length in prompts)
    needed = tokens * model.cache_bytes_per_token()
    if needed > model.cache_limit_bytes:
        from anyaccel import _llm

        own_cache = isinstance(model, _llm.DecoderModel)  # runtime="device" has neither
        smaller = "kv_cache='int8' or 'int4', " if own_cache else ""
        raise UsageError(
            f"{len(prompts) * copies} sequences of up to {max(prompts) + new} tokens need {needed / 2**20:.0f} MiB of "
            f"key/value cache ({needed} bytes), its limit is {model.cache_limit_bytes / 2**20:.0f} MiB: use a smaller "
            f"batch, fewer new tokens, {smaller}or a larger cache_bytes"
        )

# SPDX-License-Identifier: Apache-2.0
"""The decoder that the engine drives: in this process, or on ranks (`ranks.py`). Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel import host_memory
from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.facts import (
    NATIVE_RANKS,
    ONLY_ALONE,
    StepDecoder,
    check_pages,
    limited,
    plan_line,
    served_context,
    shares_prefixes,
    with_own_ends,
)
from anyaccel.serve.engine.slots import Slots
from anyaccel.serve.engine.step import CacheChange, MultiStep, StepInput, StepOutput
from anyaccel.serve.interface import ModelFacts

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter
    from anyaccel.serve.engine.disk_cache import DiskCache
    from anyaccel.serve.engine.settings import EngineSettings


class LocalDecoder:
    """A model in this process, in the native runtime or on a device."""

    multi_step = True

    def __init__(self, native: NativeModel, facts: ModelFacts, max_batch: int) -> None:
        self.disk: DiskCache | None = None
        self._slots: Slots | None = Slots(native.model)
        self.page_bytes = native.model.cache_bytes_per_token() * PAGE
        self.state_pages = native.model.cache_bytes_per_state() // self.page_bytes
        states = max_batch * self.state_pages
        self.cache_pages = native.model.cache_limit_bytes // self.page_bytes - states
        check_pages(self.cache_pages, self.page_bytes, states)
        self.shares = shares_prefixes(native)
        self.facts = limited(facts, self.cache_pages)

    def apply(self, step: StepInput, multi_step: MultiStep | None = None) -> StepOutput:
        assert self._slots is not None
        return self._slots.apply(step, multi_step)

    def pages(self, number: int, tokens: int, first: int, count: int) -> list[int] | None:
        """The addresses of pages of a request that has so many tokens in the cache; None: it has not any more."""
        assert self._slots is not None
        return self._slots.pages(number, tokens, first, count)

    def restore(self, changes: list[CacheChange], number: int, tokens: list[int], addresses: Sequence[int]) -> None:
        """Make these changes, and an ended request whose pages are copied from elsewhere."""
        assert self._slots is not None
        self._slots.apply(StepInput(changes))
        self._slots.restore(number, tokens, addresses, self.page_bytes)

    def check(self) -> None:
        pass  # it cannot fail without this process

    def late(self) -> bool:
        return False

    def close(self) -> None:
        if self._slots is not None:
            self._slots.clear()
        if self.disk is not None:
            self.disk.close()
        self._slots = None  # frees the weights now: the next decoder may be loaded before this object is collected


def open_decoder(
    path: Path,
    options: ModelOptions,
    screen: Reporter,
    settings: EngineSettings,
    tokenizer: Any = None,
    check: Callable[[], object] | None = None,
    replica: int = 0,
) -> StepDecoder:
    """Load a model.

    Args:
        tokenizer: of the model, where the caller has it already.
        check: called now and then while the model loads; what it raises ends that.
        replica: which of `settings.replicas` it is.

    Raises:
        UsageError: it is not one of those that DecoderSpec has, or does not fit the settings.
        AnyAccelError: it cannot be read.
    """
    from anyaccel.inference.checkpoints.model_path import check_decoder_only
    from anyaccel.inference.encoders.embedder import embedding_cuts
    from anyaccel.inference.native.runtime import Callbacks, RankPlace
    from anyaccel.inference.opening import OwnCode, choose_runtime, find_accelerator, open_model
    from anyaccel.inference.ranks.backends import describe_weights
    from anyaccel.inference.spec.mapping import Unsupported
    from anyaccel.inference.text.tokenizer import end_tokens
    from anyaccel.topology import read_machine

    check_decoder_only(path)
    if settings.cache_dir and not options.ranks == settings.replicas == 1:
        raise UsageError("--cache-dir: is for a model in one process, without --tp, --pp and --replicas")
    machine = read_machine()
    accelerator = find_accelerator(machine)
    on_cpu = accelerator.is_cpu
    alone = options.ranks == settings.replicas == 1
    if options.runtime in ("torch", "plain") and not alone:
        raise UsageError(f"--runtime {options.runtime}: {NATIVE_RANKS}")
    choose_runtime(options, on_cpu)  # or it is refused before ranks are started
    if not on_cpu and settings.replicas > 1:
        raise UsageError(f"--replicas {settings.replicas}: {ONLY_ALONE}")
    cache_bytes = settings.cache_bytes or (host_memory.available() // 4 if on_cpu else 0)
    options = replace(
        options,
        cache_bytes=cache_bytes // settings.replicas // options.ranks,
        memory=options.memory // settings.replicas,
    )
    if not alone:
        from anyaccel.serve.engine.ranks import RanksDecoder

        return RanksDecoder(path, options, screen, settings, tokenizer, replica)
    screen.line(f"accelerator: {accelerator.description}")
    screen.line(f"topology: {machine.summary()}")
    callbacks = Callbacks(screen.progress, check, screen.line)
    try:
        native = open_model(path, options, RankPlace(on_cpu=on_cpu), callbacks)
    except Unsupported as lack:
        raise UsageError(str(lack)) from None
    if isinstance(native, OwnCode):
        from anyaccel.inference.own_code import own_code_model

        native = own_code_model(path, native, options, callbacks)
    else:
        describe_weights(native, screen)
    spec = native.whole_spec
    ends = with_own_ends(end_tokens(native.generation_config, native.config, path), path, tokenizer)
    context = served_context(native.spec.max_tokens, settings)
    cuts = embedding_cuts(path, spec.hidden)
    facts = ModelFacts(context, spec.vocab, frozenset(ends), spec.hidden, options.dtype, cuts=cuts)
    decoder = LocalDecoder(native, facts, settings.max_batch)
    where = "one process and its accelerator"
    if native.runtime == "native":
        where = f"one process of {native.model.threads} threads"
    elif on_cpu:
        where = "one process"
    plan = plan_line(decoder, where, options, settings)
    decoder.facts = replace(
        decoder.facts,
        plan=plan,
        weight_bytes=native.resident_bytes,
        cache_bytes=native.model.cache_limit_bytes,
    )
    if settings.cache_dir:
        decoder.disk = _open_disk(path, options, settings, native, decoder, screen)
    return decoder


def _open_disk(
    path: Path,
    options: ModelOptions,
    settings: EngineSettings,
    native: NativeModel,
    decoder: LocalDecoder,
    screen: Reporter,
) -> DiskCache | None:
    """The cache on disk, for models whose prefixes are pages of the native runtime and nothing else."""
    lacks = ""
    if native.runtime != "native":
        lacks = "runs outside the native runtime"
    elif decoder.state_pages:
        lacks = "has recurrent states"
    elif not decoder.shares or not settings.prefix_cache:
        lacks = "shares no prefixes"
    if lacks:
        screen.line(f"prefix cache: none on disk, as this model {lacks}")
        return None
    from anyaccel.serve.engine.disk_cache import open_disk_cache

    return open_disk_cache(path, options, settings.cache_dir, settings.cache_disk_bytes, decoder.page_bytes, screen)

# SPDX-License-Identifier: Apache-2.0
"""Loads a model for a command, in this process or on ranks.

A model that the native runtime supports is loaded and run without torch, which takes two seconds to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.ranks.backends import Backend, EngineBackend, NativeBackend
from anyaccel.inference.ranks.beside import Beside
from anyaccel.inference.ranks.options import ModelOptions
from anyaccel.vendors import ENTRY_POINTS, FIRST_AVAILABLE

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel


class Watcher(Protocol):
    """Receives lines and progress while a model loads: a Screen, or its stand-in on a rank."""

    def line(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...


def open_backend(options: ModelOptions, screen: Watcher) -> Backend:
    """Load the model that the options name, in this process, alone or as one of the ranks that a launcher started.

    Raises:
        AnyAccelError: the model or its tokenizer cannot be read, or a package is missing.
    """
    from anyaccel.inference.checkpoints.model_path import check_decoder_only
    from anyaccel.topology import read_machine

    path = Path(options.model)
    check_decoder_only(path)
    machine = read_machine()
    host = host_accelerator(machine) if options.ranks == 1 else None
    executor = executor_of(options, host is not None) if options.ranks == 1 else ""
    if options.draft and executor == "device":
        raise no_drafts(options, "runs on the CPU")
    screen.line(f"accelerator: {host[1] if host else describe_accelerator()}")
    if options.ranks == 1:
        screen.line(f"topology: {machine.summary()}\nplan: one process, not bound")
    if executor:
        from anyaccel.inference.spec.mapping import Unsupported

        try:
            return _open_decoder(options, path, host[0] if host else accelerator_name(), screen, executor)
        except Unsupported as lack:
            if options.draft:
                raise no_drafts(options, f"has no {lack.feature}") from None
            screen.line(instead(options, executor, lack.feature))
    return open_engine(options, path, screen)


def describe_accelerator() -> str:
    """Name of the accelerator and why it was chosen; imports torch."""
    from anyaccel.accelerator import describe_choice
    from anyaccel.accelerator.select import silence_detection

    silence_detection()
    return describe_choice()


def accelerator_name() -> str:
    """Name of the accelerator's device."""
    from anyaccel.accelerator import get_accelerator

    return get_accelerator().device_name()


def executor_of(options: ModelOptions, surely_host: bool) -> str:
    """Which executor of DecoderSpec runs the model: "native" or "device"; "" if an engine has to decide.

    Args:
        surely_host: whether `host_accelerator` has found the host; if not, torch is imported to find out.
    """
    if options.runtime == "device" or (options.runtime == "auto" and not surely_host and not runs_on_host()):
        return "device"
    return "native" if options.runtime in ("auto", "native") and surely_host else ""


def instead(options: ModelOptions, executor: str, feature: str) -> str:
    """The line that is shown before the model's own code runs, as the executor lacks a feature.

    Raises:
        UsageError: no other runtime was allowed.
    """
    if options.runtime == executor:
        raise UsageError(f"--runtime {executor}: it has no {feature}; --runtime auto runs the model's own code")
    packed = " with packed linears" if executor == "native" else ""
    return f"runtime: the model's own code{packed}; the {executor} one has no {feature}"


def host_accelerator(machine: Any) -> tuple[str, str] | None:
    """Name and reason if the accelerator is certainly the host's own processor, found without torch."""
    from anyaccel.launch.plan.devices import ACCELERATORS, find_devices

    found = find_devices(machine, os.environ).accelerator
    asked = os.environ.get("DS_ACCELERATOR", "")
    kind = ACCELERATORS.get(found)
    if kind is None or not kind.is_host or (asked and asked != found) or (not asked and _has_extensions()):
        return None
    return found, f"{found}, {'DS_ACCELERATOR is set' if asked else FIRST_AVAILABLE}"


def _has_extensions() -> bool:
    """Whether an installed package registers an accelerator; importlib.metadata would take 30 ms or more for this."""
    for place in sys.path:
        try:
            names = [
                entry.path for entry in os.scandir(place or ".") if entry.name.endswith((".dist-info", ".egg-info"))
            ]
        except OSError:
            continue
        for name in names:
            try:
                with open(f"{name}/entry_points.txt", "rb") as file:
                    if f"[{ENTRY_POINTS}]".encode() in file.read():
                        return True
            except OSError:
                continue
    return False


def loader(
    options: ModelOptions,
    progress: Callable[[int, int], object],
    rank: int = 0,
    check: Callable[[], object] | None = None,
    on_host: int = 0,
) -> Callable[[], NativeModel]:
    """A function that loads a rank's part through csrc/llm; it raises Unsupported for what the native runtime lacks.

    Args:
        rank: of all ranks, which are numbered stage by stage.
        check, on_host: see `load_native`.

    Raises:
        ModelError: there is no model.
    """
    from anyaccel.inference.checkpoints.model_path import check_decoder_only
    from anyaccel.inference.native.runtime import load_native

    path = Path(options.model)
    check_decoder_only(path)
    cache = options.kv_cache if options.kv_cache != "auto" else "fp32" if options.dtype == "fp32" else "bf16"
    return lambda: load_native(
        path,
        dtype=None if options.dtype == "auto" else options.dtype,
        group=options.group_size,
        rank=rank % options.tp,
        size=options.tp,
        stage=rank // options.tp,
        stages=options.pp,
        on_host=on_host,
        threads=options.threads,
        cache_dtype=cache,
        cache_limit=options.cache_bytes // options.ranks,
        progress=progress,
        beside=options.ranks == 1,  # the ranks of a command end with it, possibly before all is written
        check=check,
    )


def runs_on_host() -> bool:
    """Whether the accelerator is the host's own processor, found with torch, if `host_accelerator` is not certain."""
    import torch

    from anyaccel.accelerator import get_accelerator
    from anyaccel.accelerator.select import silence_detection

    silence_detection()
    return torch.empty(0, device=get_accelerator().device()).is_cpu


def device_loader(
    options: ModelOptions,
    progress: Callable[[int, int], object],
    rank: int = 0,
    check: Callable[[], object] | None = None,
    group: Any = None,
    on_host: int = 1,
) -> Callable[[], NativeModel]:
    """A function that loads a rank's part onto the accelerator; it raises as `loader`'s does.

    Args:
        group, on_host: see `load_device`.
    """
    from anyaccel.accelerator.select import silence_detection
    from anyaccel.inference.device.runtime import load_device

    silence_detection()
    return lambda: load_device(
        Path(options.model),
        dtype=options.dtype,
        group_size=options.group_size,
        cache_dtype=None if options.kv_cache == "auto" else options.kv_cache,
        rank=rank,
        size=options.tp,
        cache_limit=options.cache_bytes // options.ranks,
        progress=progress,
        check=check,
        group=group,
        on_host=on_host,
    )


def _open_decoder(options: ModelOptions, path: Path, accelerator: str, screen: Watcher, executor: str) -> NativeBackend:
    """Load through csrc/llm, or onto the accelerator.

    Raises:
        Unsupported: the executor lacks something that the model needs.
    """
    from anyaccel.inference.text.tokenizer import end_tokens, load_text_tokenizer

    problem: AnyAccelError | None = None
    tokenizer: Any = None
    with Beside() as reading:
        load = loader if executor == "native" else device_loader
        reading.start(load(options, screen.progress, check=reading.check))
        try:
            tokenizer = load_text_tokenizer(path, screen.line)
        except AnyAccelError as error:
            problem = error
        native = reading.result()  # before `problem` is raised, as an error of the weights has priority
    if problem is not None:
        raise problem
    describe_weights(native, screen)
    if options.draft:
        load_draft(options, native, tokenizer, screen)
    ends = end_tokens(native.generation_config, native.config, path)
    if path.is_file():
        ends = sorted({*ends, *tokenizer.end_tokens})
    return NativeBackend(native, tokenizer, ends, accelerator, options.dtype, executor)


def draft_options(options: ModelOptions) -> ModelOptions:
    """The options of the draft model of `options`: in the precision of a GGUF file, else in int4.

    With fewer bits it is faster, and only slightly fewer of its tokens are accepted.
    """
    dtype = "auto" if Path(options.draft).is_file() else "int4"
    return replace(options, model=options.draft, draft="", dtype=dtype, kv_cache="auto", cache_bytes=0)


def load_draft(
    options: ModelOptions,
    native: NativeModel,
    tokenizer: Any,
    screen: Watcher,
    check: Callable[[], object] | None = None,
) -> None:
    """Load the draft model that the options name, for a model in this process alone.

    Args:
        tokenizer: of the model.
        check: see `load_native`.

    Raises:
        AnyAccelError: it cannot be read, or cannot draft.
    """
    from anyaccel.inference.native.draft import (
        TextBridge,
        attach,
        check_draft_path,
        lacks_draft,
        same_tokens,
        say_if_useless,
    )
    from anyaccel.inference.spec.mapping import Unsupported
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    path = Path(options.draft)
    check_draft_path(path)
    other = load_text_tokenizer(path, screen.line)
    try:
        draft = loader(draft_options(options), screen.progress, check=check)()
    except Unsupported as lack:
        raise lacks_draft(options.draft, lack.feature) from None
    if same_tokens(tokenizer, other, min(native.whole_spec.vocab, draft.whole_spec.vocab)):
        attach(native, draft)
    else:
        screen.line(f"drafts: {path.name} has other tokens: they go through the text")
        attach(native, draft, TextBridge(tokenizer, other))
    say_if_useless(native, path.name, screen.line)


def check_same_tokens(options: ModelOptions, tokenizer: Any) -> None:
    """Refuse a draft model with other tokens, as ranks have no tokenizers to go through text.

    Raises:
        UsageError: it has other ones.
        ModelError: its tokenizer cannot be read.
    """
    from anyaccel.inference.native.draft import same_tokens
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    if not same_tokens(tokenizer, load_text_tokenizer(Path(options.draft))):
        raise UsageError(
            f"--draft {options.draft}: its tokens are not those of {options.model}; only one process drafts through "
            "the text: leave out --tp, --pp and --hostfile, or choose a draft model of the same family"
        )


def no_drafts(options: ModelOptions, lack: str) -> UsageError:
    """The error for a draft model beside a model that the native runtime does not run."""
    return UsageError(f"--draft {options.draft}: only the native runtime has drafts, which {lack}")


def describe_weights(native: NativeModel, screen: Watcher) -> None:
    """Show the types of the weights in the file and in memory, if the user has not chosen a dtype."""
    if native.dtype is None:
        found = sorted(native.forms.items())
        runs = [kind if forms == [kind] else f"{kind} as {' or '.join(forms)}" for kind, forms in found]
        where = " on rank 0" if native.ranks > 1 else ""
        screen.line(f"weights: {', '.join(runs)}; {native.model.weight_bytes / 2**20:.0f} MiB{where}")


def open_engine(options: ModelOptions, path: Path, screen: Watcher) -> EngineBackend:
    """Load through init_inference, as one of the ranks or alone."""
    from anyaccel.accelerator.select import silence_detection

    silence_detection()
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise AnyAccelError(f"generating text needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    transformers_logging.set_verbosity_error()
    import logging

    from anyaccel.accelerator import get_accelerator
    from anyaccel.inference import init_inference
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    logging.getLogger("anyaccel.inference.engine").setLevel(logging.ERROR)  # the command shows this itself
    tokenizer = load_text_tokenizer(path, screen.line)
    get_accelerator().reset_peak_memory_stats()  # converting a tokenizer may take more memory than generating
    engine = init_inference(
        path,
        dtype=options.dtype,
        group_size=options.group_size,
        kv_cache=options.kv_cache,
        threads=options.threads,
        tensor_parallel={"tp_size": options.tp},
        pipeline_parallel={"size": options.pp},
        runtime=options.runtime,
        draft=options.draft or None,
        progress=screen.progress,
    )
    return EngineBackend(engine, tokenizer, get_accelerator().device_name(), options.dtype)

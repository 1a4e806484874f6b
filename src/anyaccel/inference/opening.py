# SPDX-License-Identifier: Apache-2.0
"""Opening a model: which runtime computes it, and its draft model. Torch-free for the native runtime on a sure CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.inference.checkpoints.identity import size_of
from anyaccel.inference.native.draft import (
    MTP,
    TextBridge,
    attach,
    borrow,
    check_draft_path,
    find_native,
    same_tokens,
    warn_if_useless,
)
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace, load_native
from anyaccel.inference.options import QUANTISED, ModelOptions
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.vendors import ENTRY_POINTS, FIRST_AVAILABLE

if TYPE_CHECKING:
    from anyaccel.topology.model import Machine


@dataclass(frozen=True)
class OwnCode:
    """The model's own code computes it.

    Attributes:
        runtime: "torch", with packed layers, or "plain", as it is.
        feature: what `lacking`, "native" or "device", has not; empty if that was not asked.
    """

    runtime: str
    feature: str = ""
    lacking: str = ""

    def __str__(self) -> str:
        packed = " with packed linears" if self.runtime == "torch" else ""
        lacking = f"; the {self.lacking} one has no {self.feature}" if self.feature else ""
        return f"runtime: the model's own code{packed}{lacking}"


def open_model(model: Any, options: ModelOptions, place: RankPlace, callbacks: Callbacks) -> NativeModel | OwnCode:
    """Load this rank's part of a model with its draft model, or say that the model's own code has to run.

    Args:
        model: path of a Hugging Face folder or a GGUF file, or a Hugging Face model in memory.

    Raises:
        Unsupported: the runtime that was asked for lacks something that the model needs.
        UsageError: options do not go with each other, with the accelerator or with the model.
        ModelError: the model or its draft model cannot be read.
    """
    runtime = choose_runtime(options, place.on_cpu)
    if runtime != "native":
        _check_memory(model, options, runtime)
    if runtime in ("torch", "plain"):
        return OwnCode(runtime)
    try:
        native = _load(model, options, place, callbacks, runtime)
    except Unsupported as lack:
        if options.runtime == runtime:
            raise Unsupported(lack.feature, runtime, "runtime=auto runs the model's own code") from lack
        if options.pp > 1:
            raise UsageError(f"pp={options.pp}: only the native runtime has it, which has no {lack.feature}") from lack
        if options.draft is not None:
            raise _no_drafts(options, f"has no {lack.feature}") from lack
        if options.lora:
            raise UsageError(
                f"lora={options.lora!r}: the {runtime} runtime has no {lack.feature}; merge the adapter with PEFT"
            ) from lack
        if options.dtype in QUANTISED and not place.on_cpu:
            raise UsageError(
                f"dtype={options.dtype!r} needs the device runtime, which has no {lack.feature}; use bf16"
            ) from lack
        _check_memory(model, options, f"no native: {lack.feature}")
        return OwnCode("torch" if place.on_cpu else "plain", lack.feature, runtime)
    if options.draft is not None:
        _attach_draft(native, model, options, place, callbacks)
    return native


def _check_memory(model: Any, options: ModelOptions, runtime: str) -> None:
    """Refuse a model that does not fit in its memory where experts cannot stay in a file."""
    if not options.memory or not isinstance(model, str | Path):
        return
    size = size_of(Path(model).expanduser())
    if size > options.memory:
        raise UsageError(
            f"memory={options.memory}: the model's files have {size} bytes, and only the native runtime leaves "
            f"experts in a file (runtime: {runtime})"
        )


def choose_runtime(options: ModelOptions, on_cpu: bool) -> str:
    """The runtime to try: "native" or "device", or "torch" or "plain" where they are asked for.

    Raises:
        UsageError: it is not for this accelerator, or has not what the options ask for.
    """
    if not on_cpu and options.runtime in ("native", "torch"):
        raise UsageError(
            f"runtime={options.runtime!r} runs on the host's own processor, and this accelerator is "
            f"{accelerator_name()}; set DS_ACCELERATOR=cpu to use it"
        )
    runtime = options.runtime if options.runtime != "auto" else "native" if on_cpu else "device"
    if runtime != "native" and options.pp > 1:
        raise UsageError(f"pp={options.pp}: only the native runtime has it, which runs on the CPU")
    if runtime != "native" and options.draft is not None:
        raise _no_drafts(options, "runs on the CPU")
    return runtime


def _load(
    model: Any, options: ModelOptions, place: RankPlace, callbacks: Callbacks, runtime: str, **more: int
) -> NativeModel:
    load: Callable[..., NativeModel] = load_native
    if runtime == "device":
        from anyaccel.inference.device.runtime import load_device as load
    if place.connect is None:
        return load(model, options, place, callbacks, **more)
    source = Path(model).expanduser() if isinstance(model, str | Path) else None
    return place.connect(lambda own: load(model, options, place, own, **more), callbacks, source, options.wire_dtype)


def _attach_draft(
    native: NativeModel, model: Any, options: ModelOptions, place: RankPlace, callbacks: Callbacks
) -> None:
    """Load the draft model that the options name, and let it guess for `native`.

    Raises:
        UsageError, ModelError: it cannot be read, or cannot guess for this model.
    """
    bridge = None
    draft: NativeModel | None
    if options.draft == MTP:
        if not isinstance(model, str | Path):
            raise UsageError(f"draft={MTP!r}: only a checkpoint has such a layer, not a model in memory: give its path")
        draft = _draft_head(native, Path(model).expanduser(), options, place, callbacks)
        name = "the layer for multi-token prediction"
    elif not isinstance(options.draft, str | Path):
        draft = find_native(options.draft)
        if draft is None or draft is native:
            raise UsageError(f"draft={type(options.draft).__name__}: must be the path of a model, or a native engine")
        name = "the draft model"
        _check_vocabulary(native, draft)
    else:
        path = Path(options.draft).expanduser()
        is_head = check_draft_path(path)
        name = path.name
        if is_head:
            draft = _draft_head(native, path, options, place, callbacks)
        else:
            draft = _draft_model(path, options, place, callbacks)
        if isinstance(model, str | Path) and not is_head:
            bridge = _bridge(native, Path(model).expanduser(), draft, path)
        else:
            _check_vocabulary(native, draft)
    if bridge is not None and options.ranks > 1:
        raise UsageError(
            f"draft {path}: its tokens are not those of {model}; only one process drafts through the text: use a "
            "single rank, or choose a draft model of the same family"
        )
    if bridge is not None:
        callbacks.line(f"drafts: {name} has other tokens: they go through the text")
    attach(native, draft, bridge)
    warn_if_useless(native, name, callbacks.line)


def _draft_model(path: Path, options: ModelOptions, place: RankPlace, callbacks: Callbacks) -> NativeModel:
    try:
        return _load(path, options.for_draft(), place, callbacks, "native")
    except Unsupported as lack:
        raise UsageError(
            f"draft {path}: the native runtime has no {lack.feature}, and a draft model needs it"
        ) from None


def _draft_head(
    native: NativeModel, path: Path, options: ModelOptions, place: RankPlace, callbacks: Callbacks
) -> NativeModel:
    """A layer that drafts, of the model's checkpoint or of its own."""
    if options.pp > 1:
        raise UsageError(f"draft={str(options.draft)!r} is for one stage, not pp={options.pp}: use tensor_parallel")
    layers = len(native.whole_spec.layers)
    try:
        draft = _load(path, options.for_draft(), place, callbacks, "native", draft_head=layers)
    except Unsupported as lack:
        raise UsageError(
            f"draft={str(options.draft)!r}: the native runtime has no {lack.feature}; draft with another model, "
            "or with ngram"
        ) from None
    borrow(native, draft, path)
    return draft


def _bridge(native: NativeModel, path: Path, draft: NativeModel, draft_path: Path) -> TextBridge | None:
    """A bridge between the tokens of two models; None if they have the same tokens."""
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    own, other = load_text_tokenizer(path), load_text_tokenizer(draft_path)
    count = min(native.whole_spec.vocab, draft.whole_spec.vocab)
    return None if same_tokens(own, other, count) else TextBridge(own, other)


def _check_vocabulary(native: NativeModel, draft: NativeModel) -> None:
    """Refuse a draft model with another vocabulary size; models in memory have no tokenizers to compare."""
    own, other = native.whole_spec.vocab, draft.whole_spec.vocab
    if own != other:
        raise UsageError(f"the draft model has {other} tokens and the model {own}: give paths, which have tokenizers")


def _no_drafts(options: ModelOptions, reason: str) -> UsageError:
    return UsageError(f"draft={str(options.draft)!r}: only the native runtime has drafts, which {reason}")


@dataclass(frozen=True)
class FoundAccelerator:
    """The accelerator that a model will run on.

    Attributes:
        description: its name, and why it was chosen.
        is_cpu: whether it is the host's own processor.
    """

    name: str
    description: str
    is_cpu: bool


def find_accelerator(machine: Machine) -> FoundAccelerator:
    """The accelerator; torch is imported unless it is certainly the host's own processor."""
    from anyaccel.launch.plan.devices import ACCELERATORS, find_devices

    name = find_devices(machine, os.environ).accelerator
    asked = os.environ.get("DS_ACCELERATOR", "")
    kind = ACCELERATORS.get(name)
    if kind is not None and kind.is_host and (asked == name if asked else not _has_extensions()):
        return FoundAccelerator(name, f"{name}, {'DS_ACCELERATOR is set' if asked else FIRST_AVAILABLE}", True)
    from anyaccel.accelerator import describe_choice
    from anyaccel.accelerator.select import silence_detection

    silence_detection()
    return FoundAccelerator(accelerator_name(), describe_choice(), accelerator_is_cpu())


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


def accelerator_is_cpu() -> bool:
    """Whether the accelerator is the host's own processor; imports torch."""
    import torch

    from anyaccel.accelerator import get_accelerator

    return torch.empty(0, device=get_accelerator().device()).is_cpu


def accelerator_name() -> str:
    """Name of the accelerator's device; imports torch."""
    from anyaccel.accelerator import get_accelerator

    return get_accelerator().device_name()

# SPDX-License-Identifier: Apache-2.0
"""The backends of `generate` and `chat` in this process: a native model, or an engine; `command.py` has the third.

A model that the native runtime supports is loaded and run without torch, which takes two seconds to import.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.errors import AnyAccelError
from anyaccel.host_memory import high_water_mark
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace
from anyaccel.inference.opening import OwnCode, find_accelerator, open_model
from anyaccel.inference.ranks.background import BackgroundTask

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from anyaccel import _llm
    from anyaccel.inference.engine import InferenceEngine
    from anyaccel.inference.generate import Generation, SamplingOptions
    from anyaccel.inference.options import ModelOptions


class Reporter(Protocol):
    """Shows lines and progress while a model loads: a command's, or its stand-in on a rank."""

    def line(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...


class Backend(Protocol):
    """A model, in this process or on ranks.

    Attributes:
        runtime: native, device, torch or plain, see ModelOptions.
        first: whether this process shows the text.
        ends: tokens that end a text.
        tokenizer: the tokenizer; None in a rank, whose command has it.
    """

    runtime: str
    first: bool
    accelerator: str
    ends: list[int]
    tokenizer: Any

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together; 0: no limit."""

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: SamplingOptions, result: Generation
    ) -> Generator[int, None, None]:
        """Generate; closing it ends the answer."""

    def clear_cache(self) -> None:
        """Empty the cache."""

    def idle(self) -> AbstractContextManager[object]:
        """A context for the time in which the command waits for the user."""

    def peaks(self) -> list[int]:
        """Peak memory of each rank in bytes."""

    def own_peak(self) -> int:
        """Peak memory of this process in bytes if it is not itself a rank, else 0."""

    def close(self) -> None:
        """End everything that could outlive the command."""


class _InThisProcess:
    """What both backends have in common; `place` is that of this process among those that share the model."""

    def __init__(self, tokenizer: Any, ends: list[int], accelerator: str, place: RankPlace) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        self.accelerator = accelerator
        self.first = place.rank == 0
        self._group = place.group

    def idle(self) -> AbstractContextManager[object]:
        from contextlib import nullcontext

        return nullcontext()

    def peak(self) -> int:
        """Peak memory of this process in bytes, of the accelerator where that has memory of its own."""
        from anyaccel.accelerator import get_accelerator

        return get_accelerator().max_memory_allocated()

    def peaks(self) -> list[int]:
        peaks: list[Any] = [self.peak()]
        if self._group is not None:
            from anyaccel import comm

            own, peaks = peaks[0], [None] * self._group.size()
            comm.all_gather_object(peaks, own, group=self._group)
        return peaks

    def own_peak(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing, as everything ends with the process."""


class NativeBackend(_InThisProcess):
    """A model in this process that takes requests: native, on a device, or on its own code where that allows it."""

    def __init__(self, native: NativeModel, *common: Any) -> None:
        super().__init__(*common)
        self.runtime = native.runtime
        self.native = native
        self._last: _llm.Request | None = None

    @property
    def context(self) -> int:
        return self.native.spec.max_tokens

    @property
    def vocabulary(self) -> int:
        return self.native.whole_spec.vocab

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: SamplingOptions, result: Generation
    ) -> Generator[int, None, None]:
        """Generate; the common prefix of `ids` and the last call's text is still in the cache."""
        from anyaccel import _llm
        from anyaccel.inference.generate import check_prompt, request_steps

        check_prompt(ids, max_new_tokens, self.vocabulary, self.context, getattr(self.tokenizer, "where", ""))
        result.prompt_tokens = len(ids)
        options = sampling.native() | {"max_new_tokens": max_new_tokens, "end_tokens": self.ends}
        # The new request keeps the old one alive until its first step has shared their common prefix.
        self._last = _llm.Request(self.native.model, ids, options, self._last)
        yield from request_steps(self.native, self._last, result)

    def clear_cache(self) -> None:
        if self._last is not None:
            self._last.finish()
            self._last = None

    def peak(self) -> int:
        return super().peak() if self.runtime == "device" else high_water_mark()

    def close(self) -> None:
        """Finish writing packed weights to the cache, unless an error or Ctrl-C ends the command."""
        if self.native.saving is not None:
            self.native.saving.finish(stop=sys.exception() is not None)


class EngineBackend(_InThisProcess):
    """A model that runs its own code, in an InferenceEngine."""

    def __init__(self, engine: InferenceEngine, *common: Any) -> None:
        from anyaccel.inference.generate import sizes_of

        super().__init__(*common)
        self.engine = engine
        self.runtime = engine.runtime
        self.vocabulary, self.context = sizes_of(engine)

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: SamplingOptions, result: Generation
    ) -> Generator[int, None, None]:
        import torch

        from anyaccel.inference import generate_tokens

        yield from generate_tokens(
            self.engine,
            torch.tensor(ids, dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            **{name: value for name, value in vars(sampling).items() if name != "draft_model"},
            result=result,
        )

    def clear_cache(self) -> None:
        """Does nothing, as nothing is kept between calls."""


def open_backend(path: Path, options: ModelOptions, screen: Reporter) -> Backend:
    """Load a model in this process, alone or as one of the ranks that a launcher started.

    Raises:
        AnyAccelError: the model or its tokenizer cannot be read, or a package is missing.
    """
    from anyaccel.inference.checkpoints.model_path import check_decoder_only
    from anyaccel.inference.text.tokenizer import load_text_tokenizer
    from anyaccel.topology import read_machine

    check_decoder_only(path)
    machine = read_machine()
    accelerator = find_accelerator(machine)
    screen.line(f"accelerator: {accelerator.description}")
    if options.ranks == 1:
        screen.line(f"topology: {machine.summary()}\nplan: one process, not bound")
        place = RankPlace(on_cpu=accelerator.is_cpu)
    else:
        from anyaccel.inference.hf.group import group_place

        place = group_place(options, accelerator.is_cpu)
    problem: AnyAccelError | None = None
    tokenizer: Any = None
    with BackgroundTask() as loading:
        callbacks = Callbacks(screen.progress, loading.check, screen.line)
        loading.start(lambda: open_model(path, options, place, callbacks))
        try:
            tokenizer = load_text_tokenizer(path, screen.line)
        except AnyAccelError as error:
            problem = error
        opened = loading.result()  # before `problem` is raised, as an error of the weights has priority
    if problem is not None:
        raise problem
    return make_backend(path, opened, options, place, screen, tokenizer, accelerator.name)


def make_backend(
    path: Path,
    opened: NativeModel | OwnCode,
    options: ModelOptions,
    place: RankPlace,
    screen: Reporter,
    tokenizer: Any,
    accelerator: str,
) -> NativeBackend | EngineBackend:
    """The backend of a model that has been opened; a model's own code is loaded here.

    Args:
        tokenizer: None in a rank, whose command has it.
    """
    from anyaccel.inference.text.tokenizer import end_tokens

    if isinstance(opened, OwnCode):
        if opened.feature:
            screen.line(str(opened))
        engine, ends = _load_own_code(path, opened, options, place, screen)
        from anyaccel.inference.generic.requests import answered_together

        common = tokenizer, ends, accelerator, place
        together = answered_together(engine)
        return EngineBackend(engine, *common) if together is None else NativeBackend(together, *common)
    describe_weights(opened, screen)
    ends = end_tokens(opened.generation_config, opened.config, path, note=place.rank == 0)
    if path.is_file() and tokenizer is not None:
        ends = sorted({*ends, *tokenizer.end_tokens})
    return NativeBackend(opened, tokenizer, ends, accelerator, place)


def _load_own_code(
    path: Path, code: OwnCode, options: ModelOptions, place: RankPlace, screen: Reporter
) -> tuple[InferenceEngine, list[int]]:
    """The engine, and the tokens that end its texts."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise AnyAccelError(f"generating text needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    logging.set_verbosity_error()
    from anyaccel.accelerator import get_accelerator
    from anyaccel.inference.engine import own_code_engine
    from anyaccel.inference.generate import end_tokens_of

    get_accelerator().reset_peak_memory_stats()  # converting a tokenizer may take more memory than generating
    engine = own_code_engine(path, options, place, code, screen.progress)
    return engine, sorted(end_tokens_of(engine))


def describe_weights(native: NativeModel, screen: Reporter) -> None:
    """Show the types of the weights in the file and in memory, as far as they are not what was asked for."""
    floats = ("f32", "f16", "bf16", "f64")
    if native.dtype in ("bf16", "fp16", "fp32") and (expanded := sorted(set(native.forms).difference(floats))):
        stored = " and ".join(expanded)
        screen.line(f"weights: {stored} as {native.dtype}; --dtype auto leaves them as they are, smaller and faster")
    if native.dtype is None:
        forms = sorted(native.forms.items())
        kinds = [kind if own == [kind] else f"{kind} as {' or '.join(own)}" for kind, own in forms]
        where = " on rank 0" if native.ranks > 1 else ""
        screen.line(f"weights: {', '.join(kinds)}; {native.model.weight_bytes / 2**20:.0f} MiB{where}")

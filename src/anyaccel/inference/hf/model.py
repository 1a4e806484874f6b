# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model with the same class and methods, whose decoder runs in csrc/llm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from anyaccel import _llm
from anyaccel.accelerator import get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.hf import native_generate
from anyaccel.inference.hf.cache import NativeCache
from anyaccel.inference.hf.generate_batch import generate_batch
from anyaccel.inference.hf.generate_checks import check_arguments, check_input_ids, check_tokens, check_whole, mask_bits
from anyaccel.inference.hf.precision import PrecisionMethods
from anyaccel.inference.hf.snapshot import Snapshot, free_weights, refuse_state_dict
from anyaccel.inference.modules.adapters import WithoutAdapters
from anyaccel.validation import short_repr

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

_ADVICE = "load the model with runtime='torch' for it"
# Arguments of transformers' loss functions, beside the logits and the labels.
_OF_LOSS = frozenset(("num_items_in_batch", "ignore_index", "shift_labels"))
# Arguments that transformers' loops need themselves (for stop_strings, say), but also pass to every forward.
_OF_GENERATE = frozenset(("tokenizer", "assistant_tokenizer"))


def _refused(what: str) -> Callable[..., NoReturn]:
    """A method that refuses to read or write weights."""

    def refuse(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        refuse_state_dict(what)

    return refuse


class NativeCausalLM(WithoutAdapters, PrecisionMethods):
    """A mixin that `make_native` adds to a model's own class.

    The module keeps its structure and configuration; its parameters have no values, and a `Snapshot` finds edits.
    """

    # Any: transformers evaluates the annotations of its models' classes.
    _native: Any  # NativeModel
    _native_dtype: Any  # torch.dtype
    _native_group: Any  # dist.ProcessGroup | None
    _native_snapshot: Any  # Snapshot

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's forward, with the arguments that a decoder without hooks inside can support.

        Args:
            input_ids: [rows, new tokens].
            attention_mask: [rows, cached columns + new tokens] of 0 and 1; hidden tokens do not enter the cache, so
                padding may be on the left, on the right or between.
            past_key_values: a NativeCache of an earlier call, or an empty cache of any class, which becomes one.

        Returns:
            Logits of hidden positions are 0.

        Raises:
            UsageError: an argument cannot be answered or is not known, tokens are out of the vocabulary, the context
                overflows, or the modules or the configuration were changed.
        """
        if torch.compiler.is_compiling():  # there is nothing to compile here
            return torch.compiler.disable(self.forward)(  # type: ignore[no-untyped-call]
                *(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels),
                *(use_cache, output_attentions, output_hidden_states, logits_to_keep, return_dict),
                **kwargs,
            )
        for name, value in {
            "inputs_embeds": inputs_embeds,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
        }.items():
            if value is not None and value is not False:
                raise UsageError(f"{name}: the native runtime keeps these to itself; {_ADVICE}")
        self._check_unknown_arguments(kwargs)
        if input_ids is None:
            raise UsageError("input_ids of shape [rows, tokens] are needed")
        check_input_ids(input_ids)
        config: Any = self.config  # type: ignore[attr-defined]
        native: NativeModel = self._native
        rows, tokens = input_ids.shape
        cache = NativeCache.adopt(past_key_values, native.model, native.spec.max_tokens)
        if not cache.get_seq_length():
            self._native_snapshot.check()
        cache.begin(rows)
        new_BT = _new_columns(cache, attention_mask, rows, tokens)
        _check_cache_positions(cache, kwargs.pop("cache_position", None), tokens)
        _check_positions(cache, position_ids, new_BT)
        check_tokens(input_ids[new_BT], native.whole_spec.vocab)
        kept = range(tokens) if isinstance(logits_to_keep, int) and not logits_to_keep else None
        columns = list(kept) if kept is not None else torch.arange(tokens)[_columns(logits_to_keep)].tolist()
        logits = self._logits(cache, input_ids, new_BT, columns)
        cache.kept_BT = torch.cat([cache.kept_BT, new_BT], dim=1)
        loss = None
        if labels is not None:
            if getattr(config, "output_router_logits", False):
                raise UsageError(f"labels: the loss of the router is not known to the native runtime; {_ADVICE}")
            labels, kwargs = _mask_labels(labels, kwargs, new_BT)
            loss = self.loss_function(  # type: ignore[attr-defined]
                logits=logits, labels=labels, vocab_size=config.get_text_config().vocab_size, **kwargs
            )
            if torch.is_grad_enabled():
                loss = _WithoutGradients.apply(loss.requires_grad_())  # type: ignore[no-untyped-call]
        if use_cache is None:
            use_cache = getattr(config, "use_cache", True) is not False
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache or past_key_values is not None else None
        )
        return output.to_tuple() if return_dict is False else output

    def _check_unknown_arguments(self, kwargs: dict[str, Any]) -> None:
        """Refuse arguments of the model's own forward that change what it computes, and unknown ones."""
        for name, value in kwargs.items():
            if value is None or name in _OF_LOSS | _OF_GENERATE or name == "cache_position":
                continue
            if (name == "is_causal" and value is True) or (name.startswith("output_") and value is False):
                continue
            if name == "token_type_ids":  # many tokenizers return it, few models use it, and for those 0 may mean text
                kinds = inspect.signature(super().forward).parameters  # type: ignore[misc]
                if name not in kinds or ("mm_encoder_outputs" in kinds and not bool(torch.as_tensor(value).any())):
                    continue
            raise UsageError(
                f"{name}={short_repr(value)}: an argument that the native runtime does not know; leave it out, or "
                f"{_ADVICE}"
            )

    def _logits(
        self, cache: NativeCache, input_ids: torch.Tensor, new_BT: torch.Tensor, columns: Sequence[int]
    ) -> torch.Tensor:
        """Compute the new tokens, and return the logits of `columns`: [rows, columns, vocabulary]."""
        native = self._native
        counts = new_BT.sum(1).tolist()
        limit = native.spec.max_tokens
        for row, (length, count) in enumerate(zip(cache.lengths(), counts, strict=True)):
            if limit and length + count > limit:
                raise UsageError(
                    f"row {row}: {length} cached tokens and {count} new ones exceed the model's context of {limit}"
                )
        # Padding is not computed, so a token's position in the batch differs from its index among the computed tokens;
        # `places` has the indices of those whose logits are wanted.
        place_BT = (new_BT.flatten().cumsum(0) - 1).view_as(new_BT)
        shown_BK = new_BT[:, list(columns)]
        places = place_BT[:, list(columns)][shown_BK]
        wanted = sorted(set(places.tolist()))
        vocabulary = native.whole_spec.vocab
        ids = input_ids.cpu()[new_BT].to(torch.int64).contiguous()
        active = [row for row, count in enumerate(counts) if count]
        try:
            logits = _compute_logits(
                native, [cache.sequences[row] for row in active], [counts[row] for row in active], ids, wanted
            )
        except BaseException:
            cache.crop(0)  # removes the tokens that some sequences have got before the step failed
            raise
        logits = logits.to(self._native_dtype)
        shape = (*shown_BK.shape, vocabulary)
        if len(wanted) == shown_BK.numel() and wanted == places.tolist():
            return logits.view(shape)
        result = torch.zeros(shape, dtype=self._native_dtype, device=logits.device)
        result[shown_BK] = logits[torch.searchsorted(torch.tensor(wanted), places)]
        return result

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's `generate`, in the native loop if it supports all arguments, else in their own loop.

        With tensor parallelism every rank must call it with the same arguments and gets the same tokens.

        Args:
            seed, generator: of the sampling; without them torch's own random state is used (rank 0's).
            tokenizer: needed with stop_strings.

        Raises:
            UsageError: an empty prompt, tokens out of the vocabulary, a context or a cache that overflows; the
                modules or the configuration were changed.
            ModelError: the logits are NaN.
        """
        self._native_snapshot.check()
        own = super().generate  # type: ignore[misc]
        named = inspect.signature(own).bind_partial(*args, **kwargs).arguments
        return native_generate.generate(self, named.pop("kwargs", {}) | named, own)

    @torch.no_grad()
    def generate_batch(
        self,
        inputs: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        max_new_tokens: int | None = None,
        **_of_the_manager: Any,
    ) -> dict[str, Any]:
        """Hugging Face's `generate_batch` on the native loop; settings of its manager and its cache have no effect.

        Args:
            inputs: prompts, each a list of token ids.

        Raises:
            UsageError: as `generate`.
        """
        return generate_batch(
            self, self._native, inputs, generation_config, max_new_tokens, record_timestamps, progress_bar
        )

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UsageError(
            "continuous batching: its manager feeds layers, which the native runtime keeps to itself; use generate or "
            "generate_batch, which batch natively, anyaccel serve, or runtime='plain'"
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_args: Any, **_kwargs: Any
    ) -> None:
        """Use a native cache in Hugging Face's own loops, whatever `cache_implementation` is."""
        native = self._native
        if generation_config.use_cache is False and model_kwargs.get("past_key_values") is None:
            return
        model_kwargs["past_key_values"] = NativeCache.adopt(
            model_kwargs.get("past_key_values"), native.model, native.spec.max_tokens
        )

    # transformers' beam search calls this method if a model's class has it.
    def _reorder_cache(self, past_key_values: NativeCache, beam_idx: torch.Tensor) -> NativeCache:
        past_key_values.reorder_cache(beam_idx)
        return past_key_values

    def _valid_auto_compile_criteria(self, *_args: Any, **_kwargs: Any) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return get_accelerator().device()

    def _device_with_index(self) -> torch.device:
        """The device of the weights with its index, which `device` lacks if there are several devices."""
        model = self._native.model
        return model.executor.device if isinstance(model, _llm.ExternalModel) else self.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._native_dtype  # type: ignore[no-any-return]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        own = self._device_with_index()
        elsewhere = device is not None and torch.device(device.type, device.index or own.index) != own
        if elsewhere or dtype not in (None, self._native_dtype):
            refuse_state_dict(f"to{args}")
        return self

    def train(self, mode: bool = True) -> Any:
        if mode:
            refuse_state_dict("train()")
        return self

    _apply = _refused("a conversion of all weights")
    save_pretrained = _refused("save_pretrained()")
    state_dict = _refused("state_dict()")
    load_state_dict = _refused("load_state_dict()")
    # torch calls this method if load_state_dict() is called on a parent module, such as an engine.
    _load_from_state_dict = load_state_dict
    resize_token_embeddings = _refused("resize_token_embeddings()")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_state_dict("pickle or deepcopy")


class _WithoutGradients(torch.autograd.Function):
    """A loss whose backward() says why there are no gradients."""

    @staticmethod
    def forward(_context: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> NoReturn:
        raise UsageError("backward(): packed weights have no gradients; train with runtime='plain'")


def _mask_labels(
    labels: torch.Tensor, of_loss: dict[str, Any], new_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Labels and arguments of the loss without tokens that follow a hidden position, as nothing has predicted them."""
    if bool(new_BT.all()) or labels.shape != new_BT.shape:
        return labels, of_loss
    ignored, hidden_BT = of_loss.get("ignore_index", -100), ~new_BT.to(labels.device)
    labels = labels.clone()
    labels[:, 1:][hidden_BT[:, :-1]] = ignored
    shifted = of_loss.get("shift_labels")
    if shifted is not None:
        of_loss = of_loss | {"shift_labels": shifted.masked_fill(hidden_BT.to(shifted.device), ignored)}
    return labels, of_loss


def _compute_logits(
    native: NativeModel, sequences: list[int], counts: list[int], ids: torch.Tensor, wanted: list[int]
) -> torch.Tensor:
    """Compute new tokens of sequences; returns logits, float32 [wanted, vocabulary], on the model's device."""
    if isinstance(native.model, _llm.ExternalModel):
        from anyaccel.inference.device.executor import device_logits

        # The caller's autograd would refuse an inference tensor.
        return device_logits(native.model, sequences, counts, ids.tolist(), wanted).clone()
    logits = torch.empty(len(wanted), native.whole_spec.vocab, dtype=torch.float32)
    if sequences:
        native.model.forward(sequences, counts, ids.data_ptr(), logits.data_ptr() if wanted else 0, wanted)
    return logits


@functools.cache
def _native_class(kind: Any) -> type[nn.Module]:
    # The class keeps its name, by which pipelines and generation look up models.
    return type(kind.__name__, (NativeCausalLM, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def untie_head(model: Any, native: NativeModel) -> None:
    """Untie the head of a skeleton if the native decoder has a separate one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not native.whole_spec.tied and head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        for target, origin in list(getattr(model, "all_tied_weights_keys", {}).items()):
            if model.get_parameter(target) is not model.get_parameter(origin):
                del model.all_tied_weights_keys[target]


def make_native(
    module: nn.Module,
    native: NativeModel,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    shapes: Mapping[int, torch.Size] | None = None,
) -> nn.Module:
    """Turn `module` into a NativeCausalLM, which `native` computes, and free the module's own weights.

    Args:
        dtype: the dtype of the logits.
        group: the ranks that share `native`.
        shapes: the shapes of the module's weights before they were packed, by id().
    """
    module.eval()
    for each in module.modules():
        vars(each).pop("_compiled_call_impl", None)  # it would use the freed weights
    module.zero_grad(set_to_none=True)  # gradients are useless without the weights
    free_weights(module, shapes or {})
    module._native_snapshot = Snapshot(module)  # type: ignore[assignment]
    module.__class__ = _native_class(type(module))  # type: ignore[arg-type]
    module._native, module._native_dtype, module._native_group = native, dtype, group  # type: ignore[assignment]
    return module


def _new_columns(cache: NativeCache, mask: torch.Tensor | None, rows: int, tokens: int) -> torch.Tensor:
    """Which of the new tokens are not padding, [rows, tokens].

    Raises:
        UsageError: the mask has a wrong shape, or differs from the cache's in earlier tokens.
    """
    if mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool)
    past = cache.get_seq_length()
    check_arguments({"attention_mask": mask})
    if mask.dim() != 2 or mask.shape[0] not in (1, rows) or mask.shape[1] != past + tokens:
        raise UsageError(
            f"attention_mask of shape {tuple(mask.shape)}: needs [{rows}, {past + tokens}], a 0 or 1 for each of "
            f"{past} cached and {tokens} new tokens"
        )
    bits_BT = mask_bits(mask).expand(rows, -1)
    if not torch.equal(bits_BT[:, :past], cache.kept_BT):
        raise UsageError("attention_mask differs from the earlier one in tokens that are in the cache already")
    return bits_BT[:, past:].contiguous()


def _check_positions(cache: NativeCache, position_ids: torch.Tensor | None, new_BT: torch.Tensor) -> None:
    if position_ids is None:
        return
    check_whole("position_ids", position_ids)
    lengths_B1 = torch.tensor(cache.lengths(), dtype=torch.int64)[:, None]
    natural_BT = lengths_B1 + new_BT.long().cumsum(1) - 1
    given = position_ids.to("cpu", torch.int64)
    fits = given.dim() == 2 and given.shape[1] == new_BT.shape[1] and given.shape[0] in (1, new_BT.shape[0])
    if not fits or bool((given.expand_as(new_BT) != natural_BT)[new_BT].any()):
        raise UsageError(
            "position_ids differ from 0, 1, 2, ... of the tokens that attention_mask shows; "
            f"the native runtime has only those: leave them out, pad prompts on the left, or {_ADVICE}"
        )


def _check_cache_positions(cache: NativeCache, cache_position: torch.Tensor | None, tokens: int) -> None:
    past = cache.get_seq_length()
    if cache_position is not None and cache_position.tolist() != list(range(past, past + tokens)):
        raise UsageError(
            f"cache_position={short_repr(cache_position)}: new tokens follow the cached ones, here from {past} to "
            f"{past + tokens - 1}; leave it out, or {_ADVICE}"
        )


def _columns(logits_to_keep: int | torch.Tensor) -> Any:
    """An index of the columns whose logits are kept."""
    if isinstance(logits_to_keep, int):
        return slice(-logits_to_keep, None)
    if isinstance(logits_to_keep, torch.Tensor):
        return logits_to_keep.cpu()
    raise UsageError(
        f"logits_to_keep={logits_to_keep!r}: must be a whole number (the last so many; 0: all) or a tensor of positions"
    )

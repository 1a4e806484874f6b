# SPDX-License-Identifier: Apache-2.0
"""The native key/value cache as Hugging Face's `Cache`, for their generation loops and users' code."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache

from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel import _llm


class _Sequences:
    """Owns native sequences, given by their numbers, and destroys them when it is garbage-collected."""

    def __init__(self, model: _llm.Model) -> None:
        self.model = model
        self.numbers: list[int] = []
        self._release = weakref.finalize(self, _destroy, model, self.numbers)

    def replace(self, numbers: Sequence[int]) -> None:
        """Own these sequences instead, and destroy the former ones that are not among them."""
        gone = set(self.numbers) - set(numbers)
        self.numbers[:] = numbers
        for number in gone:
            self.model.destroy(number)


def _destroy(model: _llm.Model, numbers: list[int]) -> None:
    for number in numbers:
        model.destroy(number)
    numbers.clear()


class NativeCache(Cache):  # type: ignore[misc]  # transformers is not read (pyproject.toml)
    """The keys and values of a batch, each row of which is a sequence in the native model.

    `get_seq_length` counts columns as Hugging Face does, including padding. The native sequences have only the tokens
    that the attention mask shows, which `kept_BT` records.
    """

    def __init__(self, model: _llm.Model, limit: int = 0) -> None:
        super().__init__(layers=[])
        self._begin(model, limit)

    def _begin(self, model: _llm.Model, limit: int) -> None:
        self.native = _Sequences(model)
        self.limit = limit
        self.kept_BT = torch.ones(0, 0, dtype=torch.bool)
        self._unread_BT: torch.Tensor | None = None

    @classmethod
    def from_tokens(cls, model: _llm.Model, limit: int, ids_BT: torch.Tensor, kept_BT: torch.Tensor) -> NativeCache:
        """A cache of these tokens, which are computed when it is first used, as most returned caches never are.

        Args:
            kept_BT: which of them are not padding.
        """
        made = cls(model, limit)
        made.kept_BT, made._unread_BT = kept_BT.bool(), ids_BT.to(torch.int64)
        return made

    def fill(self) -> None:
        """Compute the tokens given to `from_tokens`, if that was not done yet; a collective call."""
        if self._unread_BT is None:
            return
        ids_BT, self._unread_BT = self._unread_BT, None
        model, counts = self.native.model, self.kept_BT.sum(1).tolist()
        self.native.replace([model.create() for _ in counts])
        active = [row for row, count in enumerate(counts) if count]
        tokens = ids_BT[self.kept_BT].contiguous()
        try:
            model.forward(
                [self.native.numbers[row] for row in active], [counts[row] for row in active], tokens.data_ptr(), 0, []
            )
        except BaseException:
            self.native.replace([])
            self._unread_BT = ids_BT
            raise

    @classmethod
    def adopt(cls, cache: Any, model: _llm.Model, limit: int) -> NativeCache:
        """`cache` itself if it is a native one of `model`; an empty cache of another class is converted in place.

        It is converted in place because callers keep using the object that they have passed.

        Raises:
            UsageError: it has tokens of another model.
        """
        if cache is None:
            return cls(model, limit)
        if isinstance(cache, cls):
            if cache.native.model is not model:
                raise UsageError("past_key_values belong to another model")
            return cache
        if not isinstance(cache, Cache):
            raise UsageError(f"past_key_values must be a transformers Cache, not {type(cache).__name__}")
        if _has_tokens(cache):
            raise UsageError(
                f"past_key_values is a {type(cache).__name__} with tokens of another model: start with an empty one"
            )
        cache.__class__ = cls
        adopted: Any = cache
        adopted.layers = []
        adopted._begin(model, limit)
        return adopted  # type: ignore[no-any-return]

    @property
    def sequences(self) -> list[int]:
        """The native sequence of each row."""
        self.fill()
        return self.native.numbers

    def begin(self, rows: int) -> None:
        """Create the rows of a batch if the cache has none yet.

        Raises:
            UsageError: it has another number of rows.
        """
        if not self.sequences:
            self.native.replace([self.native.model.create() for _ in range(rows)])
            self.kept_BT = torch.ones(rows, 0, dtype=torch.bool)
        elif len(self.sequences) != rows:
            raise UsageError(f"past_key_values have {len(self.sequences)} rows, input_ids {rows}")

    def lengths(self) -> list[int]:
        """Tokens in each native sequence."""
        return [self.native.model.length(number) for number in self.sequences]

    # Hugging Face's interface -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"NativeCache(rows={len(self.kept_BT)}, columns={self.get_seq_length()})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.kept_BT.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.limit or -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    @property
    def batch_size(self) -> int:
        return len(self.kept_BT) or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return len(self.kept_BT) > 0

    @property
    def is_croppable(self) -> bool:
        return self.native.model.cache_bytes_per_state() == 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def update(self, *_args: Any, **_kwargs: Any) -> Any:
        raise UsageError("the native runtime writes its cache itself: NativeCache.update cannot be called")

    def reset(self) -> None:
        self._unread_BT = None
        self.native.replace([])
        self.kept_BT = torch.ones(0, 0, dtype=torch.bool)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -n columns, or, with a positive number as in older transformers, all but the first n."""
        columns = self.get_seq_length()
        left = columns + tokens_to_remove if tokens_to_remove <= 0 else min(columns, tokens_to_remove)
        if not 0 <= left <= columns:
            raise UsageError(f"crop({tokens_to_remove}): the cache has {columns} columns")
        sequences = self.sequences
        self.kept_BT = self.kept_BT[:, :left]
        for number, length in zip(sequences, self.kept_BT.sum(1).tolist(), strict=True):
            self.native.model.truncate(number, length)

    def _select(self, rows: list[int]) -> None:
        """Replace row i by row rows[i]; a sequence that is selected several times is forked."""
        model, old = self.native.model, list(self.sequences)
        taken: set[int] = set()
        new = []
        try:
            for row in rows:
                if row in taken:
                    new.append(model.fork(old[row], model.length(old[row])))
                else:
                    taken.add(row)
                    new.append(old[row])
        except BaseException:
            for number in set(new) - set(old):
                model.destroy(number)
            raise
        self.native.replace(new)
        self.kept_BT = self.kept_BT[torch.tensor(rows, dtype=torch.long)]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(len(self.sequences))[indices.cpu()]  # transformers gives row numbers, or a mask of rows
        self._select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Does nothing, as every token stays in the cache until it is cropped."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeCache:
        """A cache of its own that shares the tokens so far: a prompt that several answers start from."""
        twin = NativeCache(self.native.model, self.limit)
        twin.native.replace([self.native.model.fork(n, self.native.model.length(n)) for n in self.sequences])
        twin.kept_BT = self.kept_BT.clone()
        memo[id(self)] = twin
        return twin

    __copy__ = None

    def __reduce__(self) -> Any:
        raise UsageError("a NativeCache cannot be pickled: its tokens are in the native model's memory")


def _has_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # transformers raises it for a cache of recurrent layers only, which have no length
        return False

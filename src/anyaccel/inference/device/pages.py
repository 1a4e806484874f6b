# SPDX-License-Identifier: Apache-2.0
"""What is remembered of sequences: keys and values in pages of 64 tokens, and a recurrent state beside them.

Both are entries of static tensors, written in place, which sequences share by their numbers until one writes to them.
Entry 0 belongs to nobody: the first row of page 0 stays zero (a key that scores 0, for sinks), and its last one, like
state 0, takes what is written for places of a graph's batch that have no sequence.

A signal may end a call between any two lines. What sequences say of themselves holds then; the rest is made of that by
the next call that changes something.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.spec.decoder import PAGE as PAGE

WASTE_ROW = PAGE - 1
_MEBIBYTE = 1 << 20
_LEAST_PAGE_BYTES = 1024  # of a model without attention, whose tokens take nothing


@dataclass
class _Sequence:
    length: int = 0
    pages: list[int] = field(default_factory=list)
    state: int = 0  # 0: that of no tokens


class _Pool:
    """Entries of some tensors, [entries, ...] each, and how many sequences have each of them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.count = 1
        self.references: dict[int, int] = {}
        self.free: list[int] = []  # heap of entries; those that are in references are stale

    def grow(self, count: int) -> None:
        for index, tensor in enumerate(self.tensors):  # one tensor at a time is there twice
            grown = tensor.new_zeros(count, *tensor.shape[1:])
            grown[: self.count].copy_(tensor)
            self.tensors[index] = grown
        for entry in range(self.count, count):
            heapq.heappush(self.free, entry)
        self.count = count

    def repair(self, used: Iterable[int]) -> None:
        """Who has what, and how many there are, by the entries that sequences have and by the tensors."""
        self.count = min((len(tensor) for tensor in self.tensors), default=self.count)
        self.tensors = [tensor[: self.count] for tensor in self.tensors]
        self.references = {}
        self.share(used)
        self.free = [entry for entry in range(1, self.count) if entry not in self.references]

    def take(self, liked: int = 0) -> int:
        """A free entry: `liked`, if it can be."""
        entry = liked
        if not 0 < liked < self.count or liked in self.references:
            entry = heapq.heappop(self.free)
            while entry in self.references:
                entry = heapq.heappop(self.free)
        self.references[entry] = 1
        return entry

    def copied(self, entry: int) -> int:
        """A new entry with the same values; of 0, zeros."""
        own = self.take()
        for tensor in self.tensors:
            if entry:
                tensor[own].copy_(tensor[entry])
            else:
                tensor[own].zero_()
        return own

    def share(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self.references[entry] = self.references.get(entry, 0) + 1

    def release(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self.references[entry] -= 1
            if self.references[entry] == 0:
                del self.references[entry]
                heapq.heappush(self.free, entry)
        if len(self.free) > 2 * self.count:
            self.free = [entry for entry in range(1, self.count) if entry not in self.references]


class KvPages:
    """The cache of one model.

    Args:
        widths: values of a token's row in each layer: the keys of all heads, then the values.
        limit_bytes: `reserve` fails rather than use more.
        least: of other ranks whose caches have the same pages, the smallest number that any of them gives.
        state_floats: of a sequence's recurrent state; 0: the model has none.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        limit_bytes: int,
        least: Callable[[int], int] | None = None,
        state_floats: int = 0,
    ) -> None:
        self.page_bytes = PAGE * sum(widths) * dtype.itemsize or _LEAST_PAGE_BYTES
        self.limit_bytes = limit_bytes
        self._least = least
        self.version = 0  # changes when the tensors are others, which captured graphs must know
        self._sequences: dict[int, _Sequence] = {}
        self._changing = False
        self._pages = _Pool([torch.zeros(1, PAGE, width, dtype=dtype, device=device) for width in widths])
        self._states = _Pool([torch.zeros(1, state_floats, device=device)] if state_floats else [])
        self._state_pages = -(-4 * state_floats // self.page_bytes)  # as how many a state counts

    @property
    def layers(self) -> list[torch.Tensor]:
        """[pages, PAGE, width] of each layer."""
        return self._pages.tensors

    @property
    def states(self) -> torch.Tensor:
        """[states, floats], of a model that has them."""
        return self._states.tensors[0]

    # Sequences ------------------------------------------------------------------------------------------------

    def change(self, sequence: int, of: int, length: int) -> None:
        """A sequence is new (`of` -1) or has the first tokens of another, forgets its own (`of` itself), or is gone
        (`length` -1). Of another with a state, it has all tokens. May be said twice."""
        if length < 0:
            if sequence in self._sequences:
                with self._change():
                    self._release(self._sequences.pop(sequence))
        elif of == sequence:
            self._truncate(self._sequences[sequence], length)
        else:
            with self._change():
                before = self._sequences.get(sequence, _Sequence())
                self._sequences[sequence] = made = _Sequence()
                if of >= 0:
                    other = self._sequences[of]
                    made.length, made.pages, made.state = length, other.pages[: _pages_of(length)], other.state
                self._pages.share(made.pages)
                self._states.share(_numbers(made.state))
                self._release(before)

    def pages(self, sequence: int) -> list[int]:
        """The pages that have its tokens, in their order."""
        return self._sequences[sequence].pages

    def state(self, sequence: int) -> int:
        return self._sequences[sequence].state

    def _truncate(self, of: _Sequence, tokens: int) -> None:
        if tokens >= of.length:
            return
        with self._change():
            before = _Sequence(0, of.pages[_pages_of(tokens) :], of.state)
            of.length, of.state = tokens, 0
            del of.pages[_pages_of(tokens) :]
            self._release(before)

    # Memory ---------------------------------------------------------------------------------------------------

    @property
    def _used(self) -> int:
        """Pages, and those that states count as."""
        return len(self._pages.references) + len(self._states.references) * self._state_pages

    @property
    def used_bytes(self) -> int:
        return self._used * self.page_bytes

    @property
    def reserved_bytes(self) -> int:
        return sum(tensor.nbytes for pool in (self._pages, self._states) for tensor in pool.tensors)

    def check_room(self, pages: int) -> None:
        """Raise ModelError when that many more do not fit."""
        needed = pages * self.page_bytes
        left = max(self.limit_bytes - self.used_bytes, 0)
        if needed > left:
            raise ModelError(
                f"the key/value cache needs {_megabytes(needed)} more and has {_megabytes(left)} left of its limit of "
                f"{_megabytes(self.limit_bytes)}"
            )

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Have room for more tokens of sequences, so that the tensors stay where they are while it is taken.

        Raises:
            ModelError: see `check_room`; or the device has no memory.
        """
        if self._changing:
            self._repair()
        pages = states = 0
        for sequence, tokens in wanted:
            of = self._sequences[sequence]
            pages += _pages_of(of.length + tokens) - len(of.pages) + self._copies(of, tokens)
            states += self._wants_state(of, tokens)
        self.check_room(pages + states * self._state_pages)
        self._have(self._pages, pages, 1)
        self._have(self._states, states, self._state_pages)

    def _have(self, pool: _Pool, more: int, each: int) -> None:
        """Have that many more entries, each of which counts as `each` pages."""
        have, needed = pool.count, 1 + len(pool.references) + more
        if needed <= have:
            return
        most = 1 + self.limit_bytes // (self.page_bytes * each)
        problem: RuntimeError | None = None
        self._changing = True
        self.version += 1  # also when it fails: some of the tensors are others then
        try:
            pool.grow(min(max(needed, have + have // 2), most))
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            problem = error
        # All ranks grow in the same step, and go on with as many entries.
        elsewhere = self._least is not None and self._least(problem is None) == 0
        if problem is not None or elsewhere:
            pool.tensors = [tensor[:have] for tensor in pool.tensors]
            where = "the device" if problem is not None else "the device of another rank"
            raise ModelError(
                f"{where} has no memory for {_megabytes(more * each * self.page_bytes)} of cache"
            ) from problem
        self._changing = False

    def agree(self) -> None:
        """Have as many pages at most as any other rank may have."""
        if self._least is not None:
            self.limit_bytes = self._least(self.limit_bytes // self.page_bytes) * self.page_bytes
            self._state_pages = -self._least(-self._state_pages)

    def extend(self, sequence: int, tokens: int) -> None:
        """Give a sequence room for more tokens; what others have too becomes its own first."""
        of = self._sequences[sequence]
        with self._change():
            if self._copies(of, tokens):
                shared, of.pages[-1] = of.pages[-1], self._pages.copied(of.pages[-1])
                self._pages.release([shared])
            while len(of.pages) < _pages_of(of.length + tokens):
                of.pages.append(self._pages.take(of.pages[-1] + 1 if of.pages else 0))
            if self._wants_state(of, tokens):
                before, of.state = of.state, self._states.copied(of.state)
                self._states.release(_numbers(before))
            of.length += tokens

    def clear(self, sequence: int) -> None:
        """Set what is in its own pages to zero: a value that is no number would reach whoever has the page next."""
        for page in self._sequences[sequence].pages:
            if self._pages.references[page] == 1:
                for layer in self.layers:
                    layer[page].zero_()

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._changing:
            self._repair()
        self._changing = True
        yield
        self._changing = False

    def _repair(self) -> None:
        """Make the pools what the sequences and the tensors say."""
        for of in self._sequences.values():
            del of.pages[_pages_of(of.length) :]
        self.version += 1
        self._pages.repair(page for of in self._sequences.values() for page in of.pages)
        self._states.repair(of.state for of in self._sequences.values() if of.state)
        self._changing = False

    def _copies(self, of: _Sequence, tokens: int) -> bool:
        return tokens > 0 and of.length % PAGE != 0 and self._pages.references[of.pages[-1]] > 1

    def _wants_state(self, of: _Sequence, tokens: int) -> bool:
        has_states = bool(self._states.tensors)
        return has_states and tokens > 0 and (of.state == 0 or self._states.references[of.state] > 1)

    def _release(self, of: _Sequence) -> None:
        """What a sequence had."""
        self._pages.release(of.pages)
        self._states.release(_numbers(of.state))


def _numbers(state: int) -> list[int]:
    return [state] if state else []


def _pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def _megabytes(count: int) -> str:
    return f"{-(-count // _MEBIBYTE)} MiB" if count >= _MEBIBYTE else f"{count} bytes"

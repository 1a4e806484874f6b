# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all sequences: pages of 64 tokens in one static tensor a layer, written in place.

Page 0 belongs to nobody: its first row stays zero (a key that scores 0, for sinks), its last takes what is written for
places of a graph's batch that have no sequence.

A signal may end a call between any two lines. What sequences say of themselves holds then; the rest is made of that by
the next call that changes something.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from anyaccel.errors import ModelError
from anyaccel.inference.spec.decoder import PAGE as PAGE

WASTE_ROW = PAGE - 1
_MEBIBYTE = 1 << 20


@dataclass
class _Sequence:
    length: int = 0
    pages: list[int] = field(default_factory=list)


class KvPages:
    """The cache of one model.

    Args:
        widths: values of a token's row in each layer: the keys of all heads, then the values.
        limit_bytes: `reserve` fails rather than use more.
        least: of other ranks whose caches have the same pages, the smallest number that any of them gives.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        limit_bytes: int,
        least: Callable[[int], int] | None = None,
    ) -> None:
        self.page_bytes = PAGE * sum(widths) * dtype.itemsize
        self.limit_bytes = limit_bytes
        self._least = least
        self.version = 0  # changes when the tensors are others, which captured graphs must know
        self._sequences: dict[int, _Sequence] = {}
        self._references: dict[int, int] = {}
        self._free: list[int] = []  # heap of pages; those that are in _references are stale entries
        self._changing = False
        self.layers = [torch.zeros(1, PAGE, width, dtype=dtype, device=device) for width in widths]

    # Sequences ------------------------------------------------------------------------------------------------

    def change(self, sequence: int, of: int, length: int) -> None:
        """A sequence is new (`of` -1), a fork of another, as long as that, or gone (`length` -1). May be said twice."""
        if length < 0:
            if sequence in self._sequences:
                with self._change():
                    self._release(self._sequences.pop(sequence).pages)
        elif sequence in self._sequences:
            self._truncate(self._sequences[sequence], length)
        elif of < 0:
            self._sequences[sequence] = _Sequence()
        else:
            with self._change():  # pages are shared until one of the two writes to them
                pages = self._sequences[of].pages[: _pages_of(length)]
                self._sequences[sequence] = _Sequence(length, list(pages))
                for page in pages:
                    self._references[page] += 1

    def pages(self, sequence: int) -> list[int]:
        """The pages that have its tokens, in their order."""
        return self._sequences[sequence].pages

    def _truncate(self, of: _Sequence, tokens: int) -> None:
        with self._change():
            of.length = min(of.length, tokens)
            kept = _pages_of(of.length)
            self._release(of.pages[kept:])
            del of.pages[kept:]

    # Pages ----------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return len(self._references) * self.page_bytes

    @property
    def reserved_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def wanted(self, sequence: int, tokens: int) -> int:
        """How many new pages that many more tokens need."""
        of = self._sequences[sequence]
        return _pages_of(of.length + tokens) - len(of.pages) + (1 if self._copies(of, tokens) else 0)

    def check_room(self, pages: int) -> None:
        """Raise ModelError when that many more do not fit."""
        needed = pages * self.page_bytes
        left = max(self.limit_bytes - self.used_bytes, 0)
        if needed > left:
            raise ModelError(
                f"the key/value cache needs {_megabytes(needed)} more and has {_megabytes(left)} left of its limit of "
                f"{_megabytes(self.limit_bytes)}"
            )

    def reserve(self, pages: int) -> None:
        """Have room for that many more pages, so that the tensors stay where they are while they are taken.

        Raises:
            ModelError: see `check_room`; or the device has no memory.
        """
        if self._changing:
            self._repair()
        self.check_room(pages)
        have = self.layers[0].shape[0] if self.layers else 1
        needed = 1 + len(self._references) + pages
        if needed <= have:
            return
        most = 1 + self.limit_bytes // max(self.page_bytes, 1)
        count = min(max(needed, have + have // 2), most)
        problem: RuntimeError | None = None
        self._changing = True
        self.version += 1  # also when it fails: some of the tensors are others then
        try:
            for index, layer in enumerate(self.layers):  # one layer at a time is there twice
                grown = layer.new_zeros(count, *layer.shape[1:])
                grown[:have].copy_(layer)
                self.layers[index] = grown
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            problem = error
        # All ranks grow in the same step, and go on with as many pages.
        elsewhere = self._least is not None and self._least(problem is None) == 0
        if problem is not None or elsewhere:
            self.layers = [layer[:have] for layer in self.layers]
            where = "the device" if problem is not None else "the device of another rank"
            raise ModelError(f"{where} has no memory for {_megabytes(pages * self.page_bytes)} of cache") from problem
        for page in range(have, count):
            heapq.heappush(self._free, page)
        self._changing = False

    def agree(self) -> None:
        """Have as many pages at most as any other rank may have."""
        if self._least is not None and self.page_bytes:
            self.limit_bytes = self._least(self.limit_bytes // self.page_bytes) * self.page_bytes

    def extend(self, sequence: int, tokens: int) -> None:
        """Give a sequence room for more tokens; a page that others have too becomes its own first."""
        of = self._sequences[sequence]
        with self._change():
            if self._copies(of, tokens):
                shared, own = of.pages[-1], self._take(0)
                for layer in self.layers:
                    layer[own].copy_(layer[shared])
                of.pages[-1] = own
                self._release([shared])
            while len(of.pages) < _pages_of(of.length + tokens):
                of.pages.append(self._take(of.pages[-1] + 1 if of.pages else 0))
            of.length += tokens

    def clear(self, sequence: int) -> None:
        """Set what is in its own pages to zero: a value that is no number would reach whoever has the page next."""
        for page in self._sequences[sequence].pages:
            if self._references[page] == 1:
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
        """Who has which pages, and how many there are, by the sequences and the tensors."""
        references: dict[int, int] = {}
        for of in self._sequences.values():
            del of.pages[_pages_of(of.length) :]
            for page in of.pages:
                references[page] = references.get(page, 0) + 1
        have = min((len(layer) for layer in self.layers), default=1)
        self.layers = [layer[:have] for layer in self.layers]
        self.version += 1
        self._references = references
        self._free = [page for page in range(1, have) if page not in references]
        self._changing = False

    def _copies(self, of: _Sequence, tokens: int) -> bool:
        return tokens > 0 and of.length % PAGE != 0 and self._references[of.pages[-1]] > 1

    def _take(self, liked: int) -> int:
        """A free page: `liked`, which follows the sequence's last one, if it can be."""
        have = self.layers[0].shape[0]
        page = liked
        if not 0 < liked < have or liked in self._references:
            page = heapq.heappop(self._free)
            while page in self._references:
                page = heapq.heappop(self._free)
        self._references[page] = 1
        return page

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                heapq.heappush(self._free, page)
        if self.layers and len(self._free) > 2 * self.layers[0].shape[0]:
            self._free = [page for page in range(1, self.layers[0].shape[0]) if page not in self._references]


def _pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def _megabytes(count: int) -> str:
    return f"{-(-count // _MEBIBYTE)} MiB" if count >= _MEBIBYTE else f"{count} bytes"

# SPDX-License-Identifier: Apache-2.0
"""How heads and features are divided among ranks. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.errors import UsageError

# Features are divided in the largest of these units that fits: a vector register or a tile row is not cut.
_UNITS = (64, 32, 16, 8, 1)


@dataclass(frozen=True)
class HeadShard:
    """The query heads and key/value heads of one rank; each query head's KV head is among them."""

    query: range
    key_value: range


def split_evenly(total: int, parts: int) -> list[range]:
    """Divide 0..total-1 into consecutive ranges whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(total, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def split_features(total: int, parts: int) -> list[range]:
    """Divide the hidden features of an MLP, in units of up to 64 so that kernels see aligned sizes.

    Raises:
        UsageError: there are fewer features than ranks.
    """
    if total < parts:
        raise UsageError(f"tensor_parallel tp_size={parts}: the MLP has only {total} features; use a smaller tp_size")
    unit = next(unit for unit in _UNITS if total % unit == 0 and total // unit >= parts)
    return [range(part.start * unit, part.stop * unit) for part in split_evenly(total // unit, parts)]


def split_heads(heads: int, kv_heads: int, parts: int) -> list[HeadShard]:
    """Divide attention heads along their KV groups.

    Up to one rank a KV head, ranks get whole groups: 9 heads with 3 KV heads on 2 ranks are 6 with 2, and 3 with 1.
    With more ranks than KV heads several ranks share a KV head, each with a copy of it and a part of its group.

    Args:
        heads: query heads, a multiple of `kv_heads`.
        kv_heads: key/value heads.
        parts: ranks.

    Raises:
        UsageError: there are more ranks than query heads, or the heads do not form whole groups.
    """
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads are not a multiple of {kv_heads} key/value heads")
    if parts > heads:
        raise UsageError(f"tensor_parallel tp_size={parts}: the model has only {heads} attention heads")
    group = heads // kv_heads
    if parts <= kv_heads:
        return [HeadShard(range(kv.start * group, kv.stop * group), kv) for kv in split_evenly(kv_heads, parts)]
    shards = []
    for kv_head, ranks in enumerate(split_evenly(parts, kv_heads)):
        for part in split_evenly(group, len(ranks)):
            first = kv_head * group
            shards.append(HeadShard(range(first + part.start, first + part.stop), range(kv_head, kv_head + 1)))
    return shards

# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: which matrices get more bits, by what rounding each does to the output of its block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from anyaccel.errors import UsageError
from anyaccel.inference.calibration.blocks import Block, Blocks
from anyaccel.inference.calibration.compensation import nearest
from anyaccel.inference.calibration.grids import Grid
from anyaccel.inference.calibration.layers import watched

_WINDOWS = 4  # of the text: what rounding does needs fewer than what it is made up with
_ROWS = 256  # of a matrix, by which its grids are compared

# Matrices with the same inputs, which have one grid: native code keeps them as one.
Set = tuple[str, ...]


def mixed(blocks: Blocks, menus: Mapping[str, Sequence[Grid]], bits: float) -> dict[str, Grid]:
    """A grid for each matrix, `bits` a weight on average at most, by measured damage.

    Args:
        menus: the grids that each matrix can have, the smallest first.

    Raises:
        UsageError: no grids are that small.
    """
    damage: dict[Set, list[float]] = {}
    sizes: dict[Set, int] = {}
    hidden = [each.clone() for each in blocks.hidden[:_WINDOWS]]
    for block in blocks:
        sets, squares, outputs = _observed(block, hidden)
        for names, moments in zip(sets, squares, strict=True):
            taken = tuple(name for name in names if name in menus)
            if taken:
                damage[taken] = _damage(block, taken, menus[taken[0]], moments, hidden, outputs)
                sizes[taken] = sum(block.linears[name].weight.numel() for name in taken)
        hidden = outputs
    chosen = spent(damage, {names: [grid.bits for grid in menus[names[0]]] for names in damage}, sizes, bits)
    return {name: menus[name][number] for names, number in chosen.items() for name in names}


def _observed(block: Block, hidden: list[Tensor]) -> tuple[list[list[str]], list[Tensor], list[Tensor]]:
    watch = watched(block, hidden)
    return watch.sets, [each.diagonal().clone() for each in watch.squares], [block.run(each) for each in hidden]


def _damage(
    block: Block, names: Set, menu: Sequence[Grid], moments: Tensor, hidden: list[Tensor], outputs: list[Tensor]
) -> list[float]:
    """What each grid does to the block's output: measured for the first, the others by their errors.

    Relative to the output, token by token: what comes next normalises each by itself, and the first tokens of a text
    can be a thousand times larger than all others.
    """
    kept = {name: block.linears[name].weight.data for name in names}
    errors = [0.0] * len(menu)
    for name, weight in kept.items():
        some = weight[:: max(len(weight) // _ROWS, 1)]
        for number, grid in enumerate(menu):
            off = nearest(some, grid, moments).values() - some
            errors[number] += float((off.square() * moments).sum()) * len(weight) / len(some)
        block.linears[name].weight.data = nearest(weight, menu[0], moments).values()
    changed = 0.0
    for given, wanted in zip(hidden, outputs, strict=True):
        off = (block.run(given) - wanted).square().sum(-1)
        changed += float((off / wanted.square().sum(-1).clamp(min=1e-30)).double().mean()) / len(hidden)
    for name, weight in kept.items():
        block.linears[name].weight.data = weight
    return [changed * error / max(errors[0], 1e-30) for error in errors]


def spent(
    damage: Mapping[Set, Sequence[float]], bits: Mapping[Set, Sequence[float]], sizes: Mapping[Set, int], target: float
) -> dict[Set, int]:
    """Which entry each set takes: bits go, step by step, to where one spares most damage."""
    chosen = dict.fromkeys(damage, 0)
    total = sum(sizes.values())
    left = target * total - sum(bits[names][0] * sizes[names] for names in damage)
    if left < -1e-6 * total:
        least = sum(bits[names][0] * sizes[names] for names in damage) / total
        raise UsageError(f"--bits {target:g}: the smallest there is has {least:.2f} bits a weight")
    while True:
        best: tuple[float, Set, int, float] | None = None
        for names, number in chosen.items():
            for other in range(number + 1, len(damage[names])):
                cost = (bits[names][other] - bits[names][number]) * sizes[names]
                gain = (damage[names][number] - damage[names][other]) / cost
                if cost <= left and gain > 0 and (best is None or gain > best[0]):
                    best = gain, names, other, cost
        if best is None:
            return chosen
        _, names, number, cost = best
        chosen[names] = number
        left -= cost

# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: which matrices get more bits, by what rounding each does to the output of its block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyaccel.errors import UsageError
from anyaccel.inference.calibration.blocks import Block, Blocks
from anyaccel.inference.calibration.compensation import Inputs, compensated, nearest
from anyaccel.inference.calibration.grids import Grid
from anyaccel.inference.calibration.layers import watched

_WINDOWS = 4  # of the text: what rounding does needs fewer than what it is made up with
_ROWS = 256  # of a matrix, by which its grids are compared

_SPARED = 0.6  # of the damage of rounding a block's matrix by itself, what is left when errors are made up for


@dataclass(frozen=True)
class Outside:
    """The names of embedding and head (the same for a tied one), and the weights that each of them has."""

    embedding: str
    head: str
    weights: int


# Matrices with the same inputs, which have one grid: native code keeps them as one.
Set = tuple[str, ...]


def mixed(
    blocks: Blocks,
    menus: Mapping[str, Sequence[Grid]],
    bits: float,
    outside: Outside | None,
    squares: dict[str, Tensor],
) -> dict[str, Grid]:
    """A grid for each matrix, `bits` a weight on average at most, by measured damage.

    Args:
        menus: the grids that each matrix can have, the smallest first.
        outside: embedding and head, whose grids are chosen too; one that has a single grid is not counted in `bits`.
        squares: takes what errors of the columns of these two count with each other, see `damages`.

    Raises:
        UsageError: no grids are that small.
    """
    least = least_bits(menus, blocks.linears(), outside)
    if bits < least - 1e-6:
        raise UsageError(f"--bits {bits:g}: the smallest there is has {math.ceil(least * 100) / 100:.2f} bits a weight")
    damage, sizes = damages(blocks, menus, outside, squares)
    for names, each in damage.items():
        if names[0] not in squares:
            damage[names] = [_SPARED * value for value in each]
    settled = {names for names in damage if names[0] in squares and len(menus[names[0]]) == 1}
    damage = {names: each for names, each in damage.items() if names not in settled}
    chosen = spent(damage, {names: [grid.bits for grid in menus[names[0]]] for names in damage}, sizes, bits)
    chosen |= dict.fromkeys(settled, 0)
    return {name: menus[name][number] for names, number in chosen.items() for name in names}


def least_bits(menus: Mapping[str, Sequence[Grid]], weights: Mapping[str, int], outside: Outside | None) -> float:
    """Bits a weight when each matrix has its smallest grid; `weights` of each matrix of the blocks."""
    sizes = {name: weights[name] for name in menus if name in weights}
    if outside is not None:
        counted = (name for name in (outside.embedding, outside.head) if len(menus[name]) > 1)
        sizes |= dict.fromkeys(counted, outside.weights)
    return sum(menus[name][0].bits * size for name, size in sizes.items()) / sum(sizes.values())


def damages(
    blocks: Blocks,
    menus: Mapping[str, Sequence[Grid]],
    outside: Outside | None,
    squares: dict[str, Tensor],
) -> tuple[dict[Set, list[float]], dict[Set, int]]:
    """What each grid of each set does to the next token, in nats, and how many weights the set has.

    Once through the blocks forwards, and once backwards with the derivative by the hidden states.

    Args:
        squares: takes matrices [cols, cols] of head and embedding. With such an S, errors e of a row do e S e^T / 2
            nats of harm each time that its token is predicted or read; for a tied embedding the two are added.
    """
    damage: dict[Set, list[float]] = {}
    sizes: dict[Set, int] = {}
    hidden = [[each.clone() for each in blocks.hidden[:_WINDOWS]]]  # before each block and after the last
    for block in blocks:
        hidden.append([block.run(each) for each in hidden[-1]])
    with blocks.head() as head:
        slopes = _slopes_of_logits(head.logits, hidden[-1])
        if outside is not None:
            squares[outside.head] = _mean_square(head.inputs(hidden[-1]))
            tokens = blocks.windows[:_WINDOWS]
            table, of_head = head.embedding.weight.data[tokens], head.linear.weight.data[tokens]
    for number in reversed(range(blocks.count)):
        outputs = hidden.pop()
        with blocks.block(number) as block:
            watch = watched(block, hidden[-1])
            for names, moments in zip(watch.sets, watch.moments, strict=True):
                taken = tuple(name for name in names if name in menus)
                if taken:
                    damage[taken] = _damage(block, taken, menus[taken[0]], moments, hidden[-1], outputs, slopes)
                    sizes[taken] = sum(block.linears[name].weight.numel() for name in taken)
            slopes = [_slopes_before(block, each, slope) for each, slope in zip(hidden[-1], slopes, strict=True)]
    if outside is not None:
        given = torch.stack([each[0] for each in hidden[0]])
        factor = float((given * table).sum() / table.square().sum())  # some models multiply what they look up
        of_embedding = _mean_square([factor * each[0] for each in slopes])
        squares[outside.embedding] = squares.get(outside.embedding, 0.0) + of_embedding
        for name, rows in ((outside.head, of_head), (outside.embedding, table)):
            some = rows.flatten(0, 1)[:: max(rows.shape[0] * rows.shape[1] // _ROWS, 1)]
            damage[name,] = _damage_of_rows(some, menus[name], squares[name])
            sizes[name,] = outside.weights
    return damage, sizes


@torch.enable_grad()
def _slopes_of_logits(head: Callable[[Tensor], Tensor], hidden: list[Tensor]) -> list[Tensor]:
    """Of each window, the derivative by each token's hidden state of the log-likelihood of a next token.

    The next token is drawn from what the model says: then the mean square of the derivative in a direction is the
    curvature of the Kullback-Leibler divergence there (the Fisher information).
    """
    made = torch.Generator().manual_seed(0)
    found = []
    for each in hidden:
        given = each.clone().requires_grad_()
        likely = torch.log_softmax(head(given), -1)
        drawn = torch.multinomial(likely.detach().exp(), 1, generator=made)
        (slope,) = torch.autograd.grad(likely.gather(1, drawn).sum(), given)
        found.append(slope)
    return found


@torch.enable_grad()
def _slopes_before(block: Block, hidden: Tensor, slope: Tensor) -> Tensor:
    """The derivative by a block's input, of what has `slope` as that by its output."""
    given = hidden.clone().requires_grad_()
    (found,) = torch.autograd.grad(block.run(given), given, slope)
    return found


def _mean_square(vectors: list[Tensor]) -> Tensor:
    together = torch.cat(vectors)
    return together.T @ together / len(together)


def _damage_of_rows(rows: Tensor, menu: Sequence[Grid], squares: Tensor) -> list[float]:
    """As `_damage`, of rows [count, cols] of head or embedding, each as often as it is met; errors made up for."""
    found = []
    for grid in menu:
        inputs = Inputs(squares.clone(), grid.width)
        off = compensated(rows, grid, inputs).values() - rows
        found.append(float(((off @ squares) * off).sum(1).double().mean()) / 2)
    return found


def _damage(
    block: Block,
    names: Set,
    menu: Sequence[Grid],
    moments: Tensor,
    hidden: list[Tensor],
    outputs: list[Tensor],
    slopes: list[Tensor],
) -> list[float]:
    """What each grid does to the next token: measured for the first, the others by their errors.

    In nats a token: half the mean square of what the change of the block's output does to the log-likelihood.
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
    for given, wanted, slope in zip(hidden, outputs, slopes, strict=True):
        off = ((block.run(given) - wanted) * slope).sum(-1)
        changed += float(off.double().square().mean()) / 2 / len(hidden)
    for name, weight in kept.items():
        block.linears[name].weight.data = weight
    return [changed * error / max(errors[0], 1e-30) for error in errors]


def spent(
    damage: Mapping[Set, Sequence[float]], bits: Mapping[Set, Sequence[float]], sizes: Mapping[Set, int], target: float
) -> dict[Set, int]:
    """Which entry each set takes: bits go, step by step, to where one spares most damage."""
    chosen = dict.fromkeys(damage, 0)
    total = sum(sizes[names] for names in damage)
    left = target * total - sum(bits[names][0] * sizes[names] for names in damage)
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
